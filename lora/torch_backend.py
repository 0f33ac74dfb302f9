"""LoRA deltas on the CPU, where decode is bound by memory: float32 weights are read in place.

Work is a list of pairs: a token row, and one rank row of its adapter.

- shrink: `h[pair] = A[rank row] · x[token]`, a matrix product sampled at the pairs;
- expand: `delta[token] = Σ h[pair] B[rank row]` over its pairs. B is rank-major, so this is an
  embedding bag: B is the table and h weighs its rows.

A token meets no rows but its own, so its result is the same bits in any batch, and nothing past a
true rank is read. The cost for prefill is a few times that of dense products, but small beside the
base layer's.
"""

from torch import Tensor, nn

from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import LayerWeights
from lorakeet.lora.torch_plan import Plan, get_plan
from lorakeet.models.sparse import sampled_products


class TorchBackend:
    """See LoRABackend. Weights of 16 bits are widened, once for each layer and pass."""

    def add_linear(self, y: Tensor, x: Tensor, weights: LayerWeights, batch: LoRABatch) -> None:
        plan = get_plan(weights, batch, x.shape[0])
        if plan is None:
            return
        a = _widen(weights.a, 1, plan).flatten(0, 1)
        h = sampled_products(plan.pattern, x.to(a.dtype), a)
        _expand(h, weights.b, y, plan)

    def add_embedding(
        self, y: Tensor, token_ids: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> None:
        plan = get_plan(weights, batch, token_ids.shape[0])
        if plan is None:
            return
        h = weights.a[0][plan.pair_rows, token_ids[plan.pair_tokens]]
        _expand(h.to(plan.pattern.dtype), weights.b, y, plan)


def _widen(values: Tensor, dim: int, plan: Plan) -> Tensor:
    if plan.widened_rows is None:
        return values
    return values.index_select(dim, plan.widened_rows).to(plan.pattern.dtype)


def _expand(h: Tensor, b: Tensor, y: Tensor, plan: Plan) -> None:
    """h: one value for each entry of the pattern, in its order."""
    if plan.bag_values is not None:
        h = h.index_select(0, plan.bag_values)
    if plan.bag_scalings is not None:
        h = h * plan.bag_scalings
    table = _widen(b, 0, plan).view(-1, b.shape[1] // plan.num_chunks)
    bags = nn.functional.embedding_bag(
        plan.bag_rows, table, plan.bag_starts, mode="sum", per_sample_weights=h
    )
    delta = bags.view(-1, y.shape[1])
    if y.dtype == delta.dtype:
        y.index_add_(0, plan.tokens, delta)
    else:
        y[plan.tokens] = (y[plan.tokens] + delta).to(y.dtype)
