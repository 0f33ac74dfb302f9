"""Counts of tokens on the device, and the two ways to apply penalties."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorakeet.models.penalties import TokenCounts, build_penalties

VOCAB = 8
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
VALUES = st.tuples(*[st.sampled_from(value) for value in ([1.0, 1.5], [0.0, 0.5], [0.0, -0.25])])


@given(sequences=st.lists(st.tuples(IDS, IDS, VALUES), min_size=1, max_size=4), data=st.data())
def test_where_marks_are_as_everywhere(
    sequences: list[tuple[list[int], list[int], tuple[float, float, float]]], data: st.DataObject
) -> None:
    """The CPU's way and the GPU's, at the same bits; rows of the batch are not those of counts."""
    counts = TokenCounts(len(sequences) + 1, VOCAB, "cpu")
    rows = np.array(data.draw(st.permutations(range(1, len(sequences) + 1))))
    for row, (prompt, output, _) in zip(rows.tolist(), sequences, strict=True):
        counts.start(row, prompt, output)
    values = np.array([values for _, _, values in sequences]).T
    penalties = build_penalties(counts, rows, np.arange(len(sequences)) + 1, values)
    if penalties is None:
        assert all(own == (1.0, 0.0, 0.0) for _, _, own in sequences)
        return
    logits = torch.randn(len(sequences) + 2, VOCAB, generator=torch.Generator().manual_seed(0))
    marks = counts.read(penalties.rows, VOCAB)
    everywhere = penalties.apply_to_all(logits, marks)
    assert torch.equal(everywhere, penalties.apply_to_marked(logits, marks))
    assert torch.equal(everywhere[[0, -1]], logits[[0, -1]])


def test_counts_past_16_bits_and_a_vocabulary_that_grows() -> None:
    counts = TokenCounts(2, VOCAB, "cpu")
    counts.start(1, [3], np.full(100_000, 3))
    counts.start(0, [], [VOCAB])  # no such token yet
    counts.widen(VOCAB + 2)
    counts.widen(VOCAB)
    assert counts.vocab_size == VOCAB + 2
    counts.add(torch.tensor([1, 0]), torch.tensor([3, VOCAB + 1]))
    values = np.array([[1.0] * 2, [0.0] * 2, [1.0] * 2])
    penalties = build_penalties(counts, np.array([0, 1]), np.array([0, 1]), values)
    assert penalties is not None
    want = torch.zeros(2, VOCAB + 2)
    want[0, VOCAB + 1], want[1, 3] = -1, -100_001
    assert torch.equal(penalties.apply(torch.zeros(2, VOCAB + 2)), want)
