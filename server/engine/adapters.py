"""Which adapters may have running sequences now: at most `max_loras`, and nobody waits for ever.

An adapter with requests *holds a place* (and through it a slot of the pool) or waits for one in a
queue. Places are given in the order of that queue. An adapter that has waited longer than
`wait_limit` is *overdue*: nobody is served before it, and the adapter that has held its place
longest *yields*: it starts no more sequences, and once it has held its place for `quantum` and got
on by at least one token, its running sequences are preempted and it goes to the end of the queue.
(Without that token, adapters could take turns for ever, each at computing its prompt again.)
"""

from dataclasses import dataclass

from lorakeet.lora.adapter import AdapterId, Slot
from lorakeet.lora.slots import Assignment, SlotManager
from lorakeet.server.engine.blocks import BASE_ROOT
from lorakeet.server.engine.messages import AdapterState

BASE = AdapterId(0)
NO_SLOT = Slot(0)


class UnknownAdapterError(Exception):
    """A request names an adapter that the engine does not hold, or no longer."""


@dataclass(eq=False)
class AdapterEntry:
    """An adapter in host memory, and its requests."""

    adapter_id: AdapterId
    root: bytes  # its digest: the root of its prefix-cache hashes
    rank: int
    in_host: bool = True  # else it must be read again before it can be copied to a slot
    freed_rows: int = 0  # of the pool, by its unloading
    num_waiting: int = 0
    num_running: int = 0
    waiting_since: float = 0.0  # while it is in the queue
    started: float | None = None  # when it started its first sequence in its present place
    has_progressed: bool = False  # by a token or a finished sequence, in its present place
    slot: Slot | None = None  # while it holds a place

    @property
    def is_idle(self) -> bool:
        return self.num_waiting == 0 and self.num_running == 0


