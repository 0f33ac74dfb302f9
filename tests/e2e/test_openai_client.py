"""The official `openai` client against a real server: what users of the library see."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from lorakeet.server.engine.messages import TokenLogprob
from lorakeet.server.tokens import Tokenizer
from support.adapters import peft_logprobs
from support.engines import Collected
from support.models import TOKENIZER_SIZE
from support.parity import ONLY_TEXT, check, collected
from support.servers import ServerProcess, serve, wait_until

KEY = "a-secret-key"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the quick brown fox"},
]
GREEDY: dict[str, Any] = {"temperature": 0, "logit_bias": ONLY_TEXT}
PAST_EOS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
NAMES = ["base", "red", "green"]


@pytest.fixture(scope="module")
def own_root(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What may be loaded at run time; "lazy" is there under its name from the start."""
    root = tmp_path_factory.mktemp("client") / "root"
    shutil.copytree(adapters["blue"], root / "lazy")
    shutil.copytree(adapters["grey"], root / "more" / "grey")
    return root


@pytest.fixture(scope="module")
def server(model: Path, adapters: dict[str, Path], own_root: Path) -> Iterator[ServerProcess]:
    options = ["--device", "cpu", "--served-model-name", "base", "--adapter-dir", str(own_root)]
    for name in ("red", "green"):
        options += ["--adapter", f"{name}={adapters[name]}"]
    with serve(own_root.parent, model, *options, LORAKEET_API_KEY=KEY) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server
        assert KEY not in server.log
        server.wait_idle()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def oracle(adapters: dict[str, Path], name: str) -> Path | None:
    return None if name == "base" else adapters[name]


def prompt_of(server: ServerProcess) -> list[int]:
    """The messages as tokens, as the server counts them."""
    tokens: list[int] = server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    return tokens


def collect_chat(answer: ChatCompletion, tokenizer: Tokenizer) -> Collected:
    """The first choice with its scores, as the engine gives it."""
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(TOKENIZER_SIZE)}
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    result = Collected()
    for one in scores.content:
        top = [(ids[bytes(o.bytes)], o.logprob) for o in one.top_logprobs if o.bytes]
        result.token_ids.append(ids[bytes(one.bytes or [])])
        result.logprobs.append(TokenLogprob(result.token_ids[-1], one.logprob, top))
    return result


# --- chat ---


@pytest.mark.parametrize("name", NAMES)
def test_chat(
    server: ServerProcess,
    client: openai.OpenAI,
    model: Path,
    adapters: dict[str, Path],
    tokenizer: Tokenizer,
    name: str,
) -> None:
    answer = client.chat.completions.create(
        model=name,
        messages=MESSAGES,
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=3,
        **GREEDY,
        **PAST_EOS,
    )
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", name)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    result = collect_chat(answer, tokenizer)
    prompt = prompt_of(server)
    check(model, oracle(adapters, name), prompt, result, TOKENIZER_SIZE)
    assert choice.message.content == tokenizer.decode(result.token_ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == len(prompt) + 20


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_is_the_same(client: openai.OpenAI, n: int) -> None:
    fields: dict[str, Any] = {
        "model": "red",
        "messages": MESSAGES,
        "max_tokens": 30,
        "n": n,
        "seed": 3,
        "temperature": 1.2,
    }
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    texts, reasons = [""] * n, [""] * n
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) == n
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_cache_shows_in_the_usage(client: openai.OpenAI) -> None:
    text = "a question that nobody has asked before, and that is long enough for some blocks"
    cached = []
    for name in ("base", "red", "base", "red"):
        answer = client.completions.create(model=name, prompt=text, max_tokens=1)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert details is not None
        cached.append(details.cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3]
    assert (cached[3] or 0) >= 16


# --- completions ---


def complete(client: openai.OpenAI, name: str = "red", **fields: Any) -> Completion:
    body = {"prompt": "the quick", "max_tokens": 40, **GREEDY, **PAST_EOS, **fields}
    answer: Completion = client.completions.create(model=name, **body)
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_completions(
    client: openai.OpenAI,
    model: Path,
    adapters: dict[str, Path],
    tokenizer: Tokenizer,
    name: str,
) -> None:
    prompt = tokenizer.encode("the quick")
    answer = complete(client, name, logprobs=2)
    choice = answer.choices[0].model_dump()
    result = collected(choice, prompt, tokenizer)
    check(model, oracle(adapters, name), prompt, result, TOKENIZER_SIZE)
    assert choice["text"] == tokenizer.decode(result.token_ids)
    assert choice["logprobs"]["text_offset"][0] == 0
    for token, score, top in zip(
        *(choice["logprobs"][key] for key in ("tokens", "token_logprobs", "top_logprobs")),
        strict=True,
    ):
        assert top[token] == score
        assert len(top) in (2, 3)


