"""Files that must survive a crash whole, and folders that belong to one server at a time."""

import asyncio
import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock, Timeout

T = TypeVar("T")

_SYNC_BYTES = 8 * 2**20  # that are worth a sync


class FolderError(Exception):
    """A folder of the server's own cannot be used; the message names it."""


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """As asyncio.to_thread; cancelled, it waits all the same: a thread cannot be stopped."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise


def is_full(error: OSError) -> bool:
    """The disk has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, data: bytes) -> None:
    """After a crash at any moment the file holds either its old content or `data`."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        sync_file(file)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_file(file: BinaryIO) -> None:
    """Make what was written durable."""
    file.flush()
    os.fsync(file.fileno())


class DurableFile:
    """A new file that goes to the disk while more of it comes: little is left to do at its end.

    Whatever fails on the disk raises OSError, though perhaps in a later call.
    """

    def __init__(self, path: Path) -> None:
        """Raises FileExistsError."""
        self._file = path.open("xb")
        self._thread = ThreadPoolExecutor(1, "sync")
        self._sync: Future[None] | None = None
        self._unsynced = 0  # bytes

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self._unsynced += len(data)
        if self._unsynced >= _SYNC_BYTES and (self._sync is None or self._sync.done()):
            self._check()
            self._sync = self._thread.submit(os.fdatasync, self._file.fileno())
            self._unsynced = 0

    def finish(self) -> None:
        """Durable, and closed."""
        self._check()
        sync_file(self._file)
        self.close()

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()

    def _check(self) -> None:
        if self._sync is not None:
            self._sync.result()


def sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_folder(folder: Path) -> FileLock:
    """Make the folder if need be, and hold it until the lock is released or the process ends.

    Raises FolderError when another server holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", thread_local=False)
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderError(f"{folder} is in use by another server") from None
    except OSError as error:
        raise FolderError(f"{folder} cannot be used: {error.strerror}") from None
    return lock
