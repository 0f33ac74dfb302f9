"""LoRA on CUDA.

Few rows, as in decode: one kernel for a linear layer with its LoRA. Many, as in prefill: the
base product with the shrink beside it, then the expand, both in tiles of tokens.
"""

import torch
from torch import Tensor

from lorakeet.kernels.delta import Delta
from lorakeet.kernels.lora_embedding import embedding_lora
from lorakeet.kernels.lora_expand import sgemm_lora_b
from lorakeet.kernels.lora_linear import lora_linear, lora_linear_takes
from lorakeet.kernels.lora_shrink import sgemm_lora_a
from lorakeet.kernels.rank_rows import MIN_ROOM, RankRows
from lorakeet.kernels.token_tiles import most_pairs
from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import AdapterPool, LayerWeights
from lorakeet.lora.streams import SideStream
from lorakeet.models.parallel import ParallelLinear


def most_counters(pool: AdapterPool, max_tokens: int, max_adapters: int) -> int:
    """What any pass on a pool takes, of up to so many tokens with up to so many adapters."""
    width = pool.tables.width
    slices = max(len(spec.slice_sizes) for spec in pool.specs.values())
    return slices * most_pairs(max_tokens, max(max_adapters * width, MIN_ROOM), width)


class TritonBackend:
    """See LoRABackend. A group that no row's adapter changes is the base layer."""

    def __init__(self, device: torch.device | str, num_counters: int) -> None:
        """`num_counters`: see `most_counters`."""
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self._shrinks = SideStream(self._counters.device)

    def linear(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> Tensor:
        rank_rows = batch.rows_of(weights)
        if rank_rows is None:
            return layer.product(x)
        if lora_linear_takes(x, layer.weight):
            return self._small_linear(layer, x, weights, batch, rank_rows)
        y, delta = self._product_and_delta(layer, x, weights, rank_rows)
        sgemm_lora_b(y, delta, weights.slice_sizes)
        return y

    def linear_and_delta(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> tuple[Tensor, Delta | None]:
        rank_rows = batch.rows_of(weights)
        if rank_rows is None:
            return layer.product(x), None
        if lora_linear_takes(x, layer.weight):
            return self._small_linear(layer, x, weights, batch, rank_rows), None
        return self._product_and_delta(layer, x, weights, rank_rows)

    def add_linear(self, y: Tensor, x: Tensor, weights: LayerWeights, batch: LoRABatch) -> None:
        if (rank_rows := batch.rows_of(weights)) is not None:
            sgemm_lora_b(y, self._delta(x, weights, rank_rows), weights.slice_sizes)

    def add_embedding(
        self, y: Tensor, token_ids: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> None:
        if (rank_rows := batch.rows_of(weights)) is not None:
            embedding_lora(y, token_ids, weights.a[0], weights.b, rank_rows)

    def _small_linear(
        self,
        layer: ParallelLinear,
        x: Tensor,
        weights: LayerWeights,
        batch: LoRABatch,
        rank_rows: RankRows,
    ) -> Tensor:
        assert batch.arrivals is not None
        return lora_linear(
            x,
            layer.weight,
            layer.bias,
            weights.a,
            weights.b,
            rank_rows,
            weights.slice_sizes,
            batch.arrivals[weights.number :],
            self._counters,
        )

    def _product_and_delta(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, rank_rows: RankRows
    ) -> tuple[Tensor, Delta]:
        self._shrinks.wait_for_current()
        # Launched first: a product takes whole multiprocessors, a shrink what it leaves of them.
        y = layer.product(x)
        with self._shrinks.use():
            delta = self._delta(x, weights, rank_rows)
        self._shrinks.hold_current()
        return y, delta

    def _delta(self, x: Tensor, weights: LayerWeights, rank_rows: RankRows) -> Delta:
        return Delta(sgemm_lora_a(x, weights.a, rank_rows, self._counters), weights.b, rank_rows)
