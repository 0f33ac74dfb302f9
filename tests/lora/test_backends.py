"""Both backends against a plain float64 loop: every mix of adapters, and none that can spread."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.lora.adapter import Adapter, GroupSpec
from lorakeet.lora.backend import LoRABackend
from lorakeet.lora.batch import LoRABatch, build_lora_batch
from lorakeet.lora.pool import AdapterPool
from lorakeet.lora.torch_backend import TorchBackend
from support.lora_cases import POPULARITIES, popularity
from support.pools import (
    LAYERS,
    SPECS,
    Ranks,
    expected_delta,
    filled_pool,
    input_of,
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
# what Triton's kernels do not do yet: biases, some of modules without rank rows, and magnitudes
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


def target_of(name: str) -> Target:
    if name == "torch":
        return Target(TorchBackend(), "cpu")
    from lorakeet.lora.triton_backend import TritonBackend

    return Target(TritonBackend(), "cuda" if name == "triton-cuda" else "cpu")


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


@cache
def shared_pool(device: str = "cpu") -> AdapterPool:
    return filled_pool(ADAPTERS, device=device)


def make_batch(slots: NDArray[np.int32], device: str = "cpu") -> LoRABatch:
    batch = build_lora_batch(slots, device)
    assert batch is not None
    return batch


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
    batch = make_batch(slots, target.device)
    for spec in SPECS:
        for layer in range(spec.num_layers):
            x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
            found = add(target, shared_pool(target.device), spec, layer, x, batch, y)
            delta = expected_delta(spec, layer, x, ADAPTERS, slots)
            torch.testing.assert_close(found.double(), y + delta, atol=2e-5, rtol=1e-5)
            untouched = ~delta.any(dim=1)
            assert torch.equal(bits(found[untouched]), bits(y[untouched]))


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
    found = add(TORCH, shared_pool(), spec, layer, x, make_batch(rows), y)
    want = y + expected_delta(spec, layer, x, ADAPTERS, rows)
    torch.testing.assert_close(found.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("mix", [mix for mix in POPULARITIES if mix != "all_base"])
@pytest.mark.parametrize("times", [1, 40])
def test_biases_and_magnitudes_in_every_mix(mix: str, times: int) -> None:
    """Alone and in long runs."""
    slots = np.array(popularity(mix, 23, len(ADAPTERS)), dtype=np.int32).repeat(times)
    pool, batch = filled_pool(WITH_VECTORS), make_batch(slots)
    for spec in SPECS:
        for layer in range(spec.num_layers):
            x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
            found = add(TORCH, pool, spec, layer, x, batch, y)
            delta = expected_delta(spec, layer, x, WITH_VECTORS, slots, y)
            torch.testing.assert_close(found.double(), y + delta, atol=2e-5, rtol=1e-5)
            assert torch.equal(bits(found[slots == 0]), bits(y[slots == 0]))


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
    found = add(TORCH, pool, spec, 0, x, make_batch(slots), y)
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
        pool.row_table[6, place] = pool.row_table[slot, :count]
        pool.row_scales[6, place] = weight * pool.row_scales[slot, :count]
        pool.row_offsets[6, place] = weight * pool.row_offsets[slot, :count]
        start += count
    slots = np.array([6, 0, 1, 6], dtype=np.int32).repeat(40)
    batch = make_batch(slots)
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


def test_blocks_of_prefill_equal_those_of_decode(target: Target) -> None:
    slots = np.repeat(np.array([2, 0, 3, 2], dtype=np.int32), 70)
    spec = SPEC["qkv_proj"]
    x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
    batch = make_batch(slots, target.device)
    assert batch.segments.block == 64
    found = add(target, shared_pool(target.device), spec, 1, x, batch, y)
    want = y + expected_delta(spec, 1, x, ADAPTERS, slots)
    torch.testing.assert_close(found.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_of_a_prompt_beside_single_rows(dtype: torch.dtype) -> None:
    """The torch backend takes another way for long runs; a NaN adapter stays in its own."""
    adapters = {
        slot: random_adapter(ranks, slot, dtype) for slot, ranks in enumerate(RANKS, start=1)
    }
    pool = filled_pool({**adapters, 2: poisoned(adapters[2])}, dtype)
    slots = np.repeat([1, 2, 0, 3, 1, 2, 4, 5], [40, 33, 2, 1, 31, 1, 50, 32]).astype(np.int32)
    batch = make_batch(slots)
    factors = torch.arange(1, len(batch.segments.starts) + 1) / 4
    batch = LoRABatch(dataclasses.replace(batch.segments, scalings=factors))
    factor_of_row = torch.zeros(len(slots))
    for start, length, factor in zip(
        batch.segments.starts.tolist(), batch.segments.lengths.tolist(), factors, strict=True
    ):
        factor_of_row[batch.segments.permutation[start : start + length].long()] = factor
    healthy = slots != 2
    for spec in SPECS:
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots)).to(dtype)
        x = x if spec.name == "embed_tokens" else x.to(dtype)
        found = add(TORCH, pool, spec, 0, x, batch, y)
        assert found[~healthy].isnan().all()
        delta = expected_delta(spec, 0, x, adapters, slots)[healthy]
        exact = y[healthy].double() + delta * factor_of_row[healthy, None]
        half_unit = torch.finfo(dtype).eps * exact.abs() / 2
        assert ((found[healthy].double() - exact).abs() <= half_unit + 1e-4).all()


def test_a_rows_result_is_the_same_bits_alone_and_in_any_mix(target: Target) -> None:
    slots = np.array(popularity("with_base", 12, len(ADAPTERS)), dtype=np.int32)
    for spec in SPECS:
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
        together = add(
            target, shared_pool(target.device), spec, 0, x, make_batch(slots, target.device), y
        )
        for row in np.flatnonzero(slots):
            one = slice(row, row + 1)
            alone = add(
                target,
                shared_pool(target.device),
                spec,
                0,
                x[one],
                make_batch(slots[one], target.device),
                y[one],
            )
            assert torch.equal(bits(alone), bits(together[one]))


def poisoned(adapter: Adapter) -> Adapter:
    groups = {
        name: dataclasses.replace(weights, a=weights.a * torch.nan, b=weights.b * torch.nan)
        for name, weights in adapter.groups.items()
    }
    return dataclasses.replace(adapter, groups=groups)


def test_a_nan_adapter_and_nan_inputs_stay_in_their_own_rows(target: Target) -> None:
    pool = filled_pool({**ADAPTERS, 2: poisoned(ADAPTERS[2])}, device=target.device)
    slots = np.array([1, 2, 0, 3, 2, 4, 5, 1, 0], dtype=np.int32)
    batch = make_batch(slots, target.device)
    for spec in SPECS:
        x, y = input_of(spec, len(slots)), base_output(spec, len(slots))
        healthy = add(target, shared_pool(target.device), spec, 0, x, batch, y)
        if spec.name != "embed_tokens":
            x[7] = torch.nan
        found = add(target, pool, spec, 0, x, batch, y)
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
    batch = make_batch(slots, target.device)
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
        assert torch.equal(bits(found[untouched]), bits(y[untouched]))


def test_scalings_are_factors_on_the_delta() -> None:
    slots = np.array([1, 3, 3, 0, 1], dtype=np.int32)
    batch = make_batch(slots)
    factors = torch.tensor([0.5, 3.0])
    batch = LoRABatch(dataclasses.replace(batch.segments, scalings=factors))
    factor_of_row = torch.tensor([0.5, 3.0, 3.0, 0.0, 0.5]).unsqueeze(1)
    for spec in SPECS:
        x, y = input_of(spec, 5), base_output(spec, 5)
        found = add(TORCH, shared_pool(), spec, 0, x, batch, y)
        want = y + factor_of_row * expected_delta(spec, 0, x, ADAPTERS, slots)
        torch.testing.assert_close(found.double(), want, atol=5e-5, rtol=1e-5)


def test_a_row_in_two_segments_gets_both_deltas() -> None:
    """Blending: row 1 has adapters 1 and 3."""
    first, second = np.array([1, 1, 0], dtype=np.int32), np.array([0, 3, 3], dtype=np.int32)
    one, two = make_batch(first).segments, make_batch(second).segments
    segments = dataclasses.replace(
        one,
        permutation=torch.cat([one.permutation, two.permutation]),
        starts=torch.cat([one.starts, two.starts + len(one.permutation)]),
        lengths=torch.cat([one.lengths, two.lengths]),
        weight_indices=torch.cat([one.weight_indices, two.weight_indices]),
        scalings=torch.cat([one.scalings, two.scalings]),
    )
    for spec in SPECS:
        x, y = input_of(spec, 3), base_output(spec, 3)
        found = add(TORCH, shared_pool(), spec, 0, x, LoRABatch(segments), y)
        deltas = [expected_delta(spec, 0, x, ADAPTERS, slots) for slots in (first, second)]
        torch.testing.assert_close(found.double(), y + sum(deltas), atol=5e-5, rtol=1e-5)


def test_a_module_that_no_adapter_of_the_batch_changes_costs_no_work() -> None:
    """No operation of torch runs at all."""
    batch = make_batch(np.array([4, 0, 4], dtype=np.int32))
    y, x = torch.zeros(3, 20), input_of(SPEC["o_proj"], 3)
    layer = shared_pool().layer("o_proj", 0)
    TorchBackend().add_linear(y, x, layer, batch)  # builds what the pass shares
    with torch.profiler.profile() as profile:
        TorchBackend().add_linear(y, x, layer, batch)
    assert not profile.key_averages()
    assert not y.any()
