"""LoRA deltas on CUDA: Triton kernels, one shrink and one expand a layer."""

from torch import Tensor

from lorakeet.kernels.lora_embedding import embedding_lora_a
from lorakeet.kernels.lora_expand import gate_up_lora_b, qkv_lora_b, sgemm_lora_b
from lorakeet.kernels.lora_shrink import sgemm_lora_a
from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import LayerWeights


class TritonBackend:
    """See LoRABackend. The kernels return at once for slots that leave the layer alone."""

    def add_linear(self, y: Tensor, x: Tensor, weights: LayerWeights, batch: LoRABatch) -> None:
        ranks, row_table = weights.ranks, weights.row_table
        h = sgemm_lora_a(x, weights.a, batch.segments, ranks, row_table)
        expand = (h, weights.b, batch.segments, ranks, row_table, y)
        match weights.slice_sizes:
            case (_,):
                sgemm_lora_b(*expand)
            case (_, _):
                gate_up_lora_b(*expand)
            case (q_size, kv_size, _):
                qkv_lora_b(*expand, q_size, kv_size)
            case _:
                raise ValueError(f"no kernel for {len(weights.slice_sizes)} slices")

    def add_embedding(
        self, y: Tensor, token_ids: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> None:
        ranks, row_table = weights.ranks, weights.row_table
        h = embedding_lora_a(token_ids, weights.a[0], batch.segments, ranks, row_table)
        sgemm_lora_b(h, weights.b, batch.segments, ranks, row_table, y)
