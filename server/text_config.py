"""What a model's or an adapter's folder says about text: chat template, special tokens, EOS."""

import logging
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20
MAX_TEXT = 2**18  # characters of a template and special tokens: each version keeps its own
MAX_EOS = 1024  # tokens that end a sequence

_NUMBERS = {  # of generation_config.json: lowest and highest value, as in the API
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
_COUNTS = {"top_k": -1, "max_new_tokens": 1}  # the lowest
_DEFAULTS = (*_NUMBERS, *_COUNTS, "do_sample")
_NOT_FOLLOWED = frozenset(  # what else may be there, and need not be followed
    "bos_token_id eos_token_id pad_token_id decoder_start_token_id use_cache cache_implementation"
    " transformers_version".split()
)
_MAX_NAMED = 200  # characters of a log line


class TextConfigError(ValueError):
    """A file of the folder cannot be used; the message names it."""


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """For requests that do not say; None: the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    do_sample: bool | None = None  # False: greedy, whatever the temperature

    def over(self, base: "GenerationDefaults") -> "GenerationDefaults":
        own = {name: value for name, value in vars(self).items() if value is not None}
        if self.temperature is not None:  # it means to sample, whatever the base does
            own.setdefault("do_sample", True)
        return replace(base, **own)


@dataclass(frozen=True)
class TextConfig:
    chat_template: str | None
    special_tokens: dict[str, str]  # "bos_token": "<s>", …
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults = GenerationDefaults()

    def over(self, base: "TextConfig") -> "TextConfig":
        """This adapter's texts laid over its base model's: EOS tokens of both end a sequence."""
        return TextConfig(
            chat_template=self.chat_template or base.chat_template,
            special_tokens={**base.special_tokens, **self.special_tokens},
            eos_token_ids=tuple(dict.fromkeys(base.eos_token_ids + self.eos_token_ids)),
            defaults=self.defaults.over(base.defaults),
        )


def read_text_config(folder: Path) -> TextConfig:
    """Read it as transformers does; every file may be missing.

    `chat_template.jinja` wins over `tokenizer_config.json`, `generation_config.json` over
    `config.json`. Raises TextConfigError for a file that is there and cannot be used.
    """
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    special = _special_tokens(_read_json(folder, "special_tokens_map.json"))
    special |= _special_tokens(tokenizer_config)
    template = _read(folder, "chat_template.jinja")
    if template is None:
        template = _default_template(tokenizer_config.get("chat_template"))
    generation = _read_json(folder, "generation_config.json")
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = _read_json(folder, "config.json").get("eos_token_id")
    if len(template or "") + sum(map(len, (*special, *special.values()))) > MAX_TEXT:
        raise TextConfigError(
            f"the chat template and special tokens have more than {MAX_TEXT} characters"
        )
    ids = eos if isinstance(eos, list) else [eos]
    eos_ids = tuple(i for i in ids if isinstance(i, int))
    if len(eos_ids) > MAX_EOS:
        raise TextConfigError(f"eos_token_id holds more than {MAX_EOS} tokens")
    if template is not None:
        template = sys.intern(template)  # most adapters have the same one
    _log_ignored(folder, generation)
    return TextConfig(template, special, eos_ids, _defaults(generation))


def _defaults(config: dict[str, Any]) -> GenerationDefaults:
    found: dict[str, Any] = {}
    for name in _DEFAULTS:
        value = config.get(name)
        if value is None:
            continue
        if not _is_usable(name, value):
            raise TextConfigError(f"generation_config.json: {name} {str(value)[:40]} is not usable")
        found[name] = value
    return GenerationDefaults(**found)


def _is_usable(name: str, value: object) -> bool:
    if isinstance(value, bool) or name == "do_sample":
        return isinstance(value, bool) and name == "do_sample"
    low, high = _NUMBERS.get(name) or (_COUNTS[name], 2**31)
    kinds = (int, float) if name in _NUMBERS else int
    return isinstance(value, kinds) and low <= value <= high


def _log_ignored(folder: Path, config: dict[str, Any]) -> None:
    ignored = [
        repr(name[:40])
        for name, value in config.items()
        if value is not None and name not in (*_DEFAULTS, *_NOT_FOLLOWED) and name[:1] != "_"
    ]
    if ignored:
        names = ", ".join(sorted(ignored))[:_MAX_NAMED]
        logger.warning("%s: generation_config.json: not used: %s", folder, names)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _default_template(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):  # several, by name
        for entry in value:
            if isinstance(entry, dict) and entry.get("name") == "default":
                return _default_template(entry.get("template"))
    raise TextConfigError("tokenizer_config.json: chat_template is no template")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    text = _read(folder, name)
    if text is None:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise TextConfigError(f"{name} is no JSON") from None
    if not isinstance(value, dict):
        raise TextConfigError(f"{name} must hold an object")
    return value


def _read(folder: Path, name: str) -> str | None:
    data = read_file(folder, name, MAX_FILE_BYTES)
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError:
        raise TextConfigError(f"{name} cannot be read") from None


def read_file(folder: Path, name: str, max_bytes: int) -> bytes | None:
    """A file's bytes; None when there is none. Raises TextConfigError for what is no plain file."""
    file = folder / name
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a FIFO would wait for ever
            raise TextConfigError(f"{name} is not a file")
        if status.st_size > max_bytes:
            raise TextConfigError(f"{name} is larger than {max_bytes} bytes")
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        raise TextConfigError(f"{name} cannot be read") from None
