"""The registry against a plain model of it: every command in any order, and restarts between."""

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorakeet.configs.settings import Settings
from lorakeet.server.adapter_state import FILE_NAME
from lorakeet.server.aliases import Target
from lorakeet.server.contents import Freed
from lorakeet.server.errors import APIError
from lorakeet.server.state import Server
from support.toy_server import ToyEngine, adapter_folder, model_folder

pytestmark = pytest.mark.timeout(600)  # a failure takes long to be made small

LAZY = "lazy"  # a folder of the root, which needs no load; the others lie deeper
FOLDERS = {LAZY: 3, "deep/three": 3, "deep/four": 4}
NAMES = ("a", LAZY)  # few of everything, so that commands meet
ALL_NAMES = (*NAMES, "x")
# the digest of what these folders say about text
SAYS_NOTHING = hashlib.sha256(b'{"defaults":{},"eos_token_ids":[],"special_tokens":{}}').hexdigest()
ALL_OF_IT = Freed(pool=200, host=1024, cache=21)  # what the toy frees with one content

T = TypeVar("T")
names, mostly = st.sampled_from(NAMES), st.sampled_from([True, True, True, False])
folders = st.sampled_from([*FOLDERS])
some_names = st.lists(st.sampled_from([*ALL_NAMES, "base"]), min_size=1, max_size=2)


@dataclass(eq=False)
class Version:
    folder: str
    pinned: bool
    is_registered: bool
    is_loaded: bool = True

    @property
    def k(self) -> int:
        return FOLDERS[self.folder]


