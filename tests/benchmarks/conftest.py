"""The scripts of benchmarks/, imported as they import one another."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports one by its name, without .py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module
