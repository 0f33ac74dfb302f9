"""Copies between host and device that the host does not wait for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pinned(array: NDArray[np.generic], device: torch.device | str) -> Tensor:
    """To copy from: for a GPU in pinned memory, else the array itself."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def upload(array: NDArray[np.generic], device: torch.device | str) -> Tensor:
    """A copy on the device, through pinned memory on CUDA; on the CPU the array itself."""
    return pinned(array, device).to(device, non_blocking=True)


def download(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Start a copy to the host; what is returned waits for it."""
    if tensor.device.type != "cuda":
        return tensor.numpy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> NDArray[Any]:
        event.synchronize()
        return host.numpy()

    return wait
