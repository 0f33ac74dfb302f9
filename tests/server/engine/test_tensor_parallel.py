"""The processes of a model that is cut over several: they start, agree, and end together."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from lorakeet.lora.adapter import AdapterError, AdapterId, Slot
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from lorakeet.models.process_group import ProcessGroup
from lorakeet.server.engine import leader, process_client
from lorakeet.server.engine.client import EngineDeadError
from lorakeet.server.engine.leader import LeadingRunner
from lorakeet.server.engine.messages import AddRequest, SamplingParams
from lorakeet.server.engine.process_client import EngineProcess
from lorakeet.server.engine.rank_messages import Launch, Progress, SlotsFilled, Stage
from lorakeet.server.engine.step import (
    BlockId,
    ScheduledSequence,
    SequenceId,
    SlotLoad,
    Step,
    StepResult,
)
from support.adapters import make_adapter, peft_greedy
from support.engines import Collected, cpu_settings
from support.models import tiny_model

PROMPT = [7, 8, 9, 10]
ENDLESS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 heads, 2 KV heads."""
    return tiny_model(tmp_path_factory.mktemp("ranks") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [make_adapter(model.parent / f"adapter-{i}", model, seed=i) for i in range(2)]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(90):
            await test()

    asyncio.run(limited())


def followers(engine: EngineProcess) -> list[Any]:
    """The processes of the ranks above 0, in order."""
    found = [child for child in psutil.Process(engine.pid).children() if _rank(child)]
    return sorted(found, key=_rank)


def _rank(process: Any) -> int:
    with suppress(psutil.Error, ValueError):
        line = process.cmdline()
        return int(line[line.index("lorakeet.server.engine.follower") + 2])
    return 0


@asynccontextmanager
async def engine_of(model: Path, size: int = 2, **settings: Any) -> AsyncIterator[EngineProcess]:
    """However it ends, no process of it is left."""
    engine = EngineProcess(cpu_settings(model, tensor_parallel_size=size, **settings))
    await engine.start(model)
    processes = [psutil.Process(engine.pid), *followers(engine)]
    assert len(processes) == size
    try:
        yield engine
    finally:
        await engine.shutdown()
        psutil.wait_procs(processes, timeout=10)
        assert not any(process.is_running() for process in processes)


def request(name: str, adapter_id: int = 0, max_tokens: int = 6, **sampling: Any) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling)
    return AddRequest(name, PROMPT, params, adapter_id)


async def collect(engine: EngineProcess, request: AddRequest) -> Collected:
    result = Collected()
    async for output in engine.generate(request):
        result.take(output)
    return result


async def running(engine: EngineProcess) -> AsyncIterator[Any]:
    """A stream that has begun."""
    stream = engine.generate(request("open", max_tokens=ENDLESS))
    await anext(stream)
    return stream


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_answer_as_one(model: Path, adapters: list[Path], size: int) -> None:
    """Also sizes past the KV heads; what samples, scores and penalizes needs rank 0's tokens."""

    async def answers(size: int) -> list[Collected]:
        async with engine_of(model, size) if size > 1 else alone(model) as engine:
            for adapter_id, path in enumerate(adapters, start=1):
                await engine.load_adapter(adapter_id, str(path))
            ways: list[dict[str, Any]] = [
                {"logprobs": 3, "prompt_logprobs": 2},
                {"repetition_penalty": 1.3, "logit_bias": {40: 5.0}, "min_tokens": 4},
            ]
            return await asyncio.gather(
                *(
                    collect(engine, request(f"{number}-{adapter}", adapter, 12, **way))
                    for number, way in enumerate(ways)
                    for adapter in range(3)
                )
            )

    async def test() -> None:
        expected, results = await answers(1), await answers(size)
        for one, other in zip(expected, results, strict=True):
            assert other.error is None
            assert other.token_ids == one.token_ids
            scores = [*(other.prompt_logprobs or [])[1:], *other.logprobs]
            wanted = [*(one.prompt_logprobs or [])[1:], *one.logprobs]
            for score, want in zip(scores, wanted, strict=True):
                assert score is not None
                assert want is not None
                assert score.logprob == pytest.approx(want.logprob, abs=1e-3)
        for adapter in range(3):
            path = adapters[adapter - 1] if adapter else None
            assert results[adapter].token_ids == peft_greedy(model, path, PROMPT, 12)

    run(test)


