"""Decode step time over its floor: Llama-3.1-8B's shape, bf16, one GPU, no scheduler around it.

    python benchmarks/decode_step.py [--points 64:0,64:8] [--json FILE] [--profile 64:64]
    TRITON_INTERPRET=1 python benchmarks/decode_step.py --smoke      (tiny, on the CPU)

A point is batch:distinct adapters, of rank 16 on all seven projections; 64:small and 64:mixed have
as many adapters as rows, of rank 8, and of ranks 8 and 64; distinct, uniform, skewed and identical
are Punica's mixes.
Before all points, a batch without adapters on the model as it is, over the same on the model
wrapped for LoRA, with adapters loaded ("base only"). The model's pass, the logits and argmax are
captured in a CUDA graph, whose replays are timed by events (median). The floor: for each GEMM the
larger of bytes / bandwidth and flops / speed, plus the batch's KV and the distinct adapters' bytes,
with the ceilings of the same run.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from common import MAX_LORAS, Floor, ModelBench, graph_of, measure_ceilings, median_ms
from shapes import LLAMA_8B, TINY
from torch import Tensor

from lorakeet.lora.batch import LoRAForwardBatch

# Milliseconds a step on one H200, the better of vLLM 0.26.0 and SGLang 0.5.17 at each point that
# was measured there (the same shape, adapters, context and ceilings within 3%).
PEERS = {
    "1:0": 4.75, "32:0": 5.48, "64:0": 6.17, "128:0": 7.46, "256:0": 11.45,
    "32:1": 8.54, "64:1": 9.85, "256:1": 19.67,
    "32:8": 10.14, "64:8": 12.36, "128:8": 14.74, "256:8": 16.71,
    "32:32": 11.23, "64:32": 21.30, "128:32": 15.43, "256:32": 27.43,
    "64:64": 15.28, "128:64": 30.64, "256:64": 20.42,
}  # fmt: skip
RANKS = {"small": (8,), "mixed": (64, 8)}  # in turn; all others are 16
MIXES = ("distinct", "uniform", "skewed", "identical")
POINTS = "1:0,1:1,32:0,32:1,32:8,32:32,32:distinct,32:uniform,32:skewed,32:identical,64:0,64:1,64:8,64:32,64:64,64:small,64:mixed,128:0,128:1,128:8,128:32,128:64,256:0,256:1,256:8,256:32,256:64"  # noqa: E501
SMOKE_POINTS = "1:0,2:small,2:mixed"


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


@dataclass(frozen=True)
class Point:
    """The adapters of a batch."""

    adapters: list[int]  # of each row, numbered from 0 on; -1: none
    ranks: tuple[int, ...]  # of each adapter

    @property
    def size(self) -> int:
        return len(self.adapters)

    @classmethod
    def parse(cls, name: str) -> "Point":
        size, kind = int(name.split(":")[0]), name.split(":")[1]
        if kind == "0":
            return cls([-1] * size, ())
        adapters = np.unique(adapters_of_rows(size, kind), return_inverse=True)[1].tolist()
        count = max(adapters) + 1
        return cls(adapters, (RANKS.get(kind, (16,)) * count)[:count])


def adapters_of_rows(size: int, kind: str) -> list[int]:
    """Which adapter each of `size` rows has, from 0 on. Those of Punica (section 7): uniform has
    sqrt(size) adapters; of the skewed ones each has 1.5 times the rows of the next."""
    if kind in ("small", "mixed", "distinct"):
        return [row % MAX_LORAS for row in range(size)]
    if kind == "skewed":
        shares = 1.5 ** -np.arange(size)
        ends = np.cumsum(shares) / shares.sum() * size
        return np.searchsorted(ends, np.arange(size) + 0.5).tolist()
    count = {"uniform": round(size**0.5), "identical": 1}.get(kind) or int(kind)
    return [row % count for row in range(size)]


class Bench(ModelBench):
    def step(self, batch: LoRAForwardBatch) -> Callable[[], object]:
        """The captured step."""

        def run() -> Tensor:
            return self.model.compute_logits(self.hidden_states(batch), batch).argmax(-1)

        with torch.inference_mode():
            return graph_of(run)

    def point(self, name: str) -> Callable[[], object]:
        """The captured step."""
        point = Point.parse(name)
        self.set_ranks(point.ranks)
        slots = np.random.default_rng(2).permutation(np.array(point.adapters, np.int32) + 1)
        return self.step(self.batch(point.size, slots))

    def base_only(self, size: int, rounds: int) -> float:
        """The base model's step, before `wrap` over after it, with adapters loaded but not used."""
        self.set_ranks([16] * MAX_LORAS)
        batch = self.batch(size, np.zeros(size, np.int32))
        plain = self.step(batch)
        self.wrap()
        wrapped = self.step(batch)
        times = [(median_ms(plain), median_ms(wrapped)) for _ in range(rounds)]
        plain_ms, wrapped_ms = (statistics.median(each) for each in zip(*times, strict=True))
        print(
            f"base only, batch {size}: {plain_ms:.3f} ms unwrapped, {wrapped_ms:.3f} ms wrapped, "
            f"ratio {plain_ms / wrapped_ms:.3f}"
        )
        return plain_ms / wrapped_ms


