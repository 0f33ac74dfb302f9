# mypy: allow-untyped-decorators
"""Residual sum and RMSNorm in one pass over the rows, with the delta of each row's adapter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.delta import delta_args, read_segment
from lorakeet.kernels.segments import Delta

_RANKS = 16  # the most rows of B that a program holds at a time
_WEIGHTS = 2**16  # the most values of them


@triton.jit
def _expand_row(  # type: ignore[no-untyped-def]
    position,
    rank,
    table_row,
    n,
    in_row,
    h,
    b,
    num_positions,
    max_rank,
    b_row_stride,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(N,) float32: all columns of what an adapter adds to one row, without its scaling."""
    split = tl.arange(0, BLOCK_S)
    h_rows = h + (split * num_positions + position).to(tl.int64) * max_rank
    delta = tl.zeros([BLOCK_N], dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        j = first_rank + tl.arange(0, BLOCK_R)
        in_rank = j < rank
        rows = tl.load(table_row + j, mask=in_rank, other=0).to(tl.int64)
        b_tile = b + rows[:, None] * b_row_stride + n[None, :]
        weights = tl.load(b_tile, mask=in_rank[:, None] & in_row[None, :], other=0.0)
        h_mask = (split < SPLITS)[:, None] & in_rank[None, :]
        h_row = tl.sum(tl.load(h_rows[:, None] + j[None, :], mask=h_mask, other=0.0), 0)
        delta += tl.sum(h_row[:, None] * weights.to(tl.float32), 0)
    return delta


@triton.jit
def _finish_row(  # type: ignore[no-untyped-def]
    values, token, n, in_row, residual, weight, total, normed, size, eps
):
    """Add the residual to a row's values (N,) and norm the sum; store both."""
    values += tl.load(residual + token * size + n, mask=in_row, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + token * size + n, rounded, mask=in_row)
    values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    scale = tl.load(weight + n, mask=in_row, other=0.0).to(tl.float32)
    result = values * factor * scale
    tl.store(normed + token * size + n, result.to(normed.dtype.element_ty), mask=in_row)


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    y, residual, weight, total, normed, y_stride, size, eps, BLOCK_N: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    in_row = n < size
    values = tl.load(y + token * y_stride + n, mask=in_row, other=0.0).to(tl.float32)
    _finish_row(values, token, n, in_row, residual, weight, total, normed, size, eps)


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["num_positions"])
def _expand_add_norm_kernel(  # type: ignore[no-untyped-def]
    y,
    residual,
    weight,
    total,
    normed,
    y_stride,
    size,
    eps,
    h,
    b,
    permutation,
    starts,
    lengths,
    weight_indices,
    scalings,
    ranks,
    row_table,
    num_positions,
    num_slices,
    max_rank,
    b_row_stride,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row of a segment: too few rows share an adapter's weights for a product of tiles."""
    start, length, scaling, rank, table_row = read_segment(
        tl.program_id(0), starts, lengths, weight_indices, scalings, ranks, row_table, max_rank
    )
    if tl.program_id(1) >= length:
        return
    position = start + tl.program_id(1)
    token = tl.load(permutation + position).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    in_row = n < size
    values = tl.load(y + token * y_stride + n, mask=in_row, other=0.0).to(tl.float32)
    values += scaling * _expand_row(
        position,
        rank,
        table_row,
        n,
        in_row,
        h,
        b,
        num_positions,
        max_rank,
        b_row_stride,
        SPLITS,
        BLOCK_S,
        BLOCK_R,
        BLOCK_N,
    )
    _finish_row(values, token, n, in_row, residual, weight, total, normed, size, eps)


def add_rms_norm(
    y: Tensor, delta: Delta | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Semantics: total = residual + (y + delta); normed = total / rms(total) · weight.

    y: (T, size); residual: (T, size), contiguous; weight: (size,). Returns normed and total, of
    residual's dtype; sums are float32, total is rounded before it is normed.
    """
    num_rows, size = residual.shape
    assert y.shape == residual.shape
    assert y.stride(1) == 1
    assert residual.is_contiguous()
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    args = (y, residual, weight, total, normed, y.stride(0), size, eps)
    columns = triton.next_power_of_2(size)
    if delta is None:
        _add_norm_kernel[(num_rows,)](*args, BLOCK_N=columns, num_warps=4)
        return normed, total
    _expand_add_norm_kernel[delta.segments.starts.shape[0], delta.segments.block](
        *args,
        **delta_args(delta),
        BLOCK_S=triton.next_power_of_2(delta.h.shape[0]),
        BLOCK_R=max(1, min(_RANKS, _WEIGHTS // columns)),
        BLOCK_N=columns,
        num_warps=16,
        num_stages=1,
    )
    return normed, total
