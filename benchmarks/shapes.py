"""Writes what GPU benchmarks serve: a model folder of Llama-3.1-8B's shape, and random adapters.

    python benchmarks/shapes.py FOLDER --adapters 32 --ranks 16

FOLDER/model holds the config and a word tokenizer, for `--load-format dummy`; FOLDER/adapters/a0 …
are PEFT adapters of all seven projections. Needs no network.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
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
    """One random bfloat16 adapter, with A and B of 0.01 standard deviation."""
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=random, device=device) * 0.01
        return values.bfloat16().cpu()

    tensors = {}
    for layer in range(int(str(config["num_hidden_layers"]))):
        for leaf, (block, inputs, outputs) in projections(config).items():
            prefix = f"base_model.model.model.layers.{layer}.{block}.{leaf}"
            tensors[f"{prefix}.lora_A.weight"] = draw(rank, inputs)
            tensors[f"{prefix}.lora_B.weight"] = draw(outputs, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": list(projections(config)),
                "bias": "none",
            }
        )
    )
    return folder


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
