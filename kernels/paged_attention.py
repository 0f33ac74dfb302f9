# mypy: allow-untyped-decorators
"""Attention over the paged KV cache, and the write into it."""

import math

import torch
from torch import Tensor

from lorakeet.kernels.paged_decode import paged_decode
from lorakeet.kernels.paged_prefill import paged_prefill


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    num_decodes: int,
    max_context_len: int,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of T queries of S sequences, whose keys and values are in the cache.

    q: (T, heads, head_dim), the heads of a token adjacent; k_cache, v_cache: (num_blocks,
    block_size, kv_heads, head_dim), contiguous, of q's dtype; query_starts: (S + 1,) int32;
    context_lens: (S,) int32; block_tables: (S, max_blocks) int32. Query i of n, in a context of
    c keys, sees the keys up to c - n + i; of these the last `sliding_window`, its own among them.
    The first `num_decodes` sequences have one query each: the first tokens. Returns (T, heads,
    head_dim) of q's dtype; softmax and sums are float32.

    The launches depend on shapes and on the host's numbers alone, so a captured graph serves every
    batch up to its limits. Padding may be: decodes with context 0, which get zeros, unless a
    sequence after them owns their token; sequences after the decodes without queries; tokens past
    the last of `query_starts`, whose results are never written, and may be anything, NaN too.
    Raises ValueError for a sliding window below 1.
    """
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    assert q.stride()[1:] == (q.shape[2], 1)
    assert block_tables.stride(1) == 1
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    window = sliding_window or 0
    scale *= math.log2(math.e)
    if num_decodes > 0:
        paged_decode(
            q,
            k_cache,
            v_cache,
            context_lens,
            block_tables,
            num_decodes,
            max_context_len,
            scale,
            window,
            out,
        )
    if num_decodes < context_lens.shape[0]:
        paged_prefill(
            q,
            k_cache,
            v_cache,
            query_starts,
            context_lens,
            block_tables,
            num_decodes,
            scale,
            window,
            out,
        )
    return out
