# mypy: allow-untyped-decorators
"""Attention of sequences with several new tokens: whole prompts, or chunks of them."""

import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.attend import KEYS, attend, tile_size
from lorakeet.kernels.sizes import cdiv

ROWS = 64  # rows of a program's tile: query by query, the heads of a group side by side


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["first_sequence", "table_stride"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    out,
    query_starts,
    context_lens,
    block_tables,
    first_sequence,
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
    first_row = tl.program_id(0) * BLOCK_M
    sequence = first_sequence + tl.program_id(1)
    kv_head = tl.program_id(2)
    query_start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - query_start
    if first_row >= num_queries * GROUP:
        return
    context = tl.load(context_lens + sequence)
    offset = context - num_queries  # key that belongs to the first query

    rows = first_row + tl.arange(0, BLOCK_M)
    index = rows // GROUP
    tokens = (query_start + index).to(tl.int64)
    columns = (kv_head * GROUP + rows % GROUP) * HEAD_DIM
    d = tl.arange(0, BLOCK_D)
    mask = (index < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    q_rows = q + tokens * q_stride + columns
    query = tl.load(q_rows[:, None] + d[None, :], mask=mask, other=0.0)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(offset + first_row // GROUP - WINDOW + 1, 0)
    total, weight, _ = attend(
        query,
        offset + index,
        first,
        tl.minimum(context, offset + (first_row + BLOCK_M - 1) // GROUP + 1),
        k_cache,
        v_cache,
        kv_head,
        block_tables + sequence.to(tl.int64) * table_stride,
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
    max_query_len: int,
    scale: float,
    window: int,
    out: Tensor,
) -> None:
    """`paged_attention` for the sequences from `first_sequence` on; window 0: none."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    num_sequences = context_lens.shape[0] - first_sequence
    grid = (cdiv(max_query_len * group, ROWS), num_sequences, num_kv_heads)
    _prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        query_starts,
        context_lens,
        block_tables,
        first_sequence,
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
