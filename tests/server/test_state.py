"""What outlives the server: registered adapters, names taken away, aliases, uploads."""

import asyncio
import errno
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorakeet.server import adapter_state
from lorakeet.server.adapter_state import FILE_NAME, Registration, State, StateFile
from lorakeet.server.files import FolderError, write_atomically
from support.servers import wait_until
from support.toy_server import ToyServer, adapter_folder, toy_server
from support.vocabularies import add_tokens

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def kept(tmp_path: Path, root: Path) -> dict[str, Any]:
    """Settings of a server that keeps its state."""
    return {
        "adapter_dirs": (root,),
        "state_dir": tmp_path / "state",
        "adapter_upload_dir": tmp_path / "uploads",
    }


def load(toy: ToyServer, name: str, path: Path, **extra: Any) -> httpx.Response:
    return toy.http.post(LOAD, json={"lora_name": name, "lora_path": str(path), **extra})


def ask(toy: ToyServer, model: str) -> httpx.Response:
    return toy.http.post("/v1/completions", json={"model": model, "prompt": [40], "max_tokens": 1})


def shift(toy: ToyServer, model: str) -> int:
    response = ask(toy, model)
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["text"]
    return toy.server.tokenizer.encode(text, add_special_tokens=False)[0] - 40


def listed(toy: ToyServer) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in toy.http.get("/v1/adapters").json()["data"]}


