"""Whether weights came from the disk is told by a read that may not wait for it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([BlockingIOError(), BlockingIOError()], True),
        ([BlockingIOError(), 1], False),  # one is in the page cache still
        ([OSError(), BlockingIOError()], False),  # it cannot be seen
    ],
)
def test_all_files_must_have_left_the_page_cache(
    answers: list[Any],
    expected: bool,
    script: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_model = script("load_model")

    def read(*_: object) -> int:
        answer = left.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    left = list(answers)
    monkeypatch.setattr(os, "preadv", read)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"weights")
    assert load_model.drop_from_cache(tmp_path) is expected
    assert not left
