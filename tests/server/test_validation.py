"""Bad requests: a 400 that names the field, whatever it is; nothing reaches the engine."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from lorakeet.server.api.schemas import (
    MAX_FAULTS,
    MAX_ITEMS,
    MAX_STRINGS,
    MAX_VALUES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Wire,
)
from lorakeet.server.engine.messages import MAX_BLEND
from lorakeet.server.errors import MAX_CHARS
from support.toy_server import ToyServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]


def refused(toy: ToyServer, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    before = len(toy.engine.requests)
    required = {"messages": MESSAGES} if path == CHAT else {"prompt": [40], "max_tokens": 2}
    # Python's json writes NaN and Infinity, which are no JSON
    content = json.dumps({"model": "base", **required, **body})
    headers = {"content-type": "application/json"}
    response = toy.http.post(path, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(toy.engine.requests) == before
    return error


RANGES: list[tuple[str, list[Any]]] = [
    ("temperature", [-1, 2.1, "1", True, [], 1e400]),
    ("top_p", [0, -1, 1.1, "1"]),
    ("top_k", [-2, 1.5, "1", True]),
    ("min_p", [-0.1, 1.1]),
    ("presence_penalty", [-2.1, 2.1, "0"]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("repetition_penalty", [0, -1, 1e9]),
    ("n", [0, -1, 129, 1.5, "1", True]),
    ("seed", [1.5, "7", 2**63, -(2**63) - 1]),
    ("max_tokens", [-1, 1.5, "5", 0, 10**6, 10**30]),
    ("min_tokens", [-1, 3]),
    ("prompt_logprobs", [-1, 21, True]),
    ("stop", ["", ["a", ""], 5, [5], ["x"] * 17, "x" * 1001]),
    ("stream", ["yes", 1]),
    ("ignore_eos", [1]),
    ("stream_options", [{}, {"include_usage": True}, 5]),
    ("adapter", [5, ["three"]]),
    ("user", [5]),
]


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in RANGES for v in values])
def test_ranges_and_types(toy: ToyServer, field: str, value: Any) -> None:
    extra = {"max_tokens": 2} if field == "min_tokens" else {}
    for path in (CHAT, COMPLETIONS):
        error = refused(toy, path, {**extra, field: value})
        assert error["param"] == field, error


TOKEN_IDS = [-1, 320, 320 + 10**6, 2**31, 2**63, "AI", 1.5, None, True]


@pytest.mark.parametrize("token_id", TOKEN_IDS)
def test_token_ids(toy: ToyServer, token_id: Any) -> None:
    """D06: every id is checked against the vocabulary."""
    if token_id != "AI":  # that is a list of prompts
        assert refused(toy, COMPLETIONS, {"prompt": [token_id]})["param"] == "prompt"
    assert refused(toy, COMPLETIONS, {"prompt": [[40], [token_id]]})["param"] == "prompt"
    bad = {"stop_token_ids": [token_id], "min_tokens": 1}
    assert refused(toy, COMPLETIONS, bad)["param"] == "stop_token_ids"
    key = "1.5" if token_id is True else str(token_id)
    assert refused(toy, CHAT, {"logit_bias": {key: 1}})["param"] == "logit_bias"


@pytest.mark.parametrize("key", ["NaN", "", "+5", " 5", "\u0665", "1e2", "0x5"])
def test_logit_bias_keys(toy: ToyServer, key: str) -> None:
    assert refused(toy, CHAT, {"logit_bias": {key: 1}})["param"] == "logit_bias"


@pytest.mark.parametrize("value", [-101, 101, "x", None, [], True])
def test_logit_bias_values(toy: ToyServer, value: Any) -> None:
    assert refused(toy, CHAT, {"logit_bias": {"5": value}})["param"] == "logit_bias"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "logit_bias"])
def test_no_nan(toy: ToyServer, field: str, value: float) -> None:
    refused(toy, CHAT, {field: {"5": value} if field == "logit_bias" else value})


@pytest.mark.parametrize("token_id", [0, 310, 319])
def test_legal_ids_reach_the_engine(toy: ToyServer, token_id: int) -> None:
    """Ids past the tokenizer's end are rows of the model all the same."""
    body = {
        "model": "base",
        "prompt": [40, token_id],
        "max_tokens": 1,
        "logit_bias": {str(token_id): 100},
        "stop_token_ids": [token_id],
    }
    assert toy.http.post(COMPLETIONS, json=body).status_code == 200


