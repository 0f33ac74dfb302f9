"""The last passes that read rows of the pool, against a history of all of them."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from lorakeet.lora.row_readers import RowReaders

NUM_SLOTS, NUM_ROWS = 4, 6
ROWS = st.lists(st.integers(0, NUM_ROWS - 1), max_size=4, unique=True)
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=5)


@dataclass
class History:
    """Every pass with what it read."""

    rows: dict[int, list[int]] = field(default_factory=dict)
    passes: list[set[int]] = field(default_factory=list)

    def last_of(self, row: int) -> int | None:
        numbers = [number for number, read in enumerate(self.passes) if row in read]
        return numbers[-1] if numbers else None


@given(st.lists(st.one_of(st.tuples(st.integers(1, NUM_SLOTS - 1), ROWS), SLOTS), max_size=12))
def test_passes_that_have_to_end_before_rows_change(
    events: list[tuple[int, list[int]] | list[int]],
) -> None:
    readers, history = RowReaders[int](NUM_SLOTS, NUM_ROWS), History()
    for event in events:
        if isinstance(event, tuple):
            slot, rows = event
            readers.set_slot(slot, rows)
            history.rows[slot] = rows
        else:
            readers.launched(len(history.passes), event)
            read = [history.rows.get(slot, []) for slot in event]
            history.passes.append({row for rows in read for row in rows})
    for slot in range(NUM_SLOTS):
        assert readers.rows_of(slot) == history.rows.get(slot, [])
    for rows in ([], [0], [1, 2], list(range(NUM_ROWS))):
        assert readers.of(rows) == {history.last_of(row) for row in rows} - {None}
