"""What the GPU benchmarks share: a clock, the machine's ceilings, a wrapped model and its batches.

Not a command. Without a GPU everything runs in Triton's interpreter, and the clock says 1 ms.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorakeet.kernels.rank_rows import MIN_ROOM, RankRows, SlotRows, list_rank_rows, pack, unpack
from lorakeet.lora.adapter import GroupSpec
from lorakeet.lora.batch import LoRABatch, LoRAForwardBatch
from lorakeet.lora.layers import wrap_model
from lorakeet.lora.pool import AdapterPool
from lorakeet.lora.specs import group_specs
from lorakeet.lora.triton_backend import TritonBackend
from lorakeet.models import llama
from lorakeet.models.config import ModelConfig, parse_config
from lorakeet.models.kv_cache import allocate_kv_cache
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.ops import TritonOps

MAX_LORAS = 64
TABLE_WIDTH = 65  # rows that a slot can list: rank 64, and biases
BLOCK_SIZE = 16
NUM_COUNTERS = 2**16  # enough for any pass here

# --- the clock ---


@dataclass(frozen=True)
class Captured:
    """A CUDA graph, and the step that it repeats, which holds the tensors that it reads."""

    graph: torch.cuda.CUDAGraph
    step: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def graph_of(step: Callable[[], object]) -> Callable[[], object]:
    """`step`, captured; on the CPU itself."""
    if not torch.cuda.is_available():
        return step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return Captured(graph, step)


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def median_ms(step: Callable[[], object], repeats: int = 20, inner: int = 1) -> float:
    if not torch.cuda.is_available():
        before = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - before)
    for _ in range(3):
        step()
    pairs = [[new_event(), new_event()] for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        for _ in range(inner):
            step()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) / inner


@dataclass(frozen=True)
class Ceilings:
    copy: float  # bytes a second, read and written
    read: float
    flops: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """No kernel that moves and computes so much takes less."""
        return max(num_bytes / self.read, flops / self.flops)

    def __str__(self) -> str:
        return (
            f"copy {self.copy / 1e12:.2f} TB/s, read {self.read / 1e12:.2f} TB/s, "
            f"bf16 GEMM {self.flops / 1e12:.0f} TFLOP/s"
        )


def measure_ceilings(device: str) -> Ceilings:
    if device == "cpu":
        return Ceilings(1e9, 1e9, 1e9)
    big = torch.empty(2**31, dtype=torch.bfloat16, device=device).normal_()
    other = torch.empty_like(big)
    copy = 2 * big.nbytes / median_ms(lambda: other.copy_(big), 10) * 1e3
    read = big.nbytes / median_ms(lambda: torch.max(big.view(torch.int32)), 10) * 1e3
    a, b = (x[: 2**26].view(8192, 8192) for x in (big, other))
    flops = 2 * 8192**3 / median_ms(lambda: a @ b, 10) * 1e3
    return Ceilings(copy, max(read, copy), flops)


@dataclass(frozen=True)
class Floor:
    """What no pass of a model takes less than, under ceilings of the same run."""

    config: ModelConfig
    specs: Sequence[GroupSpec]  # of the layers
    width: int  # bytes of a value
    ceilings: Ceilings

    def products_ms(self, tokens: int) -> float:
        """Of the layers' products: each its bytes or its operations, whichever takes longer."""
        shapes = [(s.num_layers, s.input_size * s.output_size) for s in self.specs]
        return sum(count * self._product_ms(tokens, values) for count, values in shapes)

    def decode_ms(self, size: int, context: int, ranks: Sequence[int]) -> float:
        """Of a step of `size` sequences: the products with the head's, the KV cache, and the
        distinct adapters, of these ranks."""
        config = self.config
        head = self._product_ms(size, config.hidden_size * config.vocab_size)
        kv = 2 * config.num_hidden_layers * config.kv_size * self.width * size * context
        kv_ms = 1e3 * kv / self.ceilings.read
        return self.products_ms(size) + head + kv_ms + self.adapters_ms(ranks)

    def adapters_ms(self, ranks: Sequence[int]) -> float:
        """Of reading adapters of these ranks once."""
        row = sum(
            s.num_layers * (len(s.slice_sizes) * s.input_size + s.output_size) for s in self.specs
        )
        return 1e3 * sum(ranks) * row * self.width / self.ceilings.read

    def _product_ms(self, tokens: int, weights: int) -> float:
        return 1e3 * self.ceilings.seconds(self.width * weights, 2 * tokens * weights)


def layer_specs(config: ModelConfig) -> list[GroupSpec]:
    """All projections: what is in each layer, not embedding and head."""
    return [spec for spec in group_specs(config) if spec.num_layers > 1]


# --- what is measured ---


