"""The life of adapters over the wire: loading, swapping, unloading, races, paths, lazy folders."""

import asyncio
import concurrent.futures
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorakeet.server import adapter_roots, registry
from support.toy_server import ToyServer, adapter_folder, toy_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def toy(toy_model: Path, root: Path) -> Iterator[ToyServer]:
    with toy_server(toy_model, adapter_dirs=(root,)) as server:
        yield server


@pytest.fixture
def source(root: Path) -> Path:
    """A folder of adapters that are not served by themselves: they lie two levels deep."""
    return root / "sources"


def load(toy: ToyServer, name: str, path: Path | str, **extra: Any) -> httpx.Response:
    return toy.http.post(LOAD, json={"lora_name": name, "lora_path": str(path), **extra})


def unload(toy: ToyServer, name: str) -> httpx.Response:
    return toy.http.post(UNLOAD, json={"lora_name": name})


def shift(toy: ToyServer, model: str) -> int:
    """The k of the adapter that answers; -1 if the model is unknown."""
    body = {"model": model, "prompt": [40], "max_tokens": 1, "logprobs": 0}
    response = toy.http.post(COMPLETIONS, json=body)
    if response.status_code == 404:
        return -1
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["text"]
    return toy.server.tokenizer.encode(text, add_special_tokens=False)[0] - 40


def names(toy: ToyServer) -> list[str]:
    listed = [card["id"] for card in toy.http.get("/v1/models").json()["data"]]
    adapters = [entry["id"] for entry in toy.http.get("/v1/adapters").json()["data"]]
    assert listed == ["base", *adapters]
    return adapters


# --- load and unload ------------------------------------------------------------------------------


def test_load_use_unload(toy: ToyServer, source: Path) -> None:
    response = load(toy, "x", adapter_folder(source / "x", 3), pinned=True)
    assert response.status_code == 200
    entry = toy.http.get("/v1/adapters/x").json()
    outcome = {"changed", "freed", "freed_bytes", "freeing"}
    assert response.json().keys() - entry.keys() == outcome
    assert entry.items() <= response.json().items()
    assert (entry["state"], entry["tier"], entry["pinned"]) == ("ready", "host", True)
    assert (entry["rank"], entry["modules"], entry["bytes"]) == (8, ["q_proj"], 1024)
    assert shift(toy, "x") == 3
    assert unload(toy, "x").status_code == 200
    assert shift(toy, "x") == -1
    assert unload(toy, "x").status_code == 404
    assert toy.http.get("/v1/adapters/x").status_code == 404
    assert not toy.engine.adapters


def test_the_same_name_again(toy: ToyServer, source: Path) -> None:
    """C01: refused before anything below has changed."""
    first = adapter_folder(source / "a", 3)
    assert load(toy, "x", first).status_code == 200
    for path in (first, adapter_folder(source / "b", 4)):
        response = load(toy, "x", path)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "lora_name"
    assert toy.engine.num_reads == 1
    assert shift(toy, "x") == 3


def test_two_names_on_one_path(toy: ToyServer, source: Path) -> None:
    path = adapter_folder(source / "a", 3)
    assert load(toy, "x", path).status_code == load(toy, "y", path).status_code == 200
    assert unload(toy, "x").status_code == 200
    assert (shift(toy, "x"), shift(toy, "y")) == (-1, 3)


def test_adapters_are_a_resource(toy: ToyServer, source: Path) -> None:
    body = {"lora_name": "org/x", "lora_path": str(adapter_folder(source / "a", 3))}
    created = toy.http.post("/v1/adapters", json=body)
    assert created.status_code == 200
    assert toy.http.get("/v1/adapters/org/x").json().items() <= created.json().items()
    assert toy.http.post("/v1/adapters", json=body).status_code == 400
    assert shift(toy, "org/x") == 3
    assert toy.http.get("/v1/models/org/x").json()["id"] == "org/x"
    assert toy.http.delete("/v1/adapters/org/x").json()["deleted"] is True
    assert toy.http.delete("/v1/adapters/org/x").status_code == 404


