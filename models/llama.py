"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share. It knows nothing of adapters."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from lorakeet.models.batch import ForwardBatch
from lorakeet.models.config import ModelConfig
from lorakeet.models.cuts import ModelCuts, cut_model
from lorakeet.models.kv_cache import KVCache, LayerCache
from lorakeet.models.norm import RMSNorm
from lorakeet.models.ops import Ops, plan_ops
from lorakeet.models.parallel import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from lorakeet.models.process_group import ALONE, ProcessGroup
from lorakeet.models.rope import RotaryEmbedding


class LlamaAttention(nn.Module):
    """The heads of this rank."""

    def __init__(self, config: ModelConfig, layer: int, cuts: ModelCuts) -> None:
        super().__init__()
        self.num_heads = cuts.q.size // config.head_dim
        self.num_kv_heads = cuts.kv.size // config.head_dim
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_windows[layer]
        self.qkv_proj = QKVParallelLinear(config.hidden_size, cuts.q, cuts.kv, bias=config.qkv_bias)
        self.o_proj = RowParallelLinear(cuts.q, config.hidden_size, "o_proj", bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.cache: LayerCache | None = None  # bind_kv_cache

    def forward(self, x: Tensor, batch: ForwardBatch, ops: Ops) -> Tensor:
        """What o_proj gives: a part of the sum over the ranks."""
        attended = ops.attend(self, self.qkv_proj(x, batch))
        return self.o_proj(attended, batch)  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, cuts: ModelCuts) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(hidden, cuts.mlp, bias)
        self.down_proj = RowParallelLinear(cuts.mlp, hidden, "down_proj", bias)

    def forward(self, x: Tensor, batch: ForwardBatch, ops: Ops) -> Tensor:
        """What down_proj gives: a part of the sum over the ranks."""
        activated = self.gate_up_proj.project(x, batch, ops.silu_mul)
        return self.down_proj(activated, batch)  # type: ignore[no-any-return]


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, cuts: ModelCuts) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer, cuts)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config, cuts)

    def forward(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, ops: Ops, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """x: the input norm's output. Returns that of the norm that follows, and the residual."""
        y = self.self_attn(x, batch, ops)
        x, residual = ops.add_norm(residual, self.post_attention_layernorm, y)
        y = self.mlp(x, batch, ops)
        return ops.add_norm(residual, next_norm, y)


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, cuts: ModelCuts, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.embed_tokens = VocabParallelEmbedding(cuts.vocab, config.hidden_size, group)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, layer, cuts) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, batch: ForwardBatch) -> Tensor:
        residual = self.embed_tokens(batch.token_ids, batch)
        ops = plan_ops(batch, self.rotary.cos_sin(batch), residual.dtype, self.group)
        input_norms = [cast(RMSNorm, layer.input_layernorm) for layer in self.layers]
        x = input_norms[0](residual)
        for layer, next_norm in zip(self.layers, [*input_norms[1:], self.norm], strict=True):
            x, residual = layer(x, residual, batch, ops, next_norm)
        return x  # type: ignore[no-any-return]


class LlamaForCausalLM(nn.Module):
    """The whole model, or what one rank of a process group holds of it.

    Parameters are uninitialized: `weights.load_model` fills them. Raises UnsupportedModelError for
    a group that the model cannot be cut for.
    """

    def __init__(self, config: ModelConfig, group: ProcessGroup = ALONE) -> None:
        super().__init__()
        cuts = cut_model(config, group)
        self.config = config
        self.group = group
        self.checkpoint: Path | None = None  # the folder that its weights are from
        self.model = LlamaModel(config, cuts, group)
        self.lm_head = ParallelLMHead(cuts.vocab, config.hidden_size, group)
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
        """Scores of the next token: (L, hidden_size) → (L, vocab_size), in the model's dtype.

        All columns on every rank.
        """
        return self.lm_head(hidden_rows, batch)  # type: ignore[no-any-return]