def test_the_adapter_can_be_named_beside_the_model(client: openai.OpenAI) -> None:
    expected = complete(client, "red").choices[0].text
    for name, adapter in (("base", "red"), ("base:red", None), ("red", "red")):
        answer = complete(client, name, extra_body={"adapter": adapter, "ignore_eos": True})
        assert (answer.model, answer.choices[0].text) == (name, expected)
    assert complete(client, "base").choices[0].text != expected


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = complete(client).choices[0].text
    stop = next(whole[i : i + 2] for i in range(5, len(whole)) if whole[i : i + 2].isascii())
    answer = complete(client, stop=[stop, "never said"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    fields = {"prompt": "the quick", "max_tokens": 40, "stop": stop, **GREEDY, **PAST_EOS}
    chunks = list(client.completions.create(model="red", stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_choices_and_seeds(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 4, "temperature": 1, "seed": 7}
    first, second = (complete(client, **fields) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 4
    assert first.usage is not None
    assert first.usage.completion_tokens == 4 * 40


@pytest.mark.parametrize("name", NAMES)
def test_echo_scores_a_prompt(
    client: openai.OpenAI,
    model: Path,
    adapters: dict[str, Path],
    tokenizer: Tokenizer,
    name: str,
) -> None:
    text = "the lazy dog barks at the fox"
    answer = complete(client, name, prompt=text, max_tokens=0, echo=True, logprobs=0)
    scores = answer.choices[0].logprobs
    assert answer.choices[0].text == text
    assert scores is not None
    assert scores.token_logprobs is not None
    token_ids = tokenizer.encode(text)
    rows = peft_logprobs(model, oracle(adapters, name), token_ids)[:-1]
    expected = rows[torch.arange(len(rows)), torch.tensor(token_ids[1:])]
    first, *others = scores.token_logprobs
    assert str(first) == "None"  # whatever its type says
    assert others == pytest.approx(expected.tolist(), abs=1e-3)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(token_ids), 0)


# --- models and adapters ---


def test_models(client: openai.OpenAI, model: Path, adapters: dict[str, Path]) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert list(cards)[:3] == NAMES
    assert "lazy" in cards
    assert (cards["base"]["root"], cards["base"]["parent"]) == (str(model), None)
    for name in ("red", "green"):
        assert (cards[name]["root"], cards[name]["parent"]) == (str(adapters[name]), "base")
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_folder_is_loaded_at_its_first_request(
    server: ServerProcess,
    client: openai.OpenAI,
    model: Path,
    adapters: dict[str, Path],
    tokenizer: Tokenizer,
) -> None:
    assert "lazy" not in server.loaded()
    prompt = tokenizer.encode("the quick")
    choice = complete(client, "lazy", logprobs=0).choices[0].model_dump()
    check(model, adapters["blue"], prompt, collected(choice, prompt, tokenizer), TOKENIZER_SIZE)
    assert "lazy" in server.loaded()


def test_adapters_at_run_time(
    server: ServerProcess, client: openai.OpenAI, adapters: dict[str, Path], own_root: Path
) -> None:
    grey, blue = own_root / "more" / "grey", own_root / "lazy"
    texts = {}
    for path in (grey, blue):
        body = {"lora_name": "new", "lora_path": str(path), "load_inplace": True}
        client.post("/load_lora_adapter", body=body, cast_to=object)
        texts[path] = complete(client, "new").choices[0].text
    assert texts[grey] != texts[blue]
    with pytest.raises(openai.BadRequestError) as taken:
        client.post(
            "/load_lora_adapter",
            body={"lora_name": "new", "lora_path": str(grey)},
            cast_to=object,
        )
    assert taken.value.param == "lora_name"
    assert complete(client, "new").choices[0].text == texts[blue]
    with pytest.raises(openai.PermissionDeniedError):
        client.post(
            "/load_lora_adapter",
            body={"lora_name": "other", "lora_path": str(adapters["red"])},
            cast_to=object,
        )
    entry = server.http.get("/v1/adapters/new").json()
    assert (entry["path"], entry["rank"], entry["pinned"]) == (str(blue), 8, False)
    assert entry["bytes"] > 0
    wait_until(lambda: server.http.get("/v1/adapters/new").json()["tier"] == "gpu", "its tier")
    listed = server.http.get("/v1/adapters").json()["data"]
    assert entry["id"] in [one["id"] for one in listed]
    client.post("/unload_lora_adapter", body={"lora_name": "new"}, cast_to=object)
    with pytest.raises(openai.NotFoundError):
        complete(client, "new")
    with pytest.raises(openai.NotFoundError):
        client.post("/unload_lora_adapter", body={"lora_name": "new"}, cast_to=object)


def test_tokenize_and_back(server: ServerProcess, tokenizer: Tokenizer) -> None:
    text = "the quick 🦜 é"
    answer = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens = answer.json()["tokens"]
    assert tokens == tokenizer.encode(text, False)
    assert answer.json()["count"] == len(tokens)
    assert server.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


# --- errors ---


def test_errors(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, "nobody")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, "base", extra_body={"adapter": "nobody"}, stream=True)
    assert missing.value.param == "adapter"
    wrong: dict[str, Any] = {"temperature": 3, "max_tokens": -1, "n": 0, "top_p": 2}
    for field in wrong:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="red", prompt="hi", **{field: wrong[field]})
        assert bad.value.param == field
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, max_tokens=100_000)
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model="base", messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert bad.value.param == "response_format"
    stranger = client.with_options(api_key="guess")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        complete(stranger)


# --- the asynchronous client ---


def test_many_at_once_answer_as_one_at_a_time(server: ServerProcess, client: openai.OpenAI) -> None:
    asked = [(name, f"prompt {i}") for i in range(8) for name in [*NAMES, "lazy"]]
    alone = [complete(client, name, prompt=prompt).choices[0].text for name, prompt in asked]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as many:

            async def ask(name: str, prompt: str) -> str:
                stream = await many.completions.create(
                    model=name, prompt=prompt, max_tokens=40, stream=True, **GREEDY, **PAST_EOS
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(*one) for one in asked))

    assert asyncio.run(ask_all()) == alone


def test_a_stream_can_be_left(server: ServerProcess) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as many:
            stream = await many.chat.completions.create(
                model="red", messages=MESSAGES, max_tokens=5000, stream=True, **PAST_EOS
            )
            async for chunk in stream:
                assert chunk.model == "red"
                break
            await stream.close()

    asyncio.run(leave())
    wait_until(lambda: server.num_running == 0, "its place is free")
