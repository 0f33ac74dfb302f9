"""Clients that go, half-close or are too many: over raw sockets, until everything is free again."""

import concurrent.futures
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorakeet.server import app
from support.servers import wait_until
from support.toy_server import ToyEngine, ToyServer, adapter_folder, toy_server

COMPLETIONS = "/v1/completions"


@pytest.fixture
def toy(toy_model: Path, tmp_path: Path) -> Iterator[ToyServer]:
    adapters = {"three": adapter_folder(tmp_path / "three", 3)}
    engine = ToyEngine(max_running=2, step_seconds=0.01)
    with toy_server(toy_model, engine, adapters=adapters) as server:
        yield server


def connect(toy: ToyServer, version: str = "1.1", **body: Any) -> socket.socket:
    """A connection on which a request was sent."""
    values = {"model": "three", "prompt": [40], "max_tokens": 2000, "ignore_eos": True, **body}
    content = json.dumps(values).encode()
    connection = socket.create_connection(("127.0.0.1", toy.port), timeout=20)
    connection.sendall(
        b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (version.encode(), len(content), content)
    )
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_goes(toy: ToyServer, stream: bool, n: int, version: str) -> None:
    """D12, C03: while it runs and, for the third child, while it waits."""
    connection = connect(toy, version, stream=stream, n=n)
    wait_until(lambda: len(toy.engine.running) == min(n, 2), "they run")
    connection.close()
    toy.wait_idle()
    assert len(toy.engine.aborted) == n
    assert toy.http.post("/v1/unload_lora_adapter", json={"lora_name": "three"}).status_code == 200
    assert not toy.engine.adapters


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_queued(toy: ToyServer, stream: bool) -> None:
    busy = [connect(toy) for _ in range(2)]
    wait_until(lambda: len(toy.engine.running) == 2, "both run")
    queued = connect(toy, stream=stream)
    wait_until(lambda: len(toy.engine.waiting) == 1, "one waits")
    queued.close()
    wait_until(lambda: not toy.engine.waiting, "it is gone")
    assert len(toy.engine.running) == 2
    for connection in busy:
        connection.close()


def test_a_client_that_goes_after_some_tokens(toy: ToyServer) -> None:
    connection = connect(toy, stream=True)
    data = b""
    while data.count(b"data: ") < 10:
        data += connection.recv(4096)
    connection.close()
    toy.wait_idle()
    assert len(toy.engine.aborted) == 1


