"""The runner on a GPU: results against PEFT in float32, and the memory that it keeps to."""

from pathlib import Path

import pytest
import torch

from support.adapters import make_adapter, peft_greedy, peft_logprobs
from support.engines import StepEngine
from support.models import tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "model", hidden_size=128)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 512])
def test_mixed_batch_equals_peft(model: Path, max_num_batched_tokens: int) -> None:
    paths: list[Path | None] = [None]
    for seed in (1, 2):
        folder = model.parent / f"adapter-{seed}"
        paths.append(make_adapter(folder, model, seed=seed, r=4 * seed))
    engine = StepEngine(
        model,
        device="cuda",
        dtype="float32",
        block_size=16,
        gpu_memory_utilization=0.2,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    for path in paths[1:]:
        assert path is not None
        engine.load(path)
    prompts = [[3 + n, 4, 5] * (1 + 9 * n) for n in range(6)]
    for n, prompt in enumerate(prompts):
        engine.add(str(n), prompt, n % 3, max_tokens=6, logprobs=0, prompt_logprobs=0)
    results = engine.run()
    for n, prompt in enumerate(prompts):
        result, path = results[str(n)], paths[n % 3]
        assert result.token_ids == peft_greedy(model, path, prompt, 6)
        expected = peft_logprobs(model, path, prompt + result.token_ids)
        scores = [*(result.prompt_logprobs or [])[1:], *result.logprobs]
        for row, score in zip(expected, scores, strict=False):
            assert score is not None
            assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-3)


def test_full_batches_stay_inside_the_memory_that_was_allowed(tmp_path: Path) -> None:
    """With the largest adapter on every module, and the longest prompts, as many as may run."""
    model = tiny_model(
        tmp_path / "model",
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=8,
        max_position_embeddings=4096,
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    targets += ["embed_tokens", "lm_head"]
    adapter = make_adapter(tmp_path / "adapter", model, r=64, target_modules=targets)
    torch.cuda.empty_cache()
    in_use = torch.cuda.device_memory_used()
    total = torch.cuda.mem_get_info()[1]
    share = (in_use + 6 * 2**30) / total
    engine = StepEngine(
        model,
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=share,
    )
    engine.load(adapter)
    torch.cuda.reset_peak_memory_stats()
    prompt = [int(token) for token in torch.randint(3, 32000, (4000,))]
    sampling = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5}
    for n in range(64):
        engine.add(str(n), [n + 3, *prompt], 1, max_tokens=4, logprobs=20, **sampling)
    results = engine.run()
    assert all(result.finish_reason == "length" for result in results.values())
    # the allocator keeps some freed memory: what is promised is what tensors take
    outside = torch.cuda.device_memory_used() - torch.cuda.memory_reserved()
    assert torch.cuda.max_memory_allocated() + outside <= share * total * 1.02
