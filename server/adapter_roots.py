"""The folders that adapters may be loaded from at run time. Every method waits for the disk."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from lorakeet.lora.peft_config import CONFIG_NAME
from lorakeet.server.errors import APIError, BadRequestError, ForbiddenError, NotFoundError

_OUTSIDE = "The path is outside the folders that adapters may be loaded from (--adapter-dir)"
_SETTLED = 2 * 10**9  # nanoseconds: a folder whose time stamp is older has changed since no more


class AdapterRoots:
    """Roots are resolved once: what lies inside them by way of a link to the outside does not."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(Path(os.path.realpath(root)) for root in roots)
        self._seen: dict[str, tuple[int, Path | None]] = {}  # by folder, of the last `scan`

    def __bool__(self) -> bool:
        return bool(self._roots)

    def allowed(self, path: str) -> Path:
        """The folder at `path`, if an adapter may be loaded from it.

        Raises ForbiddenError (outside the roots, whether or not it exists), NotFoundError and
        BadRequestError (no folder).
        """
        if not self._roots:
            message = "Loading adapters at run time is off: start the server with --adapter-dir"
            raise ForbiddenError(message, param="lora_path", code="loading_disabled")
        try:
            folder = Path(path).resolve()
        except (OSError, ValueError, RuntimeError):  # a NUL byte, a loop of links
            folder = None
        if folder is None or not self._inside(folder):
            raise ForbiddenError(_OUTSIDE, param="lora_path", code="path_not_allowed")
        try:
            if not folder.is_dir():
                if folder.exists():
                    message = "The path is not a folder"
                    raise BadRequestError(message, param="lora_path", code="invalid_adapter")
                raise FileNotFoundError
            escapes = not all(self._inside(entry.resolve()) for entry in folder.iterdir())
        except FileNotFoundError:
            message = "There is no such folder"
            raise NotFoundError(message, param="lora_path", code="adapter_not_found") from None
        except (OSError, RuntimeError):
            message = "The folder cannot be read"
            raise BadRequestError(message, param="lora_path", code="invalid_adapter") from None
        if escapes:  # a link among its files
            raise ForbiddenError(_OUTSIDE, param="lora_path", code="path_not_allowed")
        return folder

    def find(self, name: str) -> Path | None:
        """The adapter's folder of this name directly in a root, the first one that has it."""
        for root in self._roots:
            if _is_adapter(root / name):
                return self._allowed_or_none(root / name)
        return None

    def scan(self) -> dict[str, Path]:
        """All that `find` would find, by name. Only folders that have changed are looked into."""
        found: dict[str, Path | None] = {}
        seen: dict[str, tuple[int, Path | None]] = {}
        now = time.time_ns()
        for root in self._roots:
            for name, changed in _folders(root):
                if name in found:
                    continue
                path = str(root / name)
                known = self._seen.get(path)
                if known is not None and known[0] == changed:
                    folder = known[1]
                    is_adapter = folder is not None
                else:
                    is_adapter = _is_adapter(root / name)
                    folder = self._allowed_or_none(root / name) if is_adapter else None
                if changed < now - _SETTLED:
                    seen[path] = changed, folder
                if is_adapter:
                    found[name] = folder
        self._seen = seen
        return {name: folder for name, folder in found.items() if folder is not None}

    def _allowed_or_none(self, folder: Path) -> Path | None:
        try:
            return self.allowed(str(folder))
        except (APIError, OSError):
            return None

    def _inside(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)


def _is_adapter(folder: Path) -> bool:
    try:
        return (folder / CONFIG_NAME).is_file()
    except OSError:
        return False


def _folders(root: Path) -> list[tuple[str, int]]:
    """Names and times of the last change, sorted."""
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                try:
                    if entry.is_dir():
                        found.append((entry.name, entry.stat().st_mtime_ns))
                except OSError:  # gone just now, or a loop of links
                    continue
    except OSError:
        return []
    return sorted(found)
