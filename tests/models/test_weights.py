"""Files → parameters: every form of file, every fault named, and no second copy in memory."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import lorakeet.models.weights as weights_module
from lorakeet.models.config import UnsupportedModelError, load_config
from lorakeet.models.kv_cache import allocate_kv_cache, kv_block_bytes
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.parallel import Piece
from lorakeet.models.weights import WeightsError, load_model, resolve_dtype
from support.models import KINDS, tiny_model
from support.passes import Passes

TOKENS = [5, 300, 17, 17, 42, 8]


def logits(model: LlamaForCausalLM) -> Tensor:
    passes = Passes(model)
    passes.run({"a": TOKENS})
    return passes.logits["a"]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def resave(folder: Path, target: Path, **options: Any) -> Path:
    dtype = options.pop("dtype", torch.float32)
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(target, **options)
    return target


class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_tensor_has_its_place(self, tmp_path: Path, kind: str) -> None:
        folder = tiny_model(tmp_path, kind)
        model = weights_module.empty_model(load_config(folder), torch.device("cpu"), torch.float32)
        weights_module.load_weights(model, folder)
        named = dict(weights_module._destinations(model))
        tensors = tensors_of(folder)
        assert named.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(named[name].view, tensor), name
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_shards(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path / "one")
        shards = resave(folder, tmp_path / "many", max_shard_size="100KB")
        assert len(list(shards.glob("*.safetensors"))) > 2
        assert torch.equal(logits(load_model(shards, "cpu")), logits(load_model(folder, "cpu")))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_16_bit_files(self, tmp_path: Path, dtype: torch.dtype) -> None:
        saved = resave(tiny_model(tmp_path / "32"), tmp_path / "16", dtype=dtype)
        assert {tensor.dtype for tensor in tensors_of(saved).values()} == {dtype}
        model = load_model(saved, "cpu")
        assert model.dtype == torch.float32
        reference = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        with torch.no_grad():
            expected = reference(torch.tensor([TOKENS])).logits[0]
        torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=0)
        kept = load_model(saved, "cpu", str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
        assert kept.dtype == logits(kept).dtype == dtype

    def test_packed_weights_give_the_same_logits(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path)
        plain = weights_module.empty_model(load_config(folder), torch.device("cpu"), torch.float32)
        weights_module.load_weights(plain, folder)
        packed = load_model(folder, "cpu")
        assert packed.get_parameter("model.layers.0.mlp.down_proj.weight").is_mkldnn
        assert packed.lm_head.packed is not None
        torch.testing.assert_close(logits(packed), logits(plain), atol=1e-5, rtol=0)

    def test_tied_head_is_one_tensor(self, tmp_path: Path) -> None:
        model = load_model(tiny_model(tmp_path, "llama_tied"), "cpu")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert "lm_head.weight" not in dict(model.named_parameters())

    def test_tied_head_saved_twice(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path, "llama_tied")
        expected = logits(load_model(folder, "cpu"))
        rewrite(
            folder,
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
        )
        assert torch.equal(logits(load_model(folder, "cpu")), expected)

    def test_rotary_buffers_are_ignored(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path)
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        rewrite(folder, lambda t: t.update({name: torch.ones(8)}))
        load_model(folder, "cpu")


Q, HEAD, EMBEDDING = (
    "model.layers.1.self_attn.q_proj.weight",
    "lm_head.weight",
    "model.embed_tokens.weight",
)
CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    f"1 tensors are missing.*{Q}": lambda t: t.pop(Q),
    f"1 tensors are missing.*{HEAD}": lambda t: t.pop(HEAD),
    r"no place for tensor model\.layers\.3\.": lambda t: t.update(
        {"model.layers.3.mlp.up_proj.weight": t["model.layers.2.mlp.up_proj.weight"].clone()}
    ),
    r"no place for tensor .*q_proj\.bias": lambda t: t.update(
        {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}
    ),
    rf"{Q} has shape \(32, 64\)": lambda t: t.update({Q: t[Q][:32].clone()}),
    rf"{EMBEDDING} has shape \(300, 64\)": lambda t: t.update({EMBEDDING: torch.zeros(300, 64)}),
    f"{Q} is of type I8": lambda t: t.update({Q: t[Q].to(torch.int8)}),
    f"{Q} is of type F8_E4M3": lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}),
}


class TestRefusals:
    @pytest.mark.parametrize("message", CHANGES)
    def test_tensors_that_do_not_fit(self, tmp_path: Path, message: str) -> None:
        folder = rewrite(tiny_model(tmp_path), CHANGES[message])
        with pytest.raises(WeightsError, match=message):
            load_model(folder, "cpu")

    def test_tied_head_with_values_of_its_own(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path, "llama_tied")
        rewrite(folder, lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
        with pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
            load_model(folder, "cpu")

    def test_no_weights(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(WeightsError, match="holds neither"):
            load_model(folder, "cpu")

    @pytest.mark.parametrize("size", [0, 8, 200, -1])
    def test_cut_file(self, tmp_path: Path, size: int) -> None:
        folder = tiny_model(tmp_path)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(WeightsError, match=r"Cannot read .*model\.safetensors"):
            load_model(folder, "cpu")

    def test_missing_shard(self, tmp_path: Path) -> None:
        shards = resave(tiny_model(tmp_path / "one"), tmp_path / "many", max_shard_size="100KB")
        lost = sorted(shards.glob("*.safetensors"))[1]
        lost.unlink()
        with pytest.raises(WeightsError, match=lost.name):
            load_model(shards, "cpu")

    @pytest.mark.parametrize(
        "index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}"]
    )
    def test_broken_index(self, tmp_path: Path, index: str) -> None:
        folder = tiny_model(tmp_path)
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(WeightsError, match=r"index\.json"):
            load_model(folder, "cpu")

    def test_index_that_leaves_the_folder(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path / "model")
        (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
        index = {"weight_map": {Q: "../model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(WeightsError, match="not in the folder"):
            load_model(folder, "cpu")

    def test_config_comes_first(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModelError):
            load_model(tmp_path, "cpu")


class TestDummy:
    def test_needs_no_files_and_is_the_same_each_time(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path, "llama_bias")
        (folder / "model.safetensors").unlink()
        first, second = (load_model(folder, "cpu", load_format="dummy") for _ in range(2))
        result = logits(first)
        assert torch.equal(result, logits(second))
        assert 0.3 < result.std() < 3
        assert len(set(result.argmax(-1).tolist())) > 1

    def test_16_bit(self, tmp_path: Path) -> None:
        model = load_model(tiny_model(tmp_path), "cpu", "bfloat16", load_format="dummy")
        assert logits(model).isfinite().all()


def test_dtype_auto(tmp_path: Path) -> None:
    config = load_config(tiny_model(tmp_path))
    assert config.dtype == "float32"
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype(config, cpu, "auto") == torch.float32
    assert resolve_dtype(config, cuda, "auto") == torch.bfloat16
    assert resolve_dtype(config, cuda, "float32") == torch.float32
    saved = resave(tmp_path, tmp_path / "16", dtype=torch.float16)
    assert resolve_dtype(load_config(saved), cuda, "auto") == torch.float16
    assert resolve_dtype(load_config(saved), cpu, "auto") == torch.float32


def test_bytes_of_a_block(tmp_path: Path) -> None:
    config = load_config(tiny_model(tmp_path, "odd_head_dim"))
    cache = allocate_kv_cache(config, 7, 16, torch.bfloat16, "cpu")
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 7 * kv_block_bytes(config, 16, torch.bfloat16)
    assert cache.layers[0].keys.shape == (7, 16, 2, 24)


MEASURE = """
import sys
from pathlib import Path
import psutil
from lorakeet.models.weights import load_model

