"""The adapters on the device: a page table over rank rows.

An adapter owns as many rows as its rank, anywhere in the pool; the row table lists them by slot:

    y = y_base + Σ_j h_j B[row_j],   h_j = scales[slot, j] (A[row_j] x) + offsets[slot, j]

over the first ranks[layer, slot] entries of the slot's list. Biases are one more row, the first in
the list: its A is zero and its offset 1, so that B is what is added. DoRA's magnitudes are one more
row too, `magnitude_rows[slot]`, outside the list: y_base is first multiplied by 1 + B of that row.

Order of streams on CUDA. The caller's current stream, on which the model runs, only reads the pool.
Everything that changes its tensors runs on the pool's own copy stream, launched and waited for by
the pool's own thread: the caller has passes to launch. It takes the copies one after the other, so
they are made in call order (rows that change hands twice end up with their last tenant), and only
one has temporary memory on the device at a time. A copy waits for those passes, launched before the
call, that read its rows for an earlier tenant, and for no others; a pass launched later must not
read them. A pass may use a slot once its write is done; passes on other slots run on beside the
copy, since they read other rows.

The tables, and which passes read which rows, are plain host state from which passes are built. They
change in the caller's thread, at the call: ahead of the weights, which is why a slot waits for its
write. On the CPU there is no thread, and a copy is complete when the call returns.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.lora.adapter import Adapter, GroupSpec, GroupWeights, Slot
from lorakeet.lora.row_readers import RowReaders
from lorakeet.lora.row_tables import RowTables
from lorakeet.lora.row_writer import RowWriter
from lorakeet.lora.staging import Staging
from lorakeet.lora.streams import SideStream
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
    ranks: NDArray[np.int32]  # (num_slots,); 0: the slot leaves this layer alone
    tables: RowTables  # the first ranks[slot] rows that it lists count
    slice_sizes: tuple[int, ...]
    group: str
    number: int  # among all layers of the pool


class AdapterPool:
    """The pool's tensors. Slot 0 is "no adapter". Rows that nobody owns hold anything, even NaN.

    All methods are called from one thread; only `write` has work done in another, which `close`
    ends.
    """

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

        `table_width`: the most rows that a slot can list; see `row_tables.table_width`.
        """
        self.specs = {spec.name: spec for spec in specs}
        self.num_slots = num_slots
        self.num_rows = num_rows
        self.device = torch.device(device)
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Tensor] = {}
        for name, spec in self.specs.items():
            shape = (spec.num_layers, len(spec.slice_sizes), num_rows, spec.input_size)
            self._a[name] = torch.empty(shape, dtype=dtype, device=device)
            shape_b = (spec.num_layers, num_rows, spec.output_size)
            self._b[name] = torch.empty(shape_b, dtype=dtype, device=device)
        self.tables = RowTables(specs, num_slots, table_width)
        staging = Staging(self.device)
        self.vocabularies = VocabularyStore(dtype, self.device, staging)
        numbers = np.cumsum([0, *(spec.num_layers for spec in self.specs.values())]).tolist()
        self._first_numbers = dict(zip(self.specs, numbers, strict=False))
        self._copies = SideStream(self.device)
        self._writer = RowWriter(self._a, self._b, staging, self._copies)
        self._readers = RowReaders[torch.cuda.Event](num_slots, num_rows)

    def layer(self, group: str, index: int) -> LayerWeights:
        """Views of layer `index` of a group."""
        return LayerWeights(
            a=self._a[group][index],
            b=self._b[group][index],
            ranks=self.tables.ranks[group][index],
            tables=self.tables,
            slice_sizes=self.specs[group].slice_sizes,
            group=group,
            number=self._first_numbers[group] + index,
        )

    @property
    def num_layers(self) -> int:
        """Of all groups."""
        return sum(spec.num_layers for spec in self.specs.values())

    @torch.inference_mode()
    def write(self, slot: Slot, rows: Sequence[int], adapter: Adapter) -> Future[None]:
        """Clear a slot, then start to copy an adapter into it and into `adapter.num_rows` rows.

        Returns at once; the future is done when the copy is complete, on the CPU that is now. Until
        then the adapter is held, and must not change. Slot and rows may be given to another adapter
        even before: copies are made in call order. Where the adapter has nothing for one of its
        rows, in any layer, that row is zeros.
        Raises ValueError for a slot, rows or an adapter that do not fit the pool, and RuntimeError
        when there is no memory for a vocabulary. The future raises what goes wrong in the copy,
        RuntimeError for example when memory is short: then no pass may use the slot, and the caller
        clears it.
        """
        self._check(slot, rows, adapter)
        self.clear(slot)
        with self._copies.use():
            fill_vocabulary = self.vocabularies.write(slot, adapter.vocabulary)
        readers = self._readers.of(rows)  # of passes so far: those to come do not read these rows
        self.tables.set(slot, rows, adapter)
        self._readers.set_slot(slot, rows)
        return self._writer.start(rows, adapter, readers, fill_vocabulary)

    @torch.inference_mode()
    def write_blend(self, slot: Slot, parts: Sequence[tuple[Slot, int, float]]) -> None:
        """Clear a slot, then let it list the rows of other slots' adapters: no weight is copied.

        `parts`: slot, number of rows and weight of each adapter; the slot's delta is the weighted
        sum of theirs. They must stay where they are while it is used. This is complete at once,
        also while a part is still being copied: a pass may use the slot once the parts' own writes
        are done too. Raises ValueError for slots that are not there, and more rows than a slot can
        list.
        """
        for part_slot, _, _ in parts:
            self._check_slot(part_slot)
        if (num_rows := sum(count for _, count, _ in parts)) > self.tables.width:
            raise ValueError(f"a blend of {num_rows} rows, limit {self.tables.width}")
        self.clear(slot)
        self.tables.blend(slot, parts)
        rows = [row for part_slot, _, _ in parts for row in self._readers.rows_of(part_slot)]
        self._readers.set_slot(slot, rows)

    def close(self) -> None:
        """End the pool's thread: after the copy that it is at, those behind it are dropped. Nothing
        can be written any more."""
        self._writer.close()

    @torch.inference_mode()
    def clear(self, slot: Slot) -> None:
        """Take the slot's rows from it. No weight is touched: without ranks none can be read.

        Raises ValueError for slot 0 and for a slot that the pool does not have.
        """
        self._check_slot(slot)
        self.tables.clear(slot)
        self._readers.set_slot(slot, [])
        self.clear_vocabulary(slot)

    def clear_vocabulary(self, slot: Slot) -> None:
        """Free what the slot holds beside its rows: it is not to be used again before a write."""
        if self.vocabularies.has(slot):
            self._copies.wait_for_current()  # a pass may read it, and the next copy get its memory
            self.vocabularies.clear(slot)

    def launched(self, slots: NDArray[np.int32]) -> None:
        """A pass of tokens in these slots was launched on the current stream: their rows change
        after it."""
        if self.device.type == "cuda":
            event = torch.cuda.current_stream(self.device).record_event()
            self._readers.launched(event, slots.tolist())

    def _check_slot(self, slot: Slot) -> None:
        if not 0 < slot < self.num_slots:
            raise ValueError(f"slot {slot} is not in 1 … {self.num_slots - 1}")

    def _check(self, slot: Slot, rows: Sequence[int], adapter: Adapter) -> None:
        self._check_slot(slot)
        listed = adapter.rank + adapter.has_bias
        if len(rows) != adapter.num_rows or listed > self.tables.width:
            raise ValueError(
                f"{len(rows)} rows for an adapter of {adapter.num_rows}; "
                f"{listed} are listed, limit {self.tables.width}"
            )
        if len(set(rows)) != len(rows) or any(not 0 <= row < self.num_rows for row in rows):
            raise ValueError(f"rows {list(rows)} are not distinct rows of {self.num_rows}")
        for name, weights in adapter.groups.items():
            if name not in self.specs:
                raise ValueError(f"the pool has no group {name!r}")
            _check_shapes(self.specs[name], weights, adapter.rank)


def _check_shapes(spec: GroupSpec, weights: GroupWeights, max_rank: int) -> None:
    rank, num_layers = weights.a.shape[2], len(weights.layers)
    shape_a = (num_layers, len(spec.slice_sizes), rank, spec.input_size)
    shape_b = (num_layers, rank, spec.output_size)
    if weights.a.shape != shape_a or weights.b.shape != shape_b:
        found = f"{tuple(weights.a.shape)} and {tuple(weights.b.shape)}"
        raise ValueError(f"{spec.name}: shapes {found} are not {shape_a} and {shape_b}")
    for values in (weights.bias, weights.magnitude):
        if values is not None and values.shape != (spec.num_layers, spec.output_size):
            raise ValueError(f"{spec.name}: the shape of a vector is {tuple(values.shape)}")
    if rank > max_rank or len(weights.ranks) != spec.num_layers or max(weights.ranks) > rank:
        raise ValueError(f"{spec.name}: ranks {weights.ranks} in {rank} rows of {max_rank}")
