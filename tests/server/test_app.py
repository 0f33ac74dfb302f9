"""The gate in front of the routes: API key, request ids, log lines; and the metrics."""

import contextlib
import http.client
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorakeet.server.app import MAX_LOGGED, create_app
from lorakeet.server.engine.messages import EngineStats
from lorakeet.server.metrics import MAX_ADAPTER_LABELS, OTHER, Metrics
from support.toy_server import ToyEngine, ToyServer, adapter_folder, toy_server

KEY = "sk-Sésame-1"  # not ASCII: comparing must not fail on it
COMPLETION = {"model": "base", "prompt": [40], "max_tokens": 3}


@pytest.fixture(scope="module")
def locked(toy_model: Path) -> Iterator[ToyServer]:
    with toy_server(toy_model, api_key=KEY) as server:
        yield server


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/base"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/adapters"),
    ("GET", "/v1/aliases"),
    ("POST", "/v1/aliases"),
    ("DELETE", "/v1/aliases/x"),
    ("GET", "/v1/adapters/x"),
    ("DELETE", "/v1/adapters/x"),
    ("POST", "/v1/adapters"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nope"),
    ("GET", "//v1/models"),
    ("GET", "/v1/models/"),
    ("GET", "/v1/../health"),
    ("GET", "/health/"),
    ("GET", "/Health"),
    ("GET", "/health/../v1/models"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("HEAD", "/v1/models"),
    ("OPTIONS", "/v1/completions"),
]
WRONG = [
    None,
    "",
    KEY,
    f"Basic {KEY}",
    "Bearer",
    "Bearer wrong",
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
    f"bearer {KEY.lower()}",
    f"Bearer Bearer {KEY}",
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_the_key(locked: ToyServer, method: str, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", locked.port)  # sends paths as they are
    for value in WRONG:
        headers = {} if value is None else {"authorization": value.encode()}
        connection.request(method, f"{path}?api_key=x", headers=headers)
        response = connection.getresponse()
        body = response.read().decode()
        assert response.status == 401
        assert response.getheader("www-authenticate") == "Bearer"
        if method != "HEAD":
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            assert KEY not in body
    connection.close()


def test_the_routing_table_is_covered(locked: ToyServer) -> None:
    """No route is open but the two that are meant to be."""

    async def paths() -> set[str]:
        app = create_app(locked.server)
        return {route.path for route in app._app.routes}  # type: ignore[attr-defined]

    tested = {path for _, path in ROUTES}
    open_paths = {"/health", "/metrics"}
    for path in locked.call(paths()) - open_paths:
        assert path.split("{")[0].rstrip("/") in {p.rstrip("/") for p in tested}


def test_with_the_key(locked: ToyServer) -> None:
    for scheme in ("Bearer", "bearer"):  # the scheme's case does not matter, RFC 9110
        headers = {b"authorization": f"{scheme} {KEY}".encode()}
        assert locked.http.get("/v1/models", headers=headers).status_code == 200
    assert locked.http.get("/health").status_code == 200
    assert locked.http.get("/metrics").status_code == 200
    assert KEY not in locked.http.get("/metrics").text
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_request_ids(toy: ToyServer) -> None:
    given = toy.http.get("/v1/models", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = [toy.http.post("/v1/completions", json=COMPLETION) for _ in range(2)]
    assert len({response.headers["x-request-id"] for response in made}) == 2
    for bad in ("x" * 200, "a b", "é"):
        response = toy.http.get("/nope", headers={b"x-request-id": bad.encode()})
        assert response.headers["x-request-id"] != bad
        assert response.status_code == 404


def test_a_line_a_request(toy: ToyServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lorakeet.request"):
        body = {**COMPLETION, "model": "three"}
        response = toy.http.post("/v1/completions?secret=1", json=body)
        toy.wait_idle()
        toy.http.get("/health")
    assert len(caplog.records) == 1
    line = caplog.records[0].msg
    assert isinstance(line, dict)
    wanted = {
        "event": "request",
        "request_id": response.headers["x-request-id"],
        "id": response.json()["id"],
        "adapter": "three",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "finish_reasons": ["length"],
    }
    assert {key: line[key] for key in wanted} == wanted
    assert 0 <= line["ttft"] <= line["seconds"]
    assert "secret" not in str(line)


def test_a_line_is_bounded(toy: ToyServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lorakeet.request"):
        assert toy.http.request("X" * 10**4, "/" + "x" * 10**4).status_code == 404
        toy.wait_idle()
    line = caplog.records[0].msg
    assert isinstance(line, dict)
    assert (line["method"], line["path"]) == ("X" * MAX_LOGGED, "/" + "x" * (MAX_LOGGED - 1))


# --- metrics --------------------------------------------------------------------------------------


def samples(toy: ToyServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = toy.http.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def tokens(toy: ToyServer, adapter: str, kind: str) -> float:
    labels = (("adapter", adapter), ("kind", kind))
    return samples(toy).get(("lorakeet:tokens_total", labels), 0.0)


def test_metrics(toy_model: Path, tmp_path: Path) -> None:
    x = adapter_folder(tmp_path / "x", 3)
    with toy_server(toy_model, adapters={"x": x}) as toy:
        toy.http.post("/v1/completions", json={**COMPLETION, "model": "x", "n": 2})
        toy.wait_idle()
        toy.engine.report(EngineStats(slot_load_seconds=[0.01, 0.02]))
        found = samples(toy)
        assert found["lorakeet:time_to_first_token_seconds_count", ()] == 1
        assert found["lorakeet:inter_token_latency_seconds_count", ()] == 4
        assert found["lorakeet:e2e_request_latency_seconds_count", ()] == 1
        assert found["lorakeet:request_queue_time_seconds_count", ()] == 2
        assert found["lorakeet:request_queue_time_seconds_sum", ()] == 0.5
        assert found["lorakeet:requests_total", (("outcome", "length"),)] == 1
        assert (tokens(toy, "x", "prompt"), tokens(toy, "x", "generation")) == (1, 6)
        for stage in ("read", "check"):
            assert found["lorakeet:adapter_load_seconds_count", (("stage", stage),)] == 1
        assert found["lorakeet:adapter_load_seconds_count", (("stage", "copy"),)] == 2
        for prefix in ("vllm:", "lorakeet:"):
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                assert found[prefix + name, ()] == 0
        cache = [dict(labels) for name, labels in found if name == "vllm:cache_config_info"]
        assert cache[0]["block_size"] == "16"
        assert cache[0]["num_gpu_blocks"] == "10"


def test_lora_requests_info(toy_model: Path, tmp_path: Path) -> None:
    folders = {name: adapter_folder(tmp_path / name, k) for k, name in enumerate("xyz", start=3)}
    engine = ToyEngine(max_running=1, step_seconds=0.02)
    with toy_server(toy_model, engine, adapters=folders) as toy:
        body = {**COMPLETION, "max_tokens": 500, "stream": True}
        url = f"{toy.url}/v1/completions"

        def wait_in_vain() -> None:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(url, json={**body, "model": "y"}, timeout=0.5)

        with toy.http.stream("POST", url, json={**body, "model": "x"}):
            second = threading.Thread(target=wait_in_vain)
            second.start()
            while not engine.waiting:
                pass
            labels = next(
                dict(labels) for name, labels in samples(toy) if name == "vllm:lora_requests_info"
            )
            second.join()
        assert labels == {
            "max_lora": "4",
            "running_lora_adapters": "x",
            "waiting_lora_adapters": "y",
        }


def test_series_go_with_their_adapter(toy_model: Path, tmp_path: Path) -> None:
    """C11: /metrics is as large after many adapters as before."""
    folder = adapter_folder(tmp_path / "x", 3)
    with toy_server(toy_model, adapter_dirs=(tmp_path,)) as toy:

        def cycle(number: int) -> None:
            name = f"adapter-{number}"
            load = {"lora_name": name, "lora_path": str(folder)}
            assert toy.http.post("/v1/load_lora_adapter", json=load).status_code == 200
            assert toy.http.post("/v1/completions", json={**COMPLETION, "model": name}).is_success
            toy.wait_idle()
            assert toy.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).is_success

        cycle(0)
        before = set(samples(toy))
        for number in range(1, 30):
            cycle(number)
        assert set(samples(toy)) == before


def test_a_swap_keeps_the_series(toy_model: Path, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "x", 3)
    with toy_server(toy_model, adapter_dirs=(tmp_path,)) as toy:
        load = {"lora_name": "n", "lora_path": str(folder), "load_inplace": True}
        for _ in range(2):
            assert toy.http.post("/v1/load_lora_adapter", json=load).status_code == 200
            assert toy.http.post("/v1/completions", json={**COMPLETION, "model": "n"}).is_success
        toy.wait_idle()
        assert tokens(toy, "n", "prompt") == 2


def test_labels_are_bounded() -> None:
    metrics = Metrics("base")
    for number in range(MAX_ADAPTER_LABELS + 50):
        metrics.adapter_loaded(f"a{number}", {})
        metrics.count_tokens(f"a{number}", 1, 2)
    families = list(text_string_to_metric_families(metrics.render().decode()))
    values = {
        sample.labels["adapter"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "lorakeet:tokens_total" and sample.labels["kind"] == "prompt"
    }
    assert len(values) == MAX_ADAPTER_LABELS + 1
    assert values[OTHER] == 50
    metrics.forget_adapter("a0")
    metrics.count_tokens("a0", 1, 2)
    assert b'adapter="a0"' not in metrics.render()
