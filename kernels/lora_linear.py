# mypy: allow-untyped-decorators
"""A linear layer and the LoRA of every row, in one kernel: for decode, where all is bytes.

The first programs of the grid are the shrink; they run while the others read the layer's weights.
Those add the expand to the tile that they hold, when the shrink's programs have all arrived. So
LoRA costs its bytes: no launch, and no second pass over y. Weights and x come in tiles by the GPU's
copy engine (TMA), where it has one.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lorakeet.kernels.lora_tiles import (
    find_slice,
    h_dtype,
    leave_part,
    precision,
    shrink_tile,
    store_h,
    sum_parts,
)
from lorakeet.kernels.rank_rows import MIN_ROOM, RankRows
from lorakeet.kernels.sizes import cdiv, power_of_two
from lorakeet.kernels.tiles import ROWS_AT_ONCE, linear_tiles, shared_memory_of

MAX_TOKENS = 128
_MAX_SPLITS = 4  # parts of the inputs
assert _MAX_SPLITS * ROWS_AT_ONCE <= MIN_ROOM  # each reads its first rows ahead
_MIN_TOKENS = 16  # of a tile: what a product takes at least
_ALIGNMENT = 16  # bytes, of rows that are copied in tiles
_SHRINK_PROGRAMS = 128
_SHRINK_INPUTS = 512  # inputs that are worth a program, as long as there are programs
_PROGRAMS = 96  # what fills most of a GPU
_SUMMED_ROWS = tl.constexpr(16)  # stored together if a token owns any of them: in wide stores


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x,
    a,
    h,
    sums,
    counters,
    arrivals,
    first,
    last,
    rows,
    scales,
    offsets,
    count,
    num_tokens,
    input_size,
    most_splits,
    x_stride,
    a_slice_stride,
    a_row_stride,
    h_slice_stride,
    h_stride,
    SLICES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program's share of the tiles (rank rows, slice, part of the inputs)."""
    m = tl.arange(0, BLOCK_M)
    in_batch = m < num_tokens
    own_first = tl.load(first + m, mask=in_batch, other=0)
    own_last = tl.load(last + m, mask=in_batch, other=0)
    r = tl.arange(0, BLOCK_R)
    tiles = tl.cdiv(count, BLOCK_R) * SLICES
    splits = tl.maximum(1, tl.minimum(most_splits, PROGRAMS // tl.maximum(tiles, 1)))
    split_size = tl.cdiv(tl.cdiv(input_size, splits), BLOCK_K) * BLOCK_K
    splits = tl.cdiv(input_size, split_size)
    for item in range(tl.program_id(0), tiles * splits, PROGRAMS):
        split = item % splits
        tile = item // splits
        slice_id = tile % SLICES
        r0 = (tile // SLICES) * BLOCK_R
        j = r0 + r
        used = j < count
        row = tl.load(rows + j, mask=used, other=0)
        near = (own_first < r0 + BLOCK_R) & (own_last > r0)
        total = shrink_tile(
            x,
            a + slice_id.to(tl.int64) * a_slice_stride,
            m,
            near,
            row,
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
        place = m[:, None] * BLOCK_R + r[None, :]
        at = sums + tile * splits * (BLOCK_M * BLOCK_R) + place
        # whole blocks of rows that a token owns any of: what is wanted, in wide loads
        block = j[None, :] // _SUMMED_ROWS * _SUMMED_ROWS
        wanted = (own_first[:, None] < block + _SUMMED_ROWS) & (own_last[:, None] > block)
        counter = counters + tile
        is_last = splits == 1
        if splits > 1:
            is_last = leave_part(total, at, counter, split, splits, wanted, BLOCK_M, BLOCK_R)
        if is_last:
            if splits > 1:
                total = sum_parts(at, counter, splits, wanted, BLOCK_M, BLOCK_R)
            places = slice_id * h_slice_stride + m[:, None] * h_stride + j[None, :]
            store_h(total, h, places, j, used, own_first, own_last, near, scales, offsets)
            tl.debug_barrier()
            tl.atomic_add(arrivals, 1, sem="release")


@triton.jit
def _add_expanded(y, weights, h_at, near, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """y (N, M) + B (R, N)^T · h (R, M). What is not near a token's own rows is not even read."""
    if PRECISION == "tf32":
        weights = weights.to(tl.float32)
    h = tl.load(h_at, mask=near, other=0.0)
    return tl.dot(tl.trans(weights), h, y, input_precision=PRECISION)


# what changes from step to step, or from layer to layer, must not compile anew
@triton.jit(
    do_not_specialize=["num_tokens", "splits", "most_shrink_splits"],
    do_not_specialize_on_alignment=["arrivals", "count_at"],
)
def _lora_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    x_tiles,
    w_tiles,
    bias,
    y,
    num_tokens,
    output_size,
    input_size,
    splits,
    split_size,
    x_stride,
    a,
    b,
    h,
    sums,
    counters,
    arrivals,
    first,
    last,
    magnitudes,
    rows,
    scales,
    offsets,
    count_at,
    most_shrink_splits,
    a_slice_stride,
    a_row_stride,
    b_row_stride,
    h_slice_stride,
    h_stride,
    first_size,
    other_size,
    SLICES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHRINK_K: tl.constexpr,
    EVEN_SHRINK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    EXPAND_STAGES: tl.constexpr,
):
    count = tl.load(count_at)
    program = tl.program_id(0)
    if program < PROGRAMS:
        _shrink(
            x,
            a,
            h,
            sums,
            counters,
            arrivals,
            first,
            last,
            rows,
            scales,
            offsets,
            count,
            num_tokens,
            input_size,
            most_shrink_splits,
            x_stride,
            a_slice_stride,
            a_row_stride,
            h_slice_stride,
            h_stride,
            SLICES,
            PROGRAMS,
            BLOCK_M,
            BLOCK_R,
            SHRINK_K,
            EVEN_SHRINK_K,
            SHRINK_STAGES,
        )
        return

    split = (program - PROGRAMS) % splits
    slice_id, slice_start, size, tile = find_slice(
        (program - PROGRAMS) // splits, first_size, other_size, BLOCK_N, SLICES
    )
    within = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_slice = within < size
    n = slice_start + within
    m = tl.arange(0, BLOCK_M)
    in_batch = m < num_tokens
    r = tl.arange(0, BLOCK_R)
    first_row = split * BLOCK_R
    used = first_row + r < count
    first_rows = tl.load(rows + first_row + r).to(tl.int64)
    b_at = b + first_rows[:, None] * b_row_stride + n[None, :]
    # Nothing waits for these before the end; `other` would. What they hold outside the slice is not
    # stored.
    ahead = tl.load(b_at, mask=used[:, None] & in_slice[None, :])
    own_first = tl.load(first + m, mask=in_batch, other=0)
    own_last = tl.load(last + m, mask=in_batch, other=0)
    owns = own_first < tl.minimum(own_last, count)
    magnitude = tl.load(magnitudes + m, mask=owns, other=-1)

    k_last = tl.minimum((split + 1) * split_size, input_size)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for k0 in tl.range(split * split_size, k_last, BLOCK_K, num_stages=STAGES):
        w = w_tiles.load([slice_start + tile * BLOCK_N, k0])  # past the end are zeros
        total = tl.dot(w, x_tiles.load([0, k0]).T, total, input_precision="ieee")

    if bias is not None:
        values = tl.load(bias + n, mask=in_slice, other=0.0).to(tl.float32)
        total += tl.where(split == 0, values, 0.0)[:, None]
    if tl.max(magnitude, 0) >= 0:
        at = b + magnitude.to(tl.int64)[None, :] * b_row_stride + n[:, None]
        mask = (magnitude >= 0)[None, :] & in_slice[:, None]
        total += total * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if first_row < count:
        weights = tl.where(used[:, None], ahead, 0.0)
        # Whom this waits for is at work: a GPU starts programs in the order of their numbers, so
        # the shrink's, which are the first and wait for nobody, have all begun.
        while tl.atomic_add(arrivals, 0, sem="acquire") < tl.cdiv(count, BLOCK_R) * SLICES:
            pass
        h_at = h + slice_id * h_slice_stride + m[None, :] * h_stride + r[:, None]
        near = (own_first < first_row + BLOCK_R) & (own_last > first_row)
        total = _add_expanded(total, weights, h_at + first_row, near[None, :], PRECISION)
        # Rows are read a step ahead by hand: if their load were in the loop's pipeline, B's would
        # come after it there, and fewer tiles of B would be on their way.
        step = splits * BLOCK_R
        j = first_row + step + r
        next_rows = tl.load(rows + j, mask=j < count, other=0)
        for r0 in tl.range(first_row + step, count, step, num_stages=EXPAND_STAGES):
            used = r0 + r < count
            b_at = b + next_rows.to(tl.int64)[:, None] * b_row_stride + n[None, :]
            j = r0 + step + r
            next_rows = tl.load(rows + j, mask=j < count, other=0)
            weights = tl.load(b_at, mask=used[:, None] & in_slice[None, :], other=0.0)
            near = (own_first < r0 + BLOCK_R) & (own_last > r0)
            total = _add_expanded(total, weights, h_at + r0, near[None, :], PRECISION)
    y_at = y + (split * num_tokens + m).to(tl.int64)[:, None] * output_size + n[None, :]
    mask = in_batch[:, None] & in_slice[None, :]
    tl.store(y_at, tl.trans(total).to(y.dtype.element_ty), mask=mask)


def lora_linear_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `lora_linear` takes so many rows of x, up to MAX_TOKENS, and rows that lie so."""
    return len(x) <= MAX_TOKENS and all(
        values.data_ptr() % _ALIGNMENT == values.stride(0) * values.itemsize % _ALIGNMENT == 0
        for values in (x, weight)
    )


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    rank_rows: RankRows,
    slice_sizes: Sequence[int],
    arrivals: Tensor,
    counters: Tensor,
) -> Tensor:
    """Semantics: y[t] = (W x[t] + bias) · (1 + b[magnitudes[t]]) + Σ_j h[t, j] · b[rows[j]], where
    h[t, j] = scales[j] · a[rows[j]] · x[t] + offsets[j], for j in the token's own range; slice by
    slice.

    x: (T, in) and weight: (out, in), that `lora_linear_takes`; bias: (out,) or None; a: (slices,
    rows, in); b: (rows, out), all of one dtype; slice_sizes: of the outputs, all but the first are
    equal; arrivals: (1,) int32, zero, used up by this call; counters: int32 zeros, left so, one for
    each ROWS_AT_ONCE rows of the list and slice. The list has room for MIN_ROOM rows. Returns y
    (T, out) of x's dtype, or its parts (splits, T, out) in float32, to be summed up by whoever
    reads them next. Sums are float32; h is rounded to the weights' dtype if that is bfloat16.
    """
    num_tokens, input_size = x.shape
    output_size, num_slices, num_rows = weight.shape[0], len(slice_sizes), len(rank_rows.rows)
    first_size, other_size = slice_sizes[0], slice_sizes[-1]
    assert lora_linear_takes(x, weight)
    assert num_rows >= MIN_ROOM
    assert len(counters) >= cdiv(num_rows, ROWS_AT_ONCE) * num_slices
    assert sum(slice_sizes) == first_size + (num_slices - 1) * other_size == output_size
    assert x.stride(1) == weight.stride(1) == a.stride(2) == b.stride(1) == 1
    block_m = max(_MIN_TOKENS, power_of_two(num_tokens))
    tiles = linear_tiles(block_m, output_size, x.itemsize, shared_memory_of(x.device))
    column_tiles = cdiv(first_size, tiles.outputs)
    column_tiles += (num_slices - 1) * cdiv(other_size, tiles.outputs)
    splits = max(1, min(_MAX_SPLITS, round(_PROGRAMS / column_tiles)))
    split_size = cdiv(cdiv(input_size, splits), tiles.inputs) * tiles.inputs
    shape = (num_tokens, output_size) if splits == 1 else (splits, num_tokens, output_size)
    dtype = x.dtype if splits == 1 else torch.float32
    y = torch.empty(shape, dtype=dtype, device=x.device)
    row_tiles = cdiv(num_rows, ROWS_AT_ONCE)
    h_shape = (num_slices, num_tokens, row_tiles * ROWS_AT_ONCE)
    h = torch.empty(h_shape, dtype=h_dtype(b.dtype), device=x.device)
    sums = torch.empty(
        (_SHRINK_PROGRAMS, block_m, ROWS_AT_ONCE), dtype=torch.float32, device=x.device
    )
    _lora_linear_kernel[_SHRINK_PROGRAMS + column_tiles * splits,](
        x,
        TensorDescriptor.from_tensor(x, [block_m, tiles.inputs]),
        TensorDescriptor.from_tensor(weight, [tiles.outputs, tiles.inputs]),
        bias,
        y,
        num_tokens,
        output_size,
        input_size,
        splits,
        split_size,
        x.stride(0),
        a,
        b,
        h,
        sums,
        counters,
        arrivals,
        rank_rows.first,
        rank_rows.last,
        rank_rows.magnitudes,
        rank_rows.rows,
        rank_rows.scales,
        rank_rows.offsets,
        rank_rows.count,
        cdiv(input_size, _SHRINK_INPUTS),
        a.stride(0),
        a.stride(1),
        b.stride(0),
        *h.stride()[:2],
        first_size,
        other_size,
        SLICES=num_slices,
        PROGRAMS=_SHRINK_PROGRAMS,
        PRECISION=precision(b.dtype),
        BLOCK_M=block_m,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        BLOCK_R=ROWS_AT_ONCE,
        SHRINK_K=tiles.shrink_inputs,
        EVEN_SHRINK_K=input_size % tiles.shrink_inputs == 0,
        STAGES=tiles.stages,
        SHRINK_STAGES=tiles.shrink_stages,
        EXPAND_STAGES=tiles.expand_stages,
        num_warps=tiles.warps,
    )
    return y
