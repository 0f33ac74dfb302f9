# mypy: allow-untyped-decorators
"""The expand: what the shrink left of each row through the B of its adapter, added to y."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.segments import Segments
from lorakeet.kernels.tiles import tile_rows, tiles_for


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["num_positions"])
def _expand_kernel(  # type: ignore[no-untyped-def]
    h,
    b,
    y,
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
    first_size,
    other_size,
    b_row_stride,
    y_stride,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    segment = tl.program_id(0)
    slot = tl.load(weight_indices + segment)
    length = tl.load(lengths + segment)
    if (slot == 0) | (length == 0):
        return
    rank = tl.load(ranks + slot)
    if rank == 0:
        return

    # column blocks are counted slice by slice: the first slice, then the equal others
    first_blocks = tl.cdiv(first_size, BLOCK_N)
    other_blocks = tl.cdiv(other_size, BLOCK_N)
    block = tl.program_id(1)
    slice_id = 0
    slice_start = 0
    size = first_size
    if block >= first_blocks:
        block -= first_blocks
        slice_id = 1 + block // other_blocks
        slice_start = first_size + (slice_id - 1) * other_size
        size = other_size
        block %= other_blocks
    within = block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_slice = within < size
    n = slice_start + within

    m = tl.arange(0, BLOCK_M)
    in_segment = m < length
    positions = tl.load(starts + segment).to(tl.int64) + m
    tokens = tl.load(permutation + positions, mask=in_segment, other=0).to(tl.int64)
    table_row = row_table + slot.to(tl.int64) * max_rank

    delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        j = first_rank + tl.arange(0, BLOCK_R)
        in_rank = j < rank
        rows = tl.load(table_row + j, mask=in_rank, other=0).to(tl.int64)
        h_tile = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            h_rows = (split * num_positions + positions) * num_slices + slice_id
            h_part = h + h_rows[:, None] * max_rank + j[None, :]
            h_tile += tl.load(h_part, mask=in_segment[:, None] & in_rank[None, :], other=0.0)
        b_tile = b + rows[:, None] * b_row_stride + n[None, :]
        weights = tl.load(b_tile, mask=in_rank[:, None] & in_slice[None, :], other=0.0).to(
            tl.float32
        )
        delta += tl.dot(h_tile, weights, input_precision=PRECISION)

    delta *= tl.load(scalings + segment)
    y_tile = y + tokens[:, None] * y_stride + n[None, :]
    mask = in_segment[:, None] & in_slice[None, :]
    total = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32) + delta
    tl.store(y_tile, total.to(y.dtype.element_ty), mask=mask)


def _expand(
    h: Tensor,
    b: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    y: Tensor,
    first_size: int,
    other_size: int,
) -> None:
    splits, num_positions, num_slices, max_rank = h.shape
    assert h.is_contiguous()
    assert row_table.is_contiguous()
    assert max_rank == row_table.shape[1]
    assert y.stride(-1) == 1
    assert b.stride(-1) == 1
    assert y.shape[1] == b.shape[1] == first_size + (num_slices - 1) * other_size
    tiles = tiles_for(segments.block)
    columns = tiles.columns
    column_blocks = triton.cdiv(first_size, columns)
    column_blocks += (num_slices - 1) * triton.cdiv(other_size, columns)
    _expand_kernel[segments.starts.shape[0], column_blocks](
        h,
        b,
        y,
        segments.permutation,
        segments.starts,
        segments.lengths,
        segments.weight_indices,
        segments.scalings,
        ranks,
        row_table,
        num_positions,
        num_slices,
        max_rank,
        first_size,
        other_size,
        b.stride(0),
        y.stride(0),
        SPLITS=splits,
        BLOCK_M=tile_rows(segments.block),
        BLOCK_R=tiles.rank,
        BLOCK_N=columns,
        # half-precision weights are exact in tf32; h keeps more bits than y has
        PRECISION="ieee" if b.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
    )


def sgemm_lora_b(
    h: Tensor, b: Tensor, segments: Segments, ranks: Tensor, row_table: Tensor, y: Tensor
) -> None:
    """Semantics: y[permutation[p]] += scaling · Σ_j<rank h[:, p, 0, j] · b[row_table[slot, j]].

    h: (splits, P, 1, R) float32 from a shrink; b: (rows, out); y: (T, out), changed in place.
    float32 sums, rounded once. A token row may be in one segment only: to blend adapters in a
    row, call once for each of them.
    """
    _expand(h, b, segments, ranks, row_table, y, y.shape[1], y.shape[1])


def qkv_lora_b(
    h: Tensor,
    b: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    y: Tensor,
    q_size: int,
    kv_size: int,
) -> None:
    """`sgemm_lora_b` for three slices side by side in b and y: q_size, kv_size, kv_size wide.

    h: (splits, P, 3, R); b: (rows, q_size + 2 · kv_size); y: (T, q_size + 2 · kv_size).
    """
    _expand(h, b, segments, ranks, row_table, y, q_size, kv_size)


def gate_up_lora_b(
    h: Tensor, b: Tensor, segments: Segments, ranks: Tensor, row_table: Tensor, y: Tensor
) -> None:
    """`sgemm_lora_b` for two slices of equal width: h: (splits, P, 2, R); y: (T, 2 · size)."""
    _expand(h, b, segments, ranks, row_table, y, y.shape[1] // 2, y.shape[1] // 2)
