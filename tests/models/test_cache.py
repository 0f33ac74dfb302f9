"""Folders made once: whole or not there, whoever builds and whatever fails."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorakeet.models.cache import build_once, cache_dir


def test_the_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LORAKEET_CACHE", raising=False)
    assert cache_dir().name == "lorakeet"
    monkeypatch.setenv("LORAKEET_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("no")

    def succeed(folder: Path) -> None:
        assert not list(folder.iterdir())
        (folder / "whole").write_text("x")

    with pytest.raises(RuntimeError, match="no"):
        build_once(tmp_path / "a", fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (build_once(tmp_path / "a", succeed) / "whole").exists()


def test_what_a_killed_process_left_is_thrown_away(tmp_path: Path) -> None:
    for leftover in ("a", "a.partial"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "old").write_text("x")

    def build(folder: Path) -> None:
        (folder / "new").write_text("y")

    folder = build_once(tmp_path / "a", build)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "new"]
    assert not (tmp_path / "a.partial").exists()


def test_one_of_many_builds_and_the_others_wait(tmp_path: Path) -> None:
    builds = []
    start = threading.Barrier(4)

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "file").write_text("x")

    def work(_: int) -> bool:
        start.wait()
        return (build_once(tmp_path / "a", build) / "file").exists()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert len(builds) == 1
