"""Every benchmark that has `--smoke`, and memory.py, as a user starts it: its ratio comes last."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lorakeet.models.process_group import listen

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = ROOT / "tests/support/interpreter.py"
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, INTERPRETER, f"benchmarks/{command[0]}", *command[1:]],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
    )


def last_line(*command: str) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


RATIO = r"(?!0\.0+\b)\d+\.\d\d+"
LAST_LINES = {  # N: a ratio; beside plain torch, the interpreter's is too small to show
    "attention": r"best alternative / ours, geometric mean: 0\.\d\d",
    "decode_step": r"worst step/floor: N",
    "engine_step": r"worst peer/step, at 1:0: N",
    "kernels": r"faster than the loop, geometric mean: 0\.\d\d",
    "prefill": r"without adapters / with, the worst: N",
    "tensor_parallel": r"speed-up of 2 over 1 at 1:0: N",
    "cold": (
        r"penalty p50 / p99 -?\d+\.\d / -?\d+\.\d ms; with loads over without, between tokens p99 N"
        r"; twice the pool over what fits, TTFT p50 N"
    ),
    "load_model": r"time of loading over that of reading: N",
    "slora": r"40 adapters over 5 at 8 a second, .+: N",
    "swap": r"the goal of 300 ms over the median: N",
    "memory": r"KV cache over what may be used: N",
}


def assert_ratio(name: str, *options: str) -> None:
    line = last_line(f"{name}.py", *options)
    assert re.fullmatch(LAST_LINES[name].replace("N", RATIO), line), line


@pytest.mark.parametrize(
    "name", ["attention", "decode_step", "engine_step", "kernels", "prefill", "tensor_parallel"]
)
def test_it_ends_with_a_ratio(name: str) -> None:
    assert_ratio(name, "--smoke")


@pytest.mark.parametrize(
    ("name", "options"),
    [("cold", []), ("load_model", []), ("slora", ["--rates=8", "--duration=1"]), ("swap", [])],
)
def test_one_with_a_server_ends_with_a_ratio(name: str, options: list[str]) -> None:
    with listen() as unused:
        port = unused.getsockname()[1]
    assert_ratio(name, "--smoke", f"--port={port}", *options)


def test_memory_ends_with_a_ratio() -> None:
    assert_ratio("memory", "configs/llama-3.1-70b-tp8.yaml")


@pytest.mark.parametrize("name", ["attention", "kernels"])
def test_only_must_name_a_case(name: str) -> None:
    done = run(f"{name}.py", "--smoke", "--only", "nothing")
    assert done.returncode == 2
    assert done.stderr.endswith(f"{name}.py: error: no case's name holds 'nothing'\n")


def test_engine_step_measures_other_ways_beside_the_served_one(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    options = ["--points", "1:0", "--modes", "1", "--sampling", "penalties", "--json", str(file)]
    assert last_line("engine_step.py", "--smoke", *options).startswith("worst peer/step, at 1:0: ")
    found = json.loads(file.read_text())
    prompts = [(prompt["length"], prompt["has_adapter"]) for prompt in found["prompts"]]
    assert prompts == [(5, False), (5, True), (40, False), (40, True)]
    rows = found["points"]
    assert [row["way"] for row in rows] == ["served", "1", "penalties"]
    assert [row["peer_ms"] for row in rows] == [4.75, None, None]
