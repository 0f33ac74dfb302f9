"""What it costs when an adapter is in host memory only: Llama-3.1-8B's shape, through HTTP.

    python benchmarks/cold.py [--adapters 32] [--seconds 10] [--rate 8]
    python benchmarks/cold.py --smoke      (tiny, on the CPU)

Serves random weights in bfloat16 with adapters of rank 16 on all seven projections (84 MB each), a
pool for half of them and room for all in host memory, where each is read to first.

One request at a time, beside 16 streams that decode on a quarter of the adapters: first requests to
adapters that are resident in the pool, so nothing is loaded; then two to each of the others in
turn, of which the first finds its adapter in host memory only, the second in the pool. The penalty
is the difference of the two times to the first token. (Beside them are those of pairs in which both
are resident: a request may come early or late in a step, so two alike differ as well.)

Then Poisson arrivals at a rate, each adapter as likely: of a working set that fits the pool, then
of one of twice its size.

The last line: the penalty's p50 and p99, the streams' inter-token p99 with loads over that without,
and the TTFT p50 of the larger working set over that of the smaller.
"""

import argparse
import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from server_process import served, with_client
from shapes import LLAMA_8B, TINY, projections, write_copies, write_model

from lorakeet.lora.pool import bytes_per_row
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import parse_config
from lorakeet.server.bench.client import Record, Target, run_plan
from lorakeet.server.bench.workload import Planned, Workload

RANK, STREAMS = 16, 16
PROBE_TOKENS = 2  # of a single request's answer


@dataclass(frozen=True)
class Scale:
    """What `--smoke` makes small."""

    model: dict[str, object]
    options: tuple[str, ...]
    stream_tokens: int  # of an answer, after which a stream asks again
    prompt: int  # tokens of streams and single requests
    lengths: tuple[int, int]  # prompts and answers of the working sets


FULL = Scale(LLAMA_8B, ("--dtype", "bfloat16", "--max-model-len", "4096"), 300, 64, (8, 128))
SMOKE = Scale(TINY, ("--device", "cpu", "--max-model-len", "128"), 60, 8, (4, 16))


@dataclass
class Beside:
    """Milliseconds: of single requests, and between the tokens of the streams beside them."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)  # to the same adapter
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    resident: Beside
    loading: Beside
    fits: list[Record]
    larger: list[Record]


class Prober:
    """Asks the server; prompts are never the same twice, so that none is in the prefix cache."""

    def __init__(self, target: Target, scale: Scale) -> None:
        self.target, self.scale = target, scale
        self.random = np.random.default_rng(0)

    async def ask(self, adapter: str, tokens: int) -> Record:
        vocab_size = int(str(self.scale.model["vocab_size"]))
        prompt = self.random.integers(3, vocab_size, self.scale.prompt).tolist()
        record = await self.target.ask(Planned(0.0, adapter, prompt, tokens), start=0.0)
        assert record.error is None, record.error
        return record

    async def ttft_ms(self, adapter: str) -> float:
        return (await self.ask(adapter, PROBE_TOKENS)).ttft * 1e3

    async def stream(self, adapter: str, until: asyncio.Event) -> list[Record]:
        """One answer after the other."""
        records = []
        while not until.is_set():
            records.append(await self.ask(adapter, self.scale.stream_tokens))
        return records

    async def beside(self, streams: list[str], probes: Iterator[str], seconds: float) -> Beside:
        """Two requests to each adapter of `probes`, which are one after the other."""
        until, found = asyncio.Event(), Beside()
        running = [
            asyncio.create_task(self.stream(streams[i % len(streams)], until))
            for i in range(STREAMS)
        ]
        await asyncio.sleep(seconds / 10)  # all have begun
        start = time.perf_counter()
        while time.perf_counter() < start + seconds:
            adapter = next(probes)
            found.first.append(await self.ttft_ms(adapter))
            found.second.append(await self.ttft_ms(adapter))
        end = time.perf_counter()
        until.set()
        for records in await asyncio.gather(*running):
            for record in records:
                times = record.sent + record.ttft + np.cumsum(record.gaps)
                gaps = np.array(record.gaps)[(start <= times) & (times <= end)]
                found.gaps += (gaps * 1e3).tolist()
        return found


def split(names: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Those of the streams; as many again, which fit the pool beside them; all but the first, in
    an order in which each has been displaced from the pool before its turn comes."""
    quarter = len(names) // 4
    streams, fitting, others = names[:quarter], names[quarter : 2 * quarter], names[2 * quarter :]
    return streams, fitting, [*others, *fitting]


