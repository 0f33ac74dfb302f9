# mypy: allow-untyped-decorators
"""What the LoRA kernels share: one tile of a shrink, one tile of an expand.

A tile works on many tokens and many rank rows at once, whoever owns them: what a token does not own
counts for it with h = 0. That is exact, since every weight in the pool is finite (`lora.canonical`
takes no others), and rows that nobody owns are not read.
"""

import torch
import triton
import triton.language as tl

# How h meets the weights: rounded to bfloat16 with bfloat16 weights, as in PEFT where an adapter
# has its model's dtype (autocast_adapter_dtype=False); kept in float32 with others. (float16
# weights are exact in tf32, and h may be out of their range.)
_PRECISION = {torch.float32: "ieee", torch.bfloat16: "ieee", torch.float16: "tf32"}


def precision(dtype: torch.dtype) -> str:
    return _PRECISION[dtype]


def h_dtype(dtype: torch.dtype) -> torch.dtype:
    """What h is stored in for weights of `dtype`."""
    return dtype if dtype == torch.bfloat16 else torch.float32


@triton.jit
def shrink_tile(  # type: ignore[no-untyped-def]
    x,
    a,
    tokens,
    near,
    rows,
    used,
    k_first,
    k_last,
    x_stride,
    a_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x (M, K) · A (R, K)^T over the inputs [k_first, k_last): (M, R) float32."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + tokens.to(tl.int64)[:, None] * x_stride + k[None, :]
    a_at = a + rows.to(tl.int64)[None, :] * a_row_stride + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for k0 in tl.range(k_first, k_last, BLOCK_K, num_stages=STAGES):
        x_mask = near[:, None]
        a_mask = used[None, :]
        if not EVEN_K:
            in_part = k0 + k < k_last
            x_mask = x_mask & in_part[None, :]
            a_mask = a_mask & in_part[:, None]
        x_tile = tl.load(x_at + k0, mask=x_mask, other=0.0)
        a_tile = tl.load(a_at + k0, mask=a_mask, other=0.0)
        total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
    return total


@triton.jit
def sum_parts(  # type: ignore[no-untyped-def]
    at, parts, mask, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr
):
    """What other programs have left at `at` (M, R), part by part: in one order, whoever is last."""
    total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for part in tl.range(0, parts, num_stages=4):
        part_at = at + part * (BLOCK_M * BLOCK_R)
        total += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def store_h(  # type: ignore[no-untyped-def]
    total,
    h,
    places,
    own,
    near,
    scales,
    offsets,
):
    """Scale what a shrink has summed up (M, R) and store it, for tokens (M,) that are `near`; zeros
    for what they do not own."""
    value = tl.where(own, total * scales[None, :] + offsets[None, :], 0.0)
    tl.store(h + places, value.to(h.dtype.element_ty), mask=near[:, None])


@triton.jit
def find_slice(  # type: ignore[no-untyped-def]
    block, first_size, other_size, columns, SLICES: tl.constexpr
):
    """Blocks of columns are counted slice by slice: the first slice, then the equal others.

    Returns a block's slice, where that starts, how large it is, and the block's number in it.
    """
    slice_id = 0
    start = 0
    size = first_size
    if SLICES > 1:
        first_blocks = tl.cdiv(first_size, columns)
        if block >= first_blocks:
            block -= first_blocks
            other_blocks = tl.cdiv(other_size, columns)
            slice_id = 1 + block // other_blocks
            start = first_size + (slice_id - 1) * other_size
            size = other_size
            block %= other_blocks
    return slice_id, start, size, block
