# mypy: allow-untyped-decorators
"""From the qkv projection to attention: q/k norm, rotary embedding and KV write in one."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.partial import load_sum, parts_of
from lorakeet.kernels.sizes import cdiv, power_of_two

_ROWS = 4  # token rows of a program


class HeadNorms(NamedTuple):
    """RMSNorm over each head of q and of k."""

    q: Tensor  # (head_dim,)
    k: Tensor  # (head_dim,)
    eps: float


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
    part_stride,
    y_stride,
    num_rows,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of q, k or v of a few token rows, in its two halves (M, D)."""
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = tokens < num_rows
    d = tl.arange(0, BLOCK_D)
    half: tl.constexpr = HEAD_DIM // 2
    in_half = d < half
    mask = in_tile[:, None] & in_half[None, :]
    row = qkv + tokens[:, None] * y_stride + (head * HEAD_DIM + d)[None, :]
    low = load_sum(row, part_stride, mask, PARTS)
    high = load_sum(row + half, part_stride, mask, PARTS)
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
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slots: Tensor,
    num_heads: int,
) -> Tensor:
    """Semantics: q, k, v = qkv; norm q and k by head; rotate them; write k and v.

    qkv: (T, (num_heads + 2 · kv_heads) · head_dim), or its parts; cos, sin: (T, 1, head_dim)
    float32, the sign of the first half of a rotation in sin; k_cache, v_cache: (num_blocks,
    block_size, kv_heads, head_dim), contiguous, of q's dtype; kv_slots: (T,) int64, block ·
    block_size + offset, negative for a padding row, which writes nothing. Returns q: (T, num_heads,
    head_dim), of the cache's dtype. All is worked out in float32 and rounded once.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    parts = parts_of(qkv)
    assert parts.size == (num_heads + 2 * num_kv_heads) * head_dim
    assert head_dim % 2 == 0
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    shape = (parts.num_rows, num_heads, head_dim)
    q = torch.empty(shape, dtype=k_cache.dtype, device=qkv.device)
    weights = (None, None, 0.0) if norms is None else norms
    grid = (cdiv(parts.num_rows, _ROWS), num_heads + 2 * num_kv_heads)
    _heads_kernel[grid](
        qkv,
        q,
        k_cache,
        v_cache,
        kv_slots,
        cos,
        sin,
        *weights,
        parts.stride,
        parts.row_stride,
        parts.num_rows,
        PARTS=parts.num_parts,
        NORM=norms is not None,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=_ROWS,
        BLOCK_D=max(16, power_of_two(head_dim // 2)),
        num_warps=1,
    )
    return q
