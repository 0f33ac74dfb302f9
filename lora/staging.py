"""Large tensors on their way from host memory to the device."""

from collections import deque

import torch
from torch import Tensor

_BUFFER_BYTES = 2**23  # larger pieces: the thread that copies them has to wait less for its turn
_NUM_BUFFERS = 4


class Staging:
    """Pinned buffers that tensors in pageable memory go through, piece by piece. Pinned ones need
    none: the device copies them by itself.

    All are taken at the start: to allocate pinned memory makes the device end its work first
    ("implicit synchronization" in the CUDA C++ Programming Guide).
    """

    def __init__(self, device: torch.device) -> None:
        """On the CPU it has no buffers, and nothing to do."""
        self._device = device
        self._ring: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # longest in use first
        if device.type == "cuda":
            pinned = torch.empty(_NUM_BUFFERS, _BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._ring.extend((buffer, torch.cuda.Event()) for buffer in pinned)  # type: ignore[no-untyped-call]

    def to_device(self, values: Tensor) -> Tensor:
        """A copy, as `fill` makes it; what is there already is returned as it is."""
        copy = self.room_for(values)
        self.fill(copy, values)
        return copy

    def room_for(self, values: Tensor) -> Tensor:
        """Where a copy of them can go: memory for the current stream; themselves, if they are
        there already. May be called by another thread than `fill`."""
        if values.device.type == self._device.type:
            return values
        return torch.empty(values.shape, dtype=values.dtype, device=self._device)

    def fill(self, room: Tensor, values: Tensor) -> None:
        """Copy them to what `room_for` gave, on the current stream. Pinned ones must not change
        until that has come so far. Others are copied as they are now: that takes as long as the
        host needs for it, and waits for earlier copies while all buffers are in use. One thread at
        a time may call it."""
        if room is values:
            return
        if values.is_pinned():
            room.copy_(values, non_blocking=True)
            return
        for piece, target in zip(_pieces(values), _pieces(room), strict=True):
            self._copy_piece(target, piece)

    def _copy_piece(self, target: Tensor, piece: Tensor) -> None:
        buffer, event = self._ring[0]
        event.synchronize()
        target.copy_(buffer[: len(piece)].copy_(piece), non_blocking=True)
        event.record()
        self._ring.rotate(-1)


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    return torch.split(values.reshape(-1).view(torch.uint8), _BUFFER_BYTES)
