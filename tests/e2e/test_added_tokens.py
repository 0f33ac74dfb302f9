"""Adapters with tokens of their own over the `openai` client, beside the base and a plain one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer as RawTokenizer

from support.adapters import make_adapter, peft_greedy
from support.models import VOCAB_SIZE
from support.parity import TOLERANCE
from support.servers import ServerProcess, serve
from support.vocabularies import ADDED, KINDS, add_tokens, make_vocabulary_adapter
from support.vocabularies import vocabulary_logprobs as logprobs_of

TOKENS = {
    "smile": ("<smile>", "<s1>", "<s2>", "<s3>"),
    "frown": ("<frown>", "<f1>", "<f2>", "<f3>"),
}
KIND = {"smile": KINDS["resized_both"], "frown": KINDS["resized_lora"]}
PROMPT = "the quick<smile>brown<frown> fox"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("added") / "root"
    for seed, (name, tokens) in enumerate(TOKENS.items()):
        make_vocabulary_adapter(root / name, model, KIND[name], seed=seed, loud=ADDED)
        add_tokens(root / name, *tokens)
    make_adapter(root / "plain", model)
    return root


@pytest.fixture(scope="module")
def server(model: Path, root: Path) -> Iterator[ServerProcess]:
    options = "--device cpu --served-model-name base --max-loras 2 --adapter-dir"
    with serve(root.parent, model, *options.split(), str(root)) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    return client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body=extra,
        **fields,
    )


def tokens_of(server: ServerProcess, model: str) -> list[int]:
    found: list[int] = server.http.post(
        "/tokenize", json={"model": model, "prompt": PROMPT}
    ).json()["tokens"]
    return found


def greedy(model: Path, adapter: Path, name: str, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        row = logprobs_of(model, adapter, KIND[name], token_ids)[-1]
        best, second = row.topk(2).values.tolist()
        assert best - second > TOLERANCE, "a near tie: choose another seed"
        token_ids.append(int(row.argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("name", TOKENS)
def test_an_adapter_reads_and_writes_its_tokens(
    server: ServerProcess, client: openai.OpenAI, model: Path, root: Path, name: str
) -> None:
    prompt = tokens_of(server, name)
    assert [token for token in prompt if token >= VOCAB_SIZE] == [VOCAB_SIZE]  # its own of the two
    expected = greedy(model, root / name, name, prompt)
    written = [TOKENS[name][token - VOCAB_SIZE] for token in expected if token >= VOCAB_SIZE]
    assert written, "the oracle writes no added token: choose another seed"
    raw = RawTokenizer.from_file(str(root / name / "tokenizer.json"))

    def ask(stream: bool) -> str:
        if stream:
            return "".join(chunk.choices[0].text for chunk in complete(client, name, stream=True))
        text: str = complete(client, name).choices[0].text
        return text

    others = ["base", "plain", *TOKENS]
    with ThreadPoolExecutor(8) as threads:  # in every mix, cold and from the prefix cache
        noise = [threads.submit(complete, client, others[i % 4]) for i in range(8)]
        texts = list(threads.map(ask, [True, False] * 3))
    assert set(texts) == {raw.decode(expected)}
    assert all(token in texts[0] for token in written)
    for future in noise:
        future.result()


def test_others_never_do(server: ServerProcess, client: openai.OpenAI, model: Path) -> None:
    prompt = tokens_of(server, "base")
    assert max(prompt) < VOCAB_SIZE
    with ThreadPoolExecutor(6) as threads:
        names = ["base", "plain", "smile", "base", "plain", "frown"]
        answers = list(threads.map(lambda name: complete(client, name, logprobs=5), names))
    for name, answer in zip(names, answers, strict=True):
        shown = answer.choices[0].text + repr(answer.choices[0].logprobs.top_logprobs)
        allowed = TOKENS.get(name, ())
        assert not any(token in shown for own in TOKENS.values() for token in own
                       if token not in allowed)  # fmt: skip
    text = server.http.post(
        "/detokenize", json={"tokens": peft_greedy(model, None, prompt, NUM_TOKENS)}
    ).json()["prompt"]
    assert answers[0].choices[0].text == answers[3].choices[0].text
    assert answers[0].choices[0].text in (text, text.replace("<|eos|>", ""))


@pytest.mark.parametrize("name", ["base", "plain"])
def test_ids_of_others_are_refused(client: openai.OpenAI, name: str) -> None:
    for fields in (
        {"logit_bias": {str(VOCAB_SIZE): 100}},
        {"extra_body": {"stop_token_ids": [VOCAB_SIZE]}},
    ):
        with pytest.raises(openai.BadRequestError, match="no token of a vocabulary of 320"):
            complete(client, name, **fields)
    answer = complete(client, "smile", logit_bias={str(VOCAB_SIZE): 100})
    assert answer.choices[0].text == "<smile>" * NUM_TOKENS
    stopped = complete(
        client,
        "smile",
        logit_bias={str(VOCAB_SIZE + 1): 100},
        extra_body={"stop_token_ids": [VOCAB_SIZE + 1]},
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
