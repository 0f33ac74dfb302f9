"""GGUF files of tiny models, written by the gguf library as llama.cpp's converter lays them out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

_ARCHS = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}


def write_gguf(
    file: Path,
    folder: Path,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """`folder`, a model of `tiny_model`, as one file.

    `metadata` goes over what the model says (None leaves a key out), `tensors` are added.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(file, arch)
    values = _model_values(arch, config) | _tokenizer_values(folder) | (metadata or {})
    for key, value in values.items():
        _add(writer, key, value)
    names = get_tensor_name_map(_ARCHS[arch], config["num_hidden_layers"])
    weights = load_file(folder / "model.safetensors")
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    for name, weight in weights.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
            halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
            weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        kind = quantization if weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(new_name, quantize(weight, kind), raw_dtype=kind)
    for name, weight in (tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _model_values(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if "original_max_position_embeddings" in rope:
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {f"{arch}.{key}": value for key, value in values.items()}


def _tokenizer_values(folder: Path) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if token in special else TokenType.NORMAL) for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab[config["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocab[config["eos_token"]],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
