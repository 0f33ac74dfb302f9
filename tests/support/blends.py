"""Oracles of weighted sums of adapters, by PEFT, in float32, one prompt at a time."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

from support.adapters import base_model

Parts = Sequence[tuple[Path, float]]


def summed_model(model_folder: Path, parts: Parts) -> nn.Module:
    """The base model with what each adapter changes, by PEFT, times its weight, added.

    Biases may be those of the layers that are adapted (`bias="lora_only"`), and of B.
    """
    base = base_model(model_folder)
    model = copy.deepcopy(base)
    layers, own_layers = dict(model.named_modules()), dict(base.named_modules())
    with torch.no_grad():
        for folder, weight in parts:
            loaded = PeftModel.from_pretrained(copy.deepcopy(base), folder)
            for name, layer in loaded.base_model.model.named_modules():
                if not isinstance(layer, LoraLayer):
                    continue
                layers[name].weight += weight * layer.get_delta_weight("default")
                bias = layer.get_base_layer().bias if isinstance(layer, Linear) else None
                if bias is not None:
                    layers[name].bias += weight * (bias - own_layers[name].bias)
                if layer.lora_bias.get("default"):
                    b_bias = layer.scaling["default"] * layer.lora_B["default"].bias
                    layers[name].bias += weight * b_bias
    return model.eval()


def combined_model(model_folder: Path, parts: Parts, combination_type: str) -> nn.Module:
    """PEFT's own `add_weighted_adapter`."""
    base = copy.deepcopy(base_model(model_folder))
    names = [str(index) for index in range(len(parts))]
    model = PeftModel.from_pretrained(base, parts[0][0], adapter_name="0")
    for name, (folder, _) in list(zip(names, parts, strict=True))[1:]:
        model.load_adapter(folder, adapter_name=name)
    weights = [weight for _, weight in parts]
    model.add_weighted_adapter(names, weights, "blend", combination_type=combination_type)
    model.set_adapter("blend")
    return model.eval()  # type: ignore[no-any-return]


def logprobs(model: nn.Module, token_ids: list[int]) -> Tensor:
    """float32 log-softmax (len, vocab); row i scores the token after position i."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
