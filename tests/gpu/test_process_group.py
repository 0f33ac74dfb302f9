"""Collectives over two GPUs."""

import pytest
import torch

from support.ranks import run_ranks
from support.sums import check_norms, check_sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_all_ranks_get_the_sum() -> None:
    run_ranks(2, check_sums, device="cuda")


@pytest.mark.parametrize("num_parts", [None, 3])
def test_all_ranks_get_the_norm_of_the_sum(num_parts: int | None) -> None:
    run_ranks(2, check_norms, num_parts, device="cuda")
