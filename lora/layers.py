"""The wrappers put around the model's layers: the base layer, plus the delta of each row's adapter.

`y = W x + s · B (A x)` (Hu et al., LoRA, 2021; s as PEFT computes it is already in B).
"""

from typing import cast

from torch import Tensor, nn

from lorakeet.lora.backend import LoRABackend
from lorakeet.lora.batch import LoRABatch, LoRAForwardBatch
from lorakeet.lora.pool import AdapterPool, LayerWeights
from lorakeet.models.batch import ForwardBatch
from lorakeet.models.parallel import (
    Epilogue,
    ParallelLinear,
    ParallelLMHead,
    VocabParallelEmbedding,
)


class BaseLayerWithLoRA(nn.Module):
    """Without an adapter in the batch, exactly the base layer."""

    def __init__(
        self, base_layer: nn.Module, lora_weights: LayerWeights, backend: LoRABackend
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_weights = lora_weights
        self.backend = backend

    @property
    def weight(self) -> Tensor:
        """The base layer's."""
        return cast(Tensor, self.base_layer.weight)

    def _lora_batch(self, batch: ForwardBatch) -> LoRABatch | None:
        return batch.lora if isinstance(batch, LoRAForwardBatch) else None


class LinearWithLoRA(BaseLayerWithLoRA):
    """y of every row, with the delta of its adapter."""

    base_layer: ParallelLinear

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """(T, input) → (T, output), or its parts: see `LoRABackend.linear`."""
        lora = self._lora_batch(batch)
        if lora is None:
            return self.base_layer(x, batch)  # type: ignore[no-any-return]
        return self.backend.linear(self.base_layer, x, self.lora_weights, lora)


class VocabParallelEmbeddingWithLoRA(BaseLayerWithLoRA):
    """Its A is looked up by token id, not multiplied. The delta is added after the all-reduce."""

    base_layer: VocabParallelEmbedding

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x: (T,) token ids."""
        own = batch.own_embeddings if isinstance(batch, LoRAForwardBatch) else None
        if own is None:
            return self._embed(x, batch)
        # added tokens have no row in the base's table, whatever they get here is overwritten
        y = self._embed(x.clamp(max=self.base_layer.vocab_size - 1), batch)
        own.embed(y, x)
        return y

    def _embed(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        y: Tensor = self.base_layer(token_ids, batch)
        if (lora := self._lora_batch(batch)) is not None:
            self.backend.add_embedding(y, token_ids, self.lora_weights, lora)
        return y


class ColumnParallelLinearWithLoRA(LinearWithLoRA):
    pass


class QKVParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    """Three slices: q, k and v."""


class MergedColumnParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    """Two slices: gate and up."""

    def project(self, x: Tensor, batch: ForwardBatch, then: Epilogue) -> Tensor:
        lora = self._lora_batch(batch)
        if lora is None:
            return then(self.base_layer(x, batch), None)
        return then(*self.backend.linear_and_delta(self.base_layer, x, self.lora_weights, lora))


class RowParallelLinearWithLoRA(LinearWithLoRA):
    """Each rank's part of the delta joins its part of the base's sum, before the one all-reduce."""


class ParallelLMHeadWithLoRA(BaseLayerWithLoRA):
    """Sees only the rows whose logits are wanted, so it has batch info of its own.

    Each rank adds the delta of its part of the vocabulary; an adapter's own rows are whole on each.
    """

    base_layer: ParallelLMHead

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """(L, hidden) → (L, columns): more than the base's when an adapter has added tokens."""
        logits = self.base_layer.product(x)
        if (lora := self._lora_batch(batch)) is not None:
            self.backend.add_linear(logits, x, self.lora_weights, lora)
        logits = self.base_layer.gather(logits)
        own = batch.logits_vocabulary if isinstance(batch, LoRAForwardBatch) else None
        return logits if own is None else own.score(logits, x)

    def _lora_batch(self, batch: ForwardBatch) -> LoRABatch | None:
        return batch.logits_lora if isinstance(batch, LoRAForwardBatch) else None


# group → where its layers are, and what is put around each of them
_IN_LAYER: dict[str, tuple[str, type[BaseLayerWithLoRA]]] = {
    "qkv_proj": ("self_attn", QKVParallelLinearWithLoRA),
    "o_proj": ("self_attn", RowParallelLinearWithLoRA),
    "gate_up_proj": ("mlp", MergedColumnParallelLinearWithLoRA),
    "down_proj": ("mlp", RowParallelLinearWithLoRA),
}
_IN_MODEL: dict[str, tuple[str, type[BaseLayerWithLoRA]]] = {
    "embed_tokens": ("model", VocabParallelEmbeddingWithLoRA),
    "lm_head": ("", ParallelLMHeadWithLoRA),
}


def wrap_model(model: nn.Module, pool: AdapterPool, backend: LoRABackend) -> None:
    """Put a wrapper around each layer of the model that the pool has a group for.

    `model` has the attributes named in docs/architecture.md. Raises ValueError for a group that
    belongs to no layer.
    """
    for group in pool.specs:
        if group in _IN_LAYER:
            parent_name, wrapper = _IN_LAYER[group]
            layers = cast(nn.ModuleList, model.get_submodule("model.layers"))
            parents = [layer.get_submodule(parent_name) for layer in layers]
        elif group in _IN_MODEL:
            parent_name, wrapper = _IN_MODEL[group]
            parents = [model.get_submodule(parent_name)]
        else:
            raise ValueError(f"no layer takes the adapters of group {group!r}")
        for index, parent in enumerate(parents):
            base_layer = parent.get_submodule(group)
            setattr(parent, group, wrapper(base_layer, pool.layer(group, index), backend))
