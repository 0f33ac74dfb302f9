"""What only a GPU can show: captured graphs, offsets past 2^31, and the shapes of real models."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from lorakeet.kernels import activation, reference
from lorakeet.kernels.delta import Delta
from lorakeet.kernels.lora_embedding import embedding_lora
from lorakeet.kernels.lora_expand import sgemm_lora_b
from lorakeet.kernels.lora_linear import MAX_TOKENS, lora_linear, lora_linear_takes
from lorakeet.kernels.lora_shrink import sgemm_lora_a
from lorakeet.kernels.paged_attention import paged_attention
from lorakeet.kernels.rank_rows import RankRows
from support.lora_cases import (
    POPULARITIES,
    LoRACase,
    assert_rounded,
    lora_case,
    popularity,
    silu_mul_rounding,
)
from support.paged_cases import paged_case

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def linear(case: LoRACase) -> torch.Tensor:
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
    return y.sum(0).to(case.x.dtype) if y.dim() == 3 else y


def add_delta(y: torch.Tensor, case: LoRACase) -> torch.Tensor:
    """In place."""
    h = sgemm_lora_a(case.x, case.a, case.rank_rows, case.counters)
    sgemm_lora_b(y, Delta(h, case.b, case.rank_rows), case.slice_sizes)
    return y


def copy_rank_rows(static: RankRows, new: RankRows) -> None:
    for name in ("order", "first", "last", "magnitudes", "count", "rows", "scales", "offsets"):
        getattr(static, name).copy_(getattr(new, name))


@pytest.mark.parametrize("num_tokens", [5, 24, MAX_TOKENS, 200])
def test_one_graph_serves_every_mix_of_adapters(num_tokens: int) -> None:
    ranks = [1, 8, 64, 17, 3]

    def case_of(slots: list[int]) -> LoRACase:
        return lora_case(
            slots,
            ranks,
            input_size=512,
            slice_sizes=(256, 64, 64),
            room=len(ranks) * max(ranks),
            device="cuda",
            dtype=torch.bfloat16,
        )

    case = case_of([0] * num_tokens)
    y = case.y.clone()

    def step() -> torch.Tensor | None:
        add_delta(y.copy_(case.y), case)
        return linear(case) if lora_linear_takes(case.x, case.weight) else None

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded = step()
    for name in POPULARITIES:
        copy_rank_rows(case.rank_rows, case_of(popularity(name, num_tokens, len(ranks))).rank_rows)
        for _ in range(3):
            graph.replay()
            assert_rounded(y, case.exact(), case.rounding())
            if decoded is not None:
                assert_rounded(decoded, case.exact_linear(), case.rounding())
        assert not case.counters.any()


def test_one_graph_serves_every_batch_of_decodes() -> None:
    batches = [[1, 2, 3, 4], [40, 0, 900, 0], [900, 900, 900, 900], [0, 0, 0, 1]]
    cases = [paged_case([(1, c) for c in b], device="cuda", seed=i) for i, b in enumerate(batches)]
    # one cache and tables wide enough for each of them
    static = paged_case([(1, 900)] * 4, device="cuda")

    def step() -> torch.Tensor:
        return paged_attention(*static.args, 0.25)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for case in cases:
        static.q.copy_(case.q)
        static.k_cache[: len(case.k_cache)] = case.k_cache
        static.v_cache[: len(case.v_cache)] = case.v_cache
        static.context_lens.copy_(case.context_lens)
        static.block_tables.zero_()
        static.block_tables[:, : case.block_tables.shape[1]] = case.block_tables
        graph.replay()
        exact = reference.paged_attention(*case.args, 0.25, dtype=torch.float64)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("input_size", "slice_sizes"),
    [(4096, (4096, 1024, 1024)), (4096, (4096,)), (14336, (4096,)), (4096, (14336, 14336))],
    ids=["qkv", "o", "down", "gate_up"],
)
@pytest.mark.parametrize("num_tokens", [1, 16, 33, 64, 128, 256, 700])
def test_layers_of_an_8b_model(
    num_tokens: int,
    input_size: int,
    slice_sizes: tuple[int, ...],
    device: str,
    dtype: torch.dtype,
) -> None:
    """Adapters enough for lists of several tiles, at every size of a tile of tokens."""
    ranks = [8, 16, 64, 32, 12, 100, 64, 1]
    case = lora_case(
        popularity("with_base", num_tokens, len(ranks)),
        ranks,
        input_size=input_size,
        slice_sizes=slice_sizes,
        room=sum(ranks),
        device=device,
        dtype=dtype,
    )
    exact, rounding = case.exact(), case.rounding()
    assert_rounded(add_delta(case.y.clone(), case), exact, rounding)
    if lora_linear_takes(case.x, case.weight):
        assert_rounded(linear(case), case.exact_linear(), rounding)
        assert not case.counters.any()
    if len(slice_sizes) == 2:
        h = sgemm_lora_a(case.x, case.a, case.rank_rows, case.counters)
        found = activation.silu_mul(case.y, Delta(h, case.b, case.rank_rows), dtype)
        want = reference.silu_mul(exact, torch.float64)
        assert_rounded(found, want, silu_mul_rounding(exact, rounding))


def test_the_embedding_of_an_8b_model(device: str, dtype: torch.dtype) -> None:
    ranks = [8, 16, 64, 32, 12]
    case = lora_case(
        popularity("with_base", 300, len(ranks)),
        ranks,
        input_size=30_000,
        slice_sizes=(4096,),
        room=sum(ranks) + 64,
        device=device,
        dtype=dtype,
    )
    a = case.a[0] * 30_000**0.5  # one input of many is not small
    y = case.y.clone()
    embedding_lora(y, case.token_ids, a, case.b, case.rank_rows)
    args = (case.token_ids, a, case.b, case.rank_rows)
    assert_rounded(y, reference.embedding_lora(case.y, *args, dtype=torch.float64))


@pytest.mark.parametrize("window", [None, 1000])
def test_attention_of_an_8b_model(window: int | None, device: str, dtype: torch.dtype) -> None:
    case = paged_case(
        [(1, 17), (1, 3000), (1, 8000), (300, 2500), (513, 513)],
        heads=32,
        kv_heads=8,
        head_dim=128,
        block_size=16,
        device=device,
        dtype=dtype,
    )
    actual = paged_attention(*case.args, 128**-0.5, window)
    exact = reference.paged_attention(*case.args, 128**-0.5, window, dtype=torch.float64)
    rtol, atol = {
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (2**-7, 1e-2),
        torch.float16: (2**-9, 2e-3),
    }[dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=atol)


def needs_memory(gigabytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gigabytes * 10**9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


def far(*shape: int) -> torch.Tensor:
    assert np.prod(shape) > 2**31
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")


def test_lora_offsets_past_32_bits() -> None:
    """Every tensor has over 2^31 elements, and only its far end holds numbers."""
    needs_memory(30)
    num_rows, num_tokens, input_size, size = 17_000, 33_000, 66_000, 66_000
    slots = [1, 2, 1, 1, 2]
    small = lora_case(
        slots,
        [3, 20],
        input_size=input_size,
        slice_sizes=(size, size),
        device="cuda",
        dtype=torch.bfloat16,
    )
    listed = lora_case([0] * (num_tokens - 5) + slots, [3, 20], device="cuda").rank_rows
    shift = num_rows - small.a.shape[1]
    a, b = far(2, num_rows, input_size), far(num_rows, 2 * size)
    x, y = far(num_tokens, input_size), far(num_tokens, 2 * size)
    a[:, shift:], b[shift:], x[-5:], y[-5:] = small.a, small.b, small.x, small.y
    rank_rows = replace(listed, rows=small.rank_rows.rows + shift)
    for name in ("scales", "offsets"):
        getattr(rank_rows, name).copy_(getattr(small.rank_rows, name))
    add_delta(y, replace(small, x=x, a=a, b=b, y=y, rank_rows=rank_rows))
    assert_rounded(y[-5:], small.exact(), small.rounding())
    assert y[:-5].isnan().all()


def test_decode_offsets_past_32_bits() -> None:
    """Pool and layer have over 2^31 elements, of which only the far end holds numbers."""
    needs_memory(30)
    num_rows, input_size, size = 36_000, 30_000, 36_000
    small = lora_case(
        [1, 2, 0, 1, 2, 3],
        [3, 20, 8],
        input_size=input_size,
        slice_sizes=(size, size),
        device="cuda",
        dtype=torch.bfloat16,
    )
    shift = num_rows - small.a.shape[1]
    a, b = far(2, num_rows, input_size), far(num_rows, 2 * size)
    a[:, shift:], b[shift:] = small.a, small.b
    assert small.weight.numel() > 2**31
    small.rank_rows.rows.add_(shift)
    small.rank_rows.magnitudes[small.rank_rows.magnitudes >= 0] += shift
    moved = replace(small, a=a, b=b)
    assert_rounded(linear(moved), moved.exact_linear(), moved.rounding())


def test_cache_offsets_past_32_bits() -> None:
    needs_memory(20)
    case = paged_case(
        [(1, 40), (9, 30)],
        heads=8,
        kv_heads=8,
        head_dim=128,
        block_size=16,
        device="cuda",
        dtype=torch.bfloat16,
    )
    used = case.k_cache.shape[0]
    shape = (132_000, *case.k_cache.shape[1:])
    assert np.prod(shape) > 2**31
    k_cache, v_cache = (
        torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    k_cache[-used:], v_cache[-used:] = case.k_cache, case.v_cache
    far = replace(
        case,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=case.block_tables + (shape[0] - used),
    )
    actual, near = paged_attention(*far.args, 0.1), paged_attention(*case.args, 0.1)
    assert torch.equal(actual, near)
