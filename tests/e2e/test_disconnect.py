"""Clients that go, clients that wait, and clients that are too many, over real connections."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from support.parity import same_choice
from support.servers import ServerProcess, wait_until

LONG = {"max_tokens": 5000}  # far longer than any of these tests


def num_aborted(server: ServerProcess) -> int:
    try:
        return int(server.metric("lorakeet:requests_total", outcome="aborted"))
    except KeyError:
        return 0


@contextmanager
def cut_short(server: ServerProcess) -> Iterator[None]:
    """A request whose client goes: it ends long before its 5000 tokens."""
    steps, aborted = server.metric("lorakeet:steps_total"), num_aborted(server)
    yield
    wait_until(lambda: num_aborted(server) == aborted + 1, "the server has seen it go")
    wait_until(lambda: server.num_running == 0, "nothing runs")
    assert server.metric("lorakeet:steps_total") - steps < 2500


@pytest.mark.parametrize("num_events", [0, 1, 10])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_frees_everything(
    live: ServerProcess, adapters: dict[str, Path], num_events: int, n: int
) -> None:
    live.load("red", adapters["red"])
    with cut_short(live), live.stream("red", "the quick", n=n, temperature=1, **LONG) as events:
        assert len(events.take(num_events)) == num_events
        wait_until(lambda: live.num_running == n, "its choices run")


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_before_the_answer_frees_everything(
    live: ServerProcess, adapters: dict[str, Path], n: int
) -> None:
    live.load("red", adapters["red"])
    with cut_short(live), live.connection("red", "the quick", n=n, **LONG):
        wait_until(lambda: live.num_running == n, "its choices run")
    assert live.unload("red").status_code == 200
    live.wait_unloaded()


def test_leaving_the_queue_disturbs_nobody(live: ServerProcess, adapters: dict[str, Path]) -> None:
    live.load("red", adapters["red"])
    with ExitStack() as running:
        streams = [
            running.enter_context(live.stream("base", f"stream {i}", **LONG)) for i in range(4)
        ]
        wait_until(lambda: live.num_running == 4, "all places are taken")
        for stream in (True, False):
            with live.connection("red", "the quick", stream=stream, **LONG):
                wait_until(lambda: live.num_waiting == 1, "it waits")
            wait_until(lambda: live.num_waiting == 0, "it has left the queue")
        assert live.unload("red").status_code == 200
        assert all(len(events.take(5)) == 5 for events in streams)
        assert live.num_running == 4


def test_leaving_at_once_many_times(live: ServerProcess, adapters: dict[str, Path]) -> None:
    live.load("red", adapters["red"])
    expected = live.complete("red", "the quick")["choices"][0]
    for i in range(40):
        with live.connection(("red", "base")[i % 2], "the quick", stream=i % 3 == 0, **LONG):
            pass
    live.wait_idle()
    assert same_choice(live.complete("red", "the quick")["choices"][0], expected)


def test_leaving_amid_a_request_is_no_fault_of_the_server(live: ServerProcess) -> None:
    url = httpx.URL(live.url)
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"host: {url.host}",
        "content-type: application/json",
        "content-length: 100",
        "x-request-id: half",
        "",
        "{",
    )
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall("\r\n".join(lines).encode())
    wait_until(lambda: '"request_id": "half"' in live.log, "its line in the log")
    entries = [json.loads(line) for line in live.log.splitlines() if '"half"' in line]
    assert [(entry["level"], entry["status"]) for entry in entries] == [("info", 499)]


@pytest.mark.parametrize("stream", [True, False])
def test_half_a_close_is_no_goodbye(live: ServerProcess, stream: bool) -> None:
    with live.connection("base", "the quick", max_tokens=300, stream=stream) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"HTTP/1.1 200" in answer
    assert b'"finish_reason":"length"' in answer
    assert (b"[DONE]" in answer) == stream


def test_a_full_queue_answers_429_and_serves_again(live: ServerProcess) -> None:
    with ExitStack() as clients:
        first = clients.enter_context(ExitStack())
        first.enter_context(live.connection("base", "first", **LONG))
        for i in range(23):
            clients.enter_context(live.connection("base", f"client {i}", **LONG))
        wait_until(lambda: (live.num_running, live.num_waiting) == (4, 20), "the queue is full")
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {"model": "base", "stream": True, "max_tokens": 1}
            messages = [{"role": "user", "content": "hi"}]
            prompt = {"messages": messages} if "chat" in path else {"prompt": "hi"}
            response = live.http.post(path, json=body | prompt)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["code"] == "queue_full"
        assert live.is_healthy
        assert live.http.get("/v1/models").status_code == 200
        first.close()
        wait_until(lambda: live.num_waiting == 19, "one has moved up")
        with live.connection("base", "the last one", **LONG):
            wait_until(lambda: live.num_waiting == 20, "there is room for one more")
    live.wait_idle()
    assert len(live.complete("base", "the quick")["choices"]) == 1
