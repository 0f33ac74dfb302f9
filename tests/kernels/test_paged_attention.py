"""Paged attention against plain masked softmax in float64, and the write into the cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakeet.kernels import paged_decode, paged_prefill, reference
from lorakeet.kernels.paged_attention import paged_attention
from lorakeet.kernels.tiles import DecodeTiles, decode_tiles
from support.paged_cases import PagedCase, paged_case

# of rows and heads that only fill up a tile: numpy warns of what a GPU passes over
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

MIXED = [(1, 9), (1, 1), (1, 30), (5, 5), (7, 20), (1, 6), (23, 23), (2, 70)]


def exact_attention(case: PagedCase, scale: float, window: int | None) -> Tensor:
    """Whole score matrices, without any paging, float64."""
    outputs = []
    starts = case.query_starts.tolist()
    group = case.q.shape[1] // case.k_cache.shape[2]
    for index, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[starts[index] : starts[index + 1]].double().transpose(0, 1)
        k, v = (t.double().repeat_interleave(group, 1).transpose(0, 1) for t in (keys, values))
        places = torch.arange(len(keys), device=q.device)
        own = places[len(keys) - q.shape[1] :, None]
        hidden = places > own
        if window is not None:
            hidden |= places <= own - window
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def assert_close(actual: Tensor, exact: Tensor) -> None:
    assert actual.shape == exact.shape
    rtol, atol = {
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (2**-7, 1e-2),
        torch.float16: (2**-9, 2e-3),
    }[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [
        *((4, 2, 16, window) for window in (None, 1, 5, 100)),
        *((7, 1, 20, window) for window in (None, 5)),
        *((2, 2, 5, window) for window in (None, 1)),
        *((9, 3, 64, window) for window in (None, 5)),
    ],
)
def test_mixed_batch(
    heads: int, kv_heads: int, head_dim: int, window: int | None, device: str, dtype: torch.dtype
) -> None:
    """Decodes, whole prompts, chunks of prompts and a one-token chunk in one call."""
    case = paged_case(
        MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, device=device, dtype=dtype
    )
    assert case.num_decodes == 3
    scale = head_dim**-0.5
    assert_close(paged_attention(*case.args, scale, window), exact_attention(case, scale, window))


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("lengths", [MIXED[:3], MIXED[3:], [(130, 150)]])
def test_block_sizes(
    block_size: int, lengths: Sequence[tuple[int, int]], device: str, dtype: torch.dtype
) -> None:
    case = paged_case(lengths, block_size=block_size, device=device, dtype=dtype)
    assert_close(paged_attention(*case.args, 0.3), exact_attention(case, 0.3, None))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("rows", "keys"), [(128, 16), (16, 128)])
def test_tile_sizes_are_free(
    rows: int,
    keys: int,
    window: int | None,
    device: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a window, rows far down a tile of queries see nothing of the first tile of keys."""
    monkeypatch.setattr(paged_prefill, "ROWS", rows)
    monkeypatch.setattr(paged_prefill, "KEYS", keys)
    case = paged_case([(140, 150)], heads=1, kv_heads=1, device=device, dtype=dtype)
    assert_close(paged_attention(*case.args, 0.25, window), exact_attention(case, 0.25, window))


def test_tiles_of_chunks_are_counted_from_the_first_chunk_on(
    device: str, dtype: torch.dtype
) -> None:
    """The decodes before it would fill whole tiles."""
    decodes = [(1, 5 + number % 7) for number in range(70)]
    case = paged_case(
        [*decodes, (9, 20), (2, 2), (40, 90)], heads=7, kv_heads=1, device=device, dtype=dtype
    )
    assert_close(paged_attention(*case.args, 0.25), exact_attention(case, 0.25, None))


