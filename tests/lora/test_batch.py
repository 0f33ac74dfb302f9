"""From slots to the work of a pass."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakeet.lora.batch import build_lora_batch


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_a_pass_of_base_rows_has_no_batch(num_tokens: int) -> None:
    assert build_lora_batch(np.zeros(num_tokens, dtype=np.int32)) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=400))
def test_segments_hold_each_adapted_row_once_under_its_slot(slots: list[int]) -> None:
    batch = build_lora_batch(np.array(slots, dtype=np.int32))
    found = []
    if batch is not None:
        segments = batch.segments
        for start, length, slot, scaling in zip(
            segments.starts.tolist(),
            segments.lengths.tolist(),
            segments.weight_indices.tolist(),
            segments.scalings.tolist(),
            strict=True,
        ):
            assert 0 < length <= segments.block
            assert scaling == 1
            rows = segments.permutation[start : start + length].tolist()
            found += [(row, slot) for row in rows]
    assert sorted(found) == [(row, slot) for row, slot in enumerate(slots) if slot]


@pytest.mark.parametrize(("num_tokens", "block"), [(1, 16), (256, 16), (257, 64), (5000, 64)])
def test_prefill_has_larger_blocks(num_tokens: int, block: int) -> None:
    batch = build_lora_batch(np.ones(num_tokens, dtype=np.int32))
    assert batch is not None
    assert batch.segments.block == block


def test_cached_builds_once_for_each_key() -> None:
    batch = build_lora_batch(np.ones(2, dtype=np.int32))
    assert batch is not None
    built: list[str] = []

    def build(name: str) -> str | None:
        built.append(name)
        return None if name == "none" else name

    for _ in range(3):
        assert batch.cached("a", lambda: build("a")) == "a"
        assert batch.cached("none", lambda: build("none")) is None
    assert built == ["a", "none"]
