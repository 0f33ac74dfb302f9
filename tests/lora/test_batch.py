"""From slots to the work of a pass."""

from dataclasses import fields, replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lorakeet.kernels.rank_rows import MIN_ROOM, RankRowArrays, RankRows, list_rank_rows
from lorakeet.lora.adapter import Slot
from lorakeet.lora.batch import (
    StaticRankRows,
    body_groups,
    build_lora_batch,
    full_lora_batch,
    list_by_group,
    static_room,
    values_by_layer,
)
from lorakeet.lora.pool import AdapterPool
from support.pools import SPECS, filled_pool, random_adapter, same_rank, with_vectors

GROUPS = [spec.name for spec in SPECS]
BODY = [name for name in GROUPS if name != "lm_head"]
ADAPTERS = {
    1: random_adapter(same_rank(3), 1),
    2: with_vectors(random_adapter(same_rank(2), 2), ["o_proj"], ["o_proj", "qkv_proj"]),
    3: random_adapter({"qkv_proj": (0, 5, 2), "down_proj": (3, 0, 0)}, 3),
    4: random_adapter({"lm_head": (2,)}, 4),
    5: random_adapter({}, 5),
    6: random_adapter({}, 6),  # in its place, a blend
}
SLOTS = st.lists(st.integers(0, 6), min_size=1, max_size=40)


@cache
def shared_pool(device: str = "cpu") -> AdapterPool:
    pool = filled_pool(ADAPTERS, device=device)
    pool.write_blend(Slot(6), [(Slot(2), 3, 0.5), (Slot(3), 5, -2.0)])
    return pool


def slots_of(slots: list[int]) -> NDArray[np.int32]:
    return np.array(slots, dtype=np.int32)


def assert_same_lists(found: RankRows, want: RankRowArrays) -> None:
    """All that is listed; what a list has room for past its count may be anything."""
    assert found.count.tolist() == [len(want.rows)]
    for field in fields(RankRowArrays):
        values = getattr(want, field.name)
        assert np.array_equal(getattr(found, field.name)[: len(values)].cpu().numpy(), values)


@pytest.mark.parametrize("slots", [[], [0], [0] * 300, [4, 0], [5, 5], [0, 4, 5]])
def test_a_pass_that_no_adapter_changes_has_no_batch(slots: list[int]) -> None:
    assert build_lora_batch(slots_of(slots), shared_pool(), BODY) is None


@given(SLOTS)
def test_a_batch_knows_the_slots(slots: list[int]) -> None:
    for groups, changed_by in ((BODY, {1, 2, 3, 6}), (["lm_head"], {1, 2, 4, 6})):
        batch = build_lora_batch(slots_of(slots), shared_pool(), groups)
        if changed_by.isdisjoint(slots):
            assert batch is None
            continue
        assert batch is not None
        assert batch.slots.tolist() == slots
        assert not batch.rank_rows  # on CUDA only


def test_the_heads_group_is_no_part_of_the_body() -> None:
    assert body_groups(shared_pool()) == BODY


@given(SLOTS)
def test_each_group_lists_what_the_pool_says(slots: list[int]) -> None:
    pool = shared_pool()
    lists = list_by_group(slots_of(slots), pool, GROUPS)
    assert list(lists) == GROUPS
    for group, arrays in lists.items():
        want = list_rank_rows(slots_of(slots), partial(pool.tables.slot_rows, group))
        for field in fields(RankRowArrays):
            assert np.array_equal(getattr(arrays, field.name), getattr(want, field.name))


def test_groups_that_list_the_same_share_a_list() -> None:
    def shared(slots: list[int]) -> list[set[str]]:
        """Which groups have one list together."""
        by_list: dict[int, set[str]] = {}
        lists = list_by_group(slots_of(slots), shared_pool(), GROUPS)
        for group, arrays in lists.items():
            by_list.setdefault(id(arrays), set()).add(group)
        return sorted(by_list.values(), key=len)

    assert shared([1, 0, 1]) == [set(GROUPS)]
    assert shared([2]) == [set(GROUPS)]  # its list is the same in all groups, bias row included
    assert shared([1, 3]) == [
        {"qkv_proj"},
        {"down_proj"},
        {"embed_tokens", "o_proj", "gate_up_proj", "lm_head"},
    ]


class OnCuda(AdapterPool):
    """A pool in host memory that is taken for one on a GPU, where lists are made of it."""


def cuda_like(pool: AdapterPool) -> AdapterPool:
    other = object.__new__(OnCuda)
    other.__dict__.update(pool.__dict__, device=torch.device("cuda"))
    return other


@settings(deadline=None)
@given(first=SLOTS, data=st.data())
def test_static_rank_rows_hold_any_pass(first: list[int], data: st.DataObject) -> None:
    """One buffer for one pass after another, of which the first may have more rows."""
    size = len(first)
    second = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    pool = cuda_like(shared_pool())
    static = StaticRankRows(pool, size, num_adapters=min(size, 6))
    buffer = torch.from_numpy(static.pack(np.zeros(size, np.int32))).clone()
    views = static.batch(buffer, torch.zeros(size, dtype=torch.int32))
    assert views.arrivals is not None
    for slots in (first, second):
        views.arrivals.fill_(9)  # used up by a pass
        packed = static.pack(slots_of(slots))
        assert packed.dtype == np.int32
        assert packed.shape == buffer.shape
        buffer.copy_(torch.from_numpy(packed))
        assert list(views.rank_rows) == BODY
        for group, rank_rows in views.rank_rows.items():
            want = list_rank_rows(slots_of(slots), partial(pool.tables.slot_rows, group))
            assert_same_lists(rank_rows, want)
            assert rank_rows.width == pool.tables.width
            assert len(rank_rows.rows) >= MIN_ROOM
        assert views.arrivals.tolist() == [0] * pool.num_layers
        lists = list_by_group(slots_of(slots), pool, BODY)
        assert views.counts is not None
        assert views.counts.tolist() == values_by_layer(slots_of(slots), lists, pool)[1].tolist()


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 300])
def test_static_rank_rows_have_room_for_the_longest_lists(num_tokens: int) -> None:
    """Every row another slot, each of which lists as much as it can."""
    pool = filled_pool({slot: random_adapter(same_rank(9), slot) for slot in range(1, 6)})
    pool.tables.width = 9
    slots = slots_of([1 + token % 5 for token in range(num_tokens)])
    pool = cuda_like(pool)
    static = StaticRankRows(pool, num_tokens, min(num_tokens, 5))
    views = static.batch(torch.from_numpy(static.pack(slots)), torch.from_numpy(slots))
    for rank_rows in views.rank_rows.values():
        assert rank_rows.count.tolist() == [9 * min(num_tokens, 5)]
        assert len(rank_rows.rows) >= 9 * min(num_tokens, 5)


