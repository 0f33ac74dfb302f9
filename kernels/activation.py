# mypy: allow-untyped-decorators
"""SiLU(gate) · up, with the deltas of each row's adapter in gate and up."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.delta import RANKS, ROWS, delta_args, expand_tile, tile_grid, tile_rows
from lorakeet.kernels.segments import Delta

_COLUMNS = 256  # outputs of a program


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["num_rows", "num_positions"])
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    num_rows,
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
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    if LORA:
        if tl.load(lengths + tile) == 0:
            return
    positions, tokens, in_tile = tile_rows(
        tile, 0, num_rows, permutation, starts, lengths, LORA, BLOCK_M
    )
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_slice = n < size
    mask = in_tile[:, None] & in_slice[None, :]
    row = gate_up + tokens[:, None] * y_stride + n[None, :]
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + size, mask=mask, other=0.0).to(tl.float32)
    if LORA:
        slot = tl.load(weight_indices + tile)
        scaling = tl.load(scalings + tile)
        gate += scaling * expand_tile(
            positions,
            in_tile,
            0,
            n,
            in_slice,
            h,
            b,
            slot,
            ranks,
            row_table,
            num_positions,
            num_slices,
            max_rank,
            b_row_stride,
            SPLITS,
            BLOCK_M,
            BLOCK_R,
            BLOCK_N,
            PRECISION,
        )
        up += scaling * expand_tile(
            positions,
            in_tile,
            1,
            n + size,
            in_slice,
            h,
            b,
            slot,
            ranks,
            row_table,
            num_positions,
            num_slices,
            max_rank,
            b_row_stride,
            SPLITS,
            BLOCK_M,
            BLOCK_R,
            BLOCK_N,
            PRECISION,
        )
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + tokens[:, None] * size + n[None, :], result.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, delta: Delta | None) -> Tensor:
    """Semantics: silu(gate) · up of (gate, up) = gate_up + delta.

    gate_up: (T, 2 · size). Returns (T, size) of its dtype, worked out in float32.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    rows = 4 if delta is None else ROWS
    _silu_mul_kernel[tile_grid(delta, num_rows, rows), triton.cdiv(size, _COLUMNS)](
        gate_up,
        out,
        num_rows,
        gate_up.stride(0),
        size,
        **delta_args(delta),
        BLOCK_M=rows,
        BLOCK_R=RANKS,
        BLOCK_N=_COLUMNS,
        num_warps=4,
    )
    return out
