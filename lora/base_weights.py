"""The served model's own weights, as its checkpoint has them: what adapters are compared with."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from lorakeet.lora.adapter import AdapterError
from lorakeet.lora.peft_tensors import BaseTensor
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.parallel import ParallelLinear

_BLOCK = 4096  # rows compared at a time: the model may be on a device with little memory left


class BaseWeights(Mapping[str, Tensor]):
    """By module: "embed_tokens" and "lm_head", each (vocab, hidden), and, as (output, input),
    "layers.1.q_proj" or a fused "layers.1.qkv_proj". Biases, (output,), where the model has them,
    are "layers.1.q_proj.bias".

    Values are views of the model, on its device, but for weights that are packed for the CPU: each
    of these is unpacked when it is asked for.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._ends = {
            "embed_tokens": model.model.embed_tokens.weight,
            "lm_head": model.lm_head.weight,
        }
        self._linear: dict[str, tuple[ParallelLinear, slice, bool]] = {}  # True: the bias
        for path, module in model.named_modules():
            if isinstance(module, ParallelLinear):
                layer, group = path.removesuffix(".base_layer").split(".")[2::2]
                for name, rows in _parts(group, module).items():
                    self._linear[f"layers.{layer}.{name}"] = (module, rows, False)
                    if module.bias is not None:
                        self._linear[f"layers.{layer}.{name}.bias"] = (module, rows, True)

    def __getitem__(self, key: str) -> Tensor:
        if key in self._ends:
            return self._ends[key].detach()
        module, rows, is_bias = self._linear[key]
        tensor = module.bias if is_bias else module.weight
        assert tensor is not None
        return (tensor.to_dense() if tensor.is_mkldnn else tensor).detach()[rows]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._ends, *self._linear])

    def __len__(self) -> int:
        return len(self._ends) + len(self._linear)


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


def _parts(group: str, module: ParallelLinear) -> dict[str, slice]:
    """The rows of each projection in a layer's weight, and of the whole, if it is a fused one."""
    rows, start = {group: slice(0, module.output_size)}, 0
    for name, size in zip(module.slice_names, module.slice_sizes, strict=True):
        rows[name] = slice(start, start + size)
        start += size
    return rows