async def ask_working_set(
    prober: Prober, names: list[str], rate: float, seconds: float
) -> list[Record]:
    for name in names:
        await prober.ttft_ms(name)
    workload = Workload(
        adapters=tuple(names),
        rate=rate,
        cv=1.0,
        alpha=0.0,
        input_len=prober.scale.lengths,
        output_len=prober.scale.lengths,
        duration=seconds,
        seed=1,
        vocab_size=int(str(prober.scale.model["vocab_size"])),
    )
    records = await run_plan(prober.target, workload.plan(), lambda record: None)
    assert all(record.error is None for record in records)
    return records


async def measure(
    target: Target, url: str, names: list[str], scale: Scale, seconds: float, rate: float
) -> Found:
    prober = Prober(target, scale)
    streams, fitting, others = split(names)
    for name in [*names, *streams, *fitting]:  # all to host memory, then some to the pool
        await prober.ttft_ms(name)
    await prober.beside(streams, cycle(fitting), seconds / 10)  # warm-up
    print(f"where the adapters are: {await asyncio.to_thread(tiers, url)}")
    return Found(
        await prober.beside(streams, cycle(fitting), seconds),
        await prober.beside(streams, cycle(others), seconds),
        await ask_working_set(prober, names[: len(names) // 2], rate, seconds),
        await ask_working_set(prober, names, rate, seconds),
    )


def tiers(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/adapters") as answer:
        found = [entry["tier"] for entry in json.load(answer)["data"]]
    return ", ".join(f"{found.count(tier)} {tier}" for tier in ("gpu", "host", "disk"))


def pool_bytes(scale: Scale, adapters: int) -> int:
    dtype = torch.bfloat16 if scale is FULL else torch.float32
    return adapters * RANK * bytes_per_row(group_specs(parse_config(dict(scale.model))), dtype)


def percentiles(milliseconds: Sequence[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(milliseconds, (50, 99))
    return float(p50), float(p99)


def report(found: Found) -> None:
    """The table, and the last line."""
    resident, loading = found.resident, found.loading
    pairs = {
        name: [a - b for a, b in zip(of.first, of.second, strict=True)]
        for name, of in (("host memory", loading), ("the pool too", resident))
    }
    fits, larger = ([record.ttft * 1e3 for record in r] for r in (found.fits, found.larger))
    rows = {
        "TTFT, resident, no loads": [*resident.first, *resident.second],
        "TTFT, resident, beside loads": loading.second,
        "TTFT, in host memory only": loading.first,
        **{f"first - second, first in {name}": values for name, values in pairs.items()},
        "between tokens, no loads": resident.gaps,
        "between tokens, with loads": loading.gaps,
        "TTFT, working set that fits": fits,
        "TTFT, working set twice the pool": larger,
    }
    print(f"{'ms':<34}   number       p50       p99")
    for name, values in rows.items():
        p50, p99 = percentiles(values)
        print(f"{name:<34}  {len(values):7d}  {p50:8.2f}  {p99:8.2f}")
    penalty = " / ".join(f"{value:.1f}" for value in percentiles(pairs["host memory"]))
    gap_ratio = percentiles(loading.gaps)[1] / percentiles(resident.gaps)[1]
    ttft_ratio = percentiles(larger)[0] / percentiles(fits)[0]
    print(
        f"penalty p50 / p99 {penalty} ms; with loads over without, between tokens "
        f"p99 {gap_ratio:.2f}; twice the pool over what fits, TTFT p50 {ttft_ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--seconds", type=float, help="of each of the four parts (default: 10)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--folder", type=Path, help="where to put the adapters")
    parser.add_argument("--port", type=int, default=8714)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    scale = SMOKE if args.smoke else FULL
    seconds = args.seconds or (1.0 if args.smoke else 10.0)
    fitting = args.adapters // 2
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_model(folder / "model", scale.model)
        leaves = list(projections(scale.model))
        write_copies(folder / "adapters", scale.model, [RANK] * args.adapters, leaves)
        options = [*scale.options, "--max-loras", str(fitting), "--max-lora-rank", str(RANK)]
        options += ["--lora-memory", str(pool_bytes(scale, fitting))]
        options += ["--adapter-dir", str(folder / "adapters")]
        names = [f"a{number}" for number in range(args.adapters)]
        with served(folder / "model", options, folder / "server.log", args.port) as url:
            found = with_client(
                url, lambda target: measure(target, url, names, scale, seconds, args.rate)
            )
    report(found)


if __name__ == "__main__":
    main()
