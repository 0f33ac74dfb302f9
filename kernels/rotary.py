# mypy: allow-untyped-decorators
"""From the qkv projection to attention: deltas, q/k norm, rotary embedding, KV write, in one."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.delta import (
    ROWS,
    delta_args,
    expand_tile,
    rank_block,
    read_ranks,
    read_segment,
)
from lorakeet.kernels.segments import Delta

_ROWS = 4  # token rows of a program without deltas
_HEADS_AT_ONCE = 2  # heads of a program with deltas


class HeadNorms(NamedTuple):
    """RMSNorm over each head of q and of k."""

    q: Tensor  # (head_dim,)
    k: Tensor  # (head_dim,)
    eps: float


@triton.jit
def _finish_head(  # type: ignore[no-untyped-def]
    low,
    high,
    head,
    tokens,
    in_tile,
    q,
    k_cache,
    v_cache,
    kv_slots,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Norm and rotate one head of q or k, given as its two halves (M, D), and store it."""
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    in_half = d < half
    mask = in_tile[:, None] & in_half[None, :]
    if head < HEADS + KV_HEADS:  # a head of q or k
        if NORM:
            squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
            factor = tl.rsqrt(squares / HEAD_DIM + eps)
            weight = k_weight
            if head < HEADS:
                weight = q_weight
            low *= factor[:, None] * tl.load(weight + d, mask=in_half, other=0.0)[None, :]
            high *= factor[:, None] * tl.load(weight + half + d, mask=in_half, other=0.0)[None, :]
        angle = tokens[:, None] * HEAD_DIM + d[None, :]
        cos_low = tl.load(cos + angle, mask=mask, other=0.0)
        cos_high = tl.load(cos + angle + half, mask=mask, other=0.0)
        sin_low = tl.load(sin + angle, mask=mask, other=0.0)
        sin_high = tl.load(sin + angle + half, mask=mask, other=0.0)
        turned = low * cos_low + high * sin_low
        high = high * cos_high + low * sin_high
        low = turned

    if head < HEADS:
        place = q + tokens * (HEADS * HEAD_DIM) + head * HEAD_DIM
    else:
        kv_slot = tl.load(kv_slots + tokens, mask=in_tile, other=-1)
        mask = mask & (kv_slot >= 0)[:, None]
        cache_row = kv_slot * (KV_HEADS * HEAD_DIM)
        if head < HEADS + KV_HEADS:
            place = k_cache + cache_row + (head - HEADS) * HEAD_DIM
        else:
            place = v_cache + cache_row + (head - HEADS - KV_HEADS) * HEAD_DIM
    places = place[:, None] + d[None, :]
    tl.store(places, low.to(q.dtype.element_ty), mask=mask)
    tl.store(places + half, high.to(q.dtype.element_ty), mask=mask)


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["num_rows"])
def _heads_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q,
    k_cache,
    v_cache,
    kv_slots,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    y_stride,
    num_rows,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = tokens < num_rows
    d = tl.arange(0, BLOCK_D)
    half: tl.constexpr = HEAD_DIM // 2
    mask = in_tile[:, None] & (d < half)[None, :]
    row = qkv + tokens[:, None] * y_stride + (head * HEAD_DIM + d)[None, :]
    low = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(row + half, mask=mask, other=0.0).to(tl.float32)
    _finish_head(
        low,
        high,
        head,
        tokens,
        in_tile,
        q,
        k_cache,
        v_cache,
        kv_slots,
        cos,
        sin,
        q_weight,
        k_weight,
        eps,
        NORM,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_D,
    )


@triton.jit(do_not_specialize=["num_positions"])
def _expand_heads_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q,
    k_cache,
    v_cache,
    kv_slots,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    y_stride,
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
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One segment and several heads of one slice; weights load while other heads multiply."""
    start, length, scaling, rank, table_row = read_segment(
        tl.program_id(0), starts, lengths, weight_indices, scalings, ranks, row_table, max_rank
    )
    if length == 0:
        return
    m = tl.arange(0, BLOCK_M)
    in_tile = m < length
    positions = start + m
    tokens = tl.load(permutation + positions, mask=in_tile, other=0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS_AT_ONCE
    slice_id = (first_head >= HEADS).to(tl.int32) + (first_head >= HEADS + KV_HEADS).to(tl.int32)
    h_tile, rows, in_rank = read_ranks(
        0,
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
        SPLITS,
        BLOCK_M,
        BLOCK_R,
    )
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    in_half = d < half
    mask = in_tile[:, None] & in_half[None, :]
    for head in range(first_head, first_head + HEADS_AT_ONCE):
        n = head * HEAD_DIM + d
        row = qkv + tokens[:, None] * y_stride + n[None, :]
        low = tl.load(row, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(row + half, mask=mask, other=0.0).to(tl.float32)
        for block in tl.static_range(RANK_BLOCKS):
            if RANK_BLOCKS > 1:
                h_tile, rows, in_rank = read_ranks(
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
                    SPLITS,
                    BLOCK_M,
                    BLOCK_R,
                )
            b_tile = b + rows[:, None] * b_row_stride + n[None, :]
            b_mask = in_rank[:, None] & in_half[None, :]
            low = expand_tile(h_tile, tl.load(b_tile, mask=b_mask, other=0.0), low, PRECISION)
            high_weights = tl.load(b_tile + half, mask=b_mask, other=0.0)
            high = expand_tile(h_tile, high_weights, high, PRECISION)
        _finish_head(
            low,
            high,
            head,
            tokens,
            in_tile,
            q,
            k_cache,
            v_cache,
            kv_slots,
            cos,
            sin,
            q_weight,
            k_weight,
            eps,
            NORM,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_D,
        )


def rotate_and_write(
    qkv: Tensor,
    delta: Delta | None,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slots: Tensor,
    num_heads: int,
) -> Tensor:
    """Semantics: q, k, v = qkv + delta; norm q and k by head; rotate them; write k and v.

    qkv: (T, (num_heads + 2 · kv_heads) · head_dim); cos, sin: (T, 1, head_dim) float32, the sign of
    the first half of a rotation in sin; k_cache, v_cache: (num_blocks, block_size, kv_heads,
    head_dim), contiguous, of qkv's dtype; kv_slots: (T,) int64, block · block_size + offset,
    negative for a padding row, which writes nothing. Returns q: (T, num_heads, head_dim). All is
    worked out in float32 and rounded once.
    """
    num_rows, num_kv_heads, head_dim = qkv.shape[0], *k_cache.shape[2:]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert head_dim % 2 == 0
    assert qkv.stride(1) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    q = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    weights = (None, None, 0.0) if norms is None else norms
    args = (qkv, q, k_cache, v_cache, kv_slots, cos, sin, *weights, qkv.stride(0))
    sizes = {
        "NORM": norms is not None,
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim // 2)),
    }
    num_all = num_heads + 2 * num_kv_heads
    if delta is None:
        grid = (triton.cdiv(num_rows, _ROWS), num_all)
        _heads_kernel[grid](*args, num_rows, **sizes, BLOCK_M=_ROWS, num_warps=1)
        return q
    at_once = math.gcd(num_heads, num_kv_heads, _HEADS_AT_ONCE)
    block = rank_block(delta)
    _expand_heads_kernel[delta.segments.starts.shape[0], num_all // at_once](
        *args,
        **delta_args(delta),
        **sizes,
        RANK_BLOCKS=triton.cdiv(delta.h.shape[3], block),
        BLOCK_M=ROWS,
        BLOCK_R=block,
        HEADS_AT_ONCE=at_once,
        num_warps=4,
        num_stages=2,
    )
    return q
