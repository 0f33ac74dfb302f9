"""What an adapter is once it has been read: canonical weights on the host, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:  # the API process uses the names below without waiting for torch
    from torch import Tensor

AdapterId = NewType("AdapterId", int)  # one load of one adapter; never used again; 0 is the base
Slot = NewType("Slot", int)  # row of the pool's row table, a kernel's weight index; 0 is none


class AdapterError(Exception):
    """An adapter cannot be loaded; the message says which file or tensor, and why."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter folder at the path."""


@dataclass(frozen=True)
class GroupSpec:
    """One kind of place in the model that takes LoRA deltas, the same in each of its layers.

    A fused projection is one group with several slices: they share the input and the row table.
    For `embed_tokens` the input is the vocabulary: its A is looked up, not multiplied.
    """

    name: str  # "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens" or "lm_head"
    num_layers: int  # 1 for embed_tokens and lm_head
    input_size: int
    slice_names: tuple[str, ...]  # PEFT's names: ("q_proj", "k_proj", "v_proj"), ("o_proj",) …
    slice_sizes: tuple[int, ...]  # output size of each slice

    @property
    def output_size(self) -> int:
        return sum(self.slice_sizes)


@dataclass(frozen=True)
class GroupWeights:
    """An adapter's weights for one group, all layers; the scale is already in B.

    The shape of A is (num_layers, slices, rank, input_size), of B (num_layers, rank, output_size):
    B is rank-major, the slices of one rank side by side. `rank` is the largest true rank in the
    group; rows past a layer's own rank, and slices that the adapter leaves alone, are zeros.
    """

    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]  # true rank by layer; 0: the layer is left alone


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory, checked against the model, ready to be copied to the pool."""

    digest: str  # sha256 over config and tensors: the content identity
    rank: int  # rows it needs in the pool: the largest rank of all its groups
    groups: dict[str, GroupWeights]
    modules: tuple[str, ...]  # PEFT leaf names that it changes, sorted
    num_bytes: int
