# mypy: allow-untyped-decorators
"""The shrink: each row's input through the A of its own adapter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.segments import Segments
from lorakeet.kernels.tiles import tile_rows, tiles_for


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["num_positions"])
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    a,
    h,
    permutation,
    starts,
    lengths,
    weight_indices,
    ranks,
    row_table,
    input_size,
    split_size,
    num_positions,
    num_slices,
    max_rank,
    x_stride,
    a_slice_stride,
    a_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    segment = tl.program_id(0)
    slice_id = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(weight_indices + segment)
    length = tl.load(lengths + segment)
    if (slot == 0) | (length == 0):
        return
    rank = tl.load(ranks + slot)

    m = tl.arange(0, BLOCK_M)
    in_segment = m < length
    positions = tl.load(starts + segment).to(tl.int64) + m
    tokens = tl.load(permutation + positions, mask=in_segment, other=0).to(tl.int64)
    x_rows = x + tokens[:, None] * x_stride
    a_slice = a + slice_id.to(tl.int64) * a_slice_stride
    h_rows = (split.to(tl.int64) * num_positions + positions) * num_slices + slice_id
    table_row = row_table + slot.to(tl.int64) * max_rank
    first = split * split_size
    last = tl.minimum(first + split_size, input_size)
    for first_rank in range(0, rank, BLOCK_R):
        j = first_rank + tl.arange(0, BLOCK_R)
        in_rank = j < rank
        rows = tl.load(table_row + j, mask=in_rank, other=0).to(tl.int64)
        a_rows = a_slice + rows[None, :] * a_row_stride
        total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for start in range(first, last, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            in_input = k < input_size
            x_mask = in_segment[:, None] & in_input[None, :]
            x_tile = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
            a_mask = in_input[:, None] & in_rank[None, :]
            a_tile = tl.load(a_rows + k[:, None], mask=a_mask, other=0.0)
            total += tl.dot(x_tile, a_tile, input_precision="ieee")
        h_tile = h + h_rows[:, None] * max_rank + j[None, :]
        tl.store(h_tile, total, mask=in_segment[:, None] & in_rank[None, :])


def split_input(input_size: int, block: int) -> tuple[int, int]:
    """How many parts of an input are summed apart, and how large they are.

    It depends on the input size and `block` alone, so a row's sums do not depend on the batch.
    """
    split_size = tiles_for(block).split_size
    return triton.cdiv(input_size, split_size), split_size


def empty_sums(a: Tensor, segments: Segments, row_table: Tensor) -> Tensor:
    """Room for what `sgemm_lora_a` returns."""
    num_slices, _, input_size = a.shape
    splits, _ = split_input(input_size, segments.block)
    shape = (splits, segments.permutation.shape[0], num_slices, row_table.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=a.device)


def sgemm_lora_a(
    x: Tensor,
    a: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    h: Tensor | None = None,
) -> Tensor:
    """Semantics: h[:, p, i, j] sums to x[permutation[p]] · a[i, row_table[slot, j]], j < rank.

    x: (T, in); a: (slices, rows, in), of x's dtype; ranks: (slots,) int32; row_table: (slots, R)
    int32. Returns (splits, P, slices, R) float32, or `h` itself (`empty_sums`): partial sums over
    parts of the input. Entries past the rank, and positions in no segment, are left unset.
    """
    assert x.stride(-1) == 1
    assert a.stride(-1) == 1
    assert row_table.is_contiguous()
    num_slices, _, input_size = a.shape
    num_positions, max_rank = segments.permutation.shape[0], row_table.shape[1]
    tiles = tiles_for(segments.block)
    splits, split_size = split_input(input_size, segments.block)
    if h is None:
        h = empty_sums(a, segments, row_table)
    grid = (segments.starts.shape[0], num_slices, splits)
    _shrink_kernel[grid](
        x,
        a,
        h,
        segments.permutation,
        segments.starts,
        segments.lengths,
        segments.weight_indices,
        ranks,
        row_table,
        input_size,
        split_size,
        num_positions,
        num_slices,
        max_rank,
        x.stride(0),
        a.stride(0),
        a.stride(1),
        BLOCK_M=tile_rows(segments.block),
        BLOCK_R=tiles.rank,
        BLOCK_K=tiles.inner,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return h
