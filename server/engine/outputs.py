"""What a pass leaves on the device, on its way to the host, and as messages."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.models.sampler import SamplerOutput
from lorakeet.server.engine.inputs import Ints, SequenceRows
from lorakeet.server.engine.messages import TokenLogprob
from lorakeet.server.engine.step import Sampled, SequenceId

NOT_FINITE = "the model's output is not finite for this request (NaN or infinity)"


@dataclass(frozen=True)
class Samples:
    """L tokens on their way, and for whom they are."""

    rows: Ints
    seq_ids: Ints
    places: Ints  # as `expect_tokens` counts them
    num_logprobs: Ints
    values: Callable[[], NDArray[np.float64]]  # waits for `join_samples`


@dataclass(frozen=True)
class Scores:
    """Scores of a run of prompt tokens on their way."""

    targets: Ints
    values: Callable[[], NDArray[np.float64]]  # waits for `join_scores`


@dataclass(frozen=True)
class PassOutputs:
    samples: Samples | None = None
    scores: dict[SequenceId, list[Scores]] = field(default_factory=dict)

    def read(
        self, sequences: SequenceRows
    ) -> tuple[list[Sampled], dict[SequenceId, list[TokenLogprob]]]:
        """Wait for all of it. `sequences` learn their tokens.

        Non-finite logits are an error of their sequence alone.
        """
        sampled: list[Sampled] = []
        if (samples := self.samples) is not None:
            token_ids, sampled = read_samples(
                samples.values(), samples.seq_ids, samples.num_logprobs
            )
            sequences.set_tokens(samples.rows, samples.places, token_ids)
        prompt_logprobs = {
            seq_id: [score for part in parts for score in read_scores(part.targets, part.values())]
            for seq_id, parts in self.scores.items()
        }
        sampled += [
            Sampled(seq_id, 0, error=NOT_FINITE)
            for seq_id, scores in prompt_logprobs.items()
            if any(math.isnan(score.logprob) for score in scores)
        ]
        return sampled, prompt_logprobs


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