NOT_SUPPORTED: list[tuple[str, list[Any], list[Any]]] = [
    ("tools", [[{"type": "function", "function": {"name": "f"}}], {}], [None, []]),
    ("tool_choice", ["required", {"type": "function"}], [None, "none", "auto"]),
    (
        "response_format",
        [{"type": "json_object"}, {"type": "json_schema"}, "text", []],
        [None, {"type": "text"}],
    ),
    ("audio", [{"voice": "x"}], [None]),
    ("modalities", [["audio"]], [None, ["text"]]),
    ("functions", [[{"name": "f"}]], [None, []]),
    ("prediction", [{"type": "content"}], [None]),
    ("reasoning_effort", ["high"], [None]),
    ("web_search_options", [{}], [None]),
    ("store", [True], [None, False]),
    ("parallel_tool_calls", [1], [None, True, False]),
]


@pytest.mark.parametrize(("field", "active", "neutral"), NOT_SUPPORTED)
def test_unsupported_fields(
    toy: ToyServer, field: str, active: list[Any], neutral: list[Any]
) -> None:
    for value in active:
        error = refused(toy, CHAT, {field: value})
        assert (error["param"], error["code"]) == (field, "unsupported_field")
        assert "not supported" in error["message"]
    for value in neutral:
        body = {"model": "base", "messages": MESSAGES, field: value}
        assert toy.http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "neutral"), [("best_of", 2, 1), ("suffix", "x", ""), ("suffix", 5, None)]
)
def test_unsupported_fields_of_completions(
    toy: ToyServer, field: str, value: Any, neutral: Any
) -> None:
    assert refused(toy, COMPLETIONS, {field: value})["code"] == "unsupported_field"
    body = {"model": "base", "prompt": [40], "max_tokens": 1, field: neutral}
    assert toy.http.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize("field", ["chat_template", "best", "guided_json", "Temperature"])
def test_unknown_fields_are_named(toy: ToyServer, field: str) -> None:
    for path in (CHAT, COMPLETIONS):
        error = refused(toy, path, {field: None})
        assert error["param"] == field
        assert field in error["message"]
    nested = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert refused(toy, CHAT, nested)["param"] == "stream_options.continuous_usage_stats"


def test_identifiers_are_accepted(toy: ToyServer) -> None:
    body = {
        "model": "base",
        "messages": MESSAGES,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "metadata": {"a": "b"},
    }
    assert toy.http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([{"role": "tool", "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "a", "extra": 1}], "messages[0].extra"),
    ],
)
def test_messages(toy: ToyServer, messages: Any, param: str) -> None:
    assert refused(toy, CHAT, {"messages": messages})["param"] == param


def test_a_clients_own_answers_come_back(toy: ToyServer) -> None:
    """Clients send an assistant's message as they got it: with nulls and empty lists."""
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "audio": None,
        "tool_calls": None,
        "function_call": None,
        "annotations": [],
    }
    body = {"model": "base", "messages": [*MESSAGES, answer, *MESSAGES]}
    assert toy.http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "prompt", [[], [[]], [[40], []], None, 5, {}, ["a", 5], [40, "a"], [[["a"]]]]
)
def test_prompts(toy: ToyServer, prompt: Any) -> None:
    assert refused(toy, COMPLETIONS, {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 10**5}, "max_completion_tokens"),
        (CHAT, {"echo": True}, "echo"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [40] * 2049}, "prompt"),
        (COMPLETIONS, {"prompt": [40] * 2048, "max_tokens": None}, "prompt"),
        (COMPLETIONS, {"prompt": [40] * 2047}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x" * 10**6}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        (COMPLETIONS, {"max_tokens": None, "min_tokens": 17}, "min_tokens"),
        (CHAT, {"max_tokens": None, "min_tokens": 2048}, "min_tokens"),
        (CHAT, {"max_tokens": None, "min_tokens": 10**30}, "min_tokens"),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ],
)
def test_fields_that_do_not_fit_together(
    toy: ToyServer, path: str, body: dict[str, Any], param: str
) -> None:
    assert refused(toy, path, body)["param"] == param


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "\xff"}', b"[" * 100_000],
)
def test_bodies_that_are_no_object(toy: ToyServer, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in (CHAT, COMPLETIONS, "/tokenize", "/v1/load_lora_adapter"):
        response = toy.http.post(path, content=content, headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_json"


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [None] * 100}),
        (CompletionRequest, {"prompt": [[None] * 100] * 100}),
        (CompletionRequest, {"prompt": "a", "stop": [5] * 100}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 100}),
        (CompletionRequest, {"prompt": "a", "adapters": [5] * 100}),
        (ChatRequest, {"messages": [5] * 100}),
        (ChatRequest, {"messages": [{**MESSAGE, "content": [5] * 100}]}),
        (TokenizeRequest, {"messages": [5] * 100}),
        (DetokenizeRequest, {"tokens": ["a"] * 100}),
    ],
)
def test_a_list_has_one_fault_at_most(model: type[Wire], body: dict[str, Any]) -> None:
    """For each type that it may have; millions would take gigabytes and minutes."""
    with pytest.raises(ValidationError) as info:
        model.model_validate_json(json.dumps({"model": "base", **body}))
    assert info.value.error_count() <= max(4, MAX_BLEND)


