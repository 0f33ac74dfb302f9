"""Attention beside its alternatives: Llama-3.1-8B's shape in bf16, time over the floor.

    python benchmarks/attention.py [--only decode] [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/attention.py --smoke      (tiny, on the CPU)

"decode 64 x 320" is one query of each of 64 sequences whose contexts have 256 to 384 tokens,
"prefill 8 x 256" are 8 whole prompts. Ours reads blocks of 16 tokens, and is launched for contexts
of up to 8,192, as in a captured graph. Beside it whatever is installed of: torch's
scaled_dot_product_attention on dense keys and values, padded; its variable-length attention, paged
where this torch can (2.12 and later), else on dense copies without padding; FlashInfer;
FlashAttention-3, also as vLLM builds it; FlashAttention-2. The dense copies are made beforehand and
cost nothing. FlashAttention-2, and with it torch's, reads blocks of 256, since it takes no smaller
ones; the others read blocks of 16 too.

Each result is compared with ours, then as many layers are timed as do not fit the GPU's cache,
captured in a CUDA graph where that works (median of its replays). The floor is the larger of bytes
(each read or written once) over the read bandwidth and operations over the bf16 rate, both of the
same run. The last line: the best alternative's time over ours, geometric mean of the cases that
one of them ran in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from statistics import geometric_mean

import torch
from attention_alternatives import ALTERNATIVES, Problem, Run
from common import (
    BLOCK_SIZE,
    Ceilings,
    case_parser,
    graph_of,
    measure_ceilings,
    median_ms,
    write_cases,
)
from shapes import LLAMA_8B, TINY
from torch import Tensor

from lorakeet.kernels.paged_attention import paged_attention
from lorakeet.models.config import parse_config

MAX_ERROR = 0.02  # of our result: both round to bf16
CASES = (
    *(f"decode {size} x 320" for size in (1, 2, 4, 8, 32, 64, 128, 256)),
    *(f"decode {size} x {context}" for context in (2000, 8000) for size in (1, 4, 16, 64)),
    "prefill 8 x 256", "prefill 1 x 2048", "prefill 1 x 8192",
)  # fmt: skip
SMOKE_CASES = ("decode 3 x 40", "prefill 2 x 50")


def ours(problem: Problem) -> Run:
    caches, tables = problem.paged(BLOCK_SIZE)
    num_decodes = problem.size if problem.is_decode else 0
    longest = problem.config.max_position_embeddings

    def run(i: int) -> Tensor:
        return paged_attention(
            problem.q[i], *caches[i], problem.query_starts, problem.contexts, tables,
            num_decodes, longest, problem.scale,
        )  # fmt: skip

    return run


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
        """The best alternative's time over ours; NaN if none has run."""
        return min(self.others_us.values(), default=math.nan) / self.us


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
        f"{result.others_us[name]:13.1f}" if name in result.others_us else f"{'-':>13}"
        for name in names
    ]
    print(
        f"{result.case:<17}  {result.floor_us:8.1f}  {result.us:8.1f}  "
        f"{result.us / result.floor_us:8.2f}  {'  '.join(others)}  {result.gain:9.2f}",
        flush=True,
    )


def main() -> None:
    parser = case_parser(__doc__ or "")
    args = parser.parse_args()
    cases = [case for case in (SMOKE_CASES if args.smoke else CASES) if args.only in case]
    if not cases:
        parser.error(f"no case's name holds {args.only!r}")
    device = "cpu" if args.smoke else "cuda"
    config = parse_config(dict(TINY if args.smoke else LLAMA_8B))
    ceilings = measure_ceilings(device)
    print(ceilings)
    others = installed(["SDPA"] if args.smoke else list(ALTERNATIVES))
    columns = "  ".join(f"{name:>13}" for name in others)
    print(f"{'attention, us':<17}     floor      ours  us/floor  {columns}  best/ours")
    results = []
    for case in cases:
        results.append(measure(Problem(case, config, device), case, ceilings, others))
        print_result(results[-1], list(others))
    if args.json:
        write_cases(args.json, ceilings, results)
    gains = [result.gain for result in results if result.others_us]
    mean = f"{geometric_mean(gains):.2f}" if gains else "none has run"
    print(f"best alternative / ours, geometric mean: {mean}")


if __name__ == "__main__":
    main()
