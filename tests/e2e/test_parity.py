"""A real engine, adapters of every kind at once, beside base requests: PEFT's numbers, each time.

The oracle is PEFT in float32, one prompt at a time. The engine has few places, few rank rows and a
small token budget: prompts are computed in chunks, adapters wait and come and go, every pass mixes.
"""

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakeet.lora.pool import bytes_per_row
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from lorakeet.models.kv_cache import kv_block_bytes
from lorakeet.server.engine.inline import InlineEngine
from lorakeet.server.engine.messages import AddRequest, SamplingParams, TokenLogprob
from lorakeet.server.tokens import Tokenizer
from support.adapter_kinds import AdapterCase, adapters_of_every_kind
from support.adapters import peft_logprobs
from support.engines import Collected, cpu_settings
from support.models import KINDS, TOKENIZER_SIZE, VOCAB_SIZE, tiny_model
from support.servers import serve

TOLERANCE = 1e-3
NUM_TOKENS = 32
BLOCK_SIZE = 4
NUM_TOP = 3


@dataclass(frozen=True)
class Tenant:
    """Who asks: an adapter, or the base model."""

    adapter_id: int
    oracle: Path | None


def prompts_for(kind: str) -> list[list[int]]:
    """All requests share them: KV of another adapter would be found if it were looked for."""
    lengths = (5, 17, 31) if kind == "rope_dynamic" else (5, 18, 70)  # it has 64 positions
    generator = random.Random(kind)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def small_engine(model: Path, **settings: Any) -> InlineEngine:
    row_bytes = bytes_per_row(group_specs(load_config(model)), torch.float32)
    small = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 24,
        "block_size": BLOCK_SIZE,
        "max_loras": 4,
        "lora_memory": 90 * row_bytes,  # of some 300 that all adapters have
    }
    return InlineEngine(cpu_settings(model, **(small | settings)))


async def ask(
    engine: InlineEngine, tenant: Tenant, prompt: list[int], **sampling: Any
) -> Collected:
    params = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": NUM_TOP}
    name = f"{tenant.adapter_id}-{len(prompt)}-{sampling}"
    request = AddRequest(name, prompt, SamplingParams(**(params | sampling)), tenant.adapter_id)
    collected = Collected()
    async for output in engine.generate(request):
        collected.take(output)
    assert (collected.error, collected.finish_reason) == (None, "length")
    return collected


async def ask_all(
    engine: InlineEngine, tenants: Sequence[Tenant], prompts: list[list[int]], **sampling: Any
) -> list[Collected]:
    """Everybody asks every prompt, at the same time; in the order of tenants, then prompts."""
    return await asyncio.gather(
        *(ask(engine, tenant, prompt, **sampling) for tenant in tenants for prompt in prompts)
    )


async def load_all(engine: InlineEngine, cases: Sequence[AdapterCase]) -> list[Tenant]:
    """The adapters, with the base between them."""
    for adapter_id, case in enumerate(cases, start=1):
        await engine.load_adapter(adapter_id, str(case.folder))
    tenants = [Tenant(adapter_id, case.oracle) for adapter_id, case in enumerate(cases, start=1)]
    return [*tenants[:7], Tenant(0, None), *tenants[7:]]


def difference(oracle: Tensor, scores: Sequence[TokenLogprob | None]) -> float:
    """The largest, over tokens and their likeliest others. `oracle`: (tokens, vocab)."""
    worst = 0.0
    assert len(oracle) == len(scores)
    for row, score in zip(oracle, scores, strict=True):
        assert score is not None
        for token_id, logprob in [(score.token_id, score.logprob), *score.top]:
            worst = max(worst, abs(float(row[token_id]) - logprob))
    return worst


def check(
    model: Path, tenant: Tenant, prompt: list[int], result: Collected, vocab_size: int = VOCAB_SIZE
) -> float:
    """Greedy tokens below `vocab_size`, their scores, and those of the prompt if it was scored.

    Returns the largest difference.
    """
    assert len(result.token_ids) == NUM_TOKENS
    token_ids = prompt + result.token_ids
    oracle = peft_logprobs(model, tenant.oracle, token_ids)[:-1]
    generated = oracle[len(prompt) - 1 :]
    chosen = generated[torch.arange(NUM_TOKENS), torch.tensor(result.token_ids)]
    likeliest = generated[:, :vocab_size].max(dim=-1).values
    assert (likeliest - chosen).max() < TOLERANCE, "not the likeliest token"
    assert [score.token_id for score in result.logprobs] == result.token_ids
    worst = difference(generated, result.logprobs)
    if result.prompt_logprobs is not None:
        assert result.prompt_logprobs[0] is None
        scored = [score.token_id for score in result.prompt_logprobs[1:] if score is not None]
        assert scored == prompt[1:]
        worst = max(worst, difference(oracle[: len(prompt) - 1], result.prompt_logprobs[1:]))
    assert worst < TOLERANCE
    if tenant.oracle is not None:  # the control: the base model would not pass
        base = peft_logprobs(model, None, token_ids)[:-1]
        assert (base - oracle).abs().max() > 50 * TOLERANCE
    return worst