def test_an_alora_on_two_ranks(model: Path, tmp_path: Path) -> None:
    """Before its invocation it is the base model. One rank is compared with PEFT elsewhere."""
    alora = make_adapter(tmp_path / "alora", model, seed=5, alora_invocation_tokens=PROMPT[2:])
    elsewhere = make_adapter(tmp_path / "other", model, seed=5, alora_invocation_tokens=[50])

    async def scores(size: int) -> list[list[float]]:
        async with engine_of(model, size) if size > 1 else alone(model) as engine:
            await engine.load_adapter(1, str(alora))
            await engine.load_adapter(2, str(elsewhere))
            asked = [request(f"{i}", i, logprobs=1, prompt_logprobs=1) for i in range(3)]
            results = await asyncio.gather(*(collect(engine, each) for each in asked))
        return [
            [
                score.logprob
                for score in [*(found.prompt_logprobs or [])[1:], *found.logprobs]
                if score
            ]
            for found in results
        ]

    async def test() -> None:
        one, two = await scores(1), await scores(2)
        for got, want in zip(two, one, strict=True):
            assert got == pytest.approx(want, abs=1e-3)
        base, activated, inactive = two
        assert len(base) == len(PROMPT) - 1 + 6
        assert inactive == pytest.approx(base, abs=1e-3)  # its invocation is nowhere
        assert activated[:2] == pytest.approx(base[:2], abs=1e-3)
        assert activated[2:] != pytest.approx(base[2:], abs=1e-2)

    run(test)


@asynccontextmanager
async def alone(model: Path) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(cpu_settings(model))
    await engine.start(model)
    try:
        yield engine
    finally:
        await engine.shutdown()


def test_adapters_come_and_go_on_all_ranks(model: Path, adapters: list[Path]) -> None:
    """Host memory for one adapter: each use of the other puts it out and reads it again."""

    async def test() -> None:
        async with engine_of(model, host_lora_memory="60KiB", max_loras=1) as engine:
            with pytest.raises(AdapterError, match="not a folder"):
                await engine.load_adapter(9, str(model / "config.json"))
            sizes = [
                (await engine.load_adapter(adapter_id, str(path))).num_bytes
                for adapter_id, path in enumerate(adapters, start=1)
            ]
            assert engine.info.lora_host_limit == 30 * 1024 < sum(sizes)
            for turn in range(3):
                for adapter_id, path in enumerate(adapters, start=1):
                    result = await collect(engine, request(f"{turn}-{adapter_id}", adapter_id))
                    assert result.token_ids == peft_greedy(model, path, PROMPT, 6)
            for adapter_id in (1, 2):
                await engine.unload_adapter(adapter_id)
            await engine.load_adapter(3, str(adapters[0]))
            assert (await collect(engine, request("last", 3))).error is None

    run(test)


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_rank_ends_all(model: Path, victim: int) -> None:
    async def test() -> None:
        async with engine_of(model, 4) as engine:
            stream = await running(engine)
            followers(engine)[victim - 1].kill()
            with pytest.raises(EngineDeadError, match=rf"rank {victim}: .* by SIGKILL"):
                async for _ in stream:
                    pass
            assert not engine.healthy

    run(test)


def test_a_rank_that_dies_while_nothing_runs(model: Path) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            died = asyncio.Event()
            engine.on_death(lambda reason: died.set())
            followers(engine)[0].kill()
            await died.wait()
            with pytest.raises(EngineDeadError, match=r"rank 1: .* by SIGKILL"):
                await anext(engine.generate(request("late")))

    run(test)


