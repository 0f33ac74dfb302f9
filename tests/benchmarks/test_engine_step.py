"""The engine that is timed takes its steps as the server's loop does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lorakeet.configs.settings import Settings
from lorakeet.server.engine.step import ScheduledSequence, SequenceId, Step

EMPTY, FULL = Step(), Step(sequences=(ScheduledSequence(SequenceId(1), 0, 1, (), True),))


class Scripted:
    """A scheduler and a runner in one: these steps, and when each was launched and applied."""

    def __init__(self, steps: list[Step]) -> None:
        self.left, self.log = list(enumerate(steps)), list[str]()
        self.graphs, self.config = None, SimpleNamespace(vocab_size=100)

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add(self, request: object) -> None:
        """It has its steps."""

    def schedule(self) -> Step:
        self.number, step = self.left.pop(0)
        return step

    def launch(self, step: Step) -> Callable[[], int]:
        number = self.number
        self.log.append(f"launch {number}")
        return lambda: number

    def apply(self, step: Step, number: int) -> None:
        self.log.append(f"apply {number}")


def test_a_step_without_sequences_is_none_in_flight(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_step, made = script("engine_step"), Scripted([EMPTY, FULL, FULL])
    monkeypatch.setattr(engine_step, "set_up_threads", lambda settings: None)
    monkeypatch.setattr(engine_step, "Runner", lambda settings, folder: made)
    monkeypatch.setattr(engine_step, "make_scheduler", lambda settings, runner: made)
    engine = engine_step.Engine(Settings(model="model"), engine_step.SMOKE)
    engine.generate(engine_step.Point.parse("1:0"), engine_step.SERVED, 4)
    assert made.log == ["launch 0", "apply 0", "launch 1", "launch 2", "apply 1", "apply 2"]