class ModelBench:
    """A random model of a shape, and a pool of random adapters on all seven projections."""

    def __init__(
        self, values: dict[str, object], device: str, context: int, wrapped: bool = True
    ) -> None:
        """`context`: tokens of a sequence, about; `wrapped`: call `wrap` at once."""
        torch.manual_seed(0)
        self.device, self.context = device, context
        self.config: ModelConfig = parse_config(dict(values))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.set_default_dtype(dtype)
        with torch.device(device):
            self.model = LlamaForCausalLM(self.config)
        torch.set_default_dtype(torch.float32)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(False)
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
        self.specs = layer_specs(self.config)
        self.pool = AdapterPool(
            self.specs, MAX_LORAS + 1, 40 * MAX_LORAS, TABLE_WIDTH, dtype, device
        )
        for spec in self.specs:
            for index in range(spec.num_layers):
                weights = self.pool.layer(spec.name, index)
                weights.a.normal_(0, spec.input_size**-0.5)
                weights.b.normal_(0, 0.02)
        vars(llama)["plan_ops"] = TritonOps  # in the interpreter too
        if wrapped:
            self.wrap()

    def wrap(self) -> None:
        wrap_model(self.model, self.pool, TritonBackend(self.device, NUM_COUNTERS))

    def set_ranks(self, ranks: Sequence[int]) -> None:
        """Give the slots from 1 on scattered rows, `ranks[i]` to slot i + 1."""
        rows = np.random.default_rng(0).permutation(self.pool.num_rows).astype(np.int32)
        self.listed = {
            slot: SlotRows(
                rows[end - rank : end], np.ones(rank, np.float32), np.zeros(rank, np.float32), -1
            )
            for slot, (rank, end) in enumerate(zip(ranks, np.cumsum(ranks), strict=True), start=1)
        }

    def rank_rows(self, slots: np.ndarray) -> RankRows:
        """With as much room as any mix of adapters needs, as in a captured graph."""
        room = max(min(len(slots), MAX_LORAS) * TABLE_WIDTH, MIN_ROOM)
        packed = torch.from_numpy(pack(list_rank_rows(slots, self.listed.__getitem__), room))
        return unpack(packed.to(self.device), len(slots), room, TABLE_WIDTH)

    def lora(self, slots: np.ndarray) -> LoRABatch | None:
        if not slots.any():
            return None
        rank_rows = self.rank_rows(slots)
        arrivals = torch.zeros(self.pool.num_layers, dtype=torch.int32, device=self.device)
        groups = dict.fromkeys(self.pool.specs, rank_rows)
        counts = rank_rows.count.expand_as(arrivals).contiguous()  # each layer has them all
        return LoRABatch(torch.from_numpy(slots), groups, arrivals, counts)

    def put(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)

    def bind_cache(self, num_blocks: int) -> None:
        """A new KV cache, full of random keys and values."""
        cache = allocate_kv_cache(
            self.config, num_blocks, BLOCK_SIZE, self.model.dtype, self.device
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.model.bind_kv_cache(cache)

    def batch(self, size: int, slots: np.ndarray) -> LoRAForwardBatch:
        """One decode of each of `size` sequences, in scattered blocks, padded as for a graph."""
        rng = np.random.default_rng(1)
        contexts = rng.integers(self.context - 64, self.context + 65, size)
        contexts = np.maximum(contexts - round(contexts.mean() - self.context), 1)
        num_blocks = -(-int(contexts.max()) // BLOCK_SIZE)
        tables = rng.permutation(size * num_blocks).reshape(size, num_blocks)
        positions = contexts - 1
        kv_slots = tables[np.arange(size), positions // BLOCK_SIZE] * BLOCK_SIZE
        self.bind_cache(size * num_blocks)
        return LoRAForwardBatch(
            token_ids=self.put(rng.integers(0, self.config.vocab_size, size), torch.int64),
            positions=self.put(positions, torch.int64),
            kv_slots=self.put(kv_slots + positions % BLOCK_SIZE, torch.int64),
            query_starts=self.put(np.arange(size + 1), torch.int32),
            context_lens=self.put(contexts, torch.int32),
            block_tables=self.put(tables, torch.int32),
            num_decodes=size,
            max_context_len=self.config.max_position_embeddings,
            lora=self.lora(slots),
            logits_lora=None,
        )

    def hidden_states(self, batch: LoRAForwardBatch) -> Tensor:
        """The model's pass; arrivals are used up by each."""
        if batch.lora is not None and batch.lora.arrivals is not None:
            batch.lora.arrivals.zero_()
        return self.model(batch)

    def floor(self, ceilings: Ceilings) -> Floor:
        return Floor(self.config, self.specs, self.model.dtype.itemsize, ceilings)


# --- commands that measure case by case ---


def case_parser(description: str) -> argparse.ArgumentParser:
    """`description`: of which the first line is shown."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    return parser


def write_cases(path: Path, ceilings: Ceilings, results: Sequence[Any]) -> None:
    """`results`: dataclasses."""
    found = {"ceilings": asdict(ceilings), "cases": [asdict(result) for result in results]}
    path.write_text(json.dumps(found, indent=1))
