"""Slots and rows: who may be evicted, and that nothing is ever lost."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.slots import Assignment, PinError, PoolError, Room, SlotManager


def manager_with(
    *ranks: int, num_slots: int = 3, num_rows: int = 16, max_rank: int = 8
) -> tuple[SlotManager, list[AdapterId]]:
    slots = SlotManager(num_slots, num_rows, max_rank)
    ids = [AdapterId(number) for number in range(1, len(ranks) + 1)]
    for adapter_id, rank in zip(ids, ranks, strict=True):
        slots.register(adapter_id, rank, pinned=False)
    return slots, ids


def load(slots: SlotManager, adapter_id: AdapterId) -> Assignment:
    assignment = slots.assign(adapter_id)
    assert assignment is not None
    slots.loaded(assignment.slot)
    return assignment


def test_an_adapter_gets_rows_by_its_true_rank_and_never_slot_0() -> None:
    slots, (a, b) = manager_with(3, 8)
    first, second = load(slots, a), load(slots, b)
    assert (len(first.rows), len(second.rows)) == (3, 8)
    assert not set(first.rows) & set(second.rows)
    assert {first.slot, second.slot} == {1, 2}
    assert slots.num_used_rows == 11
    slots.check()


def test_states() -> None:
    slots, (a,) = manager_with(4)
    assert (slots.tier(a), slots.slot_of(a), slots.is_ready(a)) == ("host", None, False)
    assignment = slots.assign(a)
    assert assignment is not None
    assert (slots.tier(a), slots.slot_of(a), slots.is_ready(a)) == (
        "loading",
        assignment.slot,
        False,
    )
    slots.loaded(assignment.slot)
    assert (slots.tier(a), slots.slot_of(a), slots.is_ready(a)) == ("gpu", assignment.slot, True)


def test_the_least_recently_used_idle_adapter_is_evicted() -> None:
    slots, (a, b, c) = manager_with(1, 1, 1)
    load(slots, a)
    load(slots, b)
    slots.acquire(a)
    slots.release(a)
    load(slots, c)
    assert [slots.tier(one) for one in (a, b, c)] == ["gpu", "host", "gpu"]


def test_nothing_in_use_or_loading_is_evicted() -> None:
    """B05: however often others ask."""
    slots, (a, b, c) = manager_with(1, 1, 1)
    used = load(slots, a)
    slots.acquire(a)
    assert slots.assign(b) is not None
    for _ in range(3):
        assert slots.assign(c) is None
    assert slots.slot_of(a) == used.slot
    assert slots.tier(b) == "loading"
    slots.release(a)
    assert slots.assign(c) is not None


def test_no_one_is_evicted_in_vain() -> None:
    slots, (small, used, large) = manager_with(2, 7, 8, num_slots=4, num_rows=14)
    load(slots, small)
    load(slots, used)
    slots.acquire(used)
    assert slots.assign(large) is None
    assert slots.tier(small) == "gpu"
    slots.check()


def test_rows_of_several_adapters_are_gathered() -> None:
    slots, (a, b, c, large) = manager_with(3, 3, 3, 8, num_slots=5, num_rows=9)
    for one in (a, b, c):
        load(slots, one)
    assignment = load(slots, large)
    assert len(set(assignment.rows)) == 8
    assert slots.num_used_rows == 8


def test_a_failed_load_frees_all_it_took() -> None:
    slots, (a,) = manager_with(8)
    for _ in range(20):
        assignment = slots.assign(a)
        assert assignment is not None
        assert slots.failed(assignment.slot) == a
        assert (slots.num_used_rows, slots.tier(a), slots.available) == (0, "host", Room(2, 16))
    slots.check()


def test_unload_at_last_use() -> None:
    slots, (a,) = manager_with(4)
    load(slots, a)
    slots.acquire(a)
    slots.acquire(a)
    assert not slots.unload(a)
    slots.release(a)
    assert not slots.unload(a)
    slots.release(a)
    assert slots.num_used_rows == 0
    assert slots.unload(a)


def test_unload_while_loading_waits_for_the_copy() -> None:
    slots, (a,) = manager_with(4)
    assignment = slots.assign(a)
    assert assignment is not None
    assert not slots.unload(a)
    assert slots.num_used_rows == 4
    slots.loaded(assignment.slot)
    assert slots.num_used_rows == 0
    assert slots.unload(a)


def test_more_cycles_of_load_and_unload_than_slots() -> None:
    """C02: fresh adapters every time, used or not, failing or not."""
    slots = SlotManager(3, 16, 8)
    for number in range(1, 61):
        adapter_id = AdapterId(number)
        slots.register(adapter_id, number % 8 + 1, pinned=False)
        if number % 3 == 0:
            assignment = slots.assign(adapter_id)
            assert assignment is not None
            slots.failed(assignment.slot)
        elif number % 3 == 1:
            load(slots, adapter_id)
            slots.acquire(adapter_id)
            slots.release(adapter_id)
        assert slots.unload(adapter_id)
    assert slots.available == Room(2, 16)
    slots.check()


def test_pinned_adapters_stay() -> None:
    slots, (a, b, c) = manager_with(1, 1, 1)
    pinned = AdapterId(9)
    slots.register(pinned, 8, pinned=True)
    load(slots, pinned)
    for one in (a, b, c, a, b, c):
        load(slots, one)
        slots.check()
    assert slots.tier(pinned) == "gpu"
    assert slots.unload(pinned)
    assert slots.tier(pinned) == "host"


@pytest.mark.parametrize(("num_slots", "num_rows"), [(3, 15), (2, 64)])
def test_pins_leave_room_for_the_largest_other_adapter(num_slots: int, num_rows: int) -> None:
    slots = SlotManager(num_slots, num_rows, 8)
    with pytest.raises(PinError):
        slots.register(AdapterId(1), 8, pinned=True)
    slots.register(AdapterId(1), 8, pinned=False)
    slots.check()


def facts(error: PoolError) -> tuple[str, int, int]:
    return error.limit, error.needed, error.room


def test_adapters_that_never_fit_are_refused() -> None:
    slots, _ = manager_with()
    with pytest.raises(PoolError) as refused:
        slots.register(AdapterId(1), 9, pinned=False)
    assert facts(refused.value) == ("rank", 9, 8)
    assert str(refused.value) == "rank: 9 are needed, there is room for 8"
    with pytest.raises(ValueError, match="rows"):
        SlotManager(2, 7, 8)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_pool_without_slots_refuses_every_adapter(rank: int) -> None:
    slots = SlotManager(1, 0, 8)
    with pytest.raises(PoolError) as refused:
        slots.register(AdapterId(1), rank, pinned=False)
    assert facts(refused.value) == ("slots", 1, 0)


def test_a_transient_slot_is_free_after_its_last_use() -> None:
    slots, (a, b) = manager_with(0, 3)
    load(slots, b)
    for _ in range(5):
        assignment = slots.assign(a, is_transient=True)
        assert assignment is not None
        assert assignment.rows == ()
        slots.acquire(a)
        slots.acquire(a)
        slots.loaded(assignment.slot)
        slots.release(a)
        assert slots.is_ready(a)
        slots.release(a)
        assert slots.slot_of(a) is None
        slots.check()
    assert slots.is_ready(b)
    assert slots.unload(a)


def test_a_transient_slot_that_nobody_uses_any_more_is_free_once_it_is_loaded() -> None:
    slots, (a,) = manager_with(0)
    assignment = slots.assign(a, is_transient=True)
    assert assignment is not None
    slots.acquire(a)
    slots.release(a)
    assert slots.slot_of(a) == assignment.slot
    slots.loaded(assignment.slot)
    assert slots.slot_of(a) is None
    assert slots.available == Room(2, 16)


def test_what_an_adapter_needs_of_what_is_available() -> None:
    slots, (absent, idle, used, loading) = manager_with(1, 2, 3, 4, num_slots=6)
    load(slots, idle)
    load(slots, used)
    slots.acquire(used)
    assert slots.assign(loading) is not None
    pinned = AdapterId(9)
    slots.register(pinned, 5, pinned=True)
    load(slots, pinned)
    needs = [slots.needs(one) for one in (absent, idle, used, loading, pinned)]
    assert needs == [Room(1, 1), Room(1, 2), Room(), Room(), Room()]
    assert slots.available == Room(2, 4)  # one is free, and the idle one's; two rows and its two
    assert [slots.uses(one) for one in (absent, idle, used)] == [0, 0, 1]


def test_pins_leave_what_is_reserved() -> None:
    slots = SlotManager(6, 20, 8, reserved_slots=3, reserved_rows=12)
    slots.register(AdapterId(1), 4, pinned=True)
    with pytest.raises(PinError) as refused:
        slots.register(AdapterId(2), 5, pinned=True)
    assert facts(refused.value) == ("rows", 12, 11)
    slots.register(AdapterId(2), 4, pinned=True)
    with pytest.raises(PinError) as refused:
        slots.register(AdapterId(3), 0, pinned=True)
    assert facts(refused.value) == ("slots", 3, 2)


def test_pins_leave_every_vocabulary_its_memory() -> None:
    slots = SlotManager(6, 20, 8, vocabulary_bytes=10)
    slots.register(AdapterId(1), 1, pinned=False, vocabulary_bytes=6)
    with pytest.raises(PinError) as refused:
        slots.register(AdapterId(2), 1, pinned=True, vocabulary_bytes=5)
    assert facts(refused.value) == ("vocabulary_bytes", 6, 5)
    slots.register(AdapterId(2), 1, pinned=True, vocabulary_bytes=4)


class SlotMachine(RuleBasedStateMachine):
    """Against a model: what each adapter's rows hold, who uses it, who is to go."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotManager(4, 12, 5, vocabulary_bytes=10)
        self.vocabularies: dict[int, int] = {}  # bytes on the device, by slot
        self.next_id = 1
        self.ranks: dict[AdapterId, int] = {}
        self.loading: dict[AdapterId, Assignment] = {}
        self.uses: dict[AdapterId, int] = {}
        self.leaving: set[AdapterId] = set()
        self.transient: set[AdapterId] = set()  # in their present slot
        self.row_owner: dict[int, AdapterId] = {}
        self.slot_owner: dict[int, AdapterId] = {}

    def pick(self, random: random.Random) -> AdapterId:
        return random.choice(sorted(self.ranks))

    @rule(rank=st.integers(0, 5), pinned=st.booleans(), num_bytes=st.integers(0, 11))
    def register(self, rank: int, pinned: bool, num_bytes: int) -> None:
        adapter_id = AdapterId(self.next_id)
        self.next_id += 1
        try:
            self.slots.register(adapter_id, rank, pinned, num_bytes)
        except PoolError:
            return
        assert num_bytes <= 10
        self.ranks[adapter_id] = rank
        self.uses[adapter_id] = 0

    @precondition(lambda self: self.ranks)
    @rule(random=st.randoms(use_true_random=False), is_transient=st.booleans())
    def assign(self, random: random.Random, is_transient: bool) -> None:
        adapter_id = self.pick(random)
        if self.slots.slot_of(adapter_id) is not None or adapter_id in self.leaving:
            return
        has_room = self.slots.available.holds(self.slots.needs(adapter_id))
        assignment = self.slots.assign(adapter_id, is_transient)
        assert (assignment is not None) == has_room
        if assignment is not None:
            self.transient.discard(adapter_id)
            if is_transient:
                self.transient.add(adapter_id)
            self.loading[adapter_id] = assignment
            self.slot_owner[assignment.slot] = adapter_id
            others = {row: one for row, one in self.row_owner.items() if one != adapter_id}
            self.row_owner = others | dict.fromkeys(assignment.rows, adapter_id)
            assert len(assignment.rows) == self.ranks[adapter_id]
            for slot in self.slots.take_cleared():
                self.vocabularies.pop(slot)
            if num_bytes := self.slots.size(adapter_id).vocabulary_bytes:
                assert assignment.slot not in self.vocabularies
                self.vocabularies[assignment.slot] = num_bytes
            assert sum(self.vocabularies.values()) <= 10

    @precondition(lambda self: self.loading)
    @rule(random=st.randoms(use_true_random=False), good=st.booleans())
    def end_load(self, random: random.Random, good: bool) -> None:
        adapter_id = random.choice(sorted(self.loading))
        if not good and self.uses[adapter_id]:
            return
        slot = self.loading.pop(adapter_id).slot
        assert (self.slots.loaded if good else self.slots.failed)(slot) == adapter_id

    @precondition(lambda self: self.ranks)
    @rule(random=st.randoms(use_true_random=False))
    def acquire(self, random: random.Random) -> None:
        adapter_id = self.pick(random)
        if self.slots.slot_of(adapter_id) is not None and adapter_id not in self.leaving:
            self.slots.acquire(adapter_id)
            self.uses[adapter_id] += 1

    @precondition(lambda self: any(self.uses.values()))
    @rule(random=st.randoms(use_true_random=False))
    def release(self, random: random.Random) -> None:
        adapter_id = random.choice(sorted(one for one, count in self.uses.items() if count))
        self.slots.release(adapter_id)
        self.uses[adapter_id] -= 1

    @precondition(lambda self: self.ranks)
    @rule(random=st.randoms(use_true_random=False))
    def unload(self, random: random.Random) -> None:
        adapter_id = self.pick(random)
        busy = self.uses[adapter_id] > 0 or adapter_id in self.loading
        assert self.slots.unload(adapter_id) == (not busy)
        if busy:
            self.leaving.add(adapter_id)
        else:
            self.leaving.discard(adapter_id)
            self.transient.discard(adapter_id)
            del self.ranks[adapter_id], self.uses[adapter_id]

    @invariant()
    def used_and_loading_ones_keep_what_they_have(self) -> None:
        self.slots.check()
        for adapter_id in self.transient - self.leaving:
            in_use = self.uses[adapter_id] > 0 or adapter_id in self.loading
            assert (self.slots.slot_of(adapter_id) is not None) == in_use
        for adapter_id in self.ranks:
            if self.uses[adapter_id] or adapter_id in self.loading:
                slot = self.slots.slot_of(adapter_id)
                assert slot is not None
                assert self.slot_owner[slot] == adapter_id
                rows = [row for row, owner in self.row_owner.items() if owner == adapter_id]
                assert len(rows) == self.ranks[adapter_id]
        free = sum(self.uses.values()) == 0 and not self.loading
        if free:
            assert self.slots.available.rows >= 5
            assert all(
                self.slots.available.holds(self.slots.needs(one))
                for one in self.ranks
                if not self.slots.is_pinned(one)
            )


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
