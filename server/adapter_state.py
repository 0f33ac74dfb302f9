"""What outlives the server: registered adapters, names taken away, aliases. One JSON file."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from filelock import BaseFileLock

from lorakeet.server.aliases import Target
from lorakeet.server.files import FolderError, in_thread, take_folder, write_atomically

logger = logging.getLogger(__name__)

FILE_NAME = "lorakeet-state.json"
RETRY_SECONDS = 5.0  # between tries to save what could not be saved


class Registration(msgspec.Struct, frozen=True):
    """An adapter that was loaded by its path, and is loaded again at its first request."""

    path: str
    digest: str  # no other content is taken
    pinned: bool = False
    profile: str | None = None  # nor another `FolderProfile.digest`; None: an older file's


class State(msgspec.Struct, frozen=True):
    adapters: dict[str, Registration] = {}  # by name
    hidden: list[str] = []  # folders of the roots that were unloaded
    aliases: dict[str, tuple[Target, ...]] = {}


class StateFile:
    """The state's file in `folder`, held for as long as it is open; None: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock: BaseFileLock | None = None
        self._writing = asyncio.Lock()
        self._changes = 0
        self._written = 0
        self._retrying: asyncio.Task[bool] | None = None
        self._stopping = asyncio.Event()

    def open(self) -> State:
        """What was saved last. Waits for the disk; raises FolderError."""
        if self._folder is None:
            return State()
        self._lock = take_folder(self._folder)
        file = self._folder / FILE_NAME
        try:
            return msgspec.json.decode(file.read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except (OSError, msgspec.DecodeError) as error:
            raise FolderError(f"{file} cannot be read: {error}") from None

    async def save(self, state: Callable[[], State]) -> None:
        """Returns when the present state, or a later one, is on the disk, or nothing is kept.

        Raises OSError when it cannot be written; that is tried again until it succeeds.
        """
        if self._folder is None:
            return
        self._changes += 1
        change = self._changes
        async with self._writing:
            if self._written >= change:
                return
            latest = self._changes
            data = msgspec.json.format(msgspec.json.encode(state()))
            try:
                await in_thread(write_atomically, self._folder / FILE_NAME, data)
            except OSError as error:
                logger.error("registered adapters are not saved: %s", error)
                if self._retrying is None and not self._stopping.is_set():
                    self._retrying = asyncio.create_task(self._retry(state))
                raise
            self._written = latest

    async def saved(self, state: Callable[[], State]) -> bool:
        """As `save`, but waits until it succeeds; False: `stop` came first."""
        try:
            await self.save(state)
        except OSError:
            return self._retrying is not None and await asyncio.shield(self._retrying)
        return True

    async def _retry(self, state: Callable[[], State]) -> bool:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._stopping.wait()
            with contextlib.suppress(OSError):
                await self.save(state)
                self._retrying = None
                logger.info("registered adapters are saved again")
                return True
        return False

    async def stop(self) -> None:
        """Try a last time what could not be saved."""
        self._stopping.set()
        if self._retrying is not None:
            await self._retrying

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
