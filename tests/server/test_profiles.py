"""Tokenizer, tokens, templates and defaults of an adapter's folder: its own, never another's."""

import gc
import hashlib
import json
import shutil
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lorakeet.server import adapter_tokenizers
from lorakeet.server.adapter_tokenizers import AdapterTokenizers
from lorakeet.server.admission import DEFAULT_COMPLETION_TOKENS
from lorakeet.server.profiles import read_profile
from lorakeet.server.tokens import Tokenizer
from support.models import END_ID, EOS_ID, TOKENIZER_SIZE, VOCAB_SIZE
from support.servers import wait_until
from support.toy_server import MAX_MODEL_LEN, ToyEngine, ToyServer, adapter_folder, toy_server
from support.vocabularies import GROWN, SHRUNK, add_tokens

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def generation_config(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loaded at their first request. The toy repeats the prompt, shifted by k."""
    root = tmp_path_factory.mktemp("root")
    for name, k, tokens in (
        ("smile", 0, ("<smile>", "<wink>", "<a>", "<b>")),
        ("frown", 0, ("<frown>", "<c>", "<d>", "<e>")),
    ):
        add_tokens(adapter_folder(root / name, k, vocab_size=GROWN), *tokens)
    adapter_folder(root / "plain", 1)
    adapter_folder(root / "shrunk", 0, vocab_size=SHRUNK)
    warm = adapter_folder(root / "warm", 0)
    generation_config(warm, temperature=0.25, top_p=0.5, top_k=7, max_new_tokens=3, min_p=0.125,
                      repetition_penalty=1.5, do_sample=True)  # fmt: skip
    greedy = add_tokens(adapter_folder(root / "greedy", 0, vocab_size=GROWN), "<stop>")
    generation_config(greedy, temperature=0, eos_token_id=VOCAB_SIZE, top_p=None)
    (greedy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|user|>"}))
    return root


@pytest.fixture(scope="module")
def server(toy_model: Path, root: Path) -> Iterator[ToyServer]:
    with toy_server(toy_model, adapter_dirs=[root]) as server:
        yield server


def tokenizer_of(server: ToyServer, name: str) -> Tokenizer:
    version = server.server.registry.find(name)
    assert version is not None
    return server.call(server.server.profile(version)).tokenizer


def alive(server: ToyServer) -> list[Tokenizer]:
    """Tokenizers of adapters that are in memory."""
    return list(server.server.registry._reader._tokenizers._kept._alive.values())


def with_own_tokenizers(root: Path, count: int) -> list[str]:
    """Folders, each with a token <NAME> of its own. Returns their names."""
    names = [f"a{number}" for number in range(count)]
    for name in names:
        add_tokens(adapter_folder(root / name, 0, vocab_size=GROWN), f"<{name}>")
    return names


def post(server: ToyServer, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def complete(server: ToyServer, model: str, prompt: str | list[int], **fields: Any) -> Any:
    response = post(server, COMPLETIONS, model=model, prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def sent(server: ToyServer) -> Any:
    """What the last request asked of the engine."""
    return server.engine.requests[-1].sampling


# --- tokens -----------------------------------------------------------------------------------


def test_added_tokens_are_read_and_written(server: ToyServer) -> None:
    text = "a<smile>b<wink>"
    ids = server.server.tokenizer.encode("a", False), server.server.tokenizer.encode("b", False)
    wanted = [0, *ids[0], VOCAB_SIZE, *ids[1], VOCAB_SIZE + 1]
    found = post(server, "/tokenize", model="smile", prompt=text, return_token_strs=True).json()
    assert found["tokens"] == wanted
    assert found["token_strs"][2] == "<smile>"
    answer = complete(server, "smile", text, max_tokens=len(wanted), ignore_eos=True, logprobs=0)
    assert answer["choices"][0]["text"] == text  # <|bos|> is special, and not shown
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<|bos|>", "a", "<smile>", "b", "<wink>"]
    assert answer["usage"]["prompt_tokens"] == len(wanted)
    detokenized = post(server, "/detokenize", adapter="smile", tokens=wanted[1:]).json()
    assert detokenized["prompt"] == text
    with server.http.stream(
        "POST", COMPLETIONS, json={"model": "smile", "prompt": text, "stream": True}
    ) as response:
        parts = [
            json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
        ]
    shown = "".join(part["choices"][0]["text"] for part in parts)
    assert (text * 4).startswith(shown)
    assert text in shown


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"n": 2, "echo": True}])
def test_a_tokenizer_that_fails_at_what_was_generated(
    server: ToyServer, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of this request, whatever the library has thrown."""
    complete(server, "smile", [5])

    class PanicException(BaseException): ...

    def fail(*_: object, **__: object) -> str:
        raise PanicException("index out of bounds")

    backend = SimpleNamespace(decode=fail)
    monkeypatch.setattr(tokenizer_of(server, "smile"), "_tokenizer", backend)
    response = post(server, COMPLETIONS, model="smile", prompt=[5], max_tokens=3, **fields)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
    response = post(server, "/detokenize", model="smile", tokens=[5])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "tokenizer_error"
    complete(server, "base", [5])


@pytest.mark.parametrize("model", ["base", "plain", "frown"])
def test_the_same_text_means_nothing_to_others(server: ToyServer, model: str) -> None:
    found = post(server, "/tokenize", model=model, prompt="<smile>").json()["tokens"]
    assert max(found) < TOKENIZER_SIZE
    assert len(found) > 2
    answer = complete(server, model, "<smile>", max_tokens=len(found), ignore_eos=True)
    assert "<smile>" in answer["choices"][0]["text"] or model == "plain"


FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    (COMPLETIONS, "prompt", {"prompt": ["ID"]}),
    (COMPLETIONS, "prompt", {"prompt": [[5], ["ID"]]}),
    (COMPLETIONS, "logit_bias", {"prompt": "a", "logit_bias": {"ID": 1}}),
    (COMPLETIONS, "stop_token_ids", {"prompt": "a", "stop_token_ids": ["ID"], "min_tokens": 1}),
    (CHAT, "logit_bias", {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"ID": 1}}),
    ("/detokenize", "tokens", {"tokens": ["ID"]}),
]


