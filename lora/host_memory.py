"""Host memory for what is large: whole files, and adapters."""

import contextlib
import logging
import mmap
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

    _pinned: tuple[torch.device, int] | None = None  # for which device, and their address

    def __new__(cls, num_bytes: int) -> "Pages":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = super().__new__(cls, -1, max(1, num_bytes), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def tensor(self, num_bytes: int) -> Tensor:
        """The first `num_bytes`, uint8. It holds the pages."""
        return torch.frombuffer(self, dtype=torch.uint8)[:num_bytes]

    def pin(self, device: torch.device) -> None:
        """Let a GPU copy from them by itself, for as long as they are there.

        Fast once they are written: 84 MB take 3 ms, an allocation of pinned memory 65, in which the
        device stands still. Where it is not allowed, that is logged, and copies take longer.
        """
        address = self.tensor(1).data_ptr()
        with torch.cuda.device(device):  # a thread's own is the first GPU, which would be set up
            error = int(_cudart().cudaHostRegister(address, len(self), 0))
            if error == _SUCCESS:
                self._pinned = device, address
                return
            _log.warning("host memory cannot be pinned, copies take longer: %s", CudaError(error))
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)  # raises the error once more, then it is forgotten

    def __del__(self) -> None:
        if self._pinned is not None:
            device, address = self._pinned
            with torch.cuda.device(device):
                _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
