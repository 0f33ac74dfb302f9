"""Writing adapters to the pool, clearing slots, and what must never be read again."""

import dataclasses
import time
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakeet.lora.adapter import Adapter, GroupWeights, Slot, TokenRows, Vocabulary
from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import AdapterPool, bytes_per_row
from lorakeet.lora.staging import Staging
from lorakeet.lora.torch_backend import TorchBackend
from support.pools import (
    LAYERS,
    SPECS,
    expected_delta,
    input_of,
    poisoned_pool,
    random_adapter,
    same_rank,
    with_vectors,
)

QKV = next(spec for spec in SPECS if spec.name == "qkv_proj")


def delta_of(pool: AdapterPool, slot: int, layer: int = 0) -> torch.Tensor:
    """What the slot adds to two rows of qkv."""
    y, x = torch.zeros(2, QKV.output_size), input_of(QKV, 2)
    batch = LoRABatch(torch.full((2,), slot, dtype=torch.int32))
    TorchBackend().add_linear(y, x, pool.layer("qkv_proj", layer), batch)
    return y


def expected(adapter: Adapter, layer: int = 0) -> torch.Tensor:
    slots = np.ones(2, dtype=np.int32)
    delta = expected_delta(QKV, layer, input_of(QKV, 2), {1: adapter}, slots)
    return delta.float()


def test_bytes_per_row_is_what_the_tensors_take() -> None:
    pool = AdapterPool(SPECS, 3, 10, 8, torch.bfloat16, "cpu")
    layers = [pool.layer(spec.name, i) for spec in SPECS for i in range(spec.num_layers)]
    total = sum(layer.a.nbytes + layer.b.nbytes for layer in layers)
    assert bytes_per_row(SPECS, torch.bfloat16) * 10 == total


def test_write_fills_its_rows_and_no_others() -> None:
    pool = poisoned_pool(4, 9)
    adapter = random_adapter({"qkv_proj": (1, 3, 0), "o_proj": (2, 2, 2)})
    write = pool.write(Slot(2), (7, 0, 4), adapter)
    assert write.done()
    assert pool.tables.rows[2].tolist() == [7, 0, 4] + [0] * 61
    for layer in range(LAYERS):
        qkv, o = pool.layer("qkv_proj", layer), pool.layer("o_proj", layer)
        assert qkv.ranks.tolist() == [0, 0, (1, 3, 0)[layer], 0]
        assert o.ranks.tolist() == [0, 0, 2, 0]
        if layer < 2:
            assert torch.equal(qkv.a[:, [7, 0, 4]], adapter.groups["qkv_proj"].a[layer])
            assert torch.equal(qkv.b[[7, 0, 4]], adapter.groups["qkv_proj"].b[layer])
        else:  # the adapter has no rows there
            assert not qkv.a[:, [7, 0, 4]].any()
            assert not qkv.b[[7, 0, 4]].any()
        assert torch.equal(o.b[[7, 0]], adapter.groups["o_proj"].b[layer])
        for name in pool.specs:
            weights = pool.layer(name, min(layer, pool.specs[name].num_layers - 1))
            assert weights.a[:, [1, 2, 3, 5, 6, 8]].isnan().all()
            assert weights.b[[1, 2, 3, 5, 6, 8]].isnan().all()
        down = pool.layer("down_proj", layer)
        for weights, rows in ((o, [4]), (down, [7, 0, 4])):
            assert not weights.a[:, rows].any()
            assert not weights.b[rows].any()
        assert down.ranks.tolist() == [0, 0, 0, 0]


