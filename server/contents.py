"""Adapter contents in the engine. Versions of equal content share one: its slot, memory and cache.

Each version that lives uses its content; what the engine holds goes with the last use.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from lorakeet.lora.adapter import AdapterError
from lorakeet.server.engine.client import Engine, EngineDeadError
from lorakeet.server.engine.messages import AdapterLoaded, AdapterUnloaded

FREE_SECONDS = 1.0  # how long an answer waits to say what has been freed


@dataclass(frozen=True)
class Use:
    path: Path  # that this version was loaded from
    pinned: bool


@dataclass(frozen=True)
class Freed:
    """Bytes that an unload or a swap has freed."""

    pool: int = 0
    host: int = 0
    cache: int = 0
    pending: bool = False  # more, when the last request has ended

    def wire(self) -> dict[str, object]:
        parts = {"pool": self.pool, "host": self.host, "cache": self.cache}
        return {"freed_bytes": sum(parts.values()), "freed": parts, "freeing": self.pending}


@dataclass(eq=False)
class _Content:
    loaded: AdapterLoaded
    uses: dict[int, Use] = field(default_factory=dict)  # by version
    left: set[Path] = field(default_factory=set)  # out of use, but the engine may read there
    told: "_Told | None" = None
    telling: asyncio.Lock = field(default_factory=asyncio.Lock)  # one change at a time

    @property
    def wanted(self) -> "_Told":
        uses = self.uses.values()
        paths = tuple(dict.fromkeys(str(use.path) for use in uses))
        return _Told(paths, any(use.pinned for use in uses))


@dataclass(frozen=True)
class _Told:
    """What the engine knows."""

    paths: tuple[str, ...]
    pinned: bool


class Contents:
    def __init__(self, engine: Engine, discard: Callable[[Path], None]) -> None:
        """`discard` is called with each folder that nothing will be read from any more."""
        self._engine = engine
        self._discard = discard
        self._ids = count(1)
        self._contents: dict[int, _Content] = {}  # by adapter id
        self._by_digest: dict[str, _Content] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def acquire(self, version: int, use: Use, digest: str | None = None) -> AdapterLoaded:
        """Read the folder into the engine, for a version that uses it from now on.

        Returns what the engine holds: perhaps under the id of an equal content that was there.
        Raises AdapterNotFoundError, AdapterError, EngineDeadError.
        """
        loaded = await self._engine.load_adapter(next(self._ids), str(use.path), digest)
        content = self._by_digest.get(loaded.digest)
        if content is None:
            content = _Content(loaded, told=_Told((str(use.path),), False))
            self._contents[loaded.adapter_id] = self._by_digest[loaded.digest] = content
        else:
            self._engine.unload_adapter(loaded.adapter_id)
        await self._set(content, version, use)
        return content.loaded

    async def change(self, adapter_id: int, version: int, use: Use) -> None:
        """Raises AdapterError when it cannot be pinned, EngineDeadError; then all is as before."""
        await self._set(self._contents[adapter_id], version, use)

    def release(self, adapter_id: int, version: int) -> "asyncio.Future[AdapterUnloaded] | None":
        """The version is gone. The future says what that frees; None: others use the content."""
        content = self._contents[adapter_id]
        content.left.add(content.uses.pop(version).path)
        if content.uses:
            self._in_background(self._tell_later(content))
            return None
        del self._contents[adapter_id], self._by_digest[content.loaded.digest]
        unloaded = self._engine.unload_adapter(adapter_id)
        unloaded.add_done_callback(lambda _: self._discard_left(content, needed=()))
        return unloaded

    async def freed(self, unloaded: "asyncio.Future[AdapterUnloaded] | None") -> Freed:
        """In bytes; pending when it takes too long to wait for it."""
        if unloaded is None:
            return Freed()
        await asyncio.wait({unloaded}, timeout=FREE_SECONDS)
        if not unloaded.done() or unloaded.cancelled():
            return Freed(pending=True)
        info, event = self._engine.info, unloaded.result()
        block_bytes = info.memory.get("kv_cache", 0) // max(1, info.num_blocks)
        return Freed(
            pool=event.num_rows * info.lora_row_bytes + event.vocabulary_bytes,
            host=event.host_bytes,
            cache=event.num_blocks * block_bytes,
        )

    async def _set(self, content: _Content, version: int, use: Use) -> None:
        before = content.uses.get(version)
        # from here on the content stays; a pin counts only once its turn has come
        content.uses[version] = replace(use, pinned=before is not None and before.pinned)
        try:
            async with content.telling:
                content.uses[version] = use
                if before is not None:
                    content.left.add(before.path)
                await self._tell(content)
        except BaseException:
            if before is None:
                self.release(content.loaded.adapter_id, version)
            else:
                content.uses[version] = before
            raise

    async def _tell_later(self, content: _Content) -> None:
        async with content.telling:
            if content.uses:
                await self._tell(content)

    async def _tell(self, content: _Content) -> None:
        """Let the engine know where to read it again, and whether it is pinned."""
        wanted = content.wanted
        if wanted != content.told:
            adapter_id = content.loaded.adapter_id
            await self._engine.update_adapter(adapter_id, wanted.paths, wanted.pinned)
            content.told = wanted
        self._discard_left(content, {*wanted.paths, *content.wanted.paths})

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            with contextlib.suppress(EngineDeadError, AdapterError):
                await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _discard_left(self, content: _Content, needed: Collection[str]) -> None:
        gone = {folder for folder in content.left if str(folder) not in needed}
        content.left -= gone
        for folder in gone:
            self._discard(folder)