def test_names_survive_and_are_loaded_at_their_first_request(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    deep = root / "deep"
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", adapter_folder(deep / "x", 3), pinned=True)
        load(toy, "org/y", adapter_folder(deep / "y", 5))
        load(toy, "gone", adapter_folder(deep / "gone", 7))
        adapter_folder(root / "hidden", 8)
        for name in ("gone", "hidden"):
            assert toy.http.post(UNLOAD, json={"lora_name": name}).status_code == 200
        toy.http.post("/v1/aliases", json={"alias": "prod", "targets": [{"adapter": "x"}]})
        before = listed(toy)
    with toy_server(toy_model, **kept) as toy:
        num_reads = toy.engine.num_reads
        after = listed(toy)
        assert after.keys() == before.keys() == {"x", "org/y"}
        for name, entry in after.items():
            assert (entry["tier"], entry["state"]) == ("disk", "unloaded")
            for field in ("path", "digest", "pinned"):
                assert entry[field] == before[name][field]
        assert (shift(toy, "prod"), shift(toy, "org/y")) == (3, 5)
        assert (num_reads, toy.engine.num_reads) == (0, 2)
        assert len(toy.engine.pinned) == 1
        assert ask(toy, "hidden").status_code == 404
        assert toy.http.post(UNLOAD, json={"lora_name": "org/y"}).status_code == 200
        assert load(toy, "hidden", root / "hidden").status_code == 200
    with toy_server(toy_model, **kept) as toy:
        assert listed(toy).keys() == {"x", "hidden"}
        assert toy.http.post(UNLOAD, json={"lora_name": "x"}).status_code == 409
        assert toy.http.delete("/v1/aliases/prod").status_code == 200
        assert toy.http.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
        assert ask(toy, "x").status_code == 404
    with toy_server(toy_model, **kept) as toy:
        assert listed(toy).keys() == {"hidden"}


def test_other_content_under_a_registered_path_is_not_served(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    folder = root / "deep" / "x"
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", adapter_folder(folder, 3))
    adapter_folder(folder, 4)
    with toy_server(toy_model, **kept) as toy:
        response = ask(toy, "x")
        assert response.status_code == 400
        assert "have changed" in response.json()["error"]["message"]
        entry = listed(toy)["x"]
        assert entry["state"] == "failed"
        assert "have changed" in entry["error"]
        assert load(toy, "x", folder).status_code == 400  # registered: the name is taken
        swapped = load(toy, "x", folder, load_inplace=True)
        assert (swapped.status_code, swapped.json()["changed"]) == (200, True)
        assert shift(toy, "x") == 4
        assert listed(toy)["x"]["error"] is None


def write_template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)


def write_tokenizer(folder: Path, text: str) -> None:
    add_tokens(folder, f"<{text}>")


def write_generation_config(folder: Path, text: str) -> None:
    fields = {"top_k": len(text), "eos_token_id": [4]}
    (folder / "generation_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("write", [write_template, write_tokenizer, write_generation_config])
def test_other_texts_in_a_registered_folder_are_not_served(
    toy_model: Path, root: Path, kept: dict[str, Any], write: Callable[[Path, str], None]
) -> None:
    """Template, tokenizer and defaults belong to what was loaded, as the weights do."""
    folder = adapter_folder(root / "deep" / "x", 3)
    write(folder, "one")
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", folder)
    with toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 3  # as it was
    write(folder, "another")
    with toy_server(toy_model, **kept) as toy:
        response = ask(toy, "x")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_adapter")
        assert "chat template, tokenizer" in response.json()["error"]["message"]
        assert not toy.engine.adapters  # what was read for it is gone
        swapped = load(toy, "x", folder, load_inplace=True)
        assert (swapped.status_code, swapped.json()["changed"]) == (200, True)
        assert shift(toy, "x") == 3
    with toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 3


def test_a_folder_without_texts_may_not_get_any(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    folder = adapter_folder(root / "deep" / "x", 3)
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", folder)
    write_template(folder, "new")
    with toy_server(toy_model, **kept) as toy:
        assert ask(toy, "x").status_code == 400


def test_texts_are_those_of_the_last_load(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    """A load that changes nothing takes the new folder, and what is in its files."""
    first, second = (adapter_folder(root / "deep" / name, 3) for name in ("1", "2"))
    (second / "chat_template.jinja").write_text("")  # as good as none
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", first)
        assert load(toy, "x", second, load_inplace=True).json()["changed"] is False
    with toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 3


def test_a_file_of_an_older_version_is_read(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    """It does not say which texts were loaded: those that are found are taken."""
    folder = adapter_folder(root / "deep" / "x", 3)
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", folder)
    file = kept["state_dir"] / FILE_NAME
    state = json.loads(file.read_text())
    del state["adapters"]["x"]["profile"]
    file.write_text(json.dumps(state))
    write_template(folder, "new")
    with toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 3
        load(toy, "y", adapter_folder(root / "deep" / "y", 5))  # saves what x is by now
    write_template(folder, "newer")
    with toy_server(toy_model, **kept) as toy:
        assert ask(toy, "x").status_code == 400


def test_the_same_content_again_is_no_change(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    folder = adapter_folder(root / "deep" / "x", 3)
    write_template(folder, "one")
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", folder)
    with toy_server(toy_model, **kept) as toy:
        assert load(toy, "x", folder, load_inplace=True).json()["changed"] is False
    write_template(folder, "another")
    with toy_server(toy_model, **kept) as toy:
        assert load(toy, "x", folder, load_inplace=True).json()["changed"] is True


def test_a_missing_folder_is_a_warning(
    toy_model: Path, root: Path, kept: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = root / "deep" / "x"
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", adapter_folder(folder, 3))
        load(toy, "y", adapter_folder(root / "deep" / "y", 5))
    away = folder.rename(root / "away")
    with caplog.at_level(logging.WARNING), toy_server(toy_model, **kept) as toy:
        assert shift(toy, "y") == 5
        response = ask(toy, "x")
        assert response.status_code == 404
        assert listed(toy)["x"]["state"] == "failed"
        away.rename(folder)  # a disk that was not mounted yet
        assert shift(toy, "x") == 3
    assert [record.getMessage() for record in caplog.records if "x, reg" in record.getMessage()]


def test_roots_that_were_taken_away_are_not_read(
    toy_model: Path, root: Path, kept: dict[str, Any], tmp_path: Path
) -> None:
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", adapter_folder(root / "deep" / "x", 3))
    kept["adapter_dirs"] = (tmp_path / "other",)
    with toy_server(toy_model, **kept) as toy:
        assert ask(toy, "x").status_code == 403
        assert not toy.engine.num_reads


def test_uploads_survive(toy_model: Path, kept: dict[str, Any]) -> None:
    def upload(toy: ToyServer, k: int) -> Path:
        parts = [
            ("f", ("adapter_config.json", json.dumps({"k": k}).encode())),
            ("f", ("adapter_model.safetensors", b"w")),
        ]
        fields = {"name": "x", "load_inplace": "true"}
        response = toy.http.post("/v1/adapters", data=fields, files=parts)
        return Path(response.json()["path"])

    with toy_server(toy_model, **kept) as toy:
        first, second = upload(toy, 3), upload(toy, 4)
    store = kept["adapter_upload_dir"]
    with toy_server(toy_model, **kept) as toy:
        assert not first.exists()
        assert shift(toy, "x") == 4
    with toy_server(toy_model, **kept) as toy:
        third = upload(toy, 5)
        assert shift(toy, "x") == 5
    assert not second.exists()
    with toy_server(toy_model, **kept) as toy:
        assert toy.http.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
    assert not third.exists()
    assert [path.name for path in store.iterdir() if path.is_dir()] == []


def test_an_upload_stays_when_the_state_cannot_be_written(
    toy_model: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state on the disk still names the old one: a restart must find it."""

    def upload(toy: ToyServer, k: int) -> Path:
        config = json.dumps({"k": k}).encode()
        named = {"adapter_config.json": config, "adapter_model.safetensors": b"w"}
        fields = {"name": "x", "load_inplace": "true"}
        files = [("f", one) for one in named.items()]
        response = toy.http.post("/v1/adapters", data=fields, files=files)
        if k == 4:
            assert response.status_code == 507
            assert response.json()["error"]["code"] == "state_not_saved"
            assert "is in effect" in response.json()["error"]["message"]
        return Path(listed(toy)["x"]["path"])

    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with toy_server(toy_model, **kept) as toy:
        first = upload(toy, 3)
        with monkeypatch.context() as patch:
            patch.setattr(adapter_state, "write_atomically", fail)
            second = upload(toy, 4)
            assert shift(toy, "x") == 4
            time.sleep(0.2)
            assert first.exists()
            alias = {"alias": "other", "targets": [{"adapter": "x"}]}
            assert toy.http.post("/v1/aliases", json=alias).status_code == 507
            stopping = toy.call(asyncio.wait_for(toy.server._state_file.stop(), 10))
            assert stopping is None
    with toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 3
    assert not second.exists()


def test_what_could_not_be_saved_is_saved_later(
    toy_model: Path, root: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in the way stands for a disk that cannot be written."""
    monkeypatch.setattr(adapter_state, "RETRY_SECONDS", 0.05)
    folder, file = adapter_folder(root / "deep" / "x", 3), kept["state_dir"] / FILE_NAME
    with toy_server(toy_model, **kept) as toy:
        in_the_way = file.with_name(f".{FILE_NAME}.new")
        in_the_way.mkdir()
        refused = load(toy, "x", folder)
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "state_not_saved")
        assert shift(toy, "x") == 3
        time.sleep(0.2)
        assert not file.exists()
        in_the_way.rmdir()
        wait_until(lambda: file.exists() and "x" in json.loads(file.read_text())["adapters"], "x")
        assert load(toy, "x", folder, load_inplace=True).status_code == 200


def test_what_could_not_be_saved_is_saved_at_the_stop(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    folder = adapter_folder(root / "deep" / "x", 3)
    with toy_server(toy_model, **kept) as toy:
        in_the_way = kept["state_dir"] / f".{FILE_NAME}.new"
        in_the_way.mkdir()
        assert load(toy, "x", folder).status_code == 500
        in_the_way.rmdir()
    with toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 3


def test_a_registered_upload_outlives_a_load_that_fails(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    """Its pin may find no room now, and find some later."""
    config = json.dumps({"k": 3}).encode()
    named = {"adapter_config.json": config, "adapter_model.safetensors": b"w"}
    fields = {"name": "x", "pinned": "true"}
    with toy_server(toy_model, **kept) as toy:
        files = [("f", one) for one in named.items()]
        folder = Path(toy.http.post("/v1/adapters", data=fields, files=files).json()["path"])
    with toy_server(toy_model, **kept) as toy:
        assert load(toy, "y", adapter_folder(root / "deep" / "y", 5), pinned=True).is_success
        assert ask(toy, "x").status_code == 400
        time.sleep(0.2)
        assert folder.is_dir()
        toy.http.post(UNLOAD, json={"lora_name": "y"})
        assert shift(toy, "x") == 3


def test_a_name_that_is_the_models_now_is_not_taken_over(
    toy_model: Path, root: Path, kept: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with toy_server(toy_model, **kept) as toy:
        load(toy, "x", adapter_folder(root / "deep" / "x", 3))
    with (
        caplog.at_level(logging.WARNING),
        toy_server(toy_model, **kept, served_model_name="x") as toy,
    ):
        ids = [model["id"] for model in toy.http.get("/v1/models").json()["data"]]
        assert ids.count("x") == 1
    assert any("is the model's" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_an_upload_is_there_as_long_as_the_saved_state_names_it(
    toy_model: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    """A kill between the two must not lose the name."""

    def upload(toy: ToyServer, k: int) -> Path:
        config = json.dumps({"k": k}).encode()
        named = {"adapter_config.json": config, "adapter_model.safetensors": b"w"}
        fields = {"name": "x", "load_inplace": "true"}
        response = toy.http.post(
            "/v1/adapters", data=fields, files=[("f", one) for one in named.items()]
        )
        return Path(response.json()["path"])

    may_write = threading.Event()

    def slow(path: Path, data: bytes) -> None:
        assert may_write.wait(10)
        write_atomically(path, data)

    with toy_server(toy_model, **kept) as toy:
        first = upload(toy, 3)
    with toy_server(toy_model, **kept) as toy, ThreadPoolExecutor() as pool:
        if is_loaded:
            assert shift(toy, "x") == 3
        monkeypatch.setattr(adapter_state, "write_atomically", slow)
        second = pool.submit(upload, toy, 4)
        try:
            wait_until(lambda: listed(toy)["x"]["path"] != str(first), "the second version")
            time.sleep(0.2)
            assert first.exists()
        finally:
            may_write.set()
        assert second.result().exists()
        wait_until(lambda: not first.exists(), "removed")


def test_what_a_client_loaded_comes_before_the_command_line(
    toy_model: Path,
    root: Path,
    kept: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A crash must not bring an old version back; an unload does."""
    kept["adapters"] = {"x": adapter_folder(tmp_path / "given", 9)}
    swapped = adapter_folder(root / "deep" / "x", 3)
    with caplog.at_level(logging.WARNING), toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 9
        assert load(toy, "x", swapped, load_inplace=True).status_code == 200
    assert "--adapter" not in caplog.text
    with caplog.at_level(logging.WARNING), toy_server(toy_model, **kept) as toy:
        assert f"--adapter x={kept['adapters']['x']} is not loaded" in caplog.text
        assert f"a client has loaded {swapped} in an earlier run" in caplog.text
        load(toy, "y", adapter_folder(root / "deep" / "y", 5))  # another save keeps it too
    with toy_server(toy_model, **kept) as toy:
        assert list(listed(toy)) == ["x", "y"]
        assert shift(toy, "x") == 3
        assert toy.http.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
        assert ask(toy, "x").status_code == 404
    with toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 9


def test_an_unloaded_name_of_the_command_line_is_loaded_at_the_next_start(
    toy_model: Path, root: Path, kept: dict[str, Any]
) -> None:
    """Also one whose folder lies in a root, and so stays away otherwise."""
    kept["adapters"] = {"x": adapter_folder(root / "x", 9)}
    for _ in range(2):
        with toy_server(toy_model, **kept) as toy:
            assert shift(toy, "x") == 9
            assert toy.http.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
            assert ask(toy, "x").status_code == 404


def test_an_alias_comes_before_the_command_line(
    toy_model: Path, kept: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept["adapters"] = {"y": adapter_folder(tmp_path / "y", 5)}
    with toy_server(toy_model, **kept) as toy:
        toy.http.post("/v1/aliases", json={"alias": "x", "targets": [{"adapter": "y"}]})
    kept["adapters"] |= {"x": adapter_folder(tmp_path / "x", 9)}
    with caplog.at_level(logging.WARNING), toy_server(toy_model, **kept) as toy:
        assert "a client has made it an alias" in caplog.text
        assert shift(toy, "x") == 5
        assert toy.http.delete("/v1/aliases/x").status_code == 200
    with toy_server(toy_model, **kept) as toy:
        assert shift(toy, "x") == 9


def test_one_server_a_folder(toy_model: Path, kept: dict[str, Any]) -> None:
    with (
        toy_server(toy_model, **kept),
        pytest.raises(FolderError, match="in use"),
        toy_server(toy_model, **kept),
    ):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"adapters": 3}', b'{"hidden": [1]}'])
def test_a_damaged_file_stops_the_start(
    toy_model: Path, kept: dict[str, Any], content: bytes
) -> None:
    kept["state_dir"].mkdir()
    (kept["state_dir"] / FILE_NAME).write_bytes(content)
    with pytest.raises(FolderError, match=FILE_NAME), toy_server(toy_model, **kept):
        pass
    assert (kept["state_dir"] / FILE_NAME).read_bytes() == content


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(name, fail)
            with pytest.raises(OSError, match="No space"):
                write_atomically(path, b"new")
        assert path.read_bytes() == b"old"


def test_saves_wait_for_a_write_that_holds_their_change(tmp_path: Path) -> None:
    """Many changes at once take few writes, and each returns after its own is on the disk."""
    names: list[str] = []

    def state() -> State:
        return State({name: Registration("/" + name, "d") for name in names})

    async def change(file: StateFile, name: str) -> None:
        names.append(name)
        await file.save(state)
        saved = json.loads((tmp_path / FILE_NAME).read_text())
        assert name in saved["adapters"]

    async def run() -> int:
        file = StateFile(tmp_path)
        assert file.open() == State()
        await asyncio.gather(*(change(file, f"a{number}") for number in range(50)))
        assert file._written == 50
        file.close()
        other = StateFile(tmp_path)
        count = len(other.open().adapters)
        other.close()
        return count

    assert asyncio.run(run()) == 50
