"""Generation over the wire: text, streams, choices, stop strings, scores. The toy repeats the
prompt, so every answer is known."""

import concurrent.futures
import hashlib
import json
from typing import Any

import openai
import pytest

from lorakeet.server.tokens import Tokenizer
from support.models import BOS_ID, EOS_ID
from support.toy_server import FAULT_ID, ToyServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(toy_model: Any) -> Tokenizer:
    return Tokenizer(toy_model)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def post(toy: ToyServer, path: str, **body: Any) -> dict[str, Any]:
    response = toy.http.post(path, json={"model": "base", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(toy: ToyServer, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well."""
    body = {"model": "base", "stream": True, **body}
    with toy.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, str]:
    """Text and finish reason of one choice of either endpoint."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    reasons = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
    assert len(reasons) == 1
    assert choices[-1]["finish_reason"] is not None
    return text, reasons[0]


# --- text and adapters ----------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "k"), [("base", 0), ("three", 3), ("base:five", 5)])
def test_each_name_runs_its_adapter(toy: ToyServer, model: str, k: int) -> None:
    tokens = [40, 50, 60, 70]
    tokenizer = toy.server.tokenizer
    expected = tokenizer.decode([token + k for token in tokens])
    answer = post(toy, COMPLETIONS, model=model, prompt=tokens, max_tokens=4)
    assert answer["model"] == model
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"
    chunks = events(toy, COMPLETIONS, model=model, prompt=tokens, max_tokens=4)
    assert joined(chunks) == (expected, "length")
    assert {chunk["model"] for chunk in chunks} == {model}


def test_the_adapter_field(toy: ToyServer) -> None:
    for extra, k in ({"adapter": "three"}, 3), ({"adapter": None}, 0):
        answer = post(toy, COMPLETIONS, prompt=[40], max_tokens=1, **extra)
        assert answer["choices"][0]["text"] == toy.server.tokenizer.decode([40 + k])
    same = post(toy, COMPLETIONS, model="three", adapter="three", prompt=[40], max_tokens=1)
    assert same["choices"][0]["text"] == toy.server.tokenizer.decode([43])


@pytest.mark.parametrize("stream", [False, True])
def test_unicode_is_never_broken(toy: ToyServer, tokenizer: Tokenizer, stream: bool) -> None:
    text = "é😀漢字 and ﷽"
    ids = ids_of(tokenizer, text)
    if stream:
        chunks = events(toy, COMPLETIONS, prompt=ids, max_tokens=len(ids))
        assert joined(chunks)[0] == text
        assert not any("\ufffd" in choice["text"] for c in chunks for choice in c["choices"])
    else:
        answer = post(toy, COMPLETIONS, prompt=ids, max_tokens=len(ids))
        assert answer["choices"][0]["text"] == text


def test_a_character_cut_by_max_tokens_is_flushed(toy: ToyServer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "a😀")
    body = {"prompt": ids, "max_tokens": len(ids) - 1}
    text = post(toy, COMPLETIONS, **body)["choices"][0]["text"]
    assert text == "a\ufffd"
    assert joined(events(toy, COMPLETIONS, **body)) == (text, "length")


def test_all_forms_of_a_prompt(toy: ToyServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    for prompt in ("ab", ids):
        answer = post(toy, COMPLETIONS, prompt=prompt, max_tokens=3)
        assert [c["text"] for c in answer["choices"]] == ["ab"]
        assert answer["usage"]["prompt_tokens"] == 3
    for prompts in (["ab", "cd"], [ids, tokenizer.encode("cd")]):
        answer = post(toy, COMPLETIONS, prompt=prompts, max_tokens=3, n=2)
        assert [c["text"] for c in answer["choices"]] == ["ab", "ab", "cd", "cd"]
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 12


def test_chat(toy: ToyServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content in ("a\nb", parts):
        answer = post(toy, CHAT, messages=[{"role": "user", "content": content}])
        message = answer["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "a\nb", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"  # the template's <|end|>


def test_eos_and_ignore_eos(toy: ToyServer, tokenizer: Tokenizer) -> None:
    prompt = [*ids_of(tokenizer, "ab"), EOS_ID, *ids_of(tokenizer, "cd")]
    stopped = post(toy, COMPLETIONS, prompt=prompt, max_tokens=5)
    assert stopped["choices"][0]["text"] == "ab"
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 3
    ignored = post(toy, COMPLETIONS, prompt=prompt, max_tokens=5, ignore_eos=True)
    assert ignored["choices"][0]["text"] == "abcd"
    held = post(toy, COMPLETIONS, prompt=prompt, max_tokens=5, min_tokens=4)
    assert held["choices"][0]["text"] == "abcd"


def test_stop_token_ids(toy: ToyServer) -> None:
    answer = post(toy, COMPLETIONS, prompt=[40, 41, 42], max_tokens=9, stop_token_ids=[42])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == toy.server.tokenizer.decode([40, 41])


# --- stop strings (D02) ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("abcXdef", "X", "abc", "stop"),
        ("say ABCDEFG now", "ABCDEFG", "say ", "stop"),
        ("xxabcyy", ["ab", "abc"], "xx", "stop"),
        ("one the other", "t", "one ", "stop"),  # inside a token, with text after it
        ("hi 😀 there", "😀", "hi ", "stop"),
        ("abc", "bcd", "abc", "length"),  # a near miss at the very end is flushed
        ("wxyz", ["1", "2", "3", "y"], "wx", "stop"),
        ("abc", None, "abc", "length"),
        ("abc", [], "abc", "length"),
        ("Xabc", "X", "", "stop"),
    ],
)
def test_stop_strings(
    toy: ToyServer, tokenizer: Tokenizer, text: str, stop: Any, expected: str, reason: str
) -> None:
    ids = ids_of(tokenizer, text)
    body = {"prompt": ids, "max_tokens": len(ids), "stop": stop}
    answer = post(toy, COMPLETIONS, **body)
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == reason
    chunks = events(toy, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert joined(chunks) == (expected, reason)
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] <= len(ids)


def test_a_stop_string_ends_the_work_in_the_engine(toy: ToyServer, tokenizer: Tokenizer) -> None:
    post(toy, COMPLETIONS, prompt=ids_of(tokenizer, "abc"), max_tokens=2000, stop="b")
    toy.wait_idle()
    assert toy.engine.aborted[-1] == toy.engine.requests[-1].request_id


def test_the_stop_string_is_not_looked_for_in_the_prompt(toy: ToyServer) -> None:
    answer = post(toy, COMPLETIONS, prompt="abc", stop="abca", echo=True, max_tokens=4)
    assert answer["choices"][0]["text"] == "abcabc"
    assert answer["choices"][0]["finish_reason"] == "length"


# --- usage and stream options (D03) ---------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", ["absent", None, {}, False, True])
def test_usage_in_streams(toy: ToyServer, path: str, n: int, options: Any) -> None:
    body: dict[str, Any] = {"n": n}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "abc"}]
    else:
        body |= {"prompt": "abc", "max_tokens": 5}
    usage = post(toy, path, **body)["usage"]
    if options != "absent":
        wanted = {"include_usage": options} if isinstance(options, bool) else options
        body["stream_options"] = wanted
    chunks = events(toy, path, **body)
    if options is True:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == usage
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        chunks.pop()
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1


def test_cached_tokens(toy: ToyServer) -> None:
    usage = post(toy, COMPLETIONS, prompt=[40] * 33, max_tokens=2, n=2)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}
    assert usage["total_tokens"] == 33 + 4


# --- choices (D04) --------------------------------------------------------------------------------


def test_each_choice_has_one_role_and_its_own_finish(toy: ToyServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "abcdefgh"}],
        "n": 4,
        "seed": 7,
        "temperature": 1,
        "max_tokens": 9,
        "ignore_eos": True,
        "stop": ["f"],
    }
    chunks = events(toy, CHAT, **body)
    answer = post(toy, CHAT, **body)
    for choice in answer["choices"]:
        index = choice["index"]
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in c["delta"] for c in own) == 1
        assert joined(chunks, index) == (choice["message"]["content"], choice["finish_reason"])
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop", "length"}
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) > 1
    alone = post(toy, CHAT, **{**body, "n": 1})
    assert alone["choices"][0]["message"]["content"] == texts[0]


