"""Which adapter each row of a pass has, in the shape that the backends work from."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lorakeet.kernels.segments import Segments, build_segments
from lorakeet.lora.vocabulary import VocabularyBatch
from lorakeet.models.batch import ForwardBatch

_DECODE_ROWS = 256  # passes up to this size are mostly decode: few rows of each adapter
DECODE_BLOCK = 16  # the smallest side of a tile that tensor cores multiply
_PREFILL_BLOCK = 64

_T = TypeVar("_T")


@dataclass(frozen=True)
class LoRABatch:
    """The rows of one pass that have an adapter."""

    segments: Segments
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def cached(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """What a backend works out once in a pass and needs again in every layer."""
        if key not in self._cache:
            self._cache[key] = build()
        value: _T = self._cache[key]
        return value


@dataclass(frozen=True, kw_only=True)
class LoRAForwardBatch(ForwardBatch):
    """A pass in which rows may have an adapter; None where no row has."""

    lora: LoRABatch | None  # for the T token rows
    logits_lora: LoRABatch | None  # for the rows whose logits are wanted
    vocabulary: VocabularyBatch | None = None  # for the T token rows
    logits_vocabulary: VocabularyBatch | None = None


def build_lora_batch(
    slots: NDArray[np.int32], device: torch.device | str = "cpu"
) -> LoRABatch | None:
    """Group the rows of a pass by adapter. `slots`: (T,) slot of each row, 0 for none.

    Returns None when no row has an adapter: the pass then does no LoRA work at all. On CUDA, the
    small blocks of decode hold all rows, as the fused kernels need.
    """
    decode = len(slots) <= _DECODE_ROWS
    block = DECODE_BLOCK if decode else _PREFILL_BLOCK
    fused = decode and torch.device(device).type == "cuda"
    segments = build_segments(slots, block, device, base_rows=fused)
    return None if segments is None else LoRABatch(segments)
