"""The engine's loop in a thread of the test, with the real runner on a tiny model."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lorakeet.lora.adapter import Adapter, AdapterError, AdapterId, AdapterNotFoundError
from lorakeet.lora.host_store import HostStore
from lorakeet.server.engine import inline
from lorakeet.server.engine.client import EngineDeadError
from lorakeet.server.engine.inline import InlineEngine, QueueInbox
from lorakeet.server.engine.loop import EngineLoop
from lorakeet.server.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    RequestOutput,
    SamplingParams,
    Shutdown,
)
from lorakeet.server.engine.run import make_scheduler
from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.step import Step, StepResult
from support.adapters import make_adapter, peft_greedy
from support.engines import Collected, cpu_settings
from support.models import tiny_model

PROMPT = [7, 8, 9, 10]
LONG = 400  # tokens: runs until it is told to stop


@pytest.fixture(params=[1, 2], autouse=True)
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it with one step in flight, and with two as on a GPU."""
    monkeypatch.setattr(Runner, "depth", request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("loop") / "model")


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return make_adapter(model.parent / "adapter", model, seed=1)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


@asynccontextmanager
async def engine_of(model: Path, **settings: Any) -> AsyncIterator[InlineEngine]:
    engine = InlineEngine(cpu_settings(model, log_level="debug", **settings))
    await engine.start(model)
    try:
        yield engine
    finally:
        await engine.shutdown()


def request(name: str, adapter_id: int = 0, **sampling: Any) -> AddRequest:
    params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | sampling
    return AddRequest(name, PROMPT, SamplingParams(**params), adapter_id)


async def collect(engine: InlineEngine, request: AddRequest) -> Collected:
    result = Collected()
    async for output in engine.generate(request):
        result.take(output)
    return result


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def quiet(engine: InlineEngine) -> None:
    """Nothing runs, waits or holds KV blocks."""

    def is_quiet() -> bool:
        stats = engine.stats
        return stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0

    engine._stats = engine.stats.__class__(num_running=1)  # only a report from now on counts
    await until(is_quiet)


def test_requests_of_base_and_adapter_run_together(model: Path, adapter: Path) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            loaded = await engine.load_adapter(1, str(adapter))
            assert loaded.rank == 8
            assert loaded.seconds.keys() == {"read", "check"}
            names = [f"{index}-{index % 2}" for index in range(12)]
            results = await asyncio.gather(
                *(collect(engine, request(name, int(name[-1]))) for name in names)
            )
            for name, result in zip(names, results, strict=True):
                path = adapter if name.endswith("1") else None
                assert result.token_ids == peft_greedy(model, path, PROMPT, 6)
                assert result.finish_reason == "length"
            await quiet(engine)
            assert [state.tier for state in engine.stats.adapters] == ["gpu"]

    run(test)


def test_bad_requests_end_alone(model: Path) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            too_long = AddRequest("long", [5] * 600, SamplingParams())
            bad, unknown, good = await asyncio.gather(
                collect(engine, too_long),
                collect(engine, request("unknown", adapter_id=9)),
                collect(engine, request("good")),
            )
            assert (bad.finish_reason, unknown.finish_reason) == ("error", "error")
            assert "600 tokens" in str(bad.error)
            assert "no adapter 9" in str(unknown.error)
            assert good.token_ids == peft_greedy(model, None, PROMPT, 6)

    run(test)


