"""Thousands of adapters beside a few, through HTTP: S-LoRA's workload, Llama-3.1-8B's shape.

    python benchmarks/slora.py [--adapters 2000] [--few 5] [--rates 24,48] [--json FILE]
    python benchmarks/slora.py --smoke      (tiny, on the CPU)

Writes adapters of ranks 8, 16, 32 and 64 in turn, on q_proj and v_proj of every fourth layer (13 GB
for 2,000, in a temporary folder), and serves first the few, then all of them, with the same options
and random weights in bfloat16. Each server gets warm-up traffic, then Poisson arrivals at each of
the rates for 20 s, in rising order and without a pause; the adapter is chosen by a power law,
prompts and answers have 8 to 512 tokens. Both get the same requests but for the adapters. These lie
on disk: a request is often the first of its adapter. Throughput is what comes to the client in the
second half of a rate's time: in the first, answers begin that end later. SLO attainment is the
share of all requests whose first token came within 6 s. One H200 serves some 55 requests a second:
the rates go beyond. The last line is the throughput of many over that of few, at the highest rate
that both sustain: with 95 % of the requests within the SLO.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from server_process import served, with_client
from shapes import LLAMA_8B, TINY, write_copies, write_model

from lorakeet.server.bench.client import Record, Target, run_plan
from lorakeet.server.bench.workload import Planned, Workload

RATES = "24,48,54,64,80"
RANKS, LEAVES, EVERY = (8, 16, 32, 64), ("q_proj", "v_proj"), 4
SLO, SUSTAINED = 6.0, 0.95  # seconds to the first token; share of requests
WARM_UP = 2.0  # seconds


@dataclass(frozen=True)
class Scale:
    """What `--smoke` makes small."""

    model: dict[str, object]
    lengths: tuple[int, int]
    warm_up_lengths: tuple[int, int]
    options: tuple[str, ...]


FULL = Scale(
    LLAMA_8B, (8, 512), (8, 64),
    ("--dtype", "bfloat16", "--max-model-len", "2048"),
)  # fmt: skip
SMOKE = Scale(
    TINY, (4, 16), (4, 8),
    ("--device", "cpu", "--max-model-len", "64", "--max-loras", "8", "--max-num-seqs", "16"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of the requests sent at one rate; tokens are all that came in the second half of its time."""

    records: list[Record]
    tokens_per_second: float

    @property
    def ttft(self) -> np.ndarray:
        """Of each request; endless for one that failed."""
        return np.array([np.inf if r.error else r.ttft for r in self.records])

    @property
    def attainment(self) -> float:
        return float(np.mean(self.ttft <= SLO))

    @property
    def failed(self) -> int:
        return sum(record.error is not None for record in self.records)


def tokens_between(records: list[Record], start: float, end: float) -> float:
    """Output tokens that came to the client; a chunk is its share of its answer."""
    tokens = 0.0
    for record in records:
        if record.error is None:
            times = record.sent + record.ttft + np.cumsum([0.0, *record.gaps])
            share = np.mean((start <= times) & (times < end))
            tokens += record.output_tokens * float(share)
    return tokens


def plan(
    names: list[str],
    rate: float,
    duration: float,
    vocab_size: int,
    lengths: tuple[int, int],
    seed: int,
    start: float = 0.0,
) -> list[Planned]:
    workload = Workload(
        adapters=tuple(names),
        rate=rate,
        cv=1.0,
        alpha=1.0,
        input_len=lengths,
        output_len=lengths,
        duration=duration,
        seed=seed,
        vocab_size=vocab_size,
    )
    return [replace(planned, at=planned.at + start) for planned in workload.plan()]


def measure(
    url: str, names: list[str], rates: list[float], duration: float, scale: Scale
) -> dict[float, Outcome]:
    """An outcome for each rate, one after the other without a pause."""
    vocab_size = int(str(scale.model["vocab_size"]))
    warm_up = plan(names, max(rates), WARM_UP, vocab_size, scale.warm_up_lengths, seed=0)
    plans = [
        plan(names, rate, duration, vocab_size, scale.lengths, 1 + i, start=i * duration)
        for i, rate in enumerate(rates)
    ]

    async def work(target: Target) -> list[Record]:
        await run_plan(target, warm_up, lambda record: None)
        return await run_plan(target, [one for each in plans for one in each], lambda record: None)

    records = with_client(url, work)
    ends = np.cumsum([len(each) for each in plans])
    return {
        rate: Outcome(
            records[end - len(plans[i]) : end],
            tokens_between(records, (i + 0.5) * duration, (i + 1) * duration) / (duration / 2),
        )
        for i, (rate, end) in enumerate(zip(rates, ends.tolist(), strict=True))
    }


