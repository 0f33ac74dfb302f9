"""A server whose adapters can fail at every step of a load: `python faults.py ARGUMENTS OF SERVE`.

A file named `fault` in an adapter's folder says how: "memory" and "crash" end the read, "slow"
holds it up, "copy" lets every second copy to the pool fail. All else is the real server, with the
engine in a thread of the same process, and copies to the pool in another, as on CUDA.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch

from lorakeet.lora import host_store, row_writer
from lorakeet.lora.adapter import Adapter
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.streams import side_thread
from lorakeet.server import serve
from lorakeet.server.engine.inline import InlineEngine

SLOW_SECONDS = 0.3


def install() -> None:
    fails_to_copy: set[str] = set()
    copies = itertools.count()
    copy = row_writer.RowWriter._copy

    def faulty_read(path: Path, *args: Any, **options: Any) -> Adapter:
        file = path / "fault"
        fault = file.read_text() if file.exists() else ""
        if fault == "memory":
            raise MemoryError
        if fault == "crash":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if fault == "slow":
            time.sleep(SLOW_SECONDS)
        adapter = read_adapter(path, *args, **options)
        if fault == "copy":
            fails_to_copy.add(adapter.digest)
        return adapter

    def faulty_copy(
        self: row_writer.RowWriter, rows: Sequence[int], adapter: Adapter, *args: Any
    ) -> Any:
        if adapter.digest in fails_to_copy and next(copies) % 2 == 0:
            raise RuntimeError("out of memory")
        return copy(self, rows, adapter, *args)

    def as_on_cuda(device: torch.device, name: str) -> Executor:
        return side_thread(torch.device("cuda"), name)

    vars(host_store)["read_adapter"] = faulty_read
    row_writer.RowWriter._copy = faulty_copy  # type: ignore[assignment, method-assign]
    vars(row_writer)["side_thread"] = as_on_cuda
    vars(serve)["EngineProcess"] = InlineEngine


if __name__ == "__main__":
    install()
    sys.argv[1:1] = ["serve"]
    from lorakeet.server.cli import main

    main()
