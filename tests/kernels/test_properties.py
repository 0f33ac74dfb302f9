"""Property tests: segments, and the kernels on whatever shapes hypothesis thinks of."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakeet.kernels import lora_expand, lora_shrink, reference
from lorakeet.kernels.segments import build_segments
from support.lora_cases import lora_case


@given(slots=st.lists(st.integers(0, 5), max_size=60), block=st.integers(1, 20))
def test_segments_hold_every_adapter_row_once(slots: list[int], block: int) -> None:
    segments = build_segments(np.array(slots, dtype=np.int32), block)
    adapter_rows = [row for row, slot in enumerate(slots) if slot != 0]
    if segments is None:
        assert not adapter_rows
        return
    seen = []
    for start, length, slot in zip(
        segments.starts.tolist(),
        segments.lengths.tolist(),
        segments.weight_indices.tolist(),
        strict=True,
    ):
        assert 0 < length <= block
        rows = segments.permutation[start : start + length].tolist()
        assert [slots[row] for row in rows] == [slot] * length
        assert rows == sorted(rows)
        seen += rows
    assert sorted(seen) == adapter_rows
    assert segments.permutation.numel() == len(adapter_rows)
    assert torch.equal(segments.scalings, torch.ones(len(segments.starts)))
    fewest = sum(-(-slots.count(slot) // block) for slot in set(slots) - {0})
    assert len(segments.starts) == fewest


def test_segments_keep_the_order_of_rows() -> None:
    segments = build_segments(np.array([2, 1, 0, 2, 1, 2], dtype=np.int32), 2)
    assert segments is not None
    assert segments.permutation.tolist() == [1, 4, 0, 3, 5]
    assert segments.starts.tolist() == [0, 2, 4]
    assert segments.lengths.tolist() == [2, 2, 1]
    assert segments.weight_indices.tolist() == [1, 2, 2]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_kernels_equal_their_references(
    device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4), label="ranks")
    size = st.integers(1, 40)
    q_size, kv_size = data.draw(size, label="q_size"), data.draw(size, label="kv_size")
    case = lora_case(
        data.draw(st.lists(st.integers(0, len(ranks)), min_size=1, max_size=12), label="slots"),
        ranks,
        input_size=data.draw(st.integers(1, 300), label="input_size"),
        slice_sizes=(q_size, kv_size, kv_size),
        block=data.draw(st.sampled_from([1, 3, 16, 17]), label="block"),
        max_rank=max(1, *ranks, data.draw(st.integers(1, 20), label="max_rank")),
        static=data.draw(st.booleans(), label="static"),
        seed=data.draw(st.integers(0, 9), label="seed"),
        device=device,
        dtype=dtype,
    )
    h = lora_shrink.sgemm_lora_a(case.x, case.a, *case.block_args)
    exact_h = reference.sgemm_lora_a(case.x, case.a, *case.block_args, dtype=torch.float64)
    torch.testing.assert_close(h.double().sum(0), exact_h[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    y, exact_y = case.y.clone(), case.y.double()
    lora_expand.qkv_lora_b(h, case.b, *case.block_args, y, q_size, kv_size)
    reference.qkv_lora_b(h, case.b, *case.block_args, exact_y, q_size, kv_size, dtype=torch.float64)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y.double(), exact_y, rtol=tolerance, atol=tolerance)
