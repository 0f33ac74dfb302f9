"""The LoRA kernels against float64: every mix of adapters, rank and shape."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lorakeet.kernels import activation, reference, token_tiles
from lorakeet.kernels import lora_linear as decode
from lorakeet.kernels.delta import Delta
from lorakeet.kernels.lora_embedding import embedding_lora
from lorakeet.kernels.lora_expand import sgemm_lora_b
from lorakeet.kernels.lora_linear import MAX_TOKENS, lora_linear, lora_linear_takes
from lorakeet.kernels.lora_shrink import sgemm_lora_a
from support.lora_cases import (
    POPULARITIES,
    LoRACase,
    assert_rounded,
    lora_case,
    popularity,
    silu_mul_rounding,
)

RANKS = (1, 5, 8, 16, 3, 33)
SLICES = {"linear": (24,), "qkv": (21, 9, 9), "gate_up": (19, 19)}


@pytest.fixture(params=[512, 0], ids=["small-tiles", "large-tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of passes with few tokens and with many."""
    monkeypatch.setattr(token_tiles, "FEW_TOKENS", request.param)


def linear(case: LoRACase) -> Tensor:
    y = lora_linear(
        case.x,
        case.weight,
        case.bias,
        case.a,
        case.b,
        case.rank_rows,
        case.slice_sizes,
        case.arrivals.zero_(),
        case.counters,
    )
    assert not case.counters.any()
    return y.sum(0) if y.dim() == 3 else y


def delta_of(case: LoRACase) -> Delta:
    h = sgemm_lora_a(case.x, case.a, case.rank_rows, case.counters)
    assert not case.counters.any()
    return Delta(h, case.b, case.rank_rows)


def expanded(case: LoRACase) -> Tensor:
    """Shrink and expand, on a copy of y."""
    y = case.y.clone()
    sgemm_lora_b(y, delta_of(case), case.slice_sizes)
    return y


def bits(values: Tensor) -> Tensor:
    """Of which negative zeros have others than positive ones."""
    return values.view(torch.int32 if values.dtype.itemsize == 4 else torch.int16)


def assert_y_close(actual: Tensor, exact: Tensor, case: LoRACase) -> None:
    assert_rounded(actual.to(case.x.dtype), exact, case.rounding())


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize("name", POPULARITIES)
@pytest.mark.parametrize("num_tokens", [1, 7, 70])
def test_every_mix_of_adapters(
    num_tokens: int, name: str, kind: str, device: str, dtype: torch.dtype
) -> None:
    slots = popularity(name, num_tokens, len(RANKS))
    case = lora_case(slots, RANKS, slice_sizes=SLICES[kind], device=device, dtype=dtype)
    assert_y_close(linear(case), case.exact_linear(), case)
    assert_y_close(expanded(case), case.exact(), case)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("input_size", [16, 64, 100, 1024, 1500])
def test_input_sizes(input_size: int, device: str, dtype: torch.dtype) -> None:
    """Of which the larger ones are summed in parts."""
    case = lora_case([1, 0, 2], (8, 3), input_size=input_size, device=device, dtype=dtype)
    assert_y_close(linear(case), case.exact_linear(), case)
    assert_y_close(expanded(case), case.exact(), case)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 64, 65, MAX_TOKENS])
def test_lists_longer_than_a_tile(num_tokens: int, device: str, dtype: torch.dtype) -> None:
    ranks = [9] * 40
    slots = [1 + token % len(ranks) for token in range(num_tokens)]
    case = lora_case(slots, ranks, room=512, device=device, dtype=dtype)
    assert_y_close(linear(case), case.exact_linear(), case)
    assert_y_close(expanded(case), case.exact(), case)


@pytest.mark.usefixtures("tiles")
def test_one_adapter_of_many_tokens_and_rows(device: str, dtype: torch.dtype) -> None:
    """Its rows are in several tiles, and its tokens too."""
    case = lora_case([1] * 70 + [2] * 70, (70, 130), device=device, dtype=dtype)
    assert_y_close(expanded(case), case.exact(), case)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("ranks", [(31, 34), (63, 66), (1, 33, 32)])
def test_adapters_rows_in_as_many_tiles_as_can_be(
    ranks: tuple[int, ...], device: str, dtype: torch.dtype
) -> None:
    """From the last row of one tile to the first of another; and tiles of tokens share them."""
    slots = [1, *[2] * 130, *[len(ranks)] * 70]
    case = lora_case(slots, ranks, slice_sizes=(9, 5, 5), device=device, dtype=dtype)
    assert_y_close(expanded(case), case.exact(), case)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("ranks", [(64, 64), (65, 200), (3, 126, 70), (128,)])
def test_a_token_with_several_tiles_of_rows(
    ranks: tuple[int, ...], device: str, dtype: torch.dtype
) -> None:
    slots = [*range(len(ranks) + 1), len(ranks), 0, 1]
    case = lora_case(slots, ranks, room=300, slice_sizes=(21, 9, 9), device=device, dtype=dtype)
    assert_y_close(linear(case), case.exact_linear(), case)
    assert_y_close(expanded(case), case.exact(), case)


