"""Steps on padded static batches: what CUDA graphs capture, run eagerly on the CPU (B07)."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.batch import StaticRankRows
from lorakeet.server.engine import graphs
from lorakeet.server.engine.device_batch import DeviceRows
from lorakeet.server.engine.graphs import Shape, StaticBatch, graph_shapes, graph_sizes
from lorakeet.server.engine.inputs import StepArrays
from lorakeet.server.engine.step import Step, StepResult
from support.adapters import make_adapter, peft_greedy
from support.engines import StepEngine, note_runs, overflowing_adapter, prompt_of
from support.models import tiny_model
from support.pools import filled_pool, random_adapter, same_rank

MAX_SEQS = 20  # sizes 1, 2, 4, 8, 16, 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("graphs") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path) -> tuple[Path, ...]:
    folder = model.parent
    ends = ["embed_tokens", "lm_head", "o_proj"]
    return (
        make_adapter(folder / "a", model, seed=1, r=8),
        make_adapter(folder / "b", model, seed=2, r=3, target_modules=["q_proj", "down_proj"]),
        make_adapter(folder / "c", model, seed=3, r=5, target_modules=ends),
        overflowing_adapter(folder / "broken", model),
    )


def engine_of(
    model: Path, adapters: tuple[Path, ...], graphs: bool, depth: int = 1, **settings: Any
) -> StepEngine:
    engine = StepEngine(model, depth, **{"max_num_seqs": MAX_SEQS} | settings)
    for path in adapters:
        engine.load(path)
    if graphs:
        engine.runner.capture_graphs()
    return engine


def test_sizes() -> None:
    for limit in range(1, 600):
        sizes = graph_sizes(limit)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == limit
        assert len(sizes) <= 27
        assert all(b - a <= max(8, b / 5) for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("max_seqs", "max_tokens"), [(1, 1), (1, 64), (20, 12), (300, 100), (256, 8192), (2000, 8192)]
)
def test_shapes(max_seqs: int, max_tokens: int) -> None:
    """Every step of decodes has one, and every step of up to 1,024 tokens with chunks, of which a
    third at most is padding, from 32 tokens on: with room for all that it can hold."""
    shapes = graph_shapes(max_seqs, max_tokens)
    assert shapes == sorted(set(shapes))
    assert shapes[-1].num_tokens <= max_tokens
    most_decodes = min(max_seqs, max_tokens)
    for size in range(1, most_decodes + 1):
        shape = next(shape for shape in shapes if shape.holds(size, has_chunks=False))
        assert shape.num_decodes == next(s for s in graph_sizes(most_decodes) if s >= size)
        assert shape == Shape(shape.num_decodes, shape.num_decodes, 0)
    for num_tokens in range(2, min(max_tokens, 1024) + 1):
        shape = next(shape for shape in shapes if shape.holds(num_tokens, has_chunks=True))
        assert shape.num_tokens <= max(num_tokens + 16, num_tokens * 3 // 2)
        assert shape.num_decodes >= min(num_tokens - 2, max_seqs - 1)
        assert shape.num_chunks >= min(num_tokens // 2, max_seqs)


@pytest.mark.parametrize("max_seqs", [1, 2, MAX_SEQS])
def test_memory_is_estimated_from_a_few_graphs(
    model: Path, monkeypatch: pytest.MonkeyPatch, max_seqs: int
) -> None:
    """Graphs with LoRA take more than those without; the first takes what all share."""
    engine = StepEngine(model, max_num_seqs=max_seqs, max_num_batched_tokens=max_seqs)
    capture, taken = graphs.PassGraphs._capture, [0]

    def counted(self: graphs.PassGraphs, shape: Shape, with_lora: bool) -> None:
        taken[0] += 7 if with_lora else 4
        taken[0] += 0 if self._graphs else 1000
        capture(self, shape, with_lora)

    monkeypatch.setattr(graphs.PassGraphs, "_capture", counted)
    estimate = engine.runner._make_graphs(64).estimate_memory(lambda: 10**6 - taken[0])
    taken[0] = 0
    engine.runner.capture_graphs()
    assert engine.runner.graphs is not None
    assert estimate == taken[0] + engine.runner.graphs._embeddings.num_bytes


@pytest.mark.parametrize("depth", [1, 2])
def test_every_batch_size_equals_the_plain_pass(
    model: Path, adapters: tuple[Path, ...], depth: int
) -> None:
    """One request too many for the batch; then they leave one by one, so that every size is met.
    The adapters of a batch's rows change, and in the end a step is of the base model alone."""

    def run(engine: StepEngine) -> StepEngine:
        for number in range(MAX_SEQS + 1):
            prompt = prompt_of(2 + number % 4, number)
            engine.add(str(number), prompt, number % 4, max_tokens=4 + 3 * number)
        engine.run()
        engine.add("alone", prompt_of(5, 1))  # a base step right after an adapter's
        engine.run()
        return engine

    plain = run(engine_of(model, adapters, graphs=False))
    padded = engine_of(model, adapters, graphs=True, depth=depth)
    used = note_runs(padded)
    run(padded)
    assert {count for _, _, count in used} >= set(range(1, MAX_SEQS + 1))
    for name, result in plain.results.items():
        assert padded.results[name].token_ids == result.token_ids
    for number in (1, 6, 11, 20):
        path = adapters[number % 4 - 1] if number % 4 else None
        expected = peft_greedy(model, path, prompt_of(2 + number % 4, number), 4 + 3 * number)
        assert padded.results[str(number)].token_ids == expected


