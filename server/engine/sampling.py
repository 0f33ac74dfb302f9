"""From a sequence's SamplingParams to the sampler's rows."""

import secrets

import numpy as np
import torch
from numpy.typing import NDArray

from lorakeet.models.penalties import Penalties, TokenCounts, build_penalties
from lorakeet.models.sampler import (
    SamplingBatch,
    SamplingColumns,
    build_columns,
    with_bans,
)
from lorakeet.server.engine.inputs import Ints, SequenceRows
from lorakeet.server.engine.step import NewSequence

_ENGINE_SEED = secrets.randbits(62)  # for requests without a seed


class SamplingRows:
    """How the next tokens of the rows of `sequences` are chosen: a column for each parameter.

    Only rows with biases or bans need work of their own in a step. `counts`: what penalties know of
    the same rows.
    """

    def __init__(self, sequences: SequenceRows, counts: TokenCounts, device: torch.device) -> None:
        self._sequences = sequences
        self._counts = counts
        self._device = device
        num_rows = len(sequences.slots)
        self._num_prompt = np.zeros(num_rows, np.int64)
        self._seeds = np.zeros(num_rows, np.uint64)
        self._temperature = np.zeros(num_rows)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.zeros(num_rows)
        self._min_p = np.zeros(num_rows)
        self._num_logprobs = np.zeros(num_rows, np.int64)  # -1: none are wanted
        self._penalties = np.zeros((3, num_rows))  # repetition, presence, frequency
        self._has_penalty = np.zeros(num_rows, np.bool_)
        self._is_counted = np.zeros(num_rows, np.bool_)  # `counts` know its tokens
        self._has_biases = np.zeros(num_rows, np.bool_)
        self._scores_prompt = np.zeros(num_rows, np.bool_)

    def add(self, row: int, sequence: NewSequence) -> None:
        """A sequence that has just got this row."""
        params = sequence.sampling
        # The id, not the row: after a preemption the same numbers must come again.
        seed = _ENGINE_SEED + sequence.seq_id if params.seed is None else params.seed
        self._num_prompt[row] = sequence.num_prompt_tokens
        self._seeds[row] = seed % 2**64
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._penalties[:, row] = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._has_penalty[row] = params.has_penalty
        self._is_counted[row] = False
        self._has_biases[row] = params.logit_bias or params.min_tokens
        self._scores_prompt[row] = params.prompt_logprobs is not None

    def scores_prompt(self, rows: Ints) -> NDArray[np.bool_]:
        """Which rows want their prompt scored."""
        return self._scores_prompt[rows]

    def num_logprobs(self, rows: Ints) -> Ints:
        """How many alternatives each row wants reported; -1: not even its own log-probability."""
        return self._num_logprobs[rows]

    def batch(self, rows: Ints, num_columns: int) -> SamplingBatch:
        """How the next token of each row is chosen, from logits with so many columns.

        Its `penalties`, if there are any, have to count the tokens that are chosen.
        """
        columns = SamplingColumns(
            seed=self._seeds[rows],
            token_index=self._sequences.num_tokens[rows] - self._num_prompt[rows],
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
        )
        biases = {
            index: self._biases(int(rows[index]))
            for index in np.flatnonzero(self._has_biases[rows]).tolist()
        }
        wanted = int(self._num_logprobs[rows].max())
        return build_columns(
            columns,
            self._penalties_of(rows, num_columns),
            biases,
            None if wanted < 0 else wanted,
            num_columns,
            self._device,
        )

    def _penalties_of(self, rows: Ints, num_columns: int) -> Penalties | None:
        places = np.flatnonzero(self._has_penalty[rows])
        if places.size == 0:
            return None
        rows = rows[places]
        self._counts.widen(num_columns)
        for row in rows[~self._is_counted[rows]].tolist():
            self._count_known(row)
        values = self._penalties[:, rows]
        return build_penalties(self._counts, rows, places, values)

    def _count_known(self, row: int) -> None:
        """Before its first token here, the host knows all of them; later ones the device counts."""
        known = self._sequences.token_ids[row, : self._sequences.num_tokens[row]]
        prompt, output = np.split(known, [self._num_prompt[row]])
        self._counts.start(row, prompt, output)
        self._is_counted[row] = True

    def _biases(self, row: int) -> dict[int, float]:
        """Of tokens by their ids; those that would end it too early are never chosen."""
        sequence = self._sequences.sequences[row]
        params = sequence.sampling
        num_output = int(self._sequences.num_tokens[row] - self._num_prompt[row])
        banned: tuple[int, ...] = ()
        if num_output < params.min_tokens:
            banned = params.stop_token_ids
            if not params.ignore_eos:
                banned += sequence.eos_token_ids
        return with_bans(params.logit_bias, banned)
