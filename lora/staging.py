"""Large tensors on their way from pageable memory to the device."""

from collections import deque

import torch
from torch import Tensor

_BUFFER_BYTES = 2**22
_NUM_BUFFERS = 64


class Staging:
    """Pinned buffers, 256 MiB, that tensors go through piece by piece.

    All are taken at the start: to pin memory later makes the device end its work first ("implicit
    synchronization" in the CUDA C++ Programming Guide).
    """

    def __init__(self, device: torch.device) -> None:
        """On the CPU it has no buffers, and nothing to do."""
        self._device = device
        self._ring: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # longest in use first
        if device.type == "cuda":
            pinned = torch.empty(_NUM_BUFFERS, _BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._ring.extend((buffer, torch.cuda.Event()) for buffer in pinned)  # type: ignore[no-untyped-call]

    def to_device(self, values: Tensor) -> Tensor:
        """A copy, made on the current stream, from `values` as they are now; what is there already
        is returned as it is. Waits for earlier copies while all buffers are in use."""
        if values.device.type == self._device.type:
            return values
        copy = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        for piece, target in zip(_pieces(values), _pieces(copy), strict=True):
            buffer, event = self._ring[0]
            event.synchronize()
            target.copy_(buffer[: len(piece)].copy_(piece), non_blocking=True)
            event.record()
            self._ring.rotate(-1)
        return copy


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    return torch.split(values.reshape(-1).view(torch.uint8), _BUFFER_BYTES)
