"""A real runner and scheduler, driven step by step in the test's own thread."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterId
from lorakeet.server.engine.client import Engine
from lorakeet.server.engine.graphs import Shape, StaticBatch
from lorakeet.server.engine.loop import COPY_POLL
from lorakeet.server.engine.messages import (
    AddRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from lorakeet.server.engine.run import make_scheduler
from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.step import Step, StepResult
from support.adapters import make_adapter
from support.models import VOCAB_SIZE


def cpu_settings(model: Path, **values: Any) -> Settings:
    """Small limits, so that chunks, slots and blocks run short in tests."""
    small: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "max_loras": 4,
    }
    return Settings(model=str(model), **(small | values))


def overflowing_adapter(folder: Path, model: Path) -> Path:
    """An adapter that is finite on disk and overflows float32 when it is used."""
    make_adapter(folder, model, seed=4, target_modules=["down_proj"])
    file = folder / "adapter_model.safetensors"
    save_file({name: weight * 1e30 for name, weight in load_file(file).items()}, file)
    return folder


def prompt_of(length: int, seed: int) -> list[int]:
    """Any tokens but the special ones."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)]


@dataclass
class Collected:
    """All outputs of one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    cached_tokens: int | None = None
    error: str | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        self.finish_reason, self.error = output.finish_reason, output.error


class StepEngine:
    """Requests go in with `add`; `run` steps until all have ended."""

    def __init__(self, model: Path, depth: int = 1, **settings: Any) -> None:
        self.depth = depth
        self._in_flight: deque[tuple[Step, Callable[[], StepResult]]] = deque()
        self.settings = cpu_settings(model, **settings)
        self.runner = Runner(self.settings, model)
        self.scheduler = make_scheduler(self.settings, self.runner)
        self.results: dict[str, Collected] = {}
        self._next_adapter = 1

    def load(self, path: Path) -> AdapterId:
        adapter_id = AdapterId(self._next_adapter)
        self._next_adapter += 1
        adapter = self.runner.host_store.load(adapter_id, path).result(timeout=60)
        self.scheduler.add_adapter(
            adapter_id,
            adapter.digest,
            adapter.num_rows,
            invocation=adapter.invocation,
            vocabulary_bytes=adapter.vocabulary_bytes,
        )
        return adapter_id

    def add(
        self,
        name: str,
        prompt: list[int],
        adapter_id: int = 0,
        blend: tuple[tuple[int, float], ...] = (),
        **sampling: Any,
    ) -> None:
        """Greedy, 8 tokens, past any EOS; `sampling` says otherwise."""
        params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
        request = AddRequest(name, prompt, SamplingParams(**params), adapter_id, blend=blend)
        self.results[name] = Collected()
        self.scheduler.add(request)

    def step(self) -> None:
        """As `EngineLoop._step`, with `depth` steps in flight. Leaves time for a copy to a slot
        when it has nothing else to do."""
        has_launched = False
        if self.scheduler.has_work:
            step = self.scheduler.schedule()
            self._in_flight.append((step, self.runner.launch(step)))
            has_launched = bool(step.sequences)
        if self._in_flight and not (has_launched and len(self._in_flight) < self.depth):
            step, wait = self._in_flight.popleft()
            for output in self.scheduler.apply(step, wait()):
                self.results[output.request_id].take(output)
            if not step.sequences and self.scheduler.slots.num_loading:
                time.sleep(COPY_POLL)

    def run(self) -> dict[str, Collected]:
        for _ in range(2000):
            if not (self.scheduler.has_work or self._in_flight):
                self.scheduler.check()
                assert self.scheduler.stats().kv_blocks_used == 0
                return self.results
            self.step()
        raise AssertionError("the engine does not come to an end")


async def report(engine: Engine) -> None:
    """Until the engine has said how it is now: its second report, the first may be older."""
    for _ in range(2):
        event = asyncio.Event()
        engine.on_stats(lambda _, event=event: event.set())  # type: ignore[misc]
        await event.wait()


def note_runs(engine: StepEngine) -> list[tuple[Shape, bool, int]]:
    """From now on each pass on a static batch adds its shape, whether LoRA is in it, its tokens."""
    graphs = engine.runner.graphs
    assert graphs is not None
    runs: list[tuple[Shape, bool, int]] = []

    def note(key: tuple[Shape, bool], static: StaticBatch, replay: Callable[[], Tensor]) -> Tensor:
        runs.append((*key, int((static.batch().kv_slots >= 0).sum())))
        return replay()

    for key, (static, replay) in graphs._graphs.items():
        graphs._graphs[key] = static, partial(note, key, static, replay)
    return runs
