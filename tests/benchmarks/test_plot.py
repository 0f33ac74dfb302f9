"""The outcomes of S-LoRA's workload, as they are saved and drawn."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorakeet.server.bench.client import Record


@pytest.fixture
def rows(script: Callable[[str], Any]) -> list[dict[str, float]]:
    slora = script("slora")

    def outcome(scale: float) -> Any:
        times = [*range(1, 100), 7000]  # ms
        records = [Record(None, 0.0, ttft=scale * ms / 1e3) for ms in times]
        return slora.Outcome(records, tokens_per_second=1000 / scale)

    points = ((5, 8, 1), (5, 64, 2), (2000, 8, 3), (2000, 64, 4))
    return [slora.row(adapters, rate, outcome(scale)) for adapters, rate, scale in points]


def test_a_rate_is_saved_with_all_that_is_printed(rows: list[dict[str, float]]) -> None:
    assert rows[1] == {
        "adapters": 5,
        "rate": 64,
        "requests": 100,
        "failed": 0,
        "tokens_per_second": 500.0,
        "ttft_p50_ms": pytest.approx(100),
        "ttft_p99_ms": pytest.approx(198),
        "within_slo": 0.99,
    }


def test_few_and_many_adapters_are_drawn_by_rate(
    rows: list[dict[str, float]],
    script: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plot = script("plot")
    ttft, throughput = plot.plot_slora({"outcomes": rows}).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in ttft.lines}
    assert lines["5 adapters, p50"] == [[8, pytest.approx(50)], [64, pytest.approx(100)]]
    assert lines["2,000 adapters, p99"] == [[8, pytest.approx(297)], [64, pytest.approx(396)]]
    assert len(lines) == 4
    lines = {line.get_label(): line.get_ydata().tolist() for line in throughput.lines}
    assert lines == {"5 adapters": [1000, 500], "2,000 adapters": [pytest.approx(1000 / 3), 250]}

    measured, drawn = tmp_path / "slora.json", tmp_path / "slora.svg"
    measured.write_text(json.dumps({"outcomes": rows}))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(measured), str(drawn)])
    plot.main()
    assert "</svg>" in drawn.read_text()
