"""Norms of sums over the ranks, by mailboxes: between processes that share memory."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lorakeet.kernels import reference
from lorakeet.kernels.mailbox import Mailbox, mailbox_shape
from support.mailboxes import (
    EPS,
    NUM_ROWS,
    Call,
    make_calls,
    mixed_calls,
    shared_boxes,
    used_boxes,
)
from support.ranks import run_ranks

# the old way: more rows, more columns, or another dtype than mailboxes take
TAKEN_BY_NONE = [
    Call(NUM_ROWS + 1, 64, 3, torch.bfloat16),
    Call(1, 72, None, torch.bfloat16),
    Call(1, 35, 3, torch.bfloat16),
    Call(2, 64, 3, torch.float32),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_norm_of_the_sum(tmp_path: Path, size: int) -> None:
    calls = [*mixed_calls(40), *TAKEN_BY_NONE, *mixed_calls(40)]
    run_ranks(size, make_calls, calls, shared_boxes(size), tmp_path)
    check_results(tmp_path, size, calls, ["all_reduce"] * len(TAKEN_BY_NONE))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("last_call", [2**31 - 3, -2])
def test_the_number_of_calls_may_wrap(tmp_path: Path, last_call: int) -> None:
    """After days: from the largest int32 to the least, and then by way of 0."""
    kinds = [(64, 3, torch.bfloat16), (70, None, torch.float16), (6, 1, torch.bfloat16)]
    calls = [Call(NUM_ROWS, *kind) for kind in kinds * 2]
    run_ranks(2, make_calls, calls, used_boxes(2, last_call), tmp_path, last_call)
    check_results(tmp_path, 2, calls, [])


def check_results(
    folder: Path, size: int, calls: Sequence[Call], collectives: Sequence[str]
) -> None:
    """Of `make_calls` on all ranks."""
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(size)]
    assert all(done == collectives for _, done in ranks)
    for seed, call in enumerate(calls):
        ys = [call.values(seed, rank).float() for rank in range(size)]
        if call.num_parts is not None:
            ys = [sum(y.unbind()[1:], y[0]).to(call.dtype).float() for y in ys]
        residual, weight = call.others(seed)
        want = (sum(ys[1:], ys[0]) + residual.float()).to(call.dtype)
        zero = torch.zeros_like(want)
        exact = reference.add_rms_norm(zero, want, weight, EPS, torch.float64)[0]
        tolerance = 2 * max(torch.finfo(call.dtype).eps, 1e-5)
        first = ranks[0][0][seed]
        for found, _ in ranks:
            normed, total = found[seed]
            assert total.dtype == normed.dtype == call.dtype
            assert torch.equal(total, want), (seed, call)
            torch.testing.assert_close(normed.double(), exact, rtol=tolerance, atol=tolerance)
            assert torch.equal(normed, first[0]), (seed, call)


@pytest.mark.parametrize(
    ("num_ranks", "size", "num_rows"),
    [(2, 4096, 256), (4, 4096, 85), (8, 4096, 36), (8, 8192, 18), (2, 256, 256), (2, 16384, 64)],
)
def test_what_it_takes(num_ranks: int, size: int, num_rows: int) -> None:
    """As many rows as there is room for, but no more than 4 MiB to push."""
    boxes = [torch.empty(mailbox_shape(num_ranks), dtype=torch.int64, device="meta")] * num_ranks
    mailbox = Mailbox(0, boxes)
    for rows, takes in ((1, True), (num_rows, True), (num_rows + 1, False)):
        x = torch.empty(rows, size, device="meta", dtype=torch.float16)
        assert mailbox.takes(x) == takes
        assert not mailbox.takes(x.float())
    assert not mailbox.takes(torch.empty(1, 16386, device="meta", dtype=torch.float16))
