"""A server whose adapters can fail at every step of a load: `python faults.py ARGUMENTS OF SERVE`.

A file named `fault` in an adapter's folder says how: "memory" and "crash" end the read before it
begins, "slow" holds it up there. In the midst of it, "slow disk" holds up the read of the weights,
"bad disk" and "cut" end it; for "memory for file", "memory for block" and "memory for copy" there
is no room when the file is read, or checked and packed; for "memory for tokenizer" none when the
texts of the folder have been read. "copy" lets every second copy to the pool fail. With such a file
in the state's folder, every third write of the state finds the disk full in its midst.

All else is the real server, with the engine in a thread of the same process, and copies to the pool
in another, as on CUDA.
"""

import errno
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorakeet.lora import canonical, host_store, peft_files, row_writer, tensor_file
from lorakeet.lora.adapter import Adapter
from lorakeet.lora.host_memory import Pages
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.streams import side_thread
from lorakeet.lora.tensor_file import read_tensors
from lorakeet.server import adapter_state, serve
from lorakeet.server.adapter_tokenizers import AdapterTokenizers
from lorakeet.server.engine.inline import InlineEngine
from lorakeet.server.files import write_atomically
from lorakeet.server.tokens import Tokenizer

SLOW_SECONDS = 0.3
RETRY_SECONDS = 0.2  # until a state that could not be saved is written again
_NUM_HASHES = 4  # pieces of work for the digest: three layers, and biases

_fault: ContextVar[str] = ContextVar("fault", default="")  # of what this thread reads
_fails_to_copy: set[str] = set()  # digests


def fault_in(folder: Path) -> str:
    file = folder / "fault"
    return file.read_text() if file.exists() else ""


def install() -> None:
    _install_in_reads()
    _install_in_copies()
    _install_in_server()


def _install_in_reads() -> None:
    def faulty_read(path: Path, *args: Any, workers: Executor, **options: Any) -> Adapter:
        fault = fault_in(path)
        if fault == "memory":
            raise MemoryError
        if fault == "crash":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if fault == "slow":
            time.sleep(SLOW_SECONDS)
        if fault == "memory for copy":
            workers = _FaultyWorkers(workers)
        token = _fault.set(fault)
        try:
            adapter = read_adapter(path, *args, workers=workers, **options)
        finally:
            _fault.reset(token)
        if fault == "copy":
            _fails_to_copy.add(adapter.digest)
        return adapter

    def faulty_tensors(file: BufferedReader, size: int) -> dict[str, Tensor]:
        return read_tensors(_FaultyFile(file), size)  # type: ignore[arg-type]

    def faulty_pages(fault: str) -> Callable[[int], Pages]:
        def make(num_bytes: int) -> Pages:
            if _fault.get() == fault:
                raise MemoryError
            return Pages(num_bytes)

        return make

    vars(host_store)["read_adapter"] = faulty_read
    vars(peft_files)["read_tensors"] = faulty_tensors
    vars(tensor_file)["Pages"] = faulty_pages("memory for file")
    vars(canonical)["Pages"] = faulty_pages("memory for block")


class _FaultyFile:
    """A file with its adapter's fault in the middle of the tensors."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def readinto(self, buffer: memoryview) -> int:
        half = len(buffer) // 2
        count = self._file.readinto(buffer[:half])
        match _fault.get():
            case "slow disk":
                time.sleep(SLOW_SECONDS)
            case "bad disk":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "cut":
                return count
        return count + self._file.readinto(buffer[half:])


class _FaultyWorkers(Executor):
    """The second of the pieces that are packed finds no memory."""

    def __init__(self, workers: Executor) -> None:
        self._workers = workers
        self._numbers = itertools.count()

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        if next(self._numbers) == _NUM_HASHES + 1:
            return self._workers.submit(_find_no_memory)
        return self._workers.submit(work, *args, **options)


def _find_no_memory() -> None:
    raise MemoryError


def _install_in_copies() -> None:
    copies = itertools.count()
    copy = row_writer.RowWriter._copy

    def faulty_copy(
        self: row_writer.RowWriter, rows: Sequence[int], adapter: Adapter, *args: Any
    ) -> Any:
        if adapter.digest in _fails_to_copy and next(copies) % 2 == 0:
            raise RuntimeError("out of memory")
        return copy(self, rows, adapter, *args)

    def as_on_cuda(device: torch.device, name: str) -> Executor:
        return side_thread(torch.device("cuda"), name)

    row_writer.RowWriter._copy = faulty_copy  # type: ignore[assignment, method-assign]
    vars(row_writer)["side_thread"] = as_on_cuda


def _install_in_server() -> None:
    writes = itertools.count()
    load_tokenizer = AdapterTokenizers.load

    def faulty_load(self: AdapterTokenizers, folder: Path) -> tuple[bytes | None, Tokenizer]:
        if fault_in(folder) == "memory for tokenizer":
            raise MemoryError
        return load_tokenizer(self, folder)

    def faulty_write(path: Path, data: bytes) -> None:
        if fault_in(path.parent) and next(writes) % 3 == 0:
            path.with_name(f".{path.name}.new").write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomically(path, data)

    AdapterTokenizers.load = faulty_load  # type: ignore[method-assign]
    vars(adapter_state).update(write_atomically=faulty_write, RETRY_SECONDS=RETRY_SECONDS)
    vars(serve)["EngineProcess"] = InlineEngine


if __name__ == "__main__":
    install()
    sys.argv[1:1] = ["serve"]
    from lorakeet.server.cli import main

    main()
