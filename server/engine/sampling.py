"""From a sequence's SamplingParams to the sampler's rows."""

import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.models.sampler import (
    SamplingBatch,
    SamplingColumns,
    SamplingRow,
    build_columns,
)
from lorakeet.server.engine.inputs import Ints, SequenceRows
from lorakeet.server.engine.step import NewSequence

_ENGINE_SEED = secrets.randbits(62)  # for requests without a seed


class SamplingRows:
    """How the next tokens of the rows of `sequences` are chosen: a column for each parameter.

    Only rows that edit logits need work of their own in a step.
    """

    def __init__(self, sequences: SequenceRows, device: torch.device) -> None:
        self._sequences = sequences
        self._device = device
        num_rows = len(sequences.slots)
        self._num_prompt = np.zeros(num_rows, np.int64)
        self._seeds = np.zeros(num_rows, np.uint64)
        self._temperature = np.zeros(num_rows)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.zeros(num_rows)
        self._min_p = np.zeros(num_rows)
        self._num_logprobs = np.zeros(num_rows, np.int64)  # -1: none are wanted
        self._edits = np.zeros(num_rows, np.bool_)
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
        self._edits[row] = params.has_penalty or params.logit_bias or params.min_tokens
        self._scores_prompt[row] = params.prompt_logprobs is not None

    def scores_prompt(self, rows: Ints) -> NDArray[np.bool_]:
        """Which rows want their prompt scored."""
        return self._scores_prompt[rows]

    def num_logprobs(self, rows: Ints) -> Ints:
        """How many alternatives each row wants reported; -1: not even its own log-probability."""
        return self._num_logprobs[rows]

    def batch(self, rows: Ints, num_columns: int, last_tokens: Tensor) -> SamplingBatch:
        """How the next token of each row is chosen, from logits with so many columns.

        `last_tokens`: (L,) int64 on the device, each row's token sampled last.
        """
        columns = SamplingColumns(
            seed=self._seeds[rows],
            token_index=self._sequences.num_tokens[rows] - self._num_prompt[rows],
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
        )
        edited = {
            index: self._edited_row(int(rows[index]))
            for index in np.flatnonzero(self._edits[rows]).tolist()
        }
        wanted = int(self._num_logprobs[rows].max())
        num_logprobs = None if wanted < 0 else wanted
        return build_columns(columns, edited, num_logprobs, num_columns, self._device, last_tokens)

    def _edited_row(self, row: int) -> SamplingRow:
        """Penalties, biases and bans. With penalties, at most the row's last token is in flight."""
        sequence = self._sequences.sequences[row]
        params = sequence.sampling
        num_tokens = int(self._sequences.num_tokens[row])
        num_prompt = sequence.num_prompt_tokens
        banned: tuple[int, ...] = ()
        if num_tokens - num_prompt < params.min_tokens:
            banned = params.stop_token_ids
            if not params.ignore_eos:
                banned += sequence.eos_token_ids
        known = self._sequences.token_ids[row, :num_tokens].tolist() if params.has_penalty else []
        has_pending = bool(known) and known[-1] < 0
        known = known[:-1] if has_pending else known
        assert min(known, default=0) >= 0, "a token that a penalty counts is still in flight"
        return SamplingRow(
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            banned_ids=banned,
            prompt_ids=known[:num_prompt],
            output_ids=known[num_prompt:],
            has_pending=has_pending,
        )
