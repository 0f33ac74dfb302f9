"""A real `lorakeet serve`: its own processes, real sockets, and what is left of them afterwards."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from lorakeet.server.engine.loop import STATS_INTERVAL

START_SECONDS = 120  # generous: it is no test of speed
_COMMAND = (sys.executable, "-P", "-c", "from lorakeet.server.cli import main; main()", "serve")
_LISTENING = re.compile(r"listening on (http://[0-9.]+:\d+)")


def wait_until(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    """Return once the condition holds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


class ServerProcess:
    """A running server: `http` asks it, `log` is what it has printed."""

    def __init__(
        self,
        folder: Path,
        model: Path | None,
        *options: str,
        command: Sequence[str] = _COMMAND,
        **env: str,
    ) -> None:
        self.log_file = folder / f"server-{time.monotonic_ns()}.log"
        arguments = [*command, *([] if model is None else [str(model)])]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*arguments, "--port", "0", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                start_new_session=True,
            )
        self._ps = psutil.Process(self.process.pid)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_listening(self) -> None:
        """Until its address is known; the model may still be loading."""
        wait_until(lambda: self.exited or _LISTENING.search(self.log), "listening", START_SECONDS)
        found = _LISTENING.search(self.log)
        assert found is not None, self.log
        self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def wait_ready(self) -> None:
        self.wait_listening()
        wait_until(lambda: self.exited or self.is_healthy, "ready", START_SECONDS)
        assert not self.exited, self.log

    @property
    def exited(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def engine(self) -> Any:
        """The engine's process."""
        (engine,) = (p for p in self._ps.children() if "engine.process" in " ".join(p.cmdline()))
        return engine

    def processes(self) -> list[Any]:
        """All processes of its session, orphans too."""
        session = self.process.pid
        return [p for p in psutil.process_iter() if _session(p.pid) == session and _lives(p)]

    # --- what it says about itself ---

    def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        raise KeyError(name)

    @property
    def num_running(self) -> int:
        return int(self.metric("lorakeet:num_requests_running"))

    @property
    def num_waiting(self) -> int:
        return int(self.metric("lorakeet:num_requests_waiting"))

    def wait_report(self) -> None:
        """Until the engine has reported again what it does."""
        time.sleep(2 * STATS_INTERVAL)

    def wait_idle(self) -> None:
        """No request runs or waits, and no KV block is held."""
        self.wait_report()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(self.metric(f"lorakeet:{name}") for name in names), "idle")

    def loaded(self) -> list[str]:
        """Names of the adapters that are in memory."""
        listed = self.http.get("/v1/adapters").json()["data"]
        return [adapter["id"] for adapter in listed if adapter["tier"] != "disk"]

    def wait_unloaded(self) -> None:
        """No adapter has rows in the pool."""
        wait_until(lambda: self.metric("lorakeet:lora_rows_used") == 0, "empty adapter pool")

    # --- what tests ask of it ---

    def complete(self, model: str, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """One greedy completion past any EOS, with log-probabilities; must succeed."""
        body = {"model": model, "prompt": prompt, **GREEDY, **fields}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @contextmanager
    def stream(self, model: str, prompt: str | list[int], **fields: Any) -> Iterator["Events"]:
        """The same as a stream of events. Leaving early closes the connection."""
        body = {"model": model, "prompt": prompt, "stream": True, **GREEDY, **fields}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            events = Events(response)  # kept: httpx closes a connection whose lines nobody holds
            yield events

    def load(self, name: str, path: Path, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path), **fields}
        return self.http.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> httpx.Response:
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    @contextmanager
    def connection(
        self, model: str, prompt: str | list[int], **fields: Any
    ) -> Iterator[socket.socket]:
        """A bare connection on which a completion has been asked for; it is closed at the end."""
        body = json.dumps({"model": model, "prompt": prompt, **GREEDY, **fields}).encode()
        url = httpx.URL(self.url)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json"
        )
        with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
            connection.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            yield connection

    # --- its end ---

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait_exit(self, seconds: float = 30) -> int:
        return self.process.wait(timeout=seconds)

    def kill_all(self) -> None:
        """End whatever is left of it, at once."""
        for process in self.processes():
            process.kill()
        self.process.wait(timeout=30)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _lives(process: Any) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}


class Events:
    """The events of one stream, up to its end; an error event is the last one."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.is_done = False  # [DONE] has come: it ended as it should

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            if line == "data: [DONE]":
                self.is_done = True
            elif line:
                assert line.startswith("data: "), line
                yield json.loads(line.removeprefix("data: "))

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next events; fewer at the end."""
        return list(itertools.islice(self, count))


@contextmanager
def serve(folder: Path, model: Path | None, *options: str, **env: str) -> Iterator[ServerProcess]:
    """A server that is ready. At the end it must stop with code 0 and leave no process behind."""
    server = ServerProcess(folder, model, *options, **env)
    try:
        server.wait_ready()
        yield server
        if not server.exited:
            server.terminate()
            assert server.wait_exit() == 0, server.log
            assert server.processes() == []
            assert "Traceback" not in server.log
    except BaseException:
        print(server.log[-5000:])
        raise
    finally:
        server.kill_all()