def test_biases_and_magnitudes_have_a_row_each() -> None:
    pool = poisoned_pool(4, 9)
    ranks = {"qkv_proj": (1, 2, 0), "o_proj": (2, 0, 0)}
    adapter = with_vectors(random_adapter(ranks), ["qkv_proj", "down_proj"], ["qkv_proj"])
    assert (adapter.rank, adapter.num_rows) == (2, 4)
    pool.write(Slot(2), (7, 0, 4, 1), adapter)
    assert pool.tables.rows[2].tolist() == [4, 7, 0] + [0] * 61
    assert pool.tables.scales[2].tolist() == [1, 1, 1] + [0] * 61
    assert pool.tables.offsets[2].tolist() == [1] + [0] * 63
    assert pool.tables.magnitude_rows.tolist() == [-1, -1, 1, -1]
    qkv, down = adapter.groups["qkv_proj"], adapter.groups["down_proj"]
    assert qkv.bias is not None
    assert qkv.magnitude is not None
    assert down.bias is not None
    for layer in range(LAYERS):
        weights = {name: pool.layer(name, layer) for name in ("qkv_proj", "o_proj", "down_proj")}
        counts = {name: int(weights[name].ranks[2]) for name in weights}
        assert counts == {
            "qkv_proj": (2, 3, 1)[layer],
            "o_proj": (3, 0, 0)[layer],
            "down_proj": 1,
        }
        assert torch.equal(weights["qkv_proj"].b[4], qkv.bias[layer])
        assert torch.equal(weights["qkv_proj"].b[1], qkv.magnitude[layer])
        assert torch.equal(weights["down_proj"].b[4], down.bias[layer])
        assert not weights["o_proj"].b[[4, 1]].any()
        assert not any(group.a[:, [4, 1]].any() for group in weights.values())
    pool.clear(Slot(2))
    for table in (pool.tables.rows, pool.tables.scales, pool.tables.offsets):
        assert not table[2].any()
    assert pool.tables.magnitude_rows[2] == -1


def test_clear_takes_ranks_and_table_and_leaves_other_slots() -> None:
    pool = poisoned_pool(3, 10)
    first, second = random_adapter(same_rank(3), 1), random_adapter(same_rank(4), 2)
    pool.write(Slot(1), (0, 1, 2), first)
    pool.write(Slot(2), (9, 8, 7, 6), second)
    pool.clear(Slot(1))
    assert not pool.tables.rows[1].any()
    assert not any(
        pool.layer(spec.name, layer).ranks[1] for spec in SPECS for layer in range(spec.num_layers)
    )
    assert not delta_of(pool, 1).any()
    torch.testing.assert_close(delta_of(pool, 2), expected(second))


def test_a_reused_slot_shows_nothing_of_the_earlier_adapter() -> None:
    """The new one has fewer groups and a smaller rank; the old rows are still there."""
    pool = poisoned_pool(2, 8)
    pool.write(Slot(1), range(8), random_adapter(same_rank(8), 1))
    adapter = random_adapter({"qkv_proj": (0, 2, 1)}, 2)
    pool.write(Slot(1), (5, 3), adapter)
    assert pool.tables.rows[1].tolist() == [5, 3] + [0] * 62
    assert not pool.layer("o_proj", 0).ranks.any()
    for layer in range(LAYERS):
        torch.testing.assert_close(delta_of(pool, 1, layer), expected(adapter, layer))


def test_an_adapter_of_other_precision_is_rounded_to_the_pools() -> None:
    pool = poisoned_pool(2, 4, dtype=torch.bfloat16)
    adapter = random_adapter(same_rank(2))
    pool.write(Slot(1), (0, 1), adapter)
    weights = adapter.groups["qkv_proj"].b[0].bfloat16()
    assert torch.equal(pool.layer("qkv_proj", 0).b[:2], weights)


def test_an_adapter_without_rows_changes_nothing() -> None:
    pool = poisoned_pool(2, 4)
    pool.write(Slot(1), (), random_adapter({}))
    assert not delta_of(pool, 1).any()


def wrong_shape(adapter: Adapter) -> Adapter:
    weights = adapter.groups["o_proj"]
    groups = {**adapter.groups, "o_proj": dataclasses.replace(weights, b=weights.b[:, :, :-1])}
    return dataclasses.replace(adapter, groups=groups)


def rank_above_rows(adapter: Adapter) -> Adapter:
    weights = adapter.groups["o_proj"]
    groups = {"o_proj": GroupWeights(weights.a, weights.b, (3, 2, 2))}
    return dataclasses.replace(adapter, groups=groups)


def short_bias(adapter: Adapter) -> Adapter:
    weights = adapter.groups["o_proj"]
    assert weights.bias is not None
    groups = {"o_proj": dataclasses.replace(weights, bias=weights.bias[:, 1:])}
    return dataclasses.replace(adapter, groups=groups)


