"""Which tokenizer files of adapters are taken, which are shared, which are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from lorakeet.server.adapter_tokenizers import MAX_FILE_BYTES, AdapterTokenizers
from lorakeet.server.text_config import TextConfigError
from lorakeet.server.tokens import Tokenizer, TokenizerError
from support.models import VOCAB_SIZE
from support.vocabularies import add_tokens

Config = dict[str, Any]


@pytest.fixture(scope="module")
def base(toy_model: Path) -> Tokenizer:
    return Tokenizer(toy_model)


@pytest.fixture
def loader(toy_model: Path, base: Tokenizer) -> AdapterTokenizers:
    return AdapterTokenizers(base, toy_model)


def edited(folder: Path, model: Path, change: Callable[[Config], None]) -> Path:
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "tokenizer.json").read_text())
    change(config)
    (folder / "tokenizer.json").write_text(json.dumps(config, indent=1))
    return folder


def test_none_or_the_models_own_is_the_models(
    loader: AdapterTokenizers, base: Tokenizer, toy_model: Path, tmp_path: Path
) -> None:
    assert loader.load(tmp_path) == (None, base)
    (tmp_path / "added_tokens.json").write_text('{"<|eos|>": 1, "<mine>": 7}')
    assert loader.load(tmp_path) == (None, base)
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes((toy_model / "tokenizer.json").read_bytes())
    assert loader.load(tmp_path) == (None, base)

    def as_a_trainer_leaves_it(config: Config) -> None:
        config["truncation"] = {"max_length": 9, "stride": 0, "strategy": "LongestFirst",
                                "direction": "Right"}  # fmt: skip
        config["padding"] = None

    cut = edited(tmp_path / "cut", toy_model, as_a_trainer_leaves_it)
    assert loader.load(cut) == (None, base)


def test_equal_files_are_one_tokenizer(loader: AdapterTokenizers, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        add_tokens(tmp_path / name, "<x>" if name == "c" else "<y>")
    a, b, c = (loader.load(tmp_path / name)[1] for name in "abc")
    assert a is b
    assert a is not c
    assert a.encode("<y>", False) == c.encode("<x>", False) == [VOCAB_SIZE]


def test_a_cut_does_not_count_in_use(
    loader: AdapterTokenizers, toy_model: Path, tmp_path: Path
) -> None:
    def cut(config: Config) -> None:
        config["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst",
                                "direction": "Right"}  # fmt: skip
        config["added_tokens"].append(config["added_tokens"][0] | {"id": 300, "content": "<n>"})

    _, tokenizer = loader.load(edited(tmp_path, toy_model, cut))
    assert len(tokenizer.encode("a b c d e f")) > 6


SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
LEGACY = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", SLOW),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [SLOW]}),
        ("normalizer", GROWS),
        ("normalizer", {"type": "Sequence", "normalizers": [GROWS] * 40}),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 1000}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}),
        ("decoder", {"type": "Replace", "pattern": {"String": ""}, "content": "a"}),
        ("decoder", {"type": "Strip", "content": "a", "start": 0, "stop": 5}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", {"type": "Nobody"}),
        ("normalizer", ["NFC"]),
    ],
)
def test_what_could_take_long_or_grow_is_refused(
    loader: AdapterTokenizers, toy_model: Path, tmp_path: Path, part: str, value: object
) -> None:
    folder = edited(tmp_path, toy_model, lambda config: config.update({part: value}))
    with pytest.raises(TextConfigError, match=rf"tokenizer\.json: its {part}"):
        loader.load(folder)


WORD_PIECE = {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##",
              "max_input_chars_per_word": 10**9, "vocab": {"?": 0}}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(model=WORD_PIECE),  # cubic in the length of a text
        lambda config: config["model"].update(end_of_word_suffix="x" * 10**6),
        lambda config: config["model"].update(dropout=0.5),
        lambda config: config["model"].update(type="Unigram"),
    ],
)
def test_another_way_to_make_tokens_is_refused(
    loader: AdapterTokenizers, toy_model: Path, tmp_path: Path, change: Callable[[Config], None]
) -> None:
    with pytest.raises(TextConfigError, match=r"tokenizer\.json: its model"):
        loader.load(edited(tmp_path, toy_model, change))


def test_a_token_that_stands_for_a_long_text_is_refused(
    loader: AdapterTokenizers, toy_model: Path, tmp_path: Path
) -> None:
    def add(length: int) -> Callable[[Config], None]:
        def change(config: Config) -> None:
            config["model"]["vocab"]["x" * length] = len(config["model"]["vocab"])

        return change

    loader.load(edited(tmp_path, toy_model, add(1000)))
    with pytest.raises(TextConfigError, match="more than 1024 characters"):
        loader.load(edited(tmp_path, toy_model, add(10**6)))


def test_deep_nesting_is_refused(
    loader: AdapterTokenizers, toy_model: Path, tmp_path: Path
) -> None:
    def change(config: Config) -> None:
        for _ in range(300):
            config["decoder"] = {"type": "Sequence", "decoders": [config["decoder"]]}

    with pytest.raises(TextConfigError, match=r"tokenizer\.json is nested too deeply"):
        loader.load(edited(tmp_path, toy_model, change))


def test_a_decoder_that_panics_is_an_error_of_these_tokens() -> None:
    raw = RawTokenizer(models.WordLevel({"a": 0, "bab": 1}, unk_token="a"))
    raw.decoder = decoders.Strip("a", 0, 3)
    tokenizer = Tokenizer.from_json(raw.to_str().encode())
    with pytest.raises(TokenizerError):
        tokenizer.decode([0])


@pytest.mark.parametrize(
    ("part", "value"),
    [("normalizer", {"type": "NFC"}), ("pre_tokenizer", METASPACE), ("normalizer", LEGACY)],
)
def test_simple_changes_are_taken(
    loader: AdapterTokenizers, toy_model: Path, tmp_path: Path, part: str, value: object
) -> None:
    folder = edited(tmp_path, toy_model, lambda config: config.update({part: value}))
    loader.load(folder)[1].encode("a b")


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["model"].update(merges=[["a", "zzz"]]),
        lambda config: config.update(added_tokens=[{"id": -1}]),
        lambda config: config.update(post_processor={"type": "TemplateProcessing"}),
        lambda config: config.pop("model"),
    ],
)
def test_broken_ones_are_refused(
    loader: AdapterTokenizers, toy_model: Path, tmp_path: Path, change: Callable[[Config], None]
) -> None:
    with pytest.raises(TextConfigError, match=r"tokenizer\.json cannot be used"):
        loader.load(edited(tmp_path, toy_model, change))


def test_one_that_fails_in_use_is_refused(tmp_path: Path) -> None:
    """No token for what it does not know."""
    for name, vocab in {"base": {"a": 0, "?": 1}, "own": {"a": 0}}.items():
        (tmp_path / name).mkdir()
        raw = RawTokenizer(models.WordLevel(vocab, unk_token="?"))
        raw.save(str(tmp_path / name / "tokenizer.json"))
    loader = AdapterTokenizers(Tokenizer(tmp_path / "base"), tmp_path / "base")
    with pytest.raises(TextConfigError, match="cannot be used"):
        loader.load(tmp_path / "own")


def test_one_that_fails_at_some_texts_is_an_error_of_these(tmp_path: Path) -> None:
    known = dict.fromkeys("A text, with 1 number.\n")
    raw = RawTokenizer(models.Unigram([(char, -1.0) for char in known], None, False))
    tokenizer = Tokenizer.from_json(raw.to_str().encode())
    tokenizer.encode("A text")
    with pytest.raises(TokenizerError):
        tokenizer.encode("ß")


@pytest.mark.parametrize("make", ["large", "fifo", "folder"])
def test_what_is_no_plain_file(loader: AdapterTokenizers, tmp_path: Path, make: str) -> None:
    import os

    file = tmp_path / "tokenizer.json"
    if make == "large":
        with file.open("wb") as sparse:
            sparse.truncate(MAX_FILE_BYTES + 1)
    elif make == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(TextConfigError, match=r"tokenizer\.json"):
        loader.load(tmp_path)
