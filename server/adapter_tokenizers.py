"""Tokenizers of adapter folders: the model's own where they are the same, shared where they agree.

Which one an adapter has is known by its digest. Of those that no request uses, the last used ones
stay in memory, and the others are read again from the folder when they are needed.

A folder may come from anybody. Fine-tuning adds tokens; what cuts a text into words stays as it is
in the model's tokenizer. So only such parts are taken as are the model's, or can neither take long
nor make a text much longer; and of the part that makes tokens of words, only the tokens may differ.
"""

import hashlib
import itertools
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import orjson

from lorakeet.server.text_config import TextConfigError, read_file
from lorakeet.server.tokens import TOKENIZER_NAME, Tokenizer, TokenizerError

MAX_FILE_BYTES = 64 * 2**20  # twice as large as the largest that are in use
MEMORY_BYTES = 2**30  # of the last used ones; what requests use stays beyond it
_PIPELINE = ("normalizer", "pre_tokenizer", "decoder")
_HARMLESS = frozenset(
    "Sequence ByteLevel ByteFallback Fuse Metaspace Strip Prepend Replace Digits Whitespace"
    " WhitespaceSplit Punctuation BPEDecoder WordPiece BertNormalizer BertPreTokenizer Lowercase"
    " NFC NFD NFKC NFKD StripAccents UnicodeScripts".split()
)
_MAX_PREPENDED = 8  # characters
_MAX_TOKEN = 1024  # characters
_TOKENS = ("vocab", "merges")  # the parts of "model" that hold tokens


class AdapterTokenizers:
    """Loads them, in one thread at a time. A digest of None stands for the model's own."""

    def __init__(self, base: Tokenizer, base_folder: Path) -> None:
        self._base = base
        self._base_folder = base_folder
        self._base_config: dict[str, Any] | None = None  # read when it is needed first
        self._base_digest: bytes | None = None
        self._kept = _Kept()

    def load(self, folder: Path) -> tuple[bytes | None, Tokenizer]:
        """The tokenizer in the folder, and its digest; the model's when it has none.

        Raises TextConfigError for one that cannot be used.
        """
        data = read_file(folder, TOKENIZER_NAME, MAX_FILE_BYTES)
        if data is None:
            return None, self._base
        config = _parse(data)
        self._read_base()
        digest = _digest(config)
        if digest == self._base_digest:
            return None, self._base
        tokenizer = self._kept.get(digest)
        if tokenizer is None:
            assert self._base_config is not None
            _check_pipeline(config, self._base_config)
            tokenizer = _load(data)
            _check_tokens(config)
            self._kept.add(digest, tokenizer)
        return digest, tokenizer

    def at_hand(self, digest: bytes | None) -> Tokenizer | None:
        """The tokenizer of this digest, unless it has to be read. From any thread."""
        return self._base if digest is None else self._kept.get(digest)

    def load_again(self, folder: Path, digest: bytes | None) -> Tokenizer:
        """As `load`, of a folder that held this one. Raises TextConfigError if it does no more."""
        found, tokenizer = self.load(folder)
        if found != digest:
            raise TextConfigError(f"{TOKENIZER_NAME} is not what it was when it was loaded")
        return tokenizer

    def _read_base(self) -> None:
        if self._base_config is not None:
            return
        data = read_file(self._base_folder, TOKENIZER_NAME, MAX_FILE_BYTES)
        config = _parse(data or self._base.to_json())
        self._base_digest = _digest(config)
        pipeline = {part: config.get(part) for part in _PIPELINE}
        self._base_config = {**pipeline, "model": _model_settings(config)}


