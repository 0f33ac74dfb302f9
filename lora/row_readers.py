"""Which passes may still read a row of the pool."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Pass = TypeVar("Pass")


class RowReaders(Generic[Pass]):
    """The last pass that reads each row. Passes run in order, so when it has ended, all have."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self._rows = [np.zeros(0, np.int64)] * num_slots  # that a pass reads, by slot
        self._last: NDArray[np.object_] = np.full(num_rows, None)

    def set_slot(self, slot: int, rows: Sequence[int]) -> None:
        """What passes read for a slot from now on."""
        self._rows[slot] = np.array(rows, np.int64)

    def rows_of(self, slot: int) -> list[int]:
        return self._rows[slot].tolist()

    def launched(self, one: Pass, slots: Iterable[int]) -> None:
        """A pass that reads the rows of these slots."""
        for slot in set(slots):
            self._last[self._rows[slot]] = one

    def of(self, rows: Sequence[int]) -> set[Pass]:
        """Those that have to end before these rows change."""
        return {one for one in self._last[list(rows)].tolist() if one is not None}
