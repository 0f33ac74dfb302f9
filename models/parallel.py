"""The layers that hold the large weights. Each is called `layer(x, batch)`.

Base layers ignore the batch; the wrappers in `lorakeet.lora.layers` read adapters from it. Weights
are made uninitialized, and only those of this rank: a size that is cut is given as a `Cut`, a plain
number is whole. `pieces` says which part of each tensor in a checkpoint a layer holds.

On the CPU float32 products are oneDNN's, with weights packed into its blocked layout: with AVX-512
they take half to a third of the time of MKL's, which is what `linear` calls.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from lorakeet.kernels.delta import Delta
from lorakeet.models.batch import ForwardBatch
from lorakeet.models.cuts import Cut
from lorakeet.models.process_group import ALONE, ProcessGroup

Epilogue = Callable[[Tensor, Delta | None], Tensor]  # of y, and what is still to be added to it
Size = int | Cut


@dataclass(frozen=True)
class Piece:
    """What is held of one tensor of a checkpoint: `view` without its padding is `tensor[places]`.

    `places` and `view` have the dimensions of the tensor, whose shape is `shape`.
    """

    view: Tensor
    shape: tuple[int, ...]
    places: tuple[slice, ...]

    @staticmethod
    def of(view: Tensor, *cuts: Cut) -> "Piece":
        """One cut for each dimension."""
        return Piece(view, tuple(cut.whole for cut in cuts), tuple(cut.places for cut in cuts))

    @property
    def filled(self) -> Tensor:
        """The view without its padding."""
        return self.view[tuple(slice(part.stop - part.start) for part in self.places)]


class ParallelLinear(nn.Module):
    """y = W x + b, of one or several checkpoint projections side by side.

    `slice_names` are the checkpoint's names of the projections (PEFT's too), `slice_sizes` their
    output sizes. `weight`: (output_size, input_size); `bias`: (output_size,) or None. All sizes are
    this rank's. Where the input is cut, the first rank alone has the bias.
    """

    def __init__(self, input_size: Size, slices: Mapping[str, Size], bias: bool) -> None:
        super().__init__()
        self.input = _cut(input_size)
        self.slices = {name: _cut(size) for name, size in slices.items()}
        self.input_size = self.input.size
        self.slice_names = tuple(self.slices)
        self.slice_sizes = tuple(cut.size for cut in self.slices.values())
        self.output_size = sum(self.slice_sizes)
        self.takes_bias = bias
        self.weight = nn.Parameter(torch.empty(self.output_size, self.input_size))
        has_bias = bias and self.input.start == 0
        self.bias = nn.Parameter(torch.empty(self.output_size)) if has_bias else None

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """(T, input_size) → (T, output_size). A wrapped layer may leave it in float32 parts,
        (splits, T, output_size), which `models.ops` sums up."""
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """What this rank has of the output, before any sum over the ranks."""
        return _linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Only after the views of `pieces` are filled: a packed weight has no views."""
        self.weight = _packed(self.weight)

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """By names such as "q_proj.weight"."""
        weights = torch.split(self.weight.detach(), list(self.slice_sizes))
        for (name, cut), weight in zip(self.slices.items(), weights, strict=True):
            yield f"{name}.weight", Piece.of(weight, cut, self.input)
        if self.bias is not None:
            biases = torch.split(self.bias.detach(), list(self.slice_sizes))
            for (name, cut), bias in zip(self.slices.items(), biases, strict=True):
                yield f"{name}.bias", Piece.of(bias, cut)
        elif self.takes_bias:  # the first rank holds it
            for name, cut in self.slices.items():
                yield f"{name}.bias", Piece.of(self.weight.new_empty(0), Cut(cut.whole, 0, 0))


class ColumnParallelLinear(ParallelLinear):
    """A projection that tensor parallelism cuts along its output."""

    def __init__(self, input_size: int, output_size: Size, name: str, bias: bool = False) -> None:
        super().__init__(input_size, {name: output_size}, bias)


class QKVParallelLinear(ParallelLinear):
    """q, k and v in one matmul; the output is q_size + kv_size + kv_size wide."""

    def __init__(self, input_size: int, q_size: Size, kv_size: Size, bias: bool = False) -> None:
        super().__init__(input_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, bias)
        self.q_size, self.kv_size, _ = self.slice_sizes


