"""Every benchmark that runs without a GPU, as a user starts it, tiny: it ends with its ratio."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lorakeet.models.process_group import listen

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def last_line(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{command[0]}", *command[1:]],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def is_ratio(line: str) -> bool:
    return re.search(r" \d+\.\d\d+$", line) is not None


@pytest.mark.parametrize(
    "name", ["decode_step", "engine_step", "kernels", "load_model", "prefill", "tensor_parallel"]
)
def test_it_ends_with_a_ratio(name: str) -> None:
    line = last_line(f"{name}.py", "--smoke")
    assert is_ratio(line), line


@pytest.mark.parametrize("name", ["cold", "swap"])
def test_one_with_a_server_ends_with_a_ratio(name: str) -> None:
    with listen() as unused:
        port = unused.getsockname()[1]
    line = last_line(f"{name}.py", "--smoke", "--port", str(port))
    assert is_ratio(line), line


def test_memory_ends_with_a_ratio() -> None:
    line = last_line("memory.py", "configs/llama-3.1-70b-tp8.yaml")
    assert is_ratio(line), line


def test_engine_step_measures_other_ways_beside_the_served_one(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    options = ["--points", "1:0", "--modes", "1", "--sampling", "penalties", "--json", str(file)]
    assert last_line("engine_step.py", "--smoke", *options).startswith("worst peer/step, at 1:0: ")
    rows = json.loads(file.read_text())["points"]
    assert [row["way"] for row in rows] == ["served", "1", "penalties"]
    assert [row["peer_ms"] for row in rows] == [4.75, None, None]