def test_a_rank_that_hangs(model: Path) -> None:
    async def test() -> None:
        async with engine_of(model, step_timeout=3.0) as engine:
            stream = await running(engine)
            followers(engine)[0].suspend()
            with pytest.raises(EngineDeadError, match="no sign for 3 seconds"):
                async for _ in stream:
                    pass

    run(test)


def test_a_rank_that_hangs_while_nothing_runs(model: Path, adapters: list[Path]) -> None:
    """Who waits for it is told: the read of an adapter is done by all ranks."""

    async def test() -> None:
        async with engine_of(model, step_timeout=3.0) as engine:
            await asyncio.sleep(4)  # an idle one does give signs
            await engine.load_adapter(1, str(adapters[0]))
            followers(engine)[0].suspend()
            with pytest.raises(EngineDeadError, match="rank 1 has given no sign for 3 seconds"):
                await engine.load_adapter(2, str(adapters[1]))
            assert not engine.healthy

    run(test)


def test_ranks_listen_on_this_host_alone(model: Path) -> None:
    """Nothing asks who comes."""

    async def test() -> None:
        async with engine_of(model) as engine:
            processes = [psutil.Process(engine.pid), *followers(engine)]
            found = [
                c for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"
            ]
            assert found
            assert {connection.laddr.ip for connection in found} == {"127.0.0.1"}

    run(test)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_killed_rank_0_takes_the_others_along(model: Path, hangs: bool) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            stream = await running(engine)
            if hangs:
                followers(engine)[0].suspend()
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in stream:
                    pass

    run(test)


def test_an_error_in_a_step_of_one_rank(model: Path) -> None:
    """It can allocate no more memory: the operating system's own fault."""

    async def test() -> None:
        async with engine_of(model, max_num_batched_tokens=512) as engine:
            (follower,) = followers(engine)
            in_use = follower.memory_info().vms
            follower.rlimit(resource.RLIMIT_AS, (in_use, in_use))
            sampling = SamplingParams(max_tokens=4, ignore_eos=True)
            streams = [
                engine.generate(AddRequest(str(number), [number] * 500, sampling))
                for number in range(8)
            ]
            with pytest.raises(EngineDeadError, match="rank 1: "):
                await asyncio.gather(*(_drain(stream) for stream in streams))

    run(test)


async def _drain(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


def test_a_rank_that_never_starts(model: Path) -> None:
    async def test() -> None:
        engine = EngineProcess(cpu_settings(model, tensor_parallel_size=4, start_timeout=15.0))
        start = asyncio.create_task(engine.start(model))
        while engine._process is None or len(found := followers(engine)) < 3:
            await asyncio.sleep(0.01)
        found[1].suspend()
        with pytest.raises(EngineDeadError, match="rank 2 has not started after 15 seconds"):
            await start
        psutil.wait_procs(found, timeout=10)
        assert not any(process.is_running() for process in found)

    run(test)


def test_a_rank_0_that_hangs_at_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "START_MARGIN", 0.0)

    async def test() -> None:
        engine = EngineProcess(cpu_settings(model, tensor_parallel_size=2, start_timeout=15.0))
        start = asyncio.create_task(engine.start(model))
        while engine._process is None or not (found := followers(engine)):
            await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="the engine is not ready after 15 seconds"):
            await start
        psutil.wait_procs(found, timeout=10)
        assert not any(process.is_running() for process in found)

    run(test)


