"""The adapters on the device: a page table over rank rows.

An adapter owns as many rows as its rank, anywhere in the pool; the row table lists them by slot:

    y = y_base + Σ_j h_j B[row_j],   h_j = row_scales[slot, j] (A[row_j] x) + row_offsets[slot, j]

over the first ranks[layer, slot] entries of the slot's list. Biases are one more row, the first in
the list: its A is zero and its offset 1, so that B is what is added. DoRA's magnitudes are one more
row too, `magnitude_rows[slot]`, outside the list: y_base is first multiplied by 1 + B of that row.

Order of streams on CUDA. The caller's current stream, on which the model runs, only reads the pool.
Everything that changes it runs on the pool's own copy stream, in call order, and each change first
waits for the passes launched before it: an earlier tenant's last pass still reads its old rows.
A pass may use a slot once `PoolWrite.done()` has been true, or after `PoolWrite.wait()`; passes on
other slots run on beside the copy, since they read other rows.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.kernels.rank_rows import SlotRows
from lorakeet.lora.adapter import Adapter, GroupSpec, GroupWeights, Slot
from lorakeet.lora.vocabulary import VocabularyStore


def bytes_per_row(specs: Sequence[GroupSpec], dtype: torch.dtype) -> int:
    """Device bytes of one rank row over all groups and layers, on the rank that `specs` are for."""
    values = sum(
        spec.num_layers * (len(spec.slice_sizes) * spec.input_size + spec.output_size)
        for spec in specs
    )
    return values * dtype.itemsize


@dataclass(frozen=True)
class LayerWeights:
    """What one layer of one group reads: views of the pool, valid as long as it lives."""

    a: Tensor  # (slices, num_rows, input_size)
    b: Tensor  # (num_rows, output_size), rank-major
    ranks: Tensor  # (num_slots,) int32; 0: the slot leaves this layer alone
    row_table: Tensor  # (num_slots, R) int32; the first ranks[slot] rows of a slot count
    row_scales: Tensor  # (num_slots, R) float32
    row_offsets: Tensor  # (num_slots, R) float32
    magnitude_rows: Tensor  # (num_slots,) int32; -1: none
    slice_sizes: tuple[int, ...]
    group: str
    number: int  # among all layers of the pool

    @cached_property
    def host_ranks(self) -> NDArray[np.int32]:
        """`ranks` of a pool in host memory, the same memory."""
        return self.ranks.numpy()


@dataclass(frozen=True)
class PoolWrite:
    """A copy under way. It keeps the adapter's host memory alive until it is dropped."""

    adapter: Adapter | None  # None: nothing was copied from the host
    event: torch.cuda.Event | None  # None: done from the start

    def done(self) -> bool:
        """Whether the copy has completed; never blocks."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Let what is launched next on the current stream run after the copy; never blocks."""
        if self.event is not None:
            self.event.wait()


