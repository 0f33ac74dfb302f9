"""Blocks: shared prefixes, eviction, and books that always balance."""

import hashlib
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorakeet.server.engine.blocks import BASE_CONTENT, BASE_ROOT, BlockManager, Content, HashChain
from lorakeet.server.engine.step import BlockId

SIZE = 4
ROOT_A = hashlib.sha256(b"a").digest()
ROOT_B = hashlib.sha256(b"b").digest()


def compute(manager: BlockManager, tokens: list[int], root: bytes = BASE_ROOT) -> list[BlockId]:
    """What a sequence does: find its prefix, allocate the rest, compute, publish."""
    chain = HashChain(Content(root, (root,)), SIZE)
    found = manager.lookup(chain, tokens)
    manager.share(found)
    blocks = found + list(manager.allocate(manager.blocks_for(len(tokens)) - len(found)))
    manager.publish(chain, tokens, blocks, len(found), len(tokens) // SIZE)
    return blocks


def find(manager: BlockManager, tokens: list[int], root: bytes = BASE_ROOT) -> list[BlockId]:
    return manager.lookup(HashChain(Content(root, (root,)), SIZE), tokens)


def test_a_prefix_is_found_while_held_and_after() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(11))
    blocks = compute(manager, tokens)
    assert find(manager, tokens) == blocks[:2]
    manager.release(blocks)
    assert manager.num_free_blocks == 8
    assert manager.num_cached_blocks == 2
    assert find(manager, tokens) == blocks[:2]
    assert find(manager, [*tokens[:7], 99, *tokens[8:]]) == blocks[:1]
    assert find(manager, [99, *tokens[1:]]) == []


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_at_least_one_token_is_left_to_compute(length: int) -> None:
    manager = BlockManager(8, SIZE)
    compute(manager, list(range(12)))
    assert len(find(manager, list(range(length)))) == (length - 1) // SIZE


def test_only_full_blocks_are_published() -> None:
    manager = BlockManager(8, SIZE)
    compute(manager, [1, 2, 3, 4, 5, 6])
    assert manager.num_cached_blocks == 1


def test_blocks_of_another_root_are_never_found() -> None:
    """B01: a prompt's KV under one adapter is not that under another, nor the base's."""
    manager = BlockManager(16, SIZE)
    tokens = list(range(9))
    by_root = {root: compute(manager, tokens, root) for root in (BASE_ROOT, ROOT_A)}
    assert not set(by_root[BASE_ROOT]) & set(by_root[ROOT_A])
    assert find(manager, tokens, ROOT_B) == []
    assert find(manager, tokens, ROOT_A) == by_root[ROOT_A][:2]


def test_a_root_is_a_whole_digest() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        HashChain(Content(ROOT_A[:16], (ROOT_A[:16],)), SIZE)


def test_tokens_that_python_hashes_alike_are_different() -> None:
    """hash(-1) == hash(-2), and hash(2**61 - 1) == hash(0)."""
    manager = BlockManager(8, SIZE)
    compute(manager, [-1, 0, 0, 0, 5])
    assert find(manager, [-2, 0, 0, 0, 5]) == []
    assert find(manager, [-1, 0, 0, 2**61 - 1, 5]) == []