@pytest.mark.parametrize("num_heads", [5, 12, 30, 60, 100, 300, 500, 2000])
@pytest.mark.parametrize("window", [None, 300, 40])
def test_long_decodes_are_split(
    num_heads: int,
    window: int | None,
    device: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the way of a batch with so many heads."""
    tiles = decode_tiles(num_heads, 256)
    monkeypatch.setattr(paged_decode, "decode_tiles", lambda *_: tiles)
    split, most = tiles.min_split, tiles.max_splits
    contexts = [1, split, split + 1, 2 * split + 17, split * most + 100]
    case = paged_case(
        [(1, context) for context in contexts],
        heads=2,
        kv_heads=1,
        block_size=16,
        device=device,
        dtype=dtype,
    )
    assert_close(paged_attention(*case.args, 0.25, window), exact_attention(case, 0.25, window))


def test_many_heads_are_merged_together(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of many, all heads that share keys: by one program."""
    monkeypatch.setattr(paged_decode, "_MANY_HEADS", 5 * 6 - 1)
    case = paged_case(
        [(1, context) for context in (1, 0, 1030, 70, 513)],
        heads=6,
        kv_heads=2,
        block_size=16,
        device=device,
        dtype=dtype,
    )
    tiles = DecodeTiles(32, 4, 2, min_split=512, max_splits=16)
    monkeypatch.setattr(paged_decode, "decode_tiles", lambda *_: tiles)
    out = paged_attention(*case.args, 0.25)
    assert_close(out, reference.paged_attention(*case.args, 0.25, dtype=torch.float64))


def test_tiles_are_those_of_all_sequences_kv_heads(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def recorded(num_heads: int, key_size: int) -> DecodeTiles:
        asked.append((num_heads, key_size))
        return decode_tiles(num_heads, key_size)

    monkeypatch.setattr(paged_decode, "decode_tiles", recorded)
    case = paged_case(
        [(1, 20), (1, 9), (1, 40)], heads=4, kv_heads=2, head_dim=16, device=device, dtype=dtype
    )
    paged_attention(*case.args, 0.25)
    assert asked == [(3 * 2, 16 * dtype.itemsize)]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("num_spare", [0, 1, 30])
def test_decodes_and_chunks_may_be_padded(
    num_spare: int, window: int | None, device: str, dtype: torch.dtype
) -> None:
    """As in a captured graph: the tokens of padded decodes belong to chunks, there are chunks
    without tokens, one of them before others, and tokens that are nobody's."""
    lengths = [(1, 40), (1, 9), (30, 30), (2, 70), (17, 50)]
    case = paged_case(lengths, heads=6, device=device, dtype=dtype)
    starts = [0, 1, 2, 2, 2, 2, 2, 32, 32, 34, 51, *[51] * num_spare]
    contexts = [40, 9, 0, 0, 0, 0, 30, 0, 70, 50, *[0] * num_spare]
    sequences = [0, 1, 0, 0, 0, 0, 2, 0, 3, 4, *[0] * num_spare]
    padded = replace(
        case,
        q=torch.cat((case.q, torch.full_like(case.q[:20], torch.nan))),
        query_starts=case.query_starts.new_tensor(starts),
        context_lens=case.context_lens.new_tensor(contexts),
        block_tables=case.block_tables[sequences],
        num_decodes=6,
    )
    out = paged_attention(*padded.args, 0.25, window)[: len(case.q)]
    assert_close(out, exact_attention(case, 0.25, window))


def test_a_decode_does_not_depend_on_the_batch(device: str, dtype: torch.dtype) -> None:
    case = paged_case([(1, 40), (1, 600), (3, 9)], block_size=16, device=device, dtype=dtype)
    alone = replace(
        case,
        q=case.q[:1],
        query_starts=case.query_starts[:2],
        context_lens=case.context_lens[:1],
        block_tables=case.block_tables[:1],
        num_decodes=1,
        max_context_len=40,
    )
    assert torch.equal(paged_attention(*case.args, 0.25)[:1], paged_attention(*alone.args, 0.25))


def variant(kernel: Any, args: Sequence[object], constants: dict[str, object]) -> object:
    """What Triton compiles a launch for: the constants, and of an integer whether it is 1, whether
    16 divides it, and how wide it is."""
    options = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # the interpreter's
    free = options["do_not_specialize"] or ()
    integers = {
        name: (name not in free and (value == 1, value % 16 == 0), value < 2**31)
        for name, value in zip(kernel.arg_names, args, strict=False)
        if isinstance(value, int)
    }
    return *constants.items(), *integers.items()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[object]]:
    """The variants that each kernel is compiled in from now on."""
    launched: dict[str, set[object]] = {}

    class Recorded:
        def __init__(self, module: object, name: str) -> None:
            self._kernel, self._seen = getattr(module, name), launched.setdefault(name, set())

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **constants: Any) -> None:
                self._seen.add(variant(self._kernel, args, constants))
                self._kernel[grid](*args, **constants)

            return launch

    for module, name in (
        (paged_decode, "_decode_kernel"),
        (paged_decode, "_combine_kernel"),
        (paged_prefill, "_prefill_kernel"),
    ):
        monkeypatch.setattr(module, name, Recorded(module, name))
    return launched


