"""Folders that are made once and kept: converted models, the demo model."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock

_MANIFEST = "manifest.json"  # the size of every file; written last


def cache_dir() -> Path:
    """Where Lorakeet keeps what it has made: $LORAKEET_CACHE, or the user's cache folder."""
    override = os.environ.get("LORAKEET_CACHE")
    return (
        Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("lorakeet"))
    )


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """The folder `target`; `build(empty_folder)` fills it first where it is missing or broken.

    It appears under its name only when it is whole. Of several processes, one builds and the
    others wait. What a killed process left behind is thrown away by the next.
    """
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with FileLock(target.with_name(target.name + ".lock")):
        if _is_whole(target):
            return target
        for leftover in (partial, target):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir()
        try:
            build(partial)
            _write_manifest(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_manifest(folder: Path) -> None:
    sizes = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # a power cut must not leave a file of the right size, empty
        sizes[path.name] = path.stat().st_size
    (folder / _MANIFEST).write_text(json.dumps(sizes))


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False
