"""Adapters of every kind that can be served, for one model: as PEFT makes them, or rewritten."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.adapters import ALL_LINEAR, edit_config, edit_tensors, make_adapter

Tensors = dict[str, Tensor]

# Ranks are of all sizes, from 1 to 64.
_CONFIGS: dict[str, dict[str, Any]] = {
    "all_linear": {"r": 8},
    "q": {"r": 1, "target_modules": ["q_proj"]},
    "k": {"r": 2, "target_modules": ["k_proj"]},
    "v": {"r": 3, "target_modules": ["v_proj"]},
    "o": {"r": 5, "target_modules": ["o_proj"]},
    "gate": {"r": 7, "target_modules": ["gate_proj"]},
    "up": {"r": 12, "target_modules": ["up_proj"]},
    "down": {"r": 64, "lora_alpha": 64, "target_modules": ["down_proj"]},
    "embed_tokens": {"r": 6, "lora_alpha": 18, "target_modules": ["embed_tokens"]},
    "lm_head": {"r": 33, "lora_alpha": 50, "target_modules": ["lm_head"]},
    "everything": {"r": 10, "target_modules": [*ALL_LINEAR, "embed_tokens", "lm_head"]},
    "rslora": {"r": 16, "lora_alpha": 12, "use_rslora": True},
    "rslora_ends": {
        "r": 9,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": ["embed_tokens", "lm_head"],
    },
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 32, "down_proj": 4, "v_proj": 1},
        "alpha_pattern": {r".*layers\.2\..*": 30, "gate_proj": 3},
    },
    "dora": {"r": 6, "use_dora": True},
    "dora_everything": {
        "r": 4,
        "lora_alpha": 6,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": [*ALL_LINEAR, "embed_tokens", "lm_head"],
    },
    "dora_patterns": {
        "use_dora": True,
        "bias": "all",
        "rank_pattern": {"layers.0.mlp.up_proj": 19, "o_proj": 2},
        "target_modules": ["v_proj", "o_proj", "up_proj"],
    },
    # where the model has no biases, this is what PEFT makes of it: no tensor
    "bias_all": {"r": 3, "bias": "all", "target_modules": ["k_proj", "down_proj"]},
    "bias_lora_only": {"r": 5, "bias": "lora_only"},
    "lora_bias": {"r": 4, "lora_bias": True, "target_modules": [*ALL_LINEAR, "lm_head"]},
    "last_layer": {"layers_to_transform": [2], "layers_pattern": "layers"},
    "uneven": {"target_modules": r".*(layers\.0\..*(q|down)_proj|layers\.1\..*up_proj)"},
}


@dataclass(frozen=True)
class AdapterCase:
    name: str
    folder: Path  # to be served
    oracle: Path  # the same for PEFT


def adapters_of_every_kind(root: Path, model: Path) -> list[AdapterCase]:
    """All of them, with tensors of their own each, as folders in `root`."""
    cases = [
        AdapterCase(name, folder, folder)
        for seed, (name, config) in enumerate(_CONFIGS.items())
        for folder in [make_adapter(root / name, model, seed=seed, **config)]
    ]
    for seed, dtype in enumerate((torch.float16, torch.bfloat16), start=100):
        name = str(dtype).removeprefix("torch.")
        folder = make_adapter(root / name, model, seed=seed)
        edit_tensors(folder, lambda tensors, dtype=dtype: _cast(tensors, dtype))  # type: ignore[misc]
        cases.append(AdapterCase(name, folder, folder))
    return [*cases, _fused_case(root / "fused", model, seed=200)]


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {key: tensor.to(dtype) for key, tensor in tensors.items()}


def _fused_case(folder: Path, model: Path, seed: int) -> AdapterCase:
    """q, k, v share an A, gate and up share one: served as one fused module each."""
    oracle = make_adapter(folder.with_name("split"), model, seed=seed, r=11)
    edit_tensors(oracle, share_a)
    shutil.copytree(oracle, folder)
    edit_config(folder, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
    edit_tensors(folder, fuse_all)
    return AdapterCase("fused", folder, oracle)


# --- fused modules ---


def share_a(tensors: Tensors) -> Tensors:
    """The A of q for k and v as well, that of gate for up."""
    shared = dict(tensors)
    for key in tensors:
        if ".lora_A." in key:
            first = key.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
            shared[key] = tensors[first.replace("up_proj", "gate_proj")]
    return shared


def fuse(tensors: Tensors, name: str, parts: tuple[str, ...], swap: bool = False) -> Tensors:
    """Join modules that have the same A into one fused module; `swap` joins them in wrong order."""
    joined = dict(tensors)
    for key in [key for key in tensors if f".{parts[0]}.lora_B" in key]:
        keys = [key.replace(parts[0], part) for part in parts]
        bs = [joined.pop(k) for k in keys]
        a = [joined.pop(k.replace("lora_B", "lora_A")) for k in keys]
        joined[key.replace(parts[0], name)] = torch.cat(bs[::-1] if swap else bs)
        joined[key.replace(parts[0], name).replace("lora_B", "lora_A")] = a[0]
    return joined


def fuse_all(tensors: Tensors) -> Tensors:
    tensors = fuse(tensors, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
    return fuse(tensors, "gate_up_proj", ("gate_proj", "up_proj"))