def row(adapters: int, rate: float, outcome: Outcome) -> dict[str, float]:
    """What is printed, saved and drawn of one rate."""
    p50, p99 = np.percentile(outcome.ttft, (50, 99), method="lower") * 1e3
    return {
        "adapters": adapters,
        "rate": rate,
        "requests": len(outcome.records),
        "failed": outcome.failed,
        "tokens_per_second": outcome.tokens_per_second,
        "ttft_p50_ms": float(p50),
        "ttft_p99_ms": float(p99),
        "within_slo": outcome.attainment,
    }


def print_outcome(values: dict[str, float], outcome: Outcome) -> None:
    print(
        "{adapters:8d}  {rate:6g}  {requests:8d}  {failed:6d}  {tokens_per_second:8.0f}  "
        "{ttft_p50_ms:9.0f}  {ttft_p99_ms:9.0f}  {within_slo:10.3f}".format(**values)
    )
    for error in sorted({record.error for record in outcome.records if record.error})[:3]:
        print(f"    {error}")


def write(folder: Path, count: int, scale: Scale) -> None:
    ranks = [RANKS[number % len(RANKS)] for number in range(count)]
    started = time.perf_counter()
    size = write_copies(folder, scale.model, ranks, LEAVES, EVERY)
    seconds = time.perf_counter() - started
    print(f"{count} adapters: {size / 1e9:.2f} GB, written in {seconds:.1f} s", flush=True)


def compare(few: dict[float, Outcome], many: dict[float, Outcome], counts: tuple[int, int]) -> None:
    """The last line."""
    sustained = [
        rate
        for rate, outcome in many.items()
        if min(outcome.attainment, few[rate].attainment) >= SUSTAINED
    ]
    rate = max(sustained, default=min(many))
    what = "the highest that both sustain" if sustained else "which not both sustain"
    ratio = many[rate].tokens_per_second / few[rate].tokens_per_second
    print(f"{counts[1]} adapters over {counts[0]} at {rate:g} a second, {what}: {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--adapters", type=int, help="default: 2000")
    parser.add_argument("--few", type=int, default=5)
    parser.add_argument("--rates", help="requests a second, a comma list (24,48,54,64,80)")
    parser.add_argument("--duration", type=float, help="seconds of arrivals at each rate (20)")
    parser.add_argument("--folder", type=Path, help="where to put the adapters")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--port", type=int, default=8713)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    scale = SMOKE if args.smoke else FULL
    many = args.adapters or (40 if args.smoke else 2000)
    rates = sorted(map(float, (args.rates or ("4,8" if args.smoke else RATES)).split(",")))
    duration = args.duration or (3.0 if args.smoke else 20.0)
    outcomes = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_model(folder / "model", scale.model)
        write(folder / "few", args.few, scale)
        with ThreadPoolExecutor(1) as writer:
            writing = writer.submit(write, folder / "many", many, scale)
            for root, count in (("few", args.few), ("many", many)):
                options = [*scale.options, "--max-lora-rank", str(max(RANKS))]
                options += ["--adapter-dir", str(folder / root)]
                with served(folder / "model", options, folder / "server.log", args.port) as url:
                    writing.result()  # it went on while the first server started
                    names = [f"a{number}" for number in range(count)]
                    outcomes.append(measure(url, names, rates, duration, scale))
    print("adapters    rate  requests  failed  tokens/s  TTFT p50   p99, ms  within SLO")
    rows = []
    for count, by_rate in zip((args.few, many), outcomes, strict=True):
        for rate, outcome in by_rate.items():
            rows.append(row(count, rate, outcome))
            print_outcome(rows[-1], outcome)
    if args.json:
        args.json.write_text(json.dumps({"outcomes": rows}, indent=1))
    compare(*outcomes, (args.few, many))


if __name__ == "__main__":
    main()
