"""A decode step of the whole engine, over its floor and beside the best peer's.

    python benchmarks/engine_step.py [--points 64:0,64:8] [--modes 1,eager]
                                     [--sampling top_p,penalties] [--json FILE]
    python benchmarks/engine_step.py --smoke        (tiny, on the CPU)

Scheduling, inputs, the model's pass, sampling and results: all but HTTP and text. Llama-3.1-8B's
shape in bfloat16; points, floor and peers are those of decode_step.py. A step is measured as the
peers' is: the time of a batch of prompts of 128 tokens that get 320 tokens each, without the time
for 64 tokens, over 256 (medians). "host waits" is the part of it in which the host waited for the
device; near zero, the device is the one that waits.

Each point is measured as it is served: two steps in flight, greedy. `--modes` and `--sampling` name
what else is measured beside it, one change at a time: one step in flight, or no CUDA graphs; a
draw from the top 0.95, or all three penalties.

Then prompts of some lengths, one alone in the engine, until their first token; "eager" is without
CUDA graphs. "base only" is a batch without adapters in an engine whose model is not wrapped for
LoRA, over the same with adapters loaded but not used. The last line is the worst peer/step of what
is served, or "base only" where no point has a peer.
"""

import argparse
import gc
import json
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from unittest.mock import patch

import numpy as np
from common import MAX_LORAS, Ceilings, Floor, layer_specs, measure_ceilings
from decode_step import MIXES, PEERS, POINTS, Point
from msgspec.structs import replace
from shapes import LLAMA_8B, TINY, write_adapter, write_model

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterId
from lorakeet.server.engine.messages import AddRequest, SamplingParams
from lorakeet.server.engine.process import set_up_threads
from lorakeet.server.engine.run import make_scheduler
from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.step import Step, StepResult

MAX_RANK = 64
WARM_UPS = 3  # prompts of a length before those that count
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Way:
    """How steps are made; by default as they are served."""

    depth: int = 2  # steps in flight
    has_graphs: bool = True
    sampling: SamplingParams = GREEDY


