"""Uploads over the wire: what is taken, what is refused, and what is left on the disk after all."""

import contextlib
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorakeet.server import app, uploads
from lorakeet.server import files as disk
from lorakeet.server.files import DurableFile, FolderError
from lorakeet.server.uploads import Uploads
from support.servers import wait_until
from support.toy_server import ToyServer, adapter_folder, toy_server

LIMIT = 300_000
ADAPTERS = "/v1/adapters"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "uploads"


@pytest.fixture
def toy(toy_model: Path, store: Path) -> Iterator[ToyServer]:
    with toy_server(toy_model, adapter_upload_dir=store, adapter_upload_limit=LIMIT) as server:
        yield server
    assert set(folders(store)) <= {Path(v.path) for v in server.server.registry.versions()}


def folders(store: Path) -> list[Path]:
    return [path for path in store.iterdir() if path.is_dir()]


def wait_for_folders(store: Path, count: int) -> None:
    """They are removed in the background."""
    wait_until(lambda: len(folders(store)) == count, f"{count} folders")


def files(k: int = 3, weights: bytes = b"w" * 5000, **more: bytes) -> list[tuple[str, Any]]:
    config = json.dumps({"k": k}).encode()
    named = {"adapter_config.json": config, "adapter_model.safetensors": weights, **more}
    return [("files", (name, data)) for name, data in named.items()]


def upload(toy: ToyServer, name: str = "x", k: int = 3, **fields: str) -> httpx.Response:
    return toy.http.post(ADAPTERS, data={"name": name, **fields}, files=files(k))


def shift(toy: ToyServer, model: str) -> int:
    body = {"model": model, "prompt": [40], "max_tokens": 1}
    response = toy.http.post("/v1/completions", json=body)
    if response.status_code != 200:
        return -1
    text = response.json()["choices"][0]["text"]
    return toy.server.tokenizer.encode(text, add_special_tokens=False)[0] - 40


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_upload_use_unload(toy: ToyServer, store: Path) -> None:
    response = upload(toy)
    assert response.status_code == 200, response.text
    folder = Path(response.json()["path"])
    assert folder.parent == store
    assert (folder / "adapter_model.safetensors").read_bytes() == b"w" * 5000
    assert response.json()["changed"] is True
    assert shift(toy, "x") == 3
    assert toy.http.delete(f"{ADAPTERS}/x").json()["freed_bytes"] == 1024 + 2 * 100 + 3 * 7
    wait_for_folders(store, 0)
    assert not toy.engine.adapters