def test_contexts_of_any_length_share_their_compiled_kernels(
    device: str, dtype: torch.dtype, compiled: dict[str, set[object]]
) -> None:
    """What a step compiles, all others wait for: of one number of decodes, each kernel once."""
    for context in (1, 40, 70, 200, 240, 500, 2000):  # 240: its row of blocks is 16 long
        case = paged_case(
            [(1, 9), (1, context)], block_size=16, heads=2, kv_heads=1, device=device, dtype=dtype
        )
        assert_close(paged_attention(*case.args, 0.25), exact_attention(case, 0.25, None))
    assert len(compiled["_decode_kernel"]) == len(compiled["_combine_kernel"]) == 1


def test_any_number_of_chunks_shares_one_compiled_kernel(
    device: str, dtype: torch.dtype, compiled: dict[str, set[object]]
) -> None:
    for num_chunks, num_decodes in ((1, 0), (2, 1), (16, 2), (17, 16)):
        lengths = [(1, 9)] * num_decodes + [(2, 300)] * num_chunks
        case = paged_case(lengths, heads=2, kv_heads=1, block_size=16, device=device, dtype=dtype)
        assert_close(paged_attention(*case.args, 0.25), exact_attention(case, 0.25, None))
    assert len(compiled["_prefill_kernel"]) == 1


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_large_and_small_scores(scale: float, device: str, dtype: torch.dtype) -> None:
    case = paged_case([(1, 80), (70, 75)], device=device, dtype=dtype)
    actual = paged_attention(*case.args, scale)
    if scale > 1 and dtype == torch.float32:  # scores of 1000: their float32 error is 1e-4
        torch.testing.assert_close(
            actual.double(), exact_attention(case, scale, None), rtol=1e-3, atol=1e-3
        )
    elif scale < 1:
        assert_close(actual, exact_attention(case, scale, None))
    assert actual.isfinite().all()


def test_padding_decodes_get_zeros(device: str, dtype: torch.dtype) -> None:
    """A captured graph has more rows than the batch: their context is 0."""
    case = paged_case([(1, 20), (1, 0), (1, 5), (1, 0)], device=device, dtype=dtype)
    out = paged_attention(*case.args, 0.25)
    assert (out[[1, 3]] == 0).all()
    expected = reference.paged_attention(*case.args, 0.25, dtype=torch.float64)
    assert_close(out, expected)


@pytest.mark.parametrize("what", ["k_cache", "v_cache"])
def test_nan_of_one_sequence_stays_there(what: str, device: str, dtype: torch.dtype) -> None:
    case = paged_case([(1, 9), (1, 12), (6, 8), (5, 5)], device=device, dtype=dtype)
    clean = paged_attention(*case.args, 0.25)
    cache = getattr(case, what).clone()
    for sequence in (1, 2):
        cache[int(case.block_tables[sequence, 0])] = torch.nan
    poisoned = paged_attention(*replace(case, **{what: cache}).args, 0.25)
    assert poisoned[1:8].isnan().all()
    others = torch.tensor([0, *range(8, 13)])
    assert torch.equal(poisoned[others], clean[others])


@pytest.mark.parametrize("window", [None, 5])
def test_reference_agrees_with_the_definition(window: int | None) -> None:
    case = paged_case(MIXED, heads=6, kv_heads=2, head_dim=9)
    actual = reference.paged_attention(*case.args, 0.3, window, dtype=torch.float64)
    torch.testing.assert_close(actual, exact_attention(case, 0.3, window))


def test_window_below_one_is_refused() -> None:
    case = paged_case([(1, 3)])
    with pytest.raises(ValueError, match="sliding_window"):
        paged_attention(*case.args, 0.25, 0)
