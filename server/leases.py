"""Which versions are in use. One that has lost its name goes when its last lease ends."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lorakeet.server.contents import Contents, Freed
from lorakeet.server.engine.messages import AdapterUnloaded


class Leasable(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def adapter_id(self) -> int: ...


@dataclass(frozen=True)
class Retired:
    """What becomes of a version without a name."""

    in_use: bool = False
    unloaded: "asyncio.Future[AdapterUnloaded] | None" = None


class Leases:
    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._counts: Counter[int] = Counter()  # by version
        self._retired: set[int] = set()  # without a name, but still leased

    def __bool__(self) -> bool:
        """Anything is leased."""
        return bool(self._counts or self._retired)

    @contextlib.contextmanager
    def hold(self, version: Leasable) -> Iterator[None]:
        number = version.number
        self._counts[number] += 1
        try:
            yield
        finally:
            self._counts[number] -= 1
            if self._counts[number] == 0:
                del self._counts[number]
                if number in self._retired:
                    self._retired.discard(number)
                    self._contents.release(version.adapter_id, number)

    def retire(self, version: Leasable) -> Retired:
        """No new leases: release its content, at once or when its last lease ends."""
        if self._counts[version.number]:
            self._retired.add(version.number)
            return Retired(in_use=True)
        return Retired(False, self._contents.release(version.adapter_id, version.number))

    async def freed(self, retired: Retired) -> Freed:
        if retired.in_use:
            return Freed(pending=True)
        return await self._contents.freed(retired.unloaded)
