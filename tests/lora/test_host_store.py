"""The host store over real files: background reads, sharing by content, release at any moment."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakeet.lora import host_store
from lorakeet.lora.adapter import Adapter, AdapterError, AdapterId, AdapterNotFoundError
from lorakeet.lora.host_memory import Pages
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from support.adapters import edit_tensors, make_adapter
from support.deltas import read
from support.models import tiny_model
from support.servers import wait_until

ONE, TWO, THREE = AdapterId(1), AdapterId(2), AdapterId(3)
TIMEOUT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(root / str(i), model, seed=i, target_modules=["o_proj"]) for i in range(3)]


@pytest.fixture
def store(model: Path) -> Iterator[HostStore]:
    specs = group_specs(load_config(model))
    store = HostStore(specs, max_rank=16, dtype=torch.float32, num_threads=2)
    yield store
    store.shutdown()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator["Gate"]:
    """Holds every read, on its thread, until it is opened."""
    gate = Gate()
    monkeypatch.setattr(host_store, "read_adapter", gate.read_adapter)
    yield gate
    gate.open.set()


class Gate:
    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.num_reading = 0

    def read_adapter(self, *args: Any, **options: Any) -> Adapter:
        self.num_reading += 1
        self.waiting.release()
        assert self.open.wait(TIMEOUT)
        return read_adapter(*args, **options)

    def wait_for_reader(self) -> None:
        assert self.waiting.acquire(timeout=TIMEOUT)


def test_load_and_release(store: HostStore, adapters: list[Path]) -> None:
    adapter = store.load(ONE, adapters[0]).result(TIMEOUT)
    assert store.get(ONE) is adapter
    assert store.num_bytes == adapter.num_bytes > 0
    assert store.seconds(ONE).keys() == {"read", "check"}
    assert store.release(ONE) == adapter.num_bytes
    assert store.num_bytes == 0
    for ask in (store.get, store.seconds):
        with pytest.raises(KeyError):
            ask(ONE)
    assert store.release(ONE) == 0


def test_same_content_is_held_once(store: HostStore, adapters: list[Path]) -> None:
    first = store.load(ONE, adapters[0]).result(TIMEOUT)
    second = store.load(TWO, adapters[0]).result(TIMEOUT)
    other = store.load(THREE, adapters[1]).result(TIMEOUT)
    assert second is first
    assert other.digest != first.digest
    assert store.num_bytes == first.num_bytes + other.num_bytes
    assert store.release(ONE) == 0
    assert store.get(TWO) is first
    assert store.release(TWO) == first.num_bytes
    assert store.num_bytes == other.num_bytes


def test_same_content_read_at_the_same_time(
    store: HostStore, adapters: list[Path], gate: Gate
) -> None:
    futures = [store.load(ONE, adapters[0]), store.load(TWO, adapters[0])]
    gate.wait_for_reader()
    gate.wait_for_reader()
    gate.open.set()
    first, second = (future.result(TIMEOUT) for future in futures)
    assert first is second
    assert store.num_bytes == first.num_bytes


def test_a_failed_load_leaves_nothing(store: HostStore, adapters: list[Path], model: Path) -> None:
    with pytest.raises(AdapterNotFoundError):
        store.load(ONE, adapters[0] / "nope").result(TIMEOUT)
    with pytest.raises(AdapterError, match="limit is 16"):
        store.load(TWO, make_adapter(adapters[0].parent / "big", model, r=17)).result(TIMEOUT)
    assert store.num_bytes == 0
    assert store.release(ONE) == store.release(TWO) == 0
    store.load(THREE, adapters[0]).result(TIMEOUT)


def test_a_fault_of_the_reader_ends_one_load_only(
    store: HostStore,
    adapters: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def out_of_memory(*args: Any, **options: Any) -> Adapter:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(host_store, "read_adapter", out_of_memory)
        with pytest.raises(AdapterError, match="MemoryError"):
            store.load(ONE, adapters[0]).result(TIMEOUT)
    assert f"the adapter at {adapters[0]} could not be read" in caplog.text
    store.load(TWO, adapters[0]).result(TIMEOUT)


def test_release_while_it_is_read(store: HostStore, adapters: list[Path], gate: Gate) -> None:
    future = store.load(ONE, adapters[0])
    gate.wait_for_reader()
    assert store.release(ONE) == 0
    gate.open.set()
    with pytest.raises(AdapterError, match="unloaded while it was read"):
        future.result(TIMEOUT)
    assert store.num_bytes == 0
    with pytest.raises(KeyError):
        store.get(ONE)


def test_release_before_it_is_read(store: HostStore, adapters: list[Path], gate: Gate) -> None:
    running = [store.load(AdapterId(10 + i), adapters[i]) for i in range(2)]
    gate.wait_for_reader()
    gate.wait_for_reader()
    waiting = store.load(ONE, adapters[2])
    assert store.release(ONE) == 0
    with pytest.raises(CancelledError):
        waiting.result(TIMEOUT)
    gate.open.set()
    for future in running:
        future.result(TIMEOUT)
    assert gate.num_reading == 2


def test_reads_at_a_time_are_bounded(store: HostStore, adapters: list[Path], gate: Gate) -> None:
    futures = [store.load(AdapterId(i + 1), adapters[i % 3]) for i in range(8)]
    gate.wait_for_reader()
    gate.wait_for_reader()
    assert gate.num_reading == 2
    assert not any(future.done() for future in futures)
    gate.open.set()
    assert not wait(futures, TIMEOUT).not_done
    assert len({id(future.result()) for future in futures}) == 3


def test_a_callback_may_use_the_store(store: HostStore, adapters: list[Path], gate: Gate) -> None:
    seen: list[int] = []
    running = [store.load(AdapterId(10 + i), adapters[i]) for i in range(2)]
    gate.wait_for_reader()
    gate.wait_for_reader()
    store.load(ONE, adapters[2]).add_done_callback(lambda _: seen.append(store.num_bytes))
    store.release(ONE)
    assert seen == [0]
    gate.open.set()
    for future in running:
        future.result(TIMEOUT)


def test_shutdown_joins_and_cancels(model: Path, adapters: list[Path], gate: Gate) -> None:
    specs = group_specs(load_config(model))
    store = HostStore(specs, max_rank=16, dtype=torch.float32, num_threads=1)
    running = store.load(ONE, adapters[0])
    gate.wait_for_reader()
    waiting = store.load(TWO, adapters[1])
    threading.Timer(0.05, gate.open.set).start()
    store.shutdown()
    assert running.done()
    assert waiting.cancelled()
    assert not any(thread.name.startswith("adapter-reader") for thread in threading.enumerate())


def test_files_may_go_and_change_once_they_are_read(
    store: HostStore, tmp_path: Path, model: Path
) -> None:
    folder = make_adapter(tmp_path, model, target_modules=["o_proj"])
    adapter = store.load(ONE, folder).result(TIMEOUT)
    before = adapter.groups["o_proj"].b.clone()
    edit_tensors(folder, lambda t: {key: tensor * 2 for key, tensor in t.items()})
    os.truncate(folder / "adapter_model.safetensors", 0)
    assert torch.equal(store.get(ONE).groups["o_proj"].b, before)


def test_many_cycles_leave_no_files_open(store: HostStore, adapters: list[Path]) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def cycle(number: int) -> None:
        adapter_id = AdapterId(100 + number)
        store.load(adapter_id, adapters[number % 3]).result(TIMEOUT)
        assert store.release(adapter_id) > 0

    cycle(0)
    before = open_files()
    for number in range(1, 30):
        cycle(number)
    assert open_files() <= before
    assert store.num_bytes == 0


def test_concurrent_loads_and_releases_keep_the_books(
    store: HostStore, adapters: list[Path]
) -> None:
    def work(offset: int) -> Callable[[], None]:
        def run() -> None:
            for i in range(10):
                adapter_id = AdapterId(1000 * offset + i)
                future = store.load(adapter_id, adapters[i % 3])
                if i % 3:
                    wait([future], TIMEOUT)
                store.release(adapter_id)

        return run

    threads = [threading.Thread(target=work(offset)) for offset in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    store.shutdown()
    assert store.num_bytes == 0


# --- what is put out and read again ---


def bounded(model: Path, num_adapters: float, adapter: Path) -> HostStore:
    """Room for so many adapters like this one."""
    specs = group_specs(load_config(model))
    size = read(adapter, model).num_bytes
    max_bytes = int(num_adapters * size)
    return HostStore(specs, max_rank=16, dtype=torch.float32, max_bytes=max_bytes)


@pytest.fixture
def two(model: Path, adapters: list[Path]) -> Iterator[HostStore]:
    """Room for two; three are loaded."""
    store = bounded(model, 2.5, adapters[0])
    for number, adapter in enumerate(adapters, start=1):
        store.load(AdapterId(number), adapter).result(TIMEOUT)
    yield store
    store.shutdown()


def held(store: HostStore) -> list[int]:
    return [number for number in (1, 2, 3) if store.holds(AdapterId(number))]


def test_the_least_recently_used_is_put_out(two: HostStore) -> None:
    assert held(two) == [1, 2, 3]
    two.touch(ONE)
    size = two.get(ONE).num_bytes
    assert two.make_room(set) == [TWO]
    assert held(two) == [1, 3]
    assert two.num_bytes == 2 * size <= (two.max_bytes or 0)
    assert two.make_room(set) == []
    with pytest.raises(KeyError):
        two.get(TWO)
    assert two.release(TWO) == 0
    assert two.release(ONE) == size


def test_readers_leave_the_threads_of_others_alone(model: Path, adapters: list[Path]) -> None:
    """In a process of its own: torch's number of threads is one for all that have none yet."""
    script = """
import sys
from pathlib import Path
import torch
from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from lorakeet.server.engine.process import set_up_threads
model, adapter = map(Path, sys.argv[1:])
set_up_threads(Settings(model=str(model), device="cpu"))
specs = group_specs(load_config(model))
store = HostStore(specs, max_rank=16, dtype=torch.float32)
store.load(AdapterId(1), adapter).result(60)
print(torch.get_num_threads())
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", script, str(model), str(adapters[0])]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(output.stdout) == len(os.sched_getaffinity(0))


def test_a_forked_process_reads_too(model: Path, adapters: list[Path]) -> None:
    """It has none of its parent's threads."""
    script = """
import os
import sys
from pathlib import Path
import torch
from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
model, adapter = map(Path, sys.argv[1:])
specs = group_specs(load_config(model))

def digest():
    store = HostStore(specs, max_rank=16, dtype=torch.float32)
    loads = [store.load(AdapterId(number), adapter) for number in range(40)]  # keep all busy
    return loads[-1].result(30).digest

own = digest()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
print(own if child else digest())
"""
    command = [sys.executable, "-c", script, str(model), str(adapters[0])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=TIMEOUT
    )
    assert len(set(output.stdout.split())) == 1
    assert len(output.stdout.split()) == 2


