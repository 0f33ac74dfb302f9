# mypy: allow-untyped-decorators
"""SiLU(gate) · up, with the deltas of each row's adapter in gate and up."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.delta import (
    ROWS,
    delta_args,
    expand_tile,
    rank_block,
    read_ranks,
    read_segment,
)
from lorakeet.kernels.segments import Delta

_COLUMNS = 1024  # outputs of a program without deltas
_BLOCK = 64  # outputs that a program with deltas works out at a time
_MOST_BLOCKS = 4  # of these in a program, where that leaves enough programs to fill a GPU
_PROGRAMS = 2048


@triton.jit
def _silu_mul_kernel(gate_up, out, y_stride, size, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < size
    row = gate_up + token * y_stride + n
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + size, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + token * size + n, result.to(out.dtype.element_ty), mask=mask)


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["num_positions"])
def _expand_silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    y_stride,
    size,
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
    columns,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One segment and several blocks of columns; a block's weights load while others multiply."""
    start, length, scaling, rank, table_row = read_segment(
        tl.program_id(0), starts, lengths, weight_indices, scalings, ranks, row_table, max_rank
    )
    if length == 0:
        return
    m = tl.arange(0, BLOCK_M)
    in_tile = m < length
    positions = start + m
    tokens = tl.load(permutation + positions, mask=in_tile, other=0).to(tl.int64)
    gate_h, rows, in_rank = read_ranks(
        0,
        positions,
        in_tile,
        0,
        scaling,
        rank,
        table_row,
        h,
        num_positions,
        num_slices,
        max_rank,
        SPLITS,
        BLOCK_M,
        BLOCK_R,
    )
    up_h, _, _ = read_ranks(
        0,
        positions,
        in_tile,
        1,
        scaling,
        rank,
        table_row,
        h,
        num_positions,
        num_slices,
        max_rank,
        SPLITS,
        BLOCK_M,
        BLOCK_R,
    )
    first = tl.program_id(1) * columns
    for n0 in range(first, tl.minimum(first + columns, size), BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        in_slice = n < size
        mask = in_tile[:, None] & in_slice[None, :]
        row = gate_up + tokens[:, None] * y_stride + n[None, :]
        gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row + size, mask=mask, other=0.0).to(tl.float32)
        for block in tl.static_range(RANK_BLOCKS):
            if RANK_BLOCKS > 1:
                gate_h, rows, in_rank = read_ranks(
                    block,
                    positions,
                    in_tile,
                    0,
                    scaling,
                    rank,
                    table_row,
                    h,
                    num_positions,
                    num_slices,
                    max_rank,
                    SPLITS,
                    BLOCK_M,
                    BLOCK_R,
                )
                up_h, _, _ = read_ranks(
                    block,
                    positions,
                    in_tile,
                    1,
                    scaling,
                    rank,
                    table_row,
                    h,
                    num_positions,
                    num_slices,
                    max_rank,
                    SPLITS,
                    BLOCK_M,
                    BLOCK_R,
                )
            b_tile = b + rows[:, None] * b_row_stride + n[None, :]
            b_mask = in_rank[:, None] & in_slice[None, :]
            gate_weights = tl.load(b_tile, mask=b_mask, other=0.0)
            up_weights = tl.load(b_tile + size, mask=b_mask, other=0.0)
            gate = expand_tile(gate_h, gate_weights, gate, PRECISION)
            up = expand_tile(up_h, up_weights, up, PRECISION)
        result = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        tl.store(out + tokens[:, None] * size + n[None, :], result, mask=mask)


def silu_mul(gate_up: Tensor, delta: Delta | None) -> Tensor:
    """Semantics: silu(gate) · up of (gate, up) = gate_up + delta.

    gate_up: (T, 2 · size). Returns (T, size) of its dtype, worked out in float32.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if delta is None:
        _silu_mul_kernel[num_rows, triton.cdiv(size, _COLUMNS)](
            gate_up, out, gate_up.stride(0), size, BLOCK_N=_COLUMNS, num_warps=4
        )
        return out
    num_segments = delta.segments.starts.shape[0]
    blocks = num_segments * triton.cdiv(size, _BLOCK) // _PROGRAMS
    columns = _BLOCK * min(_MOST_BLOCKS, max(1, blocks))
    ranks = rank_block(delta)
    _expand_silu_mul_kernel[num_segments, triton.cdiv(size, columns)](
        gate_up,
        out,
        gate_up.stride(0),
        size,
        **delta_args(delta),
        columns=columns,
        RANK_BLOCKS=triton.cdiv(delta.h.shape[3], ranks),
        BLOCK_M=ROWS,
        BLOCK_R=ranks,
        BLOCK_N=_BLOCK,
        num_warps=4,
        num_stages=3,
    )
    return out
