"""Two ranks on the CPU, and what they agree on."""

import torch

from lorakeet.models.process_group import OneShotSum
from support.agreements import check_by_all
from support.ranks import run_ranks


def test_what_one_rank_cannot_make_none_has() -> None:
    """And what all can, each has its own of."""
    run_ranks(2, check_by_all)


def test_sums_of_one_shot_are_small() -> None:
    """Those in docs/performance.md in which they are faster than NCCL's."""
    one_shot = object.__new__(OneShotSum)  # without the memory that GPUs share
    one_shot._num_others = 1
    rows = {n: one_shot.takes(torch.empty(n, 4096, dtype=torch.bfloat16)) for n in (1, 8, 32, 128)}
    assert rows == {1: True, 8: True, 32: False, 128: False}
