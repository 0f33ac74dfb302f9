# mypy: allow-untyped-decorators
"""The LoRA of an embedding: A is looked up, not multiplied."""

import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.rank_rows import RankRows
from lorakeet.kernels.sizes import cdiv

_COLUMNS = 512  # outputs of a program
_RANKS = 16  # rank rows that it takes at a time


@triton.jit
def _embedding_kernel(  # type: ignore[no-untyped-def]
    y,
    token_ids,
    a,
    b,
    first,
    last,
    magnitudes,
    rows,
    scales,
    offsets,
    size,
    y_stride,
    a_row_stride,
    b_row_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0)
    own_first = tl.load(first + token)
    own_last = tl.load(last + token)
    magnitude = tl.load(magnitudes + token)
    if (own_first >= own_last) & (magnitude < 0):
        return
    token_id = tl.load(token_ids + token)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = n < size
    y_at = y + token.to(tl.int64) * y_stride + n
    total = tl.load(y_at, mask=in_row, other=0.0).to(tl.float32)
    if magnitude >= 0:
        at = b + magnitude.to(tl.int64) * b_row_stride + n
        total += total * tl.load(at, mask=in_row, other=0.0).to(tl.float32)
    for r0 in range(own_first, own_last, BLOCK_R):
        j = r0 + tl.arange(0, BLOCK_R)
        own = j < own_last
        row = tl.load(rows + j, mask=own, other=0).to(tl.int64)
        value = tl.load(a + row * a_row_stride + token_id, mask=own, other=0.0).to(tl.float32)
        value *= tl.load(scales + j, mask=own, other=0.0)
        value += tl.load(offsets + j, mask=own, other=0.0)
        b_at = b + row[:, None] * b_row_stride + n[None, :]
        weights = tl.load(b_at, mask=own[:, None] & in_row[None, :], other=0.0)
        total += tl.sum(value[:, None] * weights.to(tl.float32), 0)
    tl.store(y_at, total.to(y.dtype.element_ty), mask=in_row)


def embedding_lora(y: Tensor, token_ids: Tensor, a: Tensor, b: Tensor, rank_rows: RankRows) -> None:
    """Semantics: y[t] = y[t] · (1 + b[magnitudes[t]]) + Σ_j h_j · b[rows[j]], h_j = scales[j] ·
    a[rows[j], token_ids[t]] + offsets[j], for j in the token's own range; in place.

    y: (T, out); token_ids: (T,) int64; a: (rows, vocab); b: (rows, out). Sums are float32, rounded
    once.
    """
    assert y.stride(1) == a.stride(1) == b.stride(1) == 1
    assert token_ids.is_contiguous()
    _embedding_kernel[len(y), cdiv(y.shape[1], _COLUMNS)](
        y,
        token_ids,
        a,
        b,
        rank_rows.first,
        rank_rows.last,
        rank_rows.magnitudes,
        rank_rows.rows,
        rank_rows.scales,
        rank_rows.offsets,
        y.shape[1],
        y.stride(0),
        a.stride(0),
        b.stride(0),
        BLOCK_R=_RANKS,
        BLOCK_N=_COLUMNS,
    )
