"""Decode steps of a model cut over several GPUs of one machine: the step's time, and NCCL's share.

    python benchmarks/tensor_parallel.py [--sizes 1,2] [--points 1:0,32:8]
    python benchmarks/tensor_parallel.py --config configs/llama-3.1-70b-tp8.yaml [--sizes 4,8]
    python benchmarks/tensor_parallel.py --smoke      (tiny, gloo, on the CPU)

Points, weights, graphs and clock are those of decode_step.py, with the sampled tokens' broadcast.
For each size it starts that many processes, one a GPU, which run every point together. The model is
one whose shape is in shapes.py. Speed-ups, over the first size, come last.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_step
import torch
from common import NUM_COUNTERS
from decode_step import MAX_LORAS, TINY, Bench, median_ms
from shapes import SHAPES
from torch import Tensor

from lorakeet.configs.settings import load
from lorakeet.kernels.all_reduce_norm import all_reduce_add_rms_norm
from lorakeet.kernels.norm import add_rms_norm
from lorakeet.lora.layers import wrap_model
from lorakeet.lora.pool import AdapterPool, bytes_per_row
from lorakeet.lora.row_tables import table_width
from lorakeet.lora.specs import group_specs
from lorakeet.lora.triton_backend import TritonBackend
from lorakeet.models import llama
from lorakeet.models.config import parse_config
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.ops import TritonOps
from lorakeet.models.process_group import ProcessGroup, address_of, fits_one_shot, join, listen

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
SUM_ROWS = (1, 8, 32, 128, 256)
POINTS = "1:0,1:1,32:0,32:8,32:32,128:0,128:8,128:32"
JOIN_SECONDS = 300.0
EPS = 1e-5
Results = dict[str, Any]


# --- one rank ---


class RankBench(Bench):
    """What one rank of the group holds of the model, the adapter pool and the KV cache."""

    def __init__(
        self, values: dict[str, Any], device: str, context: int, group: ProcessGroup
    ) -> None:
        torch.manual_seed(group.rank)
        self.device, self.context = device, context
        config = parse_config(values)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.set_default_dtype(dtype)
        with torch.device(device):
            self.model = LlamaForCausalLM(config, group)
        torch.set_default_dtype(torch.float32)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(False)
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
        self.specs = [spec for spec in group_specs(config, group) if spec.num_layers > 1]
        (attention, *_) = (m for m in self.model.modules() if isinstance(m, llama.LlamaAttention))
        # of the config, the batch's cache alone is still to be made: with this rank's heads
        self.config = replace(config, num_key_value_heads=attention.num_kv_heads)
        self.pool = AdapterPool(
            self.specs, MAX_LORAS + 1, 40 * MAX_LORAS, table_width(64), dtype, device
        )
        for spec in self.specs:
            for index in range(spec.num_layers):
                weights = self.pool.layer(spec.name, index)
                weights.a.normal_(0, spec.input_size**-0.5)
                weights.b.normal_(0, 0.02)
        wrap_model(self.model, self.pool, TritonBackend(device, NUM_COUNTERS))
        vars(llama)["plan_ops"] = TritonOps  # in the interpreter too

    def gigabytes(self) -> dict[str, float]:
        row = bytes_per_row(self.specs, self.model.dtype)
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return {"weights": weights / 1e9, "row": row / 1e9}


def graph_of(step: Callable[[], object]) -> Callable[[], object]:
    """As the server captures: one stream before and in it, and other threads left alone."""
    if not torch.cuda.is_available():
        return step
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def kernels_of(step: Callable[[], object], repeats: int = 5) -> dict[str, tuple[int, float]]:
    """Of one replay, by kernel: launches, and milliseconds (the mean of several replays)."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    sums: dict[str, tuple[int, float]] = {}
    for event in trace.events():
        if event.device_type.name == "CUDA":
            count, total = sums.get(event.name[:80], (0, 0.0))
            sums[event.name[:80]] = count + 1, total + event.device_time / 1e3
    return {name: (n // repeats, total / repeats) for name, (n, total) in sums.items()}


def sums_of(group: ProcessGroup, x: Tensor) -> dict[str, float]:
    """Microseconds of a sum of hidden states over the ranks, with the residual's and the norm that
    follow: by NCCL, and in each other way that takes so many rows."""

    def then_norm(add_up: Callable[[Tensor], Tensor]) -> float:
        return repeated_us(lambda: add_rms_norm(add_up(x), x, x[0], EPS))

    found = {"NCCL": then_norm(replace(group, one_shot=None).all_reduce)}
    if group.one_shot is not None and fits_one_shot(x, group.size):
        found["in one shot"] = then_norm(group.one_shot)
    if (box := group.mailbox) is not None and box.takes(x):
        found["in one kernel"] = repeated_us(lambda: all_reduce_add_rms_norm(x, x, x[0], EPS, box))
    return found


def repeated_us(call: Callable[[], object], repeats: int = 64) -> float:
    """Of one of many calls, one after the other in a graph."""
    return 1e3 * median_ms(graph_of(lambda: [call() for _ in range(repeats)])) / repeats


def run_rank(args: argparse.Namespace) -> None:
    """Measure the points together with the other ranks; rank 0 prints the results as JSON."""
    device = torch.device("cpu") if args.smoke else torch.device("cuda", args.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = args.meeting if args.rank else socket.socket(fileno=int(args.meeting))
    group = join(args.rank, args.size, meeting, device, JOIN_SECONDS)
    vars(decode_step)["graph_of"] = lambda step: graph_of(lambda: group.broadcast(step()))
    context = 40 if args.smoke else args.context
    bench = RankBench(TINY if args.smoke else SHAPES[args.model], device.type, context, group)
    results: Results = {"steps": {}, "kernels": {}, "sums": {}, **bench.gigabytes()}
    if device.type == "cuda" and group.size > 1:
        for rows in SUM_ROWS:
            shape = rows, bench.config.hidden_size
            x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            results["sums"][rows] = sums_of(group, x)
    for point in args.points.split(","):
        step = bench.point(point)
        results["steps"][point] = median_ms(step)
        if point == args.profile and device.type == "cuda":
            results["kernels"] = kernels_of(step)
        del step
    if group.rank == 0:
        print(json.dumps(results), flush=True)
    os._exit(0)  # threads of NCCL's must not hold the process back


# --- all of them ---


def measure(size: int, arguments: list[str], env: dict[str, str]) -> Results:
    """Start `size` ranks of this script and wait for their results."""
    with listen() as listener:
        own, address = listener.fileno(), address_of(listener)  # rank 0's, and the others'
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, *arguments),
                    *(f"--rank={rank}", f"--size={size}", f"--meeting={address if rank else own}"),
                ],
                stdout=None if rank else subprocess.PIPE,
                pass_fds=[] if rank else [own],
                env=env,
                text=True,
            )
            for rank in range(size)
        ]
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                raise SystemExit(f"a rank of {size} has failed")
            time.sleep(0.1)
        if any(rank.poll() for rank in ranks):
            raise SystemExit(f"a rank of {size} has failed")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].stdout is not None
    results: Results = json.loads(ranks[0].stdout.read().splitlines()[-1])
    return results


