"""Shrink and expand against float64: every mix of adapters, rank and shape."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from lorakeet.kernels import lora_embedding, lora_expand, lora_shrink, reference
from support.lora_cases import POPULARITIES, LoRACase, lora_case, popularity

RANKS = (1, 5, 8, 16, 3)
SLICES = {"linear": (24,), "qkv": (21, 9, 9), "gate_up": (19, 19)}


def shrink(case: LoRACase) -> Tensor:
    return lora_shrink.sgemm_lora_a(case.x, case.a, *case.block_args)


def expand(case: LoRACase, h: Tensor) -> Tensor:
    """The kernel for the case's slices, on a copy of y."""
    y = case.y.clone()
    match case.slice_sizes:
        case (_,):
            lora_expand.sgemm_lora_b(h, case.b, *case.block_args, y)
        case (_, _):
            lora_expand.gate_up_lora_b(h, case.b, *case.block_args, y)
        case (q_size, kv_size, _):
            lora_expand.qkv_lora_b(h, case.b, *case.block_args, y, q_size, kv_size)
    return y


def exact_shrink(case: LoRACase) -> Tensor:
    return reference.sgemm_lora_a(case.x, case.a, *case.block_args, dtype=torch.float64)


def exact_expand(case: LoRACase, h: Tensor) -> Tensor:
    """y + scaling · h B row by row from the definition, float64; h (splits, P, slices, R)."""
    y = case.y.double()
    segments, ends = case.segments, [0, *accumulate(case.slice_sizes)]
    for start, length, slot, scaling in zip(
        segments.starts.tolist(),
        segments.lengths.tolist(),
        segments.weight_indices.tolist(),
        segments.scalings.double().tolist(),
        strict=True,
    ):
        for position in range(start, start + length):
            row, rows = int(segments.permutation[position]), case.rows_of(slot)
            sums = h[:, position, :, : len(rows)].double().sum(0)
            for index, (first, end) in enumerate(pairwise(ends)):
                y[row, first:end] += scaling * (sums[index] @ case.b[rows, first:end].double())
    return y


def assert_h_close(actual: Tensor, exact: Tensor) -> None:
    """NaN must be in the same places: a kernel writes what is its own, and nothing else."""
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual.double().sum(0), exact[0], rtol=1e-5, atol=1e-5, equal_nan=True
    )


