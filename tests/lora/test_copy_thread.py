"""Copies to the pool in a thread of its own, as on CUDA, here in host memory."""

import dataclasses
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, Slot, TokenRows, Vocabulary
from lorakeet.lora.pool import AdapterPool
from lorakeet.lora.row_writer import RowWriter
from lorakeet.lora.staging import Staging
from lorakeet.lora.streams import side_thread
from support.copies import CopyThreads, copy_threads_alive
from support.pools import SPECS, poisoned_pool, random_adapter, same_rank
from support.servers import wait_until

FIRST, SECOND = (random_adapter(same_rank(3), seed) for seed in (1, 2))


def holds(pool: AdapterPool, rows: range | list[int], adapter: Adapter) -> bool:
    """The rows are the adapter's, in all groups and layers."""
    return all(
        torch.equal(pool.layer(spec.name, layer).a[:, rows], adapter.groups[spec.name].a[layer])
        and torch.equal(pool.layer(spec.name, layer).b[rows], adapter.groups[spec.name].b[layer])
        for spec in SPECS
        for layer in range(spec.num_layers)
    )


def is_poisoned(pool: AdapterPool, rows: range) -> bool:
    layers = [pool.layer(spec.name, layer) for spec in SPECS for layer in range(spec.num_layers)]
    return all(bool(one.a[:, rows].isnan().all() and one.b[rows].isnan().all()) for one in layers)


def test_a_write_returns_while_its_copy_waits(copy_threads: CopyThreads) -> None:
    """Tables are set at once, weights are not touched yet, and nothing has been waited for."""
    pool = poisoned_pool(4, 9)
    with copy_threads.held():
        write = pool.write(Slot(2), range(3, 6), FIRST)
        assert not write.done()
        assert pool.tables.rows[2, :3].tolist() == [3, 4, 5]
        assert pool.layer("o_proj", 0).ranks.tolist() == [0, 0, 3, 0]
        assert is_poisoned(pool, range(9))
        pool.write_blend(Slot(3), [(Slot(2), 3, 0.5)])
        assert pool.tables.rows[3, :3].tolist() == [3, 4, 5]
        with pytest.raises(TimeoutError):
            write.result(timeout=0.01)
    write.result()
    assert write.done()
    assert holds(pool, range(3, 6), FIRST)
    assert is_poisoned(pool, range(3))


def test_copies_are_made_in_the_order_of_calls(copy_threads: CopyThreads) -> None:
    """Rows go from slot to slot while nothing has been copied yet: the last tenant's stay."""
    pool, random = poisoned_pool(4, 9), Random(1)
    adapters = [random_adapter(same_rank(3), seed) for seed in range(12)]
    order = list(range(9))
    with copy_threads.held():
        for start in range(0, 12, 3):
            random.shuffle(order)
            for slot in (1, 2, 3):
                pool.clear(Slot(slot))
            for slot in (1, 2, 3):
                rows = order[3 * slot - 3 : 3 * slot]
                write = pool.write(Slot(slot), rows, adapters[start + slot - 1])
    write.result()
    for slot in (1, 2, 3):
        assert holds(pool, order[3 * slot - 3 : 3 * slot], adapters[8 + slot])


def vocabulary_of(value: float) -> Vocabulary:
    rows = torch.full((4, 20), value)
    return Vocabulary(50, TokenRows(torch.arange(4), rows), None)


def test_a_vocabulary_has_its_room_before_its_rows(copy_threads: CopyThreads) -> None:
    pool = poisoned_pool(3, 6)
    old, new = (dataclasses.replace(FIRST, vocabulary=vocabulary_of(value)) for value in (1.0, 2.0))
    slots = np.array([0, 1], np.int32)
    with copy_threads.held():
        pool.write(Slot(1), range(3), old)
        size = pool.vocabularies.num_bytes
        assert size == 4 * 8 + 4 * 20 * 4
        pool.clear(Slot(1))
        assert pool.vocabularies.for_embedding(slots) is None
        write = pool.write(Slot(1), range(3, 6), new)
        assert pool.vocabularies.num_bytes == size
        batch = pool.vocabularies.for_embedding(slots)
        assert batch is not None
    write.result()
    y = torch.zeros(2, 20)
    batch.embed(y, torch.tensor([3, 3]))
    assert y.tolist() == [[0] * 20, [2] * 20]


class FailingStaging:
    """The third copy to the device fails; those before it are watched."""

    def __init__(self) -> None:
        self.staged: list[weakref.ref[Tensor]] = []

    def to_device(self, values: Tensor) -> Tensor:
        if len(self.staged) == 2:
            raise RuntimeError("CUDA out of memory")
        copy = values.clone()
        self.staged.append(weakref.ref(copy))
        return copy