def test_many_faults_are_not_described(toy: ToyServer) -> None:
    for count, param in ((MAX_FAULTS, "x0"), (MAX_FAULTS + 1, None)):
        error = refused(toy, COMPLETIONS, {f"x{i}": 1 for i in range(count)})
        assert error["param"] == param
    error = refused(toy, CHAT, {"logit_bias": {str(i): "a" for i in range(MAX_FAULTS + 1)}})
    assert error["message"] == f"More than {MAX_FAULTS} fields of the body are wrong"


LONG: list[tuple[str, str, Any]] = [
    (CHAT, "messages", MESSAGES),
    (CHAT, "messages[0].content", [{"type": "text", "text": "a"}]),
    (COMPLETIONS, "prompt", ["a"]),
    (COMPLETIONS, "prompt", [[40]]),
    (COMPLETIONS, "stop", ["a"]),
    (COMPLETIONS, "stop_token_ids", [40]),
    (COMPLETIONS, "logit_bias", {}),
    (COMPLETIONS, "metadata", {}),
]


@pytest.mark.parametrize(("path", "param", "items"), LONG)
def test_what_has_too_many_items_is_named(
    toy: ToyServer, path: str, param: str, items: list[Any] | dict[str, Any]
) -> None:
    """Only lists of token ids may be long: all others wait while the server reads."""
    count = MAX_ITEMS + 1
    if isinstance(items, list):
        value: Any = items * count
    else:
        value = {str(i): "a" if param == "metadata" else 1 for i in range(count)}
    field, nested, _ = param.partition("[")
    body = {field: [{"role": "user", "content": value}] if nested else value}
    error = refused(toy, path, body)
    assert error["param"] == param
    assert f"at most {MAX_ITEMS} items" in error["message"]


