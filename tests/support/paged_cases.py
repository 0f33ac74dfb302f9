"""Inputs for paged attention: sequences scattered over the blocks of a poisoned cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedCase:
    q: Tensor  # (T, heads, head_dim)
    keys: list[Tensor]  # of each sequence, (context, kv_heads, head_dim)
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    num_decodes: int
    max_context_len: int

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.query_starts,
            self.context_lens,
            self.block_tables,
            self.num_decodes,
            self.max_context_len,
        )


def paged_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PagedCase:
    """`lengths`: (new tokens, context) of each sequence. What no sequence owns is NaN; q is a view
    into a wider tensor, as it is after a fused projection.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_blocks = [-(-context // block_size) for _, context in lengths]
    blocks = torch.randperm(sum(num_blocks) + 2, generator=generator)
    cache_shape = (len(blocks), block_size, kv_heads, head_dim)
    k_cache, v_cache = (torch.full(cache_shape, torch.nan, dtype=dtype) for _ in range(2))
    tables = torch.zeros((len(lengths), max(num_blocks) + 1), dtype=torch.int32)
    keys, values = [], []
    for sequence, own in enumerate(torch.split(blocks[2:], num_blocks)):
        tables[sequence, : len(own)] = own
        places = torch.arange(lengths[sequence][1])
        keys.append(normal(len(places), kv_heads, head_dim))
        values.append(normal(len(places), kv_heads, head_dim))
        k_cache[own[places // block_size], places % block_size] = keys[-1]
        v_cache[own[places // block_size], places % block_size] = values[-1]

    new = [query for query, _ in lengths]
    wide = normal(sum(new), (heads + 2) * head_dim).to(device)
    return PagedCase(
        q=wide[:, : heads * head_dim].view(-1, heads, head_dim),
        keys=[key.to(device) for key in keys],
        values=[value.to(device) for value in values],
        k_cache=k_cache.to(device),
        v_cache=v_cache.to(device),
        query_starts=torch.tensor([0, *new]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor([c for _, c in lengths], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_decodes=next((i for i, query in enumerate(new) if query != 1), len(new)),
        max_context_len=max(context for _, context in lengths),
    )
