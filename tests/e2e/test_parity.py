"""A real engine, adapters of every kind at once, beside base requests: PEFT's numbers, each time.

The oracle is PEFT in float32, one prompt at a time. The engine has few places, few rank rows and a
small token budget: prompts are computed in chunks, adapters wait and come and go, every pass mixes.
"""

import asyncio
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
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
from lorakeet.server.engine.messages import AddRequest, EngineStats, SamplingParams
from lorakeet.server.engine.step import Step, StepResult
from lorakeet.server.tokens import Tokenizer
from support.adapter_kinds import AdapterCase, adapters_of_every_kind
from support.adapters import alora_logprobs, make_adapter, peft_logprobs
from support.blends import logprobs, summed_model
from support.engines import Collected, StepEngine, cpu_settings, report
from support.models import KINDS, TOKENIZER_SIZE, VOCAB_SIZE, tiny_model
from support.parity import ONLY_TEXT, TOLERANCE, agrees, check, check_scores, collected
from support.servers import serve
from support.vocabularies import KINDS as VOCABULARIES
from support.vocabularies import SHRUNK, make_vocabulary_adapter, vocabulary_logprobs

NUM_TOKENS = 16
BLOCK_SIZE = 4
NUM_TOP = 3
INVOCATION = [5, 6]  # of aLoRAs
BLENDS: list[dict[str, float]] = [
    {"all_linear": 0.7, "everything": -0.4},
    {"rslora": 0.5, "patterns": -0.6, "fused": 0.3, "q": 1.2},
    {"embed_tokens": 1.5, "lm_head": -0.8, "bias_lora_only": 0.6},
    {"float16": -0.9},
]
ALORAS: dict[str, dict[str, Any]] = {
    "alora": {"r": 6},
    "alora_bias": {"r": 3, "lora_bias": True, "target_modules": ["q_proj", "lm_head"]},
}
# a prompt for all; its last tokens are some that vocabularies train
COMMON = [*range(20, 27), *INVOCATION, *range(60, 69), 3, 7, 250]


@dataclass(frozen=True)
class Tenant:
    """Who asks: an adapter, or the base model."""

    adapter_id: int
    oracle: Path | None


@dataclass(frozen=True)
class Files:
    """A model and adapters of every kind, for all tests: nobody changes them."""

    model: Path
    adapters: Path
    cases: list[AdapterCase]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    @cache
    def make(kind: str) -> Files:
        folder = tmp_path_factory.mktemp(kind)
        model = tiny_model(folder / "model", kind)
        adapters = folder / "adapters"
        return Files(model, adapters, adapters_of_every_kind(adapters, model))

    return make


def prompts_for(kind: str) -> list[list[int]]:
    """All requests share them: KV of another adapter would be found if it were looked for."""
    lengths = (5, 17, 47) if kind == "rope_dynamic" else (5, 18, 70)  # it has 64 positions
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
def test_all_adapters_at_once_are_each_as_with_peft(
    kind: str, files: Callable[[str], Files]
) -> None:
    model, cases, prompts = files(kind).model, files(kind).cases, prompts_for(kind)

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


def test_preempted_requests_are_as_with_peft(files: Callable[[str], Files]) -> None:
    model, cases, prompts = files("llama").model, files("llama").cases[::3], prompts_for("llama")
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
def test_over_http_as_with_peft(kind: str, files: Callable[[str], Files], tmp_path: Path) -> None:
    model, cases = files(kind).model, files(kind).cases
    generator = random.Random(kind)
    prompts = [[generator.randrange(TOKENIZER_SIZE) for _ in range(length)] for length in (7, 40)]
    tenants = {"base": None} | {case.name: case.oracle for case in cases}
    options = "--device cpu --served-model-name base --max-loras 2 --max-num-batched-tokens 24"
    options += f" --adapter-dir {files(kind).adapters}"
    asked = [(name, prompt) for name in tenants for prompt in prompts]
    fields = {"max_tokens": NUM_TOKENS, "prompt_logprobs": 0, "logit_bias": ONLY_TEXT}

    with (
        serve(tmp_path, model, *options.split()) as s,
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
def test_any_chunk_size(chunk: int, files: Callable[[str], Files]) -> None:
    model = files("mistral").model
    chosen = ("all_linear", "embed_tokens", "dora_everything", "lora_bias")
    cases = [case for case in files("mistral").cases if case.name in chosen]
    generator = random.Random(chunk)
    lengths = (1, 15, 16, 17, 33, 70)
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


def test_two_places_small_cache_and_clients_that_go(files: Callable[[str], Files]) -> None:
    model, cases = files("llama").model, files("llama").cases[::5]
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


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    oracle: Callable[[list[int]], Tensor]  # token ids → log-probabilities (len, vocab)
    who: dict[str, Any]  # as `StepEngine.add` has it


def everyone(root: Path, files: Files, engine: StepEngine) -> Iterator[Asked]:
    """The base, adapters of every kind, also with own vocabularies, aLoRAs, blends."""
    model = files.model
    yield Asked(COMMON, partial(peft_logprobs, model, None), {})
    ids: dict[str, tuple[Path, int]] = {}
    for case in files.cases:
        ids[case.name] = case.oracle, engine.load(case.folder)
        oracle = partial(peft_logprobs, model, case.oracle)
        yield Asked(COMMON, oracle, {"adapter_id": ids[case.name][1]})
    for seed, (name, kind) in enumerate(VOCABULARIES.items()):
        folder = make_vocabulary_adapter(root / f"own {name}", model, kind, seed=seed)
        prompt = [*COMMON, *range(kind.size - 4, kind.size)]
        oracle = partial(vocabulary_logprobs, model, folder, kind)
        yield Asked(prompt, oracle, {"adapter_id": engine.load(folder)})
    for name, config in ALORAS.items():
        folder = make_adapter(root / name, model, alora_invocation_tokens=INVOCATION, **config)
        oracle = partial(alora_logprobs, model, folder, INVOCATION, COMMON)
        yield Asked(COMMON, oracle, {"adapter_id": engine.load(folder)})
    for blend in BLENDS:
        parts = [(ids[name][0], weight) for name, weight in blend.items()]
        oracle = partial(logprobs, summed_model(model, parts))
        weights = tuple((ids[name][1], weight) for name, weight in blend.items())
        yield Asked(COMMON, oracle, {"blend": weights})


def test_everyone_in_one_step(
    files: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there are places for all, and each has tokens left when the last has its first."""
    model = files("qwen2").model
    engine = StepEngine(model, max_num_seqs=64, max_num_batched_tokens=96, max_loras=64)
    asked = list(everyone(tmp_path, files("qwen2"), engine))
    scored: dict[str, Any] = {"logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP}
    for number, one in enumerate(asked):
        engine.add(str(number), one.prompt, max_tokens=32, **one.who, **scored)
    sizes, launch = list[int](), engine.runner.launch

    def count(step: Step) -> Callable[[], StepResult]:
        sizes.append(len(step.sequences))
        return launch(step)

    monkeypatch.setattr(engine.runner, "launch", count)
    results = engine.run()
    assert max(sizes) == len(asked)
    base = peft_logprobs(model, None, COMMON)[-1, :SHRUNK]
    for number, one in enumerate(asked):
        result = results[str(number)]
        scores = one.oracle(one.prompt + result.token_ids)
        check_scores(scores, one.prompt, result)
        if one.who:  # the control: the base model would not pass
            own = scores[len(COMMON) - 1, :SHRUNK]
            assert (base - own).abs().max() > 50 * TOLERANCE
