"""Both backends against a plain float64 loop: every mix of adapters, and none that can spread."""

import dataclasses
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.lora.adapter import Adapter, GroupSpec, Slot
from lorakeet.lora.backend import LoRABackend
from lorakeet.lora.batch import LoRABatch, build_lora_batch
from lorakeet.lora.pool import AdapterPool
from lorakeet.lora.row_tables import table_width
from lorakeet.lora.torch_backend import TorchBackend
from lorakeet.models.parallel import ParallelLinear
from support.lora_cases import POPULARITIES, popularity
from support.pools import (
    LAYERS,
    SPECS,
    Ranks,
    expected_delta,
    filled_pool,
    input_of,
    listed_batch,
    random_adapter,
    same_rank,
    with_vectors,
)

RANKS: list[Ranks] = [
    same_rank(1),
    same_rank(64),
    same_rank(7),
    {"qkv_proj": (0, 5, 12), "down_proj": (3, 0, 0), "lm_head": (2,)},
    {"o_proj": (8, 8, 8), "embed_tokens": (33,), "gate_up_proj": (0, 0, 4)},
]
ADAPTERS = {slot: random_adapter(ranks, slot) for slot, ranks in enumerate(RANKS, start=1)}
LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
# biases, some of modules without rank rows, and magnitudes
WITH_VECTORS = ADAPTERS | {
    2: with_vectors(ADAPTERS[2], bias=LINEAR, magnitude=[spec.name for spec in SPECS]),
    4: with_vectors(ADAPTERS[4], bias=["o_proj", "down_proj"]),
    5: with_vectors(ADAPTERS[5], magnitude=["o_proj", "embed_tokens"]),
}
SPEC = {spec.name: spec for spec in SPECS}


INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter needs a machine without CUDA"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A backend, and the device that it works on."""

    backend: LoRABackend
    device: str

    @property
    def keeps_bits(self) -> bool:
        """Triton's kernels add zeros for an adapter that leaves the layer alone, so -0.0 may become
        0.0; and a row's sums may be in another order beside other rows."""
        return isinstance(self.backend, TorchBackend)

    def batch(self, slots: NDArray[np.int32], pool: AdapterPool) -> LoRABatch:
        if self.device == "cpu" and not isinstance(self.backend, TorchBackend):
            return listed_batch(slots, pool)
        batch = build_lora_batch(slots, pool, pool.specs)
        assert batch is not None
        return batch

    def assert_untouched(self, found: Tensor, y: Tensor) -> None:
        if self.keeps_bits:
            assert torch.equal(bits(found), bits(y))
        else:
            assert torch.equal(found, y)


def target_of(name: str) -> Target:
    if name == "torch":
        return Target(TorchBackend(), "cpu")
    from lorakeet.lora.triton_backend import TritonBackend

    device = "cuda" if name == "triton-cuda" else "cpu"
    return Target(TritonBackend(device, 2**12), device)