def profile(step: Callable[[], object]) -> None:
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


def measure_point(bench: Bench, name: str, floor: Floor, base: dict[int, float]) -> Result:
    """Prints its line. `base`: the steps without adapters so far, by batch size."""
    point, ms = Point.parse(name), median_ms(bench.point(name))
    if not point.ranks:
        base[point.size] = ms
    result = Result(
        name,
        ms,
        floor.decode_ms(point.size, bench.context, point.ranks),
        PEERS.get(name),
        ms - base[point.size] if point.size in base and point.ranks else None,
        floor.adapters_ms(point.ranks),
    )
    peer = f"{result.peer_ms:9.2f}  {result.peer_ms / ms:9.2f}" if result.peer_ms else " " * 20
    price = "" if result.lora_ms is None else f"{result.lora_ms:7.2f}  {result.lora_bytes_ms:12.2f}"
    print(
        f"{name:>14}  {ms:7.3f}  {result.floor_ms:8.2f}  {result.ratio:10.2f}  {peer}  {price}",
        flush=True,
    )
    return result


def print_mixes(results: list[Result]) -> None:
    """For each batch size with several of Punica's mixes, how much they differ."""
    by_size: dict[str, list[float]] = {}
    for result in results:
        size, kind = result.point.split(":")
        if kind in MIXES:
            by_size.setdefault(size, []).append(result.step_ms)
    for size, times in by_size.items():
        if len(times) > 1:
            print(f"batch {size}: slowest / fastest mix {max(times) / min(times):.2f}")


def print_neighbours(results: list[Result]) -> None:
    """What a row of rank 8 pays for neighbours of rank 64, beyond their bytes."""
    points = {result.point: result for result in results}
    for name, mixed in points.items():
        size, kind = name.split(":")
        if kind == "mixed" and (small := points.get(f"{size}:small")):
            more_bytes_ms = mixed.lora_bytes_ms - small.lora_bytes_ms
            ratio = (mixed.step_ms - more_bytes_ms) / small.step_ms
            print(f"batch {size}: ranks 8 and 64, less the bytes of 64, over 8 alone {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", default=None)
    parser.add_argument("--profile", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    points = args.points or (SMOKE_POINTS if args.smoke else POINTS)
    values, context = (TINY, 40) if args.smoke else (LLAMA_8B, 320)
    bench = Bench(values, device, context, wrapped=False)
    ceilings = measure_ceilings(device)
    print(ceilings)
    base_only = bench.base_only(*(2, 1) if args.smoke else (64, 3))
    print(
        "batch:adapters  step ms  floor ms  step/floor  best peer  peer/step  LoRA ms  its bytes ms"
    )
    base: dict[int, float] = {}
    floor = bench.floor(ceilings)
    results = [measure_point(bench, name, floor, base) for name in points.split(",")]
    print_mixes(results)
    print_neighbours(results)
    for name in filter(None, args.profile.split(",")):
        print(f"kernels at {name}")
        profile(bench.point(name))
    if args.json:
        rows = [asdict(result) for result in results]
        found = {"ceilings": asdict(ceilings), "base_only": base_only, "points": rows}
        args.json.write_text(json.dumps(found, indent=1))
    print(f"worst step/floor: {max(result.ratio for result in results):.2f}")


if __name__ == "__main__":
    main()