def test_bad_adapters_fail_alone(model: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    too_large = make_adapter(tmp_path / "large", model, r=9)

    async def test() -> None:
        async with engine_of(model, max_lora_rank=8) as engine:
            good, *bad = await asyncio.gather(
                engine.load_adapter(1, str(adapter)),
                engine.load_adapter(2, str(tmp_path)),
                engine.load_adapter(3, str(tmp_path / "nowhere")),
                engine.load_adapter(4, str(too_large)),
                return_exceptions=True,
            )
            assert [type(error) for error in bad] == [
                AdapterError,
                AdapterNotFoundError,
                AdapterError,
            ]
            assert not isinstance(good, BaseException)
            engine.unload_adapter(2)  # failed: nothing is there to unload
            engine.unload_adapter(77)
            result = await collect(engine, request("good", 1))
            assert result.token_ids == peft_greedy(model, adapter, PROMPT, 6)
            await until(lambda: [s.adapter_id for s in engine.stats.adapters] == [1])

    run(test)


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads of adapters wait for this event."""
    gate = threading.Event()
    read = HostStore._read

    def wait_and_read(self: HostStore, adapter_id: AdapterId, path: Any) -> Adapter:
        assert gate.wait(30)
        return read(self, adapter_id, path)

    monkeypatch.setattr(HostStore, "_read", wait_and_read)
    return gate


def test_a_slow_load_stalls_nobody(model: Path, adapter: Path, slow_reads: threading.Event) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            load = asyncio.create_task(engine.load_adapter(1, str(adapter)))
            result = await collect(engine, request("base", max_tokens=50))
            assert len(result.token_ids) == 50
            assert not load.done()
            slow_reads.set()
            await load  # an idle engine is woken
            result = await collect(engine, request("adapter", 1))
            assert result.token_ids == peft_greedy(model, adapter, PROMPT, 6)

    run(test)


def test_an_adapter_can_be_unloaded_while_it_is_read(
    model: Path, adapter: Path, slow_reads: threading.Event
) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            load = asyncio.create_task(engine.load_adapter(1, str(adapter)))
            await asyncio.sleep(0)
            engine.unload_adapter(1)
            with pytest.raises(AdapterError, match="unloaded while it was read"):
                await load
            cancelled = asyncio.create_task(engine.load_adapter(2, str(adapter)))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            slow_reads.set()
            await engine.load_adapter(3, str(adapter))
            await until(lambda: [s.adapter_id for s in engine.stats.adapters] == [3])
            await quiet(engine)
            assert [state.adapter_id for state in engine.stats.adapters] == [3]

    run(test)


def test_unload_waits_for_the_last_request(model: Path, adapter: Path) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            await engine.load_adapter(1, str(adapter))
            async with aclosing(engine.generate(request("old", 1, max_tokens=LONG))) as outputs:
                await anext(outputs)
                engine.unload_adapter(1)
                late = await collect(engine, request("late", 1))
                assert late.finish_reason == "error"
                assert engine.stats.adapters == [] or engine.stats.adapters[0].adapter_id == 1
                assert not (await anext(outputs)).finish_reason
            await until(lambda: engine.stats.adapters == [])
            await quiet(engine)
            assert engine.stats.lora_rows_used == 0

    run(test)


def test_slots_are_free_after_many_loads_and_unloads(model: Path, adapter: Path) -> None:
    async def test() -> None:
        async with engine_of(model, max_loras=2, max_lora_rank=8) as engine:
            for adapter_id in range(1, 12):
                await engine.load_adapter(adapter_id, str(adapter))
                result = await collect(engine, request(str(adapter_id), adapter_id))
                assert result.token_ids == peft_greedy(model, adapter, PROMPT, 6)
                engine.unload_adapter(adapter_id)
            await until(lambda: engine.stats.adapters == [])
            await quiet(engine)
            assert engine.stats.lora_rows_used == 0

    run(test)


def test_closing_a_stream_frees_what_it_holds(model: Path) -> None:
    async def test() -> None:
        async with engine_of(model, max_num_seqs=1) as engine:
            running = engine.generate(request("running", max_tokens=LONG))
            await anext(running)
            queued = asyncio.create_task(collect(engine, request("queued", max_tokens=LONG)))
            await asyncio.sleep(0.02)
            queued.cancel()
            assert (await asyncio.gather(queued, return_exceptions=True))[0].__class__ is (
                asyncio.CancelledError
            )
            await running.aclose()
            await quiet(engine)
            assert engine._streams == {}
            assert (await collect(engine, request("next"))).finish_reason == "length"

    run(test)


def test_abort_ends_a_stream_with_its_reason(model: Path) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            outputs: list[RequestOutput] = []
            async for output in engine.generate(request("a", max_tokens=LONG)):
                outputs.append(output)
                if len(outputs) == 2:
                    engine._send(AbortRequests(["a", "nobody"]))
            assert outputs[-1].finish_reason == "abort"
            await quiet(engine)

    run(test)


def test_a_request_id_is_used_once_at_a_time(model: Path) -> None:
    async def test() -> None:
        async with (
            engine_of(model) as engine,
            aclosing(engine.generate(request("a", max_tokens=LONG))) as first,
        ):
            await anext(first)
            with pytest.raises(ValueError, match="in use"):
                await anext(engine.generate(request("a")))
            assert (await anext(first)).finish_reason is None

    run(test)


def test_shutdown_ends_open_streams_with_an_error(model: Path) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            deaths: list[str] = []
            engine.on_death(deaths.append)
            stream = engine.generate(request("a", max_tokens=LONG))
            await anext(stream)
            await engine.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError, match="shut down"):
                await anext(engine.generate(request("b")))
            assert deaths == []  # nobody killed it
            assert not engine.healthy

    run(test)


def test_at_its_end_all_steps_have_been_waited_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Shutdown` arrives with as many in flight as there may be: other ranks have part in them."""
    settings, inbox = cpu_settings(model), QueueInbox()
    runner = Runner(settings, model)
    runner_launch = runner.launch
    launched: list[int] = []
    ended: list[int] = []

    def watched(step: Step) -> Callable[[], StepResult]:
        wait, number = runner_launch(step), len(launched)
        launched.append(number)
        if number == 3:
            assert len(launched) - len(ended) == runner.depth
            inbox.put(Shutdown())

        def result() -> StepResult:
            one = wait()
            ended.append(number)
            return one

        return result

    monkeypatch.setattr(runner, "launch", watched)
    loop = EngineLoop(
        make_scheduler(settings, runner), runner, runner.host_store, lambda event: None
    )
    inbox.put(request("a", max_tokens=LONG))
    loop.run(inbox)
    assert 4 <= len(launched) < 10
    assert ended == launched
    runner.shutdown()


def test_a_fault_of_the_step_is_the_end_of_the_engine(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Runner.launch
    steps = 0

    def fail_at_fifth(self: Runner, step: Step) -> Callable[[], StepResult]:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise RuntimeError("the device is on fire")
        return launch(self, step)

    monkeypatch.setattr(Runner, "launch", fail_at_fifth)

    async def test() -> None:
        async with engine_of(model) as engine:
            deaths: list[str] = []
            engine.on_death(deaths.append)
            results = await asyncio.gather(
                *(collect(engine, request(name, max_tokens=LONG)) for name in "ab"),
                return_exceptions=True,
            )
            assert [type(error) for error in results] == [EngineDeadError] * 2
            assert deaths == ["RuntimeError: the device is on fire"]
            assert not engine.healthy
            with pytest.raises(EngineDeadError, match="on fire"):
                await engine.load_adapter(1, str(adapter))

    run(test)


def test_an_engine_that_cannot_start_says_why(model: Path, tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "config.json").write_text('{"architectures": ["Mamba2ForCausalLM"]}')
        engine = InlineEngine(cpu_settings(tmp_path))
        with pytest.raises(EngineDeadError, match="Mamba2ForCausalLM"):
            await engine.start(tmp_path)
        engine = InlineEngine(cpu_settings(model, max_model_len=9999))
        with pytest.raises(EngineDeadError, match="max_model_len: 9999"):
            await engine.start(model)

    run(test)


def test_idle_loop_sends_reports_and_sleeps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class CountingInbox(QueueInbox):
        def receive(self, timeout: float) -> Any:
            waits.append(timeout)
            return super().receive(timeout)

    monkeypatch.setattr(inline, "QueueInbox", CountingInbox)

    async def test() -> None:
        async with engine_of(model) as engine:
            await collect(engine, request("a"))
            await quiet(engine)
            del waits[:]
            reports: list[EngineStats] = []
            while len(reports) < 3:
                await until(lambda: not reports or engine.stats is not reports[-1])
                reports.append(engine.stats)
            assert 1 <= len(waits) <= 6
            assert max(waits) > 0.1

    run(test)
