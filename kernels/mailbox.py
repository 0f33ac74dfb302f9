"""Memory in which the ranks of a process group leave rows of hidden states for each other.

Nothing here needs Triton, which some CPU platforms do not have.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_BYTES = 64 * 2**20
_ROW_WORDS = 2**13
_PUSHED_BYTES = 4 * 2**20  # to all others in one call; past it, sums that send less are faster


def mailbox_shape(num_ranks: int) -> tuple[int, int, int, int]:
    """Of each rank's int64 words: two calls, their rows, whose row it is, two values a word."""
    return 2, _BYTES // (2 * num_ranks * _ROW_WORDS * 8), num_ranks, _ROW_WORDS


class Mailbox:
    """What `kernels.all_reduce_norm` works with, which alone may touch it."""

    def __init__(self, rank: int, boxes: Sequence[Tensor]) -> None:
        """boxes: those of all ranks, each of `mailbox_shape` in memory that this rank can write.

        They must be zeros on all ranks before the first call on any.
        """
        self.rank = rank
        self.boxes = boxes
        _, self.num_rows, self.num_ranks, self.row_words = boxes[rank].shape
        device = boxes[rank].device
        self.addresses = torch.tensor([box.data_ptr() for box in boxes], device=device)
        self.num_calls = torch.zeros(self.num_rows, dtype=torch.int32, device=device)  # by row

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel can sum up such hidden states, (T, size), and had better do it."""
        num_rows, size = x.shape
        fits = num_rows <= self.num_rows and size % 2 == 0 and size // 2 <= self.row_words
        pushed = (self.num_ranks - 1) * num_rows * size // 2 * 8
        return fits and pushed <= _PUSHED_BYTES and x.dtype in (torch.bfloat16, torch.float16)