def test_random_traffic_equals_the_plain_pass(model: Path, adapters: tuple[Path, ...]) -> None:
    """Adapters are taken in and given up between steps, one of them is broken."""
    engines = [
        engine_of(model, adapters[:3], graphs, depth)
        for graphs, depth in ((False, 1), (True, 1), (True, 2))
    ]
    generator = random.Random(1)
    broken = [engine.load(adapters[3]) for engine in engines]
    count = 0
    for step in range(120):
        if generator.random() < 0.45 and step < 100:
            adapter = broken[0] if count % 9 == 4 else generator.choice([0, 0, 1, 2, 3])
            prompt = prompt_of(generator.randint(1, 30), step)
            choices: list[dict[str, Any]] = [
                {},
                {"temperature": 0.9, "seed": step},
                {"logprobs": 1},
                {"frequency_penalty": 0.7},
                {"min_tokens": 3, "stop_token_ids": tuple(range(3, 40))},
            ]
            sampling = generator.choice(choices)
            length = generator.randint(1, 20)
            for engine in engines:
                engine.add(str(count), prompt, adapter, max_tokens=length, **sampling)
            count += 1
        if step == 60:
            for engine, adapter_id in zip(engines, broken, strict=True):
                engine.scheduler.remove_adapter(adapter_id)
            broken = [AdapterId(0)]
        for engine in engines:
            engine.step()
    plain, *padded = [engine.run() for engine in engines]
    assert count > 30
    assert any(result.finish_reason == "error" for result in plain.values())
    for results in padded:
        for name, result in plain.items():
            assert results[name].token_ids == result.token_ids
            assert results[name].finish_reason == result.finish_reason


def test_base_steps_hold_no_lora_work(model: Path, adapters: tuple[Path, ...]) -> None:
    engine = engine_of(model, adapters, graphs=True)
    assert engine.runner.graphs is not None
    for (_, with_lora), (static, _) in engine.runner.graphs._graphs.items():
        assert (static.batch().lora is not None) == with_lora
    used = note_runs(engine)
    engine.add("adapter", prompt_of(4, 1), 2, max_tokens=3)
    engine.run()
    engine.add("base", prompt_of(4, 2), max_tokens=3)
    engine.run()
    engine.add("base2", prompt_of(4, 3), max_tokens=4)
    engine.add("adapter2", prompt_of(4, 4), 2, max_tokens=3)
    engine.run()
    sizes = [(shape.num_tokens, with_lora) for shape, with_lora, _ in used]
    with_prompt_first = [(16, True), (1, True), (1, True), (16, False), (1, False), (1, False)]
    assert sizes == [*with_prompt_first, (16, True), (2, True), (2, True), (1, False)]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2_window"])
