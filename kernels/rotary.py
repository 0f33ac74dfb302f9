# mypy: allow-untyped-decorators
"""From the qkv projection to attention: deltas, q/k norm, rotary embedding, KV write, in one."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.delta import RANKS, ROWS, delta_args, expand_tile, tile_grid, tile_rows
from lorakeet.kernels.segments import Delta


class HeadNorms(NamedTuple):
    """RMSNorm over each head of q and of k."""

    q: Tensor  # (head_dim,)
    k: Tensor  # (head_dim,)
    eps: float


# sizes that change from step to step must not compile anew
@triton.jit(do_not_specialize=["num_rows", "num_positions"])
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
    num_rows,
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
    LORA: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if LORA:
        if tl.load(lengths + tile) == 0:
            return
    positions, tokens, in_tile = tile_rows(
        tile, 0, num_rows, permutation, starts, lengths, LORA, BLOCK_M
    )
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    in_half = d < half
    mask = in_tile[:, None] & in_half[None, :]
    n = head * HEAD_DIM + d
    row = qkv + tokens[:, None] * y_stride + n[None, :]
    low = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(row + half, mask=mask, other=0.0).to(tl.float32)
    if LORA:
        slot = tl.load(weight_indices + tile)
        scaling = tl.load(scalings + tile)
        slice_id = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
        low += scaling * expand_tile(
            positions,
            in_tile,
            slice_id,
            n,
            in_half,
            h,
            b,
            slot,
            ranks,
            row_table,
            num_positions,
            num_slices,
            max_rank,
            b_row_stride,
            SPLITS,
            BLOCK_M,
            BLOCK_R,
            BLOCK_D,
            PRECISION,
        )
        high += scaling * expand_tile(
            positions,
            in_tile,
            slice_id,
            n + half,
            in_half,
            h,
            b,
            slot,
            ranks,
            row_table,
            num_positions,
            num_slices,
            max_rank,
            b_row_stride,
            SPLITS,
            BLOCK_M,
            BLOCK_R,
            BLOCK_D,
            PRECISION,
        )

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
    rows = 4 if delta is None else ROWS
    _heads_kernel[tile_grid(delta, num_rows, rows), num_heads + 2 * num_kv_heads](
        qkv,
        q,
        k_cache,
        v_cache,
        kv_slots,
        cos,
        sin,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        num_rows,
        qkv.stride(0),
        **delta_args(delta),
        NORM=norms is not None,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=rows,
        BLOCK_R=RANKS,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim // 2)),
        num_warps=1 if delta is None else 2,
    )
    return q