@pytest.mark.parametrize("kind", ["multipart/form-data", "Multipart/Form-Data"])
def test_uploads_do_not_count_as_bodies_in_memory(
    toy: ToyServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(app, "MAX_HELD_BYTES", 5000)
    form = toy.http.build_request("POST", ADAPTERS, data={"name": "x"}, files=files())
    headers = {"content-type": form.headers["content-type"].replace("multipart/form-data", kind)}
    response = toy.http.post(ADAPTERS, content=form.read(), headers=headers)
    assert response.status_code == 200, response.text
    assert shift(toy, "x") == 3


def test_errors_name_the_fields_of_an_upload(toy: ToyServer, store: Path) -> None:
    assert upload(toy).status_code == 200
    for field in ("name", "lora_name"):
        response = toy.http.post(ADAPTERS, data={field: "x"}, files=files(5))
        assert code(response) == (400, "adapter_exists")
        assert response.json()["error"]["param"] == field
    bad = [("files", ("adapter_config.json", b'{"bad": "no rank"}')), files()[1]]
    response = toy.http.post(ADAPTERS, data={"name": "y"}, files=bad)
    assert code(response) == (400, "invalid_adapter")
    assert response.json()["error"]["param"] is None


def test_a_version_each_step_of_a_training(toy: ToyServer, store: Path) -> None:
    for k in range(1, 12):
        response = upload(toy, k=k, load_inplace="true")
        assert response.status_code == 200
        assert response.json()["changed"] is True
        assert shift(toy, "x") == k
    wait_for_folders(store, 1)
    assert len(toy.engine.adapters) == 1
    again = upload(toy, k=11, load_inplace="true").json()
    assert (again["changed"], again["freed_bytes"]) == (False, 0)
    wait_for_folders(store, 1)
    assert Path(again["path"]).is_dir()


def test_the_newest_upload_of_the_same_bytes_is_where_they_are_read(
    toy: ToyServer, store: Path
) -> None:
    """The place before may have been spoiled, by whomever it belongs to."""
    first = Path(upload(toy).json()["path"])
    second = Path(upload(toy, load_inplace="true").json()["path"])
    assert second != first
    assert list(toy.engine.paths.values()) == [[str(second)]]
    wait_for_folders(store, 1)
    assert second.is_dir()


def test_two_names_of_the_same_upload(toy: ToyServer, store: Path) -> None:
    """The engine may read from the first folder again until it knows only the second."""
    first = Path(upload(toy, "x").json()["path"])
    second = Path(upload(toy, "y").json()["path"])
    assert len(toy.engine.adapters) == 1
    toy.http.delete(f"{ADAPTERS}/x")
    assert shift(toy, "y") == 3
    wait_until(lambda: list(toy.engine.paths.values()) == [[str(second)]], "the engine is told")
    wait_for_folders(store, 1)
    assert second.is_dir()
    assert not first.exists()
    toy.http.delete(f"{ADAPTERS}/y")
    wait_for_folders(store, 0)


def test_folders_do_not_pile_up_beside_a_name_of_the_same_bytes(
    toy: ToyServer, store: Path
) -> None:
    kept = [Path(upload(toy, f"kept{k}", k).json()["path"]) for k in (3, 4)]
    for turn in range(6):  # swapped to the one and to the other
        live = Path(upload(toy, "live", 3 + turn % 2, load_inplace="true").json()["path"])
    wait_for_folders(store, 3)
    assert set(folders(store)) == {*kept, live}
    for _ in range(3):  # the same bytes again
        live = Path(upload(toy, "live", 3, load_inplace="true").json()["path"])
    wait_for_folders(store, 3)
    assert set(folders(store)) == {*kept, live}
    toy.http.delete(f"{ADAPTERS}/live")
    for _ in range(4):
        upload(toy, "other", 4)
        toy.http.delete(f"{ADAPTERS}/other")
    wait_for_folders(store, 2)
    assert set(folders(store)) == set(kept)
    assert (shift(toy, "kept3"), shift(toy, "kept4")) == (3, 4)


def test_a_running_request_keeps_its_folder(toy: ToyServer, store: Path) -> None:
    """Its version has lost the name, but may be read again from there."""
    first = Path(upload(toy, "x").json()["path"])
    upload(toy, "y")
    toy.engine.step_seconds = 0.02
    body = {"model": "x", "prompt": [40], "max_tokens": 1000, "stream": True}
    with toy.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: httpx closes a connection whose lines nobody holds
        next(lines)
        toy.http.delete(f"{ADAPTERS}/x")
        time.sleep(0.2)
        assert first.is_dir()
    wait_for_folders(store, 1)
    assert not first.exists()


def test_a_large_upload_comes_in_pieces(toy: ToyServer, store: Path) -> None:
    weights = os.urandom(200_000)
    response = toy.http.post(ADAPTERS, data={"name": "x"}, files=files(3, weights))
    folder = Path(response.json()["path"])
    assert (folder / "adapter_model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/adapter_config.json", "..", "", "x.py", "adapter_model.bin", "a\0b"],
)
def test_files_that_are_not_taken(toy: ToyServer, store: Path, name: str) -> None:
    parts = [*files(), ("files", (name or "x", b"evil"))]
    response = toy.http.post(ADAPTERS, data={"name": "x"}, files=parts)
    assert code(response) == (400, "file_not_allowed")
    assert folders(store) == []
    assert list(store.parent.iterdir()) == [store]
    assert shift(toy, "x") == -1


def test_bodies_that_are_refused(toy: ToyServer, store: Path) -> None:
    config, weights = files()
    cases: list[tuple[dict[str, str], list[Any]]] = [
        ({"name": "x"}, [config]),
        ({"name": "x"}, [weights]),
        ({"name": "x"}, [config, weights, config]),
        ({}, [config, weights]),
        ({"name": "a b"}, [config, weights]),
        ({"name": "base"}, [config, weights]),
        ({"name": "x" * 2000}, [config, weights]),
        ({"name": "x", "load_inplace": "maybe"}, [config, weights]),
        ({"name": "x", "lora_path": "/etc"}, [config, weights]),
    ]
    for fields, parts in cases:
        response = toy.http.post(ADAPTERS, data=fields, files=parts)
        assert response.status_code == 400, (fields, response.text)
    bad = [("files", ("adapter_config.json", b'{"bad": "no rank"}')), weights]
    response = toy.http.post(ADAPTERS, data={"name": "x"}, files=bad)
    assert code(response) == (400, "invalid_adapter")
    wait_for_folders(store, 0)
    assert not toy.engine.adapters
    assert upload(toy).status_code == 200
    assert upload(toy).status_code == 400  # there already
    wait_for_folders(store, 1)


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary="])
def test_without_a_boundary(toy: ToyServer, store: Path, content_type: str) -> None:
    headers = {"content-type": content_type}
    assert toy.http.post(ADAPTERS, content=b"x", headers=headers).status_code == 400
    headers = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"", b"x" * 100, b"--b\r\n", b"--b\r\nx\r\n\r\n", b"--b\r\n" + b"a: b\r\n" * 999):
        response = toy.http.post(ADAPTERS, content=body, headers=headers)
        assert response.status_code == 400, body
    assert folders(store) == []