def test_chunks_are_replayed_unless_they_are_too_large(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of up to 40 tokens, beside decodes and alone; the second time, most of them
    are in the prefix cache. Steps of up to 30 tokens are replayed."""
    monkeypatch.setattr(graphs, "_CHUNK_TOKENS", 30)
    model = tiny_model(tmp_path / "model", kind)
    adapters = tuple(make_adapter(tmp_path / name, model, seed=ord(name)) for name in "ab")
    plain = engine_of(model, adapters, graphs=False, max_num_batched_tokens=40)
    padded = engine_of(model, adapters, graphs=True, max_num_batched_tokens=40)
    used, eager = note_runs(padded), list[int]()
    run_model = padded.runner._run_model

    def note_eager(arrays: StepArrays, *args: Any) -> Tensor:
        eager.append(len(arrays.token_ids))
        return run_model(arrays, *args)

    monkeypatch.setattr(padded.runner, "_run_model", note_eager)
    lengths = (30, 90, 7, 3, 4, 60)
    for engine in (plain, padded):
        for turn in range(2):
            for number, length in enumerate(lengths):
                name = f"{turn}-{number}"
                engine.add(name, prompt_of(length, number), number % 3, max_tokens=4)
                if number not in (2, 3):  # these come together
                    engine.step()
            engine.run()
    with_chunks = {count for shape, _, count in used if shape.num_chunks}
    assert len(with_chunks) >= 5
    assert max(with_chunks) == 30
    assert min(eager) > 30
    assert max(eager) == 40
    for number, length in enumerate(lengths):
        path = adapters[number % 3 - 1] if number % 3 else None
        expected = peft_greedy(model, path, prompt_of(length, number), 4)
        for turn in range(2):
            assert plain.results[f"{turn}-{number}"].token_ids == expected
            assert padded.results[f"{turn}-{number}"].token_ids == expected
    assert padded.results["1-1"].cached_tokens


def test_a_step_with_more_rows_than_static_batches_hold_is_not_replayed(
    model: Path, adapters: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with blends, which list the same rows again."""
    engine = engine_of(model, adapters, graphs=True)
    used = note_runs(engine)
    for room in (1000, 2):
        monkeypatch.setattr(graphs, "static_room", lambda pool, room=room: room)
        engine.add(f"{room}", prompt_of(5, 1), 1, max_tokens=3)
        engine.add(f"base{room}", prompt_of(5, 2), 0, max_tokens=6)
        engine.run()
        assert any(with_lora for _, with_lora, _ in used) == (room == 1000)
        used.clear()
    for room in (1000, 2):
        expected = peft_greedy(model, adapters[0], prompt_of(5, 1), 3)
        assert engine.results[f"{room}"].token_ids == expected


def test_padding_rows_leave_no_trace() -> None:
    """Stale values of a larger step are gone: token, place, context, adapter."""
    rows = DeviceRows(4, 3, torch.device("cpu"))
    pool = filled_pool({slot: random_adapter(same_rank(slot), slot) for slot in (1, 2, 3)})
    static = StaticBatch(Shape(4, 4, 0), rows, 12, StaticRankRows(pool, 4, 3), None)

    def step(count: int) -> StepArrays:
        ones = np.ones(count, np.int64)
        return StepArrays(ones, ones, 5 * ones, ones, 6 * ones, np.arange(count + 1), 9 * ones)

    static.fill(step(4), np.array([3, 1, 3, 2], np.int32), None)
    address = static.batch().context_lens.data_ptr()
    static.fill(step(1), np.array([2], np.int32), None)
    batch = static.batch()
    assert batch.context_lens.data_ptr() == address
    assert batch.token_ids.tolist() == [5, 0, 0, 0]
    assert batch.kv_slots.tolist() == [6, -1, -1, -1]
    assert batch.context_lens.tolist() == [9, 0, 0, 0]
    assert batch.query_starts.tolist() == [0, 1, 1, 1, 1]
    assert (batch.num_decodes, batch.max_context_len) == (4, 12)
    assert batch.lora is not None
    assert batch.lora.slots.tolist() == [2, 0, 0, 0]
    assert StaticBatch(Shape(4, 4, 0), rows, 12, None, None).batch().lora is None


def test_decodes_and_chunks_are_padded_each() -> None:
    rows = DeviceRows(4, 3, torch.device("cpu"))
    rows.block_tables.copy_(torch.arange(12).view(4, 3))
    static = StaticBatch(Shape(8, 3, 3), rows, 12, None, None)
    arrays = StepArrays(
        rows=np.array([2, 1, 3]),
        token_rows=np.array([2, 1, 1, 1, 3, 3]),
        token_ids=np.arange(10, 16),
        positions=np.array([4, 0, 1, 2, 7, 8]),
        kv_slots=np.arange(20, 26),
        query_starts=np.array([0, 1, 4, 6]),
        context_lens=np.array([5, 3, 9]),
    )
    static.fill(arrays, np.zeros(6, np.int32), None)
    batch = static.batch()
    assert batch.num_decodes == 3
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 0, 0]
    assert batch.context_lens.tolist() == [5, 0, 0, 3, 9, 0]
    assert batch.query_starts.tolist() == [0, 1, 1, 1, 4, 6, 6]
    assert batch.block_tables[[0, 3, 4], 0].tolist() == [6, 3, 9]


def test_an_empty_step_replays_nothing(model: Path) -> None:
    engine = engine_of(model, (), graphs=True)
    used = note_runs(engine)
    assert engine.runner.launch(Step())() == StepResult()
    assert not used
    engine.add("r", prompt_of(9, 3))
    assert engine.run()["r"].token_ids == peft_greedy(model, None, prompt_of(9, 3), 8)
