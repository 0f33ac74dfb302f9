# mypy: allow-untyped-decorators
"""SiLU(gate) · up; in large passes with the deltas of each token's adapter in gate and up."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.delta import Delta
from lorakeet.kernels.lora_tiles import expand
from lorakeet.kernels.partial import load_sum, parts_of
from lorakeet.kernels.sizes import cdiv
from lorakeet.kernels.token_tiles import (
    columns_at_once,
    cut_of,
    delta_args,
    load_h,
    read_tile,
    scale_base,
)

_COLUMNS = 1024  # outputs of a program without deltas
_DELTA_BLOCK = 64  # outputs that a program with deltas works on at a time


@triton.jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up, out, part_stride, y_stride, size, PARTS: tl.constexpr, BLOCK_N: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < size
    row = gate_up + token * y_stride + n
    gate = load_sum(row, part_stride, mask, PARTS)
    up = load_sum(row + size, part_stride, mask, PARTS)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + token * size + n, result.to(out.dtype.element_ty), mask=mask)


# what changes from step to step, or from layer to layer, must not compile anew
@triton.jit(
    do_not_specialize=["num_tokens", "h_slice_stride"],
    do_not_specialize_on_alignment=["count_at"],
)
def _expand_silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    y_stride,
    size,
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
    """A tile of tokens and some columns, block by block.

    Most tiles of tokens meet one tile of rank rows. Then its h is kept, and the next blocks of
    columns are on their way while one is worked on.
    """
    tile = tl.program_id(0)
    tokens, in_tile, own_first, own_last, low, high = read_tile(
        tile, order, first, last, count_at, num_tokens, BLOCK_M, BLOCK_R
    )
    magnitude = tl.load(magnitudes + tokens, mask=own_first < own_last, other=-1)
    has_magnitude = tl.max(magnitude, 0) >= 0
    near = (own_first < low + BLOCK_R) & (own_last > low)
    h_tile = h + (low // BLOCK_R + tile * span) * (BLOCK_M * BLOCK_R)
    gate_h = load_h(h_tile, near, BLOCK_M, BLOCK_R)
    up_h = load_h(h_tile + h_slice_stride, near, BLOCK_M, BLOCK_R)
    j = low + tl.arange(0, BLOCK_R)
    row = tl.load(rows + j, mask=j < high, other=0).to(tl.int64)
    start = tl.program_id(1) * columns
    end = tl.minimum(start + columns, size)
    if (high <= low + BLOCK_R) & (has_magnitude == 0):
        for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            n = n0 + tl.arange(0, BLOCK_N)
            in_slice = n < size
            b_at = b + row[:, None] * b_row_stride + n[None, :]
            b_mask = (j < high)[:, None] & in_slice[None, :]
            gate_weights = tl.load(b_at, mask=b_mask, other=0.0)
            up_weights = tl.load(b_at + size, mask=b_mask, other=0.0)
            mask = in_tile[:, None] & in_slice[None, :]
            row_at = gate_up + tokens[:, None] * y_stride + n[None, :]
            gate = tl.load(row_at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(row_at + size, mask=mask, other=0.0).to(tl.float32)
            delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            gate += expand(gate_h, gate_weights, delta, PRECISION)
            up += expand(up_h, up_weights, delta, PRECISION)
            result = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
            tl.store(out + tokens[:, None] * size + n[None, :], result, mask=mask)
        return
    for n0 in range(start, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        in_slice = n < size
        mask = in_tile[:, None] & in_slice[None, :]
        row_at = gate_up + tokens[:, None] * y_stride + n[None, :]
        gate = tl.load(row_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row_at + size, mask=mask, other=0.0).to(tl.float32)
        gate = scale_base(gate, magnitude, b, n, in_slice, b_row_stride)
        up = scale_base(up, magnitude, b + size, n, in_slice, b_row_stride)
        for r0 in tl.range(low, high, BLOCK_R, num_stages=STAGES):
            j = r0 + tl.arange(0, BLOCK_R)
            row = tl.load(rows + j, mask=j < high, other=0).to(tl.int64)
            b_at = b + row[:, None] * b_row_stride + n[None, :]
            b_mask = (j < high)[:, None] & in_slice[None, :]
            near = (own_first < r0 + BLOCK_R) & (own_last > r0)
            h_tile = h + (r0 // BLOCK_R + tile * span) * (BLOCK_M * BLOCK_R)
            weights = tl.load(b_at, mask=b_mask, other=0.0)
            gate = expand(load_h(h_tile, near, BLOCK_M, BLOCK_R), weights, gate, PRECISION)
            h_tile += h_slice_stride
            weights = tl.load(b_at + size, mask=b_mask, other=0.0)
            up = expand(load_h(h_tile, near, BLOCK_M, BLOCK_R), weights, up, PRECISION)
        result = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        tl.store(out + tokens[:, None] * size + n[None, :], result, mask=mask)


def silu_mul(gate_up: Tensor, delta: Delta | None, dtype: torch.dtype) -> Tensor:
    """Semantics: silu(gate) · up of (gate, up) = gate_up + delta.

    gate_up: (T, 2 · size), or without a delta its parts. Returns (T, size) of `dtype`, worked out
    in float32.
    """
    parts = parts_of(gate_up)
    size = parts.size // 2
    out = torch.empty((parts.num_rows, size), dtype=dtype, device=gate_up.device)
    if delta is None:
        _silu_mul_kernel[parts.num_rows, cdiv(size, _COLUMNS)](
            gate_up,
            out,
            parts.stride,
            parts.row_stride,
            size,
            PARTS=parts.num_parts,
            BLOCK_N=_COLUMNS,
            num_warps=4,
        )
        return out
    assert parts.num_parts == 1
    columns = columns_at_once(delta.rank_rows, size, _DELTA_BLOCK)
    _expand_silu_mul_kernel[cut_of(delta.rank_rows).num_tiles, cdiv(size, columns)](
        gate_up,
        out,
        parts.row_stride,
        size,
        columns,
        **delta_args(delta),
        BLOCK_N=_DELTA_BLOCK,
        STAGES=3,
        num_warps=4,
    )
    return out
