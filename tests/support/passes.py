"""Forward passes without an engine: sequences in scattered cache blocks, any mix of chunks."""

from collections.abc import Callable, Mapping
from random import Random

import torch
from torch import Tensor

from lorakeet.models.batch import ForwardBatch
from lorakeet.models.kv_cache import allocate_kv_cache
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.ops import TritonOps
from lorakeet.models.process_group import ProcessGroup


def epilogues(dtype: torch.dtype, group: ProcessGroup) -> TritonOps:
    """Those of a pass of no tokens: for what needs no batch."""
    none = torch.empty(0)
    return TritonOps(plain_batch(0), (none, none), dtype, group)


def plain_batch(num_tokens: int) -> ForwardBatch:
    """For layers and epilogues that look at nothing of it."""
    empty = torch.zeros(num_tokens, dtype=torch.int64)
    return ForwardBatch(
        token_ids=empty,
        positions=empty,
        kv_slots=empty,
        query_starts=empty,
        context_lens=empty,
        block_tables=empty,
        num_decodes=0,
        max_context_len=1,
    )


class Passes:
    """Runs a model on named sequences and collects the logits of every token.

    Every cache entry that no pass has written is NaN, and a sequence's blocks are in random order:
    a read outside of a sequence's own tokens shows up as NaN.
    """

    def __init__(
        self, model: LlamaForCausalLM, num_blocks: int = 256, block_size: int = 4, seed: int = 0
    ) -> None:
        self.model = model
        self.block_size = block_size
        cache = allocate_kv_cache(
            model.config, num_blocks, block_size, model.dtype, model.device, model.group
        )
        for layer in cache.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        model.bind_kv_cache(cache)
        self._free = list(range(num_blocks))
        Random(seed).shuffle(self._free)
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self.logits: dict[str, Tensor] = {}  # (tokens so far, vocab) by sequence

    def run(
        self,
        chunks: Mapping[str, list[int]],
        wrap: Callable[[ForwardBatch], ForwardBatch] = lambda batch: batch,
    ) -> None:
        """One pass over the next tokens of some sequences. `wrap` may put more into the batch."""
        chunks = dict(sorted(chunks.items(), key=lambda item: len(item[1]) != 1))
        batch = wrap(self.batch(chunks))
        with torch.no_grad():
            logits = self.model.compute_logits(self.model(batch), batch)
        parts = torch.split(logits, [len(tokens) for tokens in chunks.values()])
        for name, part in zip(chunks, parts, strict=True):
            earlier = [self.logits[name]] if name in self.logits else []
            self.logits[name] = torch.cat([*earlier, part])

    def batch(self, chunks: Mapping[str, list[int]]) -> ForwardBatch:
        """The next tokens of some sequences, those with one token first."""
        positions: list[int] = []
        kv_slots: list[int] = []
        query_starts, context_lens = [0], []
        for name, tokens in chunks.items():
            start = self._lengths.get(name, 0)
            length = self._lengths[name] = start + len(tokens)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self.block_size < length:
                blocks.append(self._free.pop())
            for position in range(start, length):
                positions.append(position)
                block, offset = divmod(position, self.block_size)
                kv_slots.append(blocks[block] * self.block_size + offset)
            query_starts.append(len(positions))
            context_lens.append(length)
        width = max(len(self._blocks[name]) for name in chunks)
        tables = [self._blocks[name] + [0] * (width - len(self._blocks[name])) for name in chunks]
        lengths = [len(tokens) for tokens in chunks.values()]

        def tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.model.device)

        return ForwardBatch(
            token_ids=tensor(
                [token for tokens in chunks.values() for token in tokens], torch.int64
            ),
            positions=tensor(positions, torch.int64),
            kv_slots=tensor(kv_slots, torch.int64),
            query_starts=tensor(query_starts, torch.int32),
            context_lens=tensor(context_lens, torch.int32),
            block_tables=tensor(tables, torch.int32),
            num_decodes=sum(length == 1 for length in lengths),
            max_context_len=max(context_lens),
        )
