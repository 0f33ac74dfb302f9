"""The engine's loop: drain commands, schedule, launch, apply. Adapters are read beside it.

With a depth of 2 the next step is scheduled and launched before the present one has ended, so the
device never waits for the host.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec

from lorakeet.lora.adapter import Adapter, AdapterError, AdapterId, AdapterNotFoundError
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.slots import PoolError
from lorakeet.server.engine.adapters import UnknownAdapterError
from lorakeet.server.engine.messages import (
    AbortRequests,
    AdapterLoaded,
    AdapterUnloaded,
    AddRequest,
    Command,
    Event,
    LoadAdapter,
    LoadFailed,
    RequestOutput,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
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
        self._reads: SimpleQueue[tuple[LoadAdapter, Future[Adapter]]] = SimpleQueue()  # finished
        self._reading: set[AdapterId] = set()
        self._loaded: set[AdapterId] = set()  # known to the scheduler, not unloaded
        self._outputs: list[RequestOutput] = []  # of commands, for the next message
        self._load_seconds: list[float] = []
        self._next_stats = 0.0
        self._is_idle = True  # the last step found nothing that it could do
        self._stopping = False

    def run(self, inbox: Inbox) -> None:
        """Work until `Shutdown`; wait on the inbox while there is nothing to do."""
        self._wake = inbox.wake
        while not self._stopping:
            for command in inbox.receive(self._idle_seconds()):
                self._handle(command)
            self._take_reads()
            self._step()
            self._report()

    def _step(self) -> None:
        outputs, self._outputs = self._outputs, []
        has_launched = self._launch()
        self._is_idle = not has_launched
        if self._in_flight and not (has_launched and len(self._in_flight) < self.runner.depth):
            outputs += self._apply()
        if outputs:
            self.send(StepOutputs(outputs))
            self._is_idle = False
        for adapter_id in self.scheduler.take_unloaded():
            self._free(adapter_id)

    def _launch(self) -> bool:
        """Start the next step, if there is something to do; True: it gives the device work."""
        if not (self.scheduler.has_work and self.scheduler.can_schedule):
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
        self.send(msgspec.structs.replace(stats, slot_load_seconds=self._load_seconds))
        self._load_seconds = []
        if logger.isEnabledFor(logging.DEBUG) and not self.scheduler.has_work:
            self.scheduler.check()

    # --- commands ---

    def _handle(self, command: Command) -> None:
        match command:
            case AddRequest():
                self._add(command)
            case AbortRequests():
                self._outputs += self.scheduler.abort(command.request_ids)
            case LoadAdapter():
                self._read(command)
            case UnloadAdapter():
                self._unload(AdapterId(command.adapter_id))
            case Shutdown():
                self._stopping = True

    def _add(self, request: AddRequest) -> None:
        try:
            self.scheduler.add(request)
        except (ValueError, UnknownAdapterError) as error:
            self._outputs.append(
                RequestOutput(request.request_id, [], finish_reason="error", error=str(error))
            )

    # --- adapters ---

    def _read(self, command: LoadAdapter) -> None:
        """Start to read an adapter on another thread; `_take_reads` hears of its end."""
        adapter_id = AdapterId(command.adapter_id)
        self._reading.add(adapter_id)
        future = self.host_store.load(adapter_id, Path(command.path))
        future.add_done_callback(partial(self._on_read, command))

    def _on_read(self, command: LoadAdapter, future: Future[Adapter]) -> None:
        self._reads.put((command, future))
        self._wake()

    def _take_reads(self) -> None:
        while not self._reads.empty():
            command, future = self._reads.get()
            adapter_id = AdapterId(command.adapter_id)
            if adapter_id in self._reading:  # it has not been unloaded in the meantime
                self._reading.remove(adapter_id)
                self._finish_read(adapter_id, command.pinned, future)

    def _finish_read(self, adapter_id: AdapterId, pinned: bool, future: Future[Adapter]) -> None:
        try:
            adapter = future.result()
            self.scheduler.add_adapter(adapter_id, adapter.digest, adapter.rank, pinned)
        except (AdapterError, PoolError) as error:
            self.host_store.release(adapter_id)
            missing = isinstance(error, AdapterNotFoundError)
            self.send(LoadFailed(adapter_id, missing, str(error)))
            return
        self._loaded.add(adapter_id)
        self.send(
            AdapterLoaded(
                adapter_id,
                digest=adapter.digest,
                rank=adapter.rank,
                modules=list(adapter.modules),
                num_bytes=adapter.num_bytes,
                seconds=self.host_store.seconds(adapter_id),
            )
        )

    def _unload(self, adapter_id: AdapterId) -> None:
        if adapter_id in self._reading:
            self._reading.remove(adapter_id)
            self.send(LoadFailed(adapter_id, False, "the adapter was unloaded while it was read"))
            self._free(adapter_id)
        elif adapter_id in self._loaded:  # else its load has failed, or it is a repetition
            self._loaded.remove(adapter_id)
            self.scheduler.remove_adapter(adapter_id)

    def _free(self, adapter_id: AdapterId) -> None:
        self.send(AdapterUnloaded(adapter_id, self.host_store.release(adapter_id)))
