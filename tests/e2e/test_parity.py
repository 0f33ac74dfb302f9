"""A real engine, adapters of every kind at once, beside base requests: PEFT's numbers, each time.

The oracle is PEFT in float32, one prompt at a time. The engine has few places, few rank rows and a
small token budget: prompts are computed in chunks, adapters wait and come and go, every pass mixes.
"""

import asyncio
import random
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakeet.lora.pool import bytes_per_row
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from lorakeet.models.kv_cache import kv_block_bytes
from lorakeet.server.engine.inline import InlineEngine
from lorakeet.server.engine.messages import AddRequest, EngineStats, SamplingParams
from lorakeet.server.tokens import Tokenizer
from support.adapter_kinds import AdapterCase, adapters_of_every_kind
from support.engines import Collected, cpu_settings, report
from support.models import KINDS, TOKENIZER_SIZE, VOCAB_SIZE, tiny_model
from support.parity import ONLY_TEXT, agrees, check, collected
from support.servers import serve

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
        "max_num_seqs": 96,  # and KV blocks for all that they may compute
        "max_num_batched_tokens": 24,
        "block_size": BLOCK_SIZE,
        "max_loras": 4,
        "lora_memory": 90 * row_bytes,  # of some 350 that all adapters have
    }
    return InlineEngine(cpu_settings(model, **(small | settings)))


async def ask(
    engine: InlineEngine, tenant: Tenant, prompt: list[int], **sampling: Any
) -> Collected:
    params = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": NUM_TOP}
    name = uuid.uuid4().hex
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


async def idle_stats(engine: InlineEngine) -> EngineStats:
    """A report from after all work; nothing may be held any more."""
    await report(engine)
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    return stats


async def load_all(engine: InlineEngine, cases: Sequence[AdapterCase]) -> list[Tenant]:
    """The adapters, with the base between them."""
    for adapter_id, case in enumerate(cases, start=1):
        await engine.load_adapter(adapter_id, str(case.folder))
    tenants = [Tenant(adapter_id, case.oracle) for adapter_id, case in enumerate(cases, start=1)]
    return [*tenants[:7], Tenant(0, None), *tenants[7:]]