GOOD = random_adapter(same_rank(2))


@pytest.mark.parametrize(
    ("slot", "rows", "adapter", "message"),
    [
        (0, (0, 1), GOOD, "slot 0"),
        (3, (0, 1), GOOD, "slot 3"),
        (-1, (0, 1), GOOD, "slot -1"),
        (1, (0,), GOOD, "1 rows"),
        (1, (0, 1, 2), GOOD, "3 rows"),
        (1, (0, 0), GOOD, "distinct"),
        (1, (0, 10), GOOD, "distinct"),
        (1, (-1, 0), GOOD, "distinct"),
        (1, range(5), random_adapter(same_rank(5)), "limit 4"),
        (1, (0, 1), dataclasses.replace(GOOD, groups={"x": GOOD.groups["o_proj"]}), "'x'"),
        (1, (0, 1), wrong_shape(GOOD), "o_proj: shapes"),
        (1, (0, 1), rank_above_rows(GOOD), "o_proj: ranks"),
        (1, (0,), dataclasses.replace(GOOD, rank=1), "in 2 rows of 1"),
        (1, (0, 1), with_vectors(GOOD, ["o_proj"]), "2 rows for an adapter of 3"),
        (1, range(5), with_vectors(random_adapter(same_rank(4)), ["o_proj"]), "5 are listed"),
        (1, (0, 1, 2), short_bias(with_vectors(GOOD, ["o_proj"])), "shape of a vector"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_slot_as_it_was(
    slot: int, rows: tuple[int, ...], adapter: Adapter, message: str
) -> None:
    pool = poisoned_pool(3, 10, table_width=4)
    resident = random_adapter(same_rank(3), 7)
    pool.write(Slot(1), (9, 8, 7), resident)
    with pytest.raises(ValueError, match=message):
        pool.write(Slot(slot), rows, adapter)
    torch.testing.assert_close(delta_of(pool, 1), expected(resident))


@pytest.mark.parametrize("slot", [0, 3])
def test_clear_refuses_a_slot_that_no_adapter_can_have(slot: int) -> None:
    with pytest.raises(ValueError, match=f"slot {slot}"):
        poisoned_pool(3, 4).clear(Slot(slot))


ADAPTERS = {rank: random_adapter(same_rank(rank), rank) for rank in (1, 2, 3, 5)}


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 2, 3, 5])), max_size=12),
    st.randoms(use_true_random=False),
)
def test_every_slot_is_its_own_adapter_after_any_history(
    history: list[tuple[int, int]], random: Random
) -> None:
    """Rank 0 stands for an eviction. Rows go back and forth between the slots."""
    pool = poisoned_pool(4, 15)
    free = list(range(15))
    owned: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for slot, rank in history:
        free += owned[slot]
        random.shuffle(free)
        owned[slot], free = free[:rank], free[rank:]
        if rank:
            pool.write(Slot(slot), owned[slot], ADAPTERS[rank])
        else:
            pool.clear(Slot(slot))
        for other, rows in owned.items():
            want = expected(ADAPTERS[len(rows)]) if rows else torch.zeros(2, QKV.output_size)
            torch.testing.assert_close(delta_of(pool, other), want)


