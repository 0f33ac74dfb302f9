"""From a step to the arrays of one forward pass: a row for each running sequence, no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lorakeet.server.engine.step import NewSequence, ScheduledSequence, SequenceId

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StepArrays:
    """One step's T tokens of S sequences, as in `ForwardBatch`, on the host."""

    rows: Ints  # (S,) row of each sequence
    token_rows: Ints  # (T,) row of each token's sequence
    token_ids: Ints  # (T,); -1 - row stands for the token sampled last in that row
    positions: Ints  # (T,)
    kv_slots: Ints  # (T,)
    query_starts: Ints  # (S + 1,)
    context_lens: Ints  # (S,)

    @property
    def num_decodes(self) -> int:
        """Sequences with a single token; they come first."""
        return int((np.diff(self.query_starts) == 1).sum())


class SequenceRows:
    """What the runner remembers of each sequence: tokens, KV blocks and slot, in rows of tables.

    Rows are given out lowest first and used again once their sequence is released.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((num_rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.blocks = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.slots = np.zeros(num_rows, np.int32)
        self.adapter_starts = np.zeros(num_rows, np.int64)  # tokens before it have slot 0
        self.seq_ids = np.zeros(num_rows, np.int64)
        self.sequences: dict[int, NewSequence] = {}  # by row
        self._new_blocks: list[tuple[int, int, Sequence[int]]] = []  # row, first place, ids
        self._first_places = np.zeros(num_rows, np.int64)  # see `expect_tokens`
        self._row_of: dict[SequenceId, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def release(self, seq_id: SequenceId) -> None:
        """Forget a sequence; one that is not known is ignored."""
        row = self._row_of.pop(seq_id, None)
        if row is not None:
            del self.sequences[row]
            self._first_places[row] += self.token_ids.shape[1] + 1  # past all that it had
            self._free.append(row)

    def add(self, sequence: NewSequence) -> int:
        """Returns the row that it gets."""
        assert sequence.seq_id not in self._row_of, f"sequence {sequence.seq_id} is known already"
        row = self._free.pop()
        self._row_of[sequence.seq_id] = row
        self.sequences[row] = sequence
        self.seq_ids[row] = sequence.seq_id
        count = len(sequence.token_ids)
        self.token_ids[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self.num_blocks[row] = 0
        self.add_blocks(row, sequence.block_ids)
        self.slots[row] = sequence.slot
        self.adapter_starts[row] = sequence.adapter_start
        return row

    def slots_at(self, rows: Ints, positions: Ints) -> NDArray[np.int32]:
        """The slot of the adapter that tokens at these positions of these rows have."""
        return np.where(positions < self.adapter_starts[rows], np.int32(0), self.slots[rows])

    def add_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        first = int(self.num_blocks[row])
        self.blocks[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] = first + len(block_ids)
        self._new_blocks.append((row, first, block_ids))

    def take_new_blocks(self) -> tuple[Ints, Ints]:
        """What has changed in `blocks` since the last call: flat places, and what is there now."""
        added, self._new_blocks = self._new_blocks, []
        width = self.blocks.shape[1]
        places = [row * width + first + np.arange(len(ids)) for row, first, ids in added]
        if not places:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        flat = np.concatenate(places)
        return flat, self.blocks.ravel()[flat].astype(np.int64)

    def expect_tokens(self, rows: Ints) -> Ints:
        """One more token in each of the rows, being sampled; a row that is full stays as it is.

        Returns their places, for `set_tokens`: positions, counted on through all sequences that a
        row has had. So a sequence that is added again to its row, as after a preemption, gets
        others, and a token on its way to it as it was can do it no harm.
        """
        positions = self.num_tokens[rows]
        fits = positions < self.token_ids.shape[1]
        self.token_ids[rows[fits], positions[fits]] = -1 - rows[fits]
        self.num_tokens[rows[fits]] += 1
        return self._first_places[rows] + positions

    def set_tokens(self, rows: Ints, places: Ints, token_ids: Ints) -> None:
        """The tokens that were expected, for those sequences that are still in their rows."""
        positions = places - self._first_places[rows]
        here = (positions >= 0) & (positions < self.num_tokens[rows])
        self.token_ids[rows[here], positions[here]] = token_ids[here]

    def arrays(self, scheduled: Sequence[ScheduledSequence]) -> StepArrays:
        """The pass that computes `scheduled`; takes in their new blocks."""
        rows = np.array([self._row_of[sequence.seq_id] for sequence in scheduled], np.int64)
        starts = np.array([sequence.start for sequence in scheduled], np.int64)
        counts = np.array([sequence.num_tokens for sequence in scheduled], np.int64)
        for row, sequence in zip(rows.tolist(), scheduled, strict=True):
            if sequence.new_block_ids:
                self.add_blocks(row, sequence.new_block_ids)

        singles = counts == 1
        assert (singles[:-1] >= singles[1:]).all(), "decodes come before chunks"
        query_starts = np.concatenate([[0], np.cumsum(counts)])
        context_lens = starts + counts
        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
        block, offset = np.divmod(positions, self.block_size)
        num_blocks = -(-context_lens // self.block_size)
        assert (num_blocks <= self.num_blocks[rows]).all(), "a sequence has too few KV blocks"
        assert (context_lens <= self.num_tokens[rows]).all(), "a sequence has too few tokens"
        return StepArrays(
            rows=rows,
            token_rows=token_rows,
            token_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            kv_slots=self.blocks[token_rows, block].astype(np.int64) * self.block_size + offset,
            query_starts=query_starts,
            context_lens=context_lens,
        )