class MergedColumnParallelLinear(ParallelLinear):
    """gate and up in one matmul; `slice_sizes` are equal."""

    def __init__(self, input_size: int, slice_size: Size, bias: bool = False) -> None:
        super().__init__(input_size, {"gate_proj": slice_size, "up_proj": slice_size}, bias)

    def project(self, x: Tensor, batch: ForwardBatch, then: Epilogue) -> Tensor:
        """What `then` makes of the output, and of the delta that a wrapped layer leaves to it."""
        return then(self(x, batch), None)


class RowParallelLinear(ParallelLinear):
    """A projection that tensor parallelism cuts along its input: its output is this rank's part of
    a sum over the ranks, which is left to `Ops.add_norm`. What else is to be in the sum, once for
    all ranks or a part of it from each, is added before."""

    def __init__(self, input_size: Size, output_size: int, name: str, bias: bool = False) -> None:
        super().__init__(input_size, {name: output_size}, bias)


class VocabParallelEmbedding(nn.Module):
    """Token ids → rows of the table, of which `weight` is this rank's part.

    `weight`: (rows of this rank, hidden_size); padding rows are zeros. `vocab_size` is the whole
    table's.
    """

    def __init__(self, vocab_size: Size, hidden_size: int, group: ProcessGroup = ALONE) -> None:
        super().__init__()
        self.vocab = _cut(vocab_size)
        self.vocab_size = self.vocab.whole
        self.hidden_size = hidden_size
        self.group = group
        self.weight = nn.Parameter(torch.empty(self.vocab.size, hidden_size))

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """(T,) → (T, hidden_size)."""
        if self.group.size == 1:
            return embedding(token_ids, self.weight)
        rows = token_ids - self.vocab.start
        is_elsewhere = (rows < 0) | (rows >= self.vocab.size)
        y = embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self.group.all_reduce(y.masked_fill(is_elsewhere[:, None], 0))

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        yield "weight", Piece.of(self.weight.detach(), self.vocab, Cut.none(self.hidden_size))


class ParallelLMHead(nn.Module):
    """Hidden states → logits. Tied, its `weight` is the embedding's own tensor.

    `gather` of `product` is the layer's output. Packed, it keeps `weight` too: adapters that bring
    a copy of the head are compared with it.
    """

    def __init__(self, vocab_size: Size, hidden_size: int, group: ProcessGroup = ALONE) -> None:
        super().__init__()
        self.vocab = _cut(vocab_size)
        self.vocab_size = self.vocab.whole
        self.hidden_size = hidden_size
        self.group = group
        self.weight = nn.Parameter(torch.empty(self.vocab.size, hidden_size))
        self.packed: nn.Parameter | None = None

    def tie(self, embed_tokens: VocabParallelEmbedding) -> None:
        self.weight = embed_tokens.weight

    def pack(self) -> None:
        self.packed = _packed(self.weight)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """(L, hidden_size) → (L, vocab_size)."""
        return self.gather(self.product(x))

    def product(self, x: Tensor) -> Tensor:
        """The logits of this rank's part of the vocabulary, and of its padding."""
        return _linear(x, self.weight if self.packed is None else self.packed, None)

    def gather(self, logits: Tensor) -> Tensor:
        """Those of all ranks, without padding."""
        return self.group.all_gather(logits, dim=1)[:, : self.vocab_size].contiguous()

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        yield "weight", Piece.of(self.weight.detach(), self.vocab, Cut.none(self.hidden_size))


def pack_weights(model: nn.Module) -> None:
    """Pack the float32 weights of a loaded model on the CPU; nothing where there is no oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLinear | ParallelLMHead):
            weight = layer.weight
            if weight.dtype == torch.float32 and weight.device.type == "cpu":
                layer.pack()


def _cut(size: Size) -> Cut:
    return Cut.none(size) if isinstance(size, int) else size


def _packed(weight: Tensor) -> nn.Parameter:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return nn.Parameter(packed, requires_grad=False)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return linear(x, weight, bias)
