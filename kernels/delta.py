# mypy: allow-untyped-decorators
"""What the fused kernels share: they expand a LoRA delta where they read y anyway.

Their programs work on segments, so that all rows of a tile share one adapter.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from lorakeet.kernels.segments import Delta

ROWS = 16  # rows of a tile, and of a segment; the least that `tl.dot` takes

# How h meets the weights: bfloat16 weights meet it in two parts, which keep 16 bits of it; float16
# weights are exact in tf32, whose range is h's own.
_PRECISION = {torch.float32: "ieee", torch.bfloat16: "bf16x2", torch.float16: "tf32"}


def delta_args(delta: Delta) -> dict[str, Any]:
    """What the fused kernels take of a delta, by name."""
    segments = delta.segments
    splits, num_positions, num_slices, max_rank = delta.h.shape
    assert delta.h.is_contiguous()
    assert delta.row_table.is_contiguous()
    assert delta.b.stride(1) == 1
    assert max_rank == delta.row_table.shape[1]
    assert segments.block <= ROWS
    return {
        "h": delta.h,
        "b": delta.b,
        "permutation": segments.permutation,
        "starts": segments.starts,
        "lengths": segments.lengths,
        "weight_indices": segments.weight_indices,
        "scalings": segments.scalings,
        "ranks": delta.ranks,
        "row_table": delta.row_table,
        "num_positions": num_positions,
        "num_slices": num_slices,
        "max_rank": max_rank,
        "b_row_stride": delta.b.stride(0),
        "SPLITS": splits,
        "PRECISION": _PRECISION[delta.b.dtype],
    }


def rank_block(delta: Delta) -> int:
    """Ranks that a pipelined program takes at a time: all of them, up to 64."""
    return min(64, max(16, int(triton.next_power_of_2(delta.h.shape[3]))))


@triton.jit
def read_segment(  # type: ignore[no-untyped-def]
    tile, starts, lengths, weight_indices, scalings, ranks, row_table, max_rank
):
    """All that a program wants to know of its segment, in as few dependent loads as there can be:
    start, length, scaling, rank, and where its adapter's rows are listed."""
    start = tl.load(starts + tile)
    length = tl.load(lengths + tile)
    scaling = tl.load(scalings + tile)
    slot = tl.load(weight_indices + tile)
    rank = tl.load(ranks + slot)
    return start, length, scaling, rank, row_table + slot.to(tl.int64) * max_rank


@triton.jit
def expand_tile(h_tile, weights, y, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """y (M, N) + h_tile (M, R) · weights (R, N), float32 but for the weights."""
    if PRECISION == "bf16x2":
        high = h_tile.to(tl.bfloat16)
        low = (h_tile - high.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(low, weights, tl.dot(high, weights, y))
    else:
        y = tl.dot(h_tile, weights.to(tl.float32), y, input_precision=PRECISION)
    return y


@triton.jit
def read_ranks(  # type: ignore[no-untyped-def]
    block,
    positions,
    in_tile,
    slice_id,
    scaling,
    rank,
    table_row,
    h,
    num_positions,
    num_slices,
    max_rank,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A block of ranks: what the shrink left (M, R), scaled; rows of the pool (R,); mask (R,)."""
    j = block * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rank = j < rank
    rows = tl.load(table_row + j, mask=j < max_rank, other=0).to(tl.int64)
    mask = in_tile[:, None] & in_rank[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        h_rows = (split * num_positions + positions.to(tl.int64)) * num_slices + slice_id
        total += tl.load(h + h_rows[:, None] * max_rank + j[None, :], mask=mask, other=0.0)
    return scaling * total, rows, in_rank
