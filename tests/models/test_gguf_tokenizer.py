"""Tokenizers built from GGUF tables, against Hugging Face's own and each vocabulary's rules."""

import json
import random
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Qwen2Tokenizer

from lorakeet.models.config import UnsupportedModelError
from lorakeet.models.gguf_tokenizer import build_tokenizer, end_token_ids
from support.models import SPECIAL_TOKENS, tiny_tokenizer

_MODEL = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
TOKENS = sorted(_MODEL["vocab"], key=lambda token: int(_MODEL["vocab"][token]))
MERGES = [" ".join(merge) for merge in _MODEL["merges"]]
KINDS = ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"]
TRICKY = "e\u0301 é 日本語 🦜🏽 👩‍👩‍👧 \x00\x01 \t\n\r\n  x ½ ١٢٣ ▁Ġ \ufeff\u200b\U0010ffff"


def byte_level(pre: str, tokens: list[str] = TOKENS, **more: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL_TOKENS else 1 for t in tokens],
        "tokenizer.ggml.merges": MERGES,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def pieces(pre: str, text: str) -> list[str]:
    split = build_tokenizer(byte_level(pre)).pre_tokenizer
    assert split is not None
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " pay", "  ", " 12345", "\n", "\n", "$", "IT", "'", "S"]),
        ("smollm", ["I", "'ll", " pay", "   ", *"12345", "\n", "\n", "$", "IT", "'", "S"]),
        ("llama-bpe", ["I", "'ll", " pay", "  ", " ", "123", "45", "\n\n", "$IT", "'S"]),
        ("qwen2", ["I", "'ll", " pay", "  ", " ", *"12345", "\n\n", "$IT", "'S"]),
        ("tekken", ["I", "'ll", " pay", "  ", " ", *"12345", "\n\n", "$IT", "'S"]),
    ],
)
def test_how_each_vocabulary_splits(pre: str, expected: list[str]) -> None:
    assert pieces(pre, "I'll pay   12345\n\n$IT'S") == expected


@pytest.mark.parametrize("pre", KINDS)
@settings(max_examples=50, deadline=None)
@given(text=st.text())
@example(text=TRICKY)
@example(text="")
@example(text=" lead and trail  ")
def test_decoding_gives_the_text_back(pre: str, text: str) -> None:
    tokenizer = build_tokenizer(byte_level(pre))
    want = unicodedata.normalize("NFC", text) if "qwen" in pre else text
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == want


@settings(max_examples=50, deadline=None)
@given(text=st.text())
@example(text=TRICKY)
@example(text="I'll pay   12345\n\n$IT'S")
def test_qwen2_as_in_transformers(text: str) -> None:
    merges = [tuple(merge) for merge in _MODEL["merges"]]
    oracle = Qwen2Tokenizer(vocab=dict(_MODEL["vocab"]), merges=merges)
    got = build_tokenizer(byte_level("qwen2")).encode(text).ids
    assert got == oracle.backend_tokenizer.encode(text).ids


def test_words_of_the_vocabulary_need_no_merges_in_llama3() -> None:
    tokens = [*TOKENS, "zqz"]  # no merge makes it
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("smollm", False), ("qwen2", False)):
        got = build_tokenizer(byte_level(pre, tokens)).encode("zqz").ids
        assert (got[-1] == len(TOKENS)) is whole


def test_special_tokens_are_whole_and_hidden() -> None:
    tokens = [*TOKENS, "<think>"]
    metadata = byte_level("smollm", tokens)
    metadata["tokenizer.ggml.token_type"][-1] = 4  # user-defined: whole, but shown
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("<|user|>hi<think> <|end|>").ids
    user, end = TOKENS.index("<|user|>"), TOKENS.index("<|end|>")
    assert ids[0] == user
    assert ids[-1] == end
    assert len(TOKENS) in ids
    assert tokenizer.decode(ids) == "hi<think> "


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
@pytest.mark.parametrize("said", [None, True, False])
def test_bos_as_the_file_or_the_kind_says(pre: str, said: bool | None) -> None:
    more: dict[str, Any] = {} if said is None else {"add_bos_token": said}
    tokenizer = build_tokenizer(byte_level(pre, bos_token_id=0, eos_token_id=1, **more))
    expects = said if said is not None else pre == "llama-bpe"
    assert (tokenizer.encode("fox").ids[0] == 0) is expects
    assert tokenizer.encode("fox", add_special_tokens=False).ids[0] != 0


def test_bos_without_an_id_adds_nothing() -> None:
    tokenizer = build_tokenizer(byte_level("llama-bpe"))
    assert tokenizer.decode(tokenizer.encode("fox").ids, skip_special_tokens=False) == "fox"


def test_end_tokens_named_and_known() -> None:
    metadata = byte_level("smollm", ["<|endoftext|>", "a", "<|im_end|>", "<|eot_id|>", "<|x|>"])
    metadata["tokenizer.ggml.token_type"] = [3, 1, 3, 1, 3]
    assert end_token_ids(metadata) == [0, 2]
    metadata |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 4}
    assert end_token_ids(metadata) == [2, 4, 0]


# --- SentencePiece --------------------------------------------------------------------------------

_LETTERS = "▁abcdeé"
_WORDS = ["ab", "abc", "bc", "▁a", "▁ab", "cd", "de", "cde", "▁▁", "aa", "aaa", "ed", "éa"]


def sentencepiece(**more: Any) -> dict[str, Any]:
    """Words score better than letters, each its own score, as SentencePiece's BPE has it."""
    scores = [float(-i) for i in range(len(_WORDS))]
    random.Random(0).shuffle(scores)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *_WORDS, *_LETTERS],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len([*_WORDS, *_LETTERS])],
        "tokenizer.ggml.scores": [0.0] * 259 + scores + [-100.0 - i for i in range(len(_LETTERS))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def sentencepiece_ids(text: str, metadata: dict[str, Any]) -> list[int]:
    """Merge the neighbours that make the best token, until none do; bytes for the rest."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(i, parts[i] + parts[i + 1]) for i in range(len(parts) - 1)]
        made = [(scores[ids[token]], -i) for i, token in pairs if token in ids]
        if not made:
            break
        i = -max(made)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    known = ([ids[p]] if p in ids else [3 + byte for byte in p.encode()] for p in parts)
    return [token for tokens in known for token in tokens]


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abcdeé x🦜\n", max_size=20))
@example(text="")
@example(text="  a  b ")
def test_sentencepiece_as_by_its_definition(prefix: bool, text: str) -> None:
    metadata = sentencepiece(add_space_prefix=prefix)
    tokenizer = build_tokenizer(metadata)
    got = tokenizer.encode(text).ids
    assert got[0] == 1  # BOS, unless the file says otherwise
    assert got[1:] == sentencepiece_ids(" " + text if prefix and text else text, metadata)
    assert tokenizer.decode(got) == text


def test_sentencepiece_without_scores_is_refused() -> None:
    metadata = sentencepiece()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(UnsupportedModelError, match="scores"):
        build_tokenizer(metadata)
