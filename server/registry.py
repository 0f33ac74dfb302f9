"""Adapter names → versions. A version is one load of one folder; requests lease it while they run.

A name points to one version at a time. Replacing or unloading takes the version from its name at
once; the engine is told when its last lease ends, so no request is ever sent for a freed adapter.
"""

import asyncio
import contextlib
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterError, AdapterNotFoundError
from lorakeet.server.adapter_tokenizers import AdapterTokenizers
from lorakeet.server.engine.client import Engine, EngineDeadError
from lorakeet.server.engine.messages import AdapterLoaded
from lorakeet.server.errors import (
    BadRequestError,
    ForbiddenError,
    ModelNotFoundError,
    NotFoundError,
)
from lorakeet.server.metrics import Metrics
from lorakeet.server.profiles import Profile, read_profile
from lorakeet.server.text_config import TextConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}")
_OUTSIDE = "The path is outside the folders that adapters may be loaded from (--adapter-dir)"


@dataclass(frozen=True)
class Version:
    adapter_id: int
    name: str
    path: Path
    pinned: bool
    loaded: AdapterLoaded
    profile: Profile  # already laid over the base model's
    created: int  # Unix time


class Registry:
    base: Profile  # set once the model is loaded, as are the tokenizers
    tokenizers: AdapterTokenizers

    def __init__(
        self, settings: Settings, base_name: str, engine: Engine, metrics: Metrics
    ) -> None:
        self.base_name = base_name
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._roots = tuple(Path(os.path.realpath(root)) for root in settings.adapter_dirs)
        self._ids = itertools.count(1)
        self._versions: dict[str, Version] = {}
        self._leases: Counter[int] = Counter()  # by adapter id
        self._retired: set[int] = set()  # without a name, but still leased
        self._hidden: set[str] = set()  # folders of the roots whose adapter was unloaded
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lazy_loads: dict[str, asyncio.Task[None]] = {}

    # --- names ------------------------------------------------------------------------------------

    def resolve(self, model: str, adapter: str | None = None) -> str | None:
        """The adapter that a request means; None: the base model.

        An exact name wins before `base:name` is looked at. Raises ModelNotFoundError, and
        BadRequestError when `model` and `adapter` name two adapters.
        """
        prefix = self.base_name + ":"
        if model == self.base_name:
            named = None
        elif self.knows(model):
            named = model
        elif model.startswith(prefix) and self.knows(model.removeprefix(prefix)):
            named = model.removeprefix(prefix)
        else:
            raise ModelNotFoundError(model)
        if adapter is None or adapter == named:
            return named
        if named is not None:
            message = f"model names the adapter {named!r}, adapter names {adapter!r}"
            raise BadRequestError(message, param="adapter", code="adapter_conflict")
        if not self.knows(adapter):
            raise ModelNotFoundError(adapter, param="adapter")
        return adapter

    def knows(self, name: str) -> bool:
        return name in self._versions or self._lazy_folder(name) is not None

    def find(self, name: str) -> Version | None:
        """The version that is loaded under the name, if one is."""
        return self._versions.get(name)

    def path(self, name: str) -> Path:
        """Where an adapter lies, loaded or not. Raises ModelNotFoundError."""
        version = self._versions.get(name)
        folder = self._lazy_folder(name) if version is None else version.path
        if folder is None:
            raise ModelNotFoundError(name)
        return folder

    def is_loading(self, name: str) -> bool:
        """A first request has asked for it, and its files are being read."""
        return name in self._lazy_loads

    def versions(self) -> list[Version]:
        return list(self._versions.values())

    async def listing(self) -> tuple[list[Version], dict[str, Path]]:
        """Adapters that are loaded, and those that would be loaded at their first request."""
        folders = await asyncio.to_thread(self._lazy_folders)
        taken = self._versions.keys() | self._hidden  # perhaps only since the folders were read
        return self.versions(), {name: folders[name] for name in folders if name not in taken}

    # --- use --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Version | None]:
        """Hold the adapter's current version, loaded if need be; None is the base model.

        Raises ModelNotFoundError, BadRequestError if the adapter cannot be loaded.
        """
        if name is None:
            yield None
            return
        if name not in self._versions:
            await self._load_lazily(name)
        version = self._versions.get(name)
        if version is None:
            raise ModelNotFoundError(name)
        self._leases[version.adapter_id] += 1
        try:
            yield version
        finally:
            self._leases[version.adapter_id] -= 1
            if self._leases[version.adapter_id] == 0:
                del self._leases[version.adapter_id]
                if version.adapter_id in self._retired:
                    self._retired.discard(version.adapter_id)
                    await self._free(version)

    async def _load_lazily(self, name: str) -> None:
        """All that wait for a name share one load, which goes on when a waiter is gone."""
        task = self._lazy_loads.get(name)
        if task is None:
            task = asyncio.create_task(self._load_from_disk(name))
            self._lazy_loads[name] = task
            task.add_done_callback(lambda _: self._lazy_loads.pop(name))
        await asyncio.shield(task)

    async def _load_from_disk(self, name: str) -> None:
        async with self._lock(name):
            folder = self._lazy_folder(name)
            if name in self._versions or folder is None:  # loaded or unloaded meanwhile
                return
            self._versions[name] = await self._read(name, folder, pinned=False, param="model")

    # --- load and unload --------------------------------------------------------------------------

    async def load_at_start(self) -> None:
        """Load `settings.adapters`, wherever they lie. Raises APIError for the first bad one."""
        adapters = self._settings.adapters
        for name in adapters:
            self._check_name(name)
        versions = await asyncio.gather(
            *(
                self._read(name, Path(os.path.realpath(path)), pinned=False, param=name)
                for name, path in adapters.items()
            )
        )
        self._versions.update(zip(adapters, versions, strict=True))

    async def load(
        self, name: str, path: str, load_inplace: bool = False, pinned: bool = False
    ) -> Version:
        """Load a folder under a name; returns once the adapter can be used.

        Raises BadRequestError (the name is taken or not allowed, the adapter is bad),
        ForbiddenError (outside the allowed roots, whether or not it exists) or NotFoundError.
        """
        self._check_name(name)
        async with self._lock(name):
            old = self._versions.get(name)
            if old is not None and not load_inplace:
                message = f"The adapter {name!r} is already loaded: unload it, or use load_inplace"
                raise BadRequestError(message, param="lora_name", code="adapter_exists")
            folder = await asyncio.to_thread(self._allowed_folder, path)
            version = await self._read(name, folder, pinned, param="lora_path")
            self._versions[name] = version
            self._hidden.discard(name)
            if old is not None:
                await self._retire(old)
        return version

    async def unload(self, name: str) -> None:
        """Forget the name at once; memory is freed when the last request on it ends.

        Raises NotFoundError for an unknown name.
        """
        async with self._lock(name):
            on_disk = self._lazy_folder(name) is not None
            version = self._versions.pop(name, None)
            if version is None and not on_disk:
                message = f"The adapter {name!r} does not exist"
                raise NotFoundError(message, param="lora_name", code="adapter_not_found")
            if on_disk:  # the next request must not bring it back
                self._hidden.add(name)
            if version is not None:
                self._metrics.forget_adapter(name)
                await self._retire(version)

    async def _read(self, name: str, folder: Path, pinned: bool, param: str) -> Version:
        adapter_id = next(self._ids)
        try:
            own = await asyncio.to_thread(read_profile, folder, self.tokenizers)
            loaded = await self._engine.load_adapter(adapter_id, str(folder), pinned)
        except AdapterNotFoundError as error:
            raise NotFoundError(str(error), param=param, code="adapter_not_found") from None
        except (AdapterError, TextConfigError) as error:
            message = f"The adapter {name!r} cannot be loaded: {error}"
            raise BadRequestError(message, param=param, code="invalid_adapter") from None
        self._metrics.adapter_loaded(name, loaded.seconds)
        profile = own.over(self.base, loaded.vocab_size)
        return Version(adapter_id, name, folder, pinned, loaded, profile, int(time.time()))

    async def _retire(self, version: Version) -> None:
        if self._leases[version.adapter_id]:
            self._retired.add(version.adapter_id)
        else:
            await self._free(version)

    async def _free(self, version: Version) -> None:
        with contextlib.suppress(EngineDeadError):  # then it is free
            await self._engine.unload_adapter(version.adapter_id)

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    # --- what may be loaded -----------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            message = "An adapter's name has up to 255 letters, digits or any of . _ : / @ + -"
            raise BadRequestError(message, param="lora_name", code="invalid_name")
        if name == self.base_name or name.startswith(self.base_name + ":"):
            message = f"The name {name!r} belongs to the base model"
            raise BadRequestError(message, param="lora_name", code="invalid_name")

    def _allowed_folder(self, path: str) -> Path:
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

    def _inside(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)

    def _lazy_folders(self) -> dict[str, Path]:
        names = {entry.name for root in self._roots for entry in _entries(root)}
        folders = {name: self._lazy_folder(name) for name in sorted(names)}
        return {name: folder for name, folder in folders.items() if folder is not None}

    def _lazy_folder(self, name: str) -> Path | None:
        if name in self._hidden or "/" in name or not _NAME.fullmatch(name):
            return None
        if name == self.base_name or name.startswith(self.base_name + ":"):
            return None
        for root in self._roots:
            try:
                if (root / name / "adapter_config.json").is_file():
                    return self._allowed_folder(str(root / name))
            except (OSError, ForbiddenError, BadRequestError, NotFoundError):
                return None
        return None


def _entries(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except OSError:
        return []
