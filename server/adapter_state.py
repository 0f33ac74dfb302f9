"""What outlives the server: registered adapters, names taken away, aliases. One JSON file."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from filelock import BaseFileLock

from lorakeet.server.aliases import Target
from lorakeet.server.files import FolderError, take_folder, write_atomically

logger = logging.getLogger(__name__)

FILE_NAME = "lorakeet-state.json"


class Registration(msgspec.Struct, frozen=True):
    """An adapter that was loaded by its path, and is loaded again at its first request."""

    path: str
    digest: str  # no other content is taken
    pinned: bool = False


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

    async def save(self, state: Callable[[], State]) -> bool:
        """Returns when the present state, or a later one, is on the disk; False, and a log line,
        when it could not be written. True where nothing is kept."""
        if self._folder is None:
            return True
        self._changes += 1
        change = self._changes
        async with self._writing:
            if self._written >= change:
                return True
            latest = self._changes
            data = msgspec.json.format(msgspec.json.encode(state()))
            try:
                await asyncio.to_thread(write_atomically, self._folder / FILE_NAME, data)
            except OSError as error:
                logger.error("registered adapters are not saved: %s", error)
                return False
            self._written = latest
            return True

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
