"""The engine's loop: drain commands, look after adapters, schedule, launch, apply.

With a depth of 2 the next step is scheduled and launched before the present one has ended, so the
device never waits for the host.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.host_store import HostStore
from lorakeet.server.engine.adapter_book import UnknownAdapterError
from lorakeet.server.engine.host_tier import HostTier
from lorakeet.server.engine.messages import (
    AbortRequests,
    AdapterState,
    AddRequest,
    Command,
    Event,
    LoadAdapter,
    RequestOutput,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
    UpdateAdapter,
)
from lorakeet.server.engine.scheduler import Scheduler
from lorakeet.server.engine.step import Step, StepResult

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.25  # seconds between reports
COPY_POLL = 0.001  # seconds between looks at a slot copy while nothing can run


class Inbox(Protocol):
    """Where commands come from."""

    def receive(self, timeout: float) -> Sequence[Command]:
        """The commands that are there; with none, wait at most `timeout` seconds, or for `wake`."""

    def wake(self) -> None:
        """End a waiting `receive`. May be called from any thread."""


class Executor(Protocol):
    """What executes steps; `Runner` is the real one."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight; 1: each is applied before the next is scheduled."""

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Start a step; what is returned waits for its end. Steps run in order of launch."""


class EngineLoop:
    """Moves requests and adapters on; all but file reads happens in the thread that calls `run`.

    A fault of one request or adapter ends it with an error event. An exception out of `run` means
    that the engine is dead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Executor,
        host_store: HostStore,
        send: Callable[[Event], None],
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.host_store = host_store
        self.send = send
        self._in_flight: deque[tuple[Step, Callable[[], StepResult]]] = deque()
        self._adapters = HostTier(scheduler, host_store, send, lambda: self._wake())
        self._wake: Callable[[], None] = lambda: None
        self._outputs: list[RequestOutput] = []  # of commands, for the next message
        self._load_seconds: list[float] = []
        self._next_stats = 0.0
        self._is_idle = True  # the last step found nothing that it could do
        self._stopping = False

    def run(self, inbox: Inbox) -> None:
        """Work until `Shutdown`; wait on the inbox while there is nothing to do.

        At the end the device is through with all steps: other ranks may be ended then.
        """
        self._wake = inbox.wake
        while not self._stopping:
            for command in inbox.receive(self._idle_seconds()):
                self._handle(command)
            self._outputs += self._adapters.work()
            self._step()
            self._report()
        while self._in_flight:
            self._apply()

    def _step(self) -> None:
        outputs, self._outputs = self._outputs, []
        has_launched = self._launch()
        self._is_idle = not has_launched
        if self._in_flight and not (has_launched and len(self._in_flight) < self.runner.depth):
            outputs += self._apply()
        if outputs:
            self.send(StepOutputs(outputs))
            self._is_idle = False
        self._adapters.take_unloaded()

    def _launch(self) -> bool:
        """Start the next step, if there is something to do; True: it gives the device work."""
        if not self.scheduler.has_work:
            return False
        step = self.scheduler.schedule()
        self._in_flight.append((step, self.runner.launch(step)))
        return bool(step.sequences)

    def _apply(self) -> list[RequestOutput]:
        """Wait for the oldest step in flight, and take in its result."""
        step, wait = self._in_flight.popleft()
        result = wait()
        self._load_seconds += result.load_seconds
        if step.sequences or result.loaded or self._in_flight:
            self._is_idle = False
        return self.scheduler.apply(step, result)

    def _idle_seconds(self) -> float:
        """How long to wait for commands: until the next report, or for a slot copy."""
        if not self._is_idle:
            return 0.0
        if self.scheduler.has_work:
            return COPY_POLL
        return max(0.0, self._next_stats - time.monotonic())

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._next_stats:
            return
        self._next_stats = now + STATS_INTERVAL
        stats = self.scheduler.stats()
        self.send(
            msgspec.structs.replace(
                stats,
                slot_load_seconds=self._load_seconds,
                lora_host_bytes=self.host_store.num_bytes,
                adapters=[self._with_error(state) for state in stats.adapters],
            )
        )
        self._load_seconds = []
        if logger.isEnabledFor(logging.DEBUG) and not self.scheduler.has_work:
            self.scheduler.check()

    def _with_error(self, state: AdapterState) -> AdapterState:
        error = self._adapters.errors.get(AdapterId(state.adapter_id))
        return state if error is None else msgspec.structs.replace(state, error=error)

    # --- commands ---

    def _handle(self, command: Command) -> None:
        match command:
            case AddRequest():
                self._add(command)
            case AbortRequests():
                self._outputs += self.scheduler.abort(command.request_ids)
            case LoadAdapter():
                self._adapters.load(command)
            case UpdateAdapter():
                self._adapters.update(command)
            case UnloadAdapter():
                self._adapters.unload(AdapterId(command.adapter_id))
            case Shutdown():
                self._stopping = True

    def _add(self, request: AddRequest) -> None:
        for adapter_id in (request.adapter_id, *(part for part, _ in request.blend)):
            self._adapters.touch(AdapterId(adapter_id))
        try:
            self.scheduler.add(request)
        except (ValueError, UnknownAdapterError) as error:
            self._outputs.append(
                RequestOutput(request.request_id, [], finish_reason="error", error=str(error))
            )
