"""Adapters that come, go and change under traffic, in a real server: nobody gets wrong numbers,
nobody waits for ever, and nothing is left of what has gone."""

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorakeet.server.metrics import OTHER
from lorakeet.server.tokens import Tokenizer
from support.adapters import edit_config, make_adapter
from support.models import TOKENIZER_SIZE
from support.parity import ONLY_TEXT, check, collected, same_choice
from support.servers import ServerProcess, serve, wait_until

LONG = {"max_tokens": 5000}  # far longer than any of these tests
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture
def spare(root: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder of this test alone from which adapters may be loaded."""
    folder = root / "store" / tmp_path.name
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def background(*works: Callable[[], None]) -> Iterator[None]:
    """Each is called again and again, in a thread of its own; an exception fails the test."""
    stop = threading.Event()

    def repeat(work: Callable[[], None]) -> None:
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(len(works)) as threads:
        futures = [threads.submit(repeat, work) for work in works]
        try:
            yield
        finally:
            stop.set()
        for future in futures:
            future.result()


# --- one name, many versions (B02) ---


def test_a_name_always_means_its_newest_version(
    live: ServerProcess, model: Path, adapters: dict[str, Path], spare: Path, tokenizer: Tokenizer
) -> None:
    def asks_for(oracle: Path) -> None:
        """Cold the first time, from the cache the second time, the same both times."""
        for cached in (False, True):
            answer = live.complete("x", PROMPT, max_tokens=24, logit_bias=ONLY_TEXT)
            result = collected(answer["choices"][0], PROMPT, tokenizer)
            check(model, oracle, PROMPT, result, TOKENIZER_SIZE)
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached

    def copy(name: str, source: Path) -> Path:
        return shutil.copytree(source, spare / name)

    one, two = adapters["red"], adapters["green"]
    louder = edit_config(copy("louder", one), lora_alpha=32)
    rewritten = copy("rewritten", one)

    assert live.load("x", one).status_code == 200
    asks_for(one)
    assert live.load("x", two, load_inplace=True).status_code == 200
    asks_for(two)
    assert live.unload("x").status_code == 200
    assert live.load("x", louder).status_code == 200
    asks_for(louder)
    shutil.copy(two / "adapter_model.safetensors", rewritten)
    assert live.load("x", rewritten, load_inplace=True).status_code == 200
    live.wait_idle()  # the first `two` is gone, and its cache with it
    asks_for(rewritten)
    make_adapter(rewritten, model, seed=77)  # the same path, other content
    asks_still = live.complete("x", PROMPT, max_tokens=24, logit_bias=ONLY_TEXT)
    check(model, two, PROMPT, collected(asks_still["choices"][0], PROMPT, tokenizer), 300)
    assert live.load("x", rewritten, load_inplace=True).status_code == 200
    asks_for(rewritten)
    assert live.load("x", one, load_inplace=True).status_code == 200
    asks_for(one)


def test_a_running_answer_ends_on_the_version_it_began_with(
    live: ServerProcess, adapters: dict[str, Path]
) -> None:
    live.load("x", adapters["red"])
    quiet = live.complete("x", PROMPT, max_tokens=400)["choices"][0]["text"]
    with live.stream("x", PROMPT, max_tokens=400) as events:
        text = "".join(event["choices"][0]["text"] for event in events.take(5))
        assert live.load("x", adapters["green"], load_inplace=True).status_code == 200
        other = live.complete("x", PROMPT, max_tokens=400)["choices"][0]["text"]
        text += "".join(event["choices"][0]["text"] for event in events)
    assert events.is_done
    assert text == quiet != other


# --- neighbours (B05, B06) ---


def test_running_adapters_keep_their_slots_while_others_come_and_go(
    live: ServerProcess, adapters: dict[str, Path], tokenizer: Tokenizer
) -> None:
    def ask(name: str) -> dict[str, Any]:
        answer = live.complete(name, PROMPT, max_tokens=500, logit_bias=ONLY_TEXT)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def come_and_go(name: str) -> None:
        assert live.load(name, adapters[name]).status_code == 200
        live.complete(name, PROMPT, max_tokens=1)
        assert live.unload(name).status_code == 200

    live.load("red", adapters["red"])
    live.load("green", adapters["green"])
    quiet = {name: ask(name) for name in ("red", "green")}
    with (
        background(lambda: come_and_go("blue"), lambda: come_and_go("grey")),
        ThreadPoolExecutor(2) as threads,
    ):
        busy = dict(zip(quiet, threads.map(ask, quiet), strict=True))
    for name, choice in quiet.items():
        assert same_choice(busy[name], choice)
        # what was stored for others on the way is right too: as computed anew
        own = PROMPT + collected(busy[name], PROMPT, tokenizer).token_ids
        stored, anew = (live.complete(name, own, **extra) for extra in ({}, {"prompt_logprobs": 0}))
        assert stored["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
        assert same_choice(stored["choices"][0], anew["choices"][0])


def test_the_base_is_the_same_whoever_else_runs(
    live: ServerProcess, model: Path, adapters: dict[str, Path], tokenizer: Tokenizer
) -> None:
    prompts = [list(range(start, start + 12)) for start in range(20, 220, 10)]
    fields = {"max_tokens": 8, "logprobs": 20, "logit_bias": ONLY_TEXT}
    quiet = [live.complete("base", prompt, **fields)["choices"][0] for prompt in prompts]
    for prompt, choice in zip(prompts, quiet, strict=True):
        check(model, None, prompt, collected(choice, prompt, tokenizer), TOKENIZER_SIZE)
    with ExitStack() as streams:
        for name in ("red", "green"):
            live.load(name, adapters[name])
            events = streams.enter_context(live.stream(name, "the quick", **LONG))
            assert len(events.take(1)) == 1
        busy = [live.complete("base", prompt, **fields)["choices"][0] for prompt in prompts]
        live.wait_report()
        assert live.num_running == 2  # all the time
    for one, other in zip(quiet, busy, strict=True):
        assert one["text"] == other["text"]
        tops = zip(one["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True)
        for top, other_top in tops:
            assert other_top == pytest.approx(top, abs=1e-4)


# --- unloading (C02, C03, C11) ---


def test_many_cycles_leave_nothing(
    live: ServerProcess, adapters: dict[str, Path], spare: Path
) -> None:
    broken = shutil.copytree(adapters["red"], spare / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    sizes, series = [], []
    for cycle in range(60):
        copy = shutil.copytree(adapters["red"], spare / f"copy-{cycle}")
        assert live.load(f"cycle-{cycle}", copy).status_code == 200
        shutil.rmtree(copy)  # nobody may need it any more
        if cycle % 3:
            live.complete(f"cycle-{cycle}", PROMPT, max_tokens=2)
        assert live.unload(f"cycle-{cycle}").status_code == 200
        assert live.load(f"broken-{cycle}", broken).status_code == 400
        if cycle in (19, 59):
            live.wait_idle()
            sizes.append(sizes_of(live))
            series.append(series_of(live))
    before, after = sizes
    for kind in ("files", "threads"):  # pools may still grow a little, but 40 cycles came between
        assert after[kind] < before[kind] + 10
    assert series[1] == series[0]
    assert after["memory"] - before["memory"] < 5 * 2**20
    assert live.loaded() == []
    for name in ("red", "green"):
        assert live.load(name, adapters[name]).status_code == 200
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: live.complete(name, PROMPT), ("red", "green")))


def sizes_of(server: ServerProcess) -> dict[str, int]:
    processes = server.processes()
    return {
        "files": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
        "memory": sum(process.memory_info().rss for process in processes),
    }


def series_of(server: ServerProcess) -> set[str]:
    """Names and labels of all metrics, but for the one of all adapters that are gone."""
    lines = server.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if f'adapter="{OTHER}"' not in line}


ENDINGS: dict[str, dict[str, Any]] = {
    "max_tokens": {},
    "stop string": {"stop": ["e", "a", " "], "max_tokens": 200},
    "eos": {"ignore_eos": False, "max_tokens": 200},
    "many choices": {"n": 16, "temperature": 1},
    "many prompts": {"prompt": ["the", "quick", "brown"]},
    "scores only": {"max_tokens": 0, "echo": True},
    "refused": {"max_tokens": 100_000},
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_unload_after_any_ending(
    live: ServerProcess, adapters: dict[str, Path], ending: str
) -> None:
    live.load("red", adapters["red"])
    body = {"model": "red", "prompt": "the quick", "max_tokens": 8, **ENDINGS[ending]}
    response = live.http.post("/v1/completions", json=body)
    assert response.status_code == (400 if ending == "refused" else 200)
    assert live.unload("red").status_code == 200
    live.wait_unloaded()
    assert live.complete("base", "the quick")["usage"]["completion_tokens"] == 8


def test_unload_waits_for_all_choices_of_a_request(
    live: ServerProcess, adapters: dict[str, Path]
) -> None:
    live.load("red", adapters["red"])
    with live.stream("red", "the quick", n=16, temperature=1, **LONG) as events:
        assert len(events.take(20)) == 20
        assert live.unload("red").status_code == 200
        body = {"model": "red", "prompt": "the quick"}
        assert live.http.post("/v1/completions", json=body).status_code == 404
        assert live.unload("red").status_code == 404
        assert len(events.take(20)) == 20
        wait_until(lambda: live.metric("lorakeet:lora_rows_used") > 0, "a report of the engine")
    live.wait_unloaded()


# --- what is broken (C04) ---


def test_a_broken_adapter_hurts_only_its_own_requests(
    live: ServerProcess, adapters: dict[str, Path], root: Path, spare: Path
) -> None:
    for folder in (spare / "broken", root / "broken"):
        shutil.copytree(adapters["red"], folder)
        (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    try:
        with live.stream("base", "the quick", **LONG) as events:
            response = live.load("x", spare / "broken")
            assert (response.status_code, live.loaded()) == (400, [])
            lazy = {"model": "broken", "prompt": "the quick", "stream": True}
            for _ in range(2):
                response = live.http.post("/v1/completions", json=lazy)
                assert response.status_code == 400
                assert "adapter_model.safetensors" in response.json()["error"]["message"]
            assert live.load("x", adapters["red"]).status_code == 200
            assert len(events.take(5)) == 5
    finally:
        shutil.rmtree(root / "broken")


def test_an_adapter_whose_files_are_gone_is_served_from_memory(
    live: ServerProcess, adapters: dict[str, Path], spare: Path
) -> None:
    live.load("x", shutil.copytree(adapters["red"], spare / "x"))
    shutil.rmtree(spare / "x")
    expected = live.complete("x", PROMPT)["choices"][0]
    for name in ("green", "blue", "grey"):
        live.load(name, adapters[name])
        live.complete(name, PROMPT)  # the pool holds two: x is put out
    wait_until(lambda: live.http.get("/v1/adapters/x").json()["tier"] == "host", "x is put out")
    assert same_choice(live.complete("x", PROMPT)["choices"][0], expected)


# --- races (C06) ---


def test_parallel_loads_unloads_and_requests_on_one_name(
    live: ServerProcess, model: Path, adapters: dict[str, Path], tokenizer: Tokenizer
) -> None:
    paths = [adapters["red"], adapters["green"]]
    body = {"model": "x", "prompt": PROMPT, "max_tokens": 4}
    operations: list[Callable[[], httpx.Response]] = [
        lambda: live.load("x", paths[0]),
        lambda: live.load("x", paths[1]),
        lambda: live.load("x", paths[1], load_inplace=True),
        lambda: live.unload("x"),
        lambda: live.http.get("/v1/models"),
        lambda: live.http.post("/v1/completions", json=body),
    ]
    with ThreadPoolExecutor(18) as threads:
        futures = [threads.submit(operations[i % len(operations)]) for i in range(90)]
        statuses = {future.result().status_code for future in futures}
    assert statuses <= {200, 400, 404}
    live.load("x", paths[0])  # refused if it is there
    listed = live.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["base", "x"]
    answer = live.complete("x", PROMPT, logit_bias=ONLY_TEXT)["choices"][0]
    check(model, Path(listed[1]["root"]), PROMPT, collected(answer, PROMPT, tokenizer), 300)


# --- more adapters than places (C09) ---


def test_nobody_starves_and_nobody_blocks_others(
    live: ServerProcess, model: Path, adapters: dict[str, Path], tokenizer: Tokenizer
) -> None:
    for name, path in adapters.items():
        live.load(name, path)
    with ExitStack() as streams:
        held = [streams.enter_context(live.stream(n, PROMPT, **LONG)) for n in ("red", "green")]
        assert all(len(events.take(3)) == 3 for events in held)
        with live.connection("blue", "the quick", **LONG):  # both places are taken: it waits
            wait_until(lambda: live.num_waiting > 0, "a request without a place")
            assert live.complete("base", PROMPT)["choices"][0]["finish_reason"] == "length"
        for name in ("blue", "grey"):  # they get their turn, while the others want theirs
            answer = live.complete(name, PROMPT, logit_bias=ONLY_TEXT)["choices"][0]
            result = collected(answer, PROMPT, tokenizer)
            check(model, adapters[name], PROMPT, result, TOKENIZER_SIZE)
        assert all(len(events.take(3)) == 3 for events in held)
        assert not any(events.is_done for events in held)


# --- what is shared, what is freed, what survives ---


def test_two_names_of_the_same_bytes_share_one_slot(
    live: ServerProcess, adapters: dict[str, Path], spare: Path
) -> None:
    copy = shutil.copytree(adapters["red"], spare / "copy")
    live.load("one", adapters["red"])
    live.load("two", copy)
    texts = [live.complete(name, PROMPT)["choices"][0]["text"] for name in ("one", "two")]
    assert texts[0] == texts[1]
    live.wait_report()
    assert live.metric("lorakeet:lora_rows_used") == 8
    entry = live.http.get("/v1/adapters/two").json()
    assert entry["gpu_bytes"] > 0
    assert live.unload("one").json()["freed_bytes"] == 0
    freed = live.unload("two").json()
    assert freed["freed"]["host"] == entry["host_bytes"] == entry["bytes"]
    assert freed["freed"]["pool"] == entry["gpu_bytes"]
    assert freed["freed"]["cache"] > 0
    assert freed["freeing"] is False


def test_a_swap_of_what_is_in_use_is_freed_later(
    live: ServerProcess, adapters: dict[str, Path]
) -> None:
    live.load("x", adapters["red"])
    with live.stream("x", PROMPT, **LONG) as events:
        assert len(events.take(3)) == 3
        swapped = live.load("x", adapters["green"], load_inplace=True).json()
        assert (swapped["changed"], swapped["freeing"], swapped["freed_bytes"]) == (True, True, 0)
        again = live.load("x", adapters["green"], load_inplace=True).json()
        assert (again["changed"], again["freeing"], again["digest"]) == (
            False,
            False,
            swapped["digest"],
        )
        assert len(events.take(3)) == 3
    wait_until(lambda: live.metric("lorakeet:lora_host_bytes") == again["bytes"], "one is held")


def test_names_and_uploads_survive_a_kill(
    model: Path, root: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    uploads = tmp_path / "uploads"
    options = "--device cpu --served-model-name base --max-loras 2 --max-lora-rank 8".split()
    options += ["--adapter-dir", str(root), "--state-dir", str(tmp_path / "state")]
    options += ["--adapter-upload-dir", str(uploads)]
    files = {
        name: (adapters["red"] / name).read_bytes()
        for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    alias = {"alias": "prod", "targets": [{"adapter": "red"}]}

    def texts(server: ServerProcess) -> list[str]:
        names = ("red", "green", "prod")
        return [server.complete(name, PROMPT)["choices"][0]["text"] for name in names]

    first = ServerProcess(tmp_path, model, *options)
    try:
        first.wait_ready()
        made = first.http.post("/v1/adapters", data={"name": "red"}, files=files)
        assert made.status_code == 200, made.text
        assert first.load("green", adapters["green"]).status_code == 200
        assert first.http.post("/v1/aliases", json=alias).status_code == 200
        expected = texts(first)
        request = first.http.build_request(
            "POST",
            "/v1/adapters",
            data={"name": "half"},
            files={**files, "README.md": b"x" * 2**21},  # some of it is on the disk soon
        )
        content = request.read()
        head = f"POST /v1/adapters HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        head += f"content-type: {request.headers['content-type']}\r\n\r\n"
        url = httpx.URL(first.url)
        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall(head.encode() + content[:-100])
            wait_until(lambda: len(list(uploads.glob("*upload-*"))) == 2, "half an upload")
            first.kill_all()
    finally:
        first.kill_all()
    with serve(tmp_path, model, *options) as second:
        assert second.loaded() == []
        (kept,) = uploads.glob("*upload-*")
        assert str(kept) == made.json()["path"]
        assert texts(second) == expected
        assert second.http.get("/v1/adapters/half").status_code == 404
