# mypy: allow-untyped-decorators
"""Attention of sequences with several new tokens: whole prompts, or chunks of them."""

import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.attend import attend, tile_size

ROWS = 64  # rows of a program's tile: query by query, the heads of a group side by side
KEYS = 64  # keys taken at a time


@triton.jit
def _find_tile(  # type: ignore[no-untyped-def]
    tile, query_starts, num_sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The sequence that a tile belongs to, and its first row there.

    With rows counted through all sequences, the tiles of sequence i begin at number
    `its first row // BLOCK_M + i`: each has at least as many as it needs. One too many begins past
    the sequence's last row.
    """
    origin = tl.load(query_starts)
    low, high = 0, num_sequences - 1
    while low < high:  # the last sequence whose first tile is not past this one
        middle = (low + high + 1) // 2
        begins = (tl.load(query_starts + middle) - origin) * GROUP // BLOCK_M + middle <= tile
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    start = tl.load(query_starts + low)
    return low, (tile - (start - origin) * GROUP // BLOCK_M - low) * BLOCK_M


@triton.jit
def _is_padding(  # type: ignore[no-untyped-def]
    tile, query_starts, num_sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Whether a tile belongs to one of the sequences without queries at the end: most tiles of a
    captured graph, which a search for each would keep busy."""
    end = tl.load(query_starts + num_sequences)
    sequence = tile - (end - tl.load(query_starts)) * GROUP // BLOCK_M  # if it is one of them
    sequence = tl.minimum(tl.maximum(sequence, 0), num_sequences)
    return tl.load(query_starts + sequence) == end


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["first_sequence", "num_sequences", "table_stride"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    out,
    query_starts,
    context_lens,
    block_tables,
    first_sequence,
    num_sequences,
    scale,
    q_stride,
    out_stride,
    table_stride,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # from the last queries on, which see the most: no long program begins when others end
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    query_starts += first_sequence
    if _is_padding(tile, query_starts, num_sequences, GROUP, BLOCK_M):
        return
    sequence, first_row = _find_tile(tile, query_starts, num_sequences, GROUP, BLOCK_M)
    query_start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - query_start
    if first_row >= num_queries * GROUP:
        return
    context = tl.load(context_lens + first_sequence + sequence)
    offset = context - num_queries  # key that belongs to the first query

    rows = first_row + tl.arange(0, BLOCK_M)
    index = rows // GROUP
    tokens = (query_start + index).to(tl.int64)
    columns = (kv_head * GROUP + rows % GROUP) * HEAD_DIM
    d = tl.arange(0, BLOCK_D)
    mask = (index < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    q_rows = q + tokens * q_stride + columns
    query = tl.load(q_rows[:, None] + d[None, :], mask=mask, other=0.0)

    first, seen_by_all = 0, offset + first_row // GROUP + 1
    if WINDOW > 0:
        first, seen_by_all = tl.maximum(seen_by_all - WINDOW, 0), None
    total, weight, _ = attend(
        query,
        offset + index,
        first,
        tl.minimum(context, offset + (first_row + BLOCK_M - 1) // GROUP + 1),
        seen_by_all,
        k_cache,
        v_cache,
        kv_head,
        block_tables + (first_sequence + sequence).to(tl.int64) * table_stride,
        scale,
        WINDOW,
        BLOCK_SIZE,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    result = total / weight[:, None]
    out_rows = out + tokens * out_stride + columns
    tl.store(out_rows[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=mask)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    first_sequence: int,
    scale: float,
    window: int,
    out: Tensor,
) -> None:
    """`paged_attention` for the sequences from `first_sequence` on, of any number of queries, none
    as well; window 0: none."""
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group, num_sequences = num_heads // num_kv_heads, context_lens.shape[0] - first_sequence
    _prefill_kernel[num_tokens * group // ROWS + num_sequences, num_kv_heads](
        q,
        k_cache,
        v_cache,
        out,
        query_starts,
        context_lens,
        block_tables,
        first_sequence,
        num_sequences,
        scale,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        WINDOW=window,
        BLOCK_SIZE=block_size,
        GROUP=group,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=ROWS,
        BLOCK_N=KEYS,
        BLOCK_D=tile_size(head_dim),
        num_warps=4,
        num_stages=2,
    )