@pytest.mark.parametrize("num_tokens", [129, 192, 200, 256, 513])
def test_passes_past_those_of_decode(num_tokens: int, device: str, dtype: torch.dtype) -> None:
    slots = popularity("with_base", num_tokens, len(RANKS))
    case = lora_case(slots, RANKS, slice_sizes=(9, 5, 5), device=device, dtype=dtype)
    assert_y_close(expanded(case), case.exact(), case)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("slice_sizes", [(130,), (3, 2, 2), (128, 64, 64), (200, 129, 129), (1, 1)])
def test_slices_narrower_and_wider_than_a_tile(
    slice_sizes: tuple[int, ...], device: str, dtype: torch.dtype
) -> None:
    slots = popularity("with_base", 9, len(RANKS))
    case = lora_case(slots, RANKS, slice_sizes=slice_sizes, device=device, dtype=dtype)
    assert_y_close(linear(case), case.exact_linear(), case)
    assert_y_close(expanded(case), case.exact(), case)


@pytest.mark.parametrize("programs", [1, 3, 128])
def test_however_many_programs_share_a_shrink(
    programs: int, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_SHRINK_PROGRAMS", programs)
    slots, sizes = popularity("uniform", 9, len(RANKS)), (9, 5, 5)
    case = lora_case(slots, RANKS, input_size=1100, slice_sizes=sizes, device=device, dtype=dtype)
    assert_y_close(linear(case), case.exact_linear(), case)


def test_without_a_bias(device: str, dtype: torch.dtype) -> None:
    case = lora_case([3, 0, 1], RANKS, device=device, dtype=dtype)
    args = (case.rank_rows, case.slice_sizes, case.arrivals, case.counters)
    y = lora_linear(case.x, case.weight, None, case.a, case.b, *args)
    y = y.sum(0) if y.dim() == 3 else y
    without = replace(case, bias=torch.zeros_like(case.bias))
    assert_y_close(y, without.exact_linear(), case)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("num_tokens", [9, 70])
def test_a_layer_that_no_adapter_of_the_pass_changes(
    num_tokens: int, device: str, dtype: torch.dtype
) -> None:
    """Nothing of what the pool has there is read, though tokens own rows in the list."""
    slots = popularity("with_base", num_tokens, len(RANKS))
    case = lora_case(slots, RANKS, slice_sizes=(21, 9, 9), device=device, dtype=dtype)
    nothing = torch.full_like(case.a, torch.nan), torch.full_like(case.b, torch.nan)
    count = torch.zeros_like(case.rank_rows.count)
    left = replace(case, a=nothing[0], b=nothing[1], rank_rows=replace(case.rank_rows, count=count))
    base = torch.nn.functional.linear(case.x.double(), case.weight.double(), case.bias.double())
    assert_y_close(linear(left), base, case)
    assert torch.equal(bits(expanded(left)), bits(case.y))


def test_what_a_slot_lists_beside_its_rows_counts(device: str, dtype: torch.dtype) -> None:
    """Or else agreement with the reference would say little: each of them moves every token that
    has it, by more than what is taken for equal."""
    case = lora_case([1, 2, 3], (8, 8, 8), device=device, dtype=dtype)
    listed = case.rank_rows
    no_magnitudes = torch.full_like(listed.magnitudes, -1)
    for others, owners in (
        (replace(listed, scales=torch.ones_like(listed.scales)), [0, 1, 2]),
        (replace(listed, offsets=torch.zeros_like(listed.offsets)), [0, 1, 2]),
        (replace(listed, magnitudes=no_magnitudes), [2]),
    ):
        other = replace(case, rank_rows=others)
        for exact, changed in (
            (case.exact(), other.exact()),
            (case.exact_linear(), other.exact_linear()),
        ):
            moved = (exact - changed).abs().amax(1)
            assert (moved[owners] > 0.1).all()


@pytest.mark.usefixtures("tiles")
def test_base_rows_are_bit_for_bit_the_base_layers(device: str, dtype: torch.dtype) -> None:
    slots = [0, 1, 0, 2, 3]
    case = lora_case(slots, (8, 5, 4), device=device, dtype=dtype)
    bases = [token for token, slot in enumerate(slots) if slot == 0]
    assert torch.equal(bits(expanded(case)[bases]), bits(case.y[bases]))
    other = lora_case([0] * len(slots), (8, 5, 4), device=device, dtype=dtype)
    alone = replace(case, rank_rows=other.rank_rows)
    assert torch.equal(bits(linear(case)[bases]), bits(linear(alone)[bases]))


def test_negative_zeros_of_base_rows_stay(device: str, dtype: torch.dtype) -> None:
    case = lora_case([0, 1, 0, 2, 3], (8, 5, 4), device=device, dtype=dtype)
    case.y[[0, 2], ::5] = -0.0
    assert torch.equal(bits(expanded(case)[[0, 2]]), bits(case.y[[0, 2]]))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_row_stays_alone(value: float, device: str, dtype: torch.dtype) -> None:
    """NaN in one token's activations reaches no other, of its adapter or not."""
    slots = [1, 2, 1, 0, 2]
    case = lora_case(slots, (8, 5), device=device, dtype=dtype)
    x = case.x.clone()
    x[2] = value
    bad, others = replace(case, x=x), [0, 1, 3, 4]
    assert torch.equal(linear(bad)[others], linear(case)[others])
    assert torch.equal(expanded(bad)[others], expanded(case)[others])


@pytest.mark.usefixtures("tiles")
def test_a_row_is_the_same_whoever_its_neighbours_are(device: str, dtype: torch.dtype) -> None:
    ranks = (16, 8, 64)
    mixed = lora_case([2, 1, 3, 0, 3], ranks, device=device, dtype=dtype)
    for token, slot in enumerate(mixed.slots):
        alone = lora_case([slot] * 5, ranks, device=device, dtype=dtype)
        for work in (linear, expanded):
            torch.testing.assert_close(
                work(mixed)[token].float(), work(alone)[token].float(), rtol=2**-8, atol=1e-6
            )


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("size", [19, 300])
@pytest.mark.parametrize("name", POPULARITIES)
def test_silu_mul_adds_the_delta(name: str, size: int, device: str, dtype: torch.dtype) -> None:
    slots = popularity(name, 70, len(RANKS))
    case = lora_case(slots, RANKS, slice_sizes=(size, size), device=device, dtype=dtype)
    result = activation.silu_mul(case.y, delta_of(case), dtype)
    exact = case.exact()
    rounding = silu_mul_rounding(exact, case.rounding())
    assert_rounded(result, reference.silu_mul(exact, torch.float64), rounding)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("size", [19, 300])
def test_silu_mul_in_a_layer_that_no_adapter_of_the_pass_changes(
    size: int, device: str, dtype: torch.dtype
) -> None:
    """Nothing of the pool is read, nor of what the shrink has left unset."""
    slots = popularity("with_base", 70, len(RANKS))
    case = lora_case(slots, RANKS, slice_sizes=(size, size), device=device, dtype=dtype)
    assert (case.rank_rows.magnitudes >= 0).any()
    rank_rows = replace(case.rank_rows, count=torch.zeros_like(case.rank_rows.count))
    nothing = torch.full_like(case.a, torch.nan), torch.full_like(case.b, torch.nan)
    delta = delta_of(replace(case, a=nothing[0], b=nothing[1], rank_rows=rank_rows))
    assert delta.h.isnan().all()
    found = activation.silu_mul(case.y, delta, dtype)
    assert torch.equal(found, activation.silu_mul(case.y, None, dtype))


@pytest.mark.parametrize("name", POPULARITIES)
def test_embedding(name: str, device: str, dtype: torch.dtype) -> None:
    slots = popularity(name, 9, len(RANKS))
    case = lora_case(slots, RANKS, slice_sizes=(600,), device=device, dtype=dtype)
    y = case.y.clone()
    embedding_lora(y, case.token_ids, case.a[0], case.b, case.rank_rows)
    args = (case.token_ids, case.a[0], case.b, case.rank_rows)
    exact = reference.embedding_lora(case.y, *args, dtype=torch.float64)
    assert_y_close(y, exact, case)


def test_non_contiguous_input(device: str, dtype: torch.dtype) -> None:
    case = lora_case([1, 2, 0], (8, 5), device=device, dtype=dtype)
    wide = torch.full((3, 56), torch.nan, device=device, dtype=dtype)
    wide[:, :40] = case.x
    wide_y = torch.full((3, 30), torch.nan, device=device, dtype=dtype)
    wide_y[:, :24] = case.y
    view = replace(case, x=wide[:, :40])
    sgemm_lora_b(wide_y[:, :24], delta_of(view), view.slice_sizes)
    assert torch.equal(wide_y[:, :24], expanded(case))
    assert wide_y[:, 24:].isnan().all()
    assert torch.equal(linear(view), linear(case))
    assert torch.equal(expanded(view), expanded(case))


def test_what_the_kernel_of_few_rows_takes(device: str, dtype: torch.dtype) -> None:
    """Few rows, which start at whole 16 bytes."""
    weight = torch.zeros(8, 64, device=device, dtype=dtype)
    x = torch.zeros(MAX_TOKENS + 1, 72, device=device, dtype=dtype)
    assert lora_linear_takes(x[:MAX_TOKENS, :64], weight)
    assert not lora_linear_takes(x[:, :64], weight)
    assert not lora_linear_takes(x[:4, 1:65], weight)
    assert not lora_linear_takes(torch.zeros(4, 63, device=device, dtype=dtype), weight[:, :63])
