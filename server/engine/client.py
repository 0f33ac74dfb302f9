"""The engine as the API process sees it: in a process of its own, or in a thread of this one.

Engine (protocol)
  └ EngineBase          open streams, pending loads, what an engine's death does to them
      ├ EngineClient    the engine process
      └ InlineEngine    the same loop in a thread
"""

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterError, AdapterNotFoundError
from lorakeet.server.engine.messages import (
    AbortRequests,
    AdapterLoaded,
    AdapterUnloaded,
    AddRequest,
    Command,
    EngineDead,
    EngineInfo,
    EngineStats,
    Event,
    LoadAdapter,
    LoadFailed,
    RequestOutput,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
)
from lorakeet.server.engine.process import endpoints

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5.0  # after which the engine process is killed


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

    def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; the last output has a finish reason.

        Closing the generator early aborts the request. Raises EngineDeadError at any point.
        """

    async def abort(self, request_ids: list[str]) -> None:
        """End requests with the finish reason "abort"; unknown or finished ones are ignored."""

    async def load_adapter(self, adapter_id: int, path: str, pinned: bool = False) -> AdapterLoaded:
        """Raises AdapterNotFoundError, AdapterError (the message says why) or EngineDeadError."""

    async def unload_adapter(self, adapter_id: int) -> None:
        """Have it freed when its last request ends; send no more requests for it."""

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
        self._death_callbacks: list[Callable[[str], None]] = []

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

    async def abort(self, request_ids: list[str]) -> None:
        self._check_alive()
        self._send(AbortRequests(request_ids))

    async def load_adapter(self, adapter_id: int, path: str, pinned: bool = False) -> AdapterLoaded:
        self._check_alive()
        future: asyncio.Future[AdapterLoaded] = asyncio.get_running_loop().create_future()
        self._loads[adapter_id] = future
        try:
            self._send(LoadAdapter(adapter_id, path, pinned))
            return await future
        except asyncio.CancelledError:
            if self._dead is None:  # nobody else knows this id: it would stay for ever
                self._send(UnloadAdapter(adapter_id))
            raise
        finally:
            del self._loads[adapter_id]

    async def unload_adapter(self, adapter_id: int) -> None:
        self._check_alive()
        self._send(UnloadAdapter(adapter_id))

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
            case AdapterLoaded() | LoadFailed():
                self._finish_load(event)
            case AdapterUnloaded():
                logger.info("adapter %d: %d bytes freed", event.adapter_id, event.freed_bytes)
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

    def _die(self, reason: str) -> None:
        if self._dead is not None:
            return
        self._dead = reason
        self._ready.set()
        for queue in self._streams.values():
            queue.put_nowait(None)
        for future in self._loads.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
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


class EngineClient(EngineBase):
    """The engine in a process of its own; it dies with this process."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._folder: Path | None = None  # of the sockets

    async def start(self, model_folder: Path) -> None:
        folder = self._folder = Path(tempfile.mkdtemp(prefix="lorakeet-"))
        commands, events = endpoints(folder)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Event)
        self._context = zmq.asyncio.Context()
        # Each side connects the socket that it sends on, and there is no high-water mark: then a
        # send never waits, not even for a peer that is not there yet or has died.
        self._commands = zmq.Context(self._context).socket(zmq.PUSH)
        self._commands.set_hwm(0)
        self._commands.connect(commands)
        self._events = self._context.socket(zmq.PULL)
        self._events.set_hwm(0)
        self._events.bind(events)
        try:
            await self._spawn(folder, model_folder)
            await self._wait_ready()
        except BaseException:
            await self.shutdown()
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._process is not None, "the engine has not started"
        return self._process.pid

    async def shutdown(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._process is not None and self._watcher is not None:
            if self._process.returncode is None:
                await self._stop(self._process)
            await self._watcher
        self._die("the engine was shut down")
        if self._folder is None:
            return
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if self._info is None:  # it may be deep in loading the model
            process.kill()
            return
        self._send(Shutdown())
        try:
            await asyncio.wait_for(process.wait(), SHUTDOWN_SECONDS)
        except TimeoutError:
            process.kill()

    def _send(self, command: Command) -> None:
        self._commands.send(self._encoder.encode(command))

    async def _spawn(self, folder: Path, model_folder: Path) -> None:
        # -P: the working directory must not become a place that modules are imported from.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "lorakeet.server.engine.process"),
            *(folder, model_folder),
            stdin=asyncio.subprocess.PIPE,
        )
        self._process = process
        self._watcher = asyncio.create_task(self._watch(process))
        assert process.stdin is not None
        settings = self.settings.model_copy(update={"api_key": None})
        process.stdin.write(settings.model_dump_json().encode() + b"\n")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Deliver events until the process ends, and those that it sent before its end."""
        reader = asyncio.create_task(self._read_events())
        code = await process.wait()
        reader.cancel()
        await asyncio.wait([reader])
        while await self._events.poll(timeout=100):
            self._receive(self._decoder.decode(await self._events.recv()))
        self._die(_describe_exit(code))

    async def _read_events(self) -> None:
        while True:
            self._receive(self._decoder.decode(await self._events.recv()))


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"the engine process ended with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"the engine process was ended by {signal.Signals(-code).name}{hint}"