def test_greedy_choices_are_equal(toy: ToyServer) -> None:
    answer = post(toy, COMPLETIONS, prompt="abc", n=4, temperature=0, max_tokens=4)
    assert {choice["text"] for choice in answer["choices"]} == {"abc"}


# --- scores ---------------------------------------------------------------------------------------


def test_chat_logprobs(toy: ToyServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "é the"}],
        "logprobs": True,
        "top_logprobs": 2,
    }
    choice = post(toy, CHAT, **body)["choices"][0]
    content = choice["logprobs"]["content"]
    spoken = [entry for entry in content if not entry["token"].startswith("<|")]
    assert b"".join(bytes(entry["bytes"]) for entry in spoken).decode() == "é the"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["logprob"] == -0.5
    chunks = events(toy, CHAT, **body)
    streamed = [
        entry
        for chunk in chunks
        for c in chunk["choices"]
        for entry in (c["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_scores_end_where_a_stop_string_cuts(toy: ToyServer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "abXYcd")
    assert len(ids) == 6
    body = {"prompt": ids, "max_tokens": 6, "stop": "XY", "logprobs": 1}
    choice = post(toy, COMPLETIONS, **body)["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    parts = [
        c["logprobs"]["tokens"] for e in events(toy, COMPLETIONS, **body) for c in e["choices"]
    ]
    assert [token for part in parts for token in part] == ["a", "b"]


def test_scores_held_back_by_a_near_miss_are_flushed(toy: ToyServer, tokenizer: Tokenizer) -> None:
    body = {"prompt": ids_of(tokenizer, "abX"), "max_tokens": 3, "stop": "XYZ", "logprobs": 0}
    parts = [
        c["logprobs"]["tokens"] for e in events(toy, COMPLETIONS, **body) for c in e["choices"]
    ]
    assert [token for part in parts for token in part] == ["a", "b", "X"]


def test_completion_logprobs_have_the_old_shape(toy: ToyServer) -> None:
    answer = post(toy, COMPLETIONS, prompt=[40, 41], max_tokens=2, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    token = toy.server.tokenizer.token_text
    assert logprobs == {
        "tokens": [token(40), token(41)],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{token(40): -0.5, token(41): -1.5}, {token(41): -0.5, token(42): -1.5}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_a_prompt(toy: ToyServer, stream: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        chunks = events(toy, COMPLETIONS, **body)
        assert joined(chunks)[0] == "abc"
        logprobs = chunks[0]["choices"][0]["logprobs"]
    else:
        answer = post(toy, COMPLETIONS, **body)
        assert answer["choices"][0]["text"] == "abc"
        assert answer["usage"]["completion_tokens"] == 0
        logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<|bos|>", "a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 0, 1, 2]


def test_echo_of_token_ids_and_choices(toy: ToyServer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "xy")
    body = {"prompt": ids, "max_tokens": 2, "n": 2, "echo": True, "logprobs": 0}
    answer = post(toy, COMPLETIONS, **body)
    for choice in answer["choices"]:
        assert choice["text"] == "xyxy"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert joined(events(toy, COMPLETIONS, **body), 1) == ("xyxy", "length")


def test_prompt_logprobs(toy: ToyServer) -> None:
    body = {"prompt_logprobs": 1, "max_tokens": 1}
    scores = post(toy, COMPLETIONS, prompt=[40, 41], **body)["choices"][0]["prompt_logprobs"]
    token = toy.server.tokenizer.token_text(41)
    assert scores == [None, {"41": {"logprob": -0.5, "rank": 1, "decoded_token": token}}]
    chat = post(toy, CHAT, messages=[{"role": "user", "content": "a"}], **body)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


# --- what reaches the engine ----------------------------------------------------------------------


def test_the_engine_gets_what_was_asked_for(toy: ToyServer) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": -4,
        "min_tokens": 1,
    }
    post(toy, COMPLETIONS, prompt=[40], max_tokens=2, logit_bias={"5": -100, "319": 1.5}, **asked)
    request = toy.engine.requests[-1]
    assert {name: getattr(request.sampling, name) for name in asked} == asked
    assert request.sampling.logit_bias == {5: -100.0, 319: 1.5}
    assert request.sampling.max_tokens == 2
    assert set(request.eos_token_ids) == {1, 2}
    assert request.prompt == [40]


@pytest.mark.parametrize(
    ("field", "value", "sent"),
    [
        ("temperature", 1e-8, 0.0),
        ("temperature", 1e-4, 1e-4),
        ("temperature", None, 1.0),
        ("top_k", -1, 0),
        ("top_k", 325, 0),
        ("top_p", 1e-8, 1e-8),
        ("seed", 2**63 - 1, 2**63 - 1),
    ],
)
def test_edges_of_sampling(toy: ToyServer, field: str, value: Any, sent: Any) -> None:
    post(toy, COMPLETIONS, prompt=[40], max_tokens=1, **{field: value})
    assert getattr(toy.engine.requests[-1].sampling, field) == sent


def test_lengths(toy: ToyServer) -> None:
    post(toy, COMPLETIONS, prompt=[40])
    assert toy.engine.requests[-1].sampling.max_tokens == 16
    messages = [{"role": "user", "content": "a"}]
    post(toy, CHAT, messages=messages)
    request = toy.engine.requests[-1]
    assert request.sampling.max_tokens == 2048 - len(request.prompt)
    post(toy, CHAT, messages=messages, max_tokens=3, max_completion_tokens=3)
    assert toy.engine.requests[-1].sampling.max_tokens == 3
    post(toy, COMPLETIONS, prompt=[40] * 2040)
    assert toy.engine.requests[-1].sampling.max_tokens == 8


# --- errors on the way (D14) ----------------------------------------------------------------------


def test_a_fault_before_the_first_token_has_a_status(toy: ToyServer) -> None:
    for stream in (False, True):
        body = {"model": "base", "prompt": [FAULT_ID], "max_tokens": 3, "stream": stream}
        response = toy.http.post(COMPLETIONS, json=body)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("n", [1, 3])
def test_a_fault_in_a_stream_is_an_error_event(toy: ToyServer, n: int) -> None:
    prompt = [40, 41, 42, FAULT_ID]
    body = {"model": "base", "prompt": prompt, "max_tokens": 9, "stream": True, "n": n}
    with toy.http.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert "[DONE]" not in lines
    last = json.loads(lines[-1])
    assert set(last["error"]) == {"message", "type", "param", "code"}
    for line in lines[:-1]:
        assert all(c["finish_reason"] is None for c in json.loads(line)["choices"])
    whole = toy.http.post(COMPLETIONS, json={**body, "stream": False})
    assert whole.status_code == 500


# --- the official client --------------------------------------------------------------------------


@pytest.fixture
def client(toy: ToyServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{toy.url}/v1", api_key="unused", max_retries=0)


def test_official_client(toy: ToyServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["base", "three", "five"]
    answer = client.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "hello"}],
        logprobs=True,
        top_logprobs=1,
        n=2,
    )
    assert [choice.message.content for choice in answer.choices] == ["hello", "hello"]
    stream = client.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(deltas) == "hello"
    completion = client.completions.create(
        model="three", prompt="x", max_tokens=0, echo=True, logprobs=1
    )
    assert completion.choices[0].text == "x"
    with pytest.raises(openai.NotFoundError) as info:
        client.completions.create(model="nope", prompt="x")
    assert info.value.code == "model_not_found"


def test_official_client_raises_for_an_error_in_a_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="base", prompt=[40, 41, FAULT_ID], max_tokens=9, stream=True
    )
    with pytest.raises(openai.APIError, match="NaN"):
        list(stream)


def test_many_mixed_requests_at_once(toy: ToyServer) -> None:
    """Every answer is its own adapter's, whoever runs beside it."""

    def ask(number: int) -> bool:
        model, k = [("base", 0), ("three", 3), ("five", 5)][number % 3]
        digest = hashlib.sha256(bytes([number])).digest()
        prompt = [40 + byte % 40 for byte in digest[:8]]
        answer = post(toy, COMPLETIONS, model=model, prompt=prompt, max_tokens=8, logprobs=0)
        text: str = answer["choices"][0]["text"]
        return text == toy.server.tokenizer.decode([token + k for token in prompt])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(60)))


def test_bos_is_sent_once(toy: ToyServer) -> None:
    post(toy, CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert toy.engine.requests[-1].prompt.count(BOS_ID) == 1
