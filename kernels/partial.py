# mypy: allow-untyped-decorators
"""A product's output that may come in parts: (T, N), or (parts, T, N) float32 to be summed up.

Kernels that split a product's inputs leave the sum to whoever reads it next.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Parts(NamedTuple):
    """How the parts of y lie."""

    num_parts: int
    num_rows: int
    size: int
    stride: int  # from part to part
    row_stride: int


def parts_of(y: Tensor) -> Parts:
    assert y.stride(-1) == 1
    num_parts, stride = (y.shape[0], y.stride(0)) if y.dim() == 3 else (1, 0)
    return Parts(num_parts, y.shape[-2], y.shape[-1], stride, y.stride(-2))


@triton.jit
def load_sum(at, part_stride, mask, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values at `at`, float32, summed over the parts."""
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return total
