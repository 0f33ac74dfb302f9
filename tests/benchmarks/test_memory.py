"""The files for 70B models: what they take of each GPU, worked out in two ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorakeet.configs import settings
from lorakeet.server.engine.memory import ADDED_TOKENS

GiB = 2**30
GPU = 80 * GiB
CONFIGS = Path(settings.__file__).parent

# of Llama-3.1-70B
LAYERS, HIDDEN, MLP, VOCAB, HEADS, KV_HEADS, HEAD = 80, 8192, 28672, 128256, 64, 8, 128
BF16 = 2


@pytest.fixture
def memory(script: Callable[[str], Any]) -> Any:
    return script("memory")


@pytest.mark.parametrize("size", [4, 8])
def test_a_70b_model_fits_with_room_for_its_work(memory: Any, size: int) -> None:
    loaded = settings.load(CONFIGS / f"llama-3.1-70b-tp{size}.yaml")
    assert loaded.tensor_parallel_size == size
    found = memory.rank_memory(loaded, size - 1, GPU, 6 * GiB)
    q, kv, mlp = HEADS * HEAD // size, KV_HEADS * HEAD // size, MLP // size
    layer = HIDDEN * (q + 2 * kv) + q * HIDDEN + 3 * mlp * HIDDEN + 2 * HIDDEN
    assert VOCAB % size == 0
    values = LAYERS * layer + 2 * VOCAB // size * HIDDEN + HIDDEN
    assert found.weights == pytest.approx(BF16 * values, rel=1e-4)  # beside it, rotary tables
    assert found.token == 2 * LAYERS * kv * BF16
    a = 3 * HIDDEN + q + 2 * HIDDEN + mlp
    b = q + 2 * kv + HIDDEN + 2 * mlp + HIDDEN
    assert found.row == BF16 * (LAYERS * (a + b) + (VOCAB + HIDDEN) + (HIDDEN + VOCAB // size))
    assert loaded.lora_memory is not None
    assert 0 <= loaded.lora_memory - found.adapter_pool < found.row
    used = found.weights + found.adapter_pool + found.adapter_vocabularies + found.allowance
    assert used + found.kv_cache == int(0.9 * GPU)
    assert loaded.max_model_len is not None
    assert found.tokens >= 16 * loaded.max_model_len  # 16 of the longest sequences at once
    assert found.rows >= 16 * loaded.max_lora_rank or found.rows >= 64 * 16


def test_rank_0_alone_counts_tokens(memory: Any) -> None:
    loaded = settings.load(CONFIGS / "llama-3.1-70b-tp8.yaml")
    first, last = (memory.rank_memory(loaded, rank, GPU, 6 * GiB) for rank in (0, 7))
    assert (first.token_counts, last.token_counts) == (4 * 256 * (VOCAB + ADDED_TOKENS), 0)
    assert last.kv_cache - first.kv_cache == first.token_counts


def test_the_command_prints_it(memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = CONFIGS / "llama-3.1-70b-tp8.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["memory.py", str(file), "--gpu", "141GiB"])
        memory.main()
    printed = capsys.readouterr().out
    assert "each of 8 ranks" in printed
    assert "16.4" in printed  # GiB of weights
    assert "token counts              0.12 GiB" in printed


def test_settings_that_say_too_little(memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["memory.py", str(CONFIGS / "demo.yaml")])
        with pytest.raises(SystemExit, match="1"):
            memory.main()
    assert "demo.yaml: only for settings that name a model and lora_memory" in (
        capsys.readouterr().err
    )


def test_what_the_files_say_of_memory(memory: Any) -> None:
    loaded = settings.load(CONFIGS / "llama-3.1-8b.yaml")
    adapters = memory.rank_memory(loaded, 0, GPU, 6 * GiB).rows // 16
    assert (
        f"a pool for {adapters} adapters of rank 16" in (CONFIGS / "llama-3.1-8b.yaml").read_text()
    )
    loaded = settings.load(CONFIGS / "llama-3.1-70b-tp4.yaml")
    weights = memory.rank_memory(loaded, 0, GPU, 6 * GiB).weights / GiB
    assert f"{weights:.0f} GiB of each are" in (CONFIGS / "llama-3.1-70b-tp4.yaml").read_text()
