"""Property tests: lists of rank rows, and the kernels on whatever shapes hypothesis thinks of."""

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakeet.kernels.delta import Delta
from lorakeet.kernels.lora_expand import sgemm_lora_b
from lorakeet.kernels.lora_linear import lora_linear
from lorakeet.kernels.lora_shrink import sgemm_lora_a
from lorakeet.kernels.rank_rows import (
    MIN_ROOM,
    RankRowArrays,
    SlotRows,
    list_rank_rows,
    pack,
    packed_size,
    unpack,
)
from support.lora_cases import lora_case

SLOTS = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def slot_rows(slot: int, num_rows: int) -> SlotRows:
    """Rows that tell of which slot they are; every second slot has magnitudes."""
    rows = 100 * slot + np.arange(num_rows, dtype=np.int32)
    scales, offsets = (rows / 7).astype(np.float32), (rows / -3).astype(np.float32)
    return SlotRows(rows, scales, offsets, 100 * slot + 99 if slot % 2 else -1)


def lists() -> st.SearchStrategy[tuple[list[int], list[int]]]:
    """The slot of each token, and how many rows slots 1 … 5 list."""
    return st.tuples(SLOTS, st.lists(st.integers(0, 9), min_size=5, max_size=5))


def list_case(case: tuple[list[int], list[int]]) -> tuple[RankRowArrays, dict[int, SlotRows]]:
    slots, counts = case
    known = {slot: slot_rows(slot, count) for slot, count in enumerate(counts, start=1)}
    return list_rank_rows(np.array(slots, np.int32), known.__getitem__), known


@given(lists())
def test_each_token_owns_its_slots_rows(case: tuple[list[int], list[int]]) -> None:
    slots, (arrays, known) = case[0], list_case(case)
    for token, slot in enumerate(slots):
        own = slice(arrays.first[token], arrays.last[token])
        if slot == 0:
            assert own.start == own.stop
            assert arrays.magnitudes[token] == -1
            continue
        assert 0 <= own.start <= own.stop <= len(arrays.rows)
        assert arrays.rows[own].tolist() == known[slot].rows.tolist()
        assert arrays.scales[own].tolist() == known[slot].scales.tolist()
        assert arrays.offsets[own].tolist() == known[slot].offsets.tolist()
        assert arrays.magnitudes[token] == known[slot].magnitude


@given(lists())
def test_each_slot_is_listed_once_and_tokens_come_by_slot(
    case: tuple[list[int], list[int]],
) -> None:
    slots, (arrays, known) = case[0], list_case(case)
    assert len(arrays.rows) == sum(len(known[slot].rows) for slot in set(slots) - {0})
    assert arrays.order.tolist() == sorted(range(len(slots)), key=slots.__getitem__)
    # ranges follow that order: tiles of tokens share rows with their neighbours alone
    owners = [token for token in arrays.order if arrays.first[token] < arrays.last[token]]
    assert np.all(np.diff(arrays.first[owners]) >= 0)


@given(case=lists(), spare=st.integers(0, 40), width=st.integers(1, 99))
def test_unpack_finds_what_was_packed(
    case: tuple[list[int], list[int]], spare: int, width: int
) -> None:
    arrays, _ = list_case(case)
    num_tokens, num_rows = len(case[0]), len(arrays.rows)
    room = num_rows + spare
    values = torch.from_numpy(pack(arrays, room))
    assert values.dtype == torch.int32
    assert len(values) == packed_size(num_tokens, room)
    found = unpack(values, num_tokens, room, width)
    assert found.width == width
    assert found.count.tolist() == [num_rows]
    by_token = ("order", "first", "last", "magnitudes")
    for field in fields(RankRowArrays):
        tensor, array = getattr(found, field.name), getattr(arrays, field.name)
        assert len(tensor) == (num_tokens if field.name in by_token else room)
        assert np.array_equal(tensor[: len(array)].numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    # views: what is written to the buffer later is seen, and starts at whole 16 bytes
    views = [getattr(found, field.name) for field in fields(RankRowArrays)]
    assert not any((view.data_ptr() - values.data_ptr()) % 16 for view in [*views, found.count])
    assert packed_size(num_tokens, room) * 4 % 16 == 0
    values.fill_(7)
    assert all(bool((view.view(torch.int32) == 7).all()) for view in [*views, found.count])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_kernels_equal_their_references(
    device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4), label="ranks")
    size = st.integers(1, 40)
    q_size, kv_size = data.draw(size, label="q_size"), data.draw(size, label="kv_size")
    case = lora_case(
        data.draw(st.lists(st.integers(0, len(ranks)), min_size=1, max_size=12), label="slots"),
        ranks,
        input_size=data.draw(st.integers(1, 300), label="input_size"),
        slice_sizes=(q_size, kv_size, kv_size),
        room=MIN_ROOM + data.draw(st.integers(0, 9), label="room"),
        plain=data.draw(st.booleans(), label="plain"),
        seed=data.draw(st.integers(0, 9), label="seed"),
        device=device,
        dtype=dtype,
    )
    rtol, atol = (1e-5, 2e-5) if dtype == torch.float32 else (2**-7, 2**-7)
    y = case.y.clone()
    h = sgemm_lora_a(case.x, case.a, case.rank_rows, case.counters)
    sgemm_lora_b(y, Delta(h, case.b, case.rank_rows), case.slice_sizes)
    torch.testing.assert_close(y.double(), case.exact(), rtol=rtol, atol=atol)
    y = lora_linear(
        case.x,
        case.weight,
        case.bias,
        case.a,
        case.b,
        case.rank_rows,
        case.slice_sizes,
        case.arrivals,
        case.counters,
    )
    y = y.double().sum(0) if y.dim() == 3 else y.double()
    torch.testing.assert_close(y, case.exact_linear(), rtol=rtol, atol=atol)
