"""Which adapter is in which slot and rows of the pool: bookkeeping, no tensors.

A slot goes free → loading → ready, and from ready to free again when it is evicted or its adapter
unloaded. It can be evicted when it is ready, nobody uses it and its adapter is not pinned.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from lorakeet.lora.adapter import AdapterId, Slot

Limit = Literal["rank", "slots", "rows", "vocabulary_bytes"]


class PoolError(Exception):
    """An adapter can never be served by this pool: it needs more than there is room for."""

    def __init__(self, limit: Limit, needed: int, room: int) -> None:
        super().__init__(limit, needed, room)
        self.limit, self.needed, self.room = limit, needed, room

    def __str__(self) -> str:
        return f"{self.limit}: {self.needed} are needed, there is room for {self.room}"


class PinError(PoolError):
    """An adapter cannot be pinned: others may need more than it would leave room for."""


@dataclass(frozen=True)
class Assignment:
    """A slot and rows that an adapter has been given; it is loading until `loaded` or `failed`."""

    adapter_id: AdapterId
    slot: Slot
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """What adapters take of the device."""

    slots: int = 0
    rows: int = 0  # of the pool
    vocabulary_bytes: int = 0  # of embedding and head rows that are theirs

    def __add__(self, other: "Room") -> "Room":
        return Room(
            self.slots + other.slots,
            self.rows + other.rows,
            self.vocabulary_bytes + other.vocabulary_bytes,
        )

    def __sub__(self, other: "Room") -> "Room":
        return self + Room(-other.slots, -other.rows, -other.vocabulary_bytes)

    def holds(self, other: "Room") -> bool:
        return (
            other.slots <= self.slots
            and other.rows <= self.rows
            and other.vocabulary_bytes <= self.vocabulary_bytes
        )


@dataclass
class _Resident:
    assignment: Assignment
    ready: bool = False
    uses: int = 0
    is_transient: bool = False  # it is freed at its last use


class SlotManager:
    """Gives slots and rank rows to adapters; evicts the least recently used idle one."""

    def __init__(
        self,
        num_slots: int,
        num_rows: int,
        max_rank: int,
        *,
        reserved_slots: int = 1,
        reserved_rows: int = 0,
        vocabulary_bytes: int = 0,
    ) -> None:
        """`num_slots` counts slot 0, which is never given away, as the pool's row table does.

        Pinned adapters leave so many slots and rows, and at least `max_rank` rows, to the others.
        `vocabulary_bytes`: for the embedding and head rows of the adapters in slots, all together.
        """
        if num_slots > 1 and num_rows < max_rank:
            raise ValueError(f"a pool of {num_rows} rows cannot hold an adapter of rank {max_rank}")
        self.num_slots = num_slots
        self.num_rows = num_rows
        self.max_rank = max_rank
        self._reserved_slots = reserved_slots
        self._reserved_rows = max(reserved_rows, max_rank)
        self._free_slots = [Slot(slot) for slot in reversed(range(1, num_slots))]
        self._free_rows = list(reversed(range(num_rows)))
        self._vocabulary_bytes = vocabulary_bytes
        self._free_vocabulary_bytes = vocabulary_bytes
        self._cleared: list[Slot] = []  # their vocabularies are to be freed
        self._needs: dict[AdapterId, Room] = {}
        self._pinned: set[AdapterId] = set()
        self._residents: dict[AdapterId, _Resident] = {}
        self._evictable: OrderedDict[AdapterId, None] = OrderedDict()  # least recently used first
        self._evictable_room = Room()  # theirs together: asked for at every turn

    @property
    def num_used_rows(self) -> int:
        return self.num_rows - len(self._free_rows)

    @property
    def num_loading(self) -> int:
        return sum(not resident.ready for resident in self._residents.values())

    @property
    def available(self) -> Room:
        """What `assign` could give, by evicting all that can be."""
        return self._free_room + self._evictable_room

    @property
    def num_to_clear(self) -> int:
        return len(self._cleared)

    def take_cleared(self) -> tuple[Slot, ...]:
        """Slots that have become free since the last call, and had a vocabulary."""
        cleared, self._cleared = self._cleared, []
        return tuple(cleared)

    def register(
        self, adapter_id: AdapterId, rank: int, pinned: bool, vocabulary_bytes: int = 0
    ) -> None:
        """Make an adapter known. Raises PoolError if it is too large, and PinError if pinning it
        would not leave the slots and rows that are reserved, and every vocabulary its memory."""
        assert adapter_id not in self._needs
        if self.num_slots < 2:
            raise PoolError("slots", 1, 0)
        if rank > self.max_rank:
            raise PoolError("rank", rank, self.max_rank)
        limit = self._vocabulary_bytes - self._pinned_room.vocabulary_bytes
        if vocabulary_bytes > limit:
            raise PoolError("vocabulary_bytes", vocabulary_bytes, limit)
        need = Room(1, rank, vocabulary_bytes)
        if pinned:
            self._check_pin(need)
            self._pinned.add(adapter_id)
        self._needs[adapter_id] = need

    def set_pinned(self, adapter_id: AdapterId, pinned: bool) -> None:
        """Pin a known adapter, or let it go again. Raises PinError as `register` does."""
        if pinned == (adapter_id in self._pinned):
            return
        if pinned:
            self._check_pin(self._needs[adapter_id])
            self._pinned.add(adapter_id)
            self._not_evictable(adapter_id)
        else:
            self._pinned.discard(adapter_id)
            if adapter_id in self._residents:
                self._settle(adapter_id)

    def is_pinned(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._pinned

    def slot_of(self, adapter_id: AdapterId) -> Slot | None:
        """The slot that the adapter is in or being loaded into."""
        resident = self._residents.get(adapter_id)
        return resident.assignment.slot if resident else None

    def is_ready(self, adapter_id: AdapterId) -> bool:
        resident = self._residents.get(adapter_id)
        return resident is not None and resident.ready

    def loading_in(self, slot: Slot) -> AdapterId:
        """The adapter that is being loaded into the slot."""
        for adapter_id, resident in self._residents.items():
            if resident.assignment.slot == slot and not resident.ready:
                return adapter_id
        raise AssertionError(f"slot {slot} is not loading")

    def tier(self, adapter_id: AdapterId) -> Literal["host", "loading", "gpu"]:
        resident = self._residents.get(adapter_id)
        if resident is None:
            return "host"
        return "gpu" if resident.ready else "loading"

    def uses(self, adapter_id: AdapterId) -> int:
        resident = self._residents.get(adapter_id)
        return resident.uses if resident else 0

    def size(self, adapter_id: AdapterId) -> Room:
        """What it takes while it is in a slot."""
        return self._needs[adapter_id]

    def needs(self, adapter_id: AdapterId) -> Room:
        """What it takes of the room that is `available` once it is used."""
        if adapter_id in self._residents and adapter_id not in self._evictable:
            return Room()
        return self._needs[adapter_id]

    def assign(self, adapter_id: AdapterId, is_transient: bool = False) -> Assignment | None:
        """A slot and as many rows as the adapter's rank, evicting idle adapters if need be.

        None, and nothing is evicted, when the room would not suffice. A transient one is not
        kept for later: its slot is free again after its last use.
        """
        assert adapter_id not in self._residents
        need = self._needs[adapter_id]
        if not self.available.holds(need):
            return None
        while not self._free_room.holds(need):
            self._free(next(iter(self._evictable)))
        rows = tuple(self._free_rows.pop() for _ in range(need.rows))
        assignment = Assignment(adapter_id, self._free_slots.pop(), rows)
        self._free_vocabulary_bytes -= need.vocabulary_bytes
        self._residents[adapter_id] = _Resident(assignment, is_transient=is_transient)
        return assignment

    def loaded(self, slot: Slot) -> AdapterId:
        """The copy into a loading slot is complete. Returns the adapter that is in it."""
        adapter_id = self.loading_in(slot)
        self._residents[adapter_id].ready = True
        self._settle(adapter_id)
        return adapter_id

    def failed(self, slot: Slot) -> AdapterId:
        """The copy into a loading slot has failed: slot and rows are free. Nobody may use it."""
        adapter_id = self.loading_in(slot)
        assert self._residents[adapter_id].uses == 0
        self._free(adapter_id)
        return adapter_id

    def acquire(self, adapter_id: AdapterId) -> None:
        """One more use: the slot is not evicted until every use is released."""
        self._residents[adapter_id].uses += 1
        self._not_evictable(adapter_id)

    def release(self, adapter_id: AdapterId) -> None:
        resident = self._residents[adapter_id]
        assert resident.uses > 0
        resident.uses -= 1
        self._settle(adapter_id)

    def unload(self, adapter_id: AdapterId) -> bool:
        """Forget the adapter: at once, or at its last use or the end of its load. True: it is gone.

        May be called again to ask.
        """
        resident = self._residents.get(adapter_id)
        if resident is not None:
            resident.is_transient = True
            self._settle(adapter_id)
        if adapter_id in self._residents:
            return False
        self._needs.pop(adapter_id, None)
        self._pinned.discard(adapter_id)
        return True

    def check(self) -> None:
        """Assert that every slot and row is either free or owned once."""
        owned = [resident.assignment for resident in self._residents.values()]
        slots = sorted([*self._free_slots, *(assignment.slot for assignment in owned)])
        assert slots == list(range(1, self.num_slots))
        rows = sorted([*self._free_rows, *(row for one in owned for row in one.rows)])
        assert rows == list(range(self.num_rows))
        for adapter_id, resident in self._residents.items():
            assert len(resident.assignment.rows) == self._needs[adapter_id].rows
            idle = resident.ready and resident.uses == 0
            assert not (idle and resident.is_transient)
            assert (adapter_id in self._evictable) == (idle and adapter_id not in self._pinned)
        assert self._evictable.keys() <= self._residents.keys() <= self._needs.keys()
        evictable = (self._needs[adapter_id] for adapter_id in self._evictable)
        assert self._evictable_room == sum(evictable, Room())
        assert self._pinned <= self._needs.keys()
        held = sum(self._needs[adapter_id].vocabulary_bytes for adapter_id in self._residents)
        assert held + self._free_vocabulary_bytes == self._vocabulary_bytes

    @property
    def _free_room(self) -> Room:
        return Room(len(self._free_slots), len(self._free_rows), self._free_vocabulary_bytes)

    @property
    def _pinned_room(self) -> Room:
        return sum((self._needs[adapter_id] for adapter_id in self._pinned), Room())

    def _check_pin(self, need: Room) -> None:
        largest = max((other.vocabulary_bytes for other in self._needs.values()), default=0)
        whole = Room(self.num_slots - 1, self.num_rows, self._vocabulary_bytes)
        left = whole - self._pinned_room - need
        if left.slots < self._reserved_slots:
            raise PinError("slots", self._reserved_slots, left.slots)
        if left.rows < self._reserved_rows:
            raise PinError("rows", self._reserved_rows, left.rows)
        if left.vocabulary_bytes < largest:
            raise PinError("vocabulary_bytes", largest, left.vocabulary_bytes)

    def _settle(self, adapter_id: AdapterId) -> None:
        """What becomes of a slot that is perhaps idle now."""
        resident = self._residents[adapter_id]
        if not resident.ready or resident.uses > 0:
            return
        if resident.is_transient:
            self._free(adapter_id)
        elif adapter_id not in self._pinned:
            self._not_evictable(adapter_id)
            self._evictable[adapter_id] = None
            self._evictable_room += self._needs[adapter_id]

    def _not_evictable(self, adapter_id: AdapterId) -> None:
        if adapter_id in self._evictable:
            del self._evictable[adapter_id]
            self._evictable_room -= self._needs[adapter_id]

    def _free(self, adapter_id: AdapterId) -> None:
        assignment = self._residents.pop(adapter_id).assignment
        self._not_evictable(adapter_id)
        self._free_slots.append(assignment.slot)
        self._free_rows.extend(reversed(assignment.rows))
        if num_bytes := self._needs[adapter_id].vocabulary_bytes:
            self._free_vocabulary_bytes += num_bytes
            self._cleared.append(assignment.slot)