def test_what_is_kept_or_pinned_stays(two: HostStore, adapters: list[Path]) -> None:
    two.update(ONE, [adapters[0]], pinned=True)
    assert two.make_room(lambda: {TWO}) == [THREE]
    assert two.make_room(lambda: {TWO}, THREE) == []
    assert two.reload(THREE) is None  # no room, and two will go again
    two.update(TWO, [adapters[1]], pinned=True)
    reload = two.reload(THREE)  # what is pinned will not: one more is always possible
    assert reload is not None
    assert reload.result(TIMEOUT) is two.get(THREE)
    assert two.make_room(set) == [THREE]


def test_a_reload_is_the_same_content(two: HostStore, adapters: list[Path], tmp_path: Path) -> None:
    digest = two.get(ONE).digest
    assert two.make_room(set) == [ONE]
    assert two.make_room(set, ONE) == [TWO]
    two.update(ONE, [tmp_path / "missing"], pinned=False)
    for path, error in ((tmp_path / "missing", "no adapter folder"), (adapters[1], "have changed")):
        two.update(ONE, [path], pinned=False)
        future = two.reload(ONE)
        assert future is not None
        with pytest.raises(AdapterError, match=error):
            future.result(TIMEOUT)
        assert held(two) == [3]
    two.update(ONE, [tmp_path / "missing", adapters[1], adapters[0]], pinned=False)
    future = two.reload(ONE)
    assert future is not None
    assert future.result(TIMEOUT).digest == digest
    assert held(two) == [1, 3]


