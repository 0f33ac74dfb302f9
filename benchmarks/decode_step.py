"""Decode step time over its floor: Llama-3.1-8B's shape, bf16, one GPU, no scheduler around it.

    python benchmarks/decode_step.py [--points 64:0,64:8] [--json FILE] [--profile 64:64]
    TRITON_INTERPRET=1 python benchmarks/decode_step.py --smoke      (tiny, on the CPU)

A point is batch:distinct adapters, of rank 16 on all seven projections; 64:mixed has as many
adapters as rows, of ranks 8 and 64. The model's pass, the logits and argmax are captured in a
CUDA graph, whose replays are timed by events (median). The floor: for each GEMM the larger of
bytes / bandwidth and flops / speed, plus the batch's KV and the distinct adapters' bytes, with the
ceilings of the same run.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from shapes import LLAMA_8B
from torch import Tensor

from lorakeet.kernels.rank_rows import SlotRows, list_rank_rows, pack, unpack
from lorakeet.lora.batch import MIN_ROOM, LoRABatch, LoRAForwardBatch
from lorakeet.lora.layers import wrap_model
from lorakeet.lora.pool import AdapterPool, table_width
from lorakeet.lora.specs import group_specs
from lorakeet.lora.triton_backend import TritonBackend
from lorakeet.models import llama
from lorakeet.models.config import ModelConfig, parse_config
from lorakeet.models.kv_cache import allocate_kv_cache
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.ops import TritonOps

TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
# Milliseconds a step on one H200, the better of vLLM 0.26.0 and SGLang 0.5.17 at each point that
# was measured there (the same shape, adapters, context and ceilings within 3%).
PEERS = {
    "1:0": 4.75, "32:0": 5.48, "64:0": 6.17, "128:0": 7.46, "256:0": 11.45,
    "32:1": 8.54, "64:1": 9.85, "256:1": 19.67,
    "32:8": 10.14, "64:8": 12.36, "128:8": 14.74, "256:8": 16.71,
    "32:32": 11.23, "64:32": 21.30, "128:32": 15.43, "256:32": 27.43,
    "64:64": 15.28, "128:64": 30.64, "256:64": 20.42,
}  # fmt: skip
POINTS = "1:0,1:1,32:0,32:1,32:8,32:32,64:0,64:1,64:8,64:32,64:64,64:mixed,128:0,128:1,128:8,128:32,128:64,256:0,256:1,256:8,256:32,256:64"  # noqa: E501
MAX_LORAS = 64
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Ceilings:
    copy: float  # bytes a second, read and written
    read: float
    flops: float


@dataclass(frozen=True)
class Result:
    point: str
    step_ms: float
    floor_ms: float
    peer_ms: float | None
    lora_ms: float | None  # step − the base step of this batch
    lora_bytes_ms: float

    @property
    def ratio(self) -> float:
        return self.step_ms / self.floor_ms


# --- the clock ---


def graph_of(step: Callable[[], object]) -> Callable[[], object]:
    """`step`, captured; on the CPU itself."""
    if not torch.cuda.is_available():
        step()
        return step
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def median_ms(step: Callable[[], object], repeats: int = 20, inner: int = 1) -> float:
    if not torch.cuda.is_available():
        return 1.0
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


# --- what is measured ---


class Bench:
    def __init__(self, values: dict[str, object], device: str, context: int) -> None:
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
        self.specs = [s for s in group_specs(self.config) if s.num_layers > 1]
        self.pool = AdapterPool(
            self.specs, MAX_LORAS + 1, 40 * MAX_LORAS, table_width(64), dtype, device
        )
        for spec in self.specs:
            for index in range(spec.num_layers):
                weights = self.pool.layer(spec.name, index)
                weights.a.normal_(0, spec.input_size**-0.5)
                weights.b.normal_(0, 0.02)
        wrap_model(self.model, self.pool, TritonBackend(device))
        vars(llama)["plan_ops"] = TritonOps  # in the interpreter too

    def set_ranks(self, ranks: list[int]) -> None:
        """Give the slots from 1 on scattered rows, `ranks[i]` to slot i + 1."""
        rows = np.random.default_rng(0).permutation(self.pool.num_rows).astype(np.int32)
        self.listed = {
            slot: SlotRows(
                rows[end - rank : end], np.ones(rank, np.float32), np.zeros(rank, np.float32), -1
            )
            for slot, (rank, end) in enumerate(zip(ranks, np.cumsum(ranks), strict=True), start=1)
        }

    def lora(self, slots: np.ndarray) -> LoRABatch | None:
        """With as much room as any mix of adapters needs, as in a captured graph."""
        if not slots.any():
            return None
        room = max(min(len(slots), MAX_LORAS) * self.pool.table_width, MIN_ROOM)
        packed = torch.from_numpy(pack(list_rank_rows(slots, self.listed.__getitem__), room))
        rank_rows = unpack(packed.to(self.device), len(slots), room, self.pool.table_width)
        arrivals = torch.zeros(self.pool.num_layers, dtype=torch.int32, device=self.device)
        groups = dict.fromkeys(self.pool.specs, rank_rows)
        return LoRABatch(torch.from_numpy(slots), groups, arrivals)

    def batch(self, size: int, slots: np.ndarray) -> LoRAForwardBatch:
        """One decode of each of `size` sequences, in scattered blocks, padded as for a graph."""
        rng = np.random.default_rng(1)
        contexts = rng.integers(self.context - 64, self.context + 65, size)
        contexts = np.maximum(contexts - round(contexts.mean() - self.context), 1)
        num_blocks = -(-int(contexts.max()) // BLOCK_SIZE)
        tables = rng.permutation(size * num_blocks).reshape(size, num_blocks)
        positions = contexts - 1
        kv_slots = tables[np.arange(size), positions // BLOCK_SIZE] * BLOCK_SIZE
        cache = allocate_kv_cache(
            self.config, size * num_blocks, BLOCK_SIZE, self.model.dtype, self.device
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.model.bind_kv_cache(cache)

        def put(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)

        return LoRAForwardBatch(
            token_ids=put(rng.integers(0, self.config.vocab_size, size), torch.int64),
            positions=put(positions, torch.int64),
            kv_slots=put(kv_slots + positions % BLOCK_SIZE, torch.int64),
            query_starts=put(np.arange(size + 1), torch.int32),
            context_lens=put(contexts, torch.int32),
            block_tables=put(tables, torch.int32),
            num_decodes=size,
            max_query_len=1,
            max_context_len=self.config.max_position_embeddings,
            lora=self.lora(slots),
            logits_lora=None,
        )

    def point(self, name: str) -> tuple[Callable[[], object], float]:
        """The captured step, and the bytes of its distinct adapters."""
        batch_part, kind = name.split(":")
        size = int(batch_part)
        mixed = kind == "mixed"
        count = min(size, MAX_LORAS) if mixed else int(kind)
        ranks = [8 if i % 2 else 64 for i in range(count)] if mixed else [16] * count
        self.set_ranks(ranks)
        slots = np.random.default_rng(2).permutation(size) % max(count, 1) + (count > 0)
        batch = self.batch(size, slots.astype(np.int32))

        def step() -> Tensor:
            if batch.lora is not None and batch.lora.arrivals is not None:
                batch.lora.arrivals.zero_()
            return self.model.compute_logits(self.model(batch), batch).argmax(-1)

        with torch.inference_mode():
            captured = graph_of(step)
        row = sum(
            s.num_layers * (len(s.slice_sizes) * s.input_size + s.output_size) for s in self.specs
        )
        return captured, sum(ranks) * row * self.model.dtype.itemsize

    def floor_ms(self, size: int, lora_bytes: float, ceilings: Ceilings) -> float:
        config, width = self.config, self.model.dtype.itemsize
        products = [(s.input_size, s.output_size, s.num_layers) for s in self.specs] + [
            (config.hidden_size, config.vocab_size, 1)
        ]
        seconds = sum(
            count * max(width * n * k / ceilings.read, 2 * size * n * k / ceilings.flops)
            for k, n, count in products
        )
        kv = 2 * config.num_hidden_layers * config.kv_size * width * size * self.context
        return (seconds + (kv + lora_bytes) / ceilings.read) * 1e3


def profile(step: Callable[[], object], out: Path | None) -> None:
    """Kernel times of one replay, by name."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as trace:
        step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type.name == "CUDA":
            kernels.setdefault(event.name[:90], []).append(event.device_time)
    total = 0.0
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1])):
        total += sum(times)
        each = statistics.median(times)
        print(f"{sum(times) / 1e3:8.3f} ms {len(times):5d} x {each:7.2f} us  {name}")
    print(f"{total / 1e3:8.3f} ms in kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--profile", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    bench = Bench(TINY if args.smoke else LLAMA_8B, device, 40 if args.smoke else 320)
    ceilings = measure_ceilings(device)
    print(
        f"copy {ceilings.copy / 1e12:.2f} TB/s, read {ceilings.read / 1e12:.2f} TB/s, "
        f"bf16 GEMM {ceilings.flops / 1e12:.0f} TFLOP/s"
    )
    print(
        "batch:adapters  step ms  floor ms  step/floor  best peer  peer/step  LoRA ms  its bytes ms"
    )
    base: dict[int, float] = {}
    results: list[Result] = []
    for name in args.points.split(","):
        step, lora_bytes = bench.point(name)
        size = int(name.split(":")[0])
        ms = median_ms(step)
        if lora_bytes == 0:
            base[size] = ms
        result = Result(
            name,
            ms,
            bench.floor_ms(size, lora_bytes, ceilings),
            PEERS.get(name),
            ms - base[size] if size in base and lora_bytes else None,
            lora_bytes / ceilings.read * 1e3,
        )
        results.append(result)
        peer = f"{result.peer_ms:9.2f}  {result.peer_ms / ms:9.2f}" if result.peer_ms else " " * 20
        price = f"{result.lora_ms:7.2f}  {result.lora_bytes_ms:12.2f}" if result.lora_ms else ""
        print(
            f"{name:>14}  {ms:7.3f}  {result.floor_ms:8.2f}  {result.ratio:10.2f}  {peer}  {price}",
            flush=True,
        )
        del step
    for name in filter(None, args.profile.split(",")):
        print(f"kernels at {name}")
        profile(bench.point(name)[0], args.json)
    if args.json:
        rows = [asdict(result) for result in results]
        args.json.write_text(json.dumps({"ceilings": asdict(ceilings), "points": rows}, indent=1))
    print(f"worst step/floor: {max(result.ratio for result in results):.2f}")


if __name__ == "__main__":
    main()