SERVED = Way()
MODES = {"1": Way(depth=1), "eager": Way(has_graphs=False)}
SAMPLING = {
    "top_p": Way(sampling=SamplingParams(top_p=0.95)),
    "penalties": Way(
        sampling=replace(
            GREEDY, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1
        )
    ),
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What `--smoke` makes small."""

    model: dict[str, object]
    points: str
    base_only: int  # the batch that is compared
    prompt: int
    prompts: tuple[int, ...]  # lengths of those whose first tokens are timed
    short: int  # tokens of an answer
    long: int
    repeats: int
    max_model_len: int
    device: str

    @property
    def context(self) -> int:
        """Tokens of a sequence, the mean over the steps that count."""
        return self.prompt + (self.short + self.long) // 2


FULL = Scale(
    model=LLAMA_8B,
    points=",".join(point for point in POINTS.split(",") if point.split(":")[1] not in MIXES),
    base_only=64,
    prompt=128,
    prompts=(32, 128, 256, 512, 768, 1024, 2048),
    short=64,
    long=320,
    repeats=2,
    max_model_len=4096,
    device="cuda",
)
SMOKE = Scale(
    model=TINY,
    points="1:0,3:2,2:mixed",
    base_only=2,
    prompt=8,
    prompts=(5, 40),
    short=4,
    long=20,
    repeats=1,
    max_model_len=64,
    device="cpu",
)


@dataclass(frozen=True)
class Result:
    point: str
    way: str
    step_ms: float
    waits_ms: float  # of it, for the device
    floor_ms: float
    peer_ms: float | None  # of a step as it is served
    served_ms: float

    @property
    def peer_ratio(self) -> float:
        """NaN without a peer."""
        return (self.peer_ms or math.nan) / self.step_ms


@dataclass(frozen=True)
class Prompt:
    """Until the first token of a prompt, alone in the engine."""

    length: int
    has_adapter: bool
    served_ms: float
    eager_ms: float


class Engine:
    """The loop of `EngineLoop`, with a clock on what it waits for."""

    def __init__(self, settings: Settings, scale: Scale) -> None:
        set_up_threads(settings)
        self.runner = Runner(settings, Path(str(settings.model)))
        self.scheduler = make_scheduler(settings, self.runner)
        self.scale, self.graphs = scale, self.runner.graphs
        self.waited = 0.0
        self._depth = SERVED.depth
        self._in_flight: deque[tuple[Step, Callable[[], StepResult]]] = deque()
        self._names, self._random = count(), np.random.default_rng(0)

    def add_adapters(self, ranks: Sequence[int], folder: Path) -> None:
        """Those of a rank have one content, but each has a slot of its own."""
        for number, rank in enumerate(ranks):
            adapter_id = adapter_id_of(number, rank)
            if not self.scheduler.adapters.knows(adapter_id):
                path = folder / f"rank-{rank}"
                if not path.exists():
                    write_adapter(path, self.scale.model, rank, seed=rank)
                loaded = self.runner.host_store.load(adapter_id, path).result()
                self.scheduler.add_adapter(adapter_id, loaded.digest, loaded.rank)

    def step_ms(self, point: Point, way: Way, repeats: int) -> tuple[float, float]:
        """Milliseconds of a step, and of these the host's wait."""
        lengths = short, long = self.scale.short, self.scale.long
        self.generate(point, way, short)  # loads adapters, compiles kernels
        times = [[self.generate(point, way, n) for n in lengths] for _ in range(repeats)]
        of_short, of_long = np.median(times, axis=0)
        step, waits = 1e3 * (of_long - of_short) / (long - short)
        return float(step), float(waits)

    def first_token_ms(self, length: int, point: Point, way: Way) -> float:
        """Milliseconds until prompts of this length have their first tokens."""
        repeats = WARM_UPS + self.scale.repeats
        times = [self.generate(point, way, 1, length)[0] for _ in range(repeats)]
        return float(1e3 * np.median(times[WARM_UPS:]))

    def generate(
        self, point: Point, way: Way, num_tokens: int, prompt: int | None = None
    ) -> tuple[float, float]:
        """Seconds until all rows have so many tokens, and of these the host's wait. Prompts, of
        `prompt` tokens or the scale's, are never the same twice, so that none is in the prefix
        cache."""
        self._depth, self.runner.graphs = way.depth, self.graphs if way.has_graphs else None
        params = replace(way.sampling, max_tokens=num_tokens, ignore_eos=True)
        vocab_size = self.runner.config.vocab_size
        prompts = self._random.integers(3, vocab_size, (point.size, prompt or self.scale.prompt))
        self.waited, start = 0.0, time.perf_counter()
        for tokens, number in zip(prompts.tolist(), point.adapters, strict=True):
            adapter_id = 0 if number < 0 else adapter_id_of(number, point.ranks[number])
            self.scheduler.add(AddRequest(str(next(self._names)), tokens, params, adapter_id))
        while self.scheduler.has_work or self._in_flight:
            self._step()
        return time.perf_counter() - start, self.waited

    def _step(self) -> None:
        has_launched = False
        if self.scheduler.has_work:
            step = self.scheduler.schedule()
            self._in_flight.append((step, self.runner.launch(step)))
            has_launched = bool(step.sequences)
        if self._in_flight and not (has_launched and len(self._in_flight) < self._depth):
            step, wait = self._in_flight.popleft()
            start = time.perf_counter()
            result = wait()
            self.waited += time.perf_counter() - start
            self.scheduler.apply(step, result)


def adapter_id_of(number: int, rank: int) -> AdapterId:
    return AdapterId(rank * MAX_LORAS + number)


def make_settings(model: Path, scale: Scale, max_num_seqs: int, gpu_share: float) -> Settings:
    return Settings(
        model=str(model),
        load_format="dummy",
        device=scale.device,
        max_model_len=scale.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_loras=MAX_LORAS,
        max_lora_rank=MAX_RANK,
        gpu_memory_utilization=gpu_share,
    )


def measure_point(
    engine: Engine, name: str, ways: dict[str, Way], ceilings: Ceilings
) -> list[Result]:
    """As it is served, then in the other ways; prints a line for each."""
    point, config = Point.parse(name), engine.runner.config
    floor = Floor(config, layer_specs(config), engine.runner.dtype.itemsize, ceilings)
    floor_ms = floor.decode_ms(point.size, engine.scale.context, point.ranks)
    results: list[Result] = []
    for way_name, way in ({"served": SERVED} | ways).items():
        step, waits = engine.step_ms(point, way, engine.scale.repeats)
        peer = PEERS.get(name) if way is SERVED else None
        served = results[0].step_ms if results else step
        results.append(Result(name, way_name, step, waits, floor_ms, peer, served))
        print_result(results[-1])
    return results


def print_result(result: Result) -> None:
    peer = f"{result.peer_ms:9.2f}  {result.peer_ratio:9.2f}" if result.peer_ms else " " * 20
    print(
        f"{result.point:>14}  {result.way:>9}  {result.step_ms:7.3f}  {result.waits_ms:10.3f}  "
        f"{result.floor_ms:8.2f}  {result.step_ms / result.floor_ms:10.2f}  {peer}  "
        f"{result.step_ms / result.served_ms:11.3f}",
        flush=True,
    )


def measure_prompts(engine: Engine) -> list[Prompt]:
    """One prompt at a time; prints a line for each length."""
    print("prompt  adapter  served ms  eager ms  eager/served")
    found = []
    for length in engine.scale.prompts:
        for has_adapter in (False, True):
            point = Point.parse(f"1:{int(has_adapter)}")
            served, eager = (
                engine.first_token_ms(length, point, way) for way in (SERVED, MODES["eager"])
            )
            found.append(Prompt(length, has_adapter, served, eager))
            print(
                f"{length:6d}  {has_adapter!s:>7}  {served:9.2f}  {eager:8.2f}  "
                f"{eager / served:12.2f}",
                flush=True,
            )
    return found


def base_only(engine: Engine, model: Path, folder: Path) -> float:
    """A step without adapters in an engine without LoRA, over that of `engine`, taking turns."""
    scale = engine.scale
    others = Point.parse(f"{scale.base_only}:{scale.base_only}")
    engine.add_adapters(others.ranks, folder)
    engine.generate(others, SERVED, 1)  # their adapters are in the pool now
    with patch("lorakeet.server.engine.runner.wrap_model"):  # the model stays as it is
        plain = Engine(make_settings(model, scale, scale.base_only, 0.9), scale)
    point = Point.parse(f"{scale.base_only}:0")
    pairs = [
        [each.step_ms(point, SERVED, 1)[0] for each in (plain, engine)]
        for _ in range(scale.repeats)
    ]
    plain.runner.shutdown()
    plain_ms, loaded_ms = np.median(pairs, axis=0)
    print(
        f"base only, batch {point.size}: {plain_ms:.3f} ms without LoRA, {loaded_ms:.3f} ms with "
        f"adapters loaded, ratio {plain_ms / loaded_ms:.3f}"
    )
    return float(plain_ms / loaded_ms)


def choice_of(known: dict[str, Way]) -> Callable[[str], dict[str, Way]]:
    """Reads a comma list of some of `known`."""

    def parse(text: str) -> dict[str, Way]:
        names = [name for name in text.split(",") if name]
        if unknown := set(names) - set(known):
            message = f"{', '.join(sorted(unknown))}: there are {', '.join(known)}"
            raise argparse.ArgumentTypeError(message)
        return {name: known[name] for name in names}

    return parse


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", default="", help="as in decode_step.py")
    parser.add_argument("--modes", type=choice_of(MODES), default={}, help="beside it: 1, eager")
    parser.add_argument(
        "--sampling", type=choice_of(SAMPLING), default={}, help="beside it: top_p, penalties"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    scale = SMOKE if args.smoke else FULL
    points = (args.points or scale.points).split(",")
    sizes = [Point.parse(name).size for name in points]
    gc.freeze()  # as the engine's process does
    ceilings = measure_ceilings(scale.device)
    print(ceilings)
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", scale.model)
        # the GPU's other part is for the server without LoRA
        engine = Engine(make_settings(model, scale, max(*sizes, scale.base_only), 0.6), scale)
        for each in points:
            engine.add_adapters(Point.parse(each).ranks, Path(name))
        print(
            "batch:adapters        way  step ms  host waits  floor ms  step/floor  best peer"
            "  peer/step  over served"
        )
        ways = args.modes | args.sampling
        results = [r for each in points for r in measure_point(engine, each, ways, ceilings)]
        engine.add_adapters(Point.parse("1:1").ranks, Path(name))
        prompts = measure_prompts(engine)
        ratio = base_only(engine, model, Path(name))
        engine.runner.shutdown()
    gc.unfreeze()  # what is frozen at the end, Triton's bindings call leaked
    if args.json:
        rows = [asdict(result) for result in results]
        found = {
            "ceilings": asdict(ceilings),
            "base_only": ratio,
            "points": rows,
            "prompts": [asdict(prompt) for prompt in prompts],
        }
        args.json.write_text(json.dumps(found, indent=1))
    if beside := [result for result in results if result.peer_ms]:
        worst = min(beside, key=lambda result: result.peer_ratio)
        print(f"worst peer/step, at {worst.point}: {worst.peer_ratio:.2f}")


if __name__ == "__main__":
    main()