def open_stream(toy: ToyServer, model: str) -> Iterator[str]:
    """Lines of a long stream; the first one has come when this returns."""
    body = {"model": model, "prompt": [40], "max_tokens": 30, "stream": True, "logprobs": 0}

    def lines() -> Iterator[str]:
        with toy.http.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            yield from response.iter_lines()

    iterator = lines()
    next(iterator)
    return iterator


@pytest.mark.parametrize("by", ["unload", "swap"])
def test_running_requests_end_on_their_version(toy: ToyServer, source: Path, by: str) -> None:
    load(toy, "x", adapter_folder(source / "a", 3))
    toy.engine.step_seconds = 0.02
    stream = open_stream(toy, "x")
    if by == "unload":
        assert unload(toy, "x").status_code == 200
        assert shift(toy, "x") == -1
    else:
        new = adapter_folder(source / "b", 7)
        assert load(toy, "x", new, load_inplace=True).status_code == 200
        assert shift(toy, "x") == 7
    expected = toy.server.tokenizer.decode([43])
    texts = [line for line in stream if '"text"' in line and '"text":""' not in line]
    assert len(texts) >= 28
    assert all(f'"text":"{expected}"' in line for line in texts)
    toy.wait_idle()
    assert len(toy.engine.adapters) == (0 if by == "unload" else 1)


def test_swap_of_a_bad_adapter_leaves_the_old_one(toy: ToyServer, source: Path) -> None:
    load(toy, "x", adapter_folder(source / "a", 3))
    bad = adapter_folder(source / "b", bad="rank 99 is too large")
    response = load(toy, "x", bad, load_inplace=True)
    assert response.status_code == 400
    assert "rank 99" in response.json()["error"]["message"]
    assert shift(toy, "x") == 3
    assert load(toy, "new", adapter_folder(source / "c", 5), load_inplace=True).status_code == 200


def test_a_failed_load_leaves_nothing(toy: ToyServer, source: Path) -> None:
    bad = adapter_folder(source / "x", bad="no")
    assert load(toy, "x", bad).status_code == 400
    empty = source / "empty"
    empty.mkdir()
    assert load(toy, "x", empty).status_code == 404
    assert load(toy, "x", source / "missing").status_code == 404
    (source / "x" / "tokenizer_config.json").write_text("{")
    assert load(toy, "x", source / "x").status_code == 400
    assert names(toy) == []
    assert not toy.engine.adapters
    assert load(toy, "x", adapter_folder(source / "good", 3)).status_code == 200
    assert shift(toy, "x") == 3