def check_again(result: Collected, checked: Collected) -> bool:
    """The same tokens and scores as one that is checked. False: a near tie went the other way."""
    if result.token_ids != checked.token_ids:
        return False
    pairs = zip(result.logprobs, checked.logprobs, strict=True)
    assert all(abs(one.logprob - other.logprob) < TOLERANCE for one, other in pairs)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_all_adapters_at_once_are_each_as_with_peft(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", kind)
    prompts = prompts_for(kind)
    cases = adapters_of_every_kind(tmp_path, model)

    async def serve_all() -> tuple[list[Tenant], list[list[Collected]]]:
        engine = small_engine(model)
        await engine.start()
        try:
            tenants = await load_all(engine, cases)
            cold = await ask_all(engine, tenants, prompts)
            warm = await asyncio.gather(
                ask_all(engine, tenants, prompts),
                ask_all(engine, tenants, prompts, prompt_logprobs=NUM_TOP),
            )
        finally:
            await engine.shutdown()
        return tenants, [cold, *warm]

    tenants, (cold, warm, scored) = asyncio.run(serve_all())
    asked = [(tenant, prompt) for tenant in tenants for prompt in prompts]
    worst = 0.0
    for (tenant, prompt), first, second, third in zip(asked, cold, warm, scored, strict=True):
        whole_blocks = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert (first.cached_tokens, second.cached_tokens) == (0, whole_blocks)
        worst = max(worst, check(model, tenant, prompt, third))
        for result in (first, second):
            if not check_again(result, third):
                check(model, tenant, prompt, result)
    print(f"\n{kind}: largest difference {worst:.1e} over {len(asked)} requests")


def test_preempted_requests_are_as_with_peft(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    prompts = prompts_for("llama")
    cases = adapters_of_every_kind(tmp_path, model)[::3]
    block_bytes = kv_block_bytes(load_config(model), BLOCK_SIZE, torch.float32)

    async def serve_all() -> tuple[list[Tenant], list[Collected], int]:
        engine = small_engine(model, max_model_len=104, cpu_kv_memory=40 * block_bytes)
        await engine.start()
        try:
            tenants = await load_all(engine, cases)
            results = await ask_all(engine, tenants, prompts, prompt_logprobs=NUM_TOP)
            while engine.stats.kv_blocks_used or not engine.stats.num_steps:
                await asyncio.sleep(0.05)
            return tenants, results, engine.stats.num_preemptions
        finally:
            await engine.shutdown()

    tenants, results, num_preemptions = asyncio.run(serve_all())
    assert num_preemptions > 0
    asked = [(tenant, prompt) for tenant in tenants for prompt in prompts]
    for (tenant, prompt), result in zip(asked, results, strict=True):
        check(model, tenant, prompt, result)


@pytest.mark.parametrize("kind", ["llama_tied", "qwen2", "qwen3"])
def test_over_http_as_with_peft(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", kind)
    cases = adapters_of_every_kind(tmp_path / "adapters", model)
    generator = random.Random(kind)
    prompts = [[generator.randrange(TOKENIZER_SIZE) for _ in range(length)] for length in (7, 40)]
    tenants = {"base": Tenant(0, None)} | {case.name: Tenant(0, case.oracle) for case in cases}
    options = "--device cpu --served-model-name base --max-loras 2 --max-num-batched-tokens 24"
    asked = [(name, prompt) for name in tenants for prompt in prompts]
    # an answer tells tokens by their text: only those that have one
    bias = {str(token_id): -100 for token_id in range(TOKENIZER_SIZE, VOCAB_SIZE)}
    fields = {"max_tokens": NUM_TOKENS, "prompt_logprobs": 0, "logit_bias": bias}

    with (
        serve(tmp_path, model, *options.split(), "--adapter-dir", str(tmp_path / "adapters")) as s,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        futures = [threads.submit(s.complete, name, prompt, **fields) for name, prompt in asked]
        choices = [future.result()["choices"][0] for future in futures]

    tokenizer = Tokenizer(model)
    worst = max(
        check(model, tenants[name], prompt, collected(tokenizer, choice, prompt), TOKENIZER_SIZE)
        for (name, prompt), choice in zip(asked, choices, strict=True)
    )
    print(f"\n{kind} over HTTP: largest difference {worst:.1e} over {len(asked)} requests")


def collected(tokenizer: Tokenizer, choice: dict[str, Any], prompt: list[int]) -> Collected:
    """A choice of an answer over HTTP as what the engine gave."""
    ids = {tokenizer.token_text(token_id): token_id for token_id in range(TOKENIZER_SIZE)}
    token_ids = [ids[text] for text in choice["logprobs"]["tokens"]]
    logprobs = choice["logprobs"]["token_logprobs"]
    scores = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    return Collected(
        token_ids=token_ids,
        logprobs=[TokenLogprob(*one, []) for one in zip(token_ids, logprobs, strict=True)],
        prompt_logprobs=[
            None,
            *(TokenLogprob(token, score[str(token)]["logprob"], []) for token, score in scores),
        ],
    )
