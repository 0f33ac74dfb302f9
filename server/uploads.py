"""Uploads of adapters: multipart bodies, written to a folder of the server's own as they come.

    .upload-ID/   while it is being received; nothing is ever loaded from there
    upload-ID/    whole and durable; removed when nothing uses it any more

What a crash leaves behind is removed at the next start. A few come at a time, each is limited in
size, and all that are kept are limited by their disk: `MIN_FREE` of it stays free.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request
from filelock import BaseFileLock
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from lorakeet.server.errors import (
    APIError,
    BadRequestError,
    BodyTooLargeError,
    ForbiddenError,
    InsufficientStorageError,
    OverloadedError,
)
from lorakeet.server.files import DurableFile, in_thread, is_full, sync_folder, take_folder

logger = logging.getLogger(__name__)

FILES = frozenset(
    "adapter_config.json adapter_model.safetensors tokenizer.json tokenizer_config.json"
    " special_tokens_map.json added_tokens.json vocab.json merges.txt tokenizer.model"
    " chat_template.jinja generation_config.json README.md".split()
)
REQUIRED = ("adapter_config.json", "adapter_model.safetensors")
FIELDS = frozenset(("name", "lora_name", "load_inplace", "pinned"))
MAX_FIELD_BYTES = 1024
MAX_RUNNING = 4  # uploads at once: each holds three blocks in memory and up to two threads
MIN_FREE = 2**30  # bytes of the disk that no upload may take
_FOLDER = re.compile(r"\.?upload-[0-9a-f]{32}")
_BLOCK = 2**20  # bytes that are handed to a thread at a time
_MOST_CHUNKS = 2**10  # of a block: small ones take more memory than they have bytes
_OVERHEAD = 2**16  # bytes of a body that are not files


@dataclass
class Upload:
    """What a body held: its fields, and a folder with its files."""

    folder: Path
    fields: dict[str, str] = field(default_factory=dict)


class Uploads:
    def __init__(self, folder: Path | None, limit: int) -> None:
        """None: nothing may be uploaded. `limit`: bytes of all files of one upload."""
        self._folder = None if folder is None else Path(folder).resolve()
        self._limit = limit
        self._lock: BaseFileLock | None = None
        self._running = 0
        self._removals: set[asyncio.Task[None]] = set()

    def open(self, used: Collection[Path]) -> None:
        """Hold the folder, and remove what is none of `used`. Waits for the disk; FolderError."""
        if self._folder is None:
            return
        self._lock = take_folder(self._folder)
        for folder in self._folder.iterdir():
            if _FOLDER.fullmatch(folder.name) and folder not in used:
                shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        if self._removals:
            await asyncio.wait(self._removals)
        if self._lock is not None:
            self._lock.release()

    async def receive(self, request: Request) -> Upload:
        """Write the body's files to a folder, which is then durable, and removed by `discard`.

        Raises ForbiddenError when uploads are off, OverloadedError, BodyTooLargeError,
        InsufficientStorageError, BadRequestError, and another APIError when the disk fails; no
        failure, client that goes, or crash leaves anything behind that could be loaded.
        """
        if self._folder is None:
            message = "Uploads are off: start the server with --adapter-upload-dir"
            raise ForbiddenError(message, code="uploads_disabled")
        length = self._announced(request)
        number = uuid.uuid4().hex
        temporary, final = self._folder / f".upload-{number}", self._folder / f"upload-{number}"
        receiver = _Receiver(temporary, _boundary(request), self._limit, length)
        with self._place():
            try:
                await _receive(request, receiver)
                await in_thread(_finish, receiver, final)
            except BaseException as error:
                await asyncio.shield(asyncio.to_thread(receiver.abandon))
                self.discard(final)  # it has this name already when only the last sync has failed
                if isinstance(error, OSError):
                    raise _disk_failed(error) from None
                raise
        return Upload(final, receiver.fields)

    def discard(self, folder: Path, after: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Remove a folder of an upload, in the background; any other is left alone.

        It stays, at least until the next start, when what comes before says so.
        """

        async def remove() -> None:
            if after is None or await after():
                await asyncio.to_thread(shutil.rmtree, folder, True)

        if self.owns(folder) and _FOLDER.fullmatch(folder.name):
            task = asyncio.create_task(remove())
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    def owns(self, folder: Path) -> bool:
        return folder.parent == self._folder

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        if self._running >= MAX_RUNNING:
            message = f"{MAX_RUNNING} uploads are being received: try again later"
            raise OverloadedError(message, code="too_many_uploads")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _announced(self, request: Request) -> int:
        """How many bytes are to come; 0 when that is not known."""
        header = request.headers.get("content-length", "")
        length = int(header) if header.isdecimal() else 0
        if length > self._limit + _OVERHEAD:
            raise _too_large(self._limit)
        return length


