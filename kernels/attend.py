# mypy: allow-untyped-decorators
"""The inner loop of paged attention: a tile of queries over a run of keys of one sequence.

The softmax is summed piece by piece, each piece relative to the highest score so far
(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention).
"""

import triton
import triton.language as tl

from lorakeet.kernels.sizes import power_of_two

KEYS = 64  # keys taken at a time
MIN_TILE = 16  # the least that `tl.dot` takes, in any dimension


def tile_size(size: int) -> int:
    return max(MIN_TILE, power_of_two(size))


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    query,
    last_keys,
    first,
    end,
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
    """Keys [first, end) for queries (M, D) that see keys up to `last_keys` (M,).

    Returns the weighted sum of the values (M, D), the sum of the weights (M,) and the highest
    score (M,), to which the weights are relative. `scale` holds log2(e): powers of two are cheaper.
    """
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    weight = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for start in range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        in_range = keys < end
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        rows = ((blocks * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        k_mask = in_head[:, None] & in_range[None, :]
        k = tl.load(k_cache + rows[None, :] + d[:, None], mask=k_mask, other=0.0)
        v_mask = in_range[:, None] & in_head[None, :]
        v = tl.load(v_cache + rows[:, None] + d[None, :], mask=v_mask, other=0.0)

        scores = tl.dot(query, k, input_precision="ieee") * scale
        visible = in_range[None, :] & (keys[None, :] <= last_keys[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > last_keys[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # -inf - -inf would be NaN in a row that has seen no key yet
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        products = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink[:, None] + products
        weight = weight * shrink + tl.sum(weights, 1)
        highest = new_highest
    return total, weight, highest
