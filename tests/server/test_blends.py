"""The field `adapters`: what it runs on, what it refuses, and how long it holds what it names."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorakeet.server.engine.messages import MAX_BLEND
from support.toy_server import ToyServer, adapter_folder, toy_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def toy(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyServer]:
    root = tmp_path_factory.mktemp("adapters")
    adapters = {
        "three": adapter_folder(root / "start" / "three", 3),
        "five": adapter_folder(root / "start" / "five", 5),
        "seven": adapter_folder(root / "start" / "seven", 7),
        "dora": adapter_folder(root / "start" / "dora", 2, blendable=False),
    }
    adapter_folder(root / "lazy" / "eleven", 11)
    adapter_folder(root / "lazy" / "broken", bad="it is broken")
    with toy_server(toy_model, adapters=adapters, adapter_dirs=(root / "lazy",)) as server:
        yield server


def parts(*pairs: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "weight": weight} for name, weight in pairs]


def post(toy: ToyServer, path: str, **body: Any) -> Any:
    required = {"messages": MESSAGES} if path == CHAT else {"prompt": [40]}
    return toy.http.post(path, json={"model": "base", "max_tokens": 1, **required, **body})


@pytest.mark.parametrize(
    ("adapters", "k"),
    [
        ([], 0),
        (parts(("three", 1)), 3),
        (parts(("three", 2)), 6),
        (parts(("three", 1), ("five", 1)), 8),
        (parts(("five", 2.0), ("three", -1.0)), 7),
        (parts(("three", 1), ("five", 0)), 3),
        (parts(("three", 1), ("three", -1)), 0),
        (parts(("three", 0.5), ("three", 0.5)), 3),
        (parts(("three", 1), ("five", 1), ("three", 2)), 14),
        (parts(("eleven", 2), ("three", 1)), 25),
        (parts(("dora", 1)), 2),
        (parts(("dora", 0), ("three", 2)), 6),
    ],
)
def test_the_weighted_sum(toy: ToyServer, adapters: list[dict[str, Any]], k: int) -> None:
    answer = post(toy, COMPLETIONS, adapters=adapters)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == toy.server.tokenizer.decode([40 + k])
    assert answer.json()["model"] == "base"
    assert post(toy, CHAT, adapters=adapters).status_code == 200
    events = post(toy, COMPLETIONS, adapters=adapters, stream=True).text.splitlines()
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"][0]["text"] == toy.server.tokenizer.decode([40 + k])


@pytest.mark.parametrize("name", ["base", "nope"])
@pytest.mark.parametrize("field", ["adapter", "adapters"])
def test_what_is_no_adapter_is_said_to_be_none(toy: ToyServer, field: str, name: str) -> None:
    """The base model does exist, but not as an adapter."""
    named: Any = name if field == "adapter" else parts((name, 1), ("three", 1))
    answer = post(toy, COMPLETIONS, **{field: named})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(f"There is no adapter '{name}': {field}")
    assert answer.json()["error"]["message"].endswith("takes adapters and aliases only")


def test_one_with_weight_1_is_that_adapter_and_none_is_the_base(toy: ToyServer) -> None:
    """So they share the prefix cache."""
    post(toy, COMPLETIONS, adapter="three")
    three = toy.engine.requests[-1].adapter_id
    for adapters, adapter_id in (
        (parts(("three", 1)), three),
        (parts(("three", 0.25), ("three", 0.75)), three),
        (parts(("three", 1), ("five", 0)), three),
        ([], 0),
        (parts(("three", 0)), 0),
    ):
        post(toy, COMPLETIONS, adapters=adapters)
        request = toy.engine.requests[-1]
        assert (request.adapter_id, request.blend) == (adapter_id, ())


def test_a_sum_has_one_form_whatever_the_order(toy: ToyServer) -> None:
    blends = set()
    for adapters in (
        parts(("three", 0.5), ("five", -2)),
        parts(("five", -2.0), ("three", 0.5)),
        parts(("five", -1), ("three", 0.5), ("five", -1), ("seven", 0)),
    ):
        post(toy, COMPLETIONS, adapters=adapters, n=2)
        assert toy.engine.requests[-1].adapter_id == 0
        blends |= {request.blend for request in toy.engine.requests[-2:]}
    assert len(blends) == 1
    assert sorted(weight for _, weight in blends.pop()) == [-2.0, 0.5]


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"adapters": parts(("three", 1), ("nope", 1))}, 404, "adapters[1].name", None),
        ({"adapters": parts(("base", 1))}, 404, "adapters[0].name", None),
        ({"adapters": parts(("nope", 0))}, 404, "adapters[0].name", None),
        ({"adapters": parts(("three", 1), ("broken", 1))}, 400, "adapters[1].name", None),
        (
            {"adapters": parts(("three", 1), ("dora", 2))},
            400,
            "adapters[1].name",
            "not_blendable",
        ),
        (
            {"adapters": parts(("three", 1), ("five", 1), ("seven", 1))},
            400,
            "adapters",
            "blend_too_large",
        ),
        ({"adapters": parts(*[("three", 1)] * (MAX_BLEND + 1))}, 400, "adapters", None),
        ({"adapters": [], "adapter": "three"}, 400, "adapters", "adapter_conflict"),
        ({"adapters": parts(("three", 1)), "adapter": "three"}, 400, "adapters", None),
        ({"adapters": parts(("three", 1)), "model": "three"}, 400, "adapters", None),
        ({"adapters": [], "model": "base:five"}, 400, "adapters", "adapter_conflict"),
        ({"adapters": [{"name": "three"}]}, 400, "adapters[0].weight", "missing_field"),
        ({"adapters": [{"weight": 1}]}, 400, "adapters[0].name", "missing_field"),
        ({"adapters": parts(("three", 1), ("five", 1e400))}, 400, "adapters[1].weight", None),
        ({"adapters": parts(("three", float("nan")))}, 400, "adapters[0].weight", None),
        ({"adapters": parts(("three", 1e9))}, 400, "adapters[0].weight", None),
        ({"adapters": [{"name": "three", "weight": "1"}]}, 400, "adapters[0].weight", None),
        ({"adapters": [{"name": "three", "weight": True}]}, 400, "adapters[0].weight", None),
        ({"adapters": [{"name": 3, "weight": 1}]}, 400, "adapters[0].name", None),
        (
            {"adapters": [{"name": "three", "weight": 1, "scale": 2}]},
            400,
            "adapters[0].scale",
            "unknown_field",
        ),
        ({"adapters": "three"}, 400, "adapters", None),
        ({"adapters": ["three"]}, 400, "adapters[0]", None),
        ({"adapters": {"three": 1}}, 400, "adapters", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(
    toy: ToyServer,
    body: dict[str, Any],
    status: int,
    param: str | None,
    code: str | None,
    stream: bool,
) -> None:
    for path in (CHAT, COMPLETIONS):
        before = len(toy.engine.requests)
        required = {"messages": MESSAGES} if path == CHAT else {"prompt": [40]}
        content = json.dumps({"model": "base", "stream": stream, **required, **body})
        headers = {"content-type": "application/json"}
        response = toy.http.post(path, content=content, headers=headers)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == param, error
        assert code is None or error["code"] == code
        assert len(toy.engine.requests) == before


def test_an_unloaded_adapter_is_freed_after_the_blend_that_runs_on_it(
    toy: ToyServer,
) -> None:
    """The lease covers every adapter of a request; so the toy's own assertions hold."""
    root = toy.settings.adapter_dirs[0]
    for name, k in (("x", 20), ("y", 30)):
        folder = adapter_folder(root / name, k)
        body = {"lora_name": f"{name}-now", "lora_path": str(folder)}
        assert toy.http.post("/v1/load_lora_adapter", json=body).status_code == 200
    toy.engine.step_seconds = 0.05
    answers: list[str] = []

    def ask() -> None:
        adapters = parts(("x-now", 1), ("y-now", -1))
        answer = post(toy, COMPLETIONS, adapters=adapters, max_tokens=12, ignore_eos=True)
        answers.append(answer.json()["choices"][0]["finish_reason"])

    thread = threading.Thread(target=ask)
    try:
        thread.start()
        deadline = time.monotonic() + 10
        while not any(request.blend for request in toy.engine.running.values()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        held = {part for r in toy.engine.running.values() for part, _ in r.blend}
        for name in ("x-now", "y-now"):
            body = {"lora_name": name}
            assert toy.http.post("/v1/unload_lora_adapter", json=body).status_code == 200
        assert held <= toy.engine.adapters.keys()
        refused = post(toy, COMPLETIONS, adapters=parts(("three", 1), ("y-now", 1)))
        assert refused.json()["error"]["param"] == "adapters[1].name"
        thread.join()
        assert answers == ["length"]
        while held & toy.engine.adapters.keys():
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        toy.engine.step_seconds = 0.0
        thread.join()


def test_metrics_have_no_series_for_each_blend(toy: ToyServer) -> None:
    def lines() -> set[str]:
        text = toy.http.get("/metrics").text
        return {line.rpartition(" ")[0] for line in text.splitlines() if "tokens" in line}

    post(toy, COMPLETIONS, adapters=parts(("three", 2), ("five", 1)))
    before = lines()
    for weight in (0.5, 0.25, 0.125):
        post(toy, COMPLETIONS, adapters=parts(("three", weight), ("five", 1)))
    assert lines() == before