@pytest.mark.parametrize(
    ("own", "other", "named"),
    [
        ("started", "starting", "rank 1 has not started"),
        ("started", "started", "rank 0, 1 has not joined the others"),
        ("joined", "loaded", "rank 0 has not loaded its part of the model"),
        ("loaded", "ready", "rank 0 has not made its part of the model ready"),
        ("ready", "loaded", "rank 1 has not made its part of the model ready"),
    ],
)
def test_who_is_late_at_start_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, own: Stage, other: Stage, named: str
) -> None:
    ours, theirs = Pipe()

    def spawn(settings: Any, model: Path, address: str, rank: int) -> leader._Follower:
        return leader._Follower(rank, subprocess.Popen(["sleep", "60"]), cast(Any, ours))

    monkeypatch.setattr(leader, "_spawn", spawn)
    died: SimpleQueue[str] = SimpleQueue()
    settings = cpu_settings(model, tensor_parallel_size=2, start_timeout=1.0)
    group = leader.Followers(settings, model, died.put)
    group.reach(own)
    theirs.send_bytes(msgspec.msgpack.encode(Progress(other)))
    assert died.get(timeout=20) == f"{named} after 1 seconds (start_timeout)"
    group.close()
    group.listener.close()


def test_a_size_that_cannot_be(model: Path) -> None:
    async def test() -> None:
        engine = EngineProcess(cpu_settings(model, tensor_parallel_size=3))
        named = r"tensor_parallel_size: num_attention_heads \(4\)"
        with pytest.raises(EngineDeadError, match=named):
            await engine.start(model)

    run(test)


