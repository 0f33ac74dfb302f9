"""The engine in a thread of this process: for the offline API, notebooks and tests."""

import asyncio
import threading
from queue import Empty, SimpleQueue

from lorakeet.server.engine.client import EngineBase
from lorakeet.server.engine.messages import Command, Event, Shutdown
from lorakeet.server.engine.run import run_engine


class InlineEngine(EngineBase):
    """The engine's loop in a thread; events arrive in the event loop that `start` ran in."""

    async def start(self) -> None:
        event_loop = asyncio.get_running_loop()

        def send(event: Event) -> None:
            try:
                event_loop.call_soon_threadsafe(self._receive, event)
            except RuntimeError:  # the event loop is closed: nobody listens
                inbox.put(Shutdown())

        inbox = self._inbox = QueueInbox()
        self._thread = threading.Thread(
            target=run_engine, args=(self.settings, inbox, send), name="engine", daemon=True
        )
        self._thread.start()
        await self._wait_ready()

    async def shutdown(self) -> None:
        self._closing = True
        self._send(Shutdown())
        await asyncio.to_thread(self._thread.join)
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
