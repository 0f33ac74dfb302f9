"""Detokenizer, stop strings and their combination, against the whole text decoded at once."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lorakeet.server.text_config import TextConfigError
from lorakeet.server.tokens import Detokenizer, OutputText, StopStrings, Tokenizer
from support.models import BOS_ID, TOKENIZER_SIZE, VOCAB_SIZE


@pytest.fixture(scope="module")
def byte_level(toy_model: Path) -> Tokenizer:
    return Tokenizer(toy_model)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Llama 2's kind: words begin with ▁, bytes are tokens of their own."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁cat", "the", "s", "cat"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = RawTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("sentencepiece")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def stream(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


@given(text=st.text(max_size=30), prompt=st.text(max_size=8))
def test_pieces_make_the_text_and_no_character_is_broken(
    byte_level: Tokenizer, text: str, prompt: str
) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    pieces = stream(byte_level, byte_level.encode(prompt), ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_any_tokens_give_what_the_tokenizer_decodes(byte_level: Tokenizer, ids: list[int]) -> None:
    text = "".join(stream(byte_level, [], ids))
    whole = byte_level.decode(ids)
    assert text.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_broken_bytes_are_shown_in_bounded_time(byte_level: Tokenizer) -> None:
    broken = next(i for i in range(TOKENIZER_SIZE) if byte_level.token_bytes(i) == b"\x80")
    pieces = stream(byte_level, [], [broken] * 40)
    assert "".join(pieces) == "\ufffd" * 40
    assert any(pieces[:20])


def test_tokens_without_text_keep_the_context(byte_level: Tokenizer) -> None:
    pieces = stream(byte_level, [BOS_ID], [BOS_ID, VOCAB_SIZE - 1] * 30 + byte_level.encode("é"))
    assert "".join(pieces) == "é"


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\xff", None])
def test_a_bad_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TextConfigError, match=tmp_path.name):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("word", ["x", "the dog ", "🙂", "the", "\n"])
def test_long_texts_are_measured_by_a_part(byte_level: Tokenizer, word: str) -> None:
    num_tokens = len(byte_level.encode(word * 1000))
    assert byte_level.exceeds(word * 200_000, 10_000)
    assert not byte_level.exceeds(word * 1000, num_tokens)
    assert not byte_level.exceeds(word * 1000, num_tokens // 2)  # not worth the trouble


def test_a_text_of_long_tokens_is_not_too_long(tmp_path: Path) -> None:
    raw = RawTokenizer(models.WordLevel({"?": 0, "x" * 99: 1}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.exceeds(("x" * 99 + " ") * 5000, 5000)
    assert tokenizer.exceeds(("x" * 99 + " ") * 5000, 2000)


def test_other_threads_run_while_a_text_is_encoded(byte_level: Tokenizer) -> None:
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(byte_level.encode, "a" * 2_000_000)
        ticks = 0
        while not encoding.done():
            time.sleep(0.001)
            ticks += 1
    assert ticks > 20  # one or two if it held the interpreter


def test_a_leading_space_depends_on_the_prompt(sentencepiece: Tokenizer) -> None:
    the, cat, bos = (sentencepiece.token_id(t) for t in ("▁the", "▁cat", "<s>"))
    assert the is not None
    assert cat is not None
    assert bos is not None
    assert "".join(stream(sentencepiece, [bos], [the, cat])) == "the cat"
    assert "".join(stream(sentencepiece, [bos, the], [cat, the])) == " cat the"


def test_byte_fallback_characters_arrive_whole(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.token_id("▁the")
    assert the is not None
    ids = [sentencepiece.token_id(f"<0x{byte:02X}>") or 0 for byte in "é😀".encode()]
    assert [piece for piece in stream(sentencepiece, [the], ids) if piece] == ["é", "😀"]


def test_a_character_that_the_prompt_began_is_not_shown_twice(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("é", add_special_tokens=False)
    rest = byte_level.encode("ab", add_special_tokens=False)
    assert "".join(stream(byte_level, ids[:1], ids[1:] + rest)) == "ab"


def test_token_bytes(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    text = "the é 😀\n\x00"
    ids = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    assert byte_level.token_text(BOS_ID) == "<|bos|>"
    assert byte_level.token_text(VOCAB_SIZE - 1) == ""
    part = byte_level.encode("é", add_special_tokens=False)[0]
    assert byte_level.token_text(part) == "bytes:\\xc3"
    assert sentencepiece.token_bytes(sentencepiece.token_id("▁cat") or 0) == b" cat"
    assert sentencepiece.token_bytes(sentencepiece.token_id("<0xE2>") or 0) == b"\xe2"


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: the first end of a stop string decides, then the earliest beginning."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_one_character_at_a_time(text: str, stops: list[str]) -> None:
    checker, shown, stopped = StopStrings(stops), "", False
    for char in text:
        piece, stopped = checker.add(char)
        shown += piece
        assert text.startswith(shown)
        expected, found = cut(text, stops)
        assert len(shown) <= len(expected)  # nothing of a stop string leaks
        if stopped:
            assert found
            break
    if not stopped:
        shown += checker.flush()
    assert (shown, stopped) == cut(text, stops)


@given(
    text=st.text("ab", max_size=20),
    stop=st.text("ab", min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=20, max_size=20),
)
def test_one_stop_string_however_the_text_is_cut(text: str, stop: str, sizes: list[int]) -> None:
    checker, shown, stopped, at = StopStrings([stop]), "", False, 0
    for size in sizes:
        piece, stopped = checker.add(text[at : at + size])
        shown, at = shown + piece, at + size
        if stopped:
            break
    if not stopped:
        shown += checker.flush()
    assert (shown, stopped) == (text.partition(stop)[0], stop in text)


def test_text_behind_the_stop_in_one_token_is_dropped() -> None:
    assert StopStrings(["ab", "abc"]).add("xabcd") == ("x", True)


def test_stops_count_only_after_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("aXbXc", add_special_tokens=False)
    assert len(ids) == 5
    output = OutputText(byte_level, [], ["X"], min_tokens=2)
    assert [output.add(token_id) for token_id in ids[:4]] == [False, False, False, True]
    assert output.take() == "aXb"


def test_a_stop_string_is_not_looked_for_in_the_prompt(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, byte_level.encode("ab"), ["abc"], 0)
    assert not output.add(byte_level.encode("c", add_special_tokens=False)[0])
    assert not output.finish()
    assert output.take() == "c"
