"""Host memory for what is large: whole files, and adapters."""

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: torch's own, that of a cache line


def zeros(num_bytes: int) -> Tensor:
    """(num_bytes,) uint8, aligned; its pages are only made when something is written to them.

    numpy asks the kernel for huge pages (https://numpy.org/doc/stable/reference/global_state.html),
    torch does not: each page of 4 KiB would be a fault at the first write.
    """
    array = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -array.ctypes.data % _ALIGNMENT
    return torch.from_numpy(array[start : start + num_bytes])