@pytest.mark.parametrize("is_chunked", [False, True])
def test_too_large(toy: ToyServer, store: Path, is_chunked: bool) -> None:
    request = toy.http.build_request(
        "POST", ADAPTERS, data={"name": "x"}, files=files(weights=b"w" * (LIMIT + 1))
    )
    body = request.read()
    content: Any = body
    if is_chunked:  # its length is not known ahead
        content = (body[at : at + 9999] for at in range(0, len(body), 9999))
    headers = {"content-type": request.headers["content-type"]}
    response = toy.http.post(ADAPTERS, content=content, headers=headers)
    assert code(response) == (413, "body_too_large")
    assert folders(store) == []


def test_a_body_without_end(toy: ToyServer, store: Path) -> None:
    """What follows the last part is not read, but it counts."""
    body = toy.http.build_request("POST", ADAPTERS, data={"name": "x"}, files=files())
    content = itertools.chain([body.read()], itertools.repeat(b"z" * 9999, 100))
    headers = {"content-type": body.headers["content-type"]}
    response = toy.http.post(ADAPTERS, content=content, headers=headers)
    assert code(response) == (413, "body_too_large")
    assert folders(store) == []
    assert shift(toy, "x") == -1


@pytest.mark.parametrize(
    "headers", [b"a: " + b"x" * 100_000, b"".join(b"h%d: \r\n" % i for i in range(10_000))]
)
def test_headers_of_a_part_are_bounded(toy: ToyServer, store: Path, headers: bytes) -> None:
    """The parser does it, from python-multipart 0.0.27 on."""
    kind = {"content-type": "multipart/form-data; boundary=x"}
    response = toy.http.post(ADAPTERS, content=b"--x\r\n" + headers, headers=kind)
    assert code(response) == (400, "invalid_body")
    assert "Maximum header" in response.json()["error"]["message"]
    wait_for_folders(store, 0)


def test_a_client_that_goes_in_the_middle(toy: ToyServer, store: Path) -> None:
    for share in (0.1, 0.5, 0.99):
        request = toy.http.build_request("POST", ADAPTERS, data={"name": "x"}, files=files())
        content = request.read()
        head = f"POST {ADAPTERS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        head += f"content-type: {request.headers['content-type']}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", toy.port)) as connection:
            connection.sendall(head.encode() + content[: int(share * len(content))])
        wait_for_folders(store, 0)
        assert shift(toy, "x") == -1