def peak():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) * 1024

load_model(Path(sys.argv[1]), "cpu")  # a tiny one, so that libraries are there
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = psutil.Process().memory_info().rss
model = load_model(Path(sys.argv[2]), "cpu")
size = sum(parameter.nbytes for parameter in model.parameters())
print(size, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_while_loading(tmp_path: Path, dtype: torch.dtype) -> None:
    """The peak is little above the model itself (200 MB) and the pages of the mapped tensors that
    are read at a time."""
    tiny = tiny_model(tmp_path / "tiny")
    large = tiny_model(
        tmp_path / "large", hidden_size=1024, intermediate_size=4096, num_hidden_layers=3
    )
    if dtype != torch.float32:
        large = resave(large, tmp_path / "16", dtype=dtype)
    command = [sys.executable, "-c", MEASURE, str(tiny), str(large)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    size, grown = map(int, output.split())
    largest = max(tensor.nbytes for tensor in tensors_of(large).values())
    assert size > 180e6
    assert grown < 1.1 * size + weights_module.READERS * largest


def test_tensors_are_read_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are readers; after one that is bad no more are begun."""
    num_readers = weights_module.READERS
    begun, together = [], threading.Barrier(num_readers)

    def fill(file: Path, name: str, piece: Piece) -> None:
        begun.append(name)
        if len(begun) <= num_readers:
            together.wait(timeout=20)
        else:
            time.sleep(0.2)
        raise WeightsError(f"{name} is bad")

    monkeypatch.setattr(weights_module, "_fill", fill)
    with pytest.raises(WeightsError, match=r"is bad$"):
        load_model(tiny_model(tmp_path / "model", num_hidden_layers=8), "cpu")
    assert len(begun) <= 3 * num_readers
    assert not [one for one in threading.enumerate() if one.name.startswith("weight-reader")]


@pytest.mark.parametrize("damage", ["shorter", "garbled", "other tensors", "gone", "failing disk"])
def test_a_file_that_goes_bad_while_it_is_read_is_named(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(tmp_path / "model")
    file = folder / "model.safetensors"
    fill = weights_module._fill

    def bad(path: Path, name: str, piece: Piece) -> None:
        if damage == "failing disk":
            monkeypatch.setattr(weights_module, "safe_open", failing)
        elif damage == "gone":
            path.unlink(missing_ok=True)
        else:
            contents = {"shorter": save({}), "garbled": b"\xff" * 4096}
            path.write_bytes(contents.get(damage) or save({"other": torch.zeros(3)}))
        fill(path, name, piece)

    def failing(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(weights_module, "_fill", bad)
    with pytest.raises(WeightsError, match=re.escape(str(file))):
        load_model(folder, "cpu")


def test_a_file_that_may_not_be_read_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(tmp_path / "model")
    file, opened = folder / "model.safetensors", Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(WeightsError, match="Permission denied"):
        load_model(folder, "cpu")


def test_a_tensor_in_two_files_is_refused_by_their_names(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    name = "model.norm.weight"
    save_file(tensors, folder / "a.safetensors")
    save_file({name: tensors[name]}, folder / "b.safetensors")
    index = {"weight_map": {name: "b.safetensors"} | dict.fromkeys(tensors, "a.safetensors")}
    index["weight_map"]["again"] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=rf"b\.safetensors: .* {name}: a\.safetensors has it"):
        load_model(folder, "cpu")


def test_an_index_that_names_what_no_file_can_be_called(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    index = json.dumps({"weight_map": {"model.norm.weight": 300 * "x"}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        load_model(folder, "cpu")
