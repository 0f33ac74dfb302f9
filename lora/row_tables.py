"""Which rows of the pool each slot lists: tables in host memory, small beside the rows.

Passes are built from them on the host; a slot's entries are set when its rows are being copied, and
nobody uses a slot before the copy is complete.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from lorakeet.kernels.rank_rows import Ints, SlotRows
from lorakeet.lora.adapter import Adapter, GroupSpec, GroupWeights

_NOTHING = SlotRows(
    np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32), magnitude=-1
)


class RowTables:
    """Slot 0 lists nothing. R is the table's width: the most rows that a slot can list."""

    def __init__(self, specs: Iterable[GroupSpec], num_slots: int, width: int) -> None:
        self.width = width
        self.rows = np.zeros((num_slots, width), np.int32)
        self.scales = np.zeros((num_slots, width), np.float32)
        self.offsets = np.zeros((num_slots, width), np.float32)
        self.magnitude_rows = np.full(num_slots, -1, np.int32)
        self.ranks = {spec.name: np.zeros((spec.num_layers, num_slots), np.int32) for spec in specs}
        self._num_listed = {name: np.zeros(num_slots, np.int32) for name in self.ranks}
        self._slot_rows: dict[str, dict[int, SlotRows]] = {name: {} for name in self.ranks}

    def clear(self, slot: int) -> None:
        for ranks in self.ranks.values():
            ranks[:, slot] = 0
        for table in (self.rows, self.scales, self.offsets):
            table[slot] = 0
        self.magnitude_rows[slot] = -1
        self._update(slot)

    def set(self, slot: int, rows: Sequence[int], adapter: Adapter) -> None:
        """`rows`: those of its ranks, of its biases and of its magnitudes, in that order."""
        ranks, extra = rows[: adapter.rank], [*rows[adapter.rank :]]
        bias = [extra.pop(0)] if adapter.has_bias else []
        listed = [*bias, *ranks]
        self.rows[slot, : len(listed)] = listed
        self.scales[slot, : len(listed)] = 1
        self.offsets[slot, : len(bias)] = 1
        if adapter.has_magnitude:
            self.magnitude_rows[slot] = extra.pop(0)
        for name, weights in adapter.groups.items():
            self.ranks[name][:, slot] = _row_counts(weights, adapter.has_bias)
        self._update(slot)

    def blend(self, slot: int, parts: Sequence[tuple[int, int, float]]) -> None:
        """`parts`: slot, number of rows and weight of each adapter, one after the other."""
        start = 0
        for part_slot, count, weight in parts:
            own = slice(start, start + count)
            self.rows[slot, own] = self.rows[part_slot, :count]
            self.scales[slot, own] = self.scales[part_slot, :count] * weight
            self.offsets[slot, own] = self.offsets[part_slot, :count] * weight
            for ranks in self.ranks.values():
                there = ranks[:, part_slot]
                ranks[:, slot] = np.where(there > 0, there + start, ranks[:, slot])
            start += count
        self._update(slot)

    def touched(self, slots: Sequence[int], groups: Collection[str]) -> list[str]:
        """Those of the groups that any of the slots changes, in any layer."""
        return [
            name for name in groups if name in self.ranks and self._num_listed[name][slots].any()
        ]

    def num_listed(self, slots: Ints, group: str) -> Ints:
        """How many rows each slot lists for a group, in the layer with the most."""
        return self._num_listed[group][slots]

    def most_listed(self, slots: Ints) -> int:
        """How many rows these slots list together, in the group with the most."""
        return max(int(counts[slots].sum()) for counts in self._num_listed.values())

    def slot_rows(self, group: str, slot: int) -> SlotRows:
        """What a slot lists for a group. Layers that read fewer rows have zeros in the others."""
        return self._slot_rows[group].get(slot, _NOTHING)

    def _update(self, slot: int) -> None:
        """What passes ask for, again and again, follows the slot's entries."""
        for name, ranks in self.ranks.items():
            count = int(ranks[:, slot].max(initial=0))
            self._num_listed[name][slot] = count
            self._slot_rows[name][slot] = SlotRows(
                self.rows[slot, :count],
                self.scales[slot, :count],
                self.offsets[slot, :count],
                int(self.magnitude_rows[slot]) if count else -1,
            )


def table_width(max_rank: int) -> int:
    """R that is enough for any one adapter: its rank rows, and that of its biases."""
    return max_rank + 1


def _row_counts(weights: GroupWeights, has_bias: bool) -> list[int]:
    """How many rows of the adapter's list each layer reads: the row of biases is the first."""
    return [rank + has_bias if rank or weights.bias is not None else 0 for rank in weights.ranks]
