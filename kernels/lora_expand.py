# mypy: allow-untyped-decorators
"""The expand of large passes: what the shrink left through the B of each token, added to y."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.delta import Delta
from lorakeet.kernels.lora_tiles import expand, find_slice
from lorakeet.kernels.sizes import cdiv
from lorakeet.kernels.token_tiles import (
    columns_at_once,
    cut_of,
    delta_args,
    load_h,
    read_tile,
    scale_base,
)

_BLOCK = 64  # outputs that a program works on at a time


# what changes from step to step, or from layer to layer, must not compile anew
@triton.jit(
    do_not_specialize=["num_tokens", "h_slice_stride"],
    do_not_specialize_on_alignment=["count_at"],
)
def _expand_kernel(  # type: ignore[no-untyped-def]
    y,
    y_stride,
    first_size,
    other_size,
    columns,
    h,
    b,
    order,
    first,
    last,
    magnitudes,
    rows,
    count_at,
    num_tokens,
    span,
    h_slice_stride,
    b_row_stride,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0)
    tokens, in_tile, own_first, own_last, low, high = read_tile(
        tile, order, first, last, count_at, num_tokens, BLOCK_M, BLOCK_R
    )
    magnitude = tl.load(magnitudes + tokens, mask=own_first < own_last, other=-1)
    has_magnitude = tl.max(magnitude, 0) >= 0
    in_tile = in_tile & (own_first < own_last)  # others keep every bit
    if high == 0:
        return

    slice_id, slice_start, size, block = find_slice(
        tl.program_id(1), first_size, other_size, columns, SLICES
    )
    h_slice = h + slice_id * h_slice_stride + tile * span * (BLOCK_M * BLOCK_R)
    near = (own_first < low + BLOCK_R) & (own_last > low)
    h_first = load_h(h_slice + low * BLOCK_M, near, BLOCK_M, BLOCK_R)
    j = low + tl.arange(0, BLOCK_R)
    row = tl.load(rows + j, mask=j < high, other=0).to(tl.int64)
    start = block * columns
    end = tl.minimum(start + columns, size)
    if (high <= low + BLOCK_R) & (has_magnitude == 0):
        for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            within = n0 + tl.arange(0, BLOCK_N)
            in_slice = within < size
            n = slice_start + within
            b_at = b + row[:, None] * b_row_stride + n[None, :]
            weights = tl.load(b_at, mask=(j < high)[:, None] & in_slice[None, :], other=0.0)
            y_at = y + tokens[:, None] * y_stride + n[None, :]
            mask = in_tile[:, None] & in_slice[None, :]
            total = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
            delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            total += expand(h_first, weights, delta, PRECISION)
            tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)
        return
    for n0 in range(start, end, BLOCK_N):
        within = n0 + tl.arange(0, BLOCK_N)
        in_slice = within < size
        n = slice_start + within
        y_at = y + tokens[:, None] * y_stride + n[None, :]
        mask = in_tile[:, None] & in_slice[None, :]
        total = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        total = scale_base(total, magnitude, b, n, in_slice, b_row_stride)
        for r0 in tl.range(low, high, BLOCK_R, num_stages=STAGES):
            j = r0 + tl.arange(0, BLOCK_R)
            row = tl.load(rows + j, mask=j < high, other=0).to(tl.int64)
            b_at = b + row[:, None] * b_row_stride + n[None, :]
            weights = tl.load(b_at, mask=(j < high)[:, None] & in_slice[None, :], other=0.0)
            near = (own_first < r0 + BLOCK_R) & (own_last > r0)
            h_tile = load_h(h_slice + r0 * BLOCK_M, near, BLOCK_M, BLOCK_R)
            total = expand(h_tile, weights, total, PRECISION)
        tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)


def sgemm_lora_b(y: Tensor, delta: Delta, slice_sizes: Sequence[int]) -> None:
    """Add a delta to y (T, out) in place: float32 sums, rounded once.

    slice_sizes: of the outputs; all but the first are equal.
    """
    first_size, other_size, others = slice_sizes[0], slice_sizes[-1], len(slice_sizes) - 1
    assert y.shape[1] == delta.b.shape[1] == first_size + others * other_size
    assert y.stride(1) == 1
    columns = columns_at_once(delta.rank_rows, y.shape[1], _BLOCK)
    blocks = cdiv(first_size, columns) + others * cdiv(other_size, columns)
    _expand_kernel[cut_of(delta.rank_rows).num_tiles, blocks](
        y,
        y.stride(0),
        first_size,
        other_size,
        columns,
        **delta_args(delta),
        BLOCK_N=_BLOCK,
        STAGES=3,
        num_warps=4,
    )
