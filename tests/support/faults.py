"""A server whose adapters can fail at every step of a load: `python faults.py ARGUMENTS OF SERVE`.

A file named `fault` in an adapter's folder says how: "memory" and "crash" end the read, "slow"
holds it up, "copy" lets every second copy to the pool fail. All else is the real server, with the
engine in a thread of the same process.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorakeet.lora import host_store
from lorakeet.lora.adapter import Adapter, Slot
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.pool import AdapterPool, PoolWrite
from lorakeet.server import serve
from lorakeet.server.engine.inline import InlineEngine

SLOW_SECONDS = 0.3


def install() -> None:
    fails_to_copy: set[str] = set()
    copies = itertools.count()
    write = AdapterPool.write

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

    def faulty_write(
        self: AdapterPool, slot: Slot, rows: Sequence[int], adapter: Adapter
    ) -> PoolWrite:
        if adapter.digest in fails_to_copy and next(copies) % 2 == 0:
            raise RuntimeError("out of memory")
        return write(self, slot, rows, adapter)

    vars(host_store)["read_adapter"] = faulty_read
    AdapterPool.write = faulty_write  # type: ignore[method-assign]
    vars(serve)["EngineProcess"] = InlineEngine


if __name__ == "__main__":
    install()
    sys.argv[1:1] = ["serve"]
    from lorakeet.server.cli import main

    main()