@pytest.mark.parametrize(
    ("model", "last"),
    [("base", VOCAB_SIZE), ("plain", VOCAB_SIZE), ("smile", GROWN), ("shrunk", SHRUNK)],
)
@pytest.mark.parametrize(("path", "param", "fields"), FIELDS)
def test_ids_up_to_the_adapters_own_vocabulary(
    server: ToyServer, model: str, last: int, path: str, param: str, fields: dict[str, Any]
) -> None:
    """Also those past the tokenizer's end: rows of a padded embedding are tokens."""
    for token_id, status in ((last - 1, 200), (last, 400)):
        body = json.loads(json.dumps(fields).replace('["ID"]', f"[{token_id}]"))
        body = json.loads(json.dumps(body).replace('"ID"', f'"{token_id}"'))
        limit = {} if path == "/detokenize" else {"max_tokens": 2}
        response = post(server, path, model=model, **limit, **body)
        assert response.status_code == status, response.text
        if status == 400:
            assert response.json()["error"]["param"] == param
            assert response.json()["error"]["code"] == "invalid_token_id"


def test_a_token_that_the_model_has_no_row_for(toy_model: Path, tmp_path: Path) -> None:
    """Trainers add a padding token and never resize: texts without it are as good as ever."""
    add_tokens(adapter_folder(tmp_path / "padded", 0), "<pad>")
    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:
        assert complete(server, "padded", "abc")["usage"]["prompt_tokens"] == 4
        response = post(server, COMPLETIONS, model="padded", prompt="a<pad>")
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_token_id"


# --- defaults, EOS ------------------------------------------------------------------------------


