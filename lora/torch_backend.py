"""LoRA deltas on the CPU, where decode is bound by memory: float32 weights are read in place.

What a row of an adapter gives is said in `lorakeet.lora.pool`; most have scale 1 and offset 0.

Rows of few tokens each, as in decode, are a list of pairs: a token row, and one rank row of its
adapter.

- shrink: `h[pair] = A[rank row] · x[token]`, a matrix product sampled at the pairs;
- expand: `delta[token] = Σ h[pair] B[rank row]` over its pairs. B is rank-major, so this is an
  embedding bag: B is the table and h weighs its rows.

Runs of many adjacent rows, as in prefill, are dense products with the adapter's gathered rows.
Either way a token meets no rows but its own adapter's, and nothing past a true rank is read.
"""

import torch
from torch import Tensor, nn

from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import LayerWeights
from lorakeet.lora.torch_plan import Pairs, Run, get_plan
from lorakeet.models.parallel import ParallelLinear
from lorakeet.models.sparse import sampled_products


class TorchBackend:
    """See LoRABackend. Weights of 16 bits are widened, once for each layer and pass."""

    def linear(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> Tensor:
        y = layer.product(x)
        self.add_linear(y, x, weights, batch)
        return y

    def linear_and_delta(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> tuple[Tensor, None]:
        return self.linear(layer, x, weights, batch), None

    def add_linear(self, y: Tensor, x: Tensor, weights: LayerWeights, batch: LoRABatch) -> None:
        plan = get_plan(weights, batch, x.shape[0])
        if plan is None:
            return
        for run in plan.runs:
            a = weights.a.index_select(1, run.rows).flatten(0, 1)
            h = x[run.start : run.stop].to(plan.dtype) @ a.to(plan.dtype).t()
            _expand_run(h, weights, y, run)
        if (pairs := plan.pairs) is not None:
            a = _widen(weights.a, 1, pairs).flatten(0, 1)
            h = sampled_products(pairs.pattern, x.to(plan.dtype), a)
            _expand_pairs(h, weights.b, y, pairs)

    def add_embedding(
        self, y: Tensor, token_ids: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> None:
        plan = get_plan(weights, batch, token_ids.shape[0])
        if plan is None:
            return
        for run in plan.runs:
            h = weights.a[0][run.rows, token_ids[run.start : run.stop, None]]
            _expand_run(h.to(plan.dtype), weights, y, run)
        if (pairs := plan.pairs) is not None:
            h = weights.a[0][pairs.pair_rows, token_ids[pairs.pair_tokens]]
            _expand_pairs(h.to(plan.dtype), weights.b, y, pairs)


def _expand_run(h: Tensor, weights: LayerWeights, y: Tensor, run: Run) -> None:
    """h: A x, (rows of the run, slices * rank)."""
    h = _scale(h, run.factors, run.offsets)
    sizes = list(weights.slice_sizes)
    y = y[run.start : run.stop]
    base = y
    if run.magnitude is not None:
        base = y.to(h.dtype) * (1 + weights.b[run.magnitude].to(h.dtype))
    y_parts, base_parts = torch.split(y, sizes, dim=1), torch.split(base, sizes, dim=1)
    b_parts = torch.split(weights.b.index_select(0, run.rows).to(h.dtype), sizes, dim=1)
    h_parts = h.chunk(len(sizes), dim=1)
    for y_part, base_part, h_part, b_part in zip(
        y_parts, base_parts, h_parts, b_parts, strict=True
    ):
        if base is y and y.dtype == h.dtype:
            y_part.addmm_(h_part, b_part)
        else:
            y_part.copy_(torch.addmm(base_part.to(h.dtype), h_part, b_part))


def _scale(h: Tensor, factors: Tensor | None, offsets: Tensor | None) -> Tensor:
    if factors is not None:
        h = h * factors
    if offsets is not None:
        h = h + offsets
    return h


def _widen(values: Tensor, dim: int, pairs: Pairs) -> Tensor:
    if pairs.widened_rows is None:
        return values
    return values.index_select(dim, pairs.widened_rows).to(pairs.pattern.dtype)


def _expand_pairs(h: Tensor, b: Tensor, y: Tensor, pairs: Pairs) -> None:
    """h: A x, one value for each entry of the pattern, in its order."""
    if pairs.bag_values is not None:
        h = h.index_select(0, pairs.bag_values)
    h = _scale(h, pairs.bag_factors, pairs.bag_offsets)
    table = _widen(b, 0, pairs).view(-1, b.shape[1] // pairs.num_chunks)
    bags = nn.functional.embedding_bag(
        pairs.bag_rows, table, pairs.bag_starts, mode="sum", per_sample_weights=h
    )
    delta = bags.view(-1, y.shape[1])
    if (own := pairs.magnitudes) is not None:
        factors = b.index_select(0, own.rows).to(delta.dtype)
        delta.index_add_(0, own.positions, factors * y.index_select(0, own.tokens))
    if pairs.tokens is None:
        y.add_(delta)
    elif y.dtype == delta.dtype:
        y.index_add_(0, pairs.tokens, delta)
    else:
        y[pairs.tokens] = (y[pairs.tokens] + delta).to(y.dtype)
