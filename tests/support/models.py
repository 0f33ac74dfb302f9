"""Tiny random models, written as Hugging Face folders: real files, real tokenizer, no network."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320  # rows of the embedding; the tokenizer has fewer entries, as in many real models
TOKENIZER_SIZE = 300
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, END_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_CORPUS = "the quick brown fox jumps over the lazy dog and then the other dog barks at the fox, "

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama_bias": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "rope_linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "rope_dynamic": (
        LlamaConfig,
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            "max_position_embeddings": 64,
        },
    ),
    "rope_llama3": (LlamaConfig, {"rope_parameters": _LLAMA3, "max_position_embeddings": 256}),
    "rope_yarn": (LlamaConfig, {"rope_parameters": _YARN, "max_position_embeddings": 256}),
    "odd_head_dim": (LlamaConfig, {"head_dim": 24}),
}


def tiny_model(folder: Path, kind: str = "llama", seed: int = 0, **config_overrides: Any) -> Path:
    """Write a random float32 model of `kind` (see KINDS) with its tokenizer; returns `folder`.

    Hidden 64, 3 layers, 4 heads, 2 KV heads; `config_overrides` go to the transformers config.
    The same arguments give the same weights. Logits vary by a few units between tokens.
    """
    config_type, kind_values = KINDS[kind]
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    config = config_type(**(values | kind_values | config_overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model, seed)
    model.generation_config.bos_token_id = BOS_ID
    model.generation_config.eos_token_id = [EOS_ID, END_ID]
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges: every text round-trips, some tokens hold many bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    assert tokenizer.get_vocab_size() == TOKENIZER_SIZE
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@torch.no_grad()
def _fill(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep the residual stream near unit size, with peaked attention and logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        elif parameter.ndim == 1:  # norms
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith("embed_tokens.weight"):
            parameter.copy_(0.4 * noise)
        else:
            gain = 3.0 if name.startswith("lm_head") else 1.4
            parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)