class AdapterPool:
    """The pool's tensors. Slot 0 is "no adapter". Rows that nobody owns hold anything, even NaN."""

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        num_slots: int,
        num_rows: int,
        table_width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`num_slots` counts slot 0, so the slots of adapters are 1 … num_slots - 1.

        `table_width` is R, the most rows that a slot can list: see `table_width`.
        """
        self.specs = {spec.name: spec for spec in specs}
        self.num_slots = num_slots
        self.num_rows = num_rows
        self.table_width = table_width
        self.device = torch.device(device)
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Tensor] = {}
        self._ranks: dict[str, Tensor] = {}
        for name, spec in self.specs.items():
            shape = (spec.num_layers, len(spec.slice_sizes), num_rows, spec.input_size)
            self._a[name] = torch.empty(shape, dtype=dtype, device=device)
            shape_b = (spec.num_layers, num_rows, spec.output_size)
            self._b[name] = torch.empty(shape_b, dtype=dtype, device=device)
            self._ranks[name] = self._zeros(spec.num_layers, num_slots)
        self.row_table = self._zeros(num_slots, table_width)
        self.row_scales = self._zeros(num_slots, table_width, dtype=torch.float32)
        self.row_offsets = self._zeros(num_slots, table_width, dtype=torch.float32)
        self.magnitude_rows = self._zeros(num_slots) - 1
        self.vocabularies = VocabularyStore(dtype, self.device)
        numbers = np.cumsum([0, *(spec.num_layers for spec in self.specs.values())]).tolist()
        self._first_numbers = dict(zip(self.specs, numbers, strict=False))
        self._listed: dict[int, _Listed] = {}  # the tables once more, on the host
        self._copy_stream = _new_stream(self.device)

    def layer(self, group: str, index: int) -> LayerWeights:
        """Views of layer `index` of a group."""
        return LayerWeights(
            a=self._a[group][index],
            b=self._b[group][index],
            ranks=self._ranks[group][index],
            row_table=self.row_table,
            row_scales=self.row_scales,
            row_offsets=self.row_offsets,
            magnitude_rows=self.magnitude_rows,
            slice_sizes=self.specs[group].slice_sizes,
            group=group,
            number=self._first_numbers[group] + index,
        )

    @property
    def num_layers(self) -> int:
        """Of all groups."""
        return sum(spec.num_layers for spec in self.specs.values())

    def touched(self, slots: Sequence[int], groups: Collection[str]) -> list[str]:
        """Those of the groups that any of the slots changes, in any layer."""
        return [
            name
            for name in groups
            if name in self.specs and any(self.num_listed(slot, name) for slot in slots)
        ]

    def num_listed(self, slot: int, group: str) -> int:
        """How many rows a slot lists for a group, in the layer with the most; 0 for slot 0."""
        listed = self._listed.get(slot)
        return 0 if listed is None else listed.counts.get(group, 0)

    def slot_rows(self, group: str, slot: int) -> SlotRows:
        """What a slot lists for a group. Layers that read fewer rows have zeros in the others."""
        listed = self._listed.get(slot, _NOTHING)
        own = slice(0, listed.counts.get(group, 0))
        rows = listed.rows
        magnitude = rows.magnitude if own.stop else -1
        return SlotRows(rows.rows[own], rows.scales[own], rows.offsets[own], magnitude)

    @torch.inference_mode()
    def write(self, slot: Slot, rows: Sequence[int], adapter: Adapter) -> PoolWrite:
        """Clear a slot, then start to copy an adapter into it and into `adapter.num_rows` rows.

        On the CPU it is complete on return. For the copy to be asynchronous on CUDA the adapter
        must lie in pinned memory. The slot's ranks and tables are set after all its weights. Where
        the adapter has nothing for one of its rows, in any layer, that row is zeros.
        Raises ValueError for a slot, rows or an adapter that do not fit the pool.
        """
        self._check(slot, rows, adapter)
        self.clear(slot)
        with self._changes():
            row_ids = self._to_device(torch.tensor(rows, dtype=torch.int64))
            own = _split_rows(row_ids, adapter)
            for name in self.specs:
                self._write_group(name, own, adapter.groups.get(name))
            self._write_tables(slot, own)
            self._listed[slot] = _list_adapter(rows, adapter)
            self.vocabularies.write(slot, adapter.vocabulary)
            for name, weights in adapter.groups.items():
                counts = torch.tensor(_row_counts(weights, adapter.has_bias), dtype=torch.int32)
                self._ranks[name][:, slot] = self._to_device(counts)
            event = self._copy_stream.record_event() if self._copy_stream else None
        return PoolWrite(adapter, event)

    @torch.inference_mode()
    def write_blend(self, slot: Slot, parts: Sequence[tuple[Slot, int, float]]) -> PoolWrite:
        """Clear a slot, then let it list the rows of other slots' adapters: no weight is copied.

        `parts`: slot, number of rows and weight of each adapter; the slot's delta is the weighted
        sum of theirs. They must stay where they are while it is used. Raises ValueError for slots
        that are not there, and more rows than a slot can list.
        """
        for part_slot, _, _ in parts:
            self._check_slot(part_slot)
        if (num_rows := sum(count for _, count, _ in parts)) > self.table_width:
            raise ValueError(f"a blend of {num_rows} rows, limit {self.table_width}")
        self.clear(slot)
        with self._changes():
            start = 0
            for part_slot, count, weight in parts:
                own = slice(start, start + count)
                self.row_table[slot, own] = self.row_table[part_slot, :count]
                self.row_scales[slot, own] = self.row_scales[part_slot, :count] * weight
                self.row_offsets[slot, own] = self.row_offsets[part_slot, :count] * weight
                for ranks in self._ranks.values():
                    there = ranks[:, part_slot]
                    ranks[:, slot] = torch.where(there > 0, there + start, ranks[:, slot])
                start += count
            self._listed[slot] = _list_blend(
                [(self._listed[part], count, weight) for part, count, weight in parts]
            )
            event = self._copy_stream.record_event() if self._copy_stream else None
        return PoolWrite(None, event)

    def _write_group(self, name: str, own: "_OwnRows", weights: GroupWeights | None) -> None:
        a, b = self._a[name], self._b[name]
        num_filled = 0 if weights is None else weights.a.shape[2]
        filled = own.ranks[:num_filled]
        empty = torch.cat([own.ranks[num_filled:], own.bias, own.magnitude])
        a.index_fill_(2, empty, 0)
        b.index_fill_(1, empty, 0)
        if weights is None:
            return
        a.index_copy_(2, filled, self._to_device(weights.a).to(a.dtype))
        b.index_copy_(1, filled, self._to_device(weights.b).to(b.dtype))
        for row, values in ((own.bias, weights.bias), (own.magnitude, weights.magnitude)):
            if values is not None:
                b.index_copy_(1, row, self._to_device(values).to(b.dtype).unsqueeze(1))

    def _write_tables(self, slot: Slot, own: "_OwnRows") -> None:
        listed = torch.cat([own.bias, own.ranks]).to(torch.int32)
        self.row_table[slot, : len(listed)] = listed
        self.row_scales[slot, : len(listed)] = 1
        self.row_offsets[slot, : len(own.bias)] = 1
        if len(own.magnitude):
            self.magnitude_rows[slot] = own.magnitude[0]

    @torch.inference_mode()
    def clear(self, slot: Slot) -> None:
        """Take the slot's rows from it. No weight is touched: without ranks none can be read.

        Raises ValueError for slot 0 and for a slot that the pool does not have.
        """
        self._check_slot(slot)
        with self._changes():
            for ranks in self._ranks.values():
                ranks[:, slot] = 0
            for table in (self.row_table, self.row_scales, self.row_offsets):
                table[slot] = 0
            self.magnitude_rows[slot] = -1
            self._listed.pop(slot, None)
            self.vocabularies.clear(slot)

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Run on the copy stream, after the passes launched so far."""
        if self._copy_stream is None:
            yield
            return
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            yield

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _to_device(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)

    def _check_slot(self, slot: Slot) -> None:
        if not 0 < slot < self.num_slots:
            raise ValueError(f"slot {slot} is not in 1 … {self.num_slots - 1}")

    def _check(self, slot: Slot, rows: Sequence[int], adapter: Adapter) -> None:
        self._check_slot(slot)
        listed = adapter.rank + adapter.has_bias
        if len(rows) != adapter.num_rows or listed > self.table_width:
            raise ValueError(
                f"{len(rows)} rows for an adapter of {adapter.num_rows}; "
                f"{listed} are listed, limit {self.table_width}"
            )
        if len(set(rows)) != len(rows) or any(not 0 <= row < self.num_rows for row in rows):
            raise ValueError(f"rows {list(rows)} are not distinct rows of {self.num_rows}")
        for name, weights in adapter.groups.items():
            if name not in self.specs:
                raise ValueError(f"the pool has no group {name!r}")
            _check_shapes(self.specs[name], weights, adapter.rank)


