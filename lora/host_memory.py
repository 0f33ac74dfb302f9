"""Host memory for what is large: whole files, and adapters."""

import contextlib
import errno
import logging
import mmap
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.cuda import CudaError

_log = logging.getLogger(__name__)

CPU = torch.device("cpu")
_SUCCESS = 0  # cudaError_t


class Pages(mmap.mmap):
    """Zeros, in pages that hold nothing else, made when something is written to them.

    Huge pages where there are any: else each page of 4 KiB is a fault at the first write.
    """

    num_bytes: int
    _pinned: tuple[torch.device, int] | None = None  # for which device, and their address

    def __new__(cls, num_bytes: int) -> "Pages":
        """Raises MemoryError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            pages = super().__new__(cls, -1, max(1, num_bytes), flags=flags)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError from None
            raise
        pages.num_bytes = num_bytes
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def tensor(self) -> Tensor:
        """All of them: (num_bytes,) uint8. It holds the pages."""
        return torch.frombuffer(self, dtype=torch.uint8)[: self.num_bytes]

    def pin(self, device: torch.device) -> None:
        """Let a GPU copy from them by itself, for as long as they are there.

        Fast once they are written; to allocate pinned memory takes many times as long, and the
        device stands still. Where it is not allowed, that is logged, and copies take longer.
        """
        address = self.tensor().data_ptr()
        if _call("cudaHostRegister", device, address, len(self), 0):
            self._pinned = device, address

    def __del__(self) -> None:
        if self._pinned is not None and not sys.is_finalizing():
            device, address = self._pinned
            _call("cudaHostUnregister", device, address)


def _call(name: str, device: torch.device, *args: int) -> bool:
    """A function of the CUDA runtime; whether it could do it."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):  # a thread's own is the first GPU, which would be set up
        error = int(getattr(cudart, name)(*args))
        if error != _SUCCESS:
            _warn(f"{name}: {CudaError(error)}")
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)  # raises the error once more, then it is forgotten
    return error == _SUCCESS


@cache
def _warn(message: str) -> None:
    """Once: it would be the same for every adapter."""
    _log.warning("adapters cannot be pinned in host memory, so copies take longer: %s", message)
