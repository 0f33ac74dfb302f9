# mypy: allow-untyped-decorators
"""What the LoRA kernels share: one tile of a shrink, one tile of an expand, columns by slice.

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
def leave_part(  # type: ignore[no-untyped-def]
    total, at, counter, part, parts, mask, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Leave one of a tile's parts (M, R), of which the first lies at `at` (M, R). Returns whether
    it is the last to come: then they can be summed up. `counter`: of those that have come."""
    tl.store(at + part * (BLOCK_M * BLOCK_R), total, mask=mask)
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1


@triton.jit
def sum_parts(  # type: ignore[no-untyped-def]
    at, counter, parts, mask, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr
):
    """What `leave_part` has left, part by part: in one order, whoever came last. The counter is
    zero again."""
    tl.store(counter, 0)
    total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for part in tl.range(0, parts, num_stages=4):
        part_at = at + part * (BLOCK_M * BLOCK_R)
        total += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def store_h(  # type: ignore[no-untyped-def]
    total, h, places, j, used, own_first, own_last, near, scales, offsets
):
    """Scale a shrink's sums (M, R) over the inputs and store them at `places` (M, R) of h, for
    tokens (M,) that are `near`; zeros for what they do not own. `j` (R,): the list's rows, of which
    those `used` are there."""
    own = (own_first[:, None] <= j[None, :]) & (j[None, :] < own_last[:, None])
    scale = tl.load(scales + j, mask=used, other=0.0)
    offset = tl.load(offsets + j, mask=used, other=0.0)
    value = tl.where(own, total * scale[None, :] + offset[None, :], 0.0)
    tl.store(h + places, value.to(h.dtype.element_ty), mask=near[:, None])


@triton.jit
def expand(h, weights, y, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """y (M, N) float32 + h (M, R) · weights (R, N)."""
    if PRECISION == "tf32":
        weights = weights.to(tl.float32)
    return tl.dot(h, weights, y, input_precision=PRECISION)


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