class Listing:
    """What slots must list, from the adapters as they were made: slot → all rows, group → count."""

    def __init__(self, pool: AdapterPool) -> None:
        self.pool = pool
        self.rows: dict[int, list[tuple[int, float, float]]] = {}  # row, scale, offset
        self.counts: dict[int, dict[str, int]] = {}
        self.magnitudes: dict[int, int] = {}

    def write(self, slot: int, rows: Sequence[int], adapter: Adapter) -> None:
        self.pool.write(Slot(slot), rows, adapter)
        listed = [(row, 1.0, 0.0) for row in rows[: adapter.rank]]
        if adapter.has_bias:
            listed.insert(0, (rows[adapter.rank], 1.0, 1.0))
        self.rows[slot], self.counts[slot] = listed, {}
        for name, weights in adapter.groups.items():
            if (rank := max(weights.ranks)) or weights.bias is not None:
                self.counts[slot][name] = rank + adapter.has_bias
        self.magnitudes[slot] = rows[-1] if adapter.has_magnitude else -1

    def blend(self, slot: int, parts: Sequence[tuple[int, float]]) -> None:
        rows: list[tuple[int, float, float]] = []
        counts: dict[str, int] = {}
        for part, weight in parts:
            for name, count in self.counts[part].items():
                counts[name] = len(rows) + count
            rows += [(row, weight * s, weight * o) for row, s, o in self.rows[part]]
        self.pool.write_blend(
            Slot(slot), [(Slot(part), len(self.rows[part]), weight) for part, weight in parts]
        )
        self.rows[slot], self.counts[slot], self.magnitudes[slot] = rows, counts, -1

    def clear(self, slot: int) -> None:
        self.pool.clear(Slot(slot))
        self.rows.pop(slot, None)
        self.counts.pop(slot, None)
        self.magnitudes.pop(slot, None)

    def check(self) -> None:
        tables, slots = self.pool.tables, range(self.pool.num_slots)
        for name, spec in self.pool.specs.items():
            counts = [self.counts.get(slot, {}).get(name, 0) for slot in slots]
            assert tables.num_listed(np.array(list(slots)), name).tolist() == list(counts)
            layers = [self.pool.layer(name, index) for index in range(spec.num_layers)]
            for slot, count in zip(slots, counts, strict=True):
                assert tables.touched([slot], [name]) == ([name] if count else [])
                assert max(int(layer.ranks[slot]) for layer in layers) == count
                listed, want = tables.slot_rows(name, slot), self.rows.get(slot, [])[:count]
                assert listed.rows.dtype == np.int32
                assert listed.scales.dtype == listed.offsets.dtype == np.float32
                assert listed.rows.tolist() == [row for row, _, _ in want]
                assert listed.scales.tolist() == pytest.approx([scale for _, scale, _ in want])
                assert listed.offsets.tolist() == pytest.approx([offset for _, _, offset in want])
                assert listed.magnitude == (self.magnitudes.get(slot, -1) if count else -1)
                for layer in layers:  # all of the list may be read, in every layer
                    assert layer.a[:, listed.rows].isfinite().all()
                    assert not layer.b[listed.rows[int(layer.ranks[slot]) :]].any()
                    if listed.magnitude >= 0:
                        assert layer.b[listed.magnitude].isfinite().all()


PATTERNS = random_adapter({"qkv_proj": (1, 3, 0), "o_proj": (2, 0, 2), "lm_head": (1,)}, 8)
LISTED = {
    "plain": random_adapter(same_rank(3), 1),
    "rank patterns": PATTERNS,
    "biases": with_vectors(PATTERNS, ["qkv_proj", "down_proj"]),
    "magnitudes": with_vectors(random_adapter(same_rank(2), 4), magnitude=["o_proj", "qkv_proj"]),
    "both": with_vectors(random_adapter({"o_proj": (2, 1, 3)}, 5), ["o_proj"], ["o_proj"]),
    "biases alone": with_vectors(random_adapter({"o_proj": (0, 0, 0)}, 6), ["o_proj"]),
    "nothing": random_adapter({}),
}


def listing_of_every_kind() -> tuple[Listing, dict[str, int]]:
    """Each of `LISTED` in a slot, and some slots that are blends of them."""
    listing = Listing(poisoned_pool(len(LISTED) + 5, 40, table_width=16))
    rows = list(range(40))
    Random(3).shuffle(rows)
    slots = {name: slot for slot, name in enumerate(LISTED, start=1)}
    for name, adapter in LISTED.items():
        listing.write(slots[name], [rows.pop() for _ in range(adapter.num_rows)], adapter)
    blends = {
        "two": {"plain": 0.5, "rank patterns": -1.5},
        "biases in front": {"biases": 0.3, "plain": 1 / 3},
        "modules of the first alone": {"plain": 1.0, "biases alone": 2.0},
        "with nothing": {"nothing": 1.0, "rank patterns": 0.0},
    }
    for slot, (name, parts) in enumerate(blends.items(), start=len(LISTED) + 1):
        listing.blend(slot, [(slots[part], weight) for part, weight in parts.items()])
        slots[name] = slot
    return listing, slots