class AdapterPlaces:
    """The adapters that the engine knows, their places, and the queue for a place.

    `now` is in seconds of any clock that does not go backwards.
    """

    def __init__(
        self, slots: SlotManager, max_loras: int, wait_limit: float, quantum: float
    ) -> None:
        self._slots = slots
        self._max_loras = max_loras
        self._wait_limit = wait_limit
        self._quantum = quantum
        self._entries: dict[AdapterId, AdapterEntry] = {
            BASE: AdapterEntry(BASE, BASE_ROOT, 0, slot=NO_SLOT)
        }
        self._places: dict[AdapterId, AdapterEntry] = {}
        self._queue: dict[AdapterId, AdapterEntry] = {}  # in order of `waiting_since`
        self._yielding: list[AdapterEntry] = []
        self._unloading: set[AdapterId] = set()

    def register(self, adapter_id: AdapterId, digest: str, rank: int, pinned: bool) -> None:
        """Raises PoolError when the pool can never hold it."""
        assert adapter_id not in self._entries
        entry = AdapterEntry(adapter_id, bytes.fromhex(digest), rank)
        self._slots.register(adapter_id, rank, pinned)
        self._entries[adapter_id] = entry

    def root_for_request(self, adapter_id: AdapterId) -> bytes:
        """Raises UnknownAdapterError when new requests cannot use the adapter."""
        entry = self._entries.get(adapter_id)
        if entry is None or adapter_id in self._unloading:
            raise UnknownAdapterError(f"the engine holds no adapter {adapter_id}")
        return entry.root

    def runnable_slot(self, adapter_id: AdapterId) -> Slot | None:
        """The slot that a new sequence of this adapter can start with, if it can start now."""
        entry = self._entries[adapter_id]
        ready = adapter_id == BASE or self._slots.is_ready(adapter_id)
        return entry.slot if ready and entry not in self._yielding else None

    # --- host memory ---

    def set_in_host(self, adapter_id: AdapterId, in_host: bool) -> None:
        self._entries[adapter_id].in_host = in_host

    def can_leave_host(self, adapter_id: AdapterId) -> bool:
        """Its host copy can be dropped: nobody waits for the adapter, or it is in the pool."""
        entry = self._entries[adapter_id]
        if self._slots.is_pinned(adapter_id):
            return False
        return entry.is_idle or self._slots.is_ready(adapter_id)

    def wanted(self) -> list[AdapterId]:
        """Adapters with requests that must be read from disk first, in order of waiting."""
        return [entry.adapter_id for entry in self._queue.values() if self._is_on_disk(entry)]

    # --- what happens to requests ---

    def add_waiting(self, adapter_id: AdapterId, now: float) -> None:
        entry = self._entries[adapter_id]
        entry.num_waiting += 1
        if entry.slot is None and adapter_id not in self._queue:
            self._wait(entry, now)

    def remove_waiting(self, adapter_id: AdapterId, now: float) -> None:
        entry = self._entries[adapter_id]
        entry.num_waiting -= 1
        if entry.num_waiting == 0:
            self._queue.pop(adapter_id, None)
        self._leave_if_idle(entry, now)

    def start(self, adapter_id: AdapterId, now: float) -> None:
        entry = self._entries[adapter_id]
        assert entry.slot is not None
        entry.num_waiting -= 1
        entry.num_running += 1
        if entry.started is None:
            entry.started = now

    def progress(self, adapter_id: AdapterId) -> None:
        """One of its sequences has got a token, or is complete."""
        self._entries[adapter_id].has_progressed = True

    def preempt(self, adapter_id: AdapterId) -> None:
        entry = self._entries[adapter_id]
        entry.num_running -= 1
        entry.num_waiting += 1

    def remove_running(self, adapter_id: AdapterId, now: float) -> None:
        entry = self._entries[adapter_id]
        entry.num_running -= 1
        self._leave_if_idle(entry, now)

    # --- places ---

    def rotate(self, now: float) -> list[AdapterId]:
        """Decide who yields; returns the adapters whose running sequences must be preempted."""
        self._yielding = self._choose_yielding(now)
        return [
            entry.adapter_id
            for entry in self._yielding
            if entry.has_progressed and now - (entry.started or 0.0) >= self._quantum
        ]

    def grant(self, now: float) -> list[Assignment]:
        """Give free places to adapters that wait; returns the slot loads that this needs."""
        for entry in self._yielding:
            if entry.num_running == 0:
                self._leave(entry, now)
        loads = []
        for entry in list(self._queue.values()):
            if len(self._places) == self._max_loras:
                break
            if self._is_on_disk(entry):
                continue
            if self._slots.slot_of(entry.adapter_id) is None:
                assignment = self._slots.assign(entry.adapter_id)
                if assignment is None and self._is_overdue(entry, now):
                    break
                if assignment is None:
                    continue
                loads.append(assignment)
            self._enter(entry)
        return loads

    def load_failed(self, slot: Slot, now: float) -> AdapterId:
        """Free a slot whose copy failed. Its adapter loses its place; its requests are to end."""
        for entry in self._places.values():
            if entry.slot == slot:
                self._leave(entry, now)
                break
        return self._slots.failed(slot)

    def unload(self, adapter_id: AdapterId) -> None:
        """No more requests; `take_unloaded` tells when the last one has ended."""
        assert adapter_id != BASE
        assert adapter_id in self._entries
        self._unloading.add(adapter_id)

    def take_unloaded(self) -> list[AdapterEntry]:
        """Adapters whose last request has ended, and whose slot is free. They are forgotten."""
        gone = [adapter_id for adapter_id in self._unloading if self._is_gone(adapter_id)]
        self._unloading.difference_update(gone)
        return [self._entries.pop(adapter_id) for adapter_id in gone]

    def holds_root(self, root: bytes) -> bool:
        return any(entry.root == root for entry in self._entries.values())

    def states(self) -> list[AdapterState]:
        return [
            AdapterState(id_, self._slots.tier(id_), entry.num_running, entry.num_waiting)
            for id_, entry in self._entries.items()
            if id_ != BASE
        ]

    def check(self) -> None:
        """Assert that places, queue and slots agree."""
        self._slots.check()
        assert len(self._places) <= self._max_loras
        for adapter_id, entry in self._entries.items():
            assert min(entry.num_waiting, entry.num_running) >= 0
            if adapter_id != BASE:
                assert (adapter_id in self._places) == (entry.slot is not None)
                assert (adapter_id in self._queue) == (entry.slot is None and not entry.is_idle)
                assert entry.slot is not None or entry.num_running == 0
                assert entry.slot is None or self._slots.slot_of(adapter_id) == entry.slot

    def _is_gone(self, adapter_id: AdapterId) -> bool:
        entry = self._entries[adapter_id]
        if self._slots.slot_of(adapter_id) is not None:
            entry.freed_rows = entry.rank
        return entry.is_idle and self._slots.unload(adapter_id)

    def _is_on_disk(self, entry: AdapterEntry) -> bool:
        return not entry.in_host and self._slots.slot_of(entry.adapter_id) is None

    def _is_overdue(self, entry: AdapterEntry, now: float) -> bool:
        return now - entry.waiting_since > self._wait_limit

    def _choose_yielding(self, now: float) -> list[AdapterEntry]:
        """Longest holders, as few as make room for those that are overdue, in queue order."""
        holders = [entry for entry in self._places.values() if entry.started is not None]
        holders.sort(key=lambda entry: entry.started or 0.0, reverse=True)
        places = self._max_loras - len(self._places)
        slots, rows = self._slots.available
        yielding: list[AdapterEntry] = []
        for entry in self._queue.values():
            if not self._is_overdue(entry, now):
                break
            if self._is_on_disk(entry):
                continue
            is_resident = self._slots.slot_of(entry.adapter_id) is not None
            needed_slots, needed_rows = (0, 0) if is_resident else (1, entry.rank)
            while places < 1 or slots < needed_slots or rows < needed_rows:
                if not holders:
                    return yielding
                victim = holders.pop()
                yielding.append(victim)
                places += 1
                if not self._slots.is_pinned(victim.adapter_id):
                    slots, rows = slots + 1, rows + victim.rank
            places, slots, rows = places - 1, slots - needed_slots, rows - needed_rows
        return yielding

    def _wait(self, entry: AdapterEntry, now: float) -> None:
        entry.waiting_since = now
        self._queue[entry.adapter_id] = entry

    def _enter(self, entry: AdapterEntry) -> None:
        del self._queue[entry.adapter_id]
        self._slots.acquire(entry.adapter_id)
        self._places[entry.adapter_id] = entry
        entry.slot = self._slots.slot_of(entry.adapter_id)
        entry.started = None
        entry.has_progressed = False

    def _leave(self, entry: AdapterEntry, now: float) -> None:
        assert entry.num_running == 0
        del self._places[entry.adapter_id]
        self._slots.release(entry.adapter_id)
        entry.slot = None
        if entry.num_waiting:
            self._wait(entry, now)

    def _leave_if_idle(self, entry: AdapterEntry, now: float) -> None:
        if entry.is_idle and entry.adapter_id in self._places:
            self._leave(entry, now)
