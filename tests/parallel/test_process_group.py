"""Two ranks on the CPU, and what they agree on."""

import torch

from lorakeet.models.process_group import fits_one_shot
from support.agreements import check_by_all, check_listeners
from support.ranks import run_ranks


def test_what_one_rank_cannot_make_none_has() -> None:
    """And what all can, each has its own of."""
    run_ranks(2, check_by_all)


def test_rank_0_alone_has_the_socket_where_they_meet() -> None:
    run_ranks(2, check_listeners)


def test_sums_of_one_shot_are_small() -> None:
    """Those in docs/performance.md in which they are faster than NCCL's."""
    most = {size: most_rows(size, 4096) for size in (2, 3, 5)}  # of the others, 64 KiB are read
    assert most == {2: 8, 3: 4, 5: 2}
    assert fits_one_shot(torch.empty(4, 4096), 2)
    assert not fits_one_shot(torch.empty(8, 4096, dtype=torch.float16), 2)
    assert not fits_one_shot(torch.empty(1, 4097), 2)


def most_rows(size: int, columns: int) -> int:
    fits = [fits_one_shot(torch.empty(n, columns, dtype=torch.bfloat16), size) for n in range(65)]
    return fits.index(False) - 1
