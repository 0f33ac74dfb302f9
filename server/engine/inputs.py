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
    token_ids: Ints  # (T,)
    positions: Ints  # (T,)
    kv_slots: Ints  # (T,)
    query_starts: Ints  # (S + 1,)
    context_lens: Ints  # (S,)
    block_tables: NDArray[np.int32]  # (S, blocks of the longest)


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
        self.sequences: dict[int, NewSequence] = {}  # by row
        self._row_of: dict[SequenceId, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def release(self, seq_id: SequenceId) -> None:
        """Forget a sequence; one that is not known is ignored."""
        row = self._row_of.pop(seq_id, None)
        if row is not None:
            del self.sequences[row]
            self._free.append(row)

    def add(self, sequence: NewSequence) -> None:
        assert sequence.seq_id not in self._row_of, f"sequence {sequence.seq_id} is known already"
        row = self._free.pop()
        self._row_of[sequence.seq_id] = row
        self.sequences[row] = sequence
        count = len(sequence.token_ids)
        self.token_ids[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self.num_blocks[row] = 0
        self.add_blocks(row, sequence.block_ids)
        self.slots[row] = sequence.slot

    def add_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        first = int(self.num_blocks[row])
        self.blocks[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] = first + len(block_ids)

    def append_tokens(self, rows: Ints, token_ids: Ints) -> None:
        """Add one token to each of the rows; a row that is full stays as it is."""
        fits = self.num_tokens[rows] < self.token_ids.shape[1]
        rows, token_ids = rows[fits], token_ids[fits]
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def arrays(self, scheduled: Sequence[ScheduledSequence]) -> StepArrays:
        """The pass that computes `scheduled`; takes in their new blocks."""
        rows = np.array([self._row_of[sequence.seq_id] for sequence in scheduled], np.int64)
        starts = np.array([sequence.start for sequence in scheduled], np.int64)
        counts = np.array([sequence.num_tokens for sequence in scheduled], np.int64)
        for row, sequence in zip(rows.tolist(), scheduled, strict=True):
            if sequence.new_block_ids:
                self.add_blocks(row, sequence.new_block_ids)

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
            block_tables=self.blocks[rows, : num_blocks.max()],
        )
