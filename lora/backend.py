"""What the wrapped layers ask for: one interface, a way to do it for each kind of device."""

from typing import Protocol

from torch import Tensor

from lorakeet.kernels.delta import Delta
from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import AdapterPool, LayerWeights
from lorakeet.lora.torch_backend import TorchBackend
from lorakeet.models.parallel import ParallelLinear


class LoRABackend(Protocol):
    """Adds the delta of each row's adapter to what the base layer gave.

    Deltas are accumulated in float32 and rounded once, with the sum. Rows without an adapter, or
    whose adapter leaves the layer alone, are not touched: not one bit of them changes.
    """

    def linear(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> Tensor:
        """The base layer's output for x with every row's delta: (T, output), or its parts
        (splits, T, output) in float32, which `models.ops` sums up."""

    def linear_and_delta(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> tuple[Tensor, Delta | None]:
        """As `linear`, but a delta may be left to whoever reads the output next."""

    def add_linear(self, y: Tensor, x: Tensor, weights: LayerWeights, batch: LoRABatch) -> None:
        """`y[t] += scaling * B (A x[t])`, slice by slice. x: (T, input), y: (T, output)."""

    def add_embedding(
        self, y: Tensor, token_ids: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> None:
        """`y[t] += scaling * B A[:, token_ids[t]]`. token_ids: (T,) int64, y: (T, hidden)."""


def make_backend(pool: AdapterPool, max_tokens: int, max_adapters: int) -> LoRABackend:
    """The backend for passes on a pool, of up to so many tokens with up to so many adapters."""
    if pool.device.type != "cuda":
        return TorchBackend()
    # Triton exists only for Linux
    from lorakeet.lora.triton_backend import TritonBackend, most_counters

    return TritonBackend(pool.device, most_counters(pool, max_tokens, max_adapters))