def table_width(max_rank: int) -> int:
    """Entries of a row table that can list any one adapter: its rank rows, and that of its biases.

    Rounded up to whole 16-byte loads of the table.
    """
    return -(-(max_rank + 1) // 4) * 4


@dataclass(frozen=True)
class _OwnRows:
    """The rows of one adapter, int64; empty where it has none."""

    ranks: Tensor
    bias: Tensor
    magnitude: Tensor


def _split_rows(rows: Tensor, adapter: Adapter) -> _OwnRows:
    sizes = [adapter.rank, int(adapter.has_bias), int(adapter.has_magnitude)]
    return _OwnRows(*torch.split(rows, sizes))


def _row_counts(weights: GroupWeights, has_bias: bool) -> list[int]:
    """How many rows of the adapter's list each layer reads: the row of biases is the first."""
    return [rank + has_bias if rank or weights.bias is not None else 0 for rank in weights.ranks]


@dataclass(frozen=True)
class _Listed:
    """What a slot lists, on the host."""

    rows: SlotRows
    counts: Mapping[str, int]  # by group: how many of the rows its layers read at most


_NOTHING = _Listed(
    SlotRows(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32), -1), {}
)


def _list_adapter(rows: Sequence[int], adapter: Adapter) -> _Listed:
    own = _split_rows(torch.tensor(rows, dtype=torch.int64), adapter)
    ranks, bias, magnitude = own.ranks.tolist(), own.bias.tolist(), own.magnitude.tolist()
    listed = np.array([*bias, *ranks], np.int32)
    offsets = np.zeros(len(listed), np.float32)
    offsets[: len(bias)] = 1
    counts = {
        name: max(_row_counts(weights, adapter.has_bias))
        for name, weights in adapter.groups.items()
    }
    scales = np.ones(len(listed), np.float32)
    return _Listed(SlotRows(listed, scales, offsets, magnitude[0] if magnitude else -1), counts)


