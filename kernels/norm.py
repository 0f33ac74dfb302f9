# mypy: allow-untyped-decorators
"""Residual sum and RMSNorm in one pass over the rows, with the delta of each row's adapter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.delta import ROWS, delta_args, tile_grid, tile_rows
from lorakeet.kernels.segments import Delta

_UNROLL = 8  # rows of B read at a time


@triton.jit
def _expand_rows(  # type: ignore[no-untyped-def]
    positions,
    in_tile,
    n,
    in_row,
    h,
    b,
    slot,
    ranks,
    row_table,
    num_positions,
    max_rank,
    b_row_stride,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """(M, N) float32, as `expand_tile` of one slice: a few rows and all columns, rank by rank."""
    rank = tl.load(ranks + slot)
    table_row = row_table + slot.to(tl.int64) * max_rank
    split = tl.arange(0, BLOCK_S)
    in_splits = (split < SPLITS)[:, None] & in_tile[None, :]
    h_rows = split[:, None] * num_positions + positions[None, :]
    h_columns = h + h_rows.to(tl.int64) * max_rank
    delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first_rank in range(0, rank, UNROLL):
        for i in tl.static_range(UNROLL):
            # past the rank: the last row once more, times nothing
            j = tl.minimum(first_rank + i, rank - 1)
            row = tl.load(table_row + j).to(tl.int64)
            weights = tl.load(b + row * b_row_stride + n, mask=in_row, other=0.0)
            h_j = tl.sum(tl.load(h_columns + j, mask=in_splits, other=0.0), 0)
            h_j = tl.where(first_rank + i < rank, h_j, 0.0)
            delta += h_j[:, None] * weights.to(tl.float32)[None, :]
    return delta


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["num_rows", "num_positions"])
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    y,
    residual,
    weight,
    total,
    normed,
    num_rows,
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
    LORA: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
):
    tile = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_M
    if LORA:
        if first >= tl.load(lengths + tile):
            return
    positions, tokens, in_tile = tile_rows(
        tile, first, num_rows, permutation, starts, lengths, LORA, BLOCK_M
    )
    n = tl.arange(0, BLOCK_N)
    in_row = n < size
    mask = in_tile[:, None] & in_row[None, :]
    places = tokens[:, None] * size + n[None, :]
    values = tl.load(y + tokens[:, None] * y_stride + n[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    if LORA:
        slot = tl.load(weight_indices + tile)
        delta = _expand_rows(
            positions,
            in_tile,
            n,
            in_row,
            h,
            b,
            slot,
            ranks,
            row_table,
            num_positions,
            max_rank,
            b_row_stride,
            SPLITS,
            BLOCK_S,
            BLOCK_M,
            BLOCK_N,
            UNROLL,
        )
        values += delta * tl.load(scalings + tile)
    values += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + places, rounded, mask=mask)
    values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 1) / size + eps)
    scale = tl.load(weight + n, mask=in_row, other=0.0).to(tl.float32)
    result = values * factor[:, None] * scale[None, :]
    tl.store(normed + places, result.to(normed.dtype.element_ty), mask=mask)


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
    args = delta_args(delta)
    rows = 1
    grid = (tile_grid(delta, num_rows, rows), 1 if delta is None else ROWS // rows)
    _add_norm_kernel[grid](
        y,
        residual,
        weight,
        total,
        normed,
        num_rows,
        y.stride(0),
        size,
        eps,
        **args,
        BLOCK_S=triton.next_power_of_2(args["SPLITS"]),
        BLOCK_M=rows,
        BLOCK_N=triton.next_power_of_2(size),
        UNROLL=_UNROLL,
        num_warps=4 if delta is None else 8,
    )
    return normed, total