@pytest.mark.parametrize("kind", KINDS)
def test_all_adapters_at_once_are_each_as_with_peft(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", kind)
    prompts = prompts_for(kind)
    cases = adapters_of_every_kind(tmp_path, model)

    async def serve_all() -> tuple[list[Tenant], list[list[Collected]]]:
        engine = small_engine(model)
        await engine.start(model)
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
        worst = max(worst, check(model, tenant.oracle, prompt, third))
        for result in (first, second):
            if not agrees(result, third):
                check(model, tenant.oracle, prompt, result)
    print(f"\n{kind}: largest difference {worst:.1e} over {len(asked)} requests")


def test_preempted_requests_are_as_with_peft(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    prompts = prompts_for("llama")
    cases = adapters_of_every_kind(tmp_path, model)[::3]
    block_bytes = kv_block_bytes(load_config(model), BLOCK_SIZE, torch.float32)

    async def serve_all() -> tuple[list[Tenant], list[Collected], int]:
        engine = small_engine(model, max_model_len=104, cpu_kv_memory=40 * block_bytes)
        await engine.start(model)
        try:
            tenants = await load_all(engine, cases)
            results = await ask_all(engine, tenants, prompts, prompt_logprobs=NUM_TOP)
            return tenants, results, (await idle_stats(engine)).num_preemptions
        finally:
            await engine.shutdown()

    tenants, results, num_preemptions = asyncio.run(serve_all())
    assert num_preemptions > 0
    asked = [(tenant, prompt) for tenant in tenants for prompt in prompts]
    for (tenant, prompt), result in zip(asked, results, strict=True):
        check(model, tenant.oracle, prompt, result)


@pytest.mark.parametrize("kind", ["llama_tied", "qwen2", "qwen3"])
def test_over_http_as_with_peft(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", kind)
    cases = adapters_of_every_kind(tmp_path / "adapters", model)
    generator = random.Random(kind)
    prompts = [[generator.randrange(TOKENIZER_SIZE) for _ in range(length)] for length in (7, 40)]
    tenants = {"base": None} | {case.name: case.oracle for case in cases}
    options = "--device cpu --served-model-name base --max-loras 2 --max-num-batched-tokens 24"
    asked = [(name, prompt) for name in tenants for prompt in prompts]
    fields = {"max_tokens": NUM_TOKENS, "prompt_logprobs": 0, "logit_bias": ONLY_TEXT}

    with (
        serve(tmp_path, model, *options.split(), "--adapter-dir", str(tmp_path / "adapters")) as s,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        futures = [threads.submit(s.complete, name, prompt, **fields) for name, prompt in asked]
        choices = [future.result()["choices"][0] for future in futures]

    tokenizer = Tokenizer(model)
    worst = max(
        check(model, tenants[name], prompt, collected(choice, prompt, tokenizer), TOKENIZER_SIZE)
        for (name, prompt), choice in zip(asked, choices, strict=True)
    )
    print(f"\n{kind} over HTTP: largest difference {worst:.1e} over {len(asked)} requests")


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_any_chunk_size(chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("chunks")
    model = tiny_model(root / "model", "mistral")
    chosen = ("all_linear", "embed_tokens", "dora_everything", "lora_bias")
    cases = [case for case in adapters_of_every_kind(root, model) if case.name in chosen]
    generator = random.Random(chunk)
    lengths = (1, 15, 16, 17, 33, 100)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]

    async def serve_all() -> list[tuple[Tenant, list[int], Collected]]:
        engine = small_engine(model, max_num_batched_tokens=chunk, block_size=16)
        await engine.start(model)
        try:
            tenants = [Tenant(0, None), *await load_all(engine, cases)]
            results = await ask_all(engine, tenants, prompts, max_tokens=6)
        finally:
            await engine.shutdown()
        asked = [(tenant, prompt) for tenant in tenants for prompt in prompts]
        return [(*one, result) for one, result in zip(asked, results, strict=True)]

    for tenant, prompt, result in asyncio.run(serve_all()):
        check(model, tenant.oracle, prompt, result)


def test_two_places_small_cache_and_clients_that_go(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    cases = adapters_of_every_kind(tmp_path, model)[::5]
    block_bytes = kv_block_bytes(load_config(model), BLOCK_SIZE, torch.float32)
    generator = random.Random(0)
    lengths = [generator.randrange(1, 70) for _ in range(60)]
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]

    async def leave(engine: InlineEngine, tenant: Tenant, prompt: list[int], after: int) -> None:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = AddRequest(f"leaves-{after}", prompt, params, tenant.adapter_id)
        async with aclosing(engine.generate(request)) as outputs, asyncio.timeout(after / 10):
            async for _ in outputs:
                await asyncio.sleep(0)

    async def serve_all() -> list[tuple[Tenant, list[int], Collected]]:
        engine = small_engine(model, max_loras=2, max_model_len=104, cpu_kv_memory=40 * block_bytes)
        await engine.start(model)
        try:
            tenants = await load_all(engine, cases)
            asked = [(tenants[i % len(tenants)], prompt) for i, prompt in enumerate(prompts)]
            stay, go = asked[::2], asked[1::2]
            leaving = [leave(engine, *one, after) for after, one in enumerate(go)]
            gone = asyncio.gather(*leaving, return_exceptions=True)
            results = await asyncio.gather(*(ask(engine, *one) for one in stay))
            assert {type(end) for end in await gone} <= {type(None), TimeoutError}
            assert (await idle_stats(engine)).num_preemptions > 0
        finally:
            await engine.shutdown()
        return [(*one, result) for one, result in zip(stay, results, strict=True)]

    for tenant, prompt, result in asyncio.run(serve_all()):
        check(model, tenant.oracle, prompt, result)
