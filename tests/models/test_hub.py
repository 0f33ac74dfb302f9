"""Where models come from: folders, files, and a hub, here a small real HTTP server."""

import json
import shutil
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest

from lorakeet.models.hub import ModelNotFoundError, resolve_model
from support.gguf_files import write_gguf
from support.models import tiny_model

COMMIT = "0" * 39 + "1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("hub") / "model", num_hidden_layers=1)
    (folder / "original.pth").write_bytes(b"not wanted")
    (folder / "consolidated.safetensors").write_bytes(b"not wanted")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORAKEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


class Hub(ThreadingHTTPServer):
    """Serves one repository, `org/tiny`; `org/gated` wants a grant; any other is 404."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.fetched: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        files = sorted(path.name for path in self.server.folder.iterdir())
        if self.path.startswith("/api/models/org/tiny/tree/"):
            self._reply([self._entry(name) for name in files])
        elif self.path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in files]
            self._reply({"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        elif self.path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            name = self.path.rsplit("/", 1)[1]
            content = (self.server.folder / name).read_bytes()
            self.server.fetched += [name] if self.command == "GET" else []
            self._send(200, content, ETag=f'"{sha1(content).hexdigest()}"', **_REPO)
        elif "org/gated" in self.path:
            self._send(403, b"{}", **{"X-Error-Code": "GatedRepo"})
        else:
            self._send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _entry(self, name: str) -> dict[str, Any]:
        content = (self.server.folder / name).read_bytes()
        oid = sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def _reply(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **_REPO)

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


_REPO = {"X-Repo-Commit": COMMIT}


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(model) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server
        server.shutdown()


def test_a_folder_is_itself(model: Path) -> None:
    assert resolve_model(str(model)) == model


def test_a_gguf_file_and_a_folder_that_holds_one(model: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    file = write_gguf(folder / "m.gguf", model)
    converted = resolve_model(str(file))
    assert cache in converted.parents
    assert (converted / "config.json").exists()
    assert resolve_model(str(folder)) == converted
    shutil.copy(file, folder / "second.gguf")
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "name",
    ["./none", "/no/such/folder", "none.gguf", "org/none.gguf", "a/b/c", "~/none-such", "", "x y"],
)
def test_what_looks_like_a_path_never_asks_the_hub(name: str, hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(name)
    assert not hub.fetched


def test_neither_an_empty_folder_nor_another_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"neither a folder nor a \.gguf"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_hub_id_fetches_only_what_is_needed(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("org/tiny")
    for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    assert not {"original.pth", "consolidated.safetensors"} & set(hub.fetched)
    # from now on it works without the hub
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("org/tiny") == folder


def test_missing_and_gated_repositories(hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'org/none'.*neither such a folder"):
        resolve_model("org/none")
    with pytest.raises(ModelNotFoundError, match=r"'org/gated'.*grants access by request"):
        resolve_model("org/gated")


@pytest.mark.parametrize("offline", [True, False])
def test_no_hub_is_one_error(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ModelNotFoundError, match=r"'org/tiny'.*cannot be reached"):
        resolve_model("org/tiny")
