# mypy: allow-untyped-decorators
"""The shrink of an embedding: a look-up in A instead of a product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.segments import Segments
from lorakeet.kernels.tiles import tile_rows


@triton.jit
def _embedding_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    a,
    h,
    permutation,
    starts,
    lengths,
    weight_indices,
    ranks,
    row_table,
    max_rank,
    a_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    segment = tl.program_id(0)
    slot = tl.load(weight_indices + segment)
    length = tl.load(lengths + segment)
    if (slot == 0) | (length == 0):
        return
    rank = tl.load(ranks + slot)

    m = tl.arange(0, BLOCK_M)
    in_segment = m < length
    positions = tl.load(starts + segment).to(tl.int64) + m
    tokens = tl.load(permutation + positions, mask=in_segment, other=0)
    ids = tl.load(token_ids + tokens, mask=in_segment, other=0)
    j = tl.arange(0, BLOCK_R)
    in_rank = j < rank
    table_row = row_table + slot.to(tl.int64) * max_rank
    rows = tl.load(table_row + j, mask=in_rank, other=0).to(tl.int64)

    mask = in_segment[:, None] & in_rank[None, :]
    values = tl.load(a + rows[None, :] * a_row_stride + ids[:, None], mask=mask, other=0.0)
    tl.store(h + positions[:, None] * max_rank + j[None, :], values.to(tl.float32), mask=mask)


def embedding_lora_a(
    token_ids: Tensor, a: Tensor, segments: Segments, ranks: Tensor, row_table: Tensor
) -> Tensor:
    """Semantics: h[0, p, 0, j] = a[row_table[slot, j], token_ids[permutation[p]]], j < rank.

    token_ids: (T,) int64, below vocab; a: (rows, vocab); ranks: (slots,) int32; row_table:
    (slots, R) int32. Returns (1, P, 1, R) float32, for `sgemm_lora_b`. Entries past the rank, and
    positions in no segment, are left unset.
    """
    assert a.stride(-1) == 1
    assert token_ids.is_contiguous()
    assert row_table.is_contiguous()
    num_positions, max_rank = segments.permutation.shape[0], row_table.shape[1]
    h = torch.empty((1, num_positions, 1, max_rank), dtype=torch.float32, device=a.device)
    _embedding_kernel[(segments.starts.shape[0],)](
        token_ids,
        a,
        h,
        segments.permutation,
        segments.starts,
        segments.lengths,
        segments.weight_indices,
        ranks,
        row_table,
        max_rank,
        a.stride(0),
        BLOCK_M=tile_rows(segments.block),
        BLOCK_R=triton.next_power_of_2(max_rank),
    )
    return h
