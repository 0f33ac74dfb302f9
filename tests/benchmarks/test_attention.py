"""What attention is measured beside gets the same keys and values, and is checked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

CASES = ("decode 1 x 33", "decode 5 x 100", "prefill 2 x 50")


@pytest.fixture
def attention(script: Callable[[str], Any]) -> Any:
    return script("attention")


def problem(attention: Any, case: str) -> Any:
    return attention.Problem(case, attention.parse_config(dict(attention.TINY)), "cpu")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [16, 256])
def test_blocks_hold_what_the_dense_tensors_hold(attention: Any, case: str, block: int) -> None:
    found = problem(attention, case)
    caches, tables = found.paged(block)
    expected: list[Tensor] = []
    for row, length in enumerate(found.lengths):
        in_order = caches[0][0][tables[row].long()].flatten(0, 1)
        expected.append(found.k[0][row, :length])
        torch.testing.assert_close(in_order[:length], expected[-1], rtol=0, atol=0)
    assert tables.flatten().sort().values.tolist() == list(range(tables.numel()))
    torch.testing.assert_close(found.packed(found.k)[0], torch.cat(expected), rtol=0, atol=0)


def test_the_lengths_of_a_decode_differ_around_the_context(attention: Any) -> None:
    assert problem(attention, "decode 5 x 320").lengths.tolist() == [256, 288, 320, 352, 384]
    assert problem(attention, "decode 1 x 320").lengths.tolist() == [320]
    assert problem(attention, "prefill 2 x 50").lengths.tolist() == [50, 50]


def test_the_floor_counts_each_pair_of_query_and_key_that_is_seen(attention: Any) -> None:
    ceilings = attention.Ceilings(copy=1.0, read=1e30, flops=1e6)
    width = 4 * 16  # TINY's heads
    prefill = problem(attention, "prefill 2 x 50").floor_us(ceilings)
    assert prefill == pytest.approx(4 * width * 2 * sum(range(1, 51)))
    decode = problem(attention, "decode 5 x 320").floor_us(ceilings)
    assert decode == pytest.approx(4 * width * 5 * 320)


@pytest.mark.parametrize("case", CASES)
def test_only_the_same_result_is_timed(
    attention: Any, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "MAX_ERROR", 1e-5)  # all is float32 here

    def broken(problem: Any) -> None:
        raise ValueError("no kernel\nfor this")

    others = {
        "SDPA": attention.ALTERNATIVES["SDPA"][1],
        "wrong": lambda problem: lambda i: torch.ones_like(problem.q[i]),
        "broken": broken,
    }
    ceilings = attention.Ceilings(1e9, 1e9, 1e9)
    result = attention.measure(problem(attention, case), case, ceilings, others)
    assert result.others_us.keys() == {"SDPA"}
    assert result.gain == result.others_us["SDPA"] / result.us
    wrong, broken_line = capsys.readouterr().out.splitlines()
    assert wrong.startswith("wrong left out: AssertionError")
    assert broken_line == "broken left out: ValueError: no kernel"


@pytest.mark.parametrize(
    ("others_us", "mean"),
    [
        ([{"SDPA": 4.0, "FA3": 6.0}, {"SDPA": 16.0}], "4.00"),
        ([{}, {"SDPA": 16.0}], "8.00"),
        ([{}, {}], "none has run"),
    ],
)
def test_a_case_that_no_alternative_ran_in_is_left_out_of_the_mean(
    attention: Any,
    others_us: list[dict[str, float]],
    mean: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = list(others_us)

    def measure(problem: Any, case: str, *_: object) -> Any:
        return attention.Result(case, floor_us=1.0, us=2.0, others_us=left.pop(0))

    monkeypatch.setattr(attention, "measure", measure)
    monkeypatch.setattr("sys.argv", ["attention.py", "--smoke"])
    attention.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"best alternative / ours, geometric mean: {mean}"
