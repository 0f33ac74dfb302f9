"""Every setting of the server, its default, and its limits: one frozen object."""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class SettingsError(ValueError):
    """A setting is unknown or has a value that cannot be used; the message names it."""


def parse_size(value: object) -> object:
    """Read `"8GiB"`, `"512M"` or a number as bytes (binary units)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(
        r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(?:i?b)?\s*", value, re.IGNORECASE
    )
    if match is None:
        raise ValueError(f"{value!r} is no size; write for example 512MiB or 8GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class Settings(BaseModel):
    """What `lorakeet serve` can be told. Sizes are bytes, times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: Text | None = Field(
        None, description="Model folder, .gguf file or hub id. Left out: the demo model"
    )
    served_model_name: Text | None = Field(
        None, description="Name of the base model in the API (default: MODEL as given)"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="`dummy`: random weights of the model's shape, for benchmarks"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format; auto: float32 on a CPU, the checkpoint's on a GPU"
    )
    tensor_parallel_size: Count = Field(
        1, description="GPUs to cut the model and its adapters over; on a CPU, processes"
    )
    start_timeout: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds in which the engine must have loaded the model and be ready"
    )
    step_timeout: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds without a sign of the engine after which the server ends"
    )

    max_model_len: Count | None = Field(
        None, description="Longest prompt and answer, in tokens (default: the model's)"
    )
    max_num_seqs: Count = Field(256, description="Requests that run at once; more wait")
    max_num_batched_tokens: Count = Field(2048, description="Token budget of one step")
    block_size: Count = Field(16, description="Tokens in one block of the KV cache")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of the GPU's memory to use"
    )
    cpu_kv_memory: Size = Field(2**30, description="Size of the KV cache on a CPU (default: 1GiB)")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV cache of equal prompts")

    adapters: dict[str, Path] = Field(
        default_factory=dict, description="NAME=PATH of an adapter to load at start; repeatable"
    )
    adapter_dirs: tuple[Path, ...] = Field(
        (), description="Root that adapters may be loaded from at run time; repeatable"
    )
    max_loras: Count = Field(256, description="Distinct adapters in one step")
    max_lora_rank: Count = Field(64, description="Largest rank that an adapter may have")
    max_blend_rank: Count | None = Field(
        None,
        description="Largest sum of ranks in one request's blend (default: twice max-lora-rank)",
    )
    lora_memory: Size | None = Field(
        None,
        description="Pool of adapters on each GPU (default: max-loras adapters of the largest rank,"
        " in at most a quarter of the free memory: what is left is the KV cache's)",
    )
    lora_vocabulary_memory: Size | None = Field(
        None,
        description="GPU memory for embedding and head rows that adapters bring (default: enough"
        " for max-loras adapters that replace all, in at most 1/32 of the free memory)",
    )
    host_lora_memory: Size | None = Field(
        None,
        description="Adapters kept in host memory, which is never swapped out beside a GPU; those"
        " that are not in use are put out and read again from disk (default: a quarter of the"
        " memory)",
    )
    adapter_upload_dir: Path | None = Field(
        None,
        description="Folder of the server's own, outside every adapter-dir, for adapters that are"
        " uploaded; left out: none may be. Without a state-dir they are removed at the next start",
    )
    adapter_upload_limit: Size = Field(
        2 * 2**30, description="Largest upload of an adapter (default: 2GiB)"
    )
    state_dir: Path | None = Field(
        None,
        description="Folder that keeps registered adapters and aliases over a restart; they win"
        " over an --adapter of the same name",
    )

    host: Text = Field("127.0.0.1", description="Address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="Port to listen on")
    api_key: Text | None = Field(
        None, repr=False, description="Key that clients must send as a bearer token"
    )
    max_queue: Count = Field(1024, description="Requests that may wait; more are answered 429")
    request_timeout: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds after which a request is ended with an error"
    )
    drain_timeout: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds that running requests may take after SIGTERM"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log line to print"
    )

    @field_validator("adapter_upload_dir")
    @classmethod
    def _not_a_root(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        """Else uploads could be loaded by their path: while they come, and when they are gone."""
        roots = (root.resolve() for root in info.data.get("adapter_dirs", ()))
        if folder is not None and any(folder.resolve().is_relative_to(root) for root in roots):
            raise ValueError("must be outside every adapter-dir")
        return folder


def load(config_file: Path | None = None, **overrides: Any) -> Settings:
    """Settings from a YAML file, with every override that is not None laid over it.

    Raises SettingsError naming the key for an unknown key, a bad value or an unreadable file.
    """
    values: dict[str, Any] = {}
    if config_file is not None:
        try:
            read = yaml.safe_load(config_file.read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise SettingsError(f"cannot read {config_file}: {error}") from None
        if not (isinstance(read, dict) and all(isinstance(key, str) for key in read)):
            raise SettingsError(f"{config_file} must hold a mapping of settings")
        values.update(read)
    values.update({key: value for key, value in overrides.items() if value is not None})
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        unknown = first["type"] == "extra_forbidden"
        reason = f"unknown setting{_similar(name)}" if unknown else first["msg"]
        raise SettingsError(f"{name}: {reason}") from None


def _similar(name: str) -> str:
    """What a setting of another name may have meant."""
    found = difflib.get_close_matches(name, Settings.model_fields, n=1)
    return "".join(f" (did you mean {one}?)" for one in found)
