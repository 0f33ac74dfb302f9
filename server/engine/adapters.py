"""Which adapters may have running sequences now: at most `max_loras`, and nobody waits for ever.

An adapter with requests *holds a place* (and through it a slot of the pool) or waits for one in a
queue. Places go to those that have had the least service. An adapter that has waited longer than
`wait_limit` is *overdue*: those come first, in order of waiting, and for them a holder that has had
its *turn* is displaced, the one with the most service first. Its running sequences are preempted,
and it goes to the end of the queue. A turn is a `quantum` of time, and a token at least. (Without
that token, adapters could take turns for ever, each at computing its prompt again.)

Blends of the same adapters wait for a place as one: since the last of them got one.

Adapters that wait are copied to slots ahead of time, as far as nobody before them needs the room.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice, takewhile

from lorakeet.lora.adapter import AdapterId, Slot
from lorakeet.lora.slots import Room, SlotManager
from lorakeet.server.engine.adapter_book import BASE, AdapterBook
from lorakeet.server.engine.adapter_entry import Account, AdapterEntry
from lorakeet.server.engine.fairness import OUTPUT_TOKEN, PROMPT_TOKEN, ActiveAdapters
from lorakeet.server.engine.step import SlotLoad, SlotPart

_FETCHED_AHEAD = 8  # adapters: copies are made in turn, and who gets a place needs the next one


class AdapterPlaces:
    """The places, and the queue for a place.

    `now` is in seconds of any clock that does not go backwards.
    """

    def __init__(
        self,
        book: AdapterBook,
        slots: SlotManager,
        max_loras: int,
        wait_limit: float,
        quantum: float,
    ) -> None:
        self._book = book
        self._slots = slots
        self._max_loras = max_loras
        self._wait_limit = wait_limit
        self._quantum = quantum
        self._active = ActiveAdapters()
        self._places: dict[AdapterId, AdapterEntry] = {}
        self._queue: dict[AdapterId, AdapterEntry] = {}  # in order of `waiting_since`
        self._displaced: list[AdapterEntry] = []  # by `rotate`, until `grant`

    def next_to_start(self, now: float) -> AdapterEntry | None:
        """Whose first waiting sequence is to start next, of those that have a slot for it.

        One that is overdue and has nothing running comes before those with less service.
        """
        can_start = [
            entry
            for entry in (self._book.entries[BASE], *self._places.values())
            if entry.num_waiting and self._is_ready(entry)
        ]
        return min(can_start, key=lambda entry: self._order_to_start(entry, now), default=None)

    def wanted(self) -> list[tuple[AdapterId, tuple[AdapterId, ...]]]:
        """Adapters with requests that must be read from disk first, in order of waiting; each with
        all that are needed together with it."""
        return [
            (one, entry.components)
            for entry in self._queue.values()
            for one in self._on_disk(entry)
        ]

    def kept_in_host(self) -> set[AdapterId]:
        """What must not leave host memory: who waits for a place has there, or in the pool, all
        that it needs, or is the first of those that have not."""
        kept: set[AdapterId] = set()
        is_first = True
        for entry in self._queue.values():
            if self._on_disk(entry):
                if not is_first:
                    continue
                is_first = False
            kept.update(one for one in entry.components if not self._slots.is_ready(one))
        return kept

    # --- what happens to requests ---

    def add_waiting(self, adapter_id: AdapterId, now: float) -> None:
        entry = self._book.entries[adapter_id]
        self._active.add(entry)
        if entry.num_waiting == 0:
            entry.waiting_since = now
        entry.num_waiting += 1
        if entry.slot is None and adapter_id not in self._queue:
            self._wait(entry, now)

    def remove_waiting(self, adapter_id: AdapterId, now: float) -> None:
        entry = self._book.entries[adapter_id]
        entry.num_waiting -= 1
        if entry.num_waiting == 0:
            self._queue.pop(adapter_id, None)
        self._settle(entry, now)

    def start(self, adapter_id: AdapterId, now: float, num_prompt_tokens: int) -> None:
        """A sequence starts. `num_prompt_tokens`: those to compute, when it is the first time."""
        entry = self._book.entries[adapter_id]
        assert entry.slot is not None
        entry.num_waiting -= 1
        entry.num_running += 1
        entry.waiting_since = now
        entry.account.service += PROMPT_TOKEN * num_prompt_tokens
        if entry.started is None:
            entry.started = now

    def progress(self, adapter_id: AdapterId, num_tokens: int) -> None:
        """One of its sequences has got so many tokens, or is complete."""
        entry = self._book.entries[adapter_id]
        entry.account.service += OUTPUT_TOKEN * num_tokens
        entry.has_progressed = True

    def preempt(self, adapter_id: AdapterId) -> None:
        entry = self._book.entries[adapter_id]
        entry.num_running -= 1
        entry.num_waiting += 1

    def remove_running(self, adapter_id: AdapterId, now: float) -> None:
        entry = self._book.entries[adapter_id]
        entry.num_running -= 1
        self._settle(entry, now)

    # --- places ---

    def rotate(self, now: float) -> list[AdapterId]:
        """Decide who is displaced: their running sequences are to be preempted before `grant`."""
        self._displaced = self._choose_displaced(now)
        return [entry.adapter_id for entry in self._displaced]

    def grant(self, now: float) -> list[SlotLoad]:
        """Give free places to adapters that wait; returns the slot loads that are to be started."""
        for entry in self._displaced:
            self._leave(entry, now)
        loads: list[SlotLoad] = []
        if not self._queue:
            return loads
        overdue = self._overdue(now)
        for entry in self._in_turn(overdue):
            if len(self._places) == self._max_loras:
                break
            if self._on_disk(entry):
                continue
            entered = self._enter(entry, now)
            if entered is None and entry in overdue:
                break
            loads += entered or ()
        return loads + self._prefetch(now)

    def load_failed(self, slot: Slot, now: float) -> AdapterId:
        """Free a slot whose copy failed. Who needs it loses its place; its requests are to end."""
        failed = self._slots.loading_in(slot)
        for user in self._book.users(failed):
            if user in self._places:
                self._leave(self._book.entries[user], now)
        self._slots.failed(slot)
        return failed

    def check(self) -> None:
        """Assert that places, queue and slots agree."""
        self._slots.check()
        assert len(self._places) <= self._max_loras
        uses = Counter(one for entry in self._places.values() for one in entry.held)
        for adapter_id, entry in self._book.entries.items():
            assert min(entry.num_waiting, entry.num_running) >= 0
            if adapter_id != BASE:
                assert (adapter_id in self._places) == (entry.slot is not None)
                assert (adapter_id in self._queue) == (entry.slot is None and entry.has_requests)
                assert entry.slot is not None or entry.num_running == 0
                assert entry.slot is None or self._slots.slot_of(adapter_id) == entry.slot
                assert self._slots.uses(adapter_id) == uses[adapter_id]

    def _on_disk(self, entry: AdapterEntry) -> list[AdapterId]:
        """What must be read before it can have a place."""
        return [
            component
            for component in entry.components
            if not self._book.entries[component].in_host and self._slots.slot_of(component) is None
        ]

    def _is_ready(self, entry: AdapterEntry) -> bool:
        return all(self._slots.is_ready(one) for one in entry.held)

    def _had_its_turn(self, entry: AdapterEntry, now: float) -> bool:
        if entry.started is None or not entry.has_progressed:
            return False
        return now - entry.started >= self._quantum

    def _in_turn(self, overdue: Mapping[AdapterEntry, None]) -> list[AdapterEntry]:
        """The queue in the order in which places are given."""
        others = [entry for entry in self._queue.values() if entry not in overdue]
        return [*overdue, *sorted(others, key=_by_service)]

    def _overdue(self, now: float) -> dict[AdapterEntry, None]:
        """Of those that wait for a place: a set, in order of waiting."""
        latest = now - self._wait_limit
        firsts: dict[Account, AdapterEntry] = {}
        for entry in takewhile(lambda entry: entry.waiting_since < latest, self._queue.values()):
            firsts.setdefault(entry.account, entry)
        overdue = [entry for entry in firsts.values() if _since(entry) < latest]
        return dict.fromkeys(sorted(overdue, key=_since))

    def _choose_displaced(self, now: float) -> list[AdapterEntry]:
        """As few holders as make room for those that are overdue."""
        holders = [entry for entry in self._places.values() if self._had_its_turn(entry, now)]
        holders.sort(key=_by_service)
        places = self._max_loras - len(self._places)
        room = self._slots.available
        claimed: set[AdapterId] = set()
        released = Counter[AdapterId]()
        displaced: list[AdapterEntry] = []
        for entry in self._overdue(now):
            if self._on_disk(entry):
                continue
            needed = self._needed({*entry.components} - claimed, int(entry.is_blend))
            claimed.update(entry.components)
            while places < 1 or not room.holds(needed):
                if not holders:
                    return displaced
                victim = holders.pop()
                displaced.append(victim)
                released.update(victim.held)
                freed = [one for one in victim.held if self._would_free(one, released[one])]
                places += 1
                room = sum((self._slots.size(one) for one in freed), room)
            places, room = places - 1, room - needed
        return displaced

    def _order_to_start(
        self, entry: AdapterEntry, now: float
    ) -> tuple[bool, float] | tuple[bool, tuple[float, float]]:
        if entry.num_running == 0 and now - entry.waiting_since > self._wait_limit:
            return False, entry.waiting_since
        return True, _by_service(entry)

    def _would_free(self, adapter_id: AdapterId, num_uses: int) -> bool:
        """Its slot and rows can be had when so many of its uses end."""
        is_last = self._slots.uses(adapter_id) == num_uses
        return is_last and not self._slots.is_pinned(adapter_id)

    def _prefetch(self, now: float) -> list[SlotLoad]:
        """Loads for those that get a place next. What they need is not taken for one another."""
        loads: list[SlotLoad] = []
        held: list[AdapterId] = []
        for entry in islice(self._in_turn(self._overdue(now)), _FETCHED_AHEAD):
            if self._on_disk(entry):
                continue
            needed = self._hold(entry.components)
            if needed is None:
                break
            loads += needed
            held += entry.components
        for adapter_id in held:
            self._slots.release(adapter_id)
        return loads

    def _needed(self, components: Collection[AdapterId], num_more_slots: int) -> Room:
        return sum((self._slots.needs(one) for one in components), Room(num_more_slots))

    def _hold(self, components: Sequence[AdapterId], num_more: int = 0) -> list[SlotLoad] | None:
        """Use all of these, which stay in their slots until they are released.

        Returns the loads that this needs; None, and nothing has changed, if there is no room for
        them and for `num_more` slots.
        """
        if not self._slots.available.holds(self._needed(components, num_more)):
            return None
        missing = [one for one in components if self._slots.slot_of(one) is None]
        for component in components:
            if component not in missing:  # first, so that no other takes its room
                self._slots.acquire(component)
        loads = []
        for component in missing:
            assignment = self._slots.assign(component)
            assert assignment is not None
            self._slots.acquire(component)
            loads.append(SlotLoad(component, assignment.slot, assignment.rows))
        return loads

    def _enter(self, entry: AdapterEntry, now: float) -> list[SlotLoad] | None:
        """Give it a place. Returns the loads that this needs; None if there is no room."""
        if entry.is_blend and self._slots.slot_of(entry.adapter_id) is not None:
            return None  # its last slot is on its way out, with other rows
        loads = self._hold(entry.components, int(entry.is_blend))
        if loads is None:
            return None
        if entry.is_blend:
            loads.append(self._blend_load(entry))
        del self._queue[entry.adapter_id]
        self._places[entry.adapter_id] = entry
        entry.slot = self._slots.slot_of(entry.adapter_id)
        entry.account.last_place = now
        entry.started = None
        entry.has_progressed = False
        return loads

    def _blend_load(self, entry: AdapterEntry) -> SlotLoad:
        assignment = self._slots.assign(entry.adapter_id, is_transient=True)
        assert assignment is not None
        self._slots.acquire(entry.adapter_id)
        parts = []
        for component, weight in zip(entry.components, entry.weights, strict=True):
            slot = self._slots.slot_of(component)
            assert slot is not None
            parts.append(SlotPart(slot, self._book.entries[component].num_rows, weight))
        return SlotLoad(entry.adapter_id, assignment.slot, parts=tuple(parts))

    def _leave(self, entry: AdapterEntry, now: float) -> None:
        assert entry.num_running == 0
        del self._places[entry.adapter_id]
        for adapter_id in entry.held:
            self._slots.release(adapter_id)
        entry.slot = None
        if entry.num_waiting:
            self._wait(entry, now)

    def _wait(self, entry: AdapterEntry, now: float) -> None:
        entry.waiting_since = now
        self._queue[entry.adapter_id] = entry

    def _settle(self, entry: AdapterEntry, now: float) -> None:
        """What becomes of an adapter that has perhaps no requests any more."""
        if entry.has_requests:
            return
        self._active.discard(entry)
        if entry.adapter_id in self._places:
            self._leave(entry, now)


def _since(entry: AdapterEntry) -> float:
    """Since when it waits for a place, and its account has got none."""
    return max(entry.waiting_since, entry.account.last_place)


def _by_service(entry: AdapterEntry) -> tuple[float, float]:
    return entry.account.service, entry.waiting_since
