"""Rows in place of the base's, for the rows of a pass that have them, and for no others."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lorakeet.lora.adapter import Slot, TokenRows, Vocabulary
from lorakeet.lora.staging import Staging
from lorakeet.lora.vocabulary import StaticEmbeddings, VocabularyStore

BASE, HIDDEN = 20, 8
SLOTS = np.array([0, 3, 1, 2, 1, 0, 3, 4], np.int32)


def token_rows(ids: list[int], seed: int) -> TokenRows:
    generator = torch.Generator().manual_seed(seed)
    return TokenRows(torch.tensor(ids), torch.randn((len(ids), HIDDEN), generator=generator))


GROWN = Vocabulary(23, token_rows([4, 20, 21, 22], 1), token_rows([4, 9, 20, 22], 2))  # no 21
SHRUNK = Vocabulary(15, token_rows(list(range(15)), 3), None)
HEAD_ONLY = Vocabulary(BASE, None, token_rows(list(range(BASE)), 4))
IN_SLOTS = {1: GROWN, 2: SHRUNK, 3: HEAD_ONLY}  # nobody has one in slot 4


@pytest.fixture
def store() -> VocabularyStore:
    device = torch.device("cpu")
    store = VocabularyStore(torch.float32, device, Staging(device))
    for slot, vocabulary in IN_SLOTS.items():
        store.write(Slot(slot), vocabulary)
    return store


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("poison", [0.0, torch.nan])
def test_embeddings_row_by_row(store: VocabularyStore, poison: float) -> None:
    token_ids = torch.tensor([4, 4, 22, 14, 5, 9, 0, 4])
    before = random(len(SLOTS), HIDDEN) + poison
    after = before.clone()
    batch = store.for_embedding(SLOTS)
    assert batch is not None
    batch.embed(after, token_ids)
    for row, (slot, token) in enumerate(zip(SLOTS.tolist(), token_ids.tolist(), strict=True)):
        vocabulary = IN_SLOTS.get(slot)
        own = None if vocabulary is None else vocabulary.embed_tokens
        expected = before[row]
        if own is not None and token in own.ids:
            expected = own.rows[own.ids.tolist().index(token)]
        assert after[row].equal(expected) or (poison != 0 and expected.isnan().all())


def test_static_embeddings_are_those_of_the_last_pass(store: VocabularyStore) -> None:
    """Of any mix, and of none, in the same tensors; a smaller pass reads the first of them."""
    static = StaticEmbeddings(len(SLOTS) + 2, HIDDEN, torch.float32, torch.device("cpu"))
    token_ids = torch.tensor([4, 4, 22, 14, 5, 9, 0, 4])
    for slots in (SLOTS, SLOTS[::-1].copy(), np.zeros(8, np.int32), SLOTS[:3], SLOTS):
        batch, ids = store.for_embedding(slots), token_ids[: len(slots)]
        expected, actual = random(2, len(slots), HIDDEN)[0], random(2, len(slots), HIDDEN)[0]
        static.clear()
        if batch is not None:
            batch.embed(expected, ids)
            static.fill(batch, ids)
        static.embed(actual, ids)
        assert actual.equal(expected)


def test_logits_row_by_row(store: VocabularyStore) -> None:
    logits, hidden = random(len(SLOTS), BASE), random(len(SLOTS), HIDDEN)
    batch = store.for_head(SLOTS)
    assert batch is not None
    before = logits.clone()
    after = batch.score(logits.clone(), hidden)
    assert after.shape == (len(SLOTS), 23)
    for row, slot in enumerate(SLOTS.tolist()):
        vocabulary = IN_SLOTS.get(slot, Vocabulary(BASE, None, None))
        own = vocabulary.lm_head
        ids = [] if own is None else own.ids.tolist()
        for token in range(23):
            if own is not None and token in ids:
                expected = own.rows[ids.index(token)] @ hidden[row]
                torch.testing.assert_close(after[row, token], expected)
            elif token < min(BASE, vocabulary.size):
                assert after[row, token] == before[row, token]
            else:
                assert after[row, token] == -torch.inf


def test_without_any_there_is_no_work(store: VocabularyStore) -> None:
    nobody = np.array([0, 4, 0], np.int32)
    assert store.for_embedding(nobody) is store.for_head(nobody) is None
    assert store.for_embedding(np.array([3], np.int32)) is None  # its embedding is the base's
    assert store.for_head(np.array([3], np.int32)) is not None


def test_columns_are_those_of_the_largest_in_the_pass(store: VocabularyStore) -> None:
    batch = store.for_head(np.array([2, 3], np.int32))
    assert batch is not None
    assert batch.score(random(2, BASE), random(2, HIDDEN)).shape == (2, BASE)


def test_what_is_cleared_is_gone(store: VocabularyStore) -> None:
    assert store.num_bytes == sum(one.num_bytes for one in IN_SLOTS.values())
    for slot in (1, 1, 2, 3, 4):
        store.clear(Slot(slot))
    assert store.num_bytes == 0
    assert store.for_head(SLOTS) is None
    store.write(Slot(1), None)
    assert store.for_head(SLOTS) is None
