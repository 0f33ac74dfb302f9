"""`serve` as a process: start, drain, signals, exit codes (E02). Signals need a real process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers import wait_until
from support.toy_server import adapter_folder

SCRIPT = """
import asyncio, json, sys
import uvloop
from lorakeet.configs.settings import Settings
from lorakeet.server import logs
from lorakeet.server.serve import serve
from support.toy_server import ToyEngine

values = json.loads(sys.argv[1])

class Engine(ToyEngine):
    async def start(self, model_folder):
        self.start_open = values["start_open"]
        self.loads_open = values["loads_open"]
        await super().start(model_folder)
        if values["dies_after"] is not None:
            asyncio.get_running_loop().call_later(values["dies_after"], self.die)

async def main():
    return await serve(Settings(**values["settings"]), Engine(step_seconds=0.02))

logs.configure("info")
sys.exit(uvloop.run(main()))
"""
TESTS = Path(__file__).resolve().parents[1]


class Process:
    def __init__(self, model: Path, engine: dict[str, Any], settings: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        values = {
            "start_open": True,
            "loads_open": True,
            "dies_after": None,
            **engine,
            "settings": {
                "model": str(model),
                "served_model_name": "base",
                "port": self.port,
                **settings,
            },
        }
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(values)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20)

    def health(self) -> str:
        """ "ok", the code of the error, or "closed"."""
        try:
            response = self.http.get("/health")
        except httpx.HTTPError:
            return "closed"
        return "ok" if response.status_code == 200 else response.json()["error"]["code"]

    def wait_for(self, health: str) -> None:
        for _ in range(600):
            if self.health() == health:
                return
            assert self.popen.poll() is None, self.popen.stderr.read()  # type: ignore[union-attr]
            time.sleep(0.05)
        raise AssertionError(f"health never was {health}")

    def end(self) -> tuple[int, str]:
        """Exit code and log."""
        _, log = self.popen.communicate(timeout=30)
        return self.popen.returncode, log

    @contextlib.contextmanager
    def stream(self, num_tokens: int) -> Iterator[Iterator[str]]:
        """The lines of a stream that has begun."""
        body = {"model": "base", "prompt": [40], "max_tokens": num_tokens, "stream": True}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            yield lines


@contextlib.contextmanager
def process(
    model: Path, engine: dict[str, Any] | None = None, /, **settings: Any
) -> Iterator[Process]:
    started = Process(model, engine or {}, settings)
    try:
        yield started
    finally:
        started.http.close()
        if started.popen.poll() is None:
            started.popen.kill()
            started.popen.communicate()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_drain_lets_streams_finish(toy_model: Path) -> None:
    with process(toy_model) as server:
        server.wait_for("ok")
        chat = {"model": "base", "messages": [{"role": "user", "content": "a"}]}
        assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
        renderers = children(server.popen.pid)
        assert renderers
        with server.stream(60) as lines:
            server.popen.send_signal(signal.SIGTERM)
            server.wait_for("draining")
            refused = server.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert list(lines)[-1] == "data: [DONE]"
        code, log = server.end()
        assert code == 0, log
        assert not any(Path(f"/proc/{child}").exists() for child in renderers)
        with socket.create_server(("127.0.0.1", server.port)):  # the port is free again
            pass


@pytest.mark.parametrize("ended_by", ["limit", "second signal"])
def test_drain_ends_what_takes_too_long(toy_model: Path, ended_by: str) -> None:
    with process(toy_model, drain_timeout=0.5 if ended_by == "limit" else 60) as server:
        server.wait_for("ok")
        with server.stream(2000) as lines:
            server.popen.send_signal(signal.SIGTERM)
            if ended_by == "second signal":
                server.wait_for("draining")
                server.popen.send_signal(signal.SIGINT)
            last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        code, log = server.end()
        assert code == 0, log


class SlowUpload:
    """An upload of an adapter, of which the last byte is held back."""

    def __init__(self, server: Process, name: str) -> None:
        files = [
            ("f", ("adapter_config.json", b'{"k": 3}')),
            ("f", ("adapter_model.safetensors", b"w" * 3 * 2**20)),
        ]
        request = server.http.build_request(
            "POST", "/v1/adapters", data={"name": name}, files=files
        )
        self._body = request.read()
        head = (
            "POST /v1/adapters HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: {request.headers['content-type']}\r\n"
            f"content-length: {len(self._body)}\r\n\r\n"
        )
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self._socket.sendall(head.encode() + self._body[:-1])

    def finish(self) -> None:
        self._socket.sendall(self._body[-1:])

    def answer(self) -> tuple[int, Any]:
        with self._socket, self._socket.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)


def load(server: Process, path: Path) -> tuple[int, Any]:
    body = {"lora_name": "loaded", "lora_path": str(path)}
    with httpx.Client(base_url=server.http.base_url, timeout=20) as client:
        response = client.post("/v1/load_lora_adapter", json=body)
    return response.status_code, response.json()


def uploads_of(store: Path) -> list[str]:
    return [path.name for path in store.iterdir() if path.is_dir()]


def test_drain_lets_uploads_finish(toy_model: Path, tmp_path: Path) -> None:
    store, folder = tmp_path / "store", adapter_folder(tmp_path / "root" / "a", 3)
    settings = {
        "adapter_upload_dir": str(store),
        "adapter_dirs": [str(folder.parent)],
        "state_dir": str(tmp_path / "state"),
    }
    with process(toy_model, drain_timeout=60, **settings) as server:
        server.wait_for("ok")
        upload = SlowUpload(server, "x")
        wait_until(lambda: uploads_of(store), "begun")
        server.popen.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        time.sleep(0.2)
        assert load(server, folder)[0] == 503
        refused = server.http.post("/v1/adapters", data={"name": "y"}, files={"f": b"w"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert server.popen.poll() is None
        upload.finish()
        status, answer = upload.answer()
        assert (status, answer["id"]) == (200, "x")
        code, log = server.end()
        assert code == 0, log
        assert "Traceback" not in log
    with process(toy_model, **settings) as server:
        server.wait_for("ok")
        listed = server.http.get("/v1/adapters").json()["data"]
        assert {one["id"] for one in listed} == {"a", "x"}
        body = {"model": "x", "prompt": [40], "max_tokens": 1}
        assert server.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("ended_by", ["limit", "second signal"])
def test_drain_ends_uploads_and_loads(toy_model: Path, tmp_path: Path, ended_by: str) -> None:
    store, folder = tmp_path / "store", adapter_folder(tmp_path / "root" / "deep" / "a", 3)
    settings: dict[str, Any] = {
        "adapter_upload_dir": str(store),
        "adapter_dirs": [str(tmp_path / "root")],
        "drain_timeout": 1 if ended_by == "limit" else 60,
    }
    with (
        process(toy_model, {"loads_open": False}, **settings) as server,
        ThreadPoolExecutor() as pool,
    ):
        server.wait_for("ok")
        receiving, loading = SlowUpload(server, "receiving"), SlowUpload(server, "loading")
        loading.finish()
        path_load = pool.submit(load, server, folder)
        wait_until(lambda: [name[0] for name in sorted(uploads_of(store))] == [".", "u"], "begun")
        time.sleep(0.3)  # until the load has come, too
        server.popen.send_signal(signal.SIGTERM)
        if ended_by == "second signal":
            server.wait_for("draining")
            server.popen.send_signal(signal.SIGTERM)
        for status, error in (receiving.answer(), loading.answer(), path_load.result()):
            assert (status, error["error"]["code"]) == (503, "draining")
            assert error["error"]["message"] == "The server is shutting down"
        code, log = server.end()
        assert code == 0, log
        assert "Traceback" not in log
        assert uploads_of(store) == []


def test_an_idle_server_ends_at_once(toy_model: Path) -> None:
    with process(toy_model, drain_timeout=60) as server:
        server.wait_for("ok")
        server.popen.send_signal(signal.SIGINT)
        code, log = server.end()
        assert code == 0, log


def test_a_signal_while_the_model_loads(toy_model: Path) -> None:
    with process(toy_model, {"start_open": False}) as server:
        server.wait_for("loading")
        assert server.http.get("/v1/models").status_code == 503
        server.popen.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


def test_a_signal_while_the_model_is_fetched(tmp_path: Path) -> None:
    """In a thread that nothing can interrupt: here it waits for somebody to write to a FIFO."""
    os.mkfifo(tmp_path / "model.gguf")
    script = "import sys; from lorakeet.configs.settings import Settings as S;"
    script += "from lorakeet.server.serve import run; run(S(model=sys.argv[1], port=0))"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE, text=True
    ) as popen:
        assert popen.stderr is not None
        assert "listening" in popen.stderr.readline()
        time.sleep(0.5)
        popen.terminate()
        try:
            assert popen.wait(timeout=20) == 0
        finally:
            popen.kill()


def test_a_signal_while_an_adapter_loads(toy_model: Path, tmp_path: Path) -> None:
    adapters = {"x": str(tmp_path)}
    with process(toy_model, {"loads_open": False}, adapters=adapters) as server:
        server.wait_for("loading")
        server.popen.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


def test_the_engine_dies(toy_model: Path) -> None:
    with process(toy_model, {"dies_after": 1.5}) as server:
        server.wait_for("ok")
        with server.stream(2000) as lines:
            events = list(lines)
            assert '"error"' in events[-1]
            assert "data: [DONE]" not in events
            assert server.health() in ("dead", "closed")
        code, log = server.end()
        assert code == 1, log


@pytest.mark.parametrize("fault", ["model", "tokenizer", "adapter", "port", "host"])
def test_what_keeps_it_from_starting(toy_model: Path, tmp_path: Path, fault: str) -> None:
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {}
        if fault == "model":
            settings["model"] = str(tmp_path / "missing")
        if fault == "tokenizer":
            settings["model"] = str(tmp_path)
            (tmp_path / "config.json").write_text("{}")
            (tmp_path / "tokenizer.json").write_text("{}")
        if fault == "host":
            settings["host"] = "ü" * 70
        if fault == "adapter":
            settings["adapters"] = {"x": str(tmp_path)}
        if fault == "port":
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            settings["port"] = taken.getsockname()[1]
        server = stack.enter_context(process(toy_model, **settings))
        code, log = server.end()
        assert code == 1
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert "cannot" in lines[-1]["event"]
        assert "Traceback" not in log
