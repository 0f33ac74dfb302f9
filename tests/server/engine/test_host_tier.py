"""A real engine whose host memory holds few of its adapters: they go to disk and come back."""

import asyncio
import random
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakeet.lora import host_store
from lorakeet.lora.adapter import Adapter, AdapterError
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.pool import bytes_per_row
from lorakeet.lora.slots import PinError, PoolError
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from lorakeet.server.engine.host_tier import refusal
from lorakeet.server.engine.inline import InlineEngine
from lorakeet.server.engine.messages import AdapterState, AddRequest, SamplingParams
from support.adapters import make_adapter, peft_greedy
from support.engines import Collected, cpu_settings, report
from support.models import tiny_model

PROMPT = [5, 9, 30, 31, 17]
NUM_ADAPTERS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    root = model.parent / "adapters"
    return [
        make_adapter(root / str(seed), model, seed=seed, r=4, target_modules=["o_proj", "q_proj"])
        for seed in range(NUM_ADAPTERS)
    ]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


@asynccontextmanager
async def engine_of(
    model: Path, adapters: list[Path], num_held: float, **settings: Any
) -> AsyncIterator[InlineEngine]:
    """All adapters loaded, as 1, 2, …, with room for `num_held` of them in host memory, and for
    two in the pool."""
    limits = {"max_loras": 1, "max_lora_rank": 4, **settings}
    engine = InlineEngine(cpu_settings(model, host_lora_memory=2**40, **limits))
    await engine.start(model)
    size = (await engine.load_adapter(1000, str(adapters[0]))).num_bytes
    await engine.shutdown()
    engine = InlineEngine(cpu_settings(model, host_lora_memory=int(num_held * size), **limits))
    try:
        await engine.start(model)
        for adapter_id, folder in enumerate(adapters, start=1):
            await engine.load_adapter(adapter_id, str(folder))
        yield engine
    finally:
        await engine.shutdown()


async def ask(engine: InlineEngine, adapter_id: int, **fields: Any) -> Collected:
    name = f"{adapter_id}-{random.random()}"
    sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 5), temperature=0.0)
    result = Collected()
    request = AddRequest(name, PROMPT, sampling, adapter_id, **fields)
    async for output in engine.generate(request):
        result.take(output)
    return result


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def states(engine: InlineEngine) -> dict[int, AdapterState]:
    return {state.adapter_id: state for state in engine.stats.adapters}


def is_right(model: Path, folder: Path, result: Collected) -> bool:
    assert result.finish_reason == "length", result.error
    return result.token_ids == peft_greedy(model, folder, PROMPT, len(result.token_ids))


def test_adapters_go_to_disk_and_come_back(model: Path, adapters: list[Path]) -> None:
    async def test() -> None:
        async with engine_of(model, adapters, 2.5) as engine:
            await report(engine)
            assert sum(state.in_host for state in states(engine).values()) == 2
            for index in (0, 1, 2, 3, 4, 5, 0, 5, 3, 3, 1):
                assert is_right(model, adapters[index], await ask(engine, index + 1))
            await report(engine)
            assert 0 < engine.stats.lora_host_bytes <= engine.info.lora_host_limit
            tiers = [state.tier for state in states(engine).values()]
            assert tiers.count("disk") >= NUM_ADAPTERS - 4
            assert all(state.error is None for state in states(engine).values())

    run(test)


