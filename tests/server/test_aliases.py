"""Aliases over the wire: stable names and canary splits, which adapter serves, what is refused."""

import concurrent.futures
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorakeet.server import aliases
from lorakeet.server.aliases import Aliases, Target
from support.toy_server import ToyServer, adapter_folder, toy_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def toy(toy_model: Path, root: Path) -> Iterator[ToyServer]:
    for k in (3, 5):
        adapter_folder(root / f"a{k}", k)
    with toy_server(toy_model, adapter_dirs=(root,)) as server:
        yield server


def put(toy: ToyServer, alias: str, *targets: Any) -> httpx.Response:
    """A target is a name, or a name and a weight."""
    wire = [
        {"adapter": one} if isinstance(one, str) else {"adapter": one[0], "weight": one[1]}
        for one in targets
    ]
    return toy.http.post("/v1/aliases", json={"alias": alias, "targets": wire})


def ask(toy: ToyServer, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": [40], "max_tokens": 1, **fields}
    return toy.http.post("/v1/completions", json=body)


def served(toy: ToyServer, model: str, **fields: Any) -> str:
    """The adapter whose header the answer has, and whose shift its text."""
    response = ask(toy, model, **fields)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    text = response.json()["choices"][0]["text"]
    shift = toy.server.tokenizer.encode(text, add_special_tokens=False)[0] - 40
    adapter: str = response.headers["x-lorakeet-adapter"]
    assert adapter == (f"a{shift}" if shift else "base")
    return adapter


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_stable_name_is_pointed_elsewhere(toy: ToyServer) -> None:
    made = put(toy, "prod", "a3")
    assert made.status_code == 200
    assert made.json()["targets"] == [{"adapter": "a3", "weight": 1.0}]
    assert toy.http.get("/v1/aliases/prod").json() == made.json()
    assert served(toy, "prod") == served(toy, "base", adapter="prod") == "a3"
    assert put(toy, "prod", "a5").status_code == 200
    assert served(toy, "prod") == "a5"
    assert served(toy, "base") == "base"
    assert [one["id"] for one in toy.http.get("/v1/aliases").json()["data"]] == ["prod"]
    assert toy.http.delete("/v1/aliases/prod").json()["deleted"] is True
    assert code(ask(toy, "prod")) == (404, "model_not_found")
    for method in (toy.http.get, toy.http.delete):
        assert code(method("/v1/aliases/prod")) == (404, "alias_not_found")


def test_other_names_for_an_alias(toy: ToyServer) -> None:
    put(toy, "org/prod", "a3")
    assert served(toy, "base:org/prod") == "a3"
    cards = toy.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["base", "a3", "a5", "org/prod"]
    assert toy.http.get("/v1/models/org/prod").json() == cards[-1]
    assert toy.http.get("/v1/adapters/org/prod").status_code == 404
    blend = ask(toy, "base", adapters=[{"name": "org/prod", "weight": 1.0}])
    assert blend.status_code == 200
    assert blend.headers["x-lorakeet-adapter"] == "a3"


def test_streams_say_who_serves(toy: ToyServer) -> None:
    put(toy, "prod", "a5")
    response = ask(toy, "prod", stream=True)
    assert response.headers["x-lorakeet-adapter"] == "a5"
    assert '"model":"prod"' in response.text


def test_a_canary_split(toy: ToyServer) -> None:
    """Of 300 requests at 1 : 3, fewer than 40 or more than 110 would be off by 5 sigma."""
    put(toy, "canary", ("a3", 1), ("a5", 3))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        counts = Counter(pool.map(lambda _: served(toy, "canary"), range(300)))
    assert counts.keys() == {"a3", "a5"}
    assert 40 < counts["a3"] < 110


def test_a_user_stays_with_a_target(toy: ToyServer) -> None:
    put(toy, "canary", ("a3", 1), ("base", 1))
    of_user = {f"u{i}": served(toy, "canary", user=f"u{i}") for i in range(24)}
    assert set(of_user.values()) == {"a3", "base"}  # 1 in 2**23 that all are the same
    assert {user: served(toy, "canary", user=user) for user in of_user} == of_user


def test_a_canary_in_a_blend(toy: ToyServer) -> None:
    """For the requests that go to the base model it adds nothing."""
    put(toy, "canary", ("a3", 1), ("base", 1))
    blend = [{"name": "canary", "weight": 2}, {"name": "a5", "weight": 1}]
    answers = [ask(toy, "base", adapters=blend, user=f"u{i}") for i in range(24)]
    encode = toy.server.tokenizer.encode
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert {encode(text, False)[0] - 40 for text in texts} == {5, 11}
    answers = [ask(toy, "base", adapters=blend[:1], user=f"u{i}") for i in range(24)]
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert {encode(text, False)[0] - 40 for text in texts} == {0, 6}


def test_users_are_shared_out_by_weight() -> None:
    aliases = Aliases()
    aliases.put("x", [Target("a", 1), Target("b", 3), Target("c", 6)])
    counts = Counter(aliases.choose("x", f"user-{i}") for i in range(10_000))
    for name, share in (("a", 1000), ("b", 3000), ("c", 6000)):
        assert abs(counts[name] - share) < 250  # 5 sigma
    assert aliases.choose("x", "user-1") == aliases.choose("x", "user-1")
    moved = [f"user-{i}" for i in range(1000) if aliases.choose("x", f"user-{i}") == "c"]
    aliases.put("x", [Target("a", 1), Target("b", 2), Target("c", 7)])
    assert all(aliases.choose("x", user) == "c" for user in moved)  # more for c: nobody leaves it


@pytest.mark.parametrize(
    ("alias", "targets", "expected"),
    [
        ("new", ["nope"], (404, "adapter_not_found")),
        ("new", ["a3", "nope"], (404, "adapter_not_found")),
        ("new", ["prod"], (400, "alias_of_alias")),
        ("prod", ["prod"], (400, "alias_of_alias")),
        ("new", [], (400, "invalid_value")),
        ("new", ["a3", "a3"], (400, "bad_request")),
        ("new", [("a3", 0)], (400, "invalid_value")),
        ("new", [("a3", -1)], (400, "invalid_value")),
        ("a3", ["a5"], (409, "name_taken")),
        ("base", ["a5"], (400, "invalid_name")),
        ("base:x", ["a5"], (400, "invalid_name")),
        ("a b", ["a5"], (400, "invalid_name")),
    ],
)
def test_refused(toy: ToyServer, alias: str, targets: list[Any], expected: tuple[int, str]) -> None:
    put(toy, "prod", "a3")
    response = put(toy, alias, *targets)
    assert response.status_code == expected[0], response.text
    if expected[1] != "bad_request":
        assert code(response) == expected
    assert served(toy, "prod") == "a3"
    assert [one["id"] for one in toy.http.get("/v1/aliases").json()["data"]] == ["prod"]


def test_their_number_is_bounded(toy: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "MAX_ALIASES", 2)
    assert [put(toy, name, "a3").status_code for name in ("one", "two")] == [200, 200]
    assert code(put(toy, "three", "a3")) == (400, "too_many_aliases")
    assert put(toy, "two", "a5").status_code == 200
    assert served(toy, "two") == "a5"
    assert code(ask(toy, "three")) == (404, "model_not_found")
    toy.http.delete("/v1/aliases/one")
    assert put(toy, "three", "a3").status_code == 200


def test_names_are_taken_both_ways(toy: ToyServer, root: Path) -> None:
    put(toy, "prod", "a3")
    body = {"lora_name": "prod", "lora_path": str(root / "a5"), "load_inplace": True}
    assert code(toy.http.post(LOAD, json=body)) == (409, "name_taken")
    adapter_folder(root / "prod", 9)  # the alias was there first
    assert served(toy, "prod") == "a3"
    assert [card["id"] for card in toy.http.get("/v1/models").json()["data"]].count("prod") == 1


def test_a_target_cannot_be_unloaded_but_swapped(toy: ToyServer, root: Path) -> None:
    put(toy, "prod", "a3", "a5")
    for name in ("a3", "a5"):
        assert code(toy.http.post(UNLOAD, json={"lora_name": name})) == (409, "adapter_in_use")
        assert served(toy, name) == name
    body = {"lora_name": "a3", "lora_path": str(root / "a5"), "load_inplace": True}
    assert toy.http.post(LOAD, json=body).status_code == 200
    toy.http.delete("/v1/aliases/prod")
    assert toy.http.post(UNLOAD, json={"lora_name": "a3"}).status_code == 200


def test_repointing_under_traffic(toy: ToyServer) -> None:
    """Every request is served by one of the targets, by the one that its header names."""
    put(toy, "prod", "a3")

    def work(number: int) -> None:
        if number % 4 == 0:
            assert put(toy, "prod", "a3" if number % 8 else "a5").status_code == 200
        else:
            assert served(toy, "prod") in ("a3", "a5")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(160)))
