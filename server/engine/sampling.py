"""From a sequence's SamplingParams to the sampler's rows, and from its output to messages."""

import secrets
from collections.abc import Sequence
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.models.sampler import SamplerOutput, SamplingBatch, SamplingRow, build
from lorakeet.server.engine.inputs import SequenceRows
from lorakeet.server.engine.messages import SamplingParams, TokenLogprob
from lorakeet.server.engine.step import NewSequence, Sampled, SequenceId

NOT_FINITE = "the model's output is not finite for this request (NaN or infinity)"
_ENGINE_SEED = secrets.randbits(62)  # for requests without a seed


class SamplingRows:
    """Makes the sampler's rows of `sequences`; one that can never change is made once."""

    def __init__(self, sequences: SequenceRows, vocab_size: int, device: torch.device) -> None:
        self._sequences = sequences
        self._vocab_size = vocab_size
        self._device = device
        self._fixed: dict[int, tuple[NewSequence, SamplingRow]] = {}  # by row
        self._last: tuple[list[SamplingRow], SamplingBatch] | None = None

    def batch(self, rows: Sequence[int]) -> tuple[list[SamplingRow], SamplingBatch]:
        """How the next tokens of the sequences in `rows` are chosen, a row each and together."""
        choices = [self.row(row) for row in rows]
        last = self._last
        if last is None or len(last[0]) != len(choices) or not all(map(is_, last[0], choices)):
            last = self._last = choices, build(choices, self._vocab_size, self._device)
        return last

    def row(self, row: int) -> SamplingRow:
        """How the next token of the sequence in `row` is chosen."""
        sequence = self._sequences.sequences[row]
        fixed = self._fixed.get(row)
        if fixed is not None and fixed[0] is sequence:
            return fixed[1]
        made = self._make(row, sequence)
        if _is_fixed(sequence.sampling):
            self._fixed[row] = (sequence, made)
        return made

    def _make(self, row: int, sequence: NewSequence) -> SamplingRow:
        params = sequence.sampling
        num_tokens = int(self._sequences.num_tokens[row])
        num_prompt = sequence.num_prompt_tokens
        token_index = num_tokens - num_prompt
        banned: tuple[int, ...] = ()
        if token_index < params.min_tokens:
            banned = params.stop_token_ids
            if not params.ignore_eos:
                banned += sequence.eos_token_ids
        penalised = _has_penalty(params)
        known = self._sequences.token_ids[row, :num_tokens].tolist() if penalised else []
        # The id, not the row: after a preemption the same numbers must come again.
        seed = _ENGINE_SEED + sequence.seq_id if params.seed is None else params.seed
        return SamplingRow(
            seed=seed,
            token_index=token_index,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            banned_ids=banned,
            prompt_ids=known[:num_prompt],
            output_ids=known[num_prompt:],
            num_logprobs=params.logprobs,
        )


def _has_penalty(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _is_fixed(params: SamplingParams) -> bool:
    """Greedy, and nothing depends on what was generated."""
    return params.temperature == 0.0 and not params.min_tokens and not _has_penalty(params)


def read_samples(
    output: SamplerOutput, seq_ids: Sequence[SequenceId], choices: Sequence[SamplingRow]
) -> tuple[NDArray[np.int64], list[Sampled]]:
    """The chosen tokens (L,), and the same as a result for each sequence. One copy to the host."""
    parts = [output.token_ids[:, None], output.failed[:, None]]
    if output.logprobs is not None:
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        parts += [output.logprobs[:, None], output.top_ids, output.top_logprobs]
    # float64 holds token ids and float32 values exactly
    values = torch.cat([part.double() for part in parts], dim=1).cpu().numpy()
    token_ids = values[:, 0].astype(np.int64)
    num_top = (values.shape[1] - 3) // 2
    sampled = []
    for index, (seq_id, token_id, failed) in enumerate(
        zip(seq_ids, token_ids.tolist(), values[:, 1].tolist(), strict=True)
    ):
        wanted = choices[index].num_logprobs
        if failed:
            sampled.append(Sampled(seq_id, token_id, error=NOT_FINITE))
        elif wanted is None:
            sampled.append(Sampled(seq_id, token_id))
        else:
            top_ids, top = np.split(values[index, 3:], [num_top])
            logprob = _token_logprob(token_id, values[index, 2], top_ids[:wanted], top[:wanted])
            sampled.append(Sampled(seq_id, token_id, logprob))
    return token_ids, sampled


def read_scores(
    targets: NDArray[np.int64], logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor
) -> list[TokenLogprob]:
    """What `sampler.score` gave, as messages."""
    values = torch.cat([logprobs[:, None].double(), top_ids, top_logprobs], dim=1).cpu().numpy()
    num_top = top_ids.shape[1]
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
