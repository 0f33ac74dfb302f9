"""The adapters that the engine knows, and the blends of them that requests ask for."""

from collections import Counter
from collections.abc import Sequence

from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.slots import Room, SlotManager
from lorakeet.server.engine.adapter_entry import (
    Account,
    AdapterEntry,
    base_entry,
    blend_content,
    last_occurrence,
)
from lorakeet.server.engine.blocks import Content
from lorakeet.server.engine.messages import AdapterState

BASE = AdapterId(0)
Blend = tuple[tuple[int, float], ...]  # (adapter id, weight), as in AddRequest
_MOST_ACCOUNTS = 4096  # of blends, which may be of any adapters


class UnknownAdapterError(Exception):
    """A request names an adapter that the engine does not hold, or no longer."""


class AdapterBook:
    """Entries come with `register` and `blend_for`, and go with `take_unloaded`."""

    def __init__(self, slots: SlotManager) -> None:
        self._slots = slots
        self.entries: dict[AdapterId, AdapterEntry] = {BASE: base_entry()}
        self._blends: dict[Blend, AdapterId] = {}
        self._accounts: dict[frozenset[AdapterId], Account] = {}  # of blends, last used last
        self._next_blend = -1
        self._unloading: set[AdapterId] = set()  # blends too: they go with their last request

    def register(
        self,
        adapter_id: AdapterId,
        digest: str,
        num_rows: int,
        pinned: bool,
        invocation: tuple[int, ...] = (),
        vocabulary_bytes: int = 0,
    ) -> None:
        """Raises PoolError when the pool can never hold it."""
        assert adapter_id not in self.entries
        root = bytes.fromhex(digest)
        self._slots.register(adapter_id, num_rows, pinned, vocabulary_bytes)
        self.entries[adapter_id] = AdapterEntry(
            adapter_id,
            Content(root, (root,)),
            num_rows,
            components=(adapter_id,),
            invocation=invocation,
        )

    def entry_for(self, adapter_id: AdapterId, prompt: Sequence[int]) -> tuple[AdapterEntry, int]:
        """Whose sequence a request is, and from which token on it uses the adapter.

        An aLoRA is used from the last occurrence of its invocation in the prompt on; without one,
        the request is the base model's. Raises UnknownAdapterError.
        """
        entry = self._known(adapter_id)
        if not entry.invocation:
            return entry, 0
        start = last_occurrence(prompt, entry.invocation)
        return (self.entries[BASE], 0) if start is None else (entry, start)

    def blend_for(self, blend: Blend, max_rows: int) -> AdapterEntry:
        """The entry of a blend, made if need be; it is gone when its last request is.

        Raises UnknownAdapterError, and ValueError for what cannot be blended.
        """
        parts = [self._known(AdapterId(adapter_id)) for adapter_id, _ in blend]
        if len({part.adapter_id for part in parts} - {BASE}) < len(blend):
            raise ValueError("a blend is of different adapters")
        if any(part.invocation for part in parts):
            raise ValueError("an aLoRA cannot be blended")
        if (num_rows := sum(part.num_rows for part in parts)) > max_rows:
            raise ValueError(f"a blend of {num_rows} rows; the limit is {max_rows}")
        if blend in self._blends:
            return self.entries[self._blends[blend]]
        blend_id = AdapterId(self._next_blend)
        self._next_blend -= 1
        weights = tuple(weight for _, weight in blend)
        digests = [part.content.root for part in parts]
        entry = AdapterEntry(
            blend_id,
            blend_content(zip(digests, weights, strict=True)),
            0,
            components=tuple(part.adapter_id for part in parts),
            weights=weights,
            account=self._account_of(parts),
        )
        self._slots.register(blend_id, 0, pinned=False)
        for part in parts:
            part.num_blends += 1
        self.entries[blend_id], self._blends[blend] = entry, blend_id
        self._unloading.add(blend_id)
        return entry

    def users(self, adapter_id: AdapterId) -> list[AdapterId]:
        """The adapter and its blends."""
        entries = self.entries.values()
        return [entry.adapter_id for entry in entries if adapter_id in entry.held]

    # --- host memory ---

    def knows(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self.entries

    def set_in_host(self, adapter_id: AdapterId, in_host: bool) -> None:
        self.entries[adapter_id].in_host = in_host

    # --- unloading ---

    def unload(self, adapter_id: AdapterId) -> None:
        """No more requests; `take_unloaded` tells when the last one has ended."""
        assert adapter_id != BASE
        assert adapter_id in self.entries
        self._unloading.add(adapter_id)

    def take_unloaded(self) -> list[AdapterEntry]:
        """Adapters whose last request has ended, and whose slot is free. They are forgotten."""
        gone = []
        for adapter_id in sorted(self._unloading):  # blends before their components
            if self._is_gone(adapter_id):
                self._unloading.remove(adapter_id)
                entry = self.entries.pop(adapter_id)
                if entry.is_blend:
                    self._forget_blend(entry)
                else:
                    gone.append(entry)
        if gone:
            unloaded = {entry.adapter_id for entry in gone}
            kept = self._accounts.items()
            self._accounts = {key: account for key, account in kept if not unloaded & key}
        return gone

    def holds_root(self, root: bytes) -> bool:
        return any(entry.content.root == root for entry in self.entries.values())

    def states(self) -> list[AdapterState]:
        """Of all adapters; requests of a blend count for each of its components."""
        running, waiting = Counter[AdapterId](), Counter[AdapterId]()
        for entry in self.entries.values():
            for component in entry.components if entry.has_requests else ():
                running[component] += entry.num_running
                waiting[component] += entry.num_waiting
        return [
            self._state(entry, running[id_], waiting[id_])
            for id_, entry in self.entries.items()
            if id_ > BASE
        ]

    def check(self) -> None:
        """Assert that adapters and blends agree."""
        blends = Counter(c for id_ in self._blends.values() for c in self.entries[id_].components)
        assert all(entry.num_blends == blends[id_] for id_, entry in self.entries.items())

    def _account_of(self, parts: Sequence[AdapterEntry]) -> Account:
        if len(parts) == 1:
            return parts[0].account
        components = frozenset(part.adapter_id for part in parts)
        account = self._accounts.pop(components, None) or Account()
        self._accounts[components] = account
        if len(self._accounts) > _MOST_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        return account

    def _known(self, adapter_id: AdapterId) -> AdapterEntry:
        entry = self.entries.get(adapter_id)
        if entry is None or adapter_id in self._unloading:
            raise UnknownAdapterError(f"the engine holds no adapter {adapter_id}")
        return entry

    def _is_gone(self, adapter_id: AdapterId) -> bool:
        entry = self.entries[adapter_id]
        if self._slots.slot_of(adapter_id) is not None:
            entry.freed = self._slots.size(adapter_id)
        return entry.is_idle and self._slots.unload(adapter_id)

    def _state(self, entry: AdapterEntry, running: int, waiting: int) -> AdapterState:
        is_resident = self._slots.slot_of(entry.adapter_id) is not None
        room = self._slots.size(entry.adapter_id) if is_resident else Room()
        in_pool = self._slots.tier(entry.adapter_id)
        return AdapterState(
            entry.adapter_id,
            tier="disk" if not (entry.in_host or is_resident) else in_pool,
            num_running=running,
            num_waiting=waiting,
            in_host=entry.in_host,
            num_rows=room.rows,
            vocabulary_bytes=room.vocabulary_bytes,
        )

    def _forget_blend(self, entry: AdapterEntry) -> None:
        for component in entry.components:
            self.entries[component].num_blends -= 1
        ids = map(int, entry.components)
        del self._blends[tuple(zip(ids, entry.weights, strict=True))]
