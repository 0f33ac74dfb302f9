# mypy: allow-untyped-decorators
"""Attention of sequences with one new token: keys in splits side by side, then a merge.

(Flash-Decoding.) A context of one split needs no merge. How a context is split depends on its own
length and on the number of decodes (in a captured graph: that it has room for), not on what the
others are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.attend import attend, tile_size
from lorakeet.kernels.sizes import cdiv
from lorakeet.kernels.tiles import decode_tiles

_MANY_HEADS = 1024  # each with a program of its own these take longer to launch than to merge


@triton.jit
def _splits(  # type: ignore[no-untyped-def]
    context, WINDOW: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr
):
    """The first key that the newest token sees, the keys in a split, and how many there are."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    size = tl.maximum(tl.cdiv(context - first, MAX_SPLITS), MIN_SPLIT)
    return first, size, tl.cdiv(context - first, size)


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    out,
    totals,
    weights,
    maxima,
    context_lens,
    block_tables,
    scale,
    q_stride,
    table_stride,
    WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens + sequence)
    first, split_size, num_splits = _splits(context, WINDOW, MAX_SPLITS, MIN_SPLIT)
    first += split * split_size
    if (split > 0) & (split >= num_splits):  # without any context the first one writes zeros
        return

    m = tl.arange(0, BLOCK_M)
    in_group = m < GROUP
    heads = kv_head * GROUP + m
    d = tl.arange(0, BLOCK_D)
    mask = in_group[:, None] & (d < HEAD_DIM)[None, :]
    q_rows = q + sequence * q_stride + heads * HEAD_DIM
    query = tl.load(q_rows[:, None] + d[None, :], mask=mask, other=0.0)
    total, weight, highest = attend(
        query,
        tl.zeros([BLOCK_M], dtype=tl.int32) + (context - 1),
        first,
        tl.minimum(context, first + split_size),
        None,
        k_cache,
        v_cache,
        kv_head,
        block_tables + sequence * table_stride,
        scale,
        WINDOW,
        BLOCK_SIZE,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    rows = sequence * (KV_HEADS * GROUP) + heads
    if num_splits <= 1:
        result = total / tl.where(weight > 0, weight, 1.0)[:, None]
        places = out + rows[:, None] * HEAD_DIM + d[None, :]
        tl.store(places, result.to(out.dtype.element_ty), mask=mask)
        return
    rows = rows * tl.num_programs(2) + split
    tl.store(totals + rows[:, None] * HEAD_DIM + d[None, :], total, mask=mask)
    tl.store(weights + rows, weight, mask=in_group)
    tl.store(maxima + rows, highest, mask=in_group)


@triton.jit(do_not_specialize=["most_splits"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    totals,
    weights,
    maxima,
    out,
    context_lens,
    most_splits,
    WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Some heads of one sequence that has several splits."""
    sequence = tl.program_id(0).to(tl.int64)
    first_row = (sequence * tl.num_programs(1) + tl.program_id(1)) * HEADS
    context = tl.load(context_lens + sequence)
    _, _, num_splits = _splits(context, WINDOW, MAX_SPLITS, MIN_SPLIT)
    if num_splits <= 1:
        return
    split = tl.arange(0, BLOCK_S)
    used = split < num_splits
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    for row in range(first_row, first_row + HEADS):
        rows = row * most_splits + split
        highest = tl.load(maxima + rows, mask=used, other=float("-inf"))
        shrink = tl.exp2(highest - tl.max(highest, 0))
        weight = tl.sum(shrink * tl.load(weights + rows, mask=used, other=0.0), 0)
        parts = totals + rows[:, None] * HEAD_DIM + d[None, :]
        values = tl.load(parts, mask=used[:, None] & in_head[None, :], other=0.0)
        result = tl.sum(shrink[:, None] * values, 0) / weight
        tl.store(out + row * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=in_head)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    num_decodes: int,
    max_context_len: int,
    scale: float,
    window: int,
    out: Tensor,
) -> None:
    """`paged_attention` for the first `num_decodes` sequences; window 0: none."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    most_keys = min(max_context_len, window) if window else max_context_len
    tiles = decode_tiles(num_decodes * num_kv_heads, head_dim * q.itemsize)
    num_splits = max(1, min(tiles.max_splits, cdiv(most_keys, tiles.min_split)))
    shape = (num_decodes, num_heads, num_splits)
    totals = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    weights = torch.empty(shape, dtype=torch.float32, device=q.device)
    maxima = torch.empty(shape, dtype=torch.float32, device=q.device)
    _decode_kernel[num_decodes, num_kv_heads, num_splits](
        q,
        k_cache,
        v_cache,
        out,
        totals,
        weights,
        maxima,
        context_lens,
        block_tables,
        scale,
        q.stride(0),
        block_tables.stride(0),
        WINDOW=window,
        MAX_SPLITS=tiles.max_splits,
        MIN_SPLIT=tiles.min_split,
        BLOCK_SIZE=block_size,
        GROUP=group,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=tile_size(group),
        BLOCK_N=tiles.keys,
        BLOCK_D=tile_size(head_dim),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if num_splits == 1:
        return
    heads = group if num_decodes * num_heads > _MANY_HEADS else 1
    _combine_kernel[num_decodes, num_heads // heads](
        totals,
        weights,
        maxima,
        out,
        context_lens,
        num_splits,
        WINDOW=window,
        MAX_SPLITS=tiles.max_splits,
        MIN_SPLIT=tiles.min_split,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_S=tiles.max_splits,
        BLOCK_D=tile_size(head_dim),
    )