async def _receive(request: Request, receiver: "_Receiver") -> None:
    """Each block is written while the next one comes; a failure of either ends both."""
    writing: asyncio.Task[None] | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            async for block in _blocks(request):
                if writing is not None:
                    await writing
                writing = tasks.create_task(in_thread(receiver.feed, block))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size >= _BLOCK or len(chunks) >= _MOST_CHUNKS:
            yield b"".join(chunks)
            chunks, size = [], 0
    yield b"".join(chunks)


def _finish(receiver: "_Receiver", final: Path) -> None:
    receiver.finish()
    receiver.folder.rename(final)
    sync_folder(final.parent)


def _boundary(request: Request) -> bytes:
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 256:
        raise BadRequestError("The multipart body has no boundary", code="invalid_body")
    return boundary


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The upload is larger than {limit} bytes (--adapter-upload-limit)")


def _disk_failed(error: OSError) -> APIError:
    logger.error("an upload cannot be written: %s", error)
    message = f"The upload cannot be written: {error.strerror}"
    if is_full(error):
        return InsufficientStorageError(message)
    return APIError(message, code="upload_failed")


class _Receiver:
    """Takes a multipart body in pieces: files go to the folder, fields are kept. No event loop."""

    def __init__(self, folder: Path, boundary: bytes, limit: int, announced: int) -> None:
        self.folder = folder
        self.fields: dict[str, str] = {}
        self._limit = limit
        self._announced = announced
        self._num_bytes = 0  # of files
        self._num_received = 0
        self._is_complete = False
        self._headers: dict[bytes, bytes] = {}
        self._header = (bytearray(), bytearray())  # name and value of the present one
        self._file: DurableFile | None = None
        self._field: tuple[str, bytearray] | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": lambda data, i, j: self._header[0].extend(data[i:j]),
                "on_header_value": lambda data, i, j: self._header[1].extend(data[i:j]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._add,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Raises BadRequestError, BodyTooLargeError, InsufficientStorageError, and OSError."""
        self._check_free(max(len(data), self._announced - self._num_received))
        self.folder.mkdir(exist_ok=True)
        self._num_received += len(data)
        if self._num_received > self._limit + _OVERHEAD:  # also behind the end, where none is read
            raise _too_large(self._limit)
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            message = f"The multipart body is damaged: {error}"
            raise BadRequestError(message, code="invalid_body") from None

    def _check_free(self, wanted: int) -> None:
        """Before each block: others write to this disk, too."""
        if shutil.disk_usage(self.folder.parent).free < MIN_FREE + wanted:
            message = (
                "The upload does not fit on the disk of --adapter-upload-dir, "
                f"where {MIN_FREE} bytes must stay free"
            )
            raise InsufficientStorageError(message)

    def finish(self) -> None:
        """All has come: check it, and make it durable."""
        if not self._is_complete:
            raise BadRequestError("The multipart body ends too early", code="invalid_body")
        for name in REQUIRED:
            if not (self.folder / name).is_file():
                message = f"The file {name} is missing"
                raise BadRequestError(message, param=name, code="missing_file")
        sync_folder(self.folder)

    def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what it could not write
                self._file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        name.clear()
        value.clear()
        if sum(map(len, self._headers.values())) > MAX_FIELD_BYTES:
            message = "The multipart body is damaged: a part has too many headers"
            raise BadRequestError(message, code="invalid_body")

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options:
            self._file = self._open(options[b"filename"].decode("utf-8", "replace"), name)
        elif name in FIELDS and name not in self.fields:
            self._field = (name, bytearray())
        else:
            message = f"Unknown or repeated field: {name[:100]}"
            raise BadRequestError(message, param=name[:100], code="unknown_field")

    def _open(self, filename: str, field_name: str) -> DurableFile:
        """By the file's own name, or else that of its field."""
        name = next((one for one in (filename, field_name) if one in FILES), None)
        if name is None:
            message = f"{filename[:100]!r} is no file of an adapter; allowed: {sorted(FILES)}"
            raise BadRequestError(message, param="filename", code="file_not_allowed")
        try:
            return DurableFile(self.folder / name)
        except FileExistsError:
            message = f"The file {name} was sent twice"
            raise BadRequestError(message, param=name, code="invalid_value") from None

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._num_bytes += end - start
            if self._num_bytes > self._limit:
                raise _too_large(self._limit)
            self._file.write(memoryview(data)[start:end])
        elif self._field is not None:
            self._field[1].extend(data[start:end])
            if len(self._field[1]) > MAX_FIELD_BYTES:
                name = self._field[0]
                raise BadRequestError(f"{name} is too long", param=name, code="invalid_value")

    def _end_part(self) -> None:
        if self._file is not None:
            self._file.finish()
            self._file = None
        elif self._field is not None:
            name, value = self._field
            self.fields[name] = value.decode("utf-8", "replace")
            self._field = None

    def _end(self) -> None:
        self._is_complete = True
