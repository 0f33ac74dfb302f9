"""The served model's own weights, as its checkpoint has them: what adapters are compared with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from lorakeet.lora.adapter import AdapterError
from lorakeet.lora.peft_tensors import BaseTensor
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.parallel import ParallelLinear
from lorakeet.models.weights import Checkpoint

_BLOCK = 4096  # rows compared at a time: the model may be on a device with little memory left


class BaseWeights(Mapping[str, Tensor]):
    """By module: "embed_tokens" and "lm_head", each (vocab, hidden), and, as (output, input),
    "layers.1.q_proj" or a fused "layers.1.qkv_proj". Biases, (output,), where the model has them,
    are "layers.1.q_proj.bias".

    Values are views of the model, on its device, but for weights that are packed for the CPU: each
    of these is unpacked when it is asked for. Where a rank holds only a part of the model, they are
    whole all the same: read from the checkpoint (mapped, on the CPU) when they are asked for, with
    AdapterError where there is none.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._folder = model.checkpoint
        self._dtype = model.dtype
        embedding = _Part(("model.embed_tokens.weight",), model.model.embed_tokens, slice(None))
        is_tied = model.config.tie_word_embeddings
        head = embedding if is_tied else _Part(("lm_head.weight",), model.lm_head, slice(None))
        self._ends = {"embed_tokens": embedding, "lm_head": head}
        self._linear: dict[str, _Part] = {}
        for path, module in model.named_modules():
            if isinstance(module, ParallelLinear):
                parent, _, group = path.removesuffix(".base_layer").rpartition(".")
                layer = parent.split(".")[2]
                for name, rows in _rows(group, module).items():
                    names = module.slice_names if name == group else (name,)
                    for kind in ("weight", "bias")[: 1 + module.takes_bias]:
                        key = f"layers.{layer}.{name}" + ".bias" * (kind == "bias")
                        files = tuple(f"{parent}.{each}.{kind}" for each in names)
                        self._linear[key] = _Part(files, module, rows, kind)
        self._is_cut = model.group.size > 1
        self._read_ends: dict[tuple[str, ...], Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self._ends:
            part = self._ends[key]
            if not self._is_cut:
                return part.held()
            if part.names not in self._read_ends:  # kept: a tied head is known by its memory
                self._read_ends.setdefault(part.names, self._read(part))
            return self._read_ends[part.names]
        part = self._linear[key]
        return self._read(part) if self._is_cut else part.held()

    def __iter__(self) -> Iterator[str]:
        return iter([*self._ends, *self._linear])

    def __len__(self) -> int:
        return len(self._ends) + len(self._linear)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        assert self._folder is not None
        return Checkpoint(self._folder)

    def _read(self, part: "_Part") -> Tensor:
        if self._folder is None:
            raise AdapterError("it can only be checked against real weights; the model's are dummy")
        tensors = [self._checkpoint.read(name) for name in part.names]
        return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(self._dtype)


@dataclass(frozen=True)
class _Part:
    """One weight or bias: in the checkpoint, and in the model."""

    names: tuple[str, ...]  # of a fused one, those that it is made of
    module: nn.Module
    rows: slice
    kind: str = "weight"

    def held(self) -> Tensor:
        tensor = cast(Tensor, getattr(self.module, self.kind))
        return (tensor.to_dense() if tensor.is_mkldnn else tensor).detach()[self.rows]


def check_copies(copies: Sequence[BaseTensor], base_weights: Mapping[str, Tensor] | None) -> None:
    """Some trainers write the weights of adapted modules beside the factors: they must be the
    model's.

    `copies` have the model's sizes. Raises AdapterError where one holds other values, or there is
    nothing to compare with.
    """
    for copy in copies:
        if base_weights is None:
            raise AdapterError(
                f"{copy.path}: the file holds its weights; there is no model to compare"
            )
        base = base_weights[copy.key]
        for start in range(0, len(base), _BLOCK):
            rows = slice(start, start + _BLOCK)
            if not copy.tensor[rows].to(base.device, base.dtype).equal(base[rows]):
                raise AdapterError(
                    f"{copy.path}: the file holds weights that differ from the base model's: "
                    "it was trained on another model, or changed more than its LoRA"
                )


def _rows(group: str, module: ParallelLinear) -> dict[str, slice]:
    """The rows of each projection in a layer's weight, and of the whole, if it is a fused one."""
    rows, start = {group: slice(0, module.output_size)}, 0
    for name, size in zip(module.slice_names, module.slice_sizes, strict=True):
        rows[name] = slice(start, start + size)
        start += size
    return rows
