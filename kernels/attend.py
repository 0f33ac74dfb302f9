# mypy: allow-untyped-decorators
"""The inner loop of paged attention: a tile of queries over a run of keys of one sequence.

The softmax is summed piece by piece, each piece relative to the highest score so far
(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention).
"""

import triton
import triton.language as tl

from lorakeet.kernels.sizes import power_of_two

MIN_TILE = 16  # the least that `tl.dot` takes, in any dimension


def tile_size(size: int) -> int:
    return max(MIN_TILE, power_of_two(size))


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    query,
    last_keys,
    first,
    end,
    seen_by_all,
    k_cache,
    v_cache,
    kv_head,
    table,
    scale,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys [first, end) for queries (M, D) that see keys up to `last_keys` (M,). `seen_by_all`: all
    queries see all keys before it, so these need no masks; None: all are masked.

    Returns the weighted sum of the values (M, D), the sum of the weights (M,) and the highest
    score (M,), to which the weights are relative. `scale`, above 0, holds log2(e): powers of two
    are cheaper.
    """
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    weight = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    whole = first  # keys before it need no masks, which cost about as much as the softmax
    if seen_by_all is not None:
        whole += tl.maximum(seen_by_all - first, 0) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(seen_by_all is None, 2):
        for start in range(whole if masked else first, end if masked else whole, BLOCK_N):
            total, weight, highest = _attend_keys(
                query,
                last_keys,
                start,
                end,
                total,
                weight,
                highest,
                k_cache,
                v_cache,
                kv_head,
                table,
                scale,
                masked,
                WINDOW,
                BLOCK_SIZE,
                KV_HEADS,
                HEAD_DIM,
                BLOCK_N,
                BLOCK_D,
            )
    return total, weight, highest


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    query,
    last_keys,
    start,
    end,
    total,
    weight,
    highest,
    k_cache,
    v_cache,
    kv_head,
    table,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The sums of `attend` with the keys from `start` on; not MASKED: all queries see all N."""
    keys = start + tl.arange(0, BLOCK_N)
    in_range = keys < end if MASKED else tl.full([BLOCK_N], 1, tl.int1)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
    rows = ((blocks * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    k_mask = in_head[:, None] & in_range[None, :]
    k = tl.load(k_cache + rows[None, :] + d[:, None], mask=k_mask, other=0.0)
    v_mask = in_range[:, None] & in_head[None, :]
    v = tl.load(v_cache + rows[:, None] + d[None, :], mask=v_mask, other=0.0)

    scores = tl.dot(query, k, input_precision="ieee")
    if MASKED:
        visible = in_range[None, :] & (keys[None, :] <= last_keys[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > last_keys[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    base = new_highest
    if MASKED:  # -inf - -inf would be NaN in a row that has seen no key yet
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink = tl.exp2(highest - base)
    weights = tl.exp2(scores * scale - base[:, None])  # one operation
    total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    weight = weight * shrink + tl.sum(weights, 1)
    return total, weight, new_highest