@pytest.mark.parametrize("field", ["messages", "logit_bias", "tools", "unknown"])
def test_bodies_of_many_strings_are_not_read(toy: ToyServer, field: str) -> None:
    names = {f"x{i}": 1 for i in range(MAX_STRINGS + 1)}
    values = {
        "messages": MESSAGES * (MAX_STRINGS // 4 + 1),
        "tools": [{"name": "a"}] * (MAX_STRINGS // 2 + 1),
    }
    body = names if field == "unknown" else {field: values.get(field, names)}
    error = refused(toy, CHAT, body, 413)
    assert error["message"] == f"The body holds more than {MAX_STRINGS} strings"


def test_quotes_in_texts_are_no_strings(toy: ToyServer) -> None:
    for text in ('"', "\\", '\\"', '""\n'):
        content = [{"type": "text", "text": text * MAX_STRINGS * 2}]
        error = refused(toy, CHAT, {"messages": [{"role": "user", "content": content}]})
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("item", ["1,", "[],", "{},"])
def test_bodies_of_many_values_are_not_read(toy: ToyServer, item: str) -> None:
    content = '{"model": "base", "prompt": [' + item * (MAX_VALUES // len(item)) * 2 + "1]}"
    headers = {"content-type": "application/json"}
    response = toy.http.post(COMPLETIONS, content=content, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert f"more than {MAX_VALUES} values" in response.json()["error"]["message"]


def test_what_was_sent_does_not_come_back_whole(toy: ToyServer) -> None:
    error = refused(toy, CHAT, {"x" * 10**6: 1})
    assert error["message"] == "Unknown field: " + "x" * (MAX_CHARS - 15) + "…"
    assert error["param"] == "x" * MAX_CHARS + "…"
    error = refused(toy, CHAT, {"adapter": "x" * 10**6}, 404)
    assert len(error["message"]) < 500


def test_half_of_a_surrogate_is_refused(toy: ToyServer) -> None:
    content = b'{"model": "base", "prompt": "\\ud800"}'
    headers = {"content-type": "application/json"}
    assert toy.http.post(COMPLETIONS, content=content, headers=headers).status_code == 400


def test_other_statuses_have_the_same_shape(toy: ToyServer) -> None:
    big = b'{"model": "' + b"x" * (17 * 2**20) + b'"}'
    headers = {"content-type": "application/json"}
    for response, status in (
        (toy.http.get("/nope"), 404),
        (toy.http.get("/v1/models/"), 404),
        (toy.http.get(CHAT), 405),
        (toy.http.delete("/v1/models"), 405),
        (toy.http.post(CHAT, content=b"a=b"), 415),
        (toy.http.post(CHAT, content=big, headers=headers), 413),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert toy.http.get(CHAT).headers["allow"]


@pytest.mark.parametrize(
    ("model", "status"), [("nope", 404), ("", 404), ("Base", 404), ("THREE", 404), (" base", 404),
                          ("base:", 404), ("base:nope", 404), ("three:five", 404), (None, 400),
                          (5, 400), (["base"], 400)],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_models(toy: ToyServer, model: Any, status: int, stream: bool) -> None:
    """C14: never a silent fall-back, never a byte of a stream."""
    for path in (CHAT, COMPLETIONS):
        error = refused(toy, path, {"model": model, "stream": stream}, status)
        assert error["param"] == "model"
        if status == 404:
            assert error["code"] == "model_not_found"


def test_a_long_name_does_not_come_back_whole(toy: ToyServer) -> None:
    assert len(refused(toy, CHAT, {"model": "x" * 10**6}, 404)["message"]) < 500


def test_a_missing_model(toy: ToyServer) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})):
        response = toy.http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "model"


def test_unknown_and_conflicting_adapters(toy: ToyServer) -> None:
    for adapter in ("nope", "", "base"):
        error = refused(toy, CHAT, {"adapter": adapter}, 404)
        assert (error["param"], error["code"]) == ("adapter", "model_not_found")
    for model in ("three", "base:three"):
        error = refused(toy, CHAT, {"model": model, "adapter": "five"})
        assert (error["param"], error["code"]) == ("adapter", "adapter_conflict")


def test_models(toy: ToyServer) -> None:
    cards = toy.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["base", "three", "five"]
    assert cards[0]["parent"] is None
    assert cards[1]["parent"] == "base"
    assert cards[1]["root"] == str(toy.settings.adapters["three"])
    for name in ("base", "five", "base:five"):
        assert toy.http.get(f"/v1/models/{name}").json()["id"] == name
    missing = toy.http.get("/v1/models/nope")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


# --- tokenize -------------------------------------------------------------------------------------


def test_tokenize_and_back(toy: ToyServer) -> None:
    body = {"prompt": "aé", "return_token_strs": True}
    answer = toy.http.post("/tokenize", json=body).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["token_strs"] == ["<|bos|>", "a", "bytes:\\xc3", "bytes:\\xa9"]
    assert answer["max_model_len"] == 2048
    back = toy.http.post("/detokenize", json={"model": "three", "tokens": answer["tokens"]}).json()
    assert back == {"prompt": "<|bos|>aé"}
    bare = toy.http.post("/tokenize", json={"prompt": "aé", "add_special_tokens": False}).json()
    assert bare["tokens"] == answer["tokens"][1:]


def test_tokenize_messages_counts_as_a_chat_does(toy: ToyServer) -> None:
    answer = toy.http.post("/tokenize", json={"model": "base", "messages": MESSAGES}).json()
    chat = toy.http.post(CHAT, json={"model": "base", "messages": MESSAGES}).json()
    assert answer["count"] == chat["usage"]["prompt_tokens"]
    assert answer["tokens"] == toy.engine.requests[-1].prompt
    continued = {"messages": MESSAGES, "continue_final_message": True}
    tokens = toy.http.post("/tokenize", json=continued).json()["tokens"]
    assert tokens == toy.server.tokenizer.encode("<|bos|><|user|>a", add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404),
        ("/detokenize", {"tokens": [320]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [2**70]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
def test_bad_tokenize_requests(
    toy: ToyServer, path: str, body: dict[str, Any], status: int
) -> None:
    assert toy.http.post(path, json=body).status_code == status


def test_too_many_choices_are_blamed_on_what_asks_for_them(toy: ToyServer) -> None:
    for body, param in (
        ({"prompt": ["a"] * 4096}, "prompt"),
        ({"prompt": ["a"] * 4096, "n": 2}, "n"),
    ):
        assert refused(toy, COMPLETIONS, {"model": "base", **body})["param"] == param
