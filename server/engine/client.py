"""The engine as the API process sees it: in a process of its own, or in a thread of this one.

Engine (protocol)
  └ EngineBase          open streams, pending loads, what an engine's death does to them
      ├ EngineProcess   the engine in a process of its own
      └ InlineEngine    the same loop in a thread
"""

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterError, AdapterNotFoundError
from lorakeet.server.engine.messages import (
    AbortRequests,
    AdapterLoaded,
    AdapterUnloaded,
    AdapterUpdated,
    AddRequest,
    Command,
    EngineDead,
    EngineInfo,
    EngineStats,
    Event,
    LoadAdapter,
    LoadFailed,
    RequestOutput,
    StepOutputs,
    UnloadAdapter,
    UpdateAdapter,
)

logger = logging.getLogger(__name__)


class EngineDeadError(Exception):
    """The engine could not start, has died, or was shut down; the message says why."""


class Engine(Protocol):
    """What the server needs of an engine. All methods are called in one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def healthy(self) -> bool: ...

    async def start(self, model_folder: Path) -> None:
        """Return when the engine can take requests; raises EngineDeadError if it cannot start."""

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Have `callback(reason)` called if the engine dies (not when it is shut down)."""

    def on_stats(self, callback: Callable[[EngineStats], None]) -> None:
        """Have `callback` called with every report from now on."""

    def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; the last output has a finish reason.

        Closing the generator early aborts the request. Raises EngineDeadError at any point.
        """

    async def load_adapter(
        self, adapter_id: int, path: str, digest: str | None = None
    ) -> AdapterLoaded:
        """Read an adapter; with a digest, only that content.

        Raises AdapterNotFoundError, AdapterError (the message says why) or EngineDeadError.
        """

    async def update_adapter(self, adapter_id: int, paths: Sequence[str], pinned: bool) -> None:
        """Where it can be read again when it has left host memory, and whether it may leave.

        Raises AdapterError when it cannot be pinned, and EngineDeadError.
        """

    def unload_adapter(self, adapter_id: int) -> "asyncio.Future[AdapterUnloaded]":
        """Have it freed when its last request ends; send no more requests for it.

        The future says what that freed; it is cancelled if the engine dies before.
        """

    async def shutdown(self) -> None:
        """Stop the engine; open streams raise EngineDeadError. May be called twice."""


class EngineBase:
    """Streams and pending loads, the same for every way to reach an engine.

    A subclass sends commands with `_send` and calls `_receive` with every event, in the event loop
    that `start` ran in.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._dead: str | None = None
        self._closing = False
        self._ready = asyncio.Event()
        self._streams: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self._loads: dict[int, asyncio.Future[AdapterLoaded]] = {}
        self._updates: dict[int, deque[asyncio.Future[AdapterUpdated]]] = {}
        self._unloads: dict[int, asyncio.Future[AdapterUnloaded]] = {}
        self._death_callbacks: list[Callable[[str], None]] = []
        self._stats_callbacks: list[Callable[[EngineStats], None]] = []

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def healthy(self) -> bool:
        return self._info is not None and self._dead is None

    def on_death(self, callback: Callable[[str], None]) -> None:
        self._death_callbacks.append(callback)

    def on_stats(self, callback: Callable[[EngineStats], None]) -> None:
        self._stats_callbacks.append(callback)

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        self._check_alive()
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._streams[request.request_id] = queue
        finished = False
        try:
            self._send(request)
            while not finished:
                output = await queue.get()
                if output is None:
                    raise EngineDeadError(self._dead)
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._streams[request.request_id]
            if not finished and self._dead is None:
                self._send(AbortRequests([request.request_id]))

    async def load_adapter(
        self, adapter_id: int, path: str, digest: str | None = None
    ) -> AdapterLoaded:
        self._check_alive()
        future: asyncio.Future[AdapterLoaded] = asyncio.get_running_loop().create_future()
        self._loads[adapter_id] = future
        try:
            self._send(LoadAdapter(adapter_id, path, digest))
            return await future
        except asyncio.CancelledError:
            if self._dead is None:  # nobody else knows this id: it would stay for ever
                self._send(UnloadAdapter(adapter_id))
            raise
        finally:
            del self._loads[adapter_id]

    async def update_adapter(self, adapter_id: int, paths: Sequence[str], pinned: bool) -> None:
        self._check_alive()
        future: asyncio.Future[AdapterUpdated] = asyncio.get_running_loop().create_future()
        waiting = self._updates.setdefault(adapter_id, deque())
        waiting.append(future)
        self._send(UpdateAdapter(adapter_id, [*paths], pinned))
        if (error := (await future).error) is not None:
            raise AdapterError(error)

    def unload_adapter(self, adapter_id: int) -> "asyncio.Future[AdapterUnloaded]":
        future = self._unloads.get(adapter_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            if self._dead is not None:
                future.cancel()
                return future
            self._unloads[adapter_id] = future
            self._send(UnloadAdapter(adapter_id))
        return future

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Hand the command to the engine; never blocks."""

    def _receive(self, event: Event) -> None:
        match event:
            case StepOutputs():
                for output in event.outputs:
                    if (queue := self._streams.get(output.request_id)) is not None:
                        queue.put_nowait(output)
            case EngineStats():
                self._stats = event
                for callback in self._stats_callbacks:
                    callback(event)
            case AdapterLoaded() | LoadFailed():
                self._finish_load(event)
            case AdapterUpdated():
                self._finish_update(event)
            case AdapterUnloaded():
                future = self._unloads.pop(event.adapter_id, None)
                if future is not None and not future.done():
                    future.set_result(event)
            case EngineInfo():
                self._info = event
                self._ready.set()
            case EngineDead():
                self._die(event.message)

    def _finish_load(self, event: AdapterLoaded | LoadFailed) -> None:
        future = self._loads.get(event.adapter_id)
        if future is None or future.done():
            return
        if isinstance(event, AdapterLoaded):
            future.set_result(event)
        else:
            kind = AdapterNotFoundError if event.missing else AdapterError
            future.set_exception(kind(event.message))

    def _finish_update(self, event: AdapterUpdated) -> None:
        """Answers come in the order of the commands."""
        waiting = self._updates[event.adapter_id]
        future = waiting.popleft()
        if not waiting:
            del self._updates[event.adapter_id]
        if not future.done():
            future.set_result(event)

    def _die(self, reason: str) -> None:
        if self._dead is not None:
            return
        self._dead = reason
        self._ready.set()
        for queue in self._streams.values():
            queue.put_nowait(None)
        updates = [future for waiting in self._updates.values() for future in waiting]
        pending: list[asyncio.Future[Any]] = [*self._loads.values(), *updates]
        for future in pending:
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        for unload in self._unloads.values():
            unload.cancel()
        if not self._closing:
            logger.error("the engine is dead: %s", reason)
            for callback in self._death_callbacks:
                callback(reason)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        assert self._info is not None, "the engine has not started"

    async def _wait_ready(self) -> None:
        await self._ready.wait()
        if self._dead is not None:
            raise EngineDeadError(self._dead)