def test_order_of_blocks_counts() -> None:
    manager = BlockManager(8, SIZE)
    compute(manager, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert find(manager, [2, 2, 2, 2, 1, 1, 1, 1, 3]) == []


def test_unused_blocks_go_first_then_the_longest_idle_and_ends_before_beginnings() -> None:
    manager = BlockManager(5, SIZE)
    old, new = [1] * 8, [2] * 8
    manager.release(compute(manager, old))
    manager.release(compute(manager, new))
    held = manager.allocate(1)
    assert manager.num_cached_blocks == 4
    held += manager.allocate(1)
    assert len(find(manager, [*old, 0])) == 1
    assert len(find(manager, [*new, 0])) == 2
    held += manager.allocate(2)
    assert find(manager, [*old, 0]) == []
    assert len(find(manager, [*new, 0])) == 1
    manager.check([held])


def test_a_find_makes_a_block_young_again() -> None:
    manager = BlockManager(2, SIZE)
    first = compute(manager, [1] * 4)
    second = compute(manager, [2] * 4)
    manager.release(first)
    manager.release(second)
    manager.share(first)
    manager.release(first)
    manager.allocate(1)
    assert find(manager, [1] * 5) == first
    assert find(manager, [2] * 5) == []


def test_forget_drops_one_root_only_and_spares_holders() -> None:
    """B02, C02: nothing of an unloaded adapter can be found, and no block is lost."""
    manager = BlockManager(16, SIZE)
    tokens = list(range(9))
    held = compute(manager, tokens, ROOT_A)
    manager.release(compute(manager, [7] * 8, ROOT_A))
    other = compute(manager, tokens, ROOT_B)
    manager.forget(ROOT_A)
    assert find(manager, tokens, ROOT_A) == find(manager, [7] * 8, ROOT_A) == []
    assert find(manager, tokens, ROOT_B) == other[:2]
    manager.check([held, other])
    manager.release(held)
    assert manager.num_free_blocks == 13


def test_two_copies_of_one_content_keep_their_own_blocks() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(5))
    chains = [HashChain(BASE_CONTENT, SIZE) for _ in range(2)]
    tables = [manager.allocate(2) for _ in range(2)]
    for chain, table in zip(chains, tables, strict=True):
        manager.publish(chain, tokens, table, 0, 1)
    assert find(manager, tokens) == [tables[0][0]]
    manager.check(tables)
    for table in tables:
        manager.release(table)
    assert manager.num_cached_blocks == 1


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = BlockManager(4, SIZE, enable_prefix_caching=False)
    manager.release(compute(manager, list(range(9))))
    assert find(manager, list(range(9))) == []
    assert manager.num_cached_blocks == 0


def test_fits_counts_idle_blocks_that_would_be_shared_once() -> None:
    manager = BlockManager(3, SIZE)
    tokens = list(range(9))
    manager.release(compute(manager, tokens))
    found = find(manager, tokens)
    assert manager.fits(found, 12)
    assert not manager.fits(found, 13)
    assert not manager.fits([], 13)


class BlockMachine(RuleBasedStateMachine):
    """Against a model: which content was written to each block, and by whom it is held."""

    roots = (BASE_ROOT, ROOT_A, ROOT_B)

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(6, 2)
        self.tables: list[list[BlockId]] = []
        self.content: dict[BlockId, tuple[bytes, tuple[int, ...]]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        root=st.sampled_from(roots),
        complete=st.booleans(),
    )
    def compute(self, tokens: list[int], root: bytes, complete: bool) -> None:
        chain = HashChain(Content(root, (root,)), 2)
        found = self.manager.lookup(chain, tokens)
        assert len(found) * 2 < len(tokens)
        for index, block in enumerate(found):
            assert self.content[block] == (root, tuple(tokens[: 2 * index + 2]))
        fits = self.manager.fits(found, len(tokens))
        held = {block for table in self.tables for block in table} | set(found)
        missing = -(-len(tokens) // 2) - len(found)
        assert fits == (missing <= 6 - len(held))
        if not fits:
            return
        self.manager.share(found)
        new = self.manager.allocate(missing)
        assert not set(new) & held
        table = found + list(new)
        for index, block in enumerate(table[len(found) :], len(found)):
            self.content[block] = (root, tuple(tokens[: 2 * index + 2]))
        if complete:
            self.manager.publish(chain, tokens, table, len(found), len(tokens) // 2)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(random=st.randoms(use_true_random=False), wrong=st.booleans())
    def let_go(self, random: random.Random, wrong: bool) -> None:
        table = self.tables.pop(random.randrange(len(self.tables)))
        if wrong:
            self.manager.withdraw(table)
        self.manager.release(table)

    @rule(root=st.sampled_from(roots))
    def forget(self, root: bytes) -> None:
        self.manager.forget(root)
        for owner, tokens in list(self.content.values()):
            if owner == root:
                assert self.manager.lookup(HashChain(Content(root, (root,)), 2), [*tokens, 0]) == []

    @invariant()
    def books_balance(self) -> None:
        self.manager.check(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.manager.num_used_blocks == len(held)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
