"""Files that must survive a crash whole, and folders that belong to one server at a time."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock, Timeout

T = TypeVar("T")


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
