"""Every setting of the server, its default, and its limits: one frozen object."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class SettingsError(ValueError):
    """A setting is unknown or has a value that cannot be used; the message names it."""


def parse_size(value: object) -> object:
    """Read `"8GiB"`, `"512M"` or a number as bytes (binary units)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is no size; write for example 512MiB or 8GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """What `lorakeet serve` can be told. Sizes are bytes, times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(None, description="Model folder, .gguf file or hub id; none: demo")
    served_model_name: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel_size: Literal[1] = 1

    max_model_len: Count | None = None
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 2048
    block_size: Count = 16
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    cpu_kv_memory: Size = 2**30
    enable_prefix_caching: bool = True

    adapters: dict[str, Path] = Field(default_factory=dict)
    adapter_dirs: tuple[Path, ...] = ()
    max_loras: Count = 32
    max_lora_rank: Count = 64
    lora_memory: Size | None = None

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: str | None = Field(None, repr=False)
    max_queue: Count = 1024
    request_timeout: Annotated[float, Field(gt=0)] = 600.0
    drain_timeout: Annotated[float, Field(ge=0)] = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def load(config_file: Path | None = None, **overrides: Any) -> Settings:
    """Settings from a YAML file, with every override that is not None laid over it.

    Raises SettingsError naming the key for an unknown key, a bad value or an unreadable file.
    """
    values: dict[str, Any] = {}
    if config_file is not None:
        try:
            read = yaml.safe_load(config_file.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsError(f"cannot read {config_file}: {error}") from None
        if not isinstance(read, dict):
            raise SettingsError(f"{config_file} must hold a mapping of settings")
        values.update(read)
    values.update({key: value for key, value in overrides.items() if value is not None})
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"{name}: {first['msg']}") from None
