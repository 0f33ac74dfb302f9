"""Where a model takes LoRA deltas."""

from lorakeet.lora.adapter import GroupSpec
from lorakeet.models.config import ModelConfig


def group_specs(config: ModelConfig) -> tuple[GroupSpec, ...]:
    """The groups of a Llama-style decoder, in the order of its forward pass."""
    hidden, mlp, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv, layers = config.q_size, config.kv_size, config.num_hidden_layers
    return (
        GroupSpec("embed_tokens", 1, vocab, ("embed_tokens",), (hidden,)),
        GroupSpec("qkv_proj", layers, hidden, ("q_proj", "k_proj", "v_proj"), (q, kv, kv)),
        GroupSpec("o_proj", layers, q, ("o_proj",), (hidden,)),
        GroupSpec("gate_up_proj", layers, hidden, ("gate_proj", "up_proj"), (mlp, mlp)),
        GroupSpec("down_proj", layers, mlp, ("down_proj",), (hidden,)),
        GroupSpec("lm_head", 1, hidden, ("lm_head",), (vocab,)),
    )
