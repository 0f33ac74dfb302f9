"""What the API process and the engine process say to each other.

Commands go to the engine, events come back. Both are msgspec structs, sent as msgpack over ZeroMQ.
"""

from pathlib import Path
from typing import Literal

import msgspec

MAX_LOGPROBS = 20  # the most alternatives that a request may ask for
MAX_BLEND = 8  # the most adapters that one request may blend
FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a sequence ends. `admission` checks every value.

    `n` and `stop` are worked out in front of the engine (children, detokenizer); the engine
    itself sees one sequence and token ids.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives to report for each generated token; 0: only its own
    prompt_logprobs: int | None = None  # the same for each prompt token

    @property
    def has_penalty(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token under the model (before temperature), and the likeliest others."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), likeliest first


# --- commands: API process → engine ---------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    adapter_id: int = 0  # 0: the base model
    eos_token_ids: tuple[int, ...] = ()
    blend: tuple[tuple[int, float], ...] = ()  # instead: (adapter id, weight ≠ 0), ids ascending


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class LoadAdapter(msgspec.Struct, frozen=True, tag="load"):
    """Read, check and keep the adapter in host memory. Answered by AdapterLoaded or LoadFailed."""

    adapter_id: int
    path: str
    digest: str | None = None  # what the content must be


class UpdateAdapter(msgspec.Struct, frozen=True, tag="update"):
    """Answered by AdapterUpdated."""

    adapter_id: int
    paths: list[str]  # where it lies, to read it again when it has left host memory
    pinned: bool  # never leaves host memory, nor the GPU pool once it is there


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload"):
    """Free it when its last request ends. The API process sends no more requests for it.

    Answered by AdapterUnloaded, also for an id that is not known.
    """

    adapter_id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop now; what still runs ends with an error. (Draining is the API process's work.)"""


Command = AddRequest | AbortRequests | LoadAdapter | UpdateAdapter | UnloadAdapter | Shutdown

# --- events: engine → API process -----------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True, tag="ready"):
    """Sent once, when the engine can take requests."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_loras: int
    device: str
    dtype: str
    memory: dict[str, int] = {}  # bytes by part on one device: weights, adapter_pool, kv_cache …
    lora_row_bytes: int = 0  # of one rank row in the pool of one device
    lora_host_limit: int = 0  # bytes of adapters in host memory, of one process
    max_blend_rows: int = 0  # the most rows that the adapters of one blend may have together


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request. The last one of a request has a finish reason."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the last token id is this stop or EOS token: not to be shown
    logprobs: list[TokenLogprob] | None = None  # one for each of token_ids
    prompt_logprobs: list[TokenLogprob | None] | None = None  # sent once; None for the first token
    cached_tokens: int | None = None  # prompt tokens from the prefix cache; with the first output
    error: str | None = None
    queue_seconds: float | None = None  # from its arrival to its first step; with the first output


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: list[RequestOutput]


class AdapterLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    adapter_id: int
    digest: str
    rank: int
    modules: list[str]
    num_bytes: int
    seconds: dict[str, float] = {}  # by stage: read, check
    num_rows: int = 0  # rows of the pool that it takes: its rank, and one more with biases
    blendable: bool = True  # a weighted sum with others means something
    vocab_size: int | None = None  # its token ids are below this; None: they are the model's


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    adapter_id: int
    missing: bool
    message: str


class AdapterUnloaded(msgspec.Struct, frozen=True, tag="unloaded"):
    """Its last request has ended and its memory is free."""

    adapter_id: int
    host_bytes: int = 0
    num_rows: int = 0  # of the GPU pool
    vocabulary_bytes: int = 0  # of embedding and head rows of its own on the GPU
    num_blocks: int = 0  # of the KV cache: prefixes that nobody can use any more


class AdapterUpdated(msgspec.Struct, frozen=True, tag="updated"):
    adapter_id: int
    error: str | None = None  # why it cannot be pinned


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """`tier` is the best place that it is in."""

    adapter_id: int
    tier: Literal["disk", "host", "loading", "gpu"]
    num_running: int
    num_waiting: int
    in_host: bool = True
    num_rows: int = 0  # of the GPU pool
    vocabulary_bytes: int = 0  # of embedding and head rows of its own on the GPU
    error: str | None = None  # why it could not be read again from disk


class EngineStats(msgspec.Struct, frozen=True, tag="stats"):
    """Sent a few times a second: metrics, and the sign that the engine lives."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0  # held by running requests; cached blocks that can be evicted are free
    kv_blocks_total: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up, since start
    prefix_cache_hits: int = 0  # prompt tokens found, since start
    num_preemptions: int = 0  # since start
    num_steps: int = 0  # since start
    lora_rows_used: int = 0
    lora_rows_total: int = 0
    lora_host_bytes: int = 0
    adapters: list[AdapterState] = []
    slot_load_seconds: list[float] = []  # host → pool copies since the last report


class EngineDead(msgspec.Struct, frozen=True, tag="dead"):
    message: str


Event = (
    EngineInfo
    | StepOutputs
    | AdapterLoaded
    | LoadFailed
    | AdapterUpdated
    | AdapterUnloaded
    | EngineStats
    | EngineDead
)


def endpoints(folder: Path) -> tuple[str, str]:
    """Addresses of the command socket and of the event socket, inside `folder`."""
    return f"ipc://{folder}/commands", f"ipc://{folder}/events"
