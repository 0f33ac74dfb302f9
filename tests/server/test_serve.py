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
from pathlib import Path
from typing import Any

import httpx
import pytest

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
            env={**os.environ, "PYTHONPATH": str(TESTS)},
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
