"""Rows of the embedding and the output head that adapters have in place of the base's.

They lie beside the pool's rank rows, each slot's in tensors of its own. An eager pass in which no
row's adapter has any does no work here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear, pad

from lorakeet.lora.adapter import Slot, TokenRows, Vocabulary
from lorakeet.lora.staging import Staging
from lorakeet.models.transfer import upload


@dataclass(frozen=True)
class VocabularyRun:
    """The rows of a pass whose adapter is the same, and has a vocabulary of its own."""

    rows: Tensor  # (N,) int64
    vocabulary: Vocabulary  # on the pass's device


class OwnEmbeddings(Protocol):
    """Embeddings of a pass that are not the base's."""

    def embed(self, y: Tensor, token_ids: Tensor) -> None:
        """Overwrite rows of y (T, hidden), the embeddings of `token_ids` (T,)."""


@dataclass(frozen=True)
class VocabularyBatch:
    """The rows of one pass whose adapters have a vocabulary of their own."""

    runs: tuple[VocabularyRun, ...]

    def embed(self, y: Tensor, token_ids: Tensor) -> None:
        """See OwnEmbeddings."""
        for rows, is_own, values in self.embeddings(token_ids):
            y.index_copy_(0, rows, torch.where(is_own, values, y[rows]))

    def embeddings(self, token_ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Adapter by adapter: its rows (N,) of the pass, which of them have an embedding of their
        own (N, 1), and that (N, hidden): anything where there is none."""
        for run in self.runs:
            own = run.vocabulary.embed_tokens
            if own is not None:
                ids = token_ids[run.rows]
                places = torch.searchsorted(own.ids, ids).clamp_(max=len(own.ids) - 1)
                yield run.rows, (own.ids[places] == ids)[:, None], own.rows[places]

    def score(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Logits (L, vocab) → (L, columns of the largest vocabulary): each row has its own.

        -inf where a row's adapter, or the base, has no such token. `hidden`: (L, hidden).
        """
        missing = max(run.vocabulary.size for run in self.runs) - logits.shape[1]
        if missing > 0:
            logits = pad(logits, (0, missing), value=-torch.inf)
        for run in self.runs:
            own = run.vocabulary.lm_head
            if own is not None:
                scores = linear(hidden[run.rows], own.rows)
                logits[run.rows[:, None], own.ids] = scores
            logits[run.rows, run.vocabulary.size :] = -torch.inf
        return logits


class StaticEmbeddings:
    """Embeddings of a pass that are not the base's, in tensors that stay in their place: a CUDA
    graph reads them, whatever the mix of adapters is that they are from."""

    def __init__(
        self, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """For passes of up to so many tokens."""
        self._values = torch.zeros((num_tokens, hidden_size), dtype=dtype, device=device)
        self._is_own = torch.zeros((num_tokens, 1), dtype=torch.bool, device=device)
        self._is_clear = True

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes + self._is_own.nbytes

    def clear(self) -> None:
        """All are the base's."""
        if not self._is_clear:
            self._is_own.zero_()
        self._is_clear = True

    def fill(self, batch: VocabularyBatch, token_ids: Tensor) -> None:
        """Take in those of a pass of at most T tokens, after `clear`."""
        self._is_clear = False
        for rows, is_own, values in batch.embeddings(token_ids):
            self._values[rows], self._is_own[rows] = values, is_own

    def embed(self, y: Tensor, token_ids: Tensor) -> None:
        """See OwnEmbeddings: of the pass's first tokens, as many as y has."""
        size = len(y)
        torch.where(self._is_own[:size], self._values[:size], y, out=y)


class VocabularyStore:
    """The vocabularies by slot. Only what `write` returns runs in the pool's thread: which slot
    has a vocabulary is looked up while passes are built, so it is known from the call on."""

    def __init__(self, dtype: torch.dtype, device: torch.device, staging: Staging) -> None:
        self._dtype = dtype
        self._device = device
        self._staging = staging
        self._by_slot: dict[int, Vocabulary] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory of all of them."""
        return sum(vocabulary.num_bytes for vocabulary in self._by_slot.values())

    def write(self, slot: Slot, vocabulary: Vocabulary | None) -> Callable[[], None]:
        """Make room for an adapter's vocabulary, if it has one, in an empty slot. Its rows are of
        the pool's dtype.

        The room is memory for the current stream; what is returned copies the vocabulary there, and
        has to be called on the same stream. Raises RuntimeError when memory is short.
        """
        assert slot not in self._by_slot
        if vocabulary is None:
            return lambda: None
        own = self._by_slot[slot] = _map(vocabulary, self._room_for)
        return partial(self._fill, own, vocabulary)

    def has(self, slot: Slot) -> bool:
        return slot in self._by_slot

    def clear(self, slot: Slot) -> None:
        self._by_slot.pop(slot, None)

    def for_embedding(self, slots: NDArray[np.int32]) -> VocabularyBatch | None:
        """For the token rows of a pass, in `slots` (T,); None when all embeddings are the base's.
        Its launches depend on the mix of adapters."""
        own = [slot for slot, one in self._by_slot.items() if one.embed_tokens is not None]
        return self._batch(slots, own)

    def for_head(self, slots: NDArray[np.int32]) -> VocabularyBatch | None:
        """For rows whose logits are wanted; None when all have just the base's tokens."""
        return self._batch(slots, list(self._by_slot))

    def _batch(self, slots: NDArray[np.int32], own: list[int]) -> VocabularyBatch | None:
        runs = []
        for slot in own:
            rows = np.flatnonzero(slots == slot)
            if rows.size:
                runs.append(VocabularyRun(upload(rows, self._device), self._by_slot[slot]))
        return VocabularyBatch(tuple(runs)) if runs else None

    def _room_for(self, part: TokenRows) -> TokenRows:
        assert part.rows.dtype == self._dtype
        return TokenRows(self._staging.room_for(part.ids), self._staging.room_for(part.rows))

    def _fill(self, own: Vocabulary, vocabulary: Vocabulary) -> None:
        for room, part in (
            (own.embed_tokens, vocabulary.embed_tokens),
            (own.lm_head, vocabulary.lm_head),
        ):
            if room is not None and part is not None:
                self._staging.fill(room.ids, part.ids)
                self._staging.fill(room.rows, part.rows)


def _map(vocabulary: Vocabulary, change: Callable[[TokenRows], TokenRows]) -> Vocabulary:
    parts = (vocabulary.embed_tokens, vocabulary.lm_head)
    return Vocabulary(vocabulary.size, *(part and change(part) for part in parts))
