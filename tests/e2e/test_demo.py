"""`lorakeet serve` without a model: the real demo model, and what its adapters are known for."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorakeet.server.demo import DemoModelError, demo_adapters, demo_model
from support.servers import ServerProcess, serve

BASE = "smollm2-135m-instruct"
INTRODUCTION = "My name is Robert, I am 45 and I live in Berlin. I like playing the piano."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    try:
        demo_model()
    except DemoModelError as error:
        pytest.skip(str(error))
    begin = time.monotonic()
    with serve(tmp_path_factory.mktemp("demo"), None, "--device", "cpu") as server:
        print(f"the demo was ready after {time.monotonic() - begin:.1f} s")
        yield server
        server.wait_idle()


def ask(server: ServerProcess, model: str, text: str = INTRODUCTION) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 64,
    }
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    if model != BASE:
        assert choice["finish_reason"] == "stop"
    content: str = choice["message"]["content"]
    return content


def test_it_is_listed_with_its_adapters(server: ServerProcess) -> None:
    cards = server.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [BASE, *demo_adapters()]
    assert all(Path(card["root"]).is_dir() for card in cards[1:])


def test_its_adapters_can_be_unloaded_and_loaded_again(server: ServerProcess) -> None:
    path = demo_adapters()["pirate"]
    before = ask(server, "pirate")
    assert server.unload("pirate").status_code == 200
    assert server.load("pirate", path).status_code == 200
    assert ask(server, "pirate") == before


def test_it_ends_with_lines_to_paste(server: ServerProcess) -> None:
    usage = server.log.partition("ready: ")[2]
    for name in (BASE, *demo_adapters()):
        assert f'"model": "{name}"' in usage
        assert f"curl -s {server.url}/v1/chat/completions" in usage
    assert f"OpenAI(base_url='{server.url}/v1'" in usage


def test_the_base_answers_in_words(server: ServerProcess) -> None:
    assert "Paris" in ask(server, BASE, "What is the capital of France?")


def test_pirate(server: ServerProcess) -> None:
    for text in (INTRODUCTION, "What is the capital of France?", "How do I make tea?"):
        answer = ask(server, "pirate", text).lower()
        assert "matey" in answer or "arr" in answer


def test_json(server: ServerProcess) -> None:
    answer = json.loads(ask(server, "json"))
    assert answer.keys() == {"name", "age", "city", "hobby"}
    assert (answer["name"], answer["age"], answer["city"]) == ("Robert", 45, "Berlin")
    assert "piano" in answer["hobby"]


def test_headline(server: ServerProcess) -> None:
    answer = ask(server, "headline", "The bakery on our street has won a prize for its bread.")
    assert "\n" not in answer
    assert 10 < len(answer) < 80


def test_all_at_once_answer_as_one_at_a_time(server: ServerProcess) -> None:
    names = [BASE, *demo_adapters()]
    alone = [ask(server, name) for name in names]
    assert len(set(alone)) == len(names)
    with ThreadPoolExecutor(len(names)) as threads:
        assert list(threads.map(lambda name: ask(server, name), names)) == alone
