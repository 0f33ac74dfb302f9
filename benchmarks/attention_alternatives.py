"""Attention over some sequences, and what else can do it. Not a command."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from common import BLOCK_SIZE, Ceilings
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from lorakeet.models.config import ModelConfig

SPREAD = 64  # tokens that a decode's context may be longer or shorter
GPU_CACHE = 2**27  # bytes: more than any GPU's last cache
LARGE_BLOCK = 256  # tokens: the smallest block of FlashAttention-2
VARLEN_OPTIONS = inspect.signature(varlen_attn).parameters
IS_VARLEN_PAGED = "block_table" in VARLEN_OPTIONS

Run = Callable[[int], Tensor]  # a layer's number → (T, heads, head_dim)


class Problem:
    """The last `queries` tokens of each sequence attend to its whole context, in some layers."""

    def __init__(self, case: str, config: ModelConfig, device: str) -> None:
        kind, size, _, context = case.split()
        self.config, self.device, self.size = config, device, int(size)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.scale = config.head_dim**-0.5
        self.is_decode = kind == "decode"
        self.queries = 1 if self.is_decode else int(context)
        self.lengths = np.full(self.size, int(context))
        if self.is_decode and self.size > 1:
            spread = min(SPREAD, int(context) // 5)
            self.lengths += np.linspace(-spread, spread, self.size).round().astype(int)
        self.longest = int(self.lengths.max())
        self.contexts = self.put(self.lengths)
        self.query_starts = self.put(np.arange(self.size + 1) * self.queries)
        self.num_layers = -(-GPU_CACHE // self.kv_bytes) + 1 if device == "cuda" else 1
        torch.manual_seed(0)
        self.q = self.random(self.size * self.queries, config.num_attention_heads)
        dense = (self.size, self.longest, config.num_key_value_heads)
        self.k, self.v = self.random(*dense), self.random(*dense)

    def random(self, *shape: int) -> list[Tensor]:
        """(*shape, head_dim) for each layer."""
        shape = (*shape, self.config.head_dim)
        return [
            torch.randn(shape, dtype=self.dtype, device=self.device) for _ in range(self.num_layers)
        ]

    def put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, torch.int32)

    def by_sequence(self, i: int) -> Tensor:
        """Queries of a layer, (size, queries, heads, head_dim)."""
        return self.q[i].unflatten(0, (self.size, self.queries))

    def paged(self, block: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Keys and values of each layer in scattered blocks of so many tokens, (blocks, block,
        kv_heads, head_dim); tables (size, blocks of the longest) int32."""
        blocks = -(-self.longest // block)
        order = np.random.default_rng(1).permutation(self.size * blocks)
        tables = self.put(order.reshape(self.size, blocks))

        def scattered(dense: Tensor) -> Tensor:
            whole = pad(dense, (0, 0, 0, 0, 0, blocks * block - self.longest))
            in_order = whole.view(-1, block, *dense.shape[2:])
            cache = torch.empty_like(in_order)
            cache[tables.flatten().long()] = in_order
            return cache

        pairs = zip(self.k, self.v, strict=True)
        return [(scattered(k), scattered(v)) for k, v in pairs], tables

    def packed(self, dense: list[Tensor]) -> list[Tensor]:
        """Without padding, (tokens of all sequences, kv_heads, head_dim)."""
        mask = torch.arange(self.longest, device=self.device) < self.contexts[:, None]
        return [each[mask] for each in dense]

    # --- the floor ---

    @property
    def kv_bytes(self) -> int:
        return 2 * int(self.lengths.sum()) * self.config.kv_size * self.dtype.itemsize

    def floor_us(self, ceilings: Ceilings) -> float:
        tokens, width = self.size * self.queries, self.config.q_size
        num_bytes = self.kv_bytes + 2 * tokens * width * self.dtype.itemsize
        # query j of n, in a context of c, sees c - n + 1 + j keys: a product with K, one with V
        before = self.queries * (self.lengths - self.queries).sum()
        pairs = before + self.size * self.queries * (self.queries + 1) // 2
        return ceilings.seconds(num_bytes, 4 * int(pairs) * width) * 1e6


# --- the alternatives: what each makes of a problem ---


def sdpa(problem: Problem) -> Run:
    """A mask only where contexts differ: with one, torch has fewer kernels to choose from."""
    mask = None
    if problem.is_decode and problem.size > 1:
        places = torch.arange(problem.longest, device=problem.device)
        mask = (places < problem.contexts[:, None])[:, None, None]

    def run(i: int) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (problem.by_sequence(i), problem.k[i], problem.v[i]))
        out = scaled_dot_product_attention(
            q, k, v, mask, is_causal=not problem.is_decode, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return run


def torch_varlen(problem: Problem) -> Run:
    """https://docs.pytorch.org/docs/2.12/nn.attention.varlen.html"""
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in VARLEN_OPTIONS:
        options |= {"enable_gqa": True}
    if IS_VARLEN_PAGED:
        caches, tables = problem.paged(LARGE_BLOCK)
        options |= {"block_table": tables, "seqused_k": problem.contexts}
        key_starts = None
    else:
        packed = (problem.packed(problem.k), problem.packed(problem.v))
        caches = list(zip(*packed, strict=True))
        key_starts = problem.put(np.concatenate([[0], np.cumsum(problem.lengths)]))

    def run(i: int) -> Tensor:
        return varlen_attn(
            problem.q[i], *caches[i], problem.query_starts, key_starts,
            problem.queries, problem.longest, **options,
        )  # fmt: skip

    return run


def flashinfer(problem: Problem) -> Run:
    """https://docs.flashinfer.ai/api/decode.html and prefill.html"""
    library, config = import_module("flashinfer"), problem.config
    caches, tables = problem.paged(BLOCK_SIZE)
    used = -(-problem.lengths // BLOCK_SIZE)
    starts = problem.put(np.concatenate([[0], np.cumsum(used)]))
    blocks = torch.cat([table[:count] for table, count in zip(tables, used, strict=True)])
    pages = (starts, blocks, problem.put((problem.lengths - 1) % BLOCK_SIZE + 1))
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    types = {"q_data_type": problem.dtype, "kv_data_type": problem.dtype}
    workspace = torch.zeros(2**28, dtype=torch.uint8, device=problem.device)
    if problem.is_decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
        wrapper.plan(*pages, *heads, BLOCK_SIZE, **types)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace)
        wrapper.plan(problem.query_starts, *pages, *heads, BLOCK_SIZE, causal=True, **types)
    return lambda i: wrapper.run(problem.q[i], caches[i])


def flash_attention_3(problem: Problem) -> Run:
    """hopper/flash_attn_interface.py of https://github.com/Dao-AILab/flash-attention"""
    attend = import_module("flash_attn_interface").flash_attn_with_kvcache
    caches, tables = problem.paged(BLOCK_SIZE)
    options = {"cache_seqlens": problem.contexts, "page_table": tables, "causal": True}
    return lambda i: attend(problem.by_sequence(i), *caches[i], **options).flatten(0, 1)


def flash_attention_2(problem: Problem) -> Run:
    """flash_attn/flash_attn_interface.py of the same"""
    attend = import_module("flash_attn").flash_attn_with_kvcache
    caches, tables = problem.paged(LARGE_BLOCK)
    options = {"cache_seqlens": problem.contexts, "block_table": tables, "causal": True}
    return lambda i: attend(problem.by_sequence(i), *caches[i], **options).flatten(0, 1)


def flash_attention_3_of_vllm(problem: Problem) -> Run:
    """vllm/vllm_flash_attn/flash_attn_interface.py of vLLM's package"""
    attend = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    caches, tables = problem.paged(BLOCK_SIZE)
    options = {"seqused_k": problem.contexts, "block_table": tables, "causal": True}

    def run(i: int) -> Tensor:
        return attend(
            problem.q[i], *caches[i], problem.queries, problem.query_starts, problem.longest,
            fa_version=3, **options,
        )  # fmt: skip

    return run


# Column → what must be installed, and what runs it.
ALTERNATIVES = {
    "SDPA": ("torch", sdpa),
    "varlen" if IS_VARLEN_PAGED else "varlen, dense": ("torch.nn.attention.varlen", torch_varlen),
    "FlashInfer": ("flashinfer", flashinfer),
    "FA-3": ("flash_attn_interface", flash_attention_3),
    "vLLM FA-3": ("vllm.vllm_flash_attn", flash_attention_3_of_vllm),
    "FA-2": ("flash_attn", flash_attention_2),
}
