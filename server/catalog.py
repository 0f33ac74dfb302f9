"""Adapters that are known by name, and loaded at their first request.

They are folders of the roots, under the folder's name, and registrations of an earlier run.
"""

import asyncio
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lorakeet.server.adapter_roots import AdapterRoots
from lorakeet.server.adapter_state import Registration
from lorakeet.server.errors import APIError, BadRequestError
from lorakeet.server.uploads import Uploads

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}")


@dataclass(frozen=True)
class Unloaded:
    """An adapter that is not loaded."""

    path: Path
    digest: str | None = None  # of a registration: no other content is taken
    pinned: bool = False
    profile: str | None = None  # nor another profile, if it is known

    @classmethod
    def of(cls, known: Registration) -> Self:
        return cls(Path(known.path), known.digest, known.pinned, known.profile)


class Catalog:
    def __init__(self, base_name: str, roots: Iterable[Path], uploads: Uploads) -> None:
        self.registered: dict[str, Registration] = {}  # of an earlier run, not loaded yet
        self.hidden: set[str] = set()  # folders of the roots whose adapter was unloaded
        self.errors: dict[str, str] = {}  # why a first request could not load it
        self._base_name = base_name
        self._roots = AdapterRoots(roots)
        self._uploads = uploads

    def check_name(self, name: str, param: str) -> None:
        """Raises BadRequestError for what cannot be an adapter's name."""
        if not _NAME.fullmatch(name):
            message = "An adapter's name has up to 255 letters, digits or any of . _ : / @ + -"
            raise BadRequestError(message, param=param, code="invalid_name")
        if self._is_of_base(name):
            message = f"The name {name!r} belongs to the base model"
            raise BadRequestError(message, param=param, code="invalid_name")

    async def find(self, name: str) -> Unloaded | None:
        if (known := self.registered.get(name)) is not None:
            return Unloaded.of(known)
        if not self._roots or not self._can_be_folder(name):
            return None
        folder = await asyncio.to_thread(self._roots.find, name)
        return None if folder is None or name in self.hidden else Unloaded(folder)

    async def all(self) -> dict[str, Unloaded]:
        folders = await asyncio.to_thread(self._roots.scan)
        found = {name: Unloaded.of(known) for name, known in self.registered.items()}
        for name, folder in folders.items():
            if self._can_be_folder(name):
                found.setdefault(name, Unloaded(folder))
        return found

    async def allowed(self, path: str) -> Path:
        """As `AdapterRoots.allowed`."""
        return await asyncio.to_thread(self._roots.allowed, path)

    async def folder_of(self, found: Unloaded) -> Path:
        """Where to read it. A registration must still be one that may be loaded: as `allowed`."""
        if found.digest is None or self._uploads.owns(found.path):
            return found.path
        return await self.allowed(str(found.path))

    async def warn_of_missing(self) -> None:
        """Log the registrations that could not be loaded now."""
        for name, known in list(self.registered.items()):
            try:
                await self.folder_of(Unloaded.of(known))
            except APIError as error:
                logger.warning("%s, registered at %s: %s", name, known.path, error.message)

    def forget(self, name: str) -> Unloaded | None:
        """It is loaded, replaced or unloaded now. Returns what was registered."""
        self.errors.pop(name, None)
        known = self.registered.pop(name, None)
        return None if known is None else Unloaded.of(known)

    def _can_be_folder(self, name: str) -> bool:
        if name in self.hidden or "/" in name or not _NAME.fullmatch(name):
            return False
        return not self._is_of_base(name)

    def _is_of_base(self, name: str) -> bool:
        return name == self._base_name or name.startswith(self._base_name + ":")