def test_defaults_of_the_folder_and_the_request_over_them(server: ToyServer) -> None:
    assert len(_tokens(complete(server, "warm", "abcdefgh", ignore_eos=True))) == 3
    asked = sent(server)
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.25, 0.5, 7)
    assert (asked.min_p, asked.repetition_penalty) == (0.125, 1.5)
    complete(server, "warm", "a", temperature=1.0, top_p=1.0, top_k=0, min_p=0, max_tokens=9,
             repetition_penalty=1.0)  # fmt: skip
    asked = sent(server)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (1.0, 1.0, 0, 9)
    assert (asked.min_p, asked.repetition_penalty) == (0.0, 1.0)
    messages = [{"role": "user", "content": "a"}]
    assert post(server, CHAT, model="warm", messages=messages).status_code == 200
    assert (sent(server).max_tokens, sent(server).temperature) == (3, 0.25)
    complete(server, "greedy", "a")
    assert (sent(server).temperature, sent(server).top_p) == (0.0, 1.0)


@pytest.mark.parametrize("model", ["base", "plain", "smile"])
def test_others_have_the_apis_defaults(server: ToyServer, model: str) -> None:
    complete(server, "warm", "a")
    complete(server, model, "a")
    asked = sent(server)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (1.0, 1.0, 0, 0.0)
    assert asked.max_tokens == DEFAULT_COMPLETION_TOKENS
    messages = [{"role": "user", "content": "a"}]
    answer = post(server, CHAT, model=model, messages=messages, stop=["zzz"]).json()
    assert sent(server).max_tokens == MAX_MODEL_LEN - answer["usage"]["prompt_tokens"]


def model_with(folder: Path, toy_model: Path, **fields: Any) -> Path:
    """The toy's folder, with more in its generation config."""
    shutil.copytree(toy_model, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    return generation_config(folder, **config, **fields)


def test_the_models_defaults_are_under_the_adapters(toy_model: Path, tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", toy_model, temperature=0.75, top_k=20)
    own = generation_config(adapter_folder(tmp_path / "root" / "own", 0), temperature=0.5)
    with toy_server(model, adapter_dirs=[own.parent]) as server:
        for name, temperature in (("base", 0.75), ("own", 0.5)):
            complete(server, name, "a")
            assert (sent(server).temperature, sent(server).top_k) == (temperature, 20)


@pytest.mark.parametrize(
    ("base", "own", "wanted"),  # temperatures of requests of the base, and of the adapter
    [
        ({}, {"do_sample": False}, (1.0, 0.0)),
        ({"do_sample": True, "temperature": 0.75}, {"do_sample": False}, (0.75, 0.0)),
        ({"do_sample": False, "temperature": 0.75}, {}, (0.0, 0.0)),
        ({"do_sample": False, "temperature": 0.75}, {"do_sample": True}, (0.0, 0.75)),
        ({"do_sample": False}, {"do_sample": True}, (0.0, 1.0)),
        ({}, {"do_sample": None, "temperature": 0.5}, (1.0, 0.5)),
        ({"do_sample": False}, {"temperature": 0.5}, (0.0, 0.5)),
    ],
)
def test_without_sampling_requests_are_greedy_unless_they_say_otherwise(
    toy_model: Path,
    tmp_path: Path,
    base: dict[str, Any],
    own: dict[str, Any],
    wanted: tuple[float, float],
) -> None:
    model = model_with(tmp_path / "model", toy_model, **base)
    generation_config(adapter_folder(tmp_path / "root" / "own"), **own)
    with toy_server(model, adapter_dirs=[tmp_path / "root"]) as server:
        for name, temperature in zip(("base", "own"), wanted, strict=True):
            complete(server, name, "a")
            assert sent(server).temperature == temperature
            complete(server, name, "a", temperature=0.25)
            assert sent(server).temperature == 0.25


def test_defaults_that_are_not_used_are_named_at_load(
    toy_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_with(tmp_path / "model", toy_model, num_beams=4)
    own = adapter_folder(tmp_path / "root" / "own")
    generation_config(own, stop_strings=["a"], typical_p=0.5, top_p=0.5, pad_token_id=1,
                      min_length=None, do_sample=True, _from_model_config=True)  # fmt: skip
    adapter_folder(tmp_path / "root" / "plain")
    with caplog.at_level("WARNING"), toy_server(model, adapter_dirs=[own.parent]) as server:
        for name in ("own", "own", "plain"):
            complete(server, name, "a")
    assert [record.getMessage() for record in caplog.records] == [
        f"{model}: generation_config.json: not used: 'num_beams'",
        f"{own}: generation_config.json: not used: 'stop_strings', 'typical_p'",
    ]


def test_eos_tokens_add_up(server: ToyServer) -> None:
    named = server.server.tokenizer.token_id("<|user|>")
    for model, wanted in {
        "base": {EOS_ID, END_ID},
        "smile": {EOS_ID, END_ID},
        "greedy": {EOS_ID, END_ID, VOCAB_SIZE, named},
    }.items():
        complete(server, model, "a")
        assert set(server.engine.requests[-1].eos_token_ids) == wanted
    answer = complete(server, "greedy", "abc<stop>d", max_tokens=50)
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "text": "abc",
        "finish_reason": "stop",
        "logprobs": None,
    }


# --- never mixed ------------------------------------------------------------------------------


def test_adapters_in_turn_and_at_once(server: ToyServer) -> None:
    """X, Y, base, X again, streams and bodies, from many threads."""
    texts = {"smile": "x<smile><frown>", "frown": "x<smile><frown>", "base": "x<smile><frown>"}
    lengths = {
        name: len(post(server, "/tokenize", model=name, prompt=text).json()["tokens"])
        for name, text in texts.items()
    }
    assert len(set(lengths.values())) == 3  # each reads it in its own way

    def ask(number: int) -> None:
        name = list(texts)[number % 3]
        body = {"model": name, "prompt": texts[name], "max_tokens": lengths[name]}
        body |= {"ignore_eos": True, "stream": number % 2 == 0}
        with httpx.Client(base_url=server.url, timeout=20) as http:
            if not body["stream"]:
                answer = http.post(COMPLETIONS, json=body).json()
                assert answer["usage"]["prompt_tokens"] == lengths[name]
                assert answer["choices"][0]["text"] == texts[name]
                return
            with http.stream("POST", COMPLETIONS, json=body) as response:
                lines = [
                    json.loads(x[6:]) for x in response.iter_lines() if x.startswith("data: {")
                ]
            assert "".join(line["choices"][0]["text"] for line in lines) == texts[name]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(48)))


