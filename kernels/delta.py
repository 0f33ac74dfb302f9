# mypy: allow-untyped-decorators
"""How the fused kernels expand a LoRA delta, where they read y anyway.

A fused kernel works on tiles of token rows. With a delta these are the segments, so that all rows
of a tile share one adapter; without one, rows in their own order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from lorakeet.kernels.segments import Delta

ROWS = 16  # rows of a tile, and of a segment; the least that `tl.dot` takes
RANKS = 16  # ranks that a tile takes at a time


def tile_grid(delta: Delta | None, num_rows: int, rows: int = ROWS) -> int:
    """Tiles of `rows` rows, or of segments."""
    return triton.cdiv(num_rows, rows) if delta is None else delta.segments.starts.shape[0]


def delta_args(delta: Delta | None) -> dict[str, Any]:
    """What the fused kernels take of a delta, by name."""
    pointers = "h b permutation starts lengths weight_indices scalings ranks row_table"
    if delta is None:
        return dict.fromkeys(pointers.split()) | {
            "num_positions": 0,
            "num_slices": 0,
            "max_rank": 0,
            "b_row_stride": 0,
            "SPLITS": 1,
            "PRECISION": "ieee",
            "LORA": False,
        }
    splits, num_positions, num_slices, max_rank = delta.h.shape
    segments = delta.segments
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
        # half-precision weights are exact in tf32; h keeps more bits than y has
        "PRECISION": "ieee" if delta.b.dtype == torch.float32 else "tf32",
        "LORA": True,
    }


@triton.jit
def tile_rows(  # type: ignore[no-untyped-def]
    tile, first, num_rows, permutation, starts, lengths, LORA: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Rows [first, first + BLOCK_M) of a tile: places in the order of segments, tokens, mask."""
    m = first + tl.arange(0, BLOCK_M)
    if LORA:
        in_tile = m < tl.load(lengths + tile)
        positions = tl.load(starts + tile) + m
        tokens = tl.load(permutation + positions, mask=in_tile, other=0)
    else:
        positions = tile * BLOCK_M + m
        in_tile = positions < num_rows
        tokens = positions
    return positions, tokens.to(tl.int64), in_tile


@triton.jit
def expand_tile(  # type: ignore[no-untyped-def]
    positions,
    in_tile,
    slice_id,
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
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(M, N) float32: columns `n` of what the adapter of `slot` adds, without its scaling."""
    rank = tl.load(ranks + slot)
    table_row = row_table + slot.to(tl.int64) * max_rank
    delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        j = first_rank + tl.arange(0, BLOCK_R)
        in_rank = j < rank
        rows = tl.load(table_row + j, mask=in_rank, other=0).to(tl.int64)
        h_mask = in_tile[:, None] & in_rank[None, :]
        h_tile = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            h_rows = (split * num_positions + positions.to(tl.int64)) * num_slices + slice_id
            h_tile += tl.load(h + h_rows[:, None] * max_rank + j[None, :], mask=h_mask, other=0.0)
        b_tile = b + rows[:, None] * b_row_stride + n[None, :]
        b_mask = in_rank[:, None] & in_slice[None, :]
        weights = tl.load(b_tile, mask=b_mask, other=0.0).to(tl.float32)
        delta += tl.dot(h_tile, weights, input_precision=PRECISION)
    return delta
