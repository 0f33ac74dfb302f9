"""The engine in a thread of this process: for the offline API, notebooks and tests."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from lorakeet.configs.settings import Settings
from lorakeet.server.engine.client import EngineBase
from lorakeet.server.engine.messages import Command, Event, Shutdown
from lorakeet.server.engine.run import run_engine


class InlineEngine(EngineBase):
    """The engine's loop in a thread; events arrive in the event loop that `start` ran in."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._inbox = QueueInbox()
        self._ended: asyncio.Event | None = None  # set when the thread ends

    async def start(self, model_folder: Path) -> None:
        event_loop = asyncio.get_running_loop()

        def send(event: Event) -> None:
            try:
                event_loop.call_soon_threadsafe(self._receive, event)
            except RuntimeError:  # the event loop is closed: nobody listens
                inbox.put(Shutdown())

        inbox = self._inbox
        ended = self._ended = asyncio.Event()

        def work() -> None:
            try:
                run_engine(self.settings, model_folder, inbox, send)
            finally:
                with suppress(RuntimeError):  # the event loop is closed
                    event_loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=work, name="engine", daemon=True).start()
        await self._wait_ready()

    async def shutdown(self) -> None:
        self._closing = True
        if self._ended is not None:
            self._send(Shutdown())
            await self._ended.wait()
        self._die("the engine was shut down")

    def _send(self, command: Command) -> None:
        self._inbox.put(command)


class QueueInbox:
    """An `Inbox` inside one process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | None] = SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def wake(self) -> None:
        self._queue.put(None)

    def receive(self, timeout: float) -> list[Command]:
        commands: list[Command] = []
        try:
            if timeout > 0:
                self._add(commands, self._queue.get(timeout=timeout))
            while True:
                self._add(commands, self._queue.get_nowait())
        except Empty:
            return commands

    @staticmethod
    def _add(commands: list[Command], command: Command | None) -> None:
        if command is not None:
            commands.append(command)
