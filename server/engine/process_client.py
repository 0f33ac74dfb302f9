"""The engine in a process of its own, from the side of the API process."""

import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from lorakeet.configs.settings import Settings
from lorakeet.server.engine.client import EngineBase, EngineDeadError
from lorakeet.server.engine.messages import Command, Event, Shutdown, endpoints

SHUTDOWN_SECONDS = 5.0  # after which the engine process is killed
# seconds that an engine of several ranks gets to tell itself which of them is late, or hangs
START_MARGIN = 30.0
STEP_MARGIN = 2.0


class EngineProcess(EngineBase):
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
        self._events = self._context.socket(zmq.PULL)
        self._events.set_hwm(0)
        try:
            self._commands.connect(commands)
            self._events.bind(events)
            await self._spawn(folder, model_folder)
            await self._wait_ready()
        except zmq.ZMQError as error:  # the path of a socket has about 100 characters
            await self.shutdown()
            raise EngineDeadError(f"no sockets in {folder}: {error}") from None
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
        reader = asyncio.create_task(self._read_events(process))
        code = await process.wait()
        reader.cancel()
        await asyncio.wait([reader])
        while await self._events.poll(timeout=100):
            self._receive(self._decoder.decode(await self._events.recv()))
        self._die(describe_exit("engine process", code))

    async def _read_events(self, process: asyncio.subprocess.Process) -> None:
        """The first tells that the engine is ready; then it reports several times a second,
        between its steps."""
        settings = self.settings
        has_ranks = settings.tensor_parallel_size > 1
        limit = settings.start_timeout + has_ranks * START_MARGIN
        reason = f"the engine is not ready after {settings.start_timeout:g} seconds (start_timeout)"
        while True:
            try:
                async with asyncio.timeout(limit):
                    event = await self._events.recv()
            except TimeoutError:
                if not await self._events.poll(timeout=0):  # else it was this process that slept
                    self._die(reason)
                    process.kill()
                    return
            else:
                self._receive(self._decoder.decode(event))
                limit = settings.step_timeout + has_ranks * STEP_MARGIN
                seconds = f"{settings.step_timeout:g} seconds (step_timeout)"
                reason = f"the engine has given no sign for {seconds}"


_EXIT_HINTS = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGBUS: " (was a file of the model cut short, or its disk failing?)",
}


def describe_exit(process: str, code: int) -> str:
    """How a process ended, from its exit code as subprocess gives it."""
    if code >= 0:
        return f"the {process} ended with exit code {code}"
    hint = _EXIT_HINTS.get(signal.Signals(-code), "")
    return f"the {process} was ended by {signal.Signals(-code).name}{hint}"
