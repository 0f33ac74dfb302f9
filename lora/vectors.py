"""What an adapter does with one number for each output of a module: DoRA's magnitudes, and biases.

DoRA (arXiv:2402.09353; PEFT's `use_dora`, tuners/lora/dora.py) trains a magnitude m for each output
and divides by the norm of that output's weights, over the inputs:

    y = f (W x + s B A x) + b,   f = m / ||W + s B A||

b, the base's bias, is not scaled. Served, f goes into B, f - 1 is the factor on the base layer's
output, and since that has b in it, -(f - 1) b goes into the adapter's bias. The norms are worked
out here, once, in float32.

A bias is trained in two ways. `bias="lora_only"` or `"all"` replaces the base's: what is added is
the difference. `lora_bias=True` is a bias of B, and scaled as B is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorakeet.lora.adapter import AdapterError
from lorakeet.lora.peft_tensors import LoRAModule, PeftTensors, Place, all_finite

_BLOCK_VALUES = 2**22  # weights in float32 at a time: the device may have little memory left


@dataclass(frozen=True)
class Vectors:
    """By module, each (output,) float32 on the host."""

    factors: dict[Place, Tensor] = field(default_factory=dict)  # f, of modules with DoRA
    biases: dict[Place, Tensor] = field(default_factory=dict)  # to be added; none is all zeros


def work_out_vectors(found: PeftTensors, base_weights: Mapping[str, Tensor] | None) -> Vectors:
    """`found` fits the model. Raises AdapterError for what needs the model's weights when there are
    none, a norm of zero, and a bias in place of one that the model does not have.
    """
    factors: dict[Place, Tensor] = {}
    biases: dict[Place, Tensor] = {}
    for module in found.modules:
        if module.magnitude is not None:
            base = _known(base_weights, module.path)
            factor = _dora_factor(module, module.magnitude, base[module.key])
            factors[module.place] = factor
            if (own_bias := base.get(f"{module.key}.bias")) is not None:
                biases[module.place] = (1 - factor) * own_bias.cpu().float()
        if module.bias is not None:  # never beside a magnitude
            biases[module.place] = module.bias.float() * module.scaling.scale
    for bias in found.biases:
        own_bias = _known(base_weights, bias.path).get(f"{bias.key}.bias")
        if own_bias is None:
            raise AdapterError(f"{bias.path}: the file has a bias for it, the model has none")
        # compared in the model's dtype: a copy of the base's bias changes nothing
        if not own_bias.cpu().equal(bias.tensor.to(own_bias.dtype)):
            difference = bias.tensor.float() - own_bias.cpu().float()
            biases[bias.place] = biases.get(bias.place, 0) + difference
    return Vectors(factors, {place: bias for place, bias in biases.items() if bias.any()})


def _dora_factor(module: LoRAModule, magnitude: Tensor, weight: Tensor) -> Tensor:
    """`weight`: (output, input), for the embedding (vocab, hidden), on any device."""
    if module.name == "embed_tokens":
        weight = weight.T
    a = module.a.to(weight.device, torch.float32)
    b = module.b.to(weight.device, torch.float32) * module.scaling.scale
    block = max(1, _BLOCK_VALUES // weight.shape[1])
    norms = [
        (weight[start : start + block].float() + b[start : start + block] @ a).norm(dim=1)
        for start in range(0, weight.shape[0], block)
    ]
    factor = magnitude.float() / torch.cat(norms).cpu()
    if not all_finite(factor):
        raise AdapterError(f"{module.path}: the weights of an output have norm zero")
    return factor


def _known(base_weights: Mapping[str, Tensor] | None, path: str) -> Mapping[str, Tensor]:
    if base_weights is None:
        raise AdapterError(f"{path}: DoRA and biases need the model's weights; there is no model")
    return base_weights