def test_a_load_of_other_content_than_was_asked_for(store: HostStore, adapters: list[Path]) -> None:
    digest = store.load(ONE, adapters[0]).result(TIMEOUT).digest
    assert store.load(TWO, adapters[0], digest).result(TIMEOUT).digest == digest
    with pytest.raises(AdapterError, match="have changed"):
        store.load(THREE, adapters[1], digest).result(TIMEOUT)
    assert store.release(THREE) == 0
    assert store.num_bytes == store.get(ONE).num_bytes


def test_reads_under_way_have_their_room(model: Path, adapters: list[Path], gate: Gate) -> None:
    store = bounded(model, 1.5, adapters[0])
    gate.open.set()
    for number, adapter in enumerate(adapters, start=1):
        store.load(AdapterId(number), adapter).result(TIMEOUT)
    assert store.make_room(set) == [ONE, TWO]
    gate.open.clear()
    assert store.make_room(set, ONE) == [THREE]
    first = store.reload(ONE)
    assert first is not None
    assert store.reload(TWO) is None
    both = store.reload(TWO, beside=(ONE, TWO))  # one needs the other
    assert both is not None
    store.release(ONE)
    gate.open.set()
    with pytest.raises((AdapterError, CancelledError)):
        first.result(TIMEOUT)
    both.result(TIMEOUT)
    assert held(store) == [2]
    assert store.num_bytes == store.get(TWO).num_bytes
    store.shutdown()


@pytest.mark.parametrize("fault", ["NaN", "cut short", "other contents"])
def test_a_read_that_fails_keeps_no_memory(
    store: HostStore,
    adapters: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """Also while its error is kept, and without Python's collector."""
    made: list[weakref.ref[Pages]] = []

    class Watched(Pages):
        def __new__(cls, num_bytes: int) -> "Watched":
            pages = super().__new__(cls, num_bytes)
            made.append(weakref.ref(pages))
            return pages  # type: ignore[return-value]

    monkeypatch.setattr("lorakeet.lora.canonical.Pages", Watched)
    monkeypatch.setattr("lorakeet.lora.tensor_file.Pages", Watched)
    folder = tmp_path / "bad"
    shutil.copytree(adapters[0], folder)
    file = folder / "adapter_model.safetensors"
    if fault == "NaN":
        file.write_bytes(file.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")
    elif fault == "cut short":
        file.write_bytes(file.read_bytes()[:-4])
    gc.collect()
    gc.disable()
    try:
        future = store.load(ONE, folder, "0" * 64 if fault == "other contents" else None)
        error = future.exception(TIMEOUT)
        assert isinstance(error, AdapterError)
        assert made
        wait_until(lambda: not any(one() for one in made), "all is freed")
    finally:
        gc.enable()
