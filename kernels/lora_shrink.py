# mypy: allow-untyped-decorators
"""The shrink of large passes: tiles of tokens through the A of their own adapters."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.lora_tiles import h_dtype, leave_part, shrink_tile, store_h, sum_parts
from lorakeet.kernels.rank_rows import RankRows
from lorakeet.kernels.sizes import cdiv
from lorakeet.kernels.token_tiles import ROWS, cut_of, read_tile

_INPUTS = 128
_PROGRAMS = 264  # what fills a GPU
_MIN_SPLIT = 512  # inputs that are worth a program


# what changes from step to step, or from layer to layer, must not compile anew
@triton.jit(
    do_not_specialize=["num_tokens", "splits", "num_pairs", "h_slice_stride"],
    do_not_specialize_on_alignment=["count_at"],
)
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    a,
    h,
    sums,
    counters,
    order,
    first,
    last,
    rows,
    scales,
    offsets,
    count_at,
    num_tokens,
    input_size,
    splits,
    split_size,
    num_pairs,
    span,
    x_stride,
    a_slice_stride,
    a_row_stride,
    h_slice_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_PROGRAMS: tl.constexpr,
):
    tile = tl.program_id(0)
    slice_id = tl.program_id(1)
    split = tl.program_id(2) % splits
    tokens, _, own_first, own_last, low, high = read_tile(
        tile, order, first, last, count_at, num_tokens, BLOCK_M, BLOCK_R
    )
    place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    # Most tiles meet few rows: what then has nothing to do comes last, when others are at work.
    first_row = low + tl.program_id(2) // splits * BLOCK_R
    for r0 in range(first_row, high, ROW_PROGRAMS * BLOCK_R):
        j = r0 + tl.arange(0, BLOCK_R)
        used = j < high
        near = (own_first < r0 + BLOCK_R) & (own_last > r0)
        total = shrink_tile(
            x,
            a + slice_id.to(tl.int64) * a_slice_stride,
            tokens,
            near,
            tl.load(rows + j, mask=used, other=0),
            used,
            split * split_size,
            tl.minimum((split + 1) * split_size, input_size),
            x_stride,
            a_row_stride,
            BLOCK_M,
            BLOCK_R,
            BLOCK_K,
            EVEN_K,
            STAGES,
        )
        pair = r0 // BLOCK_R + tile * span
        number = slice_id * num_pairs + pair
        at = sums + number.to(tl.int64) * splits * (BLOCK_M * BLOCK_R) + place
        counter = counters + number
        if leave_part(total, at, counter, split, splits, near[:, None], BLOCK_M, BLOCK_R):
            total = sum_parts(at, counter, splits, near[:, None], BLOCK_M, BLOCK_R)
            places = slice_id.to(tl.int64) * h_slice_stride + pair * (BLOCK_M * BLOCK_R) + place
            store_h(total, h, places, j, used, own_first, own_last, near, scales, offsets)


def sgemm_lora_a(x: Tensor, a: Tensor, rank_rows: RankRows, counters: Tensor) -> Tensor:
    """Semantics: for a pair of tiles, h[i, pair, m, r] is scales[j] · a[i, rows[j]] · x[t]
    + offsets[j], t and j the m-th token and the r-th rank row of the tiles; 0 if t does not own j.

    x: (T, in); a: (slices, rows, in), of x's dtype; counters: int32 zeros, left as zeros. Returns
    h (slices, pairs, tokens of a tile, ROWS), filled for all pairs of tiles that share anything.
    Sums are float32; h is rounded to `h_dtype`.
    """
    assert x.stride(1) == a.stride(2) == 1
    num_tokens, input_size = x.shape
    num_slices, tiles = a.shape[0], cut_of(rank_rows)
    num_pairs = num_slices * tiles.num_pairs
    assert counters.shape[0] >= num_pairs
    h_shape = (num_slices, tiles.num_pairs, tiles.tokens, ROWS)
    h = torch.empty(h_shape, dtype=h_dtype(a.dtype), device=a.device)
    splits = max(1, _PROGRAMS // (tiles.num_tiles * num_slices))
    split_size = max(_MIN_SPLIT, cdiv(cdiv(input_size, splits), _INPUTS) * _INPUTS)
    splits = cdiv(input_size, split_size)
    sums_shape = (num_pairs * splits, tiles.tokens, ROWS)
    sums = torch.empty(sums_shape, dtype=torch.float32, device=x.device)
    _shrink_kernel[tiles.num_tiles, num_slices, splits * tiles.row_programs](
        x,
        a,
        h,
        sums,
        counters,
        rank_rows.order,
        rank_rows.first,
        rank_rows.last,
        rank_rows.rows,
        rank_rows.scales,
        rank_rows.offsets,
        rank_rows.count,
        num_tokens,
        input_size,
        splits,
        split_size,
        tiles.num_pairs,
        tiles.span,
        x.stride(0),
        a.stride(0),
        a.stride(1),
        h.stride(0),
        BLOCK_M=tiles.tokens,
        BLOCK_R=ROWS,
        BLOCK_K=_INPUTS,
        EVEN_K=input_size % _INPUTS == 0,
        STAGES=4,
        ROW_PROGRAMS=tiles.row_programs,
        num_warps=4,
    )
    return h
