"""How requests of the base model or of an adapter are read and written.

One rule: what an adapter's folder holds wins over its model's, a field of a request wins over both.
Only EOS tokens add up. A profile belongs to one version of one adapter and is gone with it; its
tokenizer may be out of memory while no request uses it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import orjson

from lorakeet.server.adapter_tokenizers import AdapterTokenizers
from lorakeet.server.text_config import TextConfig, read_text_config
from lorakeet.server.tokens import Tokenizer


@dataclass(frozen=True)
class Profile:
    text: TextConfig
    tokenizer: Tokenizer
    vocab_size: int  # token ids of its requests and answers are below this
    eos_token_ids: tuple[int, ...]  # tokens that end a sequence


def base_profile(text: TextConfig, tokenizer: Tokenizer, vocab_size: int) -> Profile:
    return Profile(text, tokenizer, vocab_size, _eos(text, tokenizer, vocab_size))


@dataclass(frozen=True)
class AdapterProfile:
    """A version's, with its tokenizer's digest (None: the model's) in place of the tokenizer."""

    text: TextConfig
    tokenizer_digest: bytes | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def using(self, tokenizer: Tokenizer) -> Profile:
        return Profile(self.text, tokenizer, self.vocab_size, self.eos_token_ids)


@dataclass(frozen=True)
class FolderProfile:
    """What an adapter's folder says, before the engine has read its weights."""

    text: TextConfig
    tokenizer_digest: bytes | None
    tokenizer: Tokenizer
    digest: str  # of text and tokenizer: the same in every process

    def over(self, base: Profile, vocab_size: int | None) -> AdapterProfile:
        """The adapter's profile. `vocab_size`: None, it has the model's."""
        size = base.vocab_size if vocab_size is None else vocab_size
        own_eos = _eos(self.text, self.tokenizer, size)
        eos = [*(token_id for token_id in base.eos_token_ids if token_id < size), *own_eos]
        text = self.text.over(base.text)
        return AdapterProfile(text, self.tokenizer_digest, size, tuple(dict.fromkeys(eos)))


def read_profile(folder: Path, tokenizers: AdapterTokenizers) -> FolderProfile:
    """Raises TextConfigError for a file that is there and cannot be used."""
    text = read_text_config(folder)
    tokenizer_digest, tokenizer = tokenizers.load(folder)
    said: dict[str, object] = {**vars(text), "defaults": _said(vars(text.defaults))}
    if tokenizer_digest is not None:
        said["tokenizer"] = tokenizer_digest.hex()
    digest = hashlib.sha256(orjson.dumps(_said(said), option=orjson.OPT_SORT_KEYS)).hexdigest()
    return FolderProfile(text, tokenizer_digest, tokenizer, digest)


def _said(fields: dict[str, object]) -> dict[str, object]:
    """Without those that are None: so a field of a later release leaves digests as they are."""
    return {name: value for name, value in fields.items() if value is not None}


def _eos(text: TextConfig, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    named = tokenizer.token_id(text.special_tokens.get("eos_token", ""))
    ids = text.eos_token_ids if named is None else (*text.eos_token_ids, named)
    return tuple(token_id for token_id in dict.fromkeys(ids) if 0 <= token_id < vocab_size)