def test_a_client_that_goes_before_its_body_is_whole(toy: ToyServer) -> None:
    connection = socket.create_connection(("127.0.0.1", toy.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'content-length: 100\r\n\r\n{"model"'
    )
    connection.close()
    toy.wait_idle()
    assert not toy.engine.requests


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_is_not_gone(toy: ToyServer, stream: bool) -> None:
    connection = connect(toy, stream=stream, max_tokens=100)
    connection.shutdown(socket.SHUT_WR)
    data = read_all(connection)
    assert b"HTTP/1.1 200 OK" in data
    assert b'"finish_reason":"length"' in data
    assert (b"[DONE]" in data) == stream
    assert not toy.engine.aborted


def test_many_clients_that_go(toy: ToyServer) -> None:
    for number in range(60):
        connect(toy, stream=bool(number % 2), n=1 + number % 3).close()
    toy.wait_idle()


def test_a_reset_connection(toy: ToyServer) -> None:
    connection = connect(toy)
    wait_until(lambda: toy.engine.running, "it runs")
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    toy.wait_idle()
    assert len(toy.engine.aborted) == 1


def test_bodies_of_all_requests_are_bounded(
    toy: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they run, wait or are being received; who is answered, or goes, makes room."""
    monkeypatch.setattr(app, "MAX_HELD_BYTES", 5000)
    running = connect(toy, user="x" * 2000, stream=True)
    waiting = connect(toy, user="x" * 2000, n=3)
    wait_until(
        lambda: len(toy.engine.running) == 2 and len(toy.engine.waiting) == 2,
        "two run and two wait",
    )
    body = {"model": "base", "prompt": [40], "max_tokens": 1, "user": "x" * 1000}
    refused = toy.http.post(COMPLETIONS, json=body)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "bodies_too_large"
    assert refused.headers["retry-after"]
    assert toy.http.get("/health").status_code == 200
    assert toy.http.post(COMPLETIONS, json={**body, "model": "nope", "user": ""}).status_code == 404
    for connection in (running, waiting):
        connection.close()
    toy.wait_idle()
    for _ in range(6):
        assert toy.http.post(COMPLETIONS, json=body).status_code == 200


def test_large_bodies_leave_room_for_small_ones(
    toy: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_HELD_BYTES", 50_000)
    monkeypatch.setattr(app, "RESERVED_BYTES", 20_000)
    monkeypatch.setattr(app, "SMALL_BODY", 5000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    large = head + b"content-length: 20000\r\n\r\n" + b" " * 10_000  # and then nothing
    body = {"model": "base", "prompt": [40], "max_tokens": 1}
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = socket.create_connection(("127.0.0.1", toy.port), timeout=10)
            stack.enter_context(connection).sendall(large)
        assert connection.recv(100).startswith(b"HTTP/1.1 429")  # there are too many of them
        assert toy.http.post(COMPLETIONS, json=body).status_code == 200
        refused = toy.http.post(COMPLETIONS, json={**body, "user": "x" * 6000})
        assert refused.json()["error"]["code"] == "bodies_too_large"
    toy.wait_idle()
    assert toy.http.post(COMPLETIONS, json={**body, "user": "x" * 6000}).status_code == 200


def test_connections_are_bounded(toy: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakeet.server.http.MAX_CONNECTIONS", 2)
    toy.http.close()
    address = ("127.0.0.1", toy.port)
    others = [socket.create_connection(address, timeout=10) for _ in range(2)]
    with socket.create_connection(address, timeout=10) as connection:
        assert read_all(connection) == b""
    for other in others:
        other.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert read_all(other).startswith(b"HTTP/1.1 200")
        other.close()
    with httpx.Client(base_url=toy.url) as client:
        wait_until(lambda: _is_served(client), "there is room again")


def _is_served(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        return client.get("/health").status_code == 200
    return False


# --- clients that stand still ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"GET /hea",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'content-length: 100\r\n\r\n{"model"',
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n",
    ],
    ids=["nothing", "head", "body", "second"],
)
def test_a_request_that_never_comes_whole(
    toy: ToyServer, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr("lorakeet.server.http.RECEIVE_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", toy.port), timeout=10) as connection:
        connection.sendall(part)
        data = read_all(connection)
    assert data.count(b"HTTP/1.1 408") == 1
    assert b'"code":"request_timeout"' in data
    toy.wait_idle()


def begin_upload(toy: ToyServer, content: bytes) -> socket.socket:
    """A connection on which the start of an upload was sent."""
    connection = socket.create_connection(("127.0.0.1", toy.port), timeout=20)
    connection.sendall(
        b"POST /v1/adapters HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n"
        b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        b'content-disposition: form-data; name="f"; filename="README.md"\r\n\r\n' + content
    )
    return connection


@pytest.fixture
def impatient(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ToyServer]:
    """It takes uploads, and waits for a second."""
    monkeypatch.setattr("lorakeet.server.http.RECEIVE_SECONDS", 1.0)
    with toy_server(toy_model, adapter_upload_dir=tmp_path) as toy:
        yield toy


def test_what_came_fast_earns_no_long_silence(impatient: ToyServer) -> None:
    """At RECEIVE_RATE, these bytes would have taken minutes."""
    with begin_upload(impatient, b"x" * (20 * 2**20)) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_who_goes_on_sending_is_not_cut_off(impatient: ToyServer) -> None:
    with begin_upload(impatient, b"") as connection:
        for _ in range(12):
            time.sleep(0.25)
            connection.sendall(b"x" * 2**16)  # twice RECEIVE_RATE
        assert impatient.server.uploads._running == 1


def test_what_nobody_wants_is_not_received_for_ever(
    toy: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that goes on, fast enough for an upload, after it was refused."""
    monkeypatch.setattr("lorakeet.server.http.RECEIVE_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", toy.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            b"content-type: text/plain\r\n\r\n"
        )
        deadline = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):  # it ends so
            while time.monotonic() < deadline:
                connection.sendall(b"10000\r\n" + b"x" * 2**16 + b"\r\n")
        assert time.monotonic() < deadline
    toy.wait_idle()


def test_the_time_to_send_a_request_is_not_the_time_to_answer_it(
    toy: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorakeet.server.http.RECEIVE_SECONDS", 0.2)
    data = read_all(connect(toy, max_tokens=60))
    assert b"HTTP/1.1 200" in data
    assert b'"finish_reason":"length"' in data


def test_a_client_that_does_not_read_is_cut_off(
    toy: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorakeet.server.http.STALL_SECONDS", 0.3)
    toy.engine.step_seconds = 0.0
    toy.engine.max_running = 32
    connection = connect(toy, stream=True, n=32, logprobs=0)  # more than all buffers hold
    wait_until(lambda: toy.engine.aborted, "it was ended")
    toy.wait_idle()
    connection.close()


@pytest.mark.parametrize("begun", [False, True])
def test_garbage_in_a_body(toy: ToyServer, begun: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Before the answer and behind it: the connection ends, nothing else."""
    content_type = b"text/plain" if begun else b"application/json"  # the first is refused at once
    with socket.create_connection(("127.0.0.1", toy.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            b"content-type: %b\r\n\r\n2\r\n{}\r\n" % content_type
        )
        data = connection.recv(65536) if begun else b""
        connection.sendall(b"GARBAGE\r\n\r\n")
        data += read_all(connection)
    assert data.startswith(b"HTTP/1.1 415" if begun else b"HTTP/1.1 400")
    assert data.count(b"HTTP/1.1") == 1
    toy.wait_idle()
    assert not [record for record in caplog.records if record.exc_info]


# --- too much -------------------------------------------------------------------------------------


def test_the_queue_is_bounded(toy_model: Path) -> None:
    """E04: so many are served, the others are told at once, and the server stays awake."""
    engine = ToyEngine(max_running=4, step_seconds=0.01)
    limits = {"max_num_seqs": 4, "max_queue": 20}
    with toy_server(toy_model, engine, **limits) as toy:
        body = {"model": "base", "prompt": [40], "max_tokens": 50}

        def ask(number: int) -> tuple[int, httpx.Headers]:
            with httpx.Client(base_url=toy.url, timeout=60) as client:
                response = client.post(COMPLETIONS, json={**body, "stream": bool(number % 2)})
                return response.status_code, response.headers

        with concurrent.futures.ThreadPoolExecutor(60) as pool:
            asked = [pool.submit(ask, number) for number in range(60)]
            wait_until(lambda: toy.server._reserved == 24, "all are taken in")
            assert toy.http.get("/health").status_code == 200
            assert toy.http.get("/v1/models").status_code == 200
            answers = [future.result() for future in asked]
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 24
        for status, headers in answers:
            if status == 429:
                assert headers["retry-after"]
                assert headers["content-type"] == "application/json"
        toy.wait_idle()
        assert toy.http.post(COMPLETIONS, json={**body, "n": 24}).status_code == 200
        assert toy.http.post(COMPLETIONS, json={**body, "n": 25}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(toy_model: Path, stream: bool) -> None:
    engine = ToyEngine(max_running=1, step_seconds=0.02)
    with toy_server(toy_model, engine, request_timeout=0.5) as toy:
        body = {"model": "base", "prompt": [40], "max_tokens": 1000, "stream": stream}
        response = toy.http.post(COMPLETIONS, json=body)
        toy.wait_idle()
        if stream:
            assert response.status_code == 200
            events = [line for line in response.text.splitlines() if line]
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == (
                "request_timeout"
            )
            assert len(events) > 3
        else:
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "request_timeout"


def test_a_queued_request_that_takes_too_long_has_a_status(toy_model: Path) -> None:
    engine = ToyEngine(max_running=0)
    with toy_server(toy_model, engine, request_timeout=0.2) as toy:
        body = {"model": "base", "prompt": [40], "max_tokens": 10, "stream": True}
        assert toy.http.post(COMPLETIONS, json=body).status_code == 504


# --- the engine dies ------------------------------------------------------------------------------


def test_when_the_engine_dies(toy: ToyServer) -> None:
    stream = connect(toy, stream=True)
    whole = connect(toy)
    wait_until(lambda: len(toy.engine.running) == 2, "both run")
    assert stream.recv(65536)
    toy._loop.call_soon_threadsafe(toy.engine.die)
    data = read_all(stream)
    assert b'"error"' in data
    assert b"[DONE]" not in data
    assert b'"finish_reason":"' not in data
    assert b"HTTP/1.1 503" in read_all(whole)
    for path in ("/health", "/v1/models"):
        response = toy.http.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "dead"
    assert toy.http.get("/metrics").status_code == 200
