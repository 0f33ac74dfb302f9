"""Adapters made by hand, a pool that holds them, and the plain loop that says what they do."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.kernels.rank_rows import MIN_ROOM, RankRowArrays, RankRows, pack, unpack
from lorakeet.lora.adapter import Adapter, GroupSpec, GroupWeights, Slot
from lorakeet.lora.batch import LoRABatch, list_by_group, values_by_layer
from lorakeet.lora.pool import AdapterPool

LAYERS = 3
SPECS = (
    GroupSpec("embed_tokens", 1, 50, ("embed_tokens",), (20,)),
    GroupSpec("qkv_proj", LAYERS, 20, ("q_proj", "k_proj", "v_proj"), (24, 8, 8)),
    GroupSpec("o_proj", LAYERS, 24, ("o_proj",), (20,)),
    GroupSpec("gate_up_proj", LAYERS, 20, ("gate_proj", "up_proj"), (36, 36)),
    GroupSpec("down_proj", LAYERS, 36, ("down_proj",), (20,)),
    GroupSpec("lm_head", 1, 20, ("lm_head",), (50,)),
)
Ranks = Mapping[str, Sequence[int]]


def random_adapter(ranks: Ranks, seed: int = 0, dtype: torch.dtype = torch.float32) -> Adapter:
    """`ranks`: for each group that it changes, the rank in each layer."""
    generator = torch.Generator().manual_seed(seed)
    groups = {}
    for spec in SPECS:
        if spec.name not in ranks:
            continue
        rank = max(ranks[spec.name])
        a = torch.randn(
            (spec.num_layers, len(spec.slice_sizes), rank, spec.input_size), generator=generator
        )
        b = torch.randn((spec.num_layers, rank, spec.output_size), generator=generator)
        a, b = a * spec.input_size**-0.5, b * max(rank, 1) ** -0.5
        for layer, own in enumerate(ranks[spec.name]):
            a[layer, :, own:] = 0
            b[layer, own:] = 0
        some = [layer for layer, own in enumerate(ranks[spec.name]) if own]
        a, b = a[some].to(dtype), b[some].to(dtype)
        groups[spec.name] = GroupWeights(a, b, tuple(ranks[spec.name]))
    largest = max((max(own) for own in ranks.values()), default=0)
    return Adapter(f"digest-{seed}", largest, groups, (), 0)


def with_vectors(
    adapter: Adapter, bias: Sequence[str] = (), magnitude: Sequence[str] = (), seed: int = 50
) -> Adapter:
    """The adapter with random biases and magnitudes in these groups; a group may be a new one."""
    generator = torch.Generator().manual_seed(seed)
    groups = dict(adapter.groups)
    dtype = next(iter(groups.values())).b.dtype
    for name in dict.fromkeys([*bias, *magnitude]):
        spec = next(spec for spec in SPECS if spec.name == name)
        old = groups.get(name) or _no_rank(spec, dtype)

        def draw(names: Sequence[str], old: Tensor | None, spec: GroupSpec = spec) -> Tensor | None:
            if spec.name not in names:
                return old
            shape = (spec.num_layers, spec.output_size)
            return 0.5 * torch.randn(shape, generator=generator).to(dtype)

        groups[name] = replace(
            old, bias=draw(bias, old.bias), magnitude=draw(magnitude, old.magnitude)
        )
    return replace(adapter, groups=groups)


def _no_rank(spec: GroupSpec, dtype: torch.dtype) -> GroupWeights:
    a = torch.zeros(0, len(spec.slice_sizes), 0, spec.input_size, dtype=dtype)
    b = torch.zeros(0, 0, spec.output_size, dtype=dtype)
    return GroupWeights(a, b, (0,) * spec.num_layers)


def same_rank(rank: int) -> Ranks:
    return {spec.name: (rank,) * spec.num_layers for spec in SPECS}


def poisoned_pool(
    num_slots: int,
    num_rows: int,
    table_width: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> AdapterPool:
    """A pool whose weights are NaN wherever nobody has written."""
    pool = AdapterPool(SPECS, num_slots, num_rows, table_width, dtype, device)
    for spec in SPECS:
        for layer in range(spec.num_layers):
            pool.layer(spec.name, layer).a.fill_(torch.nan)
            pool.layer(spec.name, layer).b.fill_(torch.nan)
    if device != "cpu":
        torch.cuda.synchronize()  # the pool's copies wait for passes, and for nothing else
    return pool


def filled_pool(
    adapters: Mapping[int, Adapter],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> AdapterPool:
    """The adapters by slot, their rows scattered over a poisoned pool."""
    num_rows = sum(adapter.num_rows for adapter in adapters.values()) + 5
    pool = poisoned_pool(max(adapters) + 1, num_rows, 80, dtype, device)
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()
    for slot, adapter in adapters.items():
        own, rows = rows[: adapter.num_rows], rows[adapter.num_rows :]
        pool.write(Slot(slot), own, adapter).result()
    return pool


def listed_batch(slots: NDArray[np.int32], pool: AdapterPool) -> LoRABatch:
    """As CUDA gets it, of a pool in host memory: with the rank rows of all groups that a row's
    adapter changes."""
    groups = pool.tables.touched(np.unique(slots).tolist(), pool.specs)

    def to_tensors(arrays: RankRowArrays) -> RankRows:
        room = max(len(arrays.rows), MIN_ROOM)
        packed = torch.from_numpy(pack(arrays, room))
        return unpack(packed, len(slots), room, pool.tables.width)

    lists = list_by_group(slots, pool, groups)
    rank_rows = {group: to_tensors(arrays) for group, arrays in lists.items()}
    by_layer = torch.from_numpy(values_by_layer(slots, lists, pool))
    return LoRABatch(torch.from_numpy(slots), rank_rows, *by_layer)


def input_of(spec: GroupSpec, num_tokens: int, seed: int = 0) -> Tensor:
    """Activations (T, input), or token ids (T,) for the embedding."""
    generator = torch.Generator().manual_seed(seed)
    if spec.name == "embed_tokens":
        return torch.randint(spec.input_size, (num_tokens,), generator=generator)
    return torch.randn((num_tokens, spec.input_size), generator=generator)


def expected_delta(
    spec: GroupSpec,
    layer: int,
    x: Tensor,
    adapters: Mapping[int, Adapter],
    slots: NDArray[np.int32],
    base: Tensor | None = None,
) -> Tensor:
    """(T, output) float64: row by row, slice by slice, from the adapters as they were made.

    `base`: the base layer's output, of which magnitudes take a part.
    """
    delta = torch.zeros((len(slots), spec.output_size), dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        weights = adapters[slot].groups.get(spec.name) if slot else None
        if weights is None:
            continue
        if rank := weights.ranks[layer]:
            place = weights.layers.index(layer)
            a = weights.a[place, :, :rank].double()
            parts = torch.split(weights.b[place, :rank].double(), list(spec.slice_sizes), dim=1)
            outs = torch.split(delta[row], list(spec.slice_sizes))
            for index, (b, out) in enumerate(zip(parts, outs, strict=True)):
                h = a[0, :, x[row]] if spec.name == "embed_tokens" else a[index] @ x[row].double()
                out += h @ b
        if weights.bias is not None:
            delta[row] += weights.bias[layer].double()
        if weights.magnitude is not None and base is not None:
            delta[row] += weights.magnitude[layer].double() * base[row].double()
    return delta
