"""The load test: its workload by the numbers, and a run against a real server."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lorakeet.server.bench.workload import Workload
from lorakeet.server.cli import app
from support.toy_server import adapter_folder, toy_server

NAMES = ("a", "b", "c", "d")
WORKLOAD = Workload(NAMES, 50.0, 2.0, 1.0, (3, 9), (2, 5), 100.0, seed=1)


def test_arrivals_are_gamma_of_the_given_rate_and_variation() -> None:
    gaps = np.diff([planned.at for planned in WORKLOAD.plan()])
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_adapters_follow_a_power_law(alpha: float) -> None:
    plan = replace(WORKLOAD, alpha=alpha).plan()
    weights = np.arange(1.0, 5.0) ** -alpha
    found = [sum(planned.adapter == name for planned in plan) / len(plan) for name in NAMES]
    assert found == pytest.approx(weights / weights.sum(), abs=0.03)


@pytest.mark.parametrize("vocab_size", [None, 50])
def test_lengths_are_uniform_with_both_ends(vocab_size: int | None) -> None:
    plan = replace(WORKLOAD, vocab_size=vocab_size).plan()
    prompts = [p.prompt.split() if isinstance(p.prompt, str) else p.prompt for p in plan]
    assert {len(prompt) for prompt in prompts} == set(range(3, 10))
    assert {planned.output_tokens for planned in plan} == set(range(2, 6))
    if vocab_size is not None:
        assert all(0 <= int(token) < vocab_size for prompt in prompts for token in prompt)


def test_the_seed_is_all_that_a_plan_depends_on() -> None:
    assert WORKLOAD.plan() == WORKLOAD.plan()
    assert WORKLOAD.plan() != replace(WORKLOAD, seed=2).plan()


def bench(url: str, *options: str) -> tuple[int, str]:
    load = "--rate 60 --duration 1 --input-len 2:4 --output-len 3:3 --vocab-size 300 --seed 1"
    result = CliRunner().invoke(app, ["bench", "--url", url, *load.split(), *options])
    return result.exit_code, result.output


def test_a_run_counts_what_the_server_answered(toy_model: Path, tmp_path: Path) -> None:
    folders = {name: adapter_folder(tmp_path / name, k) for k, name in enumerate(NAMES, 1)}
    numbers_file, plot = tmp_path / "numbers.json", tmp_path / "plot.png"
    with toy_server(toy_model, adapters=folders) as toy:
        files = ("--json", str(numbers_file), "--plot", str(plot))
        code, text = bench(toy.url, "--adapters", "all", *files)
        assert code == 0, text
        served = len(toy.engine.requests)
        asked = {request.adapter_id for request in toy.engine.requests}
    numbers = json.loads(numbers_file.read_text())
    assert numbers["requests"] == numbers["completed"] == served > 20
    assert numbers["output_tokens"] == 3 * served
    assert numbers["workload"]["adapters"] == list(NAMES)
    assert len(asked) == len(NAMES)
    for name in ("ttft", "inter_token", "latency"):
        assert numbers[name].keys() == {"mean", "p50", "p90", "p99"}
        assert 0 < numbers[name]["p50"] <= numbers[name]["p99"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for row in ("requests a second", "output tokens a second", "failed"):
        assert row in text


def test_failures_are_counted_by_their_reason(toy_model: Path) -> None:
    with toy_server(toy_model, max_num_seqs=1, max_queue=1) as toy:
        toy.engine.step_seconds = 0.3
        code, text = bench(toy.url)
    assert code == 0
    assert "queue_full" in text or "Too many requests" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--adapters", "nobody"), "nobody"),
        (("--adapters", "all"), "no adapters"),
        (("--api-key", "wrong"), "401"),
        (("--input-len", "5:2"), "--input-len"),
    ],
)
def test_what_cannot_be_measured(toy_model: Path, options: tuple[str, str], named: str) -> None:
    key = "key" if "--api-key" in options else None
    with toy_server(toy_model, api_key=key) as toy:
        code, text = bench(toy.url, *options)
    assert code == 2
    assert named in text


def test_nobody_listens() -> None:
    code, text = bench("http://127.0.0.1:9")
    assert code == 2
    assert "no server" in text