@pytest.fixture(
    params=[
        "torch",
        pytest.param("triton", marks=INTERPRETER),
        pytest.param("triton-cuda", marks=pytest.mark.gpu),
    ]
)
def target(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


TORCH = target_of("torch")


@pytest.mark.parametrize(
    ("max_tokens", "max_rank", "needed"),
    [
        (100, 1, 3 * (24 + 7 * 2)),
        (600, 64, 3 * (1032 + 32 * 6)),  # a pass of 512 has more tiles of tokens
        (65536, 256, 3 * (4104 + 1024 * 18)),
        (131072, 512, 3 * (8200 + 2048 * 34)),
    ],
)
def test_there_are_counters_for_the_largest_pass(
    max_tokens: int, max_rank: int, needed: int
) -> None:
    """Of 256 adapters that list all they can: tiles of 32 rows, and of 16 or 64 tokens."""
    pytest.importorskip("triton")
    from lorakeet.kernels.rank_rows import RankRows
    from lorakeet.kernels.tiles import ROWS_AT_ONCE
    from lorakeet.kernels.token_tiles import cut_of
    from lorakeet.lora.triton_backend import most_counters

    width = table_width(2 * max_rank)
    pool = AdapterPool(SPECS, 2, 1, width, torch.float32, "cpu")
    found = most_counters(pool, max_tokens, 256)
    assert found == needed
    for num_tokens in {1, 16, 128, 512, 513, max_tokens - 1, max_tokens}:
        if num_tokens <= max_tokens:
            tokens = torch.empty(num_tokens, device="meta")
            rows = torch.empty(256 * width, device="meta")
            rank_rows = RankRows(*[tokens] * 5, *[rows] * 3, width)
            assert cut_of(rank_rows).num_pairs * 3 <= found
            assert -(-len(rows) // ROWS_AT_ONCE) * 3 <= found


@cache
def shared_pool(device: str = "cpu") -> AdapterPool:
    return filled_pool(ADAPTERS, device=device)


@cache
def pool_with_vectors(device: str = "cpu") -> AdapterPool:
    return filled_pool(WITH_VECTORS, device=device)


def add(
    target: Target,
    pool: AdapterPool,
    spec: GroupSpec,
    layer: int,
    x: Tensor,
    batch: LoRABatch,
    y: Tensor,
) -> Tensor:
    """y with the deltas added, in a tensor of its own, in host memory."""
    y = y.to(target.device, copy=True)
    backend = target.backend
    add = backend.add_embedding if spec.name == "embed_tokens" else backend.add_linear
    add(y, x.to(target.device), pool.layer(spec.name, layer), batch)
    return y.cpu()


def base_output(spec: GroupSpec, num_tokens: int) -> Tensor:
    """With negative zeros: adding zero to one is a change of bits."""
    y = torch.randn((num_tokens, spec.output_size), generator=torch.Generator().manual_seed(9))
    y[:, ::5] = -0.0
    return y


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype.itemsize == 4 else torch.int16)


@pytest.mark.parametrize("mix", [mix for mix in POPULARITIES if mix != "all_base"])
def test_every_mix_equals_the_plain_loop(target: Target, mix: str) -> None:
    slots = np.array(popularity(mix, 23, len(ADAPTERS)), dtype=np.int32)
    pool = shared_pool(target.device)
    batch = target.batch(slots, pool)
    for spec in SPECS:
        for layer in range(spec.num_layers):
            x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
            found = add(target, pool, spec, layer, x, batch, y)
            delta = expected_delta(spec, layer, x, ADAPTERS, slots)
            torch.testing.assert_close(found.double(), y + delta, atol=2e-5, rtol=1e-5)
            untouched = ~delta.any(dim=1)
            target.assert_untouched(found[untouched], y[untouched])
            assert torch.equal(bits(found[slots == 0]), bits(y[slots == 0]))


@settings(deadline=None, max_examples=60)
@given(
    slots=st.lists(st.integers(0, len(ADAPTERS)), min_size=1, max_size=40).filter(any),
    group=st.sampled_from([spec.name for spec in SPECS]),
    layer=st.integers(0, LAYERS - 1),
)
def test_any_batch_equals_the_plain_loop(slots: list[int], group: str, layer: int) -> None:
    spec, rows = SPEC[group], np.array(slots, dtype=np.int32)
    layer %= spec.num_layers
    x, y = input_of(spec, len(rows)), base_output(spec, len(rows))
    batch = TORCH.batch(rows, shared_pool())
    found = add(TORCH, shared_pool(), spec, layer, x, batch, y)
    want = y + expected_delta(spec, layer, x, ADAPTERS, rows)
    torch.testing.assert_close(found.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("mix", [mix for mix in POPULARITIES if mix != "all_base"])
@pytest.mark.parametrize("times", [1, 33])
def test_biases_and_magnitudes_in_every_mix(target: Target, mix: str, times: int) -> None:
    """Alone and in long runs."""
    num_runs = 23 if times == 1 else 6
    step = 1 if times == 1 else 2  # the layer in the middle is like the others
    slots = np.array(popularity(mix, num_runs, len(ADAPTERS)), dtype=np.int32).repeat(times)
    pool = pool_with_vectors(target.device)
    batch = target.batch(slots, pool)
    for spec in SPECS:
        for layer in range(0, spec.num_layers, step):
            x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
            found = add(target, pool, spec, layer, x, batch, y)
            delta = expected_delta(spec, layer, x, WITH_VECTORS, slots, y)
            torch.testing.assert_close(found.double(), y + delta, atol=2e-5, rtol=1e-5)
            assert torch.equal(bits(found[slots == 0]), bits(y[slots == 0]))


def base_layer(spec: GroupSpec, bias: bool, device: str) -> ParallelLinear:
    generator = torch.Generator().manual_seed(6)
    sizes = dict(zip(spec.slice_names, spec.slice_sizes, strict=True))
    layer = ParallelLinear(spec.input_size, sizes, bias).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    return layer.to(device)


@pytest.mark.parametrize("num_tokens", [1, 23, 128, 129, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_with_its_lora(target: Target, bias: bool, num_tokens: int) -> None:
    """Whichever way the number of rows takes; magnitudes take a part of the layer's bias too."""
    slots = np.array(popularity("with_base", num_tokens, len(ADAPTERS)), dtype=np.int32)
    slots[0] = 2
    pool = pool_with_vectors(target.device)
    batch = target.batch(slots, pool)
    for spec in SPECS:
        if spec.name in ("embed_tokens", "lm_head"):
            continue
        layer = base_layer(spec, bias, target.device)
        x, index = input_of(spec, num_tokens), spec.num_layers - 1
        weights = pool.layer(spec.name, index)
        found = target.backend.linear(layer, x.to(target.device), weights, batch)
        found = found.sum(0) if found.dim() == 3 else found
        base = x.double() @ layer.weight.double().cpu().T
        if layer.bias is not None:
            base += layer.bias.double().cpu()
        want = base + expected_delta(spec, index, x, WITH_VECTORS, slots, base)
        torch.testing.assert_close(found.cpu().double(), want, atol=5e-5, rtol=1e-5)


def test_what_is_left_to_the_epilogue_is_the_delta(target: Target) -> None:
    """Of passes too large for one kernel."""
    spec, slots = SPEC["gate_up_proj"], np.arange(150, dtype=np.int32) % 6
    pool = pool_with_vectors(target.device)
    batch, layer = target.batch(slots, pool), base_layer(spec, True, target.device)
    x, weights = input_of(spec, 150).to(target.device), pool.layer(spec.name, 1)
    whole = target.backend.linear(layer, x, weights, batch)
    y, delta = target.backend.linear_and_delta(layer, x, weights, batch)
    if isinstance(target.backend, TorchBackend):
        assert delta is None
        assert torch.equal(y, whole)
        return
    from lorakeet.kernels.lora_expand import sgemm_lora_b

    assert delta is not None
    assert torch.equal(y, layer.product(x))
    sgemm_lora_b(y, delta, spec.slice_sizes)
    assert torch.equal(y, whole)


@cache
def pool_of_the_first_layers(device: str = "cpu") -> tuple[dict[int, Adapter], AdapterPool]:
    """Slots 1 and 2 leave the second layer alone, slot 3 does not. All that the pool has there is
    NaN."""
    groups = LINEAR[:-1]
    plain, scaling = (
        random_adapter(dict.fromkeys(groups, (rank, 0, 0)), seed=rank) for rank in (5, 40)
    )
    scaling = with_vectors(scaling, magnitude=groups)
    for weights in scaling.groups.values():
        assert weights.magnitude is not None
        weights.magnitude[1:] = 0
    adapters = {1: plain, 2: scaling, 3: ADAPTERS[2]}
    pool = filled_pool(adapters, device=device)
    for name in groups:
        weights_there = pool.layer(name, 1)
        weights_there.a.fill_(torch.nan)
        weights_there.b.fill_(torch.nan)
    return adapters, pool


@pytest.mark.parametrize("num_tokens", [23, 129])
def test_a_layer_that_no_adapter_of_the_pass_changes_is_not_read(
    target: Target, num_tokens: int
) -> None:
    """Though they change another of its group, and an adapter of no row changes it."""
    adapters, pool = pool_of_the_first_layers(target.device)
    slots = (np.arange(num_tokens, dtype=np.int32) + 2) % 3
    for name in LINEAR[:-1]:
        spec, layer = SPEC[name], base_layer(SPEC[name], True, target.device)
        x, y = input_of(spec, num_tokens), base_output(spec, num_tokens)
        on_device = x.to(target.device)
        base = layer.product(on_device).cpu().double()
        for index in (0, 1):
            weights = pool.layer(name, index)
            found = target.backend.linear(layer, on_device, weights, target.batch(slots, pool))
            found = found.sum(0) if found.dim() == 3 else found
            delta = expected_delta(spec, index, x, adapters, slots, base)
            assert delta.any() == (index == 0)
            torch.testing.assert_close(found.cpu().double(), base + delta, atol=5e-5, rtol=1e-5)
            added = add(target, pool, spec, index, x, target.batch(slots, pool), y)
            if index == 1:
                assert torch.equal(bits(added), bits(y))
            else:
                want = y + expected_delta(spec, index, x, adapters, slots, y)
                torch.testing.assert_close(added.double(), want, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [23, 129])
def test_an_epilogue_reads_nothing_of_a_layer_that_no_adapter_of_the_pass_changes(
    target: Target, num_tokens: int
) -> None:
    adapters, pool = pool_of_the_first_layers(target.device)
    slots = (np.arange(num_tokens, dtype=np.int32) + 2) % 3
    spec = SPEC["gate_up_proj"]
    layer, x = base_layer(spec, True, target.device), input_of(spec, num_tokens)
    on_device = x.to(target.device)
    base = layer.product(on_device).cpu().double()
    for index in (0, 1):
        weights, batch = pool.layer(spec.name, index), target.batch(slots, pool)
        y, delta = target.backend.linear_and_delta(layer, on_device, weights, batch)
        want = base + expected_delta(spec, index, x, adapters, slots, base)
        if isinstance(target.backend, TorchBackend):
            assert delta is None
            torch.testing.assert_close(y.double(), want, atol=5e-5, rtol=1e-5)
            continue
        from lorakeet.kernels import activation, reference

        assert (delta is None) == (num_tokens == 23)
        found = activation.silu_mul(y, delta, torch.float32)
        exact = reference.silu_mul(want, torch.float64)
        # a product of two sums, each of which may be off by 5e-5
        torch.testing.assert_close(found.cpu().double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("moved", ["x", "weight"])
@pytest.mark.parametrize(("start", "more"), [(0, 1), (1, 4)], ids=["stride", "start"])
def test_rows_that_do_not_start_at_whole_16_bytes(
    target: Target, start: int, more: int, moved: str
) -> None:
    """The kernel of few rows does not take them; the values are those of rows that do."""

    def moved_rows(values: Tensor) -> Tensor:
        size = values.shape[1]
        wide = values.new_full((len(values), size + more), torch.nan)
        wide[:, start : start + size] = values
        return wide[:, start : start + size]

    slots = np.array(popularity("with_base", 23, len(ADAPTERS)), dtype=np.int32)
    pool = pool_with_vectors(target.device)
    for name in LINEAR[:-1]:
        spec, layer = SPEC[name], base_layer(SPEC[name], True, target.device)
        x, weights = input_of(spec, len(slots)).to(target.device), pool.layer(name, 0)
        want = target.backend.linear(layer, x, weights, target.batch(slots, pool))
        want = want.sum(0) if want.dim() == 3 else want
        if moved == "x":
            x = moved_rows(x)
        else:
            layer.weight.data = moved_rows(layer.weight)
        if not isinstance(target.backend, TorchBackend):
            from lorakeet.kernels.lora_linear import lora_linear_takes

            assert not lora_linear_takes(x, layer.weight)
        found = target.backend.linear(layer, x, weights, target.batch(slots, pool))
        assert found.shape == want.shape
        torch.testing.assert_close(found, want, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("times", [1, 40])
def test_sixteen_bit_magnitudes_are_rounded_once(times: int) -> None:
    adapters = {
        slot: with_vectors(random_adapter(ranks, slot, torch.bfloat16), ["o_proj"], ["o_proj"])
        for slot, ranks in enumerate(RANKS, start=1)
    }
    spec, slots = SPEC["o_proj"], np.array([1, 2, 0, 4, 4, 5], dtype=np.int32).repeat(times)
    x = input_of(spec, len(slots)).bfloat16()
    y = base_output(spec, len(slots)).bfloat16()
    pool = filled_pool(adapters, torch.bfloat16)
    found = add(TORCH, pool, spec, 0, x, TORCH.batch(slots, pool), y)
    exact = y.double() + expected_delta(spec, 0, x, adapters, slots, y)
    half_unit = torch.finfo(torch.bfloat16).eps * exact.abs() / 2
    assert ((found.double() - exact).abs() <= half_unit + 1e-5).all()


def test_a_weighted_list_of_two_adapters_rows() -> None:
    """What a blend is: the rows of both, scales and offsets times their weights, and the largest
    count of all: rows past a layer's rank, or of a module left alone, are zeros."""
    pool = filled_pool(WITH_VECTORS | {6: random_adapter({})})
    parts = ((2, 0.7), (4, -0.3))
    start = 0
    for slot, weight in parts:
        count = WITH_VECTORS[slot].rank + WITH_VECTORS[slot].has_bias
        place = slice(start, start + count)
        pool.tables.rows[6, place] = pool.tables.rows[slot, :count]
        pool.tables.scales[6, place] = weight * pool.tables.scales[slot, :count]
        pool.tables.offsets[6, place] = weight * pool.tables.offsets[slot, :count]
        start += count
    slots = np.array([6, 0, 1, 6], dtype=np.int32).repeat(40)
    batch = TORCH.batch(slots, pool)
    for spec in SPECS:
        pool.layer(spec.name, 0).ranks[6] = start
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
        found = add(TORCH, pool, spec, 0, x, batch, y)
        want = y.double()
        for slot, weight in parts:
            alone = np.where(slots == 6, slot, 0).astype(np.int32)
            want = want + weight * expected_delta(spec, 0, x, WITH_VECTORS, alone)
        want += expected_delta(spec, 0, x, WITH_VECTORS, np.where(slots == 1, 1, 0))
        torch.testing.assert_close(found.double(), want, atol=5e-5, rtol=1e-5)


def test_long_runs_of_one_adapter(target: Target) -> None:
    slots = np.repeat(np.array([2, 0, 3, 2], dtype=np.int32), 70)
    spec = SPEC["qkv_proj"]
    x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
    pool = shared_pool(target.device)
    found = add(target, pool, spec, 1, x, target.batch(slots, pool), y)
    want = y + expected_delta(spec, 1, x, ADAPTERS, slots)
    torch.testing.assert_close(found.double(), want, atol=2e-5, rtol=1e-5)


NO_ADAPTERS = {slot: random_adapter({}) for slot in range(6, 11)}


def write_factors(pool: AdapterPool, adapters: Mapping[int, Adapter]) -> Tensor:
    """Slot 5 + i is a blend of slot i alone, times a factor. Returns these, by i."""
    factors = torch.tensor([0, 0.5, 3.0, -0.75, 1.5, 0.25], dtype=torch.float64)
    for slot, adapter in adapters.items():
        part = (Slot(slot), adapter.rank, float(factors[slot]))
        pool.write_blend(Slot(5 + slot), [part])
    return factors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_of_a_prompt_beside_single_rows(dtype: torch.dtype) -> None:
    """The torch backend takes another way for long runs; a NaN adapter stays in its own."""
    adapters = {
        slot: random_adapter(ranks, slot, dtype) for slot, ranks in enumerate(RANKS, start=1)
    }
    pool = filled_pool({**adapters, 2: poisoned(adapters[2])} | NO_ADAPTERS, dtype)
    factors = write_factors(pool, adapters)
    slots = np.repeat([6, 7, 0, 8, 6, 7, 9, 10], [40, 33, 2, 1, 31, 1, 50, 32]).astype(np.int32)
    batch = TORCH.batch(slots, pool)
    own = np.where(slots, slots - 5, 0)
    healthy = own != 2
    for spec in SPECS:
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots)).to(dtype)
        x = x if spec.name == "embed_tokens" else x.to(dtype)
        found = add(TORCH, pool, spec, 0, x, batch, y)
        assert found[~healthy].isnan().all()
        delta = expected_delta(spec, 0, x, adapters, own)[healthy]
        exact = y[healthy].double() + delta * factors[own[healthy], None]
        half_unit = torch.finfo(dtype).eps * exact.abs() / 2
        assert ((found[healthy].double() - exact).abs() <= half_unit + 1e-4).all()


def test_a_rows_result_is_the_same_alone_and_in_any_mix(target: Target) -> None:
    slots = np.array(popularity("with_base", 12, len(ADAPTERS)), dtype=np.int32)
    pool = shared_pool(target.device)
    batch = target.batch(slots, pool)
    for spec in SPECS:
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
        together = add(target, pool, spec, 0, x, batch, y)
        for row in np.flatnonzero(slots):
            one = slice(row, row + 1)
            alone = add(target, pool, spec, 0, x[one], target.batch(slots[one], pool), y[one])
            if target.keeps_bits:
                assert torch.equal(bits(alone), bits(together[one]))
            else:
                torch.testing.assert_close(alone, together[one], rtol=1e-6, atol=2e-6)


def poisoned(adapter: Adapter) -> Adapter:
    groups = {
        name: dataclasses.replace(weights, a=weights.a * torch.nan, b=weights.b * torch.nan)
        for name, weights in adapter.groups.items()
    }
    return dataclasses.replace(adapter, groups=groups)


def test_nan_inputs_stay_in_their_own_rows(target: Target) -> None:
    slots = np.array([1, 2, 0, 3, 2, 4, 5, 1, 0, 1], dtype=np.int32)
    pool = pool_with_vectors(target.device)
    batch = target.batch(slots, pool)
    for spec in SPECS:
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
        healthy = add(target, pool, spec, 0, x, batch, y)
        bad = [0, 7]
        if spec.name == "embed_tokens":
            y[bad] = torch.nan
        else:
            x[bad] = torch.nan
        found = add(target, pool, spec, 0, x, batch, y)
        assert found[bad].isnan().all()
        others = np.setdiff1d(np.arange(len(slots)), bad)
        assert torch.equal(bits(found[others]), bits(healthy[others]))


def test_a_nan_adapter_stays_in_its_own_rows() -> None:
    """On the CPU, where a row meets no adapter but its own; elsewhere all weights are finite, which
    `lora.canonical` sees to."""
    pool = filled_pool({**ADAPTERS, 2: poisoned(ADAPTERS[2])})
    slots = np.array([1, 2, 0, 3, 2, 4, 5, 1, 0], dtype=np.int32)
    batch = TORCH.batch(slots, pool)
    for spec in SPECS:
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
        healthy = add(TORCH, shared_pool(), spec, 0, x, batch, y)
        if spec.name != "embed_tokens":
            x[7] = torch.nan
        found = add(TORCH, pool, spec, 0, x, batch, y)
        assert found[slots == 2].isnan().all()
        others = (slots != 2) & (np.arange(len(slots)) != 7)
        assert torch.equal(bits(found[others]), bits(healthy[others]))


@pytest.mark.parametrize(
    ("name", "dtype"),
    # Triton's interpreter, unlike a GPU, cuts bfloat16 off instead of rounding it
    [
        ("torch", torch.bfloat16),
        ("torch", torch.float16),
        pytest.param("triton", torch.float16, marks=INTERPRETER),
    ],
)
def test_sixteen_bits_are_summed_in_float32_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    target = target_of(name)
    adapters = {
        slot: random_adapter(ranks, slot, dtype) for slot, ranks in enumerate(RANKS, start=1)
    }
    pool = filled_pool(adapters, dtype)
    slots = np.array(popularity("with_base", 12, len(adapters)), dtype=np.int32)
    batch = target.batch(slots, pool)
    for spec in SPECS:
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots)).to(dtype)
        x = x if spec.name == "embed_tokens" else x.to(dtype)
        found = add(target, pool, spec, 0, x, batch, y)
        delta = expected_delta(spec, 0, x, adapters, slots)
        exact = y.double() + delta
        # half a unit in the last place, and the float32 sum's own error
        half_unit = torch.finfo(dtype).eps * exact.abs() / 2
        assert ((found.double() - exact).abs() <= half_unit + 1e-5).all()
        untouched = ~delta.any(dim=1)
        target.assert_untouched(found[untouched], y[untouched])


@pytest.mark.parametrize("times", [1, 33])
def test_a_blend_is_the_weighted_sum_of_its_adapters(target: Target, times: int) -> None:
    """Beside those adapters themselves, biases of theirs included; row by row and in long runs."""
    blended = {slot: WITH_VECTORS[slot] for slot in (1, 3, 4)}
    pool = filled_pool(WITH_VECTORS | {6: random_adapter({})}, device=target.device)
    parts = {4: -0.3, 1: 0.7, 3: 2.0}
    pool.write_blend(
        Slot(6),
        [
            (Slot(slot), blended[slot].rank + blended[slot].has_bias, weight)
            for slot, weight in parts.items()
        ],
    )
    slots = np.array([6, 0, 1, 6, 5, 2], dtype=np.int32).repeat(times)
    batch = target.batch(slots, pool)
    alone = np.where(slots == 6, 0, slots).astype(np.int32)
    for spec in SPECS:
        for layer in range(spec.num_layers):
            x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
            found = add(target, pool, spec, layer, x, batch, y)
            want = y + expected_delta(spec, layer, x, WITH_VECTORS, alone, y)
            for slot, weight in parts.items():
                own = np.where(slots == 6, slot, 0).astype(np.int32)
                want += weight * expected_delta(spec, layer, x, WITH_VECTORS, own)
            torch.testing.assert_close(found.double(), want, atol=5e-5, rtol=1e-5)


def test_a_module_that_no_adapter_of_the_batch_changes_costs_no_work() -> None:
    """No operation of torch runs at all."""
    batch = TORCH.batch(np.array([4, 0, 4], dtype=np.int32), shared_pool())
    y, x = torch.zeros(3, 20), input_of(SPEC["o_proj"], 3)
    layer = shared_pool().layer("o_proj", 0)
    TorchBackend().add_linear(y, x, layer, batch)  # builds what the pass shares
    with torch.profiler.profile() as profile:
        TorchBackend().add_linear(y, x, layer, batch)
    assert not profile.key_averages()
    assert not y.any()
