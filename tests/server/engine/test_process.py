"""The engine in a process of its own: a real process, killed in every way that one can be."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from lorakeet.lora.adapter import AdapterError
from lorakeet.server.engine import process_client
from lorakeet.server.engine.client import EngineDeadError
from lorakeet.server.engine.messages import AddRequest, SamplingParams
from lorakeet.server.engine.process_client import EngineProcess
from support.adapters import make_adapter, peft_greedy
from support.engines import Collected, cpu_settings
from support.models import tiny_model

PROMPT = [7, 8, 9, 10]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("process") / "model")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(90):
            await test()

    asyncio.run(limited())


@asynccontextmanager
async def engine_of(model: Path, **settings: Any) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(cpu_settings(model, **settings))
    await engine.start(model)
    process = psutil.Process(engine.pid)
    try:
        yield engine
    finally:
        await engine.shutdown()
        assert not process.is_running()
        assert not folder_of(engine).exists()


def folder_of(engine: EngineProcess) -> Path:
    """Where its sockets are."""
    assert engine._folder is not None
    return engine._folder


def request(name: str, adapter_id: int = 0, max_tokens: int = 6) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    return AddRequest(name, PROMPT, sampling, adapter_id)


async def collect(engine: EngineProcess, request: AddRequest) -> Collected:
    result = Collected()
    async for output in engine.generate(request):
        result.take(output)
    return result


def test_an_engine_process_serves_adapters_and_obeys_only_shutdown(model: Path) -> None:
    adapter = make_adapter(model.parent / "adapter", model, seed=1)

    async def test() -> None:
        async with engine_of(model, api_key="secret") as engine:
            assert engine.info.device == "cpu"
            process = psutil.Process(engine.pid)
            assert "secret" not in " ".join(process.cmdline())
            assert "secret" not in str(process.environ())
            await engine.load_adapter(1, str(adapter))
            with pytest.raises(AdapterError, match="not a folder"):
                await engine.load_adapter(2, str(model / "config.json"))
            # what a terminal sends to the whole group is for the API process to decide about
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            results = await asyncio.gather(
                *(collect(engine, request(f"{index}", index % 2)) for index in range(10))
            )
            for index, result in enumerate(results):
                path = adapter if index % 2 else None
                assert result.token_ids == peft_greedy(model, path, PROMPT, 6)
                assert [score.token_id for score in result.logprobs] == result.token_ids
            stream = engine.generate(request("open", max_tokens=400))
            await anext(stream)
            await stream.aclose()
            while engine.stats.num_running or not engine.stats.num_steps:
                await asyncio.sleep(0.02)
            assert engine.stats.kv_blocks_used == 0
            await engine.shutdown()
            assert engine._process is not None
            assert engine._process.returncode == 0

    run(test)


def test_an_engine_that_hangs_is_taken_for_dead(model: Path) -> None:
    async def test() -> None:
        async with engine_of(model, step_timeout=1.5) as engine:
            deaths: list[str] = []
            engine.on_death(deaths.append)
            await asyncio.sleep(2)  # an idle one does give signs
            assert engine.healthy
            process = psutil.Process(engine.pid)
            stream = engine.generate(request("a", max_tokens=400))
            await anext(stream)
            process.suspend()
            with pytest.raises(EngineDeadError, match=r"no sign for 1\.5 seconds"):
                async for _ in stream:
                    pass
            assert len(deaths) == 1
            assert not engine.healthy
            process.wait(timeout=10)

    run(test)


def test_an_engine_that_hangs_at_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "START_MARGIN", 0.0)

    async def test() -> None:
        engine = EngineProcess(cpu_settings(model, start_timeout=1.5))
        start = asyncio.create_task(engine.start(model))
        while engine._process is None:
            await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGSTOP)
        late = r"the engine is not ready after 1\.5 seconds \(start_timeout\)"
        with pytest.raises(EngineDeadError, match=late):
            await start
        assert not psutil.pid_exists(engine.pid)
        assert not folder_of(engine).exists()

    run(test)


def test_a_killed_engine_ends_streams_and_loads_with_an_error(model: Path) -> None:
    async def test() -> None:
        async with engine_of(model) as engine:
            deaths: list[str] = []
            engine.on_death(deaths.append)
            healthy = [engine.healthy]
            streams = [engine.generate(request(name, max_tokens=400)) for name in "abc"]
            for stream in streams:
                await anext(stream)
            os.kill(engine.pid, signal.SIGSTOP)  # so that the load is still open when it dies
            load = asyncio.create_task(engine.load_adapter(1, str(model)))
            await asyncio.sleep(0)
            os.kill(engine.pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    async for _ in stream:
                        pass
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await load
            assert len(deaths) == 1
            healthy.append(engine.healthy)
            assert healthy == [True, False]
            with pytest.raises(EngineDeadError):
                await anext(engine.generate(request("late")))

    run(test)


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Mamba2ForCausalLM"]}')

    async def test() -> None:
        engine = EngineProcess(cpu_settings(tmp_path))
        with pytest.raises(EngineDeadError, match="Mamba2ForCausalLM") as error:
            await engine.start(tmp_path)
        assert "Traceback" not in str(error.value)
        assert not folder_of(engine).exists()
        assert not psutil.pid_exists(engine.pid)

    run(test)


def test_a_start_that_is_given_up_leaves_nothing(model: Path) -> None:
    async def test() -> None:
        engine = EngineProcess(cpu_settings(model))
        start = asyncio.create_task(engine.start(model))
        while engine._process is None:
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not psutil.pid_exists(engine.pid)
        assert not folder_of(engine).exists()

    run(test)


_PARENT = """
import asyncio, sys
from pathlib import Path
from lorakeet.configs.settings import Settings
from lorakeet.server.engine.process_client import EngineProcess

async def main():
    model = Path(sys.argv[1])
    engine = EngineProcess(Settings(model=str(model), device="cpu"))
    await engine.start(model)
    print(engine.pid, engine._folder, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent(model: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(model)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        engine = psutil.Process(int(pid))
        parent.kill()
        engine.wait(timeout=20)
        assert not Path(folder).exists()
    finally:
        parent.kill()
        parent.communicate()


def test_a_folder_that_is_too_deep_for_sockets(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def test() -> None:
        with pytest.raises(EngineDeadError, match="no sockets in"):
            await EngineProcess(cpu_settings(model)).start(model)
        assert not list(deep.iterdir())

    run(test)
