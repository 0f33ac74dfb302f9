"""What an adapter is once it has been read: canonical weights on the host, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:  # the API process uses the names below without waiting for torch
    from torch import Tensor

    from lorakeet.models.cuts import Cut

AdapterId = NewType("AdapterId", int)  # one load of one adapter; never used again; 0 is the base
Slot = NewType("Slot", int)  # row of the pool's row table, a kernel's weight index; 0 is none

MAX_EXTRA_ROWS = 2  # of an adapter, beside those of its rank: see `Adapter.num_rows`


class AdapterError(Exception):
    """An adapter cannot be loaded; the message says which file or tensor, and why."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter folder at the path."""


@dataclass(frozen=True)
class GroupSpec:
    """One kind of place in the model that takes LoRA deltas, the same in each of its layers.

    A fused projection is one group with several slices: they share the input and the row table.
    For `embed_tokens` the input is the vocabulary: its A is looked up, not multiplied. Sizes are
    those of one rank of a process group; the cuts say which part of the whole they are.
    """

    name: str  # "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens" or "lm_head"
    num_layers: int  # 1 for embed_tokens and lm_head
    input_size: int
    slice_names: tuple[str, ...]  # PEFT's names: ("q_proj", "k_proj", "v_proj"), ("o_proj",) …
    slice_sizes: tuple[int, ...]  # output size of each slice
    input_cut: Cut | None = None  # None: whole
    output_cuts: tuple[Cut, ...] | None = None  # of each slice

    @property
    def output_size(self) -> int:
        return sum(self.slice_sizes)

    @property
    def whole(self) -> GroupSpec:
        """The group as the adapter's files have it."""
        input_size, slice_sizes = self.input_size, self.slice_sizes
        if self.input_cut is not None:
            input_size = self.input_cut.whole
        if self.output_cuts is not None:
            slice_sizes = tuple(cut.whole for cut in self.output_cuts)
        return GroupSpec(self.name, self.num_layers, input_size, self.slice_names, slice_sizes)

    @property
    def adds_bias(self) -> bool:
        """Where the ranks' outputs are summed up, the first alone has what is added once."""
        return self.input_cut is None or self.input_cut.start == 0


@dataclass(frozen=True)
class GroupWeights:
    """An adapter's weights for one group, those of its L `layers` alone; the scale is already in B.

    The shape of A is (L, slices, rank, input_size), of B (L, rank, output_size): B is rank-major,
    the slices of one rank side by side. `rank` is the largest true rank in the group; rows past a
    layer's own rank, and slices that the adapter leaves alone, are zeros.

    `bias` and `magnitude` are (num_layers, output_size), zero where there is none; None: none at
    all. The output is `y (1 + magnitude) + Σ (A x) B + bias`, y being the base layer's, with the
    base layer's own bias (so for DoRA, which leaves that one alone, `bias` takes it back).
    """

    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]  # true rank by layer of the model; 0: no rank row
    bias: Tensor | None = None
    magnitude: Tensor | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that have rank rows."""
        return tuple(layer for layer, rank in enumerate(self.ranks) if rank)


@dataclass(frozen=True)
class TokenRows:
    """Rows of the embedding or the output head that an adapter has in place of the base's.

    What a LoRA of that module adds to them is in them already.
    """

    ids: Tensor  # (N,) int64, ascending, at least one
    rows: Tensor  # (N, hidden)


@dataclass(frozen=True)
class Vocabulary:
    """Where an adapter's tokens are not the base model's."""

    size: int  # its token ids are 0 … size - 1, which may be more than the model's, or fewer
    embed_tokens: TokenRows | None  # None: all rows are the base's
    lm_head: TokenRows | None

    @property
    def num_bytes(self) -> int:
        parts = [part for part in (self.embed_tokens, self.lm_head) if part is not None]
        return sum(part.ids.nbytes + part.rows.nbytes for part in parts)


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory, checked against the model, ready to be copied to the pool. Its
    groups lie in `host_memory.Pages`: whoever lets the device copy them holds it until then."""

    digest: str  # sha256 over config and tensors: the content identity
    rank: int  # the largest of all its groups
    groups: dict[str, GroupWeights]
    modules: tuple[str, ...]  # PEFT leaf names that it changes, sorted
    num_bytes: int
    invocation: tuple[int, ...] = ()  # aLoRA: tokens before the last of these are the base's
    vocabulary: Vocabulary | None = None  # None: it has the model's

    @property
    def has_bias(self) -> bool:
        return any(group.bias is not None for group in self.groups.values())

    @property
    def has_magnitude(self) -> bool:
        return any(group.magnitude is not None for group in self.groups.values())

    @property
    def blendable(self) -> bool:
        """Its effect is a sum of rows, the same for every token: it can be part of a blend."""
        return not (self.has_magnitude or self.vocabulary or self.invocation)

    @property
    def vocabulary_bytes(self) -> int:
        """Of its embedding and head rows on the device."""
        return 0 if self.vocabulary is None else self.vocabulary.num_bytes

    @property
    def num_rows(self) -> int:
        """Rows that it needs in the pool: its rank, one for biases, one for magnitudes."""
        return self.rank + self.has_bias + self.has_magnitude