def test_static_rank_rows_have_room_for_what_the_pool_holds() -> None:
    """A pass never lists more of it, unless blends list the same rows twice."""
    pool = filled_pool({slot: random_adapter(same_rank(4), slot) for slot in (1, 2, 3)})
    pool.write_blend(Slot(3), [(Slot(1), 4, 0.5), (Slot(2), 4, 0.5)])
    assert pool.tables.most_listed(np.array([0, 1, 2, 3])) == 16
    pool = cuda_like(pool)
    pool.num_rows = 300
    assert static_room(pool) == 300
    static = StaticRankRows(pool, num_tokens=300, num_adapters=300)
    views = static.batch(torch.from_numpy(static.pack(slots_of([1, 2] * 150))), torch.zeros(300))
    assert {len(rank_rows.rows) for rank_rows in views.rank_rows.values()} == {300}
    assert pool.tables.most_listed(np.array([0, 1, 2])) == 8
    pool.num_rows = 2
    assert static_room(pool) == MIN_ROOM


def test_static_rank_rows_on_the_cpu_know_the_slots_alone() -> None:
    static, slots = StaticRankRows(shared_pool(), 3, 3), torch.tensor([1, 0, 2], dtype=torch.int32)
    batch = static.batch(torch.from_numpy(static.pack(slots.numpy())), slots)
    assert batch.slots is slots
    assert not batch.rank_rows


def test_the_fullest_batch_on_the_cpu_has_the_slots() -> None:
    batch = full_lora_batch(slots_of([1, 2]), shared_pool(), BODY)
    assert batch.slots.tolist() == [1, 2]
    assert not batch.rank_rows


@pytest.mark.gpu
def test_batches_on_cuda_have_the_lists() -> None:
    pool, slots = shared_pool("cuda"), slots_of([6, 0, 3, 2, 2, 4])
    batch = build_lora_batch(slots, pool, BODY)
    assert batch is not None
    assert list(batch.rank_rows) == BODY
    for group, rank_rows in batch.rank_rows.items():
        assert_same_lists(rank_rows, list_rank_rows(slots, partial(pool.tables.slot_rows, group)))
        assert rank_rows.rows.is_cuda
        assert len(rank_rows.rows) >= MIN_ROOM
        assert rank_rows.width == pool.tables.width
    assert batch.arrivals is not None
    assert batch.arrivals.tolist() == [0] * pool.num_layers
    assert batch.counts is not None
    lists = list_by_group(slots, pool, BODY)
    assert batch.counts.tolist() == values_by_layer(slots, lists, pool)[1].tolist()
    assert batch.rank_rows["embed_tokens"] is batch.rank_rows["gate_up_proj"]
    few = build_lora_batch(slots_of([3]), pool, BODY)
    assert few is not None
    assert list(few.rank_rows) == ["qkv_proj", "down_proj"]


@pytest.mark.gpu
def test_the_fullest_batch_lists_all_that_slots_can() -> None:
    pool, slots = shared_pool("cuda"), slots_of([1, 2, 0, 2])
    batch = full_lora_batch(slots, pool, BODY)
    assert list(batch.rank_rows) == BODY
    for rank_rows in batch.rank_rows.values():
        assert rank_rows.count.tolist() == [2 * pool.tables.width]
        owned = (rank_rows.last - rank_rows.first).tolist()
        assert owned == [pool.tables.width, pool.tables.width, 0, pool.tables.width]


def test_cached_builds_once_for_each_key() -> None:
    batch = build_lora_batch(slots_of([1, 1]), shared_pool(), BODY)
    assert batch is not None
    built: list[str] = []

    def build(name: str) -> str | None:
        built.append(name)
        return None if name == "none" else name

    for _ in range(3):
        assert batch.cached("a", partial(build, "a")) == "a"
        assert batch.cached("none", partial(build, "none")) is None
    assert built == ["a", "none"]
    other = replace(batch, _cache={})
    assert other.cached("a", partial(build, "a")) == "a"
    assert built == ["a", "none", "a"]


@given(SLOTS)
def test_layers_that_no_adapter_changes_count_nothing(slots: list[int]) -> None:
    """And in all others, all that the group lists."""
    pool = shared_pool()
    lists = list_by_group(slots_of(slots), pool, BODY)
    arrivals, counts = values_by_layer(slots_of(slots), lists, pool)
    assert not arrivals.any()
    for spec in SPECS:
        for index in range(spec.num_layers):
            layer = pool.layer(spec.name, index)
            listed = sum(pool.tables.num_listed(np.unique(slots_of(slots)), spec.name).tolist())
            is_changed = spec.name in BODY and any(layer.ranks[slot] for slot in slots)
            assert counts[layer.number] == (listed if is_changed else 0)
