"""The layers that hold the large weights. Each is called `layer(x, batch)`.

Base layers ignore the batch; the wrappers in `lorakeet.lora.layers` read adapters from it. Weights
are made uninitialized. `checkpoint_slices` is the one place that knows which part of a checkpoint's
tensor a layer holds: tensor parallelism will cut there.

On the CPU float32 products are oneDNN's, with weights packed into its blocked layout: with AVX-512
they take half to a third of the time of MKL's, which is what `linear` calls.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from lorakeet.kernels.delta import Delta
from lorakeet.models.batch import ForwardBatch

Epilogue = Callable[[Tensor, Delta | None], Tensor]  # of y, and what is still to be added to it


class ParallelLinear(nn.Module):
    """y = W x + b, of one or several checkpoint projections side by side.

    `slice_names` are the checkpoint's names of the projections (PEFT's too), `slice_sizes` their
    output sizes. `weight`: (output_size, input_size); `bias`: (output_size,) or None.
    """

    def __init__(self, input_size: int, slices: dict[str, int], bias: bool) -> None:
        super().__init__()
        self.input_size = input_size
        self.slice_names = tuple(slices)
        self.slice_sizes = tuple(slices.values())
        self.output_size = sum(self.slice_sizes)
        self.weight = nn.Parameter(torch.empty(self.output_size, input_size))
        self.bias = nn.Parameter(torch.empty(self.output_size)) if bias else None

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """(T, input_size) → (T, output_size)."""
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Only after `checkpoint_slices`' views are filled: a packed weight has no views."""
        self.weight = _packed(self.weight)

    def checkpoint_slices(self) -> Iterator[tuple[str, Tensor]]:
        """Names such as "q_proj.weight", each with the view of this layer that it fills."""
        for parameter_name, parameter in self.named_parameters(recurse=False):
            parts = torch.split(parameter.detach(), list(self.slice_sizes))
            for name, part in zip(self.slice_names, parts, strict=True):
                yield f"{name}.{parameter_name}", part


class ColumnParallelLinear(ParallelLinear):
    """A projection that tensor parallelism cuts along its output."""

    def __init__(self, input_size: int, output_size: int, name: str, bias: bool = False) -> None:
        super().__init__(input_size, {name: output_size}, bias)


class QKVParallelLinear(ParallelLinear):
    """q, k and v in one matmul; the output is q_size + kv_size + kv_size wide."""

    def __init__(self, input_size: int, q_size: int, kv_size: int, bias: bool = False) -> None:
        super().__init__(input_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, bias)
        self.q_size = q_size
        self.kv_size = kv_size


class MergedColumnParallelLinear(ParallelLinear):
    """gate and up in one matmul; `slice_sizes` are equal."""

    def __init__(self, input_size: int, slice_size: int, bias: bool = False) -> None:
        super().__init__(input_size, {"gate_proj": slice_size, "up_proj": slice_size}, bias)

    def project(self, x: Tensor, batch: ForwardBatch, then: Epilogue) -> Tensor:
        """What `then` makes of the output, and of the delta that a wrapped layer leaves to it."""
        return then(self(x, batch), None)


class RowParallelLinear(ParallelLinear):
    """A projection that tensor parallelism cuts along its input."""

    def __init__(self, input_size: int, output_size: int, name: str, bias: bool = False) -> None:
        super().__init__(input_size, {name: output_size}, bias)


class VocabParallelEmbedding(nn.Module):
    """Token ids → rows of `weight`: (vocab_size, hidden_size)."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """(T,) → (T, hidden_size)."""
        return embedding(token_ids, self.weight)


class ParallelLMHead(nn.Module):
    """Hidden states → logits. Tied, its `weight` is the embedding's own tensor.

    Packed, it keeps `weight` too: adapters that bring a copy of the head are compared with it.
    """

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.packed: nn.Parameter | None = None

    def tie(self, embed_tokens: VocabParallelEmbedding) -> None:
        self.weight = embed_tokens.weight

    def pack(self) -> None:
        self.packed = _packed(self.weight)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """(L, hidden_size) → (L, vocab_size)."""
        return _linear(x, self.weight if self.packed is None else self.packed, None)


def pack_weights(model: nn.Module) -> None:
    """Pack the float32 weights of a loaded model on the CPU; nothing where there is no oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLinear | ParallelLMHead):
            weight = layer.weight
            if weight.dtype == torch.float32 and weight.device.type == "cpu":
                layer.pack()


def _packed(weight: Tensor) -> nn.Parameter:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return nn.Parameter(packed, requires_grad=False)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return linear(x, weight, bias)