def test_a_folder_that_comes_during_a_read_is_read_too(
    model: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One name's folder goes, while another name has brought the same bytes from elsewhere."""
    old = Path(shutil.copytree(adapters[0], tmp_path / "old"))
    may_read, is_reading = threading.Event(), threading.Event()
    may_read.set()

    def read(path: Path, *args: Any, **options: Any) -> Adapter:
        if path == old:
            is_reading.set()
            assert may_read.wait(30)
        return read_adapter(path, *args, **options)

    monkeypatch.setattr(host_store, "read_adapter", read)

    async def test() -> None:
        async with engine_of(model, [old, *adapters[1:]], 2.5) as engine:
            for adapter_id in (4, 5, 6):  # the first is put out, of host memory and of the pool
                await ask(engine, adapter_id)
            may_read.clear()
            is_reading.clear()
            asked = asyncio.create_task(ask(engine, 1))
            await asyncio.to_thread(is_reading.wait, 30)
            shutil.rmtree(old)
            await engine.update_adapter(1, [str(adapters[0])], False)
            may_read.set()
            assert is_right(model, adapters[0], await asked)

    run(test)


@pytest.mark.parametrize("num_held", [0.5, 1, 2.5, 100])
@pytest.mark.parametrize("max_loras", [1, 3])
def test_all_at_once(model: Path, adapters: list[Path], num_held: float, max_loras: int) -> None:
    """More adapters wait than host memory and pool hold: each gets its turn."""

    async def test() -> None:
        async with engine_of(model, adapters, num_held, max_loras=max_loras) as engine:
            ids = [1 + number % NUM_ADAPTERS for number in range(3 * NUM_ADAPTERS)]
            results = await asyncio.gather(*(ask(engine, id_) for id_ in ids), ask(engine, 0))
            for id_, result in zip(ids, results, strict=False):
                assert is_right(model, adapters[id_ - 1], result)
            await report(engine)
            assert engine.stats.lora_host_bytes <= max(
                engine.info.lora_host_limit, int(engine.info.lora_host_limit / num_held)
            )

    run(test)


def test_what_is_in_the_pool_needs_no_disk(model: Path, adapters: list[Path]) -> None:
    async def test() -> None:
        copies = [Path(shutil.copytree(folder, f"{folder}-copy")) for folder in adapters[:2]]
        async with engine_of(model, copies, 1, max_loras=2) as engine:
            for index in (0, 1):
                assert is_right(model, adapters[index], await ask(engine, index + 1))
            for copy in copies:
                shutil.rmtree(copy)
            await report(engine)
            assert {state.tier for state in states(engine).values()} == {"gpu"}
            assert sum(state.in_host for state in states(engine).values()) == 1
            for index in (0, 1, 0):
                assert is_right(model, adapters[index], await ask(engine, index + 1))

    run(test)


def test_files_that_changed_or_vanished(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    async def test() -> None:
        folder = Path(shutil.copytree(adapters[0], tmp_path / "x"))
        async with engine_of(model, [folder, *adapters[1:]], 1) as engine:

            async def put_out() -> None:
                """Others have pool and host memory now."""
                for id_ in (2, 3, 4):
                    assert is_right(model, adapters[id_ - 1], await ask(engine, id_))
                await report(engine)
                assert states(engine)[1].tier == "disk"

            async def fails(why: str) -> None:
                await put_out()
                result, other = await asyncio.gather(ask(engine, 1), ask(engine, 2))
                assert (result.finish_reason, result.token_ids) == ("error", [])
                assert result.error is not None
                assert why in result.error
                assert is_right(model, adapters[1], other)
                await until(lambda: why in str(states(engine)[1].error))

            shutil.copy(adapters[1] / "adapter_model.safetensors", folder)
            await fails("have changed")
            (folder / "adapter_model.safetensors").write_bytes(b"cut")
            await fails("adapter_model.safetensors is damaged")
            shutil.rmtree(folder)
            await fails("there is no adapter folder")
            await engine.update_adapter(1, [str(adapters[0])], pinned=False)
            await put_out()
            assert is_right(model, adapters[0], await ask(engine, 1))
            await until(lambda: states(engine)[1].error is None)

    run(test)


def test_a_pinned_adapter_stays(model: Path, adapters: list[Path]) -> None:
    async def test() -> None:
        # room for two to be pinned: a blend of others, with their biases, must fit beside them
        row_bytes = bytes_per_row(group_specs(load_config(model)), torch.float32)
        limits = {"max_loras": 3, "max_blend_rank": 4, "lora_memory": 20 * row_bytes}
        async with engine_of(model, adapters, 2.5, **limits) as engine:
            await ask(engine, 1)
            await engine.update_adapter(1, ["/nowhere"], pinned=True)
            for id_ in (2, 3, 4, 5, 6) * 2:
                assert is_right(model, adapters[id_ - 1], await ask(engine, id_))
            await report(engine)
            assert (states(engine)[1].tier, states(engine)[1].in_host) == ("gpu", True)
            assert is_right(model, adapters[0], await ask(engine, 1))
            await engine.update_adapter(2, [str(adapters[1])], pinned=True)
            with pytest.raises(AdapterError, match=r"no room .*\(raise max_loras or lora_memory"):
                await engine.update_adapter(3, [str(adapters[2])], pinned=True)
            await engine.update_adapter(2, [str(adapters[1])], pinned=False)
            await engine.update_adapter(1, [str(adapters[0])], pinned=False)
            for id_ in (2, 3, 4, 5, 6) * 2:
                assert is_right(model, adapters[id_ - 1], await ask(engine, id_))
            await until(lambda: states(engine)[1].tier == "disk")
            assert is_right(model, adapters[0], await ask(engine, 1))

    run(test)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            PinError("slots", 3, 2),
            "pinning this adapter would leave no room for others: 2 slots are left, and a blend of "
            "them may need 3 (raise max_loras)",
        ),
        (
            PinError("rows", 12, 11),
            "pinning this adapter would leave no room for others: 11 rank rows are left, and a "
            "blend of them may need 12 (raise max_loras or lora_memory, or lower max_blend_rank)",
        ),
        (
            PinError("vocabulary_bytes", 6, 5),
            "pinning this adapter would leave no room for others: 5 bytes for embedding and head "
            "rows are left, and one of them may need 6 (raise lora_vocabulary_memory)",
        ),
        (PoolError("rank", 9, 8), "rank 9 is larger than the pool takes, which is 8"),
        (PoolError("slots", 1, 0), "it needs 1 of the pool's 0 slots"),
        (PoolError("rows", 9, 8), "it needs 9 of the pool's 8 rows"),
        (
            PoolError("vocabulary_bytes", 1001, 1000),
            "its embedding and head rows take 1001 bytes, there is room for 1000 "
            "(lora_vocabulary_memory)",
        ),
    ],
)
def test_a_refusal_says_what_is_short_and_what_helps(error: PoolError, words: str) -> None:
    assert refusal(error) == words


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set, reads of adapters wait."""
    gate = threading.Event()
    gate.set()

    def read(*args: Any, **options: Any) -> Adapter:
        assert gate.wait(30)
        return read_adapter(*args, **options)

    monkeypatch.setattr(host_store, "read_adapter", read)
    return gate


def test_a_slow_disk_holds_only_its_own_requests(
    model: Path, adapters: list[Path], disk: threading.Event
) -> None:
    async def test() -> None:
        async with engine_of(model, adapters, 1) as engine:
            await ask(engine, 6)
            disk.clear()
            waiting = [asyncio.create_task(ask(engine, id_)) for id_ in (1, 2, 1)]
            for id_ in (
                6,
                0,
                6,
            ):  # the pool has one place, and nobody who waits for the disk has it
                assert len((await ask(engine, id_)).token_ids) == 5
            assert not any(task.done() for task in waiting)
            unloading = engine.unload_adapter(2)
            third = asyncio.create_task(ask(engine, 3))
            await report(engine)
            assert not unloading.done()
            waiting[0].cancel()
            disk.set()
            for id_, task in ((2, waiting[1]), (1, waiting[2]), (3, third)):
                assert is_right(model, adapters[id_ - 1], await task)
            assert (await unloading).adapter_id == 2
            await report(engine)
            assert 2 not in states(engine)

    run(test)


def test_unloading_what_is_on_disk(model: Path, adapters: list[Path]) -> None:
    async def test() -> None:
        async with engine_of(model, adapters, 1) as engine:
            await ask(engine, 6)
            on_disk, in_pool = await engine.unload_adapter(1), await engine.unload_adapter(6)
            assert (on_disk.host_bytes, on_disk.num_rows) == (0, 0)
            assert (in_pool.host_bytes > 0, in_pool.num_rows, in_pool.num_blocks) == (True, 4, 2)
            assert (await engine.unload_adapter(77)).host_bytes == 0
            await report(engine)
            assert states(engine).keys() == {2, 3, 4, 5}
            await asyncio.gather(*(engine.unload_adapter(id_) for id_ in (2, 3, 4, 5)))
            await report(engine)
            assert engine.stats.lora_host_bytes == engine.stats.lora_rows_used == 0

    run(test)


def test_a_blend_larger_than_host_memory(model: Path, adapters: list[Path]) -> None:
    async def test() -> None:
        async with engine_of(model, adapters, 1.5, max_loras=2) as engine:
            blend = ((1, 0.5), (2, -0.5), (3, 1.0))
            other = ((4, 0.5), (5, 0.5), (6, 0.5))
            results = await asyncio.gather(
                *(ask(engine, 0, blend=one) for one in (blend, other) * 3),
                *(ask(engine, id_) for id_ in range(1, 7)),
            )
            assert [result.finish_reason for result in results] == ["length"] * 12
            assert len({tuple(result.token_ids) for result in results[:6:2]}) == 1
            for index, result in enumerate(results[6:]):
                assert is_right(model, adapters[index], result)

    run(test)
