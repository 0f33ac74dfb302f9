"""Writes what GPU benchmarks serve: a model folder of Llama-3.1-8B's shape, and random adapters.

    python benchmarks/shapes.py FOLDER --adapters 32 --ranks 16

FOLDER/model holds the config and a word tokenizer, for `--load-format dummy`; FOLDER/adapters/a0 …
are PEFT adapters of all seven projections. Needs no network.
"""

import argparse
import json
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import trange

# The shape: https://huggingface.co/meta-llama/Llama-3.1-8B, config.json.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The shape: https://huggingface.co/meta-llama/Llama-3.1-70B, config.json.
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "max_position_embeddings": 131072,
}

SHAPES = {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.1-70B-Instruct": LLAMA_70B,
}


def projections(config: dict[str, object]) -> dict[str, tuple[str, int, int]]:
    """Leaf name → (block, input size, output size) of the seven projections of a layer."""
    hidden, inner = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    head = int(str(config["head_dim"]))
    query = int(str(config["num_attention_heads"])) * head
    key = int(str(config["num_key_value_heads"])) * head
    return {
        "q_proj": ("self_attn", hidden, query),
        "k_proj": ("self_attn", hidden, key),
        "v_proj": ("self_attn", hidden, key),
        "o_proj": ("self_attn", query, hidden),
        "gate_proj": ("mlp", hidden, inner),
        "up_proj": ("mlp", hidden, inner),
        "down_proj": ("mlp", inner, hidden),
    }


def write_model(folder: Path, config: dict[str, object] = LLAMA_8B) -> Path:
    """Config and tokenizer of a model whose weights are made up at load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    vocab = {f"w{token}": token for token in range(int(str(config["vocab_size"])))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": f"w{config['bos_token_id']}",
                "eos_token": f"w{config['eos_token_id']}",
                "unk_token": "w0",
                "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
            }
        )
    )
    return folder


def write_adapter(folder: Path, config: dict[str, object], rank: int, seed: int) -> Path:
    """One random bfloat16 adapter of all projections, A and B of 0.01 standard deviation."""
    folder.mkdir(parents=True, exist_ok=True)
    leaves = list(projections(config))
    tensors = random_tensors(config, rank, seed, leaves, every=1)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(rank, leaves)))
    return folder


def write_copies(
    folder: Path,
    config: dict[str, object],
    ranks: Sequence[int],
    leaves: Sequence[str],
    every: int = 1,
) -> int:
    """Adapters FOLDER/a0 … of these ranks, on some projections of every so many-th layer.

    Those of a rank are copies but for two values, so no two have the same digest; there may be
    2**14. Returns their bytes.
    """
    bodies = {
        rank: save(random_tensors(config, rank, rank, leaves, every)) for rank in sorted(set(ranks))
    }
    layers = list(range(0, int(str(config["num_hidden_layers"])), every))

    def write(number: int) -> int:
        rank = ranks[number]
        target, body = folder / f"a{number}", memoryview(bodies[rank])
        target.mkdir(parents=True)
        start = 8 + int.from_bytes(body[:8], "little")  # safetensors: size, header, values
        # two bfloat16 from 2**-7 to 2**-6, with seven bits of the number each
        own = struct.pack("<HH", 0x3C00 | number % 128, 0x3C00 | number // 128)
        with (target / "adapter_model.safetensors").open("wb") as file:
            file.writelines((body[:start], own, body[start + len(own) :]))
        text = json.dumps(peft_config(rank, leaves) | {"layers_to_transform": layers})
        (target / "adapter_config.json").write_text(text)
        return len(body)

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(write, range(len(ranks))))


def random_tensors(
    config: dict[str, object], rank: int, seed: int, leaves: Sequence[str], every: int
) -> dict[str, torch.Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=random, device=device) * 0.01
        return values.bfloat16().cpu()

    tensors = {}
    for layer in range(0, int(str(config["num_hidden_layers"])), every):
        for leaf in leaves:
            block, inputs, outputs = projections(config)[leaf]
            prefix = f"base_model.model.model.layers.{layer}.{block}.{leaf}"
            tensors[f"{prefix}.lora_A.weight"] = draw(rank, inputs)
            tensors[f"{prefix}.lora_B.weight"] = draw(outputs, rank)
    return tensors


def peft_config(rank: int, leaves: Sequence[str]) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(leaves),
        "bias": "none",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--ranks", default="16", help="comma list, dealt out in turn")
    arguments = parser.parse_args()
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    write_model(arguments.folder / "model")
    for index in trange(arguments.adapters, desc="adapters"):
        target = arguments.folder / "adapters" / f"a{index}"
        write_adapter(target, LLAMA_8B, ranks[index % len(ranks)], seed=index)


if __name__ == "__main__":
    main()