def test_files_that_no_rank_can_read(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")

    async def test() -> None:
        engine = EngineProcess(cpu_settings(broken, tensor_parallel_size=2))
        with pytest.raises(EngineDeadError, match=r"model\.safetensors"):
            await engine.start(broken)

    run(test)


_PARENT = """
import asyncio, sys
from pathlib import Path
import psutil
from lorakeet.configs.settings import Settings
from lorakeet.server.engine.process_client import EngineProcess

async def main():
    model = Path(sys.argv[1])
    engine = EngineProcess(Settings(model=str(model), device="cpu", tensor_parallel_size=2))
    await engine.start(model)
    (follower,) = psutil.Process(engine.pid).children()
    print(engine.pid, follower.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_all_ranks_die_with_their_parent(model: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(model)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(ranks) == 2
        parent.kill()
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert not alive
    finally:
        parent.kill()
        parent.communicate()


# --- slots ---


class ScriptedRank:
    """A runner, and the reports of other ranks: only CUDA copies are ever late, or fail."""

    depth = 2
    group = ProcessGroup(0, 3)

    def __init__(self) -> None:
        self.own: list[StepResult] = []
        self.reports: list[SlotsFilled] = []
        self.sent: list[Step] = []

    def launch(self, step: Step) -> Callable[[], StepResult]:
        assert self.sent[-1] == step  # the others have it already
        return self.own.pop

    def send(self, order: Launch) -> None:
        encoded = msgspec.msgpack.encode(order)
        self.sent.append(msgspec.msgpack.decode(encoded, type=Launch).step)

    def take_filled(self) -> list[SlotsFilled]:
        reports, self.reports = self.reports, []
        return reports


def test_a_slot_is_loaded_when_all_ranks_have_filled_it() -> None:
    ranks = ScriptedRank()
    leading = LeadingRunner(cast(Any, ranks), cast(Any, ranks))
    a, b, c = Slot(1), Slot(2), Slot(3)

    def step(own: StepResult, *reports: SlotsFilled) -> StepResult:
        ranks.own, ranks.reports = [own], list(reports)
        chunk = ScheduledSequence(SequenceId(5), 3, 1, (BlockId(7),), True)
        load = SlotLoad(AdapterId(4), a, rows=(3, 1))
        return leading.launch(Step(loads=(load,), released=(SequenceId(2),), sequences=(chunk,)))()

    one = step(StepResult(loaded=(a, b), load_seconds=(0.5, 0.25)), SlotsFilled((a,), {}))
    assert (one.loaded, one.load_errors) == ((), {})
    two = step(StepResult(load_errors={c: "full"}), SlotsFilled((a, b, c), {}))
    assert (two.loaded, two.load_seconds, two.load_errors) == ((a,), (0.5,), {})
    three = step(StepResult(), SlotsFilled((c,), {b: "broken"}))
    assert (three.loaded, three.load_errors) == ((), {b: "broken", c: "full"})
    again = step(StepResult(loaded=(b,), load_seconds=(1.0,)), *[SlotsFilled((b,), {})] * 2)
    assert (again.loaded, again.load_seconds) == ((b,), (1.0,))


# --- host stores ---


class Mirror:
    """Another rank's store, in this process."""

    def __init__(self, store: HostStore) -> None:
        self.store = store
        self.redirect: dict[Path, Path] = {}  # what it finds under a path

    def read(self, adapter_id: AdapterId, path: Path) -> Callable[[], set[str]]:
        future = self.store.load(adapter_id, self.redirect.get(path, path))
        return lambda: {future.result().digest}

    def release(self, adapter_id: AdapterId) -> None:
        self.store.release(adapter_id)


@pytest.fixture
def stores(model: Path) -> Iterator[tuple[HostStore, Mirror]]:
    def store(**options: Any) -> HostStore:
        specs = group_specs(load_config(model))
        return HostStore(specs, max_rank=16, dtype=torch.float32, **options)

    mirror = Mirror(store())
    leading = store(replicas=mirror)
    yield leading, mirror
    leading.shutdown()
    mirror.store.shutdown()


ONE, TWO = AdapterId(1), AdapterId(2)


def test_replicas_hold_what_the_store_holds(
    stores: tuple[HostStore, Mirror], adapters: list[Path]
) -> None:
    store, mirror = stores
    for adapter_id, path in zip((ONE, TWO), adapters, strict=True):
        store.load(adapter_id, path).result(timeout=60)
        assert mirror.store.holds(adapter_id)
    store.max_bytes = store.num_bytes - 1
    assert store.make_room(set) == [ONE]
    assert not mirror.store.holds(ONE)
    future = store.reload(ONE, [TWO])
    assert future is not None
    future.result(timeout=60)
    assert mirror.store.holds(ONE)
    for adapter_id in (ONE, TWO):
        store.release(adapter_id)
    assert mirror.store.num_bytes == 0


@pytest.mark.parametrize("where", ["here", "there", "both"])
def test_a_read_that_fails_on_one_rank_is_kept_on_none(
    stores: tuple[HostStore, Mirror], adapters: list[Path], tmp_path: Path, where: str
) -> None:
    store, mirror = stores
    path, nowhere = adapters[0], tmp_path / "nowhere"
    asked = path if where == "there" else nowhere
    mirror.redirect = {"here": {nowhere: path}, "there": {path: nowhere}, "both": {}}[where]
    with pytest.raises(AdapterError):
        store.load(ONE, asked).result(timeout=60)
    assert not store.holds(ONE)
    assert mirror.store.num_bytes == store.num_bytes == 0
    mirror.redirect = {}
    store.load(ONE, path).result(timeout=60)  # the same id, for nobody knows it
    assert mirror.store.holds(ONE)


def test_another_path_is_read_by_all_ranks_after_one_that_has_other_contents_now(
    stores: tuple[HostStore, Mirror], adapters: list[Path], tmp_path: Path
) -> None:
    store, mirror = stores
    first = tmp_path / "first"
    shutil.copytree(adapters[0], first)
    adapter = store.load(ONE, first).result(timeout=60)
    store.update(ONE, [first, adapters[0]], pinned=False)
    store.max_bytes = 1
    assert store.make_room(set) == [ONE]
    shutil.copytree(adapters[1], first, dirs_exist_ok=True)
    future = store.reload(ONE)
    assert future is not None
    assert future.result(timeout=60).digest == adapter.digest
    assert mirror.store.get(ONE).digest == adapter.digest


def test_ranks_that_read_different_contents(
    stores: tuple[HostStore, Mirror], adapters: list[Path]
) -> None:
    """The files are changed between one rank's read and another's."""
    store, mirror = stores
    mirror.redirect = {adapters[0]: adapters[1]}
    with pytest.raises(AdapterError, match="changed while they were read"):
        store.load(ONE, adapters[0]).result(timeout=60)
    assert mirror.store.num_bytes == store.num_bytes == 0