@pytest.mark.parametrize("sync", ["fsync", "fdatasync"])
def test_a_full_disk(
    toy: ToyServer, store: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    """Whether that is known at the end, or while more comes."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_SYNC_BYTES", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(os, sync, full)
        response = upload(toy)
    assert code(response) == (507, "insufficient_storage")
    assert "No space left" in response.json()["error"]["message"]
    wait_for_folders(store, 0)
    assert upload(toy).status_code == 200


def test_a_file_goes_to_the_disk_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []  # bytes, each time

    def sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(disk, "_SYNC_BYTES", 15_000)
    data = memoryview(os.urandom(50_000))
    file = DurableFile(tmp_path / "file")
    file.write(data[:10_000])
    file.write(data[10_000:20_000])
    wait_until(lambda: synced == [20_000], "the first part is on its way")
    file.write(data[20_000:])
    file.finish()
    assert synced[-1] == 50_000
    assert (tmp_path / "file").read_bytes() == data


def test_a_part_of_the_disk_stays_free(
    toy: ToyServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "MIN_FREE", 2**62)
        response = upload(toy)
    assert code(response) == (507, "insufficient_storage")
    assert f"where {2**62} bytes must stay free" in response.json()["error"]["message"]
    assert folders(store) == []
    assert shift(toy, "x") == -1
    assert upload(toy).status_code == 200


def test_a_disk_that_fills_up_meanwhile(
    toy: ToyServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_BLOCK", 1000)
    with begun(toy) as connection:
        wait_for_folders(store, 1)
        monkeypatch.setattr(uploads, "MIN_FREE", 2**62)
        connection.sendall(b"1000\r\n" + b"w" * 0x1000 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 507")
    wait_for_folders(store, 0)


def test_few_at_a_time(toy: ToyServer, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes leaves the place to others."""
    monkeypatch.setattr(uploads, "_BLOCK", 1000)
    with contextlib.ExitStack() as stack:
        for _ in range(uploads.MAX_RUNNING):
            stack.enter_context(begun(toy))
        wait_for_folders(store, uploads.MAX_RUNNING)
        refused = upload(toy)
        assert code(refused) == (429, "too_many_uploads")
        assert refused.headers["retry-after"]
        assert shift(toy, "base") == 0
    wait_for_folders(store, 0)
    assert upload(toy).status_code == 200


def test_one_that_stands_still_is_ended(
    toy: ToyServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorakeet.server.http.RECEIVE_SECONDS", 0.3)
    with begun(toy) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    wait_for_folders(store, 0)
    wait_until(lambda: toy.server.uploads._running == 0, "its place is free")


def test_many_of_one_name_at_once(toy: ToyServer, store: Path) -> None:
    """One wins; whoever is refused leaves nothing. In place, the last one wins."""

    def send(number: int) -> tuple[int, str]:
        with httpx.Client(base_url=toy.url, timeout=20) as client:
            while True:
                response = client.post(
                    ADAPTERS, data={"name": "x", "load_inplace": inplace}, files=files(number)
                )
                if response.status_code != 429:
                    return response.status_code, response.text

    for inplace in ("false", "true"):
        with ThreadPoolExecutor(8) as threads:
            statuses = [status for status, _ in threads.map(send, range(1, 9))]
        assert statuses.count(200) == (1 if inplace == "false" else 8), statuses
        assert set(statuses) <= {200, 400}
        wait_for_folders(store, 1)
        (folder,) = folders(store)
        assert toy.http.get(f"{ADAPTERS}/x").json()["path"] == str(folder)
        assert json.loads((folder / "adapter_config.json").read_bytes())["k"] == shift(toy, "x")
        assert len(toy.engine.adapters) == 1


@contextlib.contextmanager
def begun(toy: ToyServer) -> Iterator[socket.socket]:
    """An upload of unknown length, of which something has come."""
    head = b'content-disposition: form-data; name="f"; filename="adapter_config.json"'
    with socket.create_connection(("127.0.0.1", toy.port), timeout=20) as connection:
        connection.sendall(
            f"POST {ADAPTERS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            "content-type: multipart/form-data; boundary=b\r\n\r\n".encode()
        )
        data = b"--b\r\n" + head + b"\r\n\r\n" + b"w" * 2000
        connection.sendall(b"%x\r\n%b\r\n" % (len(data), data))
        yield connection


def test_off_unless_there_is_a_folder(toy_model: Path, tmp_path: Path) -> None:
    with toy_server(toy_model, adapter_dirs=(tmp_path / "root",)) as toy:
        response = upload(toy)
        assert code(response) == (403, "uploads_disabled")
        assert "--adapter-upload-dir" in response.json()["error"]["message"]
        body = {"lora_name": "x", "lora_path": str(adapter_folder(tmp_path / "root" / "a", 3))}
        assert toy.http.post(ADAPTERS, json=body).status_code == 200


def test_what_a_crash_left_is_removed_and_nothing_else(toy_model: Path, store: Path) -> None:
    """kill -9 at any moment leaves such folders."""
    for name in (".upload-" + "a" * 32, "upload-" + "b" * 32, "mine", "upload-short"):
        adapter_folder(store / name, 3)
    with toy_server(toy_model, adapter_upload_dir=store) as toy:
        assert sorted(path.name for path in folders(store)) == ["mine", "upload-short"]
        assert toy.http.get(ADAPTERS).json()["data"] == []
        with pytest.raises(FolderError, match="in use by another server"):
            Uploads(store, LIMIT).open(())
    Uploads(store, LIMIT).open(())  # it was let go
    shutil.rmtree(store)
