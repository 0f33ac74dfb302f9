"""The adapters on the device: a page table over rank rows.

An adapter owns as many rows as its rank, anywhere in the pool; the row table lists them by slot.

Order of streams on CUDA. The caller's current stream, on which the model runs, only reads the pool.
Everything that changes it runs on the pool's own copy stream, in call order, and each change first
waits for the passes launched before it: an earlier tenant's last pass still reads its old rows.
A pass may use a slot once `PoolWrite.done()` has been true, or after `PoolWrite.wait()`; passes on
other slots run on beside the copy, since they read other rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.lora.adapter import Adapter, GroupSpec, GroupWeights, Slot


def bytes_per_row(specs: Sequence[GroupSpec], dtype: torch.dtype) -> int:
    """Device bytes of one rank row over all groups and layers."""
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
    row_table: Tensor  # (num_slots, max_rank) int32; the first ranks[slot] rows of a slot count
    slice_sizes: tuple[int, ...]

    @cached_property
    def host_ranks(self) -> NDArray[np.int32]:
        """`ranks` of a pool in host memory, the same memory."""
        return self.ranks.numpy()


@dataclass(frozen=True)
class PoolWrite:
    """A copy under way. It keeps the adapter's host memory alive until it is dropped."""

    adapter: Adapter
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
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`num_slots` counts slot 0, so the slots of adapters are 1 … num_slots - 1."""
        self.specs = {spec.name: spec for spec in specs}
        self.num_slots = num_slots
        self.num_rows = num_rows
        self.max_rank = max_rank
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
        self.row_table = self._zeros(num_slots, max_rank)
        self._copy_stream = _new_stream(self.device)

    def layer(self, group: str, index: int) -> LayerWeights:
        """Views of layer `index` of a group."""
        return LayerWeights(
            a=self._a[group][index],
            b=self._b[group][index],
            ranks=self._ranks[group][index],
            row_table=self.row_table,
            slice_sizes=self.specs[group].slice_sizes,
        )

    @torch.inference_mode()
    def write(self, slot: Slot, rows: Sequence[int], adapter: Adapter) -> PoolWrite:
        """Clear a slot, then start to copy an adapter into it and into `adapter.rank` rows.

        On the CPU it is complete on return. For the copy to be asynchronous on CUDA the adapter
        must lie in pinned memory. The slot's ranks and row table are set after all its weights.
        Raises ValueError for a slot, rows or an adapter that do not fit the pool.
        """
        self._check(slot, rows, adapter)
        self.clear(slot)
        with self._changes():
            row_ids = self._to_device(torch.tensor(rows, dtype=torch.int64))
            for name, weights in adapter.groups.items():
                own_rows = row_ids[: weights.a.shape[2]]
                _copy_rows(self._a[name], 2, own_rows, self._to_device(weights.a))
                _copy_rows(self._b[name], 1, own_rows, self._to_device(weights.b))
            self.row_table[slot, : len(rows)] = row_ids.to(torch.int32)
            for name, weights in adapter.groups.items():
                ranks = torch.tensor(weights.ranks, dtype=torch.int32)
                self._ranks[name][:, slot] = self._to_device(ranks)
            event = self._copy_stream.record_event() if self._copy_stream else None
        return PoolWrite(adapter, event)

    @torch.inference_mode()
    def clear(self, slot: Slot) -> None:
        """Take the slot's rows from it. No weight is touched: without ranks none can be read.

        Raises ValueError for slot 0 and for a slot that the pool does not have.
        """
        self._check_slot(slot)
        with self._changes():
            for ranks in self._ranks.values():
                ranks[:, slot] = 0
            self.row_table[slot] = 0

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Run on the copy stream, after the passes launched so far."""
        if self._copy_stream is None:
            yield
            return
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            yield

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _to_device(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)

    def _check_slot(self, slot: Slot) -> None:
        if not 0 < slot < self.num_slots:
            raise ValueError(f"slot {slot} is not in 1 … {self.num_slots - 1}")

    def _check(self, slot: Slot, rows: Sequence[int], adapter: Adapter) -> None:
        self._check_slot(slot)
        if len(rows) != adapter.rank or adapter.rank > self.max_rank:
            raise ValueError(
                f"{len(rows)} rows for an adapter of rank {adapter.rank}, limit {self.max_rank}"
            )
        if len(set(rows)) != len(rows) or any(not 0 <= row < self.num_rows for row in rows):
            raise ValueError(f"rows {list(rows)} are not distinct rows of {self.num_rows}")
        for name, weights in adapter.groups.items():
            if name not in self.specs:
                raise ValueError(f"the pool has no group {name!r}")
            _check_shapes(self.specs[name], weights, adapter.rank)


def _copy_rows(target: Tensor, dim: int, rows: Tensor, source: Tensor) -> None:
    target.index_copy_(dim, rows, source.to(target.dtype))


def _check_shapes(spec: GroupSpec, weights: GroupWeights, max_rank: int) -> None:
    rank = weights.a.shape[2]
    shape_a = (spec.num_layers, len(spec.slice_sizes), rank, spec.input_size)
    shape_b = (spec.num_layers, rank, spec.output_size)
    if weights.a.shape != shape_a or weights.b.shape != shape_b:
        found = f"{tuple(weights.a.shape)} and {tuple(weights.b.shape)}"
        raise ValueError(f"{spec.name}: shapes {found} are not {shape_a} and {shape_b}")
    if rank > max_rank or len(weights.ranks) != spec.num_layers or max(weights.ranks) > rank:
        raise ValueError(f"{spec.name}: ranks {weights.ranks} in {rank} rows of {max_rank}")


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
