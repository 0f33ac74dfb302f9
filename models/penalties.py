"""Penalties on tokens that a sequence has had. How often it has had each is kept on the device.

A step adds one token to a row: its work depends on the vocabulary, not on how many came before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.models.transfer import upload

TokenIds = Sequence[int] | NDArray[np.integer]

_IN_PROMPT, _GENERATED = 1, 2  # what a token adds to its mark: once, and each time


class TokenCounts:
    """What R rows have had of each token of a vocabulary: one int32 mark for each."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        # a row means nothing until `start`: on the CPU it takes no memory before
        self._marks = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=device)

    @property
    def device(self) -> torch.device:
        return self._marks.device

    @property
    def vocab_size(self) -> int:
        return self._marks.shape[1]

    @property
    def nbytes(self) -> int:
        return self._marks.nbytes

    def widen(self, vocab_size: int) -> None:
        """Make room for so many tokens: an adapter may have more than there is room for."""
        if (missing := vocab_size - self.vocab_size) > 0:
            self._marks = torch.nn.functional.pad(self._marks, (0, missing))

    def start(self, row: int, prompt_ids: TokenIds, output_ids: TokenIds) -> None:
        """A new sequence has this row. Token ids outside the vocabulary are ignored."""
        prompt, output = (
            ids[(ids >= 0) & (ids < self.vocab_size)]  # an id outside would write elsewhere
            for ids in (np.array(prompt_ids, np.int64), np.array(output_ids, np.int64))
        )
        both = upload(np.concatenate([prompt, output]), self._marks.device)
        marks = self._marks[row].zero_()
        marks.scatter_(0, both[: len(prompt)], _IN_PROMPT)
        once = torch.full_like(both[len(prompt) :], _GENERATED, dtype=torch.int32)
        marks.scatter_add_(0, both[len(prompt) :], once)

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """One more generated token in each of the rows, (N,) int64, no two alike."""
        self._marks[rows, token_ids] += _GENERATED

    def read(self, rows: Tensor, vocab_size: int) -> Tensor:
        """Marks (N, vocab_size) int32: 0 for what a row has not had."""
        return self._marks[:, :vocab_size].index_select(0, rows)


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Penalties of N of the rows of a batch, on the device; None where no row has that one.

    The repetition penalty looks at prompt and output (Hugging Face), presence and frequency
    penalties at the output only (OpenAI).
    """

    counts: TokenCounts
    rows: Tensor  # (N,) int64, in `counts`
    places: Tensor  # (N,) int64, in the batch
    repetition: Tensor | None  # (N, 1) float32
    presence: Tensor | None  # (N, 1) float32
    frequency: Tensor | None  # (N, 1) float32

    def apply(self, logits: Tensor) -> Tensor:
        """`logits` (L, vocab) float32 with the penalties: a copy."""
        marks = self.counts.read(self.rows, logits.shape[1])
        if logits.device.type == "cpu":  # a GPU would have to wait to know where marks are
            return self.apply_to_marked(logits, marks)
        return self.apply_to_all(logits, marks)

    def apply_to_all(self, logits: Tensor, marks: Tensor) -> Tensor:
        """What has no mark stays as it is. `marks`: (N, vocab) int32."""
        own = logits.index_select(0, self.places)
        own = _penalize(own, marks, self.repetition, self.presence, self.frequency)
        return logits.index_copy(0, self.places, own)

    def apply_to_marked(self, logits: Tensor, marks: Tensor) -> Tensor:
        """The same, only where there are marks."""
        rows, ids = marks.nonzero(as_tuple=True)
        repetition, presence, frequency = (
            None if values is None else values[rows, 0]
            for values in (self.repetition, self.presence, self.frequency)
        )
        pairs = self.places[rows], ids
        own = _penalize(logits[pairs], marks[rows, ids], repetition, presence, frequency)
        return logits.index_put(pairs, own)

    def count(self, token_ids: Tensor) -> None:
        """The tokens (L,) int64 chosen for the batch, for the penalties of the next step."""
        self.counts.add(self.rows, token_ids[self.places])


def build_penalties(
    counts: TokenCounts,
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    values: NDArray[np.float64],
) -> Penalties | None:
    """Penalties of the batch's rows `places` (N,), which are `rows` (N,) of `counts`.

    `values`: (3, N), repetition, presence and frequency penalty. None when all change nothing.
    """
    used = (values != [[1.0], [0.0], [0.0]]).any(axis=1).tolist()
    if not any(used):
        return None
    on_device = upload(values.astype(np.float32), counts.device)[:, :, None]
    repetition, presence, frequency = (
        value if is_used else None for value, is_used in zip(on_device, used, strict=True)
    )
    indices = upload(np.stack([rows, places]), counts.device)
    return Penalties(
        counts=counts,
        rows=indices[0],
        places=indices[1],
        repetition=repetition,
        presence=presence,
        frequency=frequency,
    )


def _penalize(
    logits: Tensor,
    marks: Tensor,
    repetition: Tensor | None,
    presence: Tensor | None,
    frequency: Tensor | None,
) -> Tensor:
    """Elementwise."""
    if repetition is not None:
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(marks > 0, repeated, logits)
    if presence is not None:
        logits = logits - presence * (marks >= _GENERATED)
    if frequency is not None:
        logits = logits - frequency * (marks // _GENERATED)
    return logits
