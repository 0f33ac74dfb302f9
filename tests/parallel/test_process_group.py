"""Two ranks on the CPU, and what they agree on."""

from support.agreements import check_by_all
from support.ranks import run_ranks


def test_what_one_rank_cannot_make_none_has() -> None:
    """And what all can, each has its own of."""
    run_ranks(2, check_by_all)
