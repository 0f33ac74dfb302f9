"""A GGUF file as a folder in Hugging Face form, converted once and kept in the cache.

The file's metadata is described in ggml's docs/gguf.md. Weights become float32: what a quantized
block stands for needs more digits than bfloat16 has, and the loader rounds once to the type served.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from tqdm import tqdm

from lorakeet.models.cache import build_once
from lorakeet.models.config import UnsupportedModelError
from lorakeet.models.gguf_tokenizer import end_token_ids, write_tokenizer

_FORM = 1  # of the folders written; a change makes every file be converted again

_ARCHITECTURES = {  # Mistral models call themselves llama
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_ROPE_FREQS = "rope_freqs.weight"

Config = dict[str, Any]


def convert_gguf(file: Path, cache: Path) -> Path:
    """The folder under `cache` that holds the model of `file` in Hugging Face form.

    Holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors. It is found again by the file's content, wherever the file lies.
    Raises UnsupportedModelError if it is no GGUF file, or one that cannot be served.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    target = cache / "gguf" / f"{file.stem}-{digest[:16]}-{_FORM}"
    return build_once(target, lambda folder: _convert(file, folder))


def _convert(file: Path, folder: Path) -> None:
    try:
        reader = GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise UnsupportedModelError(f"{file} is not a readable GGUF file: {error}.") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tensors)
    write_tokenizer(metadata, folder)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": end_token_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_weights(folder / "model.safetensors", tensors, config, file.name)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")


# --- config ---------------------------------------------------------------------------------------


def _config(metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> Config:
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {kind!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}."
        )
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError("A GGUF model split over several files is not supported.")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{key}", default)
        if value is None:
            raise UnsupportedModelError(f"The GGUF file says nothing of {kind}.{key}.")
        if isinstance(value, list):  # one value a layer
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"Layers that differ in {key} are not supported.")
            value = value[0]
        return value

    if get("expert_count", 0):
        raise UnsupportedModelError("Mixture-of-experts models are not supported.")
    if "token_embd.weight" not in tensors:
        raise UnsupportedModelError("The GGUF file holds no token_embd.weight.")
    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    if (
        not get("attention.value_length", head_dim)
        == head_dim
        == get("rope.dimension_count", head_dim)
    ):
        raise UnsupportedModelError("Keys, values and rotary embedding must have one size.")
    config = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
        "rope_theta": get("rope.freq_base", 10000.0),
    }
    scaling = _rope_scaling(metadata, f"{kind}.rope.", config, tensors.get(_ROPE_FREQS))
    return config | {"rope_scaling": scaling}


def _rope_scaling(
    metadata: dict[str, Any], prefix: str, config: Config, freqs: ReaderTensor | None
) -> Config | None:
    """`rope_scaling` of a config.json: linear, yarn, llama3, or None."""
    said = {
        name.removeprefix(prefix + "scaling."): value
        for name, value in metadata.items()
        if name.startswith(prefix + "scaling.")
    }
    said.pop("finetuned", None)
    kind = said.pop("type", "none")
    factor = said.pop("factor", 1.0)
    original = said.pop("original_context_length", None)
    if said:
        raise UnsupportedModelError(f"Rope settings {', '.join(sorted(said))} are not supported.")
    if freqs is not None:
        if kind not in ("none", "llama3"):
            raise UnsupportedModelError(f"Rope of type {kind!r} with rope_freqs is not supported.")
        return _llama3_scaling(dequantize(freqs.data, freqs.tensor_type), config, original)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = original or config["max_position_embeddings"]
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise UnsupportedModelError(f"Rope of type {kind!r} is not supported.")


def _llama3_scaling(
    divisors: NDArray[np.float32], config: Config, original: int | None
) -> Config | None:
    """The llama3 settings that give these divisors of the rotary frequencies.

    The file holds the divisors alone. All models of this kind have the same low and high factors;
    the last, slowest frequency is divided by the full factor; that the rest agrees is checked.
    """
    if np.all(divisors == 1.0):
        return None
    low, high, factor, original = 1.0, 4.0, float(divisors[-1]), original or 8192
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    wavelengths = 2 * math.pi * config["rope_theta"] ** exponents
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError("The rope_freqs of this GGUF file fit no llama3 rope.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# --- weights --------------------------------------------------------------------------------------


def _write_weights(
    path: Path, tensors: dict[str, ReaderTensor], config: Config, title: str
) -> None:
    """Dequantize tensor by tensor into a safetensors file: no more than one is in memory.

    Its layout: the header's length (uint64), the header (JSON), then the tensors' bytes.
    """
    kept = {_name(name): tensor for name, tensor in tensors.items() if name != _ROPE_FREQS}
    header = json.dumps(_header(kept.items())).encode()
    header += b" " * (-len(header) % 8)  # tensors start aligned
    progress = tqdm(total=len(kept), desc=title, unit=" tensors", disable=None)
    with path.open("wb") as file, progress as bar:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in kept.items():
            file.write(np.ascontiguousarray(_values(name, tensor, config), dtype="<f4").data)
            bar.update()


def _header(tensors: Iterable[tuple[str, ReaderTensor]]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        end = offset + 4 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF names the fastest first
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return header


def _name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    names = _LAYER_NAMES if match and match[1] else _NAMES
    if match is None or match[2] not in names:
        raise UnsupportedModelError(f"The GGUF file holds a tensor of no known use: {name}.")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{names[match[2]]}.{match[3]}"


def _values(name: str, tensor: ReaderTensor, config: Config) -> NDArray[np.float32]:
    try:
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise UnsupportedModelError(f"GGUF tensors of type {kind} are not supported.") from None
    if config["model_type"] == "llama":
        if ".q_proj." in name:
            return _unpermute(values, config["num_attention_heads"])
        if ".k_proj." in name:
            return _unpermute(values, config["num_key_value_heads"])
    return values


def _unpermute(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """From rows for rotating neighbouring pairs (llama.cpp) to rows for rotating halves."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