class RegistryMachine(RuleBasedStateMachine):
    """What a name, an alias and a restart mean; a toy engine that pins one content at most."""

    @initialize(given=st.dictionaries(st.just("a"), folders))
    def start(self, given: dict[str, str]) -> None:
        self.given = given  # as --adapter
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp())
        self.model = model_folder(self.folder / "model")
        self.root = self.folder / "root"
        for path, k in FOLDERS.items():
            adapter_folder(self.root / path, k)
        self.digests = {
            k: hashlib.sha256((self.root / path / "adapter_config.json").read_bytes()).hexdigest()
            for path, k in FOLDERS.items()
        }
        self.versions: dict[str, Version] = {}  # by name, also those that are not loaded yet
        self.hidden = False  # LAZY's folder
        self.aliases: dict[str, list[str]] = {}
        self.held: list[tuple[Version, AsyncExitStack]] = []
        self.runner.run(self.begin())

    async def begin(self) -> None:
        paths: dict[str, Any] = {
            "adapter_dirs": (self.root,),
            "state_dir": self.folder / "state",
            "adapters": {name: self.root / folder for name, folder in self.given.items()},
        }
        self.engine = ToyEngine()
        self.server = Server(
            Settings(model=str(self.model), served_model_name="base", **paths), self.engine
        )
        self.registry = self.server.registry
        await self.server.start()
        for name, folder in self.given.items():
            if name not in self.versions and name not in self.aliases:  # what clients did wins
                self.versions[name] = Version(folder, pinned=False, is_registered=False)

    def attempt(self, work: Coroutine[Any, Any, T], refusal: str | None) -> T | None:
        """The result; None: it is refused with this code."""
        if refusal is None:
            return self.runner.run(work)
        with pytest.raises(APIError) as refused:
            self.runner.run(work)
        assert refused.value.code == refusal
        return None

    # --- the model ---

    def knows(self, name: str) -> bool:
        return name in self.versions or name in self.aliases or (name == LAZY and not self.hidden)

    def living(self) -> list[Version]:
        loaded = [version for version in self.versions.values() if version.is_loaded]
        return list(dict.fromkeys([*loaded, *(version for version, _ in self.held)]))

    def cannot_pin(self, version: Version) -> bool:
        return version.pinned and any(
            other.pinned and other.k != version.k for other in self.living()
        )

    def freed_without(self, version: Version) -> Freed:
        """When it has lost its name."""
        if any(version is held for held, _ in self.held):
            return Freed(pending=True)
        is_shared = any(other.k == version.k for other in self.living() if other is not version)
        return Freed() if is_shared or not version.is_loaded else ALL_OF_IT

    # --- commands ---

    @rule(name=names, folder=folders, inplace=mostly, pin=st.booleans())
    def load(self, name: str, folder: str, inplace: bool, pin: bool) -> None:
        old, new = self.versions.get(name), Version(folder, pin, is_registered=True)
        refusal = None
        if name in self.aliases:
            refusal = "name_taken"
        elif old is not None and not inplace:
            refusal = "adapter_exists"
        elif self.cannot_pin(new):
            refusal = "invalid_adapter"
        work = self.registry.load(name, str(self.root / folder), inplace, pin)
        loaded = self.attempt(work, refusal)
        if loaded is None:
            return
        assert loaded.changed == (old is None or old.k != new.k)
        assert loaded.version.loaded.digest == self.digests[new.k]
        freed = Freed()
        if old is not None and old.is_loaded and not loaded.changed:
            old.folder, old.pinned, old.is_registered = folder, pin, True
        else:
            self.versions[name] = new
            freed = Freed() if old is None else self.freed_without(old)
        assert loaded.freed == freed
        self.hidden = self.hidden and name != LAZY

    @rule(name=st.sampled_from(ALL_NAMES))
    def unload(self, name: str) -> None:
        refusal = None
        if any(name in own for own in self.aliases.values()):
            refusal = "adapter_in_use"
        elif name in self.aliases or not self.knows(name):
            refusal = "adapter_not_found"
        freed = self.attempt(self.registry.unload(name), refusal)
        if freed is None:
            return
        version = self.versions.pop(name, None)
        assert freed == (Freed() if version is None else self.freed_without(version))
        self.hidden = self.hidden or name == LAZY

    @rule(alias=st.sampled_from([*ALL_NAMES, "base"]), own=some_names)
    def put_alias(self, alias: str, own: list[str]) -> None:
        refusal = None
        if alias == "base":
            refusal = "invalid_name"
        elif len(set(own)) < len(own):
            refusal = "invalid_value"
        elif alias not in self.aliases and self.knows(alias):
            refusal = "name_taken"
        else:
            for name in reversed(own):  # the first counts
                if name in self.aliases:
                    refusal = "alias_of_alias"
                elif name != "base" and not self.knows(name):
                    refusal = "adapter_not_found"
        self.attempt(self.registry.put_alias(alias, [Target(name) for name in own]), refusal)
        if refusal is None:
            self.aliases[alias] = own

    @precondition(lambda self: self.aliases)
    @rule(alias=st.sampled_from(ALL_NAMES))
    def remove_alias(self, alias: str) -> None:
        refusal = None if alias in self.aliases else "alias_not_found"
        self.attempt(self.registry.remove_alias(alias), refusal)
        self.aliases.pop(alias, None)

    @rule(name=st.sampled_from(ALL_NAMES))
    def ask(self, name: str) -> None:
        """A request that goes on until `let_go`."""
        is_known = self.knows(name)
        self.attempt(self.registry.resolve(name), None if is_known else "model_not_found")
        if not is_known:
            return
        adapter = self.runner.run(self.registry.resolve(name))
        assert (adapter or "base") in self.aliases.get(name, [name])
        if adapter is None:
            return
        version = self.versions.get(adapter, Version(LAZY, pinned=False, is_registered=False))
        refusal = (
            None if version in self.living() or not self.cannot_pin(version) else "invalid_adapter"
        )
        stack = AsyncExitStack()
        leased = self.attempt(stack.enter_async_context(self.registry.lease(adapter)), refusal)
        if leased is None:
            return
        assert leased.loaded.digest == self.digests[version.k]
        self.versions[adapter], version.is_loaded = version, True
        self.held.append((version, stack))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        _, stack = self.held.pop(index)
        self.runner.run(stack.aclose())

    @precondition(lambda self: self.versions or self.aliases or self.hidden)
    @rule()
    def restart(self) -> None:
        self.end_requests()
        self.runner.run(self.server.close())
        self.versions = {
            name: version for name, version in self.versions.items() if version.is_registered
        }
        for version in self.versions.values():
            version.is_loaded = False
        self.runner.run(self.begin())

    def end_requests(self) -> None:
        while self.held:
            self.runner.run(self.held.pop()[1].aclose())

    # --- what must hold ---

    @invariant()
    def names_mean_what_they_should(self) -> None:
        loaded, unloaded = self.runner.run(self.registry.listing())
        expected = {name: one for name, one in self.versions.items() if one.is_loaded}
        found = {one.name: (one.loaded.digest, one.path, one.pinned) for one in loaded}
        assert found == {
            name: (self.digests[one.k], self.root / one.folder, one.pinned)
            for name, one in expected.items()
        }
        others = self.versions.keys() | ({LAZY} if self.knows(LAZY) else set())
        assert unloaded.keys() == others - expected.keys() - self.aliases.keys()

    @invariant()
    def the_engine_holds_what_lives(self) -> None:
        self.runner.run(self.settle())
        living = self.living()
        assert sorted(self.engine.adapters.values()) == sorted({one.k for one in living})
        for adapter_id, k in self.engine.adapters.items():
            uses = [one for one in living if one.k == k]
            assert set(self.engine.paths[adapter_id]) == {
                str(self.root / one.folder) for one in uses
            }
            assert (adapter_id in self.engine.pinned) == any(one.pinned for one in uses)

    @invariant()
    def the_state_is_on_the_disk(self) -> None:
        file = self.folder / "state" / FILE_NAME
        state = json.loads(file.read_bytes()) if file.exists() else {"adapters": {}, "aliases": {}}
        profiles = {known.pop("profile") for known in state["adapters"].values()}
        assert profiles <= {SAYS_NOTHING}
        assert state["adapters"] == {
            name: {
                "path": str(self.root / one.folder),
                "digest": self.digests[one.k],
                "pinned": one.pinned,
            }
            for name, one in self.versions.items()
            if one.is_registered
        }
        assert state["aliases"] == {
            alias: [{"adapter": name, "weight": 1.0} for name in own]
            for alias, own in self.aliases.items()
        }
        assert state.get("hidden", []) == ([LAZY] if self.hidden else [])

    def teardown(self) -> None:
        self.end_requests()
        for alias in self.aliases.copy():
            self.remove_alias(alias)
        for name in self.versions.copy():
            self.unload(name)
        self.runner.run(self.settle())
        assert not self.engine.adapters
        assert not self.engine.pinned
        assert not self.registry._contents._contents
        assert not self.registry._leases
        assert not self.registry._locks
        self.runner.run(self.server.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    async def settle(self) -> None:
        """Until what the registry does in the background is done."""
        while tasks := self.registry._contents._tasks:
            await asyncio.wait(tasks)


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
