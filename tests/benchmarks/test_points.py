"""Which adapters the rows of a benchmark's batch have."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def decode_step(script: Callable[[str], Any]) -> Any:
    return script("decode_step")


@pytest.mark.parametrize(
    ("name", "rows", "ranks"),
    [
        ("3:0", [-1, -1, -1], ()),
        ("5:2", [0, 1, 0, 1, 0], (16, 16)),
        ("3:distinct", [0, 1, 2], (16, 16, 16)),
        ("3:identical", [0, 0, 0], (16,)),
        ("9:uniform", [0, 1, 2] * 3, (16, 16, 16)),
        ("3:small", [0, 1, 2], (8, 8, 8)),
        ("3:mixed", [0, 1, 2], (64, 8, 64)),
    ],
)
def test_a_point(decode_step: Any, name: str, rows: list[int], ranks: tuple[int, ...]) -> None:
    point = decode_step.Point.parse(name)
    assert (point.size, point.adapters, point.ranks) == (len(rows), rows, ranks)


def test_a_skewed_mix(decode_step: Any) -> None:
    """Each adapter has 1.5 times the rows of the next: the first a third of all."""
    counts = Counter(decode_step.Point.parse("64:skewed").adapters)
    exact = [64 / 3 / 1.5**adapter for adapter in range(12)]
    assert [counts[adapter] for adapter in range(12)] == pytest.approx(exact, abs=1)
