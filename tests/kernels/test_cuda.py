"""What only a GPU can show: captured graphs, offsets past 2^31, and the shapes of real models."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from lorakeet.kernels import lora_expand, lora_shrink, reference
from lorakeet.kernels.paged_attention import paged_attention
from lorakeet.kernels.segments import Segments, build_segments
from support.lora_cases import POPULARITIES, lora_case, pad_segments, popularity
from support.paged_cases import paged_case

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def write_segments(static: Segments, new: Segments) -> None:
    for name in ("permutation", "starts", "lengths", "weight_indices", "scalings"):
        getattr(static, name).copy_(getattr(new, name))


def test_one_graph_serves_every_mix_of_adapters() -> None:
    num_tokens, ranks = 24, [1, 8, 64, 17, 3]
    case = lora_case(
        [1] * num_tokens,
        ranks,
        input_size=512,
        slice_sizes=(256, 64, 64),
        block=16,
        static=True,
        device="cuda",
        dtype=torch.bfloat16,
    )
    y = case.y.clone()

    def step() -> None:
        y.copy_(case.y)
        h = lora_shrink.sgemm_lora_a(case.x, case.a, *case.block_args)
        lora_expand.qkv_lora_b(h, case.b, *case.block_args, y, 256, 64)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name in POPULARITIES:
        slots = np.array(popularity(name, num_tokens, len(ranks)), dtype=np.int32)
        segments = pad_segments(build_segments(slots, 16, "cuda"), num_tokens, 16, "cuda")
        write_segments(case.segments, segments)
        graph.replay()
        replayed = y.clone()
        step()
        assert torch.equal(replayed, y), name
        exact = case.y.double()
        h = reference.sgemm_lora_a(case.x, case.a, *case.block_args, dtype=torch.float64)
        reference.qkv_lora_b(h, case.b, *case.block_args, exact, 256, 64, dtype=torch.float64)
        torch.testing.assert_close(replayed.double(), exact, rtol=2**-8, atol=4e-3)


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


@pytest.mark.parametrize("num_tokens", [1, 64, 700])
def test_layers_of_an_8b_model(num_tokens: int, device: str, dtype: torch.dtype) -> None:
    ranks = [8, 16, 64, 32, 12]
    case = lora_case(
        popularity("uniform", num_tokens, len(ranks)),
        ranks,
        input_size=4096,
        slice_sizes=(4096, 1024, 1024),
        block=16 if num_tokens <= 64 else 64,
        device=device,
        dtype=dtype,
    )
    h = lora_shrink.sgemm_lora_a(case.x, case.a, *case.block_args)
    exact_h = reference.sgemm_lora_a(case.x, case.a, *case.block_args, dtype=torch.float64)
    torch.testing.assert_close(h.double().sum(0), exact_h[0], rtol=1e-5, atol=2e-5, equal_nan=True)
    y, exact = case.y.clone(), case.y.double()
    lora_expand.qkv_lora_b(h, case.b, *case.block_args, y, 4096, 1024)
    reference.qkv_lora_b(exact_h, case.b, *case.block_args, exact, 4096, 1024, torch.float64)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    atol = 2e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(y.double(), exact, rtol=rtol, atol=atol)


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


def test_lora_offsets_past_32_bits() -> None:
    """Every tensor has over 2^31 elements, and only its far end holds numbers."""
    needs_memory(30)
    num_rows, num_tokens, input_size, size = 17_000, 33_000, 66_000, 66_000
    weight_indices = np.zeros(num_tokens, dtype=np.int32)
    weight_indices[-5:] = [1, 2, 1, 1, 2]
    small = lora_case(
        weight_indices[-5:].tolist(),
        [3, 20],
        input_size=input_size,
        slice_sizes=(size, size),
        block=16,
        device="cuda",
        dtype=torch.bfloat16,
    )
    segments = build_segments(weight_indices, 16, "cuda")
    assert segments is not None
    shift = num_rows - small.a.shape[1]

    def far(*shape: int) -> torch.Tensor:
        assert np.prod(shape) > 2**31
        return torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")

    a, b = far(2, num_rows, input_size), far(num_rows, 2 * size)
    x, y = far(num_tokens, input_size), far(num_tokens, 2 * size)
    a[:, shift:], b[shift:], x[-5:], y[-5:] = small.a, small.b, small.x, small.y
    table = small.row_table + shift
    h = lora_shrink.sgemm_lora_a(x, a, segments, small.ranks, table)
    lora_expand.gate_up_lora_b(h, b, segments, small.ranks, table, y)

    near = replace(small, segments=replace(small.segments, scalings=segments.scalings))
    exact_h = reference.sgemm_lora_a(near.x, near.a, *near.block_args, dtype=torch.float64)
    exact = near.y.double()
    reference.gate_up_lora_b(exact_h, near.b, *near.block_args, exact, torch.float64)
    torch.testing.assert_close(h.double().sum(0), exact_h[0], rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(y[-5:].double(), exact, rtol=2**-8, atol=8e-3)
    assert y[:-5].isnan().all()


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