def test_a_tokenizer_goes_when_its_version_has_gone(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_tokens(adapter_folder(tmp_path / "one", 0, vocab_size=GROWN), "<one>")
    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:
        complete(server, "one", "<one>")
        gone = weakref.ref(tokenizer_of(server, "one"))
        add_tokens(adapter_folder(folder, 1, vocab_size=GROWN), "<two>")
        body = {"lora_name": "one", "lora_path": str(folder), "load_inplace": True}
        assert post(server, "/v1/load_lora_adapter", **body).status_code == 200
        found = post(server, "/tokenize", model="one", prompt="<two>").json()["tokens"]
        assert found == [0, VOCAB_SIZE]
        server.wait_idle()
        monkeypatch.setattr(adapter_tokenizers, "MEMORY_BYTES", 0)
        complete(server, "one", "<two>")
        server.wait_idle()
        gc.collect()
        assert gone() is None


def test_tokenizers_that_are_not_in_use_are_read_again(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for two of six. All requests get their own adapter's tokens."""
    names = with_own_tokenizers(tmp_path, 6)
    size = Tokenizer.from_json((tmp_path / "a0" / "tokenizer.json").read_bytes()).num_bytes
    monkeypatch.setattr(adapter_tokenizers, "MEMORY_BYTES", 2 * size)
    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:

        def ask(number: int) -> None:
            name = names[number % 6]
            answer = complete(server, name, f"<{name}>", max_tokens=2, stop_token_ids=[VOCAB_SIZE])
            assert answer["usage"]["prompt_tokens"] == 2
            body = {"model": name, "tokens": [VOCAB_SIZE]}
            assert post(server, "/detokenize", **body).json() == {"prompt": f"<{name}>"}

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(60)))
        server.wait_idle()
        gc.collect()
        assert len(alive(server)) <= 2


