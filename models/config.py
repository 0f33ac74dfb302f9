"""A Hugging Face config.json, checked: only what the model uses, under the names used there."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What transformers assumes where a file leaves a key out (there is no such value for sizes).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"sliding_window": None},
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
}


class UnsupportedModelError(ValueError):
    """The model is of a kind that cannot be served; the message says in one sentence why."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: how positions become angles. `factor` and what follows belong to kinds."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as the ends of the ramp
    attention_factor: float = 1.0  # yarn: factor on cos and sin


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-style decoder."""

    architecture: str
    vocab_size: int  # rows of the embedding; a tokenizer may have fewer entries
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]  # by layer: how many tokens a token sees, with itself
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotary embedding
    tie_word_embeddings: bool
    dtype: str | None  # of the checkpoint, if the file says: "float32", "bfloat16", "float16"

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


def load_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises UnsupportedModelError."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"Cannot read {path}: {error}.") from None
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{path} does not hold a JSON object.")
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """Check the values of a config.json, as transformers 4 or 5 writes it.

    Raises UnsupportedModelError for anything that this project's Llama would compute wrongly.
    """
    architecture = _architecture(values)
    values = _DEFAULTS[architecture] | values
    _refuse_unsupported(values)
    hidden_size = _size(values, "hidden_size")
    num_heads = _size(values, "num_attention_heads")
    num_layers = _size(values, "num_hidden_layers")
    num_kv_heads = _size(values, "num_key_value_heads", num_heads)
    head_dim = _size(values, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise UnsupportedModelError(
            f"{num_heads} heads over {num_kv_heads} KV heads of size {head_dim} do not divide."
        )
    is_llama, is_qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
    takes_attention_bias = is_llama or architecture == "Qwen3ForCausalLM"
    attention_bias = takes_attention_bias and bool(values.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(values, "intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_size(values, "max_position_embeddings"),
        rms_norm_eps=_number(values, "rms_norm_eps", 1e-6),
        rope=_rope(values),
        sliding_windows=_sliding_windows(values, architecture, num_layers),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=is_llama and bool(values.get("mlp_bias")),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        dtype=values.get("dtype") or values.get("torch_dtype"),
    )


def _architecture(values: dict[str, Any]) -> str:
    named = values.get("architectures") or [_ARCHITECTURES.get(str(values.get("model_type")))]
    supported = _ARCHITECTURES.values()
    if not isinstance(named, list) or named[0] not in supported:
        what = values.get("architectures") or values.get("model_type")
        raise UnsupportedModelError(
            f"Architecture {what!r} is not supported; supported are {', '.join(supported)}."
        )
    return str(named[0])


def _refuse_unsupported(values: dict[str, Any]) -> None:
    if quantization := values.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelError(f"Quantized weights ({method}) are not supported.")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if values.get(key):
            raise UnsupportedModelError(f"Mixture-of-experts models are not supported ({key}).")
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"Activation {activation!r} is not supported; only silu is.")


def _sliding_windows(
    values: dict[str, Any], architecture: str, num_layers: int
) -> tuple[int | None, ...]:
    """Llama has none, Mistral one for all layers, Qwen one for the layers that are named so."""
    is_qwen = architecture.startswith("Qwen")
    if values.get("sliding_window", 4096) is None or (
        is_qwen and not values.get("use_sliding_window")
    ):
        return (None,) * num_layers
    if architecture == "LlamaForCausalLM":
        raise UnsupportedModelError("A Llama model with a sliding_window is not supported.")
    window = _size(values, "sliding_window", 4096)
    if not is_qwen:
        return (window,) * num_layers
    first = values.get("max_window_layers", 28)
    types = values.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(types) != num_layers or set(types) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(f"layer_types {types!r} are not supported.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope(values: dict[str, Any]) -> RopeConfig:
    """`rope_scaling` beside `rope_theta` (transformers 4), or `rope_parameters` (5)."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModelError("Rotary embeddings that differ by layer are not supported.")
    rope = {"rope_theta": values.get("rope_theta", 10000.0)} | rope
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise UnsupportedModelError("Rotary embeddings of a part of a head are not supported.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise UnsupportedModelError(f"Rotary embedding of type {kind!r} is not supported.")
    trained = _size(values, "max_position_embeddings")
    original = _size(
        values,
        "original_max_position_embeddings",
        _size(rope, "original_max_position_embeddings", trained),
    )
    theta = _number(rope, "rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "yarn":
        return _yarn(rope, theta, original, _number(rope, "factor", trained / original))
    llama3 = kind == "llama3"
    return RopeConfig(
        kind=cast(RopeKind, kind),
        theta=theta,
        factor=_number(rope, "factor"),
        original_max_position_embeddings=original if llama3 else 0,
        low_freq_factor=_number(rope, "low_freq_factor") if llama3 else 1.0,
        high_freq_factor=_number(rope, "high_freq_factor") if llama3 else 4.0,
    )


def _yarn(rope: dict[str, Any], theta: float, original: int, factor: float) -> RopeConfig:
    """YaRN (arXiv:2309.00071); its factor on cos and sin is 0.1 ln(factor) + 1."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = mscale(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_number(rope, "attention_factor", attention_factor),
    )


def _number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModelError(f"{key} in config.json is {value!r}, not a positive number.")
    return float(value)


def _size(values: dict[str, Any], key: str, default: int | None = None) -> int:
    number = _number(values, key, default)
    if number != int(number):
        raise UnsupportedModelError(f"{key} in config.json is {number}, not a whole number.")
    return int(number)
