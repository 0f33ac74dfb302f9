"""Copies of adapters into slots while the engine works on."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.row_writer import RowWriter
from lorakeet.server.engine.step import StepResult
from support.adapters import make_adapter, peft_greedy
from support.copies import CopyThreads, copy_threads_alive
from support.engines import StepEngine, prompt_of
from support.models import tiny_model

PROMPT = prompt_of(9, 1)
BAD = AdapterId(2)  # where one fails


class Files:
    def __init__(self, folder: Path) -> None:
        self.model = tiny_model(folder / "model")
        targets = ["q_proj", "down_proj", "embed_tokens"]
        self.adapters = [
            make_adapter(folder / str(seed), self.model, seed=seed, r=4, target_modules=targets)
            for seed in (1, 2, 3)
        ]

    def engine(self, depth: int = 1, **settings: Any) -> StepEngine:
        engine = StepEngine(self.model, depth, **settings)
        for path in self.adapters:
            engine.load(path)
        return engine

    def expected(self, adapter_id: int, count: int) -> list[int]:
        path = self.adapters[adapter_id - 1] if adapter_id else None
        return peft_greedy(self.model, path, PROMPT, count)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("loads"))


def step_until(engine: StepEngine, condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        engine.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_go_on_while_a_copy_is_held_up(
    files: Files, copy_threads: CopyThreads, depth: int
) -> None:
    engine = files.engine(depth)
    engine.add("first", PROMPT, 1, max_tokens=40)
    step_until(engine, lambda: engine.results["first"].token_ids)
    with copy_threads.held():
        engine.add("second", PROMPT, 2)
        engine.add("base", PROMPT, max_tokens=3)
        step_until(engine, lambda: engine.results["first"].finish_reason)
        assert engine.results["base"].finish_reason == "length"
        for _ in range(5):
            engine.step()
        assert engine.results["second"].token_ids == []
        assert engine.scheduler.slots.num_loading == 1
    engine.run()
    for name, adapter_id, count in (("first", 1, 40), ("second", 2, 8), ("base", 0, 3)):
        assert engine.results[name].token_ids == files.expected(adapter_id, count)


def test_adapters_take_turns_in_one_slot_by_way_of_the_thread(
    files: Files, copy_threads: CopyThreads
) -> None:
    engine = files.engine(2, max_loras=1, max_lora_rank=4)
    for turn in range(3):
        for adapter_id in (1, 2, 3):
            engine.add(f"{turn}-{adapter_id}", PROMPT, adapter_id, max_tokens=3)
    for name, result in engine.run().items():
        assert result.token_ids == files.expected(int(name[-1]), 3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), KeyError("a fault")])
def test_what_goes_wrong_in_the_thread_ends_that_load_once_and_frees_all(
    files: Files,
    copy_threads: CopyThreads,
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    error: Exception,
) -> None:
    engine = files.engine(depth)
    copy, runner_launch = RowWriter._copy, engine.runner.launch
    told: list[str] = []

    def faulty(self: RowWriter, rows: Any, adapter: Any, *args: Any) -> Any:
        if adapter is engine.runner.host_store.get(BAD):
            raise error
        return copy(self, rows, adapter, *args)

    def watched(step: Any) -> Callable[[], StepResult]:
        wait = runner_launch(step)

        def result() -> StepResult:
            one = wait()
            told.extend(one.load_errors.values())
            return one

        return result

    monkeypatch.setattr(RowWriter, "_copy", faulty)
    monkeypatch.setattr(engine.runner, "launch", watched)
    engine.add("good", PROMPT, 1, max_tokens=6)
    with copy_threads.held():
        engine.add("bad", PROMPT, BAD)
        for _ in range(3):
            engine.step()
        assert told == []
    results = engine.run()
    assert told == [f"the adapter could not be copied to the device: {error}"]
    assert (results["bad"].finish_reason, results["bad"].error) == ("error", told[0])
    assert results["good"].token_ids == files.expected(1, 6)
    assert engine.scheduler.slots.slot_of(BAD) is None
    assert engine.scheduler.slots.num_used_rows == 4
    ranks = engine.runner.pool.tables.ranks["down_proj"]
    assert ranks.any(0).sum() == 1

    monkeypatch.setattr(RowWriter, "_copy", copy)
    engine.add("again", PROMPT, BAD, max_tokens=6)
    assert engine.run()["again"].token_ids == files.expected(BAD, 6)
    assert len(told) == 1


def test_a_runner_that_is_shut_down_leaves_no_thread(
    files: Files, copy_threads: CopyThreads
) -> None:
    """Also with copies that have not begun."""
    engine = files.engine()
    with copy_threads.held():
        for adapter_id in (1, 2, 3):
            engine.add(str(adapter_id), PROMPT, adapter_id)
        engine.step()
        assert engine.scheduler.slots.num_loading == 3
        closing = threading.Thread(target=engine.runner.shutdown)
        closing.start()
        assert closing.is_alive()
    closing.join(30)
    assert not closing.is_alive()
    assert copy_threads_alive() == []
