"""Engines on two GPUs, with graphs and steps in flight: every kind of adapter in one batch."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorakeet.server.engine.messages import AddRequest, SamplingParams
from lorakeet.server.engine.process_client import EngineProcess
from support.adapter_kinds import AdapterCase, adapters_of_every_kind
from support.adapters import peft_logprobs
from support.engines import Collected, cpu_settings
from support.models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

KINDS = ["llama", "llama_tied", "qwen2"]
NUM_TOKENS = 24  # each a decode step, most of them for all adapters
MARGIN = 1.2  # over the error on one GPU: partial sums are rounded before they are summed up

Case = AdapterCase | None  # None: the base model


@pytest.mark.parametrize("kind", KINDS)
def test_float32_equals_peft(kind: str, tmp_path: Path) -> None:
    model, cases = make_files(kind, tmp_path)
    results = asyncio.run(answers(model, cases, 2, "float32"))
    for number, (case, result) in enumerate(zip(cases, results, strict=True)):
        errors = errors_of(model, case, prompt_of(number), result)
        assert errors.max() < 1e-3, "base" if case is None else case.name


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_close_as_on_one_gpu(kind: str, tmp_path: Path) -> None:
    model, cases = make_files(kind, tmp_path)
    mean = {}
    for size in (1, 2):
        results = asyncio.run(answers(model, cases, size, "bfloat16"))
        mean[size] = torch.stack(
            [
                errors_of(model, case, prompt_of(number), result).mean()
                for number, (case, result) in enumerate(zip(cases, results, strict=True))
            ]
        )
    print(f"{kind}: mean error {mean[1].mean():.4f} on one GPU, {mean[2].mean():.4f} on two")
    assert mean[2].mean() < MARGIN * mean[1].mean()
    assert (mean[2] < 2 * mean[1] + 0.01).all()


def make_files(kind: str, folder: Path) -> tuple[Path, list[Case]]:
    model = tiny_model(folder / "model", kind, hidden_size=256, intermediate_size=512)
    return model, [None, *adapters_of_every_kind(folder / "adapters", model)]


def prompt_of(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    tokens: list[int] = torch.randint(3, 300, (20 + 3 * number,), generator=generator).tolist()
    return tokens


async def answers(model: Path, cases: Sequence[Case], size: int, dtype: str) -> list[Collected]:
    """Of all cases at once, greedy, each with its own prompt; scores of prompts and answers."""
    engine = EngineProcess(
        cpu_settings(
            model,
            device="cuda",
            dtype=dtype,
            block_size=16,
            gpu_memory_utilization=0.2,
            max_loras=len(cases),
            max_num_seqs=32,
            max_num_batched_tokens=160,  # each size of a graph compiles kernels
            tensor_parallel_size=size,
        )
    )
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )

    async def ask(number: int) -> Collected:
        result = Collected()
        request = AddRequest(str(number), prompt_of(number), params, adapter_id=number)
        async for output in engine.generate(request):
            result.take(output)
        assert result.error is None
        return result

    await engine.start(model)
    try:
        for number, case in enumerate(cases):
            if case is not None:
                await engine.load_adapter(number, str(case.folder))
        return await asyncio.gather(*map(ask, range(len(cases))))
    finally:
        await engine.shutdown()


def errors_of(model: Path, case: Case, prompt: list[int], result: Collected) -> Tensor:
    """How far each token's log-probability is from PEFT's in float32."""
    tokens = prompt + result.token_ids
    exact = peft_logprobs(model, None if case is None else case.oracle, tokens)
    scores = [*(result.prompt_logprobs or [])[1:], *result.logprobs]
    assert len(scores) == len(tokens) - 1
    ours = torch.tensor([score.logprob for score in scores if score is not None])
    return (exact[torch.arange(len(ours)), torch.tensor(tokens[1:])] - ours).abs()
