"""Kernel by kernel: time over its own floor, and beside a plain torch loop over the adapters.

    python benchmarks/kernels.py [--only lora_linear] [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/kernels.py --smoke      (tiny, on the CPU)

Shapes of Llama-3.1-8B in bf16, adapters of rank 16; "64x8" is 64 tokens of 8 adapters. A kernel
runs once in each of eight layers, so that no weights are in a cache; all are captured in a CUDA
graph, whose replays are timed by events (median). The floor is the larger of bytes (each read or
written once) over the read bandwidth and operations over the bf16 rate, both of the same run. The
loop, captured and timed in the same way, goes through the adapters: it selects their tokens, and
multiplies by A and by B (a product for each slice), adds to y. `lora_linear` and its loop include
the base layer's product; as in a pass, it may leave y in parts to whoever reads it next. Before it
is timed, each result is compared with the loop's. The last line is the geometric mean of the
speed-ups.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np
import torch
from common import (
    NUM_COUNTERS,
    Ceilings,
    ModelBench,
    case_parser,
    graph_of,
    measure_ceilings,
    median_ms,
    write_cases,
)
from shapes import LLAMA_8B, TINY
from torch import Tensor
from torch.nn.functional import linear, silu
from torch_loop import RANK, Loop, Mix

from lorakeet.kernels.activation import silu_mul
from lorakeet.kernels.delta import Delta
from lorakeet.kernels.lora_embedding import embedding_lora
from lorakeet.kernels.lora_expand import sgemm_lora_b
from lorakeet.kernels.lora_linear import lora_linear
from lorakeet.kernels.lora_shrink import sgemm_lora_a
from lorakeet.lora.adapter import GroupSpec
from lorakeet.lora.pool import LayerWeights

MAX_ERROR = 0.02  # of the loop's result: both round to bf16 in between
BLOCKS = {"qkv_proj": "self_attn", "o_proj": "self_attn", "gate_up_proj": "mlp", "down_proj": "mlp"}


@dataclass(frozen=True)
class Case:
    """A kernel's run in one layer, and the loop's; both return what is compared, if anything."""

    name: str
    ours: Callable[[int], Tensor | None]
    loop: Callable[[int], Tensor | None]
    num_bytes: float
    flops: float


@dataclass(frozen=True)
class Result:
    name: str
    us: float
    floor_us: float
    loop_us: float


class Kernels:
    def __init__(self, bench: ModelBench, few: int, many: int) -> None:
        """`few`: tokens of a decode; `many`: of a prefill."""
        self.bench, self.few, self.many = bench, few, many
        self.num_layers = bench.config.num_hidden_layers
        self.dtype, self.width = bench.model.dtype, bench.model.dtype.itemsize
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=bench.device)

    def mix(self, size: int, count: int) -> Mix:
        self.bench.set_ranks([RANK] * count)
        slots = np.random.default_rng(2).permutation(size) % count + 1
        rows = np.concatenate([self.bench.listed[slot].rows for slot in range(1, count + 1)])
        return Mix(
            size,
            count,
            self.bench.rank_rows(slots.astype(np.int32)),
            [self.bench.put(np.flatnonzero(slots == s), torch.int64) for s in range(1, count + 1)],
            self.bench.put(rows, torch.int64),
        )

    def random(self, *shape: int) -> list[Tensor]:
        """A tensor for each layer."""
        device = self.bench.device
        return [torch.randn(shape, dtype=self.dtype, device=device) for _ in range(self.num_layers)]

    def weights(self, spec: GroupSpec) -> list[LayerWeights]:
        return [self.bench.pool.layer(spec.name, i) for i in range(self.num_layers)]

    def base_weights(self, spec: GroupSpec) -> list[Tensor]:
        layers = self.bench.model.model.layers
        return [layer.get_submodule(f"{BLOCKS[spec.name]}.{spec.name}").weight for layer in layers]

    # --- the cases ---

    def cases(self) -> Iterator[Case]:
        """One after the other, so that only one's tensors are held."""
        for spec in self.bench.specs:
            for count in sorted({1, min(8, self.few), self.few}):
                yield self.linear(spec, self.mix(self.few, count))
        prefill = self.mix(self.many, 8)
        for spec in self.bench.specs:
            yield self.shrink(spec, prefill)
        for spec in self.bench.specs:
            is_gated = spec.name == "gate_up_proj"
            yield self.silu_mul(spec, prefill) if is_gated else self.expand(spec, prefill)
        yield self.embedding(self.mix(self.few, self.few))

    def linear(self, spec: GroupSpec, mix: Mix) -> Case:
        base, weights = self.base_weights(spec), self.weights(spec)
        x, loop = self.random(mix.size, spec.input_size), Loop(mix, weights)
        arrivals = torch.zeros(self.num_layers, dtype=torch.int32, device=self.bench.device)

        def ours(i: int) -> Tensor:
            if i == 0:
                arrivals.zero_()
            pool = weights[i]
            return lora_linear(
                x[i], base[i], None, pool.a, pool.b, mix.rank_rows, spec.slice_sizes,
                arrivals[i:], self.counters,
            )  # fmt: skip

        outer, inner = spec.input_size + spec.output_size, spec.input_size * spec.output_size
        values = inner + mix.size * outer + mix.count * RANK * row_values(spec)
        flops = 2 * mix.size * (inner + RANK * row_values(spec))
        return Case(
            f"lora_linear {spec.name} {mix}",
            ours,
            lambda i: loop.add(linear(x[i], base[i]), x[i], i),
            values * self.width,
            flops,
        )

    def shrink(self, spec: GroupSpec, mix: Mix) -> Case:
        """Its result lies in tiles: `expand` compares it."""
        weights, slices = self.weights(spec), len(spec.slice_sizes)
        x, loop = self.random(mix.size, spec.input_size), Loop(mix, weights)

        def ours(i: int) -> None:
            sgemm_lora_a(x[i], weights[i].a, mix.rank_rows, self.counters)

        def in_torch(i: int) -> None:
            loop.shrink(x[i], i)

        values = (mix.size + mix.count * RANK * slices) * spec.input_size + mix.size * RANK * slices
        flops = 2 * mix.size * RANK * slices * spec.input_size
        return Case(f"sgemm_lora_a {spec.name} {mix}", ours, in_torch, values * self.width, flops)

    def deltas(self, spec: GroupSpec, mix: Mix, x: list[Tensor]) -> list[Delta]:
        return [
            Delta(sgemm_lora_a(x[i], pool.a, mix.rank_rows, self.counters), pool.b, mix.rank_rows)
            for i, pool in enumerate(self.weights(spec))
        ]

    def expand(self, spec: GroupSpec, mix: Mix) -> Case:
        x, loop = self.random(mix.size, spec.input_size), Loop(mix, self.weights(spec))
        deltas = self.deltas(spec, mix, x)
        h = [loop.shrink(x[i], i) for i in range(self.num_layers)]
        y = self.random(mix.size, spec.output_size)
        loop_y = [each.clone() for each in y]

        def ours(i: int) -> Tensor:
            sgemm_lora_b(y[i], deltas[i], spec.slice_sizes)
            return y[i]

        values, flops = self.expand_work(spec, mix, 2 * spec.output_size)
        return Case(
            f"sgemm_lora_b {spec.name} {mix}",
            ours,
            lambda i: loop.expand(loop_y[i], h[i], i),
            values * self.width,
            flops,
        )

    def silu_mul(self, spec: GroupSpec, mix: Mix) -> Case:
        x, loop = self.random(mix.size, spec.input_size), Loop(mix, self.weights(spec))
        deltas = self.deltas(spec, mix, x)
        h = [loop.shrink(x[i], i) for i in range(self.num_layers)]
        gate_up = self.random(mix.size, spec.output_size)

        def in_torch(i: int) -> Tensor:
            gate, up = loop.expand(gate_up[i], h[i], i).chunk(2, 1)
            return silu(gate) * up

        values, flops = self.expand_work(spec, mix, spec.output_size * 3 // 2)
        return Case(
            f"silu_mul {spec.name} {mix}",
            lambda i: silu_mul(gate_up[i], deltas[i], self.dtype),
            in_torch,
            values * self.width,
            flops,
        )

    def expand_work(self, spec: GroupSpec, mix: Mix, token_values: int) -> tuple[int, int]:
        """Values, `token_values` a token beside h, and operations."""
        h = mix.size * RANK * len(spec.slice_sizes)
        values = mix.size * token_values + h + mix.count * RANK * spec.output_size
        return values, 2 * mix.size * RANK * spec.output_size

    def embedding(self, mix: Mix) -> Case:
        """Beside the base's lookup."""
        config, device = self.bench.config, self.bench.device
        hidden, rows = config.hidden_size, self.bench.pool.num_rows
        a = torch.randn((rows, config.vocab_size), dtype=self.dtype, device=device)
        b, y = self.random(rows, hidden), self.random(mix.size, hidden)
        loop_y = [each.clone() for each in y]
        ids = [torch.randint(config.vocab_size, (mix.size,), device=device) for _ in y]
        own_a, own_b = a[mix.rows].view(mix.count, RANK, -1), [each[mix.rows] for each in b]

        def ours(i: int) -> Tensor:
            embedding_lora(y[i], ids[i], a, b[i], mix.rank_rows)
            return y[i]

        def in_torch(i: int) -> Tensor:
            for number, tokens in enumerate(mix.tokens):
                h = own_a[number].index_select(1, ids[i].index_select(0, tokens)).T
                own = own_b[i][RANK * number : RANK * (number + 1)]
                loop_y[i].index_add_(0, tokens, h @ own)
            return loop_y[i]

        # y twice, a value of A for each token and rank, each adapter's B
        values = mix.size * (2 * hidden + RANK) + mix.count * RANK * hidden
        flops = 2 * mix.size * RANK * hidden
        return Case(f"embedding_lora {mix}", ours, in_torch, values * self.width, flops)

    # --- measuring ---

    def measure(self, case: Case, ceilings: Ceilings) -> Result:
        with torch.inference_mode():
            self.check(case)
            us, loop_us = self.us(case.ours), self.us(case.loop)
        return Result(case.name, us, ceilings.seconds(case.num_bytes, case.flops) * 1e6, loop_us)

    def us(self, run: Callable[[int], object]) -> float:
        """Microseconds in one layer."""

        def all_layers() -> None:
            for i in range(self.num_layers):
                run(i)

        return median_ms(graph_of(all_layers), 10) * 1e3 / self.num_layers

    def check(self, case: Case) -> None:
        ours, expected = case.ours(0), case.loop(0)
        if ours is not None and expected is not None:
            total = ours.float().sum(0) if ours.dim() == 3 else ours.float()  # it came in parts
            difference = (total - expected.float()).norm() / expected.float().norm()
            assert difference < MAX_ERROR, f"{case.name}: {difference:.4f} from the loop's result"


def row_values(spec: GroupSpec) -> int:
    """Values of one rank row in a layer."""
    return len(spec.slice_sizes) * spec.input_size + spec.output_size


def print_result(result: Result) -> None:
    print(
        f"{result.name:<34}  {result.us:8.1f}  {result.floor_us:8.1f}  "
        f"{result.us / result.floor_us:8.2f}  {result.loop_us:10.1f}  "
        f"{result.loop_us / result.us:8.2f}",
        flush=True,
    )


def main() -> None:
    parser = case_parser(__doc__ or "")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    values = TINY if args.smoke else LLAMA_8B | {"num_hidden_layers": 8}
    bench = ModelBench(values, device, 40 if args.smoke else 320)
    ceilings = measure_ceilings(device)
    print(ceilings)
    print(f"{'kernel':<34}        us  floor us  us/floor     loop us  loop/us")
    kernels = Kernels(bench, *((2, 20) if args.smoke else (64, 2048)))
    results = []
    for case in kernels.cases():
        if args.only in case.name:
            results.append(kernels.measure(case, ceilings))
            print_result(results[-1])
    if not results:
        parser.error(f"no case's name holds {args.only!r}")
    if args.json:
        write_cases(args.json, ceilings, results)
    mean = geometric_mean(result.loop_us / result.us for result in results)
    print(f"faster than the loop, geometric mean: {mean:.2f}")


if __name__ == "__main__":
    main()