@pytest.mark.parametrize(
    "name", ["", "base", "base:x", " x", "x y", "x\n", "é", "-x", "x" * 256, "../x", "x\x00", "{x}"]
)
def test_names_that_are_refused(toy: ToyServer, source: Path, name: str) -> None:
    response = load(toy, name, adapter_folder(source / "a"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_name"
    assert names(toy) == []


def test_exact_names_win_before_the_colon(toy: ToyServer, source: Path) -> None:
    load(toy, "x", adapter_folder(source / "x", 3))
    load(toy, "a:x", adapter_folder(source / "ax", 4))
    assert shift(toy, "a:x") == 4
    assert shift(toy, "base:a:x") == 4
    assert shift(toy, "base:x") == 3


# --- versions by content --------------------------------------------------------------------------


def test_identical_bytes_are_a_no_op(toy: ToyServer, source: Path) -> None:
    first = load(toy, "x", adapter_folder(source / "a", 3)).json()
    assert first["changed"] is True
    copy = adapter_folder(source / "copy", 3)
    again = load(toy, "x", copy, load_inplace=True).json()
    assert (again["changed"], again["digest"]) == (False, first["digest"])
    assert (again["created"], again["freed_bytes"], again["freeing"]) == (
        first["created"],
        0,
        False,
    )
    assert again["path"] == str(copy)  # the newest place of the bytes is where they are read again
    assert list(toy.engine.paths.values()) == [[str(copy)]]
    assert load(toy, "x", copy, load_inplace=True, pinned=True).json()["pinned"] is True
    assert len(toy.engine.pinned) == 1
    assert load(toy, "x", copy, load_inplace=True).json()["pinned"] is False
    assert not toy.engine.pinned
    (copy / "chat_template.jinja").write_text("other")  # the same weights, but another adapter
    assert load(toy, "x", copy, load_inplace=True).json()["changed"] is True
    assert len(toy.engine.adapters) == 1


def test_what_a_swap_and_an_unload_free(toy: ToyServer, source: Path) -> None:
    load(toy, "x", adapter_folder(source / "a", 3))
    swapped = load(toy, "x", adapter_folder(source / "b", 4), load_inplace=True).json()
    expected = {"host": 1024, "pool": 2 * 100, "cache": 3 * 7}
    for answer in (swapped, unload(toy, "x").json()):
        assert answer["freed"] == expected
        assert answer["freed_bytes"] == sum(expected.values())
        assert answer["freeing"] is False


def test_what_is_in_use_is_freed_later(toy: ToyServer, source: Path) -> None:
    load(toy, "x", adapter_folder(source / "a", 3))
    toy.engine.step_seconds = 0.02
    stream = open_stream(toy, "x")
    answer = unload(toy, "x").json()
    assert (answer["freed_bytes"], answer["freeing"]) == (0, True)
    assert len(toy.engine.adapters) == 1
    assert len(list(stream)) > 20
    toy.wait_idle()
    assert not toy.engine.adapters


def test_two_names_of_the_same_bytes_share(toy: ToyServer, source: Path) -> None:
    one = load(toy, "x", adapter_folder(source / "a", 3)).json()
    two = load(toy, "y", adapter_folder(source / "b", 3), pinned=True).json()
    assert one["digest"] == two["digest"]
    assert len(toy.engine.adapters) == 1
    assert len(toy.engine.pinned) == 1
    assert list(toy.engine.paths.values()) == [[one["path"], two["path"]]]
    assert unload(toy, "x").json()["freed_bytes"] == 0
    toy.call(settle(toy))
    assert list(toy.engine.paths.values()) == [[two["path"]]]
    assert (shift(toy, "x"), shift(toy, "y")) == (-1, 3)
    assert unload(toy, "y").json()["freed_bytes"] > 0
    assert not toy.engine.adapters
    assert not toy.engine.pinned


def test_a_pin_that_is_refused_changes_nothing(toy: ToyServer, source: Path) -> None:
    load(toy, "x", adapter_folder(source / "a", 3), pinned=True)
    load(toy, "y", adapter_folder(source / "b", 4))
    for name, k, inplace in (("z", 5, False), ("y", 4, True), ("y", 5, True), ("z", 4, False)):
        folder = adapter_folder(source / f"c{k}", k)
        response = load(toy, name, folder, load_inplace=inplace, pinned=True)
        assert response.status_code == 400
        assert "pinning" in response.json()["error"]["message"]
    assert names(toy) == ["x", "y"]
    assert (shift(toy, "x"), shift(toy, "y")) == (3, 4)
    assert toy.http.get("/v1/adapters/y").json()["pinned"] is False
    assert len(toy.engine.adapters) == 2
    toy.call(settle(toy))
    assert unload(toy, "x").status_code == unload(toy, "y").status_code == 200
    assert not toy.engine.adapters


async def settle(toy: ToyServer) -> None:
    """Until what the registry does in the background is done."""
    while tasks := toy.server.registry._contents._tasks:
        await asyncio.wait(tasks)


# --- races (C06) ----------------------------------------------------------------------------------


def test_parallel_loads_unloads_and_requests(toy: ToyServer, source: Path) -> None:
    paths = {k: adapter_folder(source / str(k), k) for k in (3, 7)}

    def work(number: int) -> int:
        body: dict[str, Any]
        with httpx.Client(base_url=toy.url, timeout=20) as client:
            match number % 5:
                case 0 | 1:
                    path = str(paths[3 if number % 2 else 7])
                    body = {"lora_name": "x", "lora_path": path}
                    response = client.post(LOAD, json=body)
                case 2:
                    response = client.post(UNLOAD, json={"lora_name": "x"})
                case 3:
                    response = client.get("/v1/adapters")
                    assert len(response.json()["data"]) <= 1
                case _:
                    body = {"model": "x", "prompt": [40], "max_tokens": 3}
                    response = client.post(COMPLETIONS, json=body)
            return response.status_code

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(work, range(50)))
    assert set(statuses) <= {200, 400, 404}
    toy.wait_idle()
    left = names(toy)
    assert left in ([], ["x"])
    assert len(toy.engine.adapters) == len(left)
    if left:
        path = toy.http.get("/v1/adapters/x").json()["path"]
        assert shift(toy, "x") == int(Path(path).name)


def test_exactly_one_of_many_loads_wins(toy: ToyServer, source: Path) -> None:
    paths = [adapter_folder(source / str(k), k) for k in range(3, 11)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = sorted(pool.map(lambda path: load(toy, "x", path).status_code, paths))
        assert statuses == [200] + [400] * 7
        statuses = sorted(pool.map(lambda _: unload(toy, "x").status_code, range(8)))
        assert statuses == [200] + [404] * 7
    assert not toy.engine.adapters


def test_the_number_of_names_is_bounded(
    toy: ToyServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_ADAPTERS", 2)
    path = str(adapter_folder(source, 3))
    assert [load(toy, name, path).status_code for name in ("a", "b")] == [200, 200]
    refused = load(toy, "c", path)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "too_many_adapters"
    assert load(toy, "b", path, load_inplace=True).status_code == 200
    assert unload(toy, "a").status_code == 200
    assert load(toy, "c", path).status_code == 200


def test_no_locks_are_kept(toy: ToyServer, source: Path) -> None:
    path = adapter_folder(source / "a")
    for number in range(20):
        load(toy, f"x{number}", path)
        unload(toy, f"x{number}")
    registry = toy.server.registry
    assert not registry._locks
    assert not registry._leases
    assert not registry.catalog.hidden
    assert not registry._contents._contents


# --- every ending gives the lease back (C03) ------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 3},
        {"max_tokens": 50, "stop": "."},
        {"max_tokens": 3, "n": 16},
        {"max_tokens": 3, "prompt": [[40], [41], [42]], "n": 3},
        {"max_tokens": 10**6},
        {"max_tokens": 9, "prompt": [40, 310]},
        {"max_tokens": 9, "prompt": [40, 310], "n": 4},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unload_after_any_ending(
    toy: ToyServer, source: Path, body: dict[str, Any], stream: bool
) -> None:
    load(toy, "x", adapter_folder(source / "a", 3))
    toy.http.post(COMPLETIONS, json={"model": "x", "prompt": [40], **body, "stream": stream})
    toy.wait_idle()
    assert unload(toy, "x").status_code == 200
    assert not toy.engine.adapters
    assert shift(toy, "base") == 0


# --- paths (C13) ----------------------------------------------------------------------------------


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["message"], error["code"]


def test_paths_outside_say_nothing_of_what_is_there(
    toy: ToyServer, root: Path, tmp_path: Path
) -> None:
    adapter_folder(tmp_path / "outside", 3)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    (tmp_path / "root-not").mkdir()
    expected = error_of(load(toy, "x", tmp_path / "missing"))
    assert expected[0] == 403
    for path in (
        tmp_path / "outside",
        tmp_path / "root-not",
        root / ".." / "outside",
        root / "link",
        "../../etc",
        "/etc/passwd",
        "/proc/self",
        "/dev/zero",
        "/",
        "",
        "org/name",
        "http://127.0.0.1:1/x",
        "\\\\host\\share",
        "a\x00b",
        "x" * 10_000,
    ):
        assert error_of(load(toy, "x", path)) == expected, path
    for path in (root / "loop", root / ("x" * 10_000), root / "a\x00b"):
        assert load(toy, "x", path).status_code in (400, 403, 404)


def test_links_among_the_files_must_not_lead_outside(
    toy: ToyServer, source: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("TOP-SECRET")
    folder = adapter_folder(source / "a", 3)
    (folder / "chat_template.jinja").symlink_to(secret)
    response = load(toy, "x", folder)
    assert response.status_code == 403
    assert "SECRET" not in response.text


def test_files_and_fifos_are_no_adapters(toy: ToyServer, root: Path) -> None:
    (root / "file").write_text("x")
    os.mkfifo(root / "fifo")
    assert load(toy, "x", root / "file").status_code == 400
    assert load(toy, "x", root / "fifo").status_code == 400
    folder = adapter_folder(root / "deep" / "x")
    os.mkfifo(folder / "chat_template.jinja")
    assert load(toy, "x", folder).status_code == 400


def test_without_roots_nothing_can_be_loaded(toy_model: Path, tmp_path: Path) -> None:
    with toy_server(toy_model) as toy:
        for path in (adapter_folder(tmp_path / "x"), tmp_path / "missing"):
            response = load(toy, "x", path)
            assert response.status_code == 403
            assert "--adapter-dir" in response.json()["error"]["message"]


# --- lazy folders ---------------------------------------------------------------------------------


def test_folders_of_a_root_are_loaded_at_their_first_request(toy: ToyServer, root: Path) -> None:
    adapter_folder(root / "lazy", 6)
    (root / "no-adapter").mkdir()
    assert names(toy) == ["lazy"]
    entry = toy.http.get("/v1/adapters/lazy").json()
    assert (entry["tier"], entry["rank"], entry["path"]) == ("disk", None, str(root / "lazy"))
    assert entry["state"] == "unloaded"
    assert not toy.engine.adapters
    assert shift(toy, "lazy") == shift(toy, "base:lazy") == 6
    assert toy.engine.num_reads == 1
    assert toy.http.get("/v1/adapters/lazy").json()["tier"] == "host"


def test_waiters_share_one_load_and_others_run_on(toy: ToyServer, root: Path) -> None:
    adapter_folder(root / "lazy", 6)
    toy.engine.loads_open = False
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(shift, toy, "lazy") for _ in range(8)]
        assert shift(toy, "base") == 0
        assert toy.http.get("/health").status_code == 200
        assert not any(future.done() for future in waiting)
        assert toy.http.get("/v1/adapters/lazy").json()["state"] == "loading"
        toy.engine.loads_open = True
        assert {future.result() for future in waiting} == {6}
    assert toy.engine.num_reads == 1


def test_a_waiter_that_goes_leaves_the_load_alone(toy: ToyServer, root: Path) -> None:
    adapter_folder(root / "lazy", 6)
    toy.engine.loads_open = False
    body: dict[str, Any] = {"model": "lazy", "prompt": [40], "max_tokens": 1}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(toy.url + COMPLETIONS, json=body, timeout=0.3)
    toy.wait_idle()
    toy.engine.loads_open = True
    assert shift(toy, "lazy") == 6
    assert toy.engine.num_reads == 1


def test_an_unloaded_folder_stays_away_until_it_is_loaded_again(toy: ToyServer, root: Path) -> None:
    adapter_folder(root / "lazy", 6)
    assert shift(toy, "lazy") == 6
    assert unload(toy, "lazy").status_code == 200
    assert shift(toy, "lazy") == -1
    assert names(toy) == []
    assert unload(toy, "lazy").status_code == 404
    assert load(toy, "lazy", root / "lazy").status_code == 200
    assert shift(toy, "lazy") == 6
    adapter_folder(root / "never-used", 2)
    assert unload(toy, "never-used").status_code == 200
    assert shift(toy, "never-used") == -1


def test_why_a_first_request_failed_is_shown_until_one_succeeds(toy: ToyServer, root: Path) -> None:
    adapter_folder(root / "lazy", bad="q_proj has the wrong shape")
    assert toy.http.get("/v1/adapters/lazy").json()["error"] is None
    body = {"model": "lazy", "prompt": [40], "max_tokens": 1}
    assert toy.http.post(COMPLETIONS, json=body).status_code == 400
    entry = toy.http.get("/v1/adapters/lazy").json()
    assert (entry["state"], entry["tier"]) == ("failed", "disk")
    assert "q_proj" in entry["error"]
    adapter_folder(root / "lazy", 6)
    assert shift(toy, "lazy") == 6
    entry = toy.http.get("/v1/adapters/lazy").json()
    assert (entry["state"], entry["error"]) == ("ready", None)


def test_only_folders_that_changed_are_looked_into(
    toy: ToyServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of thousands of adapters costs one look at each name."""
    for number in range(50):
        adapter_folder(root / f"f{number}", number)
        os.utime(root / f"f{number}", (1e9, 1e9))
    (root / "none").mkdir()
    os.utime(root / "none", (1e9, 1e9))
    looks: list[str] = []
    is_adapter = adapter_roots._is_adapter

    def count(folder: Path) -> bool:
        looks.append(folder.name)
        return is_adapter(folder)

    monkeypatch.setattr(adapter_roots, "_is_adapter", count)
    assert len(names(toy)) == 50
    looks.clear()
    assert len(names(toy)) == 50
    assert looks == []
    adapter_folder(root / "none", 1)
    assert len(names(toy)) == 51
    assert set(looks) == {"none"}
    shutil.rmtree(root / "f7")
    assert len(names(toy)) == 50


def test_a_bad_folder_fails_only_its_own_requests(toy: ToyServer, root: Path) -> None:
    adapter_folder(root / "lazy", bad="tensor q_proj has the wrong shape")
    body = {"model": "lazy", "prompt": [40], "max_tokens": 1, "stream": True}
    for _ in range(2):
        response = toy.http.post(COMPLETIONS, json=body)
        assert response.status_code == 400
        assert "q_proj" in response.json()["error"]["message"]
    assert shift(toy, "base") == 0
    adapter_folder(root / "lazy", 6)
    assert shift(toy, "lazy") == 6


def test_lists_while_adapters_go(toy: ToyServer, root: Path) -> None:
    """C06: a list is of one moment, however long its folders take to read."""
    for number in range(200):
        adapter_folder(root / f"f{number}", number)

    def churn() -> None:
        for _ in range(30):
            assert load(toy, "f0", root / "f0").status_code == 200
            assert unload(toy, "f0").status_code == 200

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        while not churning.done():
            for path in ("/v1/models", "/v1/adapters"):
                response = toy.http.get(path)
                assert response.status_code == 200, response.text
                listed = [entry["id"] for entry in response.json()["data"]]
                assert len(listed) == len(set(listed))
        churning.result()


def test_a_root_that_cannot_be_read_holds_nothing(toy_model: Path) -> None:
    with toy_server(toy_model, adapter_dirs=(Path("/" + "x" * 5000),)) as toy:
        assert names(toy) == []
        assert shift(toy, "x") == -1


def test_folders_that_are_not_served(toy: ToyServer, root: Path, tmp_path: Path) -> None:
    adapter_folder(tmp_path / "outside", 3)
    (root / "link").symlink_to(tmp_path / "outside")
    adapter_folder(root / "base", 3)
    adapter_folder(root / "with space", 3)
    adapter_folder(root / "deep" / "inner", 3)
    assert names(toy) == []
    assert shift(toy, "base") == 0
    for name in ("link", "with space", "deep/inner", "deep", "..", ".", "../outside"):
        assert shift(toy, name) == -1


# --- start ----------------------------------------------------------------------------------------


def test_adapters_given_at_start_may_lie_anywhere(toy_model: Path, tmp_path: Path) -> None:
    with toy_server(toy_model, adapters={"x": adapter_folder(tmp_path / "x", 3)}) as toy:
        assert shift(toy, "x") == 3


def test_a_bad_adapter_given_at_start_stops_it(toy_model: Path, tmp_path: Path) -> None:
    bad = adapter_folder(tmp_path / "x", bad="no weights")
    with pytest.raises(Exception, match="no weights"), toy_server(toy_model, adapters={"x": bad}):
        pass


# --- the adapter's own texts (A22) ----------------------------------------------------------------


def with_texts(folder: Path, template: str, eos: str | None = None) -> Path:
    (folder / "chat_template.jinja").write_text(template)
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def rendered(toy: ToyServer, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "a"}]}
    tokens = toy.http.post("/tokenize", json=body).json()["tokens"]
    return toy.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]  # type: ignore[no-any-return]


def test_template_and_eos_of_an_adapter_are_its_own(toy: ToyServer, root: Path) -> None:
    x = with_texts(adapter_folder(root / "x", 0), "X:{{ messages[0].content }}", "<|user|>")
    with_texts(adapter_folder(root / "y", 0), "Y:{{ messages[0].content }}{{ eos_token }}")
    adapter_folder(root / "plain", 0)
    base = "<|bos|><|user|>a<|end|><|assistant|>"
    expected = {"base": base, "x": "X:a", "y": "Y:a<|eos|>", "plain": base}
    order = ["base", "x", "y", "x", "plain", "base", "y"] * 3
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for model, text in zip(order, pool.map(lambda m: rendered(toy, m), order), strict=True):
            assert text == expected[model]
    ids = {name: toy.server.tokenizer.token_id(name) for name in ("<|eos|>", "<|end|>", "<|user|>")}
    for model, extra in (("x", {ids["<|user|>"]}), ("y", set()), ("base", set())):
        shift(toy, model)
        request = toy.engine.requests[-1]
        assert set(request.eos_token_ids) == {ids["<|eos|>"], ids["<|end|>"]} | extra
    (x / "chat_template.jinja").write_text("Z:{{ messages[0].content }}")
    assert load(toy, "x", x, load_inplace=True).status_code == 200
    assert rendered(toy, "x") == "Z:a"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('refused') }}",
        "{% if %}",
    ],
)
def test_a_hostile_template_hurts_only_its_own_chats(
    toy: ToyServer, root: Path, template: str
) -> None:
    with_texts(adapter_folder(root / "evil", 0), template)
    body = {"model": "evil", "messages": [{"role": "user", "content": "a"}]}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        evil = pool.submit(toy.http.post, "/v1/chat/completions", json=body)
        with httpx.Client(base_url=toy.url, timeout=20) as other:
            good = other.post("/v1/chat/completions", json={**body, "model": "base"})
            assert good.status_code == 200
        response = evil.result()
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "chat_template_error"
    assert "root:" not in response.text
    assert shift(toy, "evil") == 0  # without its template it works


def test_a_pin_that_is_refused_hurts_no_other_name_of_the_same_bytes(
    toy: ToyServer, source: Path
) -> None:
    load(toy, "taken", adapter_folder(source / "t", 9), pinned=True)
    folders = [adapter_folder(source / f"same{number}", 3) for number in range(12)]

    def work(number: int) -> int:
        pinned = number % 3 == 0
        with httpx.Client(base_url=toy.url, timeout=20) as client:
            body = {"lora_name": f"n{number}", "lora_path": str(folders[number]), "pinned": pinned}
            status = client.post(LOAD, json=body).status_code
            assert status == (400 if pinned else 200)
            body = {**body, "load_inplace": True, "pinned": False}
            assert client.post(LOAD, json=body).status_code == 200
            return client.delete(f"/v1/adapters/n{number}").status_code

    for _ in range(5):
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            assert set(pool.map(work, range(12))) == {200}
    toy.call(settle(toy))
    assert len(toy.engine.adapters) == 1
    assert toy.engine.pinned == set(toy.engine.adapters)