def test_slots_of_every_kind_list_what_they_own() -> None:
    listing, slots = listing_of_every_kind()
    listing.check()
    tables = listing.pool.tables
    named = [slots[name] for name in ("rank patterns", "biases", "two", "biases alone")]
    assert tables.num_listed(named, "qkv_proj").tolist() == [3, 4, 6, 0]
    assert tables.num_listed(named, "down_proj").tolist() == [0, 1, 3, 0]
    assert tables.slot_rows("o_proj", slots["both"]).magnitude >= 0
    assert tables.slot_rows("qkv_proj", slots["both"]).magnitude == -1
    for slot in slots.values():
        listing.clear(slot)
        listing.check()


def test_touched_names_the_groups_that_any_of_the_slots_changes() -> None:
    listing, slots = listing_of_every_kind()
    groups = [spec.name for spec in SPECS]

    def touched(*names: str) -> set[str]:
        return set(listing.pool.tables.touched([0, *(slots[name] for name in names)], groups))

    assert touched() == touched("nothing") == set()
    assert touched("plain") == set(groups)
    assert touched("biases") == {"qkv_proj", "o_proj", "lm_head", "down_proj"}
    assert touched("biases alone", "nothing") == {"o_proj"}
    assert touched("rank patterns", "both") == {"qkv_proj", "o_proj", "lm_head"}
    assert listing.pool.tables.touched([slots["plain"]], ["o_proj", "no group"]) == ["o_proj"]
    assert listing.pool.tables.touched([], groups) == []


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([*LISTED, "clear", "blend"])), max_size=10
    ),
    st.randoms(use_true_random=False),
)
def test_slots_list_what_they_own_after_any_history(
    history: list[tuple[int, str]], random: Random
) -> None:
    """Blends are of what slot 4 holds, which stays."""
    listing = Listing(poisoned_pool(5, 24, table_width=16))
    free = list(range(24))
    stays = LISTED["biases"]
    listing.write(4, [free.pop() for _ in range(stays.num_rows)], stays)
    owned: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for slot, what in history:
        free += owned[slot]
        random.shuffle(free)
        adapter = LISTED.get(what, LISTED["nothing"])
        owned[slot], free = free[: adapter.num_rows], free[adapter.num_rows :]
        if what == "clear":
            listing.clear(slot)
        elif what == "blend":
            listing.blend(slot, [(4, random.choice([0.1, -2.0]))] * random.randint(1, 3))
        else:
            listing.write(slot, owned[slot], adapter)
        listing.check()


