"""What a pass does between its large products: each product's epilogue, on either kind of device.

A projection's output may come in parts (splits, T, N) that are to be summed up: on CUDA only. What
row-parallel projections give is to be summed up over the ranks.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from lorakeet.kernels.delta import Delta
from lorakeet.models.attention import TorchAttention
from lorakeet.models.batch import ForwardBatch
from lorakeet.models.kv_cache import LayerCache
from lorakeet.models.norm import RMSNorm
from lorakeet.models.process_group import ProcessGroup
from lorakeet.models.rope import rotate


class AttentionLayer(Protocol):
    """What attention needs to know of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    q_norm: RMSNorm | None  # over each head; both or neither
    k_norm: RMSNorm | None
    cache: LayerCache | None


class Ops(Protocol):
    """The epilogues of one pass."""

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """Norm and rotate q and k, write k and v to the cache, attend.

        qkv: (T, q_size + 2 · kv_size). Returns (T, q_size).
        """

    def add_norm(self, residual: Tensor, norm: RMSNorm, y: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of residual + y, and the sum itself: (T, hidden_size) each. Of y each rank has a
        part; residual and results are the same on all."""

    def silu_mul(self, gate_up: Tensor, delta: Delta | None) -> Tensor:
        """SiLU(gate) · up: (T, 2 · size) → (T, size). `delta` is still to be added to gate_up."""


def plan_ops(
    batch: ForwardBatch, rotary: tuple[Tensor, Tensor], dtype: torch.dtype, group: ProcessGroup
) -> Ops:
    """Triton's kernels on CUDA, torch elsewhere. `rotary`: RotaryEmbedding.cos_sin of the batch;
    `dtype`: of the hidden states."""
    if batch.token_ids.is_cuda:
        return TritonOps(batch, rotary, dtype, group)
    return TorchOps(batch, rotary, group)


class TorchOps:
    """Step by step. Deltas were added before: here they are None."""

    def __init__(
        self, batch: ForwardBatch, rotary: tuple[Tensor, Tensor], group: ProcessGroup
    ) -> None:
        self._rotary = rotary
        self._group = group
        self._attention = TorchAttention(batch)

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        assert layer.cache is not None, "bind_kv_cache comes before the first pass"
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        num_qk = layer.num_heads + layer.num_kv_heads
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, : layer.num_heads], qk[:, layer.num_heads :]
            qk = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        qk = rotate(qk, *self._rotary)
        q, k = qk[:, : layer.num_heads], qk[:, layer.num_heads :]
        return self._attention(q, k, v, layer.cache, layer.scale, layer.sliding_window).flatten(1)

    def add_norm(self, residual: Tensor, norm: RMSNorm, y: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + self._group.all_reduce(y)
        return norm(total), total

    def silu_mul(self, gate_up: Tensor, delta: Delta | None) -> Tensor:
        assert delta is None
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up


class TritonOps:
    """One kernel an epilogue, besides attention itself, which reads the batch's own tensors."""

    def __init__(
        self,
        batch: ForwardBatch,
        rotary: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        group: ProcessGroup,
    ) -> None:
        # there is no Triton on some CPU platforms
        from lorakeet.kernels import activation, all_reduce_norm, norm, paged_attention
        from lorakeet.kernels import rotary as rotary_kernels

        self._batch = batch
        self._cos, self._sin = rotary
        self._dtype = dtype
        self._group = group
        self._activation, self._norm, self._all_reduce_norm = activation, norm, all_reduce_norm
        self._rotary, self._attention = rotary_kernels, paged_attention

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        assert layer.cache is not None, "bind_kv_cache comes before the first pass"
        batch, keys, values = self._batch, layer.cache.keys, layer.cache.values
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = self._rotary.HeadNorms(
                layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
            )
        q = self._rotary.rotate_and_write(
            qkv,
            self._cos,
            self._sin,
            norms,
            keys,
            values,
            batch.kv_slots,
            layer.num_heads,
        )
        attended = self._attention.paged_attention(
            q,
            keys,
            values,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.num_decodes,
            batch.max_context_len,
            layer.scale,
            layer.sliding_window,
        )
        return attended.flatten(1)

    def add_norm(self, residual: Tensor, norm: RMSNorm, y: Tensor) -> tuple[Tensor, Tensor]:
        if (mailbox := self._group.mailbox) is not None and mailbox.takes(residual):
            return self._all_reduce_norm.all_reduce_add_rms_norm(
                y, residual, norm.weight, norm.eps, mailbox
            )
        if self._group.size > 1:
            y = self._group.all_reduce(y if y.ndim == 2 else y.sum(0).to(self._dtype))
        return self._norm.add_rms_norm(y, residual, norm.weight, norm.eps)

    def silu_mul(self, gate_up: Tensor, delta: Delta | None) -> Tensor:
        return self._activation.silu_mul(gate_up, delta, self._dtype)
