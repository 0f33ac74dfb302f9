"""Decode through the whole engine: what scheduling, sampling and copies add to the model's pass.

    python benchmarks/engine_step.py [--points 1:0,64:0,64:8,256:64] [--modes 2,1,eager]
    python benchmarks/engine_step.py --smoke        (tiny, on the CPU)

A point is batch:distinct adapters, of rank 16 on all seven projections. A mode is how many steps
may be in flight; "eager" is 2 without CUDA graphs. Llama-3.1-8B's shape in bfloat16. For each point
and mode: milliseconds a step, the part of it in which the host waited for the device, and the ratio
to the first mode. `waits` near zero means that the device is the one that waits.
"""

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from shapes import LLAMA_8B, TINY, write_adapter, write_model

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterId
from lorakeet.server.engine.messages import AddRequest, SamplingParams
from lorakeet.server.engine.run import make_scheduler
from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.scheduler import Scheduler
from lorakeet.server.engine.step import Step, StepResult

PROMPT, WARM_UP = 128, 30  # tokens; steps after the last prefill


class Engine:
    """The loop of `EngineLoop._step`, with a clock on what it waits for."""

    def __init__(self, runner: Runner, scheduler: Scheduler, depth: int) -> None:
        self.runner, self.scheduler, self.depth = runner, scheduler, depth
        self.in_flight: deque[tuple[Step, Callable[[], StepResult]]] = deque()
        self.waited = 0.0

    def step(self) -> None:
        if self.scheduler.can_schedule:
            step = self.scheduler.schedule()
            self.in_flight.append((step, self.runner.launch(step)))
        if len(self.in_flight) >= self.depth:
            step, wait = self.in_flight.popleft()
            start = time.perf_counter()
            result = wait()
            self.waited += time.perf_counter() - start
            self.scheduler.apply(step, result)

    def drain(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.step()
            while self.in_flight and not self.scheduler.has_work:
                step, wait = self.in_flight.popleft()
                self.scheduler.apply(step, wait())


def measure(engine: Engine, batch: int, adapters: int, steps: int) -> tuple[float, float]:
    """Milliseconds a step, and of these the host's wait."""
    params = SamplingParams(max_tokens=4 * (steps + WARM_UP), temperature=0.0, ignore_eos=True)
    names = [f"{batch}-{adapters}-{index}-{time.monotonic_ns()}" for index in range(batch)]
    for index, name in enumerate(names):
        prompt = [3 + (index + place) % 100 for place in range(PROMPT)]
        adapter_id = 1 + index % adapters if adapters else 0
        engine.scheduler.add(AddRequest(name, prompt, params, adapter_id))
    while engine.scheduler.stats().num_running < batch:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    engine.waited, start = 0.0, time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds, waited = time.perf_counter() - start, engine.waited
    engine.scheduler.abort(names)
    engine.drain()
    return 1e3 * seconds / steps, 1e3 * waited / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", default="1:0,32:0,64:0,64:8,64:64,256:0,256:8,256:64")
    parser.add_argument("--modes", default="2,1,eager")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    config = TINY if args.smoke else LLAMA_8B
    points = "1:0,3:2" if args.smoke else args.points
    pairs = [tuple(map(int, point.split(":"))) for point in points.split(",")]
    largest, most_adapters = (max(numbers) for numbers in zip(*pairs, strict=True))

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", config)
        adapter = write_adapter(Path(folder) / "adapter", config, rank=16, seed=1)
        settings = Settings(
            model=str(model),
            load_format="dummy",
            max_model_len=4096,
            max_num_seqs=largest,
            max_num_batched_tokens=8192,
            max_loras=max(most_adapters, 1),
            max_lora_rank=16,
        )
        runner = Runner(settings, model)
        scheduler = make_scheduler(settings, runner)
        for number in range(1, most_adapters + 1):  # one content, but each in a slot of its own
            loaded = runner.host_store.load(AdapterId(number), adapter).result()
            scheduler.add_adapter(AdapterId(number), loaded.digest, loaded.rank)
    print(f"memory: { {part: size >> 20 for part, size in runner.memory_by_part().items()} } MiB")

    graphs = runner.graphs
    for batch, adapters in pairs:
        first: float | None = None
        for mode in args.modes.split(","):
            runner.graphs = None if mode == "eager" else graphs
            engine = Engine(runner, scheduler, 2 if mode == "eager" else int(mode))
            steps = 5 if args.smoke else args.steps
            step, waits = measure(engine, batch, adapters, steps)
            first = first or step
            print(
                f"batch {batch:3d}, {adapters:2d} adapters, mode {mode:5}: {step:7.3f} ms a step,"
                f" host waits {waits:6.3f} ms, ratio {step / first:.3f}"
            )
    runner.shutdown()


if __name__ == "__main__":
    main()
