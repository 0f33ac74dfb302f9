"""What a model's or an adapter's folder says about text: chat template, special tokens, EOS."""

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

MAX_FILE_BYTES = 4 * 2**20


class TextConfigError(ValueError):
    """A file of the folder cannot be used; the message names it."""


@dataclass(frozen=True)
class TextConfig:
    chat_template: str | None
    special_tokens: dict[str, str]  # "bos_token": "<s>", …
    eos_token_ids: tuple[int, ...]

    def over(self, base: "TextConfig") -> "TextConfig":
        """This adapter's texts laid over its base model's: EOS tokens of both end a sequence."""
        return TextConfig(
            chat_template=self.chat_template or base.chat_template,
            special_tokens={**base.special_tokens, **self.special_tokens},
            eos_token_ids=tuple(dict.fromkeys(base.eos_token_ids + self.eos_token_ids)),
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
    eos = _read_json(folder, "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_json(folder, "config.json").get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return TextConfig(template, special, tuple(i for i in ids if isinstance(i, int)))


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
    file = folder / name
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a FIFO would wait for ever
            raise TextConfigError(f"{name} is not a file")
        if status.st_size > MAX_FILE_BYTES:
            raise TextConfigError(f"{name} is larger than {MAX_FILE_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise TextConfigError(f"{name} cannot be read") from None
