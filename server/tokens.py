"""Text to tokens and back: the tokenizer, the incremental detokenizer, stop strings."""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import tokenizers

from lorakeet.server.text_config import TextConfigError

TOKENIZER_NAME = "tokenizer.json"
_CONTEXT = 6  # tokens before a text that decide how it begins (spaces)
_LONG_TOKEN = 8  # characters; more than the mean of nearly all texts
_PIECE = 2**16  # characters
_CUT = 64  # more tokens than a cut through a text can add
_MEMORY_OF_FILE = 8  # times as much as the file, as measured with 49k and with 128k tokens
_MAX_HELD = 16  # tokens after which bytes that make no character are shown as they are


class TokenizerError(Exception):
    """A tokenizer cannot be made, or fails at a text."""


@contextlib.contextmanager
def _as_tokenizer_error() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        raise _translated(error) from None


def _translated(error: BaseException) -> BaseException:
    """The library raises nothing more exact than Exception, and panics that are not even that."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return TokenizerError(str(error))
    return error


class Tokenizer:
    """A `tokenizer.json`; thread-safe."""

    num_bytes = 0  # of memory, about; known of those that are made of a file's bytes

    def __init__(self, folder: Path) -> None:
        """Of a model's folder. Raises TextConfigError when there is none that can be used."""
        file = folder / TOKENIZER_NAME
        try:
            with _as_tokenizer_error():
                backend = (
                    tokenizers.Tokenizer.from_file(str(file)) if file.exists() else _convert(folder)
                )
        except TokenizerError as error:
            raise TextConfigError(f"{folder} has no tokenizer that can be used: {error}") from None
        self._use(backend)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Raises TokenizerError."""
        tokenizer = cls.__new__(cls)
        with _as_tokenizer_error():
            tokenizer._use(tokenizers.Tokenizer.from_buffer(data))
        tokenizer.num_bytes = _MEMORY_OF_FILE * len(data)
        return tokenizer

    def to_json(self) -> bytes:
        return self._tokenizer.to_str().encode()

    def _use(self, backend: tokenizers.Tokenizer) -> None:
        self._tokenizer = backend
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = self._tokenizer.decoder
        self._decoder = decoder.__getstate__() if decoder is not None else b""
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises TokenizerError: some that adapters bring cannot encode every text."""
        # `encode` would hold all other threads up, for many seconds if the text is long
        with _as_tokenizer_error():
            batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether the text surely has more than `limit` tokens, found out from a part of it.

        False for every text that is not very long for so many tokens: it can just be encoded.
        """
        if len(text) <= _LONG_TOKEN * limit:
            return False
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self.encode(text[start : start + _PIECE], False)) - _CUT
            if count > limit:
                return True
        return False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Raises TokenizerError."""
        try:  # no `with`: it would take as long again as the decoding of a few tokens
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _translated(error) from None

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """One token for people: a part of a character is written as OpenAI does, `bytes:\\xe2`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for: perhaps a part of a character."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._token_bytes(token_id)
        return data

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # a row of the embedding past the tokenizer's end
            return b""
        if token_id in self._added:
            return token.encode()
        if b'"ByteLevel"' in self._decoder:
            alphabet = _byte_alphabet()
            return b"".join(
                bytes([alphabet[char]]) if char in alphabet else char.encode() for char in token
            )
        if b'"ByteFallback"' in self._decoder and (match := re.fullmatch("<0x(..)>", token)):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's way to write bytes as printable characters, read backwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """For models that only bring a SentencePiece file."""
    from transformers import AutoTokenizer  # slow to import, seldom needed

    backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True
    ).backend_tokenizer
    return backend


class Detokenizer:
    """Text of a growing list of tokens, whole characters at a time."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._shown = len(self._ids)  # ids[:_shown] are in the text
        self._prefix = tokenizer.decode(self._ids)  # decoded ids[:_shown]

    def add(self, token_id: int) -> str:
        """The characters that this token completes."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        held = len(self._ids) - self._shown
        if text.endswith("\ufffd") and held < _MAX_HELD:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character."""
        return self._show(self._tokenizer.decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[len(self._prefix) :]
        if new:
            self._ids = self._ids[self._shown :]
            self._prefix = self._tokenizer.decode(self._ids)
        elif text == self._prefix:  # a token without text: the context stays as it was
            del self._ids[self._shown :]
        else:  # the end of a character that the prompt began
            self._prefix = text
        self._shown = len(self._ids)
        return new


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what may be their start."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that may be shown, and whether it ends in front of a stop string."""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        cut = len(text) - self._possible_start(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class OutputText:
    """Generated tokens → the text to show. Stop strings count only after `min_tokens` tokens."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], min_tokens: int
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stop) if stop else None
        self._unchecked = min_tokens
        self._ready = ""
        self.decoded = 0  # characters decoded so far, held back or not
        self.shown = 0  # characters that `take` has given out

    def add(self, token_id: int) -> bool:
        """True: a stop string is complete; the text ends in front of it."""
        checked = self._unchecked <= 0
        self._unchecked -= 1
        return self._append(self._detokenizer.add(token_id), checked)

    def finish(self) -> bool:
        """No token follows: what was held back is text, unless it completes a stop string."""
        stopped = self._append(self._detokenizer.flush(), self._unchecked <= 0)
        if self._stops is not None and not stopped:
            self._ready += self._stops.flush()
        return stopped

    def take(self) -> str:
        """Text to show, each piece once."""
        text, self._ready = self._ready, ""
        self.shown += len(text)
        return text

    def _append(self, text: str, checked: bool) -> bool:
        self.decoded += len(text)
        if self._stops is None or not checked:
            self._ready += text
            return False
        text, stopped = self._stops.add(text)
        self._ready += text
        return stopped
