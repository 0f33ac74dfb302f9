"""Names → versions of adapters, which requests lease while they run.

A name points to one version at a time. Replacing or unloading takes the version from its name at
once; the engine is told when its last lease ends, so no request is ever sent for a freed adapter.
Names of three kinds have no version yet, and get it at their first request: folders of the roots,
registrations of an earlier run, and aliases, which lead to another name.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

from lorakeet.configs.settings import Settings
from lorakeet.server.adapter_state import State, StateFile
from lorakeet.server.adapter_tokenizers import AdapterTokenizers
from lorakeet.server.aliases import Aliases, Target
from lorakeet.server.catalog import Catalog, Unloaded
from lorakeet.server.contents import Contents, Freed, Use
from lorakeet.server.engine.client import Engine
from lorakeet.server.errors import (
    APIError,
    BadRequestError,
    ConflictError,
    InsufficientStorageError,
    ModelNotFoundError,
    NotFoundError,
)
from lorakeet.server.files import is_full
from lorakeet.server.leases import Leases, Retired
from lorakeet.server.metrics import Metrics
from lorakeet.server.profiles import Profile
from lorakeet.server.uploads import Uploads
from lorakeet.server.versions import Version, VersionReader

logger = logging.getLogger(__name__)

_NOT_LOADED = (
    "--adapter %s=%s is not loaded: a client has %s in an earlier run, which is kept (state_dir); "
    "unload the name or delete the alias, and restart, to have it"
)
MAX_ADAPTERS = 100_000  # that clients can add to


@dataclass(frozen=True)
class Loaded:
    version: Version
    changed: bool  # False: the name had this content already
    freed: Freed


class Registry:
    _reader: VersionReader  # set once the model is loaded

    def __init__(
        self,
        settings: Settings,
        base_name: str,
        engine: Engine,
        metrics: Metrics,
        state_file: StateFile,
        uploads: Uploads,
    ) -> None:
        self.base_name = base_name
        self.aliases = Aliases()
        self._settings = settings
        self._metrics = metrics
        self._state_file = state_file
        self._uploads = uploads
        self.catalog = Catalog(base_name, settings.adapter_dirs, uploads)
        self._contents = Contents(engine, self.discard)
        self._versions: dict[str, Version] = {}
        self._leases = Leases(self._contents)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lazy_loads: dict[str, asyncio.Task[None]] = {}

    def use_model(self, base: Profile, tokenizers: AdapterTokenizers) -> None:
        """The model is loaded: adapters can be."""
        self._reader = VersionReader(self._contents, self._metrics, base, tokenizers)

    # --- names ------------------------------------------------------------------------------------

    async def resolve(
        self, model: str, adapter: str | None = None, user: str | None = None
    ) -> str | None:
        """The adapter that a request means; None: the base model.

        An exact name wins before `base:name` is looked at. An alias is one of its targets, the
        same one for the same user. Raises ModelNotFoundError, and BadRequestError when `model` and
        `adapter` name two adapters.
        """
        prefix = self.base_name + ":"
        if model == self.base_name:
            named = None
        elif await self.knows(model):
            named = model
        elif model.startswith(prefix) and await self.knows(model.removeprefix(prefix)):
            named = model.removeprefix(prefix)
        else:
            raise ModelNotFoundError(model)
        if adapter is not None and named is not None and adapter != named:
            message = f"model names the adapter {named!r}, adapter names {adapter!r}"
            raise BadRequestError(message, param="adapter", code="adapter_conflict")
        if adapter is not None and named is None:
            if not await self.knows(adapter):
                raise ModelNotFoundError(adapter, param="adapter")
            named = adapter
        if named is not None and named in self.aliases:
            named = self.aliases.choose(named, user)
        return None if named == self.base_name else named

    async def knows(self, name: str) -> bool:
        """Whether it is the name of an adapter, loaded or not, or of an alias."""
        if name in self._versions or name in self.aliases:
            return True
        return await self.catalog.find(name) is not None

    def find(self, name: str) -> Version | None:
        """The version that is loaded under the name, if one is."""
        return self._versions.get(name)

    async def unloaded(self, name: str) -> Unloaded | None:
        """What a first request would load under the name, if anything."""
        return None if name in self.aliases else await self.catalog.find(name)

    def is_loading(self, name: str) -> bool:
        """A first request has asked for it, and its files are being read."""
        return name in self._lazy_loads

    def versions(self) -> list[Version]:
        return list(self._versions.values())

    async def listing(self) -> tuple[list[Version], dict[str, Unloaded]]:
        """Adapters that are loaded, and those that would be loaded at their first request."""
        found = await self.catalog.all()
        for name in self._versions.keys() | self.aliases.all().keys() | self.catalog.hidden:
            found.pop(name, None)  # perhaps only since the folders were read
        return self.versions(), found

    # --- use --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Version | None]:
        """Hold the adapter's current version, loaded if need be; None is the base model.

        Raises ModelNotFoundError, and other APIErrors if the adapter cannot be loaded.
        """
        if name is None:
            yield None
            return
        if name not in self._versions:
            await self._load_lazily(name)
        version = self._versions.get(name)
        if version is None:
            raise ModelNotFoundError(name)
        with self._leases.hold(version):
            yield version

    async def profile(self, version: Version) -> Profile:
        """How requests of a version that is held are read and written. Raises BadRequestError."""
        newest = self._versions.get(version.name)
        if newest is not None and newest.number == version.number:
            version = newest  # the same, but perhaps it lies elsewhere by now
        return await self._reader.profile(version)

    async def _load_lazily(self, name: str) -> None:
        """All that wait for a name share one load, which goes on when a waiter is gone."""
        task = self._lazy_loads.get(name)
        if task is None:
            task = asyncio.create_task(self._load_from_disk(name))
            self._lazy_loads[name] = task
            task.add_done_callback(lambda done: self._loaded_lazily(name, done))
        await asyncio.shield(task)

    def _loaded_lazily(self, name: str, done: asyncio.Task[None]) -> None:
        del self._lazy_loads[name]
        if not done.cancelled():
            done.exception()  # of the waiters, if any is left: it is not for the log

    async def _load_from_disk(self, name: str) -> None:
        async with self._lock(name):
            found = await self.catalog.find(name)
            if name in self._versions or found is None:  # loaded or unloaded meanwhile
                return
            try:
                wanted = replace(found, path=await self.catalog.folder_of(found))
                self._versions[name] = await self._reader.read(name, wanted)
            except APIError as error:
                self.catalog.errors[name] = error.message
                raise
            self.catalog.forget(name)

    # --- load and unload --------------------------------------------------------------------------

    async def load_at_start(self) -> None:
        """Load `settings.adapters`, wherever they lie, but for names that clients have given to
        something else. Raises APIError for the first bad one."""
        adapters = {}
        for name, path in self._settings.adapters.items():
            self.catalog.check_name(name, "adapters")
            if (other := self._given_by_clients(name)) is None:
                adapters[name] = path
            else:
                logger.warning(_NOT_LOADED, name, path, other)
        versions = await asyncio.gather(
            *(
                self._reader.read(name, Unloaded(path.resolve()), param=name)
                for name, path in adapters.items()
            )
        )
        self._versions.update(zip(adapters, versions, strict=True))

    async def load(
        self, name: str, path: str, load_inplace: bool = False, pinned: bool = False
    ) -> Loaded:
        """Load a folder of the roots under a name; returns once the adapter can be used.

        Raises what `load_folder` raises, ForbiddenError (outside the allowed roots, whether or not
        it exists) and NotFoundError.
        """
        self._check_name(name, load_inplace)
        folder = await self.catalog.allowed(path)
        return await self.load_folder(name, folder, load_inplace, pinned)

    async def load_folder(
        self, name: str, folder: Path, load_inplace: bool = False, pinned: bool = False
    ) -> Loaded:
        """Raises BadRequestError (the name is taken or not allowed, the adapter is bad) and
        ConflictError (the name is an alias)."""
        self._check_name(name, load_inplace)
        async with self._lock(name):
            self._check_name(name, load_inplace)
            version = await self._reader.read(
                name, Unloaded(folder, pinned=pinned), param="lora_path", register=True
            )
            old, known = self._versions.get(name), self._forget(name)
            retired = Retired()
            if old is None:
                changed = known is None or not version.is_as(known)
            elif changed := not old.is_same(version):
                retired = self._leases.retire(old)
            else:
                version = await self._keep(old, version)
            self._versions[name] = version
            self.catalog.hidden.discard(name)
        await self.save()
        return Loaded(version, changed, await self._leases.freed(retired))

    async def unload(self, name: str) -> Freed:
        """Forget the name at once; memory is freed when the last request on it ends.

        Raises NotFoundError for an unknown name, ConflictError for one that an alias needs.
        """
        async with self._lock(name):
            found = await self.catalog.find(name)
            if aliases := self.aliases.naming(name):
                message = f"The adapter {name!r} is a target of the alias {aliases[0]!r}"
                raise ConflictError(message, param="lora_name", code="adapter_in_use")
            version = self._versions.pop(name, None)
            if version is None and found is None:
                message = f"The adapter {name!r} does not exist"
                raise NotFoundError(message, param="lora_name", code="adapter_not_found")
            self._forget(name)
            if await self.catalog.find(name) is not None:  # a request must not bring it back
                self.catalog.hidden.add(name)
            retired = Retired()
            if version is not None:
                self._metrics.forget_adapter(name)
                retired = self._leases.retire(version)
        await self.save()
        return await self._leases.freed(retired)

    async def _keep(self, old: Version, new: Version) -> Version:
        """The name has this content already: only its pin changes, and where it lies. That is the
        newest place: the old one may be gone."""
        kept = replace(new, number=old.number, created=old.created)
        try:
            await self._contents.change(old.adapter_id, old.number, Use(kept.path, kept.pinned))
        finally:
            self._contents.release(new.adapter_id, new.number)
        return kept

    def _forget(self, name: str) -> Unloaded | None:
        """A registration is superseded: returns it. The folder of its upload is not needed more."""
        known = self.catalog.forget(name)
        if known is not None:
            self.discard(known.path)
        return known

    def discard(self, folder: Path) -> None:
        """Remove the folder of an upload, unless a name has it, once no state on the disk names it:
        a kill may come."""

        async def is_free() -> bool:
            return not self._names(folder) and await self._state_file.saved(self._state)

        self._uploads.discard(folder, after=is_free)

    def _names(self, folder: Path) -> bool:
        versions, registered = self._versions.values(), self.catalog.registered.values()
        return any(version.path == folder for version in versions) or any(
            known.path == str(folder) for known in registered
        )

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _check_name(self, name: str, load_inplace: bool) -> None:
        """Whether something may be loaded under it."""
        self.catalog.check_name(name, "lora_name")
        if name in self.aliases:
            message = f"There is an alias {name!r}"
            raise ConflictError(message, param="lora_name", code="name_taken")
        registered = self.catalog.registered
        is_known = name in self._versions or name in registered
        if not is_known and len(self._versions) + len(registered) >= MAX_ADAPTERS:
            message = f"There are {MAX_ADAPTERS} adapters: unload some before you add others"
            raise BadRequestError(message, param="lora_name", code="too_many_adapters")
        if is_known and not load_inplace:
            message = f"The adapter {name!r} is already loaded: unload it, or use load_inplace"
            raise BadRequestError(message, param="lora_name", code="adapter_exists")

    # --- aliases ----------------------------------------------------------------------------------

    async def put_alias(self, alias: str, targets: Sequence[Target]) -> None:
        """Make an alias, or point it elsewhere: requests see all of the change, or nothing.

        Raises BadRequestError (a name that no alias can have, targets that it cannot have),
        ConflictError (an adapter has the name) and NotFoundError (a target does not exist).
        """
        names = [target.adapter for target in targets]
        self.catalog.check_name(alias, "alias")
        if len(set(names)) < len(names):
            raise BadRequestError("A target is named twice", param="targets", code="invalid_value")
        async with contextlib.AsyncExitStack() as locks:
            for name in sorted({alias, *names}):  # meanwhile none of them is loaded or unloaded
                await locks.enter_async_context(self._lock(name))
            if alias not in self.aliases and await self.knows(alias):
                message = f"There is an adapter {alias!r}"
                raise ConflictError(message, param="alias", code="name_taken")
            for name in names:
                await self._check_target(name)
            self.aliases.put(alias, targets)
        await self.save()

    async def remove_alias(self, alias: str) -> None:
        """Raises NotFoundError."""
        self.aliases.remove(alias)
        await self.save()

    async def _check_target(self, name: str) -> None:
        if name in self.aliases:
            message = f"The target {name!r} is an alias itself"
            raise BadRequestError(message, param="targets", code="alias_of_alias")
        if name != self.base_name and not await self.knows(name):
            message = f"The target {name!r} does not exist"
            raise NotFoundError(message, param="targets", code="adapter_not_found")

    # --- what outlives the server -----------------------------------------------------------------

    async def save(self) -> None:
        """Keep the names and aliases over a restart. Raises APIError for a change that is in effect
        and could not be saved yet."""
        try:
            await self._state_file.save(self._state)
        except OSError as error:
            message = (
                "The change is in effect, but a restart would lose it: it could not be saved in "
                f"--state-dir ({error.strerror}), which is tried again until it succeeds"
            )
            kind = InsufficientStorageError if is_full(error) else APIError
            raise kind(message, code="state_not_saved") from None

    def _state(self) -> State:
        registered = dict(self.catalog.registered)
        for name, version in self._versions.items():
            if version.is_registered:
                registered[name] = version.registration
        return State(registered, sorted(self.catalog.hidden), self.aliases.all())

    def restore(self, state: State) -> None:
        """Take over the names of an earlier run; only the base model's comes before them."""
        self.catalog.registered = dict(state.adapters)
        self.catalog.hidden = set(state.hidden) - self._settings.adapters.keys()
        for alias, targets in state.aliases.items():
            if alias != self.base_name:
                self.aliases.put(alias, targets)
        if self.catalog.registered.pop(self.base_name, None) or self.base_name in state.aliases:
            logger.warning("the name %r, kept from an earlier run, is the model's", self.base_name)

    def _given_by_clients(self, name: str) -> str | None:
        """What an earlier run has left under the name, in words."""
        if name in self.aliases:
            return "made it an alias"
        known = self.catalog.registered.get(name)
        return None if known is None else f"loaded {known.path}"
