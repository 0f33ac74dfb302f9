"""Captured steps on a GPU: equal to eager ones at every batch size, and never waiting."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.step import Step, StepResult
from support.adapters import make_adapter, peft_greedy
from support.engines import StepEngine, note_runs, prompt_of
from support.models import tiny_model
from support.parity import check

pytestmark = pytest.mark.gpu

MAX_SEQS = 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path | None]]:
    folder = tmp_path_factory.mktemp("graphs")
    model = tiny_model(folder / "model", hidden_size=128, max_position_embeddings=1024)
    ends = ["embed_tokens", "lm_head", "o_proj", "gate_proj"]
    return model, [
        None,
        make_adapter(folder / "a", model, seed=1, r=64),
        make_adapter(folder / "b", model, seed=2, r=3, target_modules=["q_proj", "down_proj"]),
        make_adapter(folder / "c", model, seed=3, r=8, target_modules=ends),
    ]


def engine_of(
    model: Path, adapters: list[Path | None], depth: int = 2, **settings: int
) -> StepEngine:
    engine = StepEngine(
        model,
        depth,
        device="cuda",
        dtype="float32",
        block_size=16,
        gpu_memory_utilization=0.2,
        **{"max_num_seqs": MAX_SEQS} | settings,
    )
    for path in adapters[1:]:
        assert path is not None
        engine.load(path)
    return engine


def short_prompt(number: int) -> list[int]:
    return [3 + number, 4, 5 + number % 3, 9][: 2 + number % 3]


def test_every_batch_size_equals_eager_and_peft(files: tuple[Path, list[Path | None]]) -> None:
    """B07: one request too many; they leave one by one; every mix of adapters and ranks."""
    model, adapters = files
    results = []
    for eager in (False, True):
        engine = engine_of(model, adapters, depth=1 if eager else 2)
        if eager:
            engine.runner.graphs = None
        for number in range(MAX_SEQS + 1):
            engine.add(str(number), short_prompt(number), number % 4, max_tokens=4 + 3 * number)
        engine.run()
        engine.add("base", [5, 6, 7])
        results.append(engine.run())
    for name, result in results[1].items():
        assert results[0][name].token_ids == result.token_ids
    for number in range(8):
        expected = peft_greedy(model, adapters[number % 4], short_prompt(number), 4 + 3 * number)
        assert results[0][str(number)].token_ids == expected


def test_a_large_batch_that_ends_one_by_one_is_as_with_peft(
    files: tuple[Path, list[Path | None]],
) -> None:
    """Every batch size from the largest to 1: the last requests are there in all of them."""
    model, adapters = files
    engine, size = engine_of(model, adapters, max_num_seqs=300), 300
    for number in range(size):
        prompt = short_prompt(number % 50)
        engine.add(str(number), prompt, number % 4, max_tokens=4 + number, logprobs=0)
    results = engine.run()
    for number in range(size - 8, size):
        prompt = short_prompt(number % 50)
        check(model, adapters[number % 4], prompt, results[str(number)])


@pytest.mark.parametrize(
    ("length", "at_once", "max_tokens"),
    [(30, 1, 512), (90, 1, 512), (130, 1, 512), (20, 6, 1024), (600, 2, 1024)],
)
def test_chunks_of_prompts_equal_eager_and_peft(
    files: tuple[Path, list[Path | None]], length: int, at_once: int, max_tokens: int
) -> None:
    """In each tiling of the kernels, the last adapter loaded midway. Only for a prompt of more than
    512 tokens has a step so many."""
    model, adapters = files
    prompts = [prompt_of(length + 11 * (number % 6), number) for number in range(8)]
    results = []
    for eager in (False, True):
        engine = engine_of(model, adapters[:3], max_num_batched_tokens=max_tokens)
        graphs = engine.runner.graphs
        assert graphs is not None
        assert graphs.max_tokens == max_tokens
        used = note_runs(engine)
        if eager:
            engine.runner.graphs = None
        for number in range(6):
            engine.add(str(number), prompts[number], number % 3)
            if number % at_once == at_once - 1:
                engine.step()
        assert adapters[3] is not None
        late = engine.load(adapters[3])
        for number in (6, 7):
            engine.add(str(number), prompts[number], late)
        results.append(engine.run())
        if not eager:
            most = max(count for shape, _, count in used if shape.num_chunks)
            assert (most > 512) == (length > 512)
    for name, result in results[1].items():
        assert results[0][name].token_ids == result.token_ids
    for number in range(8):
        path = adapters[number % 3 if number < 6 else 3]
        expected = peft_greedy(model, path, prompts[number], 8)
        assert results[0][str(number)].token_ids == expected


def test_adapters_come_and_go_between_replays(files: tuple[Path, list[Path | None]]) -> None:
    """One place in the pool: each replay of the same graph reads another adapter."""
    model, adapters = files
    engine = StepEngine(
        model,
        2,
        device="cuda",
        dtype="float32",
        block_size=16,
        gpu_memory_utilization=0.2,
        max_loras=1,
    )
    ids = [0, *(engine.load(path) for path in adapters[1:] if path is not None)]
    for turn in range(3):
        for adapter, path in enumerate(adapters):
            name = f"{turn}-{adapter}"
            engine.add(name, short_prompt(turn), ids[adapter], max_tokens=6)
            assert engine.run()[name].token_ids == peft_greedy(model, path, short_prompt(turn), 6)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"logprobs": 3},
    ],
)
def test_a_launch_never_waits_for_the_device(
    files: tuple[Path, list[Path | None]],
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, float],
) -> None:
    launch = Runner.launch

    def checked(self: Runner, step: Step) -> Callable[[], StepResult]:
        with no_waiting():  # nor may the pool's thread, if it copies an adapter meanwhile
            return launch(self, step)

    engine = engine_of(*files)
    monkeypatch.setattr(Runner, "launch", checked)
    for number in range(9):
        engine.add(str(number), short_prompt(number) * 5, number % 4, max_tokens=20, **sampling)
    results = engine.run()
    assert all(len(result.token_ids) == 20 for result in results.values())


def test_base_steps_launch_no_lora_kernel(files: tuple[Path, list[Path | None]]) -> None:
    def kernels(engine: StepEngine, adapter: int) -> set[str]:
        engine.add(f"warm{adapter}", [5, 6, 7], adapter, max_tokens=3)
        engine.run()
        engine.add(f"r{adapter}", [5, 6, 8], adapter, max_tokens=8)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            engine.run()
        return {event.key for event in profile.key_averages()}

    engine = engine_of(*files)
    lora_kernels = ("_lora_linear_kernel", "_shrink_kernel", "_expand", "_embedding_kernel")

    def is_lora(name: str) -> bool:
        return any(part in name for part in lora_kernels)

    assert any(map(is_lora, kernels(engine, 1)))
    assert not any(map(is_lora, kernels(engine, 0)))
