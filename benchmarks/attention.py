"""Attention beside its alternatives: Llama-3.1-8B's shape in bf16, time over the floor.

    python benchmarks/attention.py [--only decode] [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/attention.py --smoke      (tiny, on the CPU)

"decode 64 x 320" is one query of each of 64 sequences whose contexts have 256 to 384 tokens,
"prefill 8 x 256" are 8 whole prompts. Ours reads blocks of 16 tokens, and is launched for contexts
of up to 8,192, as in a captured graph. Beside it whatever is installed of: scaled_dot_product_
attention on dense keys and values, padded; torch's variable-length attention, paged where this
torch can (2.12 and later), else on dense copies without padding; FlashInfer; FlashAttention-3;
FlashAttention-2. FlashInfer and FlashAttention-3 read the same blocks of 16, the other two of 256,
since they take no smaller ones. Dense copies are made beforehand and cost nothing.

Each result is compared with ours, then as many layers are timed as do not fit the GPU's cache,
captured in a CUDA graph where that works (median of its replays). The floor is the larger of bytes
(each read or written once) over the read bandwidth and operations over the bf16 rate, both of the
same run. The last line: the best alternative's time over ours, geometric mean.
"""

import argparse
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from common import BLOCK_SIZE, Ceilings, graph_of, measure_ceilings, median_ms
from shapes import LLAMA_8B, TINY
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from lorakeet.kernels.paged_attention import paged_attention
from lorakeet.models.config import ModelConfig, parse_config

MAX_ERROR = 0.02  # of our result: both round to bf16
SPREAD = 64  # tokens that a decode's context may be longer or shorter
GPU_CACHE = 2**27  # bytes: more than any GPU's last cache
LARGE_BLOCK = 256  # tokens: the smallest block of FlashAttention-2
CASES = (
    *(f"decode {size} x 320" for size in (1, 32, 64, 128, 256)),
    *(f"decode {size} x {context}" for context in (2000, 8000) for size in (1, 16, 64)),
    "prefill 8 x 256", "prefill 1 x 2048", "prefill 1 x 8192",
)  # fmt: skip
SMOKE_CASES = ("decode 3 x 40", "prefill 2 x 50")

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


# --- ours, and the alternatives: what each makes of a problem ---


def ours(problem: Problem) -> Run:
    caches, tables = problem.paged(BLOCK_SIZE)
    num_decodes = problem.size if problem.is_decode else 0
    longest = problem.config.max_position_embeddings

    def run(i: int) -> Tensor:
        return paged_attention(
            problem.q[i], *caches[i], problem.query_starts, problem.contexts, tables,
            num_decodes, problem.queries, longest, problem.scale,
        )  # fmt: skip

    return run


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
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0)} | ({"enable_gqa": True} if "enable_gqa" in known else {})
    if "block_table" in known:
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


# Column → what must be installed, and what runs it.
ALTERNATIVES = {
    "SDPA": ("torch", sdpa),
    "varlen": ("torch.nn.attention.varlen", torch_varlen),
    "FlashInfer": ("flashinfer", flashinfer),
    "FA-3": ("flash_attn_interface", flash_attention_3),
    "FA-2": ("flash_attn", flash_attention_2),
}


def installed(names: list[str]) -> dict[str, Callable[[Problem], Run]]:
    """Those of the alternatives that can be imported; the others are named."""
    found, missing = {}, []
    for name in names:
        module, make = ALTERNATIVES[name]
        try:
            import_module(module)
            found[name] = make
        except ImportError:
            missing.append(f"{name} ({module})")
    if missing:
        print(f"cannot be imported: {', '.join(missing)}")
    return found


# --- measuring ---


@dataclass(frozen=True)
class Result:
    case: str
    floor_us: float
    us: float
    others_us: dict[str, float]

    @property
    def gain(self) -> float:
        """The best alternative's time over ours."""
        return min(self.others_us.values()) / self.us


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def time_us(run: Run, num_layers: int) -> float:
    """Microseconds in one layer."""

    def all_layers() -> None:
        for i in range(num_layers):
            run(i)

    try:
        step = graph_of(all_layers)
    except RuntimeError as error:
        print(f"not captured, so the host's time counts: {first_line(error)}")
        step = all_layers
    return median_ms(step, 10) * 1e3 / num_layers


def checked(run: Run, expected: Tensor) -> Run:
    difference = (run(0).float() - expected.float()).norm() / expected.float().norm()
    assert difference < MAX_ERROR, f"{difference:.4f} from our result"
    return run


@torch.inference_mode()
def measure(
    problem: Problem, case: str, ceilings: Ceilings, others: dict[str, Callable[[Problem], Run]]
) -> Result:
    run = ours(problem)
    expected, us = run(0), time_us(run, problem.num_layers)
    others_us = {}
    for name, make in others.items():
        try:
            others_us[name] = time_us(checked(make(problem), expected), problem.num_layers)
        except Exception as error:  # whatever a library does: the others are still measured
            print(f"{name} left out: {first_line(error)}")
    return Result(case, problem.floor_us(ceilings), us, others_us)


def print_result(result: Result, names: list[str]) -> None:
    others = [
        f"{result.others_us[name]:10.1f}" if name in result.others_us else f"{'-':>10}"
        for name in names
    ]
    print(
        f"{result.case:<17}  {result.floor_us:8.1f}  {result.us:8.1f}  "
        f"{result.us / result.floor_us:8.2f}  {'  '.join(others)}  {result.gain:9.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    config = parse_config(dict(TINY if args.smoke else LLAMA_8B))
    ceilings = measure_ceilings(device)
    print(ceilings)
    others = installed(["SDPA"] if args.smoke else list(ALTERNATIVES))
    columns = "  ".join(f"{name:>10}" for name in others)
    print(f"{'attention, us':<17}     floor      ours  us/floor  {columns}  best/ours")
    results = []
    for case in SMOKE_CASES if args.smoke else CASES:
        if args.only in case:
            results.append(measure(Problem(case, config, device), case, ceilings, others))
            print_result(results[-1], list(others))
    if args.json:
        rows = [asdict(result) for result in results]
        args.json.write_text(json.dumps({"ceilings": asdict(ceilings), "cases": rows}, indent=1))
    mean = math.exp(sum(math.log(result.gain) for result in results) / len(results))
    print(f"best alternative / ours, geometric mean: {mean:.2f}")


if __name__ == "__main__":
    main()