@pytest.mark.gpu
def test_the_copy_waits_for_earlier_passes_and_shows_when_it_is_done() -> None:
    """A pass launched before the write still reads the rows' earlier tenant."""
    pool = poisoned_pool(3, 6, device="cuda")
    old, new = random_adapter(same_rank(6), 1), random_adapter(same_rank(6), 2)
    pool.write(Slot(1), range(6), old).result()
    layer = pool.layer("qkv_proj", 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    seen = layer.a.clone()
    pool.launched(np.array([0, 1], np.int32))
    write = pool.write(Slot(2), range(6), new)
    table = pool.tables.rows.copy()
    assert not torch.cuda.current_stream().query()  # the caller has not waited for the pass
    assert not write.done()
    write.result()
    assert torch.cuda.current_stream().query()  # the copy has
    after = layer.a.clone()
    assert torch.equal(seen.cpu(), old.groups["qkv_proj"].a[1])
    assert torch.equal(after.cpu(), new.groups["qkv_proj"].a[1])
    assert table[2, :6].tolist() == list(range(6))


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_passes_that_read_other_rows() -> None:
    """Of the adapter itself, or of a blend with it."""
    pool = poisoned_pool(5, 9, device="cuda")
    for slot in (1, 2, 3):
        pool.write(Slot(slot), range(slot * 2, slot * 2 + 2), random_adapter(same_rank(2))).result()
    pool.write_blend(Slot(4), [(Slot(1), 2, 0.5), (Slot(2), 2, 1.0)])
    torch.cuda.synchronize()
    pool.launched(np.array([3], np.int32))  # ends at once
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    pool.launched(np.array([0, 4, 4], np.int32))
    other = pool.write(Slot(3), [6, 8], random_adapter(same_rank(2)))
    while not other.done():
        assert not torch.cuda.current_stream().query(), "it waited for the pass"
        time.sleep(0.001)  # the copy's thread needs the interpreter too
    own = pool.write(Slot(1), [2, 0], random_adapter(same_rank(2)))
    assert not torch.cuda.current_stream().query()
    assert not own.done()
    own.result()
    assert torch.cuda.current_stream().query()


@pytest.mark.gpu
def test_rows_that_change_hands_while_they_are_copied_end_with_their_last_tenant() -> None:
    """With vocabularies, whose memory goes from one to the next too."""
    pool = poisoned_pool(4, 6, device="cuda")
    adapters = [random_adapter(same_rank(6), seed) for seed in range(8)]
    for seed, adapter in enumerate(adapters):
        rows = torch.full((1000, 20), float(seed))
        vocabulary = Vocabulary(1000, TokenRows(torch.arange(1000), rows), None)
        slot = Slot(1 + seed % 2)
        pool.clear(Slot(2 - seed % 2))
        write = pool.write(slot, range(6), dataclasses.replace(adapter, vocabulary=vocabulary))
    write.result()
    layer = pool.layer("gate_up_proj", 1)
    assert torch.equal(layer.b[:6].cpu(), adapters[-1].groups["gate_up_proj"].b[1])
    batch = pool.vocabularies.for_embedding(np.array([slot], np.int32))
    assert batch is not None
    y = torch.zeros(1, 20, device="cuda")
    batch.embed(y, torch.tensor([999], device="cuda"))
    assert y.eq(7).all()


@pytest.mark.gpu
def test_copies_in_a_row_take_the_memory_of_one() -> None:
    """Beside the pool, also while the device has not begun with any of them."""
    pool = poisoned_pool(9, 512, device="cuda")
    adapters = [random_adapter(same_rank(64), seed) for seed in range(8)]
    size = sum(w.a.nbytes + w.b.nbytes for w in adapters[0].groups.values())
    pool.write(Slot(1), range(64), adapters[0]).result()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    pool.launched(np.array([1], np.int32))
    writes = [
        pool.write(Slot(1 + number), range(64 * number, 64 * number + 64), adapter)
        for number, adapter in enumerate(adapters)
    ]
    assert not writes[0].done()
    writes[-1].result()
    assert all(write.done() for write in writes)
    assert size < torch.cuda.max_memory_allocated() - before < 1.5 * size
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_memory_that_is_short_is_the_error_of_one_copy_and_is_given_back() -> None:
    pool = poisoned_pool(3, 6, device="cuda")
    pool.write(Slot(1), range(3), random_adapter(same_rank(3), 1)).result()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    huge = torch.zeros(1, dtype=torch.float32).expand(3, 3, 3, 2**44)  # takes nothing on the host
    spec = dataclasses.replace(QKV, input_size=2**44)
    pool.specs["qkv_proj"] = spec
    adapter = random_adapter(same_rank(3), 2)
    weights = dataclasses.replace(adapter.groups["qkv_proj"], a=huge)
    last = {**adapter.groups, "qkv_proj": weights}
    write = pool.write(Slot(2), (3, 4, 5), dataclasses.replace(adapter, groups=last))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        write.result()
    assert torch.cuda.memory_allocated() == before
    pool.specs["qkv_proj"] = QKV
    pool.write(Slot(2), (3, 4, 5), adapter).result()
    assert torch.equal(pool.layer("qkv_proj", 0).b[3:].cpu(), adapter.groups["qkv_proj"].b[0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [0, 2, 2**22, 2**22 + 2, 3 * 2**28])
def test_tensors_of_any_size_come_to_the_device_unchanged(num_bytes: int) -> None:
    """Also past all buffers, and when the source changes right after."""
    staging = Staging(torch.device("cuda"))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    values = torch.randint(-(2**15), 2**15, (num_bytes // 2,), dtype=torch.int16)
    expected = values.clone()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        copies = [staging.to_device(values.view(torch.bfloat16)) for _ in range(2)]
    values.zero_()
    stream.synchronize()
    for copy in copies:
        assert torch.equal(copy.view(torch.int16).cpu(), expected)
        assert staging.to_device(copy) is copy
