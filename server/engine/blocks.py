"""Blocks of the KV cache: who holds them, and which of them a prefix can be read from.

Every block is in one of three places: *held* by sequences (references > 0), *idle* (no references,
but its content is published and may be found again) or *unused*. Allocation takes unused blocks
first, then the idle block that was let go longest ago.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lorakeet.server.engine.step import BlockId

BASE_ROOT = bytes(32)  # root of the base model's hash chains; an adapter's is its digest


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Identity of a full block: its tokens, and through `parent` all tokens and the root before."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


@dataclass(frozen=True)
class Content:
    """What computes a sequence's KV: with equal contents, equal tokens have equal KV.

    Tokens before `start` are the base model's: blocks wholly before it are in the base's chain.
    """

    root: bytes  # 32 bytes
    owners: tuple[bytes, ...]  # digests of the adapters without which nobody can use it
    start: int = 0


BASE_CONTENT = Content(BASE_ROOT, (BASE_ROOT,))


class HashChain:
    """The hashes of one sequence's full blocks. They are computed once, as its tokens come."""

    def __init__(self, content: Content, block_size: int) -> None:
        if len(content.root) != 32:
            raise ValueError(f"the root of a hash chain has 32 bytes, not {len(content.root)}")
        self.content = content
        self.block_size = block_size
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append the hashes of the full blocks of `token_ids` that are not there yet."""
        size = self.block_size
        for index in range(len(self.hashes), len(token_ids) // size):
            tokens = token_ids[index * size : (index + 1) * size]
            self.hashes.append(hash_block(self._parent(index), tokens))

    def owners(self, index: int) -> tuple[bytes, ...]:
        """Whose block it is."""
        before = (index + 1) * self.block_size <= self.content.start
        return BASE_CONTENT.owners if before else self.content.owners

    def _parent(self, index: int) -> bytes:
        root, start = self.content.root, self.content.start
        parent = self.hashes[index - 1] if index else BASE_ROOT
        if start == 0:
            return parent if index else root
        if index == start // self.block_size:  # where the base model's chain is left
            return hashlib.sha256(parent + root + start.to_bytes(8, "little")).digest()
        return parent


class BlockManager:
    """Reference counts and the prefix cache. It never touches the cache's tensors."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        if num_blocks < 1 or block_size < 1:
            raise ValueError("the KV cache needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._unused = [BlockId(block) for block in reversed(range(num_blocks))]
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # longest idle first
        self._block_of_hash: dict[bytes, BlockId] = {}
        self._published: dict[BlockId, tuple[bytes, tuple[bytes, ...]]] = {}  # → (hash, owners)
        self._blocks_of_owner: dict[bytes, set[BlockId]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give, idle ones included."""
        return len(self._unused) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found, held or idle."""
        return len(self._published)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, chain: HashChain, token_ids: Sequence[int]) -> list[BlockId]:
        """The longest published prefix of `token_ids`, leaving at least one token to compute."""
        if not self.enable_prefix_caching:
            return []
        chain.extend(token_ids)
        found: list[BlockId] = []
        for block_hash in chain.hashes[: (len(token_ids) - 1) // self.block_size]:
            block = self._block_of_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, found: Sequence[BlockId], num_tokens: int) -> bool:
        """Would `num_tokens` fit if the blocks `found` were shared and the others allocated?"""
        idle = sum(block in self._idle for block in found)
        return self.blocks_for(num_tokens) - len(found) <= self.num_free_blocks - idle

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Take one more reference to each of these published blocks."""
        for block in blocks:
            assert block in self._published
            self._idle.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int) -> tuple[BlockId, ...]:
        """`count` blocks, one reference each; the caller has made sure that so many are free."""
        assert count <= self.num_free_blocks
        blocks = tuple(self._take() for _ in range(count))
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each. The end of a prefix is let go, and so evicted, first."""
        for block in reversed(blocks):
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._published:
                    self._idle[block] = None
                else:
                    self._unused.append(block)

    def publish(
        self,
        chain: HashChain,
        token_ids: Sequence[int],
        blocks: Sequence[BlockId],
        first: int,
        last: int,
    ) -> None:
        """Make `blocks[first:last]` of a sequence findable: full blocks whose KV is computed."""
        if not self.enable_prefix_caching or first == last:
            return
        chain.extend(token_ids)
        for index in range(first, last):
            block, block_hash = blocks[index], chain.hashes[index]
            assert self._references[block] > 0
            if block_hash not in self._block_of_hash and block not in self._published:
                self._block_of_hash[block_hash] = block
                self._published[block] = (block_hash, chain.owners(index))
                for owner in chain.owners(index):
                    self._blocks_of_owner.setdefault(owner, set()).add(block)

    def withdraw(self, blocks: Iterable[BlockId]) -> None:
        """These blocks shall not be found any more; who holds them keeps them."""
        for block in blocks:
            if block in self._published:
                self._unpublish(block)
                if block in self._idle:
                    del self._idle[block]
                    self._unused.append(block)

    def forget(self, owner: bytes) -> int:
        """Withdraw every block of an adapter, also of its blends; returns how many."""
        blocks = list(self._blocks_of_owner.get(owner, ()))
        self.withdraw(blocks)
        return len(blocks)

    def check(self, holders: Iterable[Sequence[BlockId]]) -> None:
        """Assert that the books agree with themselves and with the tables of all holders."""
        held = Counter(block for table in holders for block in table)
        assert [held[BlockId(block)] for block in range(self.num_blocks)] == self._references
        places = [*held, *self._idle, *self._unused]
        assert sorted(places) == list(range(self.num_blocks))
        assert self._block_of_hash == {h: block for block, (h, _) in self._published.items()}
        assert not any(block in self._published for block in self._unused)
        assert all(block in self._published for block in self._idle)
        owned = [(block, one) for one, group in self._blocks_of_owner.items() for block in group]
        published = self._published.items()
        assert sorted(owned) == sorted((b, one) for b, (_, owners) in published for one in owners)

    def _take(self) -> BlockId:
        if self._unused:
            return self._unused.pop()
        block, _ = self._idle.popitem(last=False)
        self._unpublish(block)
        return block

    def _unpublish(self, block: BlockId) -> None:
        block_hash, owners = self._published.pop(block)
        del self._block_of_hash[block_hash]
        for owner in owners:
            group = self._blocks_of_owner[owner]
            group.discard(block)
            if not group:
                del self._blocks_of_owner[owner]
