"""From a sequence's SamplingParams to the sampler's rows, and from its output to messages."""

import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.models.sampler import (
    SamplerOutput,
    SamplingBatch,
    SamplingColumns,
    SamplingRow,
    build_columns,
)
from lorakeet.server.engine.inputs import Ints, SequenceRows
from lorakeet.server.engine.messages import TokenLogprob
from lorakeet.server.engine.step import NewSequence, Sampled

NOT_FINITE = "the model's output is not finite for this request (NaN or infinity)"
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


def join_samples(output: SamplerOutput) -> Tensor:
    """What `read_samples` reads, in one tensor: float64 holds ids and float32 values exactly."""
    parts = [output.token_ids[:, None], output.failed[:, None]]
    if output.logprobs is not None:
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        parts += [output.logprobs[:, None], output.top_ids, output.top_logprobs]
    return torch.cat([part.double() for part in parts], dim=1)


def read_samples(
    values: NDArray[np.float64], seq_ids: Ints, num_logprobs: Ints
) -> tuple[Ints, list[Sampled]]:
    """The chosen tokens (L,), and the same as a result for each sequence."""
    token_ids = values[:, 0].astype(np.int64)
    sampled = [
        Sampled(seq_id, token_id)
        for seq_id, token_id in zip(seq_ids.tolist(), token_ids.tolist(), strict=True)
    ]
    num_top = (values.shape[1] - 3) // 2
    for index in np.flatnonzero((values[:, 1] > 0) | (num_logprobs >= 0)).tolist():
        seq_id, token_id = sampled[index].seq_id, sampled[index].token_id
        if values[index, 1]:
            sampled[index] = Sampled(seq_id, token_id, error=NOT_FINITE)
            continue
        wanted = num_logprobs[index]
        top_ids, top = np.split(values[index, 3:], [num_top])
        logprob = _token_logprob(token_id, values[index, 2], top_ids[:wanted], top[:wanted])
        sampled[index] = Sampled(seq_id, token_id, logprob)
    return token_ids, sampled


def join_scores(logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """What `read_scores` reads of `sampler.score`, in one tensor."""
    return torch.cat([logprobs[:, None].double(), top_ids, top_logprobs], dim=1)


def read_scores(targets: Ints, values: NDArray[np.float64]) -> list[TokenLogprob]:
    """Scores of the tokens `targets`, as messages."""
    num_top = (values.shape[1] - 1) // 2
    return [
        _token_logprob(int(target), row[0], row[1 : 1 + num_top], row[1 + num_top :])
        for target, row in zip(targets, values, strict=True)
    ]


def _token_logprob(
    token_id: int,
    logprob: np.float64,
    top_ids: NDArray[np.float64],
    top_logprobs: NDArray[np.float64],
) -> TokenLogprob:
    ids = top_ids.astype(np.int64).tolist()
    return TokenLogprob(
        token_id, float(logprob), list(zip(ids, top_logprobs.tolist(), strict=True))
    )