def _list_blend(parts: Sequence[tuple[_Listed, int, float]]) -> _Listed:
    """`parts`: what a slot lists, how many rows of it, and its weight."""
    starts = np.cumsum([0, *(count for _, count, _ in parts)]).tolist()
    counts: dict[str, int] = {}
    for (listed, _, _), start in zip(parts, starts[:-1], strict=True):
        for group, count in listed.counts.items():
            if count:
                counts[group] = start + count
    rows = SlotRows(
        np.concatenate([listed.rows.rows[:count] for listed, count, _ in parts]),
        np.concatenate([listed.rows.scales[:count] * np.float32(w) for listed, count, w in parts]),
        np.concatenate([listed.rows.offsets[:count] * np.float32(w) for listed, count, w in parts]),
        -1,
    )
    return _Listed(rows, counts)


def _check_shapes(spec: GroupSpec, weights: GroupWeights, max_rank: int) -> None:
    rank = weights.a.shape[2]
    shape_a = (spec.num_layers, len(spec.slice_sizes), rank, spec.input_size)
    shape_b = (spec.num_layers, rank, spec.output_size)
    if weights.a.shape != shape_a or weights.b.shape != shape_b:
        found = f"{tuple(weights.a.shape)} and {tuple(weights.b.shape)}"
        raise ValueError(f"{spec.name}: shapes {found} are not {shape_a} and {shape_b}")
    for values in (weights.bias, weights.magnitude):
        if values is not None and values.shape != (spec.num_layers, spec.output_size):
            raise ValueError(f"{spec.name}: the shape of a vector is {tuple(values.shape)}")
    if rank > max_rank or len(weights.ranks) != spec.num_layers or max(weights.ranks) > rank:
        raise ValueError(f"{spec.name}: ranks {weights.ranks} in {rank} rows of {max_rank}")


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
