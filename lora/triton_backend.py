"""LoRA deltas on CUDA.

Decode: the shrink beside the base product, the expand left to the kernel that follows. Prefill:
both after the base product, in large tiles.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lorakeet.kernels.delta import ROWS
from lorakeet.kernels.lora_embedding import embedding_lora_a
from lorakeet.kernels.lora_expand import gate_up_lora_b, qkv_lora_b, sgemm_lora_b
from lorakeet.kernels.lora_shrink import empty_sums, sgemm_lora_a
from lorakeet.kernels.segments import Delta
from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import LayerWeights


class TritonBackend:
    """See LoRABackend. The kernels return at once for slots that leave the layer alone."""

    def __init__(self) -> None:
        self._side_stream = _new_stream()

    def project(
        self, base: Callable[[], Tensor], x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> tuple[Tensor, Delta | None]:
        segments, ranks, row_table = batch.segments, weights.ranks, weights.row_table
        if segments.block > ROWS:
            y = base()
            self.add_linear(y, x, weights, batch)
            return y, None
        h = empty_sums(weights.a, segments, row_table)
        with self._beside():
            sgemm_lora_a(x, weights.a, segments, ranks, row_table, h)
        y = base()
        if self._side_stream is not None:
            torch.cuda.current_stream().wait_stream(self._side_stream)
        return y, Delta(h, weights.b, segments, ranks, row_table)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the side stream, after what was launched so far."""
        if self._side_stream is None:
            yield
            return
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            yield

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


def _new_stream() -> torch.cuda.Stream | None:
    """None in Triton's interpreter."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
