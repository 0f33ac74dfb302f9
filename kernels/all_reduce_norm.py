# mypy: allow-untyped-decorators
"""The sum over the ranks, the residual sum and RMSNorm, in one kernel over GPUs that can write each
other's memory: each rank pushes its rows into the mailboxes of all others, and sums up what it got.

Each word of a row has a flag beside its payload, the number of the call, as in NCCL's LL protocol.
Stores of 8 bytes arrive whole, so there is nothing to wait for but the words: no barrier, no fence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.mailbox import Mailbox
from lorakeet.kernels.partial import load_sum, parts_of
from lorakeet.kernels.sizes import power_of_two


@triton.jit
def _received(at, mask, call):  # type: ignore[no-untyped-def]
    """The words at `at`, as soon as all of them are those of the call."""
    words = tl.load(at, mask=mask, other=0, volatile=True)
    while tl.sum((mask & ((words >> 32).to(tl.int32) != call)).to(tl.int32), 0) > 0:
        words = tl.load(at, mask=mask, other=0, volatile=True)
    return words


@triton.jit
def _all_reduce_norm_kernel(  # type: ignore[no-untyped-def]
    y,
    residual,
    weight,
    total,
    normed,
    addresses,
    num_calls,
    part_stride,
    y_stride,
    size,
    box_rows,
    row_words,
    eps,
    own_rank,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # A program waits only for the programs of its row on other ranks. Programs start in order, so
    # the first row that is not done is at work everywhere: they need not all run at once.
    token = tl.program_id(0)
    call = tl.load(num_calls + token) + 1
    # Two places for each row are enough: its last call but one has been read everywhere, since
    # all others have pushed for the last one, in kernels that ran after.
    place = ((call & 1) * box_rows + token) * RANKS
    row = token.to(tl.int64) * size
    n, w = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N // 2)
    in_row, in_words = n < size, w < size // 2
    own = load_sum(y + token.to(tl.int64) * y_stride + n, part_stride, in_row, PARTS)
    own = own.to(total.dtype.element_ty)
    low, high = tl.split(own.to(tl.uint16, bitcast=True).reshape(BLOCK_N // 2, 2))
    words = (call.to(tl.int64) << 32) | (high.to(tl.int64) << 16) | low.to(tl.int64)
    for rank in range(RANKS):
        if rank != own_rank:
            box = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
            at = box + (place + own_rank).to(tl.int64) * row_words + w
            tl.store(at, words, mask=in_words, cache_modifier=".wt")
    before = tl.load(residual + row + n, mask=in_row, other=0.0).to(tl.float32)
    scale = tl.load(weight + n, mask=in_row, other=0.0).to(tl.float32)
    own_box = tl.load(addresses + own_rank).to(tl.pointer_type(tl.int64))
    values = tl.zeros((BLOCK_N,), tl.float32)
    for rank in range(RANKS):  # in the same order on all, so they get the same bits
        if rank == own_rank:
            values += own.to(tl.float32)
        else:
            at = own_box + (place + rank).to(tl.int64) * row_words + w
            received = _received(at, in_words, call)
            pairs = tl.join(received.to(tl.uint16), (received >> 16).to(tl.uint16))
            values += pairs.reshape(BLOCK_N).to(own.dtype, bitcast=True).to(tl.float32)
    rounded = (values + before).to(total.dtype.element_ty)
    tl.store(total + row + n, rounded, mask=in_row)
    values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    tl.store(normed + row + n, (values * factor * scale).to(normed.dtype.element_ty), mask=in_row)
    tl.store(num_calls + token, call)


def all_reduce_add_rms_norm(
    y: Tensor, residual: Tensor, weight: Tensor, eps: float, mailbox: Mailbox
) -> tuple[Tensor, Tensor]:
    """Semantics: total = residual + Σ of the ranks' y; normed = total / rms(total) · weight.

    All ranks make the same calls in the same order. residual and weight are the same on all, and
    so, to the bit, are the results. y: (T, size), or its parts; residual: (T, size), contiguous, as
    `mailbox` takes it; weight: (size,). Returns normed and total, of residual's dtype; each rank's
    y is rounded to it, sums are float32, total is rounded before it is normed.
    """
    parts = parts_of(y)
    assert (parts.num_rows, parts.size) == residual.shape
    assert residual.is_contiguous()
    assert mailbox.takes(residual)
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    block_n = max(power_of_two(parts.size), 2)
    _all_reduce_norm_kernel[(parts.num_rows,)](
        y,
        residual,
        weight,
        total,
        normed,
        mailbox.addresses,
        mailbox.num_calls,
        parts.stride,
        parts.row_stride,
        parts.size,
        mailbox.num_rows,
        mailbox.row_words,
        eps,
        mailbox.rank,
        RANKS=mailbox.num_ranks,
        PARTS=parts.num_parts,
        BLOCK_N=block_n,
        num_warps=min(max(block_n // 512, 4), 16),  # with more values a thread, registers run out
    )
    return normed, total
