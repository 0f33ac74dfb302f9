"""Adapters as read by Lorakeet, and the same from PEFT, as what they add to the weights."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, GroupSpec
from lorakeet.lora.base_weights import BaseWeights
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from lorakeet.models.weights import load_model
from support.adapters import FolderState, folder_state, peft_model

Tensors = dict[str, Tensor]
WORKERS = ThreadPoolExecutor(4)


def base_weights(model: Path) -> BaseWeights:
    """The weights of the model as it is served, those of the projections packed."""
    return _base_weights(model, folder_state(model))


@lru_cache(maxsize=8)
def _base_weights(model: Path, _: FolderState) -> BaseWeights:
    return BaseWeights(load_model(model, "cpu"))


def read(folder: Path, model: Path, **options: Any) -> Adapter:
    """`read_adapter` for the model, in float32 and up to rank 64 unless the options say else."""
    defaults: dict[str, Any] = {
        "max_rank": 64,
        "dtype": torch.float32,
        "workers": WORKERS,
        "base_weights": base_weights(model),
    }
    return read_adapter(folder, group_specs(load_config(model)), **(defaults | options))


def deltas(adapter: Adapter, model: Path) -> dict[str, Tensor]:
    """What our weights add to each weight (out, in) of the model, by its name; zero ones too."""
    found = {}
    for spec in group_specs(load_config(model)):
        if spec.name not in adapter.groups:
            continue
        weights = adapter.groups[spec.name]
        assert weights.a.shape[:2] == (len(weights.layers), len(spec.slice_names))
        assert len(weights.ranks) == spec.num_layers
        none = torch.zeros(weights.a.shape[1:]), torch.zeros(weights.b.shape[1:])
        for layer, rank in enumerate(weights.ranks):
            all_a, all_b = none
            if rank:
                place = weights.layers.index(layer)
                all_a, all_b = weights.a[place], weights.b[place]
            bs = torch.split(all_b[:rank], list(spec.slice_sizes), dim=1)
            for name, a, b in zip(spec.slice_names, all_a, bs, strict=True):
                found[_path(spec, layer, name)] = b.T @ a[:rank]
    return found


def _path(spec: GroupSpec, layer: int, name: str) -> str:
    if spec.name == "lm_head":
        return "lm_head"
    if spec.name == "embed_tokens":
        return "model.embed_tokens"
    parent = "self_attn" if spec.name in ("qkv_proj", "o_proj") else "mlp"
    return f"model.layers.{layer}.{parent}.{name}"


def peft_deltas(folder: Path, model: Path) -> dict[str, Tensor]:
    """The same from PEFT; the embedding's, (vocab, hidden) there, turned to (hidden, vocab)."""
    found = {}
    for name, module in peft_model(model, folder).named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight("default").detach()
            path = name.removeprefix("base_model.model.")
            found[path] = delta.T if path.endswith("embed_tokens") else delta
    return found


def assert_equals_peft(folder: Path, model: Path, **options: Any) -> Adapter:
    """Every module that PEFT adapts has PEFT's delta; every other module has none."""
    adapter = read(folder, model, **options)
    ours, theirs = deltas(adapter, model), peft_deltas(folder, model)
    assert theirs.keys() <= ours.keys()
    for path, delta in ours.items():
        if path in theirs:
            assert theirs[path].abs().max() > 1e-3
            torch.testing.assert_close(delta, theirs[path], atol=1e-5, rtol=1e-5)
        else:
            assert not delta.any(), path
    assert adapter.modules == tuple(sorted({path.rpartition(".")[2] for path in theirs}))
    return adapter


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    """For `edit_tensors`: the same tensors under other names."""
    return lambda tensors: {change(key): tensor for key, tensor in tensors.items()}
