"""How a server starts and ends: signals at every moment, faults at start, engines that are killed.

Whatever happens, no process is left, and the exit code tells what it was.
"""

import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.servers import START_SECONDS, ServerProcess, wait_until

OPTIONS = ("--device", "cpu", "--served-model-name", "base")
ENDLESS = {"max_tokens": 8000}  # longer than any of these tests


@contextmanager
def started(folder: Path, model: Path, *options: str) -> Iterator[ServerProcess]:
    """A server that may end in any way, but not leave a process behind."""
    server = ServerProcess(folder, model, *OPTIONS, *options)
    try:
        yield server
        server.wait_exit()
        wait_until(lambda: server.processes() == [], "no process is left")
    finally:
        server.kill_all()


def refused(server: ServerProcess) -> bool:
    """It takes no new work, and says so."""
    answers = [
        server.http.get("/health"),
        server.http.post("/v1/completions", json={"model": "base", "prompt": "hi"}),
        server.http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/x"}),
    ]
    return all(one.status_code == 503 and int(one.headers["retry-after"]) > 0 for one in answers)


def test_running_answers_are_finished_and_new_ones_refused(tmp_path: Path, model: Path) -> None:
    with (
        started(tmp_path, model, "--max-num-seqs", "2") as server,
        ThreadPoolExecutor(3) as threads,
    ):
        server.wait_ready()
        # one streams, one runs, one still waits
        with server.stream("base", "the quick", max_tokens=1500) as events:
            assert len(events.take(1)) == 1
            answers = [
                threads.submit(server.complete, "base", prompt, max_tokens=700)
                for prompt in ("brown", "fox")
            ]
            wait_until(lambda: server.num_running == 2 and server.num_waiting == 1, "a queue")
            server.terminate()
            wait_until(lambda: not server.is_healthy, "it drains")
            assert refused(server)
            last = list(events)[-1]
        assert events.is_done
        assert last["choices"][0]["finish_reason"] == "length"
        for answer in answers:
            assert answer.result()["usage"]["completion_tokens"] == 700
        assert server.wait_exit() == 0
        url = httpx.URL(server.url)
        socket.create_server((url.host, url.port or 0)).close()  # the port is free at once


def test_what_takes_too_long_ends_with_an_error(tmp_path: Path, model: Path) -> None:
    limits = ("--request-timeout", "2", "--drain-timeout", "0.5")
    with started(tmp_path, model, *limits) as server:
        server.wait_ready()
        body = {"model": "base", "prompt": "the quick", "ignore_eos": True, **ENDLESS}
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "request_timeout"
        with server.stream("base", "the quick", **ENDLESS) as events:
            assert list(events)[-1]["error"]["code"] == "request_timeout"
        assert not events.is_done
        server.wait_idle()
        with server.stream("base", "the quick", **ENDLESS) as events:
            assert len(events.take(1)) == 1
            server.terminate()
            assert list(events)[-1]["error"]["code"] == "draining"
        assert not events.is_done
        assert server.wait_exit() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(
    tmp_path: Path, model: Path, number: signal.Signals
) -> None:
    with started(tmp_path, model, "--drain-timeout", "600") as server:
        server.wait_ready()
        with server.stream("base", "the quick", **ENDLESS) as events:
            assert len(events.take(1)) == 1
            server.process.send_signal(number)
            wait_until(lambda: not server.is_healthy, "it drains")
            assert len(events.take(3)) == 3
            server.process.send_signal(number)
            assert list(events)[-1]["error"]["code"] == "draining"
        assert server.wait_exit() == 0


def listening(server: ServerProcess) -> None:
    server.wait_listening()


def loading(server: ServerProcess) -> None:
    server.wait_listening()
    wait_until(lambda: len(server.processes()) > 1, "the engine has a process", START_SECONDS)
    assert server.http.get("/health").status_code == 503


@pytest.mark.parametrize("moment", [listening, loading])
def test_a_signal_in_its_start_ends_it(
    tmp_path: Path, model: Path, moment: Callable[[ServerProcess], None]
) -> None:
    with started(tmp_path, model) as server:
        moment(server)
        server.terminate()
        assert server.wait_exit() == 0
    assert "ready: " not in server.log


def test_a_killed_engine_is_an_error_for_all(tmp_path: Path, model: Path) -> None:
    with (
        started(tmp_path, model, "--max-num-seqs", "1") as server,
        ThreadPoolExecutor(1) as threads,
    ):
        server.wait_ready()
        body = {"model": "base", "prompt": "the quick", **ENDLESS}
        with server.stream("base", "the quick", **ENDLESS) as events:
            assert len(events.take(1)) == 1
            waiting = threads.submit(server.http.post, "/v1/completions", json=body)
            wait_until(lambda: server.num_waiting == 1, "a queue")
            health = httpx.Client(base_url=server.url)
            assert health.get("/health").status_code == 200
            server.engine.kill()
            assert list(events)[-1]["error"]["code"] == "dead"
            assert health.get("/health").status_code == 503
        assert not events.is_done
        assert waiting.result().status_code == 503
        assert server.wait_exit() == 1
    assert "SIGKILL" in server.log


@pytest.mark.parametrize(("end", "code"), [("kill", 1), ("signal", 0)])
def test_a_load_that_cannot_end_is_an_error(
    tmp_path: Path, model: Path, root: Path, adapters: dict[str, Path], end: str, code: int
) -> None:
    with (
        started(tmp_path, model, "--adapter-dir", str(root), "--drain-timeout", "3") as server,
        ThreadPoolExecutor(1) as threads,
    ):
        server.wait_ready()
        server.engine.suspend()
        loading = threads.submit(server.load, "red", adapters["red"])
        time.sleep(0.5)  # it is on its way
        if end == "kill":
            server.engine.kill()
        else:
            server.terminate()
        assert loading.result().status_code == 503
        assert server.wait_exit() == code
    assert "Traceback" not in server.log


def test_a_killed_server_takes_its_engine_along(tmp_path: Path, model: Path) -> None:
    with started(tmp_path, model) as server:
        server.wait_ready()
        server.process.kill()


def test_what_cannot_start_says_why(tmp_path: Path, model: Path, adapters: dict[str, Path]) -> None:
    broken = shutil.copytree(adapters["red"], tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    with started(tmp_path, model, "--adapter", f"bad={broken}") as server:
        assert server.wait_exit(START_SECONDS) == 1
    assert "'bad' cannot be loaded: adapter_model.safetensors" in server.log
    assert "Traceback" not in server.log