@pytest.mark.parametrize("in_thread", [True, False])
def test_what_goes_wrong_in_a_copy_is_told_by_its_write(
    in_thread: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """And nobody keeps what was on its way, also while the error is kept."""
    if in_thread:
        request.getfixturevalue("copy_threads")
    pool = poisoned_pool(3, 9)
    failing = FailingStaging()
    adapter = dataclasses.replace(FIRST, vocabulary=vocabulary_of(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "to_device", lambda self, values: failing.to_device(values))
        write = pool.write(Slot(1), range(3), adapter)
        batch = pool.vocabularies.for_embedding(np.array([1], np.int32))
        assert batch is not None
        room = weakref.ref(batch.runs[0].vocabulary)
        del batch
        for told in (write.result, write.result):
            with pytest.raises(RuntimeError, match="out of memory"):
                told()
    assert [one() for one in failing.staged] == [None, None]
    pool.clear(Slot(1))
    assert pool.vocabularies.num_bytes == 0
    if in_thread:
        wait_until(lambda: room() is None, "its room is free")
    assert not pool.tables.rows.any()
    again = pool.write(Slot(1), range(3), FIRST)
    again.result()
    assert again.done()
    assert holds(pool, range(3), FIRST)


def test_a_pool_that_is_closed_ends_its_thread_and_drops_what_waits(
    copy_threads: CopyThreads,
) -> None:
    pool = poisoned_pool(3, 9)
    pool.write(Slot(2), range(6, 9), SECOND).result()
    assert len(copy_threads_alive()) == 1
    with copy_threads.held():
        writes = [pool.write(Slot(1), range(3), FIRST), pool.write(Slot(2), range(3, 6), SECOND)]
        closing = threading.Thread(target=pool.close)
        closing.start()
        while not all(write.cancelled() for write in writes):
            assert closing.is_alive()
    closing.join(30)
    assert not closing.is_alive()
    assert copy_threads_alive() == []
    assert is_poisoned(pool, range(6))
    pool.close()  # again


def test_a_pool_that_nobody_holds_ends_its_thread(copy_threads: CopyThreads) -> None:
    pool = poisoned_pool(3, 9)
    pool.write(Slot(2), range(6, 9), SECOND).result()
    (thread,) = [one for one in threading.enumerate() if one.name in copy_threads_alive()]
    copy_threads.forget()
    del pool
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_jobs_of_a_side_thread_come_one_at_a_time_and_in_order(kind: str) -> None:
    """On the CPU at once, in the caller's thread; on CUDA in another."""
    seen: list[int] = []

    def job(number: int) -> threading.Thread:
        time.sleep(0.002 * (number == 0))
        seen.append(number)
        return threading.current_thread()

    with side_thread(torch.device(kind), "adapter-copies") as thread:
        futures = [thread.submit(job, number) for number in range(20)]
        failed = thread.submit(lambda: 1 / 0)
        assert (kind == "cuda") or (seen == list(range(20)) and failed.done())
    assert seen == list(range(20))
    (worker,) = {future.result() for future in futures}
    assert (worker is threading.current_thread()) == (kind == "cpu")
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_rows_are_zeros_where_their_last_tenant_has_nothing() -> None:
    """Whoever had them before, and however often that was zeros already."""
    pool = poisoned_pool(4, 9)
    small, full = qkv_alone(FIRST), SECOND
    with counted_groups(pool) as written:
        pool.write(Slot(1), [0, 1, 2], small)
        pool.write(Slot(2), [3, 4, 5], small)
        assert is_zero(pool, range(6))
        assert written == [spec.name for spec in SPECS] * 2
        written.clear()
        pool.write(Slot(1), [2, 3, 0], small)  # zeros already
        assert written == ["qkv_proj"]
        pool.write(Slot(3), [3, 4, 8], full)
        pool.write(Slot(3), [2, 4, 3], small)  # one row of zeros, two of weights
    assert is_zero(pool, range(6))
    assert not is_zero(pool, range(8, 9))


def test_rows_are_zeros_after_a_copy_that_failed_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, small = poisoned_pool(3, 3), qkv_alone(FIRST)
    pool.write(Slot(1), range(3), small)
    write_group = RowWriter._write_group

    def fail_after(self: RowWriter, name: str, *args: Any) -> None:
        write_group(self, name, *args)
        if name == "gate_up_proj":
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(RowWriter, "_write_group", fail_after)
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.write(Slot(1), range(3), SECOND).result()
    assert not is_zero(pool, range(3))
    pool.write(Slot(1), range(3), small).result()
    assert is_zero(pool, range(3))


def qkv_alone(adapter: Adapter) -> Adapter:
    return dataclasses.replace(adapter, groups={"qkv_proj": adapter.groups["qkv_proj"]})


def is_zero(pool: AdapterPool, rows: range) -> bool:
    """In all groups but qkv_proj."""
    layers = [
        pool.layer(spec.name, layer)
        for spec in SPECS
        for layer in range(spec.num_layers)
        if spec.name != "qkv_proj"
    ]
    return not any(bool(one.a[:, rows].any() or one.b[rows].any()) for one in layers)


@contextmanager
def counted_groups(pool: AdapterPool) -> Iterator[list[str]]:
    """The groups that are written meanwhile."""
    written: list[str] = []
    write_group = RowWriter._write_group

    def note(self: RowWriter, name: str, *args: Any) -> None:
        written.append(name)
        write_group(self, name, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowWriter, "_write_group", note)
        yield written
