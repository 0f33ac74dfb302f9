"""The engine from its settings to its end, in a thread of the test."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakeet.kernels.sizes import FEW_TOKENS
from lorakeet.lora.row_writer import RowWriter
from lorakeet.server.engine.inline import QueueInbox
from lorakeet.server.engine.messages import (
    AdapterLoaded,
    AddRequest,
    EngineDead,
    Event,
    LoadAdapter,
    SamplingParams,
)
from lorakeet.server.engine.run import make_scheduler, run_engine
from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.step import Step, StepResult
from support.adapters import make_adapter
from support.copies import CopyThreads
from support.engines import StepEngine, cpu_settings
from support.models import tiny_model
from support.servers import wait_until


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Future[None]]:
    """All copies that are asked for; the step after one is the first that fails."""
    writes: list[Future[None]] = []
    start, launch = RowWriter.start, Runner.launch

    def watched(self: RowWriter, *args: Any) -> Future[None]:
        writes.append(start(self, *args))
        return writes[-1]

    def faulty(self: Runner, step: Step) -> Callable[[], StepResult]:
        if writes:
            raise RuntimeError("the device is on fire")
        return launch(self, step)

    monkeypatch.setattr(RowWriter, "start", watched)
    monkeypatch.setattr(Runner, "launch", faulty)
    return writes


def test_an_engine_that_dies_waits_for_no_copy(
    tmp_path: Path, copy_threads: CopyThreads, writes: list[Future[None]]
) -> None:
    """It may be one that never ends: on a device that waits for a rank that is gone."""
    model = tiny_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model)
    inbox = QueueInbox()
    events: list[Event] = []
    ends: list[bool] = []

    def work() -> None:
        ends.append(run_engine(cpu_settings(model), model, inbox, events.append))

    engine = threading.Thread(target=work, daemon=True)
    engine.start()
    inbox.put(LoadAdapter(1, str(adapter)))
    wait_until(
        lambda: any(isinstance(event, AdapterLoaded) for event in events), "the adapter is read"
    )
    with copy_threads.held():
        inbox.put(AddRequest("a", [7, 8, 9], SamplingParams(), adapter_id=1))
        engine.join(20)
        assert not engine.is_alive()
        assert ends == [False]
        assert events[-1] == EngineDead("RuntimeError: the device is on fire")
        assert [write.done() for write in writes] == [False]
    writes[0].result(30)


def test_steps_are_short_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StepEngine(tiny_model(tmp_path / "model"))
    assert engine.scheduler.config.short_step_tokens is None
    monkeypatch.setattr(engine.runner, "device", torch.device("cuda"))
    scheduler = make_scheduler(engine.settings, engine.runner)
    assert scheduler.config.short_step_tokens == FEW_TOKENS