def assert_y_close(actual: Tensor, exact: Tensor) -> None:
    """One rounding of y; in half precision h counts with tf32's eleven bits."""
    rtol, atol = {
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (2**-8, 4e-3),
        torch.float16: (2**-10, 4e-3),
    }[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize("block", [4, 32])
@pytest.mark.parametrize("name", POPULARITIES)
def test_every_mix_of_adapters(
    name: str, block: int, kind: str, device: str, dtype: torch.dtype
) -> None:
    case = lora_case(
        popularity(name, 11, len(RANKS)),
        RANKS,
        slice_sizes=SLICES[kind],
        block=block,
        static=block == 4,
        device=device,
        dtype=dtype,
    )
    h = shrink(case)
    assert_h_close(h, exact_shrink(case))
    y = expand(case, h)
    assert_y_close(y, exact_expand(case, h))
    base_rows = torch.tensor([slot == 0 for slot in case.weight_indices])
    assert torch.equal(y[base_rows], case.y[base_rows])
    assert not torch.equal(y, case.y) or name == "all_base"


@pytest.mark.parametrize("rank", [1, 2, 3, 7, 8, 12, 16, 17, 33, 64])
@pytest.mark.parametrize("block", [16, 64])
def test_every_rank(rank: int, block: int, device: str, dtype: torch.dtype) -> None:
    case = lora_case([1, 0, 1, 2], [rank, 2], max_rank=64, block=block, device=device, dtype=dtype)
    h = shrink(case)
    assert h.shape[1:] == (3, 1, 64)
    assert_h_close(h, exact_shrink(case))
    assert_y_close(expand(case, h), exact_expand(case, h))


def test_largest_rank_table(device: str, dtype: torch.dtype) -> None:
    case = lora_case([1, 2, 2], [128, 100], slice_sizes=(9, 9), device=device, dtype=dtype)
    h = shrink(case)
    assert_h_close(h, exact_shrink(case))
    assert_y_close(expand(case, h), exact_expand(case, h))


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize(
    ("input_size", "slice_sizes"),
    [(1, (1,)), (33, (65,)), (1100, (130, 3, 3)), (2049, (1, 1, 1)), (64, (129, 129))],
)
def test_odd_sizes(
    input_size: int, slice_sizes: tuple[int, ...], block: int, device: str, dtype: torch.dtype
) -> None:
    """Sizes that fill no tile, and inputs that are split in several parts."""
    case = lora_case(
        [2, 0, 1, 2],
        [3, 6],
        input_size=input_size,
        slice_sizes=slice_sizes,
        block=block,
        device=device,
        dtype=dtype,
    )
    h = shrink(case)
    assert (h.shape[0] > 1) == (block <= 16 and input_size > 1024)
    assert_h_close(h, exact_shrink(case))
    assert_y_close(expand(case, h), exact_expand(case, h))


@pytest.mark.parametrize("lengths", [(16,), (17,), (1, 15), (40, 2)])
@pytest.mark.parametrize("block", [8, 16, 24, 128])
def test_segments_of_every_length(
    lengths: tuple[int, ...], block: int, device: str, dtype: torch.dtype
) -> None:
    slots = [slot for slot, length in enumerate(lengths, start=1) for _ in range(length)]
    case = lora_case(slots, [4, 2], block=block, device=device, dtype=dtype)
    h = shrink(case)
    assert_h_close(h, exact_shrink(case))
    assert_y_close(expand(case, h), exact_expand(case, h))


@pytest.mark.parametrize("block", [4, 64])
def test_nan_adapter_touches_only_its_own_rows(block: int, device: str, dtype: torch.dtype) -> None:
    case = lora_case(
        [1, 2, 0, 3, 2, 1], [4, 16, 7], slice_sizes=(8, 8), block=block, device=device, dtype=dtype
    )
    clean = expand(case, shrink(case))
    poisoned_case = case.with_nan_adapter(2)
    poisoned = expand(poisoned_case, shrink(poisoned_case))
    mine = torch.tensor([slot == 2 for slot in case.weight_indices])
    assert poisoned[mine].isnan().all()
    assert torch.equal(poisoned[~mine], clean[~mine])


def test_nan_input_touches_only_its_own_row(device: str, dtype: torch.dtype) -> None:
    case = lora_case([1, 1, 1, 0], [4], device=device, dtype=dtype)
    clean = expand(case, shrink(case))
    x = case.x.clone()
    x[1] = torch.nan
    poisoned = expand(case, shrink(replace(case, x=x)))
    assert poisoned[1].isnan().all()
    others = torch.tensor([0, 2, 3])
    assert torch.equal(poisoned[others], clean[others])


def test_rank_zero_adapter_leaves_its_rows_alone(device: str, dtype: torch.dtype) -> None:
    """A slot whose adapter leaves this module alone."""
    case = lora_case([1, 2, 1], [0, 4], device=device, dtype=dtype)
    h = shrink(case)
    y = expand(case, h)
    assert torch.equal(y[[0, 2]], case.y[[0, 2]])
    assert_y_close(y, exact_expand(case, h))


def test_slot_zero_is_no_adapter_whatever_its_rank(device: str, dtype: torch.dtype) -> None:
    case = lora_case([1, 1], [4], static=True, device=device, dtype=dtype)
    segments = case.segments
    lengths, slots = segments.lengths.clone(), segments.weight_indices.clone()
    lengths[:], slots[:] = 1, 0
    case = replace(
        case,
        ranks=case.ranks[[1, 1]],
        row_table=case.row_table[[1, 1]],
        segments=replace(segments, lengths=lengths, weight_indices=slots),
    )
    h = shrink(case)
    assert h.isnan().all()
    looked_up = lora_embedding.embedding_lora_a(case.token_ids, case.a[0], *case.block_args)
    assert looked_up.isnan().all()
    assert torch.equal(expand(case, torch.ones_like(h)), case.y)


@pytest.mark.parametrize("rest", [torch.nan, 1.0])
def test_module_uses_fewer_rows_than_the_adapter_owns(
    rest: float, device: str, dtype: torch.dtype
) -> None:
    """The row table is shared by all modules; a module's own rank says how much of it counts."""
    case = lora_case([1, 2, 1], [8, 4], device=device, dtype=dtype)
    own = case.rows_of(1)
    a, b = case.a.clone(), case.b.clone()
    a[:, own[3:]], b[own[3:]] = rest, rest
    ranks = case.ranks.clone()
    ranks[1] = 3
    case = replace(case, a=a, b=b, ranks=ranks)
    h = shrink(case)
    assert_h_close(h, exact_shrink(case))
    assert_y_close(expand(case, h), exact_expand(case, h))
    looked_up = lora_embedding.embedding_lora_a(case.token_ids, a[0], *case.block_args)
    assert torch.equal(looked_up.isnan(), h.isnan())


def test_inputs_and_outputs_may_be_views(device: str, dtype: torch.dtype) -> None:
    case = lora_case([1, 2, 0, 1], [3, 5], device=device, dtype=dtype)
    wide_x = torch.full((4, 50), torch.nan, device=device, dtype=dtype)
    wide_y = torch.full((4, 30), torch.nan, device=device, dtype=dtype)
    x, y = wide_x[:, 7:47], wide_y[:, 3:27]
    x.copy_(case.x)
    y.copy_(case.y)
    h = shrink(replace(case, x=x))
    assert_h_close(h, exact_shrink(case))
    lora_expand.sgemm_lora_b(h, case.b, *case.block_args, y)
    assert_y_close(y, exact_expand(case, h))
    assert wide_y[:, :3].isnan().all()
    assert wide_y[:, 27:].isnan().all()


@pytest.mark.parametrize("block", [4, 32])
@pytest.mark.parametrize("name", POPULARITIES)
def test_embedding(name: str, block: int, device: str, dtype: torch.dtype) -> None:
    case = lora_case(
        popularity(name, 11, len(RANKS)),
        RANKS,
        block=block,
        static=block == 4,
        device=device,
        dtype=dtype,
    )
    h = lora_embedding.embedding_lora_a(case.token_ids, case.a[0], *case.block_args)
    one_hot = torch.nn.functional.one_hot(case.token_ids, case.x.shape[1]).to(dtype)
    exact = exact_shrink(replace(case, x=one_hot, a=case.a.nan_to_num()))
    assert h.shape == exact.shape
    assert torch.equal(h.nan_to_num(), exact.float().nan_to_num())
    assert torch.equal(h.isnan(), exact.isnan())
    assert_y_close(expand(case, h), exact_expand(case, h))


@pytest.mark.parametrize("kind", SLICES)
def test_references_agree_with_the_definition(kind: str) -> None:
    """float64 on the CPU; this needs no Triton."""
    case = lora_case(
        popularity("with_base", 11, len(RANKS)),
        RANKS,
        slice_sizes=SLICES[kind],
        dtype=torch.float64,
    )
    h = exact_shrink(case)
    for position, row in enumerate(case.segments.permutation.tolist()):
        rows = case.rows_of(case.weight_indices[row])
        torch.testing.assert_close(h[0, position, :, : len(rows)], case.a[:, rows] @ case.x[row])
    y = case.y.clone()
    match case.slice_sizes:
        case (_,):
            reference.sgemm_lora_b(h, case.b, *case.block_args, y, dtype=torch.float64)
        case (_, _):
            reference.gate_up_lora_b(h, case.b, *case.block_args, y, dtype=torch.float64)
        case (q_size, kv_size, _):
            reference.qkv_lora_b(
                h, case.b, *case.block_args, y, q_size, kv_size, dtype=torch.float64
            )
    torch.testing.assert_close(y, exact_expand(case, h))
    ids = reference.embedding_lora_a(
        case.token_ids, case.a[0], *case.block_args, dtype=torch.float64
    )
    one_hot = torch.nn.functional.one_hot(case.token_ids, case.x.shape[1]).double()
    looked_up = exact_shrink(replace(case, x=one_hot, a=case.a[:1]))
    torch.testing.assert_close(ids, looked_up, equal_nan=True)
