"""A short run of `tests/churn.py`; the long one is a command."""

from pathlib import Path

import pytest

from churn import FAULTS, NOT_SAVED, Churn, check


@pytest.mark.timeout(150)
def test_churn(tmp_path: Path) -> None:
    """C02, C03, C11: hundreds of changes under traffic, and nothing of them is left."""
    wanted = {f"load with fault {fault}" for fault in FAULTS} | {"upload", "unload"}
    with Churn(tmp_path) as churn:
        sizes = [churn.round(5) for _ in range(3)]
        while missing := wanted - {kind.partition(":")[0] for kind in churn.outcomes}:
            assert len(sizes) < 10, f"a slow machine makes fewer changes, but none of {missing}?"
            sizes.append(churn.round(5))
    check(sizes, max_growth=64 * 2**20)
    assert churn.outcomes[f"unload: {NOT_SAVED}"] > 0
    assert churn.outcomes["request: 200"] > 20
