"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share. It knows nothing of adapters."""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from lorakeet.models.attention import Attention, plan_attention
from lorakeet.models.batch import ForwardBatch
from lorakeet.models.config import ModelConfig
from lorakeet.models.kv_cache import KVCache, LayerCache
from lorakeet.models.parallel import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from lorakeet.models.rope import RotaryEmbedding, rotate


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32, rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_windows[layer]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.q_size, config.kv_size, bias=config.qkv_bias
        )
        self.o_proj = RowParallelLinear(
            config.q_size, config.hidden_size, "o_proj", bias=config.o_bias
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.cache: LayerCache | None = None  # bind_kv_cache

    def forward(
        self, x: Tensor, batch: ForwardBatch, rotary: tuple[Tensor, Tensor], attend: Attention
    ) -> Tensor:
        assert self.cache is not None, "bind_kv_cache comes before the first pass"
        qkv = self.qkv_proj(x, batch).unflatten(-1, (-1, self.head_dim))
        num_qk = self.num_heads + self.num_kv_heads
        qk, v = qkv[:, :num_qk], qkv[:, num_qk:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        qk = rotate(qk, *rotary)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        attended = attend(q, k, v, self.cache, self.scale, self.sliding_window)
        return self.o_proj(attended.flatten(1), batch)  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(hidden, inner, bias)
        self.down_proj = RowParallelLinear(inner, hidden, "down_proj", bias)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        gate, up = self.gate_up_proj(x, batch).chunk(2, dim=-1)
        return self.down_proj(silu(gate) * up, batch)  # type: ignore[no-any-return]


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, x: Tensor, batch: ForwardBatch, rotary: tuple[Tensor, Tensor], attend: Attention
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x), batch)  # type: ignore[no-any-return]


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, batch: ForwardBatch) -> Tensor:
        rotary = self.rotary.cos_sin(batch)
        attend = plan_attention(batch)
        x = self.embed_tokens(batch.token_ids, batch)
        for layer in self.layers:
            x = layer(x, batch, rotary, attend)
        return self.norm(x)  # type: ignore[no-any-return]


class LlamaForCausalLM(nn.Module):
    """The whole model. Parameters are uninitialized: `weights.load_model` fills them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.tie_weights()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def tie_weights(self) -> None:
        """Share the embedding's tensor with the head, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)

    def bind_kv_cache(self, cache: KVCache) -> None:
        """Give each layer its own tensors of the cache."""
        for layer, layer_cache in zip(self.model.layers, cache.layers, strict=True):
            assert isinstance(layer, LlamaDecoderLayer)
            layer.self_attn.cache = layer_cache

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm: (T, hidden_size)."""
        return self.model(batch)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_rows: Tensor, batch: ForwardBatch) -> Tensor:
        """Scores of the next token: (L, hidden_size) → (L, vocab_size), in the model's dtype."""
        return self.lm_head(hidden_rows, batch)  # type: ignore[no-any-return]