class _Kept:
    """By digest: all that are in use, and the last used of the others."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._alive: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()
        self._last_used: OrderedDict[bytes, Tokenizer] = OrderedDict()
        self._num_bytes = 0  # of the last used

    def get(self, digest: bytes) -> Tokenizer | None:
        tokenizer = self._alive.get(digest)
        if tokenizer is not None:
            self.add(digest, tokenizer)
        return tokenizer

    def add(self, digest: bytes, tokenizer: Tokenizer) -> None:
        with self._lock:
            if digest not in self._last_used:
                self._alive[digest] = self._last_used[digest] = tokenizer
                self._num_bytes += tokenizer.num_bytes
            self._last_used.move_to_end(digest)
            while self._num_bytes > MEMORY_BYTES:
                _, oldest = self._last_used.popitem(last=False)
                self._num_bytes -= oldest.num_bytes


def _parse(data: bytes) -> dict[str, Any]:
    try:
        config = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise TextConfigError(f"{TOKENIZER_NAME} is no JSON") from None
    if not isinstance(config, dict):
        raise TextConfigError(f"{TOKENIZER_NAME} must hold an object")
    return config


def _digest(config: dict[str, Any]) -> bytes:
    """Of all that counts: how a trainer cut and padded its batches does not."""
    counts = {key: value for key, value in config.items() if key not in ("truncation", "padding")}
    try:
        return hashlib.sha256(orjson.dumps(counts, option=orjson.OPT_SORT_KEYS)).digest()
    except orjson.JSONEncodeError:
        raise TextConfigError(f"{TOKENIZER_NAME} is nested too deeply") from None


def _load(data: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_json(data)
        tokenizer.decode(tokenizer.encode("A text, with 1 number.\n"))  # some fail only in use
    except TokenizerError as error:
        raise TextConfigError(f"{TOKENIZER_NAME} cannot be used: {error}") from None
    return tokenizer


def _check_pipeline(config: dict[str, Any], base: dict[str, Any]) -> None:
    for name in _PIPELINE:
        part = config.get(name)
        if part is not None and part != base[name] and not _is_harmless(part):
            raise TextConfigError(
                f"{TOKENIZER_NAME}: its {name} is not the model's, and not a simple one"
            )
    if _model_settings(config) != base["model"]:
        raise TextConfigError(f"{TOKENIZER_NAME}: its model is set up otherwise than the base's")


def _model_settings(config: dict[str, Any]) -> dict[str, Any]:
    """All but the tokens. What is off may be left out."""
    model = config.get("model")
    if not isinstance(model, dict):
        raise TextConfigError(f"{TOKENIZER_NAME} cannot be used: it has no model")
    unset = (None, False, "")
    settings = {
        key: value for key, value in model.items() if key not in _TOKENS and value not in unset
    }
    if "merges" in model:  # old files do not say so
        settings.setdefault("type", "BPE")
    return settings


def _check_tokens(config: dict[str, Any]) -> None:
    """Of a tokenizer that could be loaded: no token stands for a long text."""
    vocab = config["model"]["vocab"]  # a list of pairs, if tokens have scores
    tokens = vocab if isinstance(vocab, dict) else (token for token, _ in vocab)
    added = (token["content"] for token in config.get("added_tokens") or ())
    if any(len(token) > _MAX_TOKEN for token in itertools.chain(tokens, added)):
        raise TextConfigError(f"{TOKENIZER_NAME}: a token has more than {_MAX_TOKEN} characters")


def _is_harmless(part: object) -> bool:
    """It takes time that grows with the text, and makes it longer by a few characters at most."""
    if not isinstance(part, dict) or part.get("type") not in _HARMLESS:
        return False
    inner = [
        one
        for key in ("normalizers", "pretokenizers", "decoders")
        if isinstance(part.get(key), list)
        for one in part[key]
    ]
    if part["type"] == "Prepend" and len(str(part.get("prepend"))) > _MAX_PREPENDED:
        return False
    if part.get("stop"):  # of a decoder that strips: the library fails at tokens that are shorter
        return False
    if part["type"] == "Replace":
        pattern = part.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(text, str) or len(str(part.get("content"))) > len(text):
            return False
    return len(inner) <= 16 and all(_is_harmless(one) for one in inner)