def test_one_in_use_stays_however_little_room_there_is(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_tokenizers, "MEMORY_BYTES", 0)
    for name in ("a", "b"):
        add_tokens(adapter_folder(tmp_path / name, 0, vocab_size=GROWN), f"<{name}>")
    engine = ToyEngine(step_seconds=0.01)
    with toy_server(toy_model, engine, adapter_dirs=[tmp_path]) as server:
        body = {"model": "a", "prompt": [VOCAB_SIZE], "max_tokens": 50, "stream": True}
        with server.http.stream("POST", COMPLETIONS, json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            texts = [json.loads(next(lines)[6:])["choices"][0]["text"]]
            (tmp_path / "a" / "tokenizer.json").unlink()
            complete(server, "b", "<b>", max_tokens=1)
            assert len(alive(server)) >= 1
            texts += [json.loads(line[6:])["choices"][0]["text"] for line in lines]
        assert "".join(texts) == "<a>" * 50


@pytest.mark.parametrize("becomes", ["gone", "another", "broken", "the model's"])
def test_a_folder_whose_tokenizer_has_changed_hurts_only_its_own_requests(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    for name in ("one", "other"):
        add_tokens(adapter_folder(tmp_path / name, 0, vocab_size=GROWN), f"<{name}>")
    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:
        complete(server, "one", "<one>")
        monkeypatch.setattr(adapter_tokenizers, "MEMORY_BYTES", 0)
        complete(server, "other", "<other>")
        server.wait_idle()
        gc.collect()
        file = tmp_path / "one" / "tokenizer.json"
        good = file.read_bytes()
        if becomes == "gone":
            file.unlink()
        elif becomes == "another":
            add_tokens(tmp_path / "one", "<evil>")
        else:
            model = toy_model / "tokenizer.json"
            file.write_bytes(b"{" if becomes == "broken" else model.read_bytes())
        for path, body in (
            (COMPLETIONS, {"prompt": "a"}),
            (COMPLETIONS, {"prompt": [5], "stream": True}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            response = post(server, path, model="one", **body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("model", "invalid_adapter")
            assert "'one' cannot be used: tokenizer.json" in error["message"]
        complete(server, "base", "a")
        complete(server, "other", "<other>")
        file.write_bytes(good)
        complete(server, "one", "<one>")


BAD_FILES: list[tuple[str, str]] = [
    ("tokenizer.json", "{"),
    ("tokenizer.json", "[]"),
    ("tokenizer.json", '{"model": {"type": "BPE"}}'),
    ("generation_config.json", '{"temperature": "hot"}'),
    ("generation_config.json", '{"temperature": -1}'),
    ("generation_config.json", '{"temperature": 1e999}'),
    ("generation_config.json", '{"top_p": 0}'),
    ("generation_config.json", '{"top_k": 1.5}'),
    ("generation_config.json", '{"max_new_tokens": 0}'),
    ("generation_config.json", '{"repetition_penalty": true}'),
    ("generation_config.json", '{"do_sample": "no"}'),
    ("generation_config.json", '{"do_sample": 0}'),
]


@pytest.mark.parametrize(("name", "content"), BAD_FILES)
def test_a_bad_file_is_refused_at_load(
    toy_model: Path, tmp_path: Path, name: str, content: str
) -> None:
    folder = adapter_folder(tmp_path / "bad", 0)
    (folder / name).write_text(content)
    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:
        body = {"lora_name": "x", "lora_path": str(folder)}
        response = post(server, "/v1/load_lora_adapter", **body)
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]
        assert post(server, COMPLETIONS, model="x", prompt="a").status_code == 404
        (folder / name).unlink()
        assert post(server, "/v1/load_lora_adapter", **body).status_code == 200
        complete(server, "x", "a")


def find_no_memory(*_: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("step", ["read_file", "_parse", "_model_settings", "_load"])
def test_a_load_that_finds_no_memory_is_refused_alone(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As one that finds none for the weights."""
    folder = add_tokens(adapter_folder(tmp_path / "x", 0, vocab_size=GROWN), "<x>")
    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:
        body = {"lora_name": "y", "lora_path": str(folder)}
        with monkeypatch.context() as patch:
            patch.setattr(adapter_tokenizers, step, find_no_memory)
            for name, response in (
                ("y", post(server, "/v1/load_lora_adapter", **body)),
                ("x", post(server, COMPLETIONS, model="x", prompt="a")),
            ):
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                why = "cannot be loaded: the adapter could not be read: MemoryError"
                assert error["message"] == f"The adapter {name!r} {why}"
                assert error["code"] == "invalid_adapter"
        assert post(server, "/v1/load_lora_adapter", **body).status_code == 200
        complete(server, "x", "<x>")


def test_a_tokenizer_that_finds_no_memory_again_is_an_error_of_its_requests(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = with_own_tokenizers(tmp_path, 2)
    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:
        complete(server, first, "a")
        monkeypatch.setattr(adapter_tokenizers, "MEMORY_BYTES", 0)
        complete(server, second, "a")
        server.wait_idle()
        gc.collect()
        with monkeypatch.context() as patch:
            patch.setattr(adapter_tokenizers, "_load", find_no_memory)
            response = post(server, COMPLETIONS, model=first, prompt="a")
            assert response.status_code == 400, response.text
            assert response.json()["error"]["code"] == "invalid_adapter"
        complete(server, first, "a")


def test_while_a_tokenizer_is_read_others_run_on(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lorakeet.server.adapter_tokenizers import AdapterTokenizers

    folder = add_tokens(adapter_folder(tmp_path / "slow", 0, vocab_size=GROWN), "<slow>")
    go, load = threading.Event(), AdapterTokenizers.load

    def slow(self: AdapterTokenizers, path: Path) -> object:
        assert go.wait(20)
        return load(self, path)

    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:
        monkeypatch.setattr(AdapterTokenizers, "load", slow)
        with ThreadPoolExecutor(1) as threads:
            body = {"lora_name": "slow", "lora_path": str(folder)}
            loading = threads.submit(post, server, "/v1/load_lora_adapter", **body)
            for _ in range(3):
                complete(server, "base", "a")
            assert not loading.done()
            go.set()
            assert loading.result().status_code == 200


def test_many_that_wait_for_a_tokenizer_leave_others_their_threads(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the event loop has threads."""
    names = with_own_tokenizers(tmp_path, 40)
    go, read_file = threading.Event(), adapter_tokenizers.read_file

    def slow(*args: Any) -> bytes | None:
        assert go.wait(60)
        return read_file(*args)

    with toy_server(toy_model, adapter_dirs=[tmp_path]) as server:
        monkeypatch.setattr(adapter_tokenizers, "read_file", slow)
        with ThreadPoolExecutor(len(names)) as threads:
            loading = [threads.submit(complete, server, name, "a") for name in names]
            try:
                wait_until(lambda: all(map(server.server.registry.is_loading, names)), "all wait")
                complete(server, "base", "a")
                assert not any(load.done() for load in loading)
            finally:
                go.set()
            for load in loading:
                load.result()


def _tokens(answer: Any) -> range:
    return range(answer["usage"]["completion_tokens"])


def test_digest_is_of_what_the_folder_says(toy_model: Path, tmp_path: Path) -> None:
    """A registration of a release that knows fewer fields must hold: what is not said is not in
    it. This value has to stay as it is."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 2}')
    said = (
        b'{"chat_template":"{{ messages }}","defaults":{"temperature":0.5},"eos_token_ids":[2],'
        b'"special_tokens":{}}'
    )
    digest = read_profile(tmp_path, AdapterTokenizers(Tokenizer(toy_model), toy_model)).digest
    assert digest == hashlib.sha256(said).hexdigest()