def report(found: dict[int, Results]) -> None:
    first, *others = found
    for size, results in found.items():
        print(
            f"{size} ranks: {results['weights']:.2f} GB of weights on each,"
            f" {1e3 * results['row']:.3f} MB a rank row of an adapter"
        )
    columns = [f"{f'ms on {size}':>9}  {'LoRA ms':>7}" for size in found]
    ratios = [f"{f'{size} over {first}':>9}" for size in others]
    print("  ".join([f"{'batch:adapters':>14}", *columns, *ratios]))
    for point, base in found[first]["steps"].items():
        cells = [f"{point:>14}"]
        for results in found.values():
            steps = results["steps"]
            without = steps.get(f"{point.split(':')[0]}:0", steps[point])
            cells.append(f"{steps[point]:9.3f}  {steps[point] - without:7.3f}")
        cells += [f"{base / found[size]['steps'][point]:9.2f}" for size in others]
        print("  ".join(cells))


def report_kernels(size: int, point: str, kernels: dict[str, tuple[int, float]]) -> None:
    """The largest kernels, and all collectives (which also wait for the slowest rank)."""
    total = sum(ms for _, ms in kernels.values())
    print(f"kernels of one step at {point} on {size} ranks:")
    for name, (count, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])[:12]:
        print(f"{ms:9.3f} ms {count:5d} x {1e3 * ms / max(count, 1):7.2f} us  {name}")
    reduces = ("nccl", "all_reduce", "allreduce", "multimem", "symm")
    shared = [value for name, value in kernels.items() if any(r in name.lower() for r in reduces)]
    ms = sum(each for _, each in shared)
    count = sum(each for each, _ in shared)
    print(f"collectives: {count} a step, {ms:.3f} of {total:.3f} ms in kernels ({ms / total:.1%})")


def report_sums(size: int, sums: dict[str, dict[str, float]]) -> None:
    for rows, ways in sums.items():
        listed = ", ".join(f"{name} {us:.1f} us" for name, us in ways.items())
        print(f"sum of {rows} rows over {size} ranks, with its norm: {listed}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="settings: the model, and its size")
    parser.add_argument("--model", default=LLAMA_8B, choices=SHAPES)
    parser.add_argument("--sizes", help="numbers of GPUs; default: 1,2, or the config's")
    parser.add_argument("--points", help=f"batch:adapters; default: {POINTS}")
    parser.add_argument("--profile", default="32:8", help="the point whose kernels are listed")
    parser.add_argument("--context", type=int, default=320)
    parser.add_argument("--smoke", action="store_true")
    for name in ("--rank", "--size"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = "1,2"
    if args.config is not None:
        settings = load(args.config)
        args.model, sizes = settings.model, str(settings.tensor_parallel_size)
        if args.model not in SHAPES:
            parser.error(f"{args.model} has no shape in shapes.py")
    args.sizes = [int(size) for size in (args.sizes or sizes).split(",")]
    args.points = args.points or ("1:0,1:1" if args.smoke else POINTS)
    return args


def main() -> None:
    args = parse_args()
    if args.rank is not None:
        run_rank(args)
    num_gpus = torch.cuda.device_count()
    if not args.smoke and max(args.sizes) > num_gpus:
        raise SystemExit(f"{max(args.sizes)} ranks; this machine has {num_gpus} GPUs")
    arguments = [f"--{name}={vars(args)[name]}" for name in ("points", "profile", "context")]
    arguments += ["--smoke"] if args.smoke else [f"--model={args.model}"]
    interpret = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if args.smoke else {}
    found = {size: measure(size, arguments, {**os.environ, **interpret}) for size in args.sizes}
    print("tiny" if args.smoke else f"{args.model}, context {args.context}")
    report(found)
    for size, results in found.items():
        report_sums(size, results["sums"])
        if size > 1 and results["kernels"]:
            report_kernels(size, args.profile, results["kernels"])
    first = args.sizes[0]
    for size in args.sizes[1:]:
        steps, base = found[size]["steps"], found[first]["steps"]
        point = next(iter(steps))
        print(f"speed-up of {size} over {first} at {point}: {base[point] / steps[point]:.2f}")


if __name__ == "__main__":
    main()
