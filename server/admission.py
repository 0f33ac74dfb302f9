"""Wire request → valid request: what comes out of here cannot be wrong for the engine.

The schemas have checked types and ranges; here the fields are checked against each other and
against the model. Raises BadRequestError naming the field.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from lorakeet.server.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from lorakeet.server.engine.messages import EngineInfo, SamplingParams
from lorakeet.server.errors import BadRequestError
from lorakeet.server.profiles import Profile
from lorakeet.server.tokens import Tokenizer

GREEDY_BELOW = 1e-5  # smaller temperatures would only overflow
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
DEFAULT_COMPLETION_TOKENS = 16

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    text: str | None  # as it was sent; None for token ids
    max_tokens: int


@dataclass(frozen=True)
class ValidRequest:
    """One API request. Choice `p * n + i` is child `i` of prompt `p`."""

    id: str
    model: str  # the name that was asked for
    adapter_id: int
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams  # max_tokens is each prompt's own
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    echo: bool = False
    blend: tuple[tuple[int, float], ...] = ()  # instead of adapter_id: see AddRequest


def sampling_params(body: GenerationRequest, profile: Profile) -> SamplingParams:
    """Everything but `max_tokens`, which depends on the prompt."""
    defaults, vocab_size = profile.text.defaults, profile.vocab_size
    _check_stream_options(body)
    if isinstance(body, ChatRequest):
        logprobs = _chat_logprobs(body)
        echo = False
    else:
        assert isinstance(body, CompletionRequest)
        logprobs = body.logprobs
        echo = body.echo is True
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs cannot be streamed"
        raise BadRequestError(message, param="prompt_logprobs")
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    by_default = 0.0 if defaults.do_sample is False else defaults.temperature
    temperature = _first(body.temperature, by_default, 1.0)
    top_k = max(0, _first(body.top_k, defaults.top_k, 0))
    return SamplingParams(
        min_tokens=body.min_tokens or 0,
        n=body.n or 1,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=0 if top_k >= vocab_size else top_k,
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        seed=body.seed,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(
            check_token_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids")
        ),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def max_tokens(
    body: GenerationRequest, num_prompt_tokens: int, info: EngineInfo, profile: Profile
) -> int:
    """How many tokens may follow a prompt of this length; checks that it fits the context."""
    param = "messages" if isinstance(body, ChatRequest) else "prompt"
    if num_prompt_tokens == 0:
        raise BadRequestError("The prompt has no tokens", param=param)
    asked = _asked_tokens(body)
    room = info.max_model_len - num_prompt_tokens
    if room < (0 if asked == 0 else 1):
        message = (
            f"The prompt has {num_prompt_tokens} tokens; "
            f"the model's context holds {info.max_model_len}"
        )
        raise BadRequestError(message, param=param, code="context_length_exceeded")
    if asked is None:
        most = room if isinstance(body, ChatRequest) else DEFAULT_COMPLETION_TOKENS
        asked = min(room, profile.text.defaults.max_new_tokens or most)
    if asked > room:
        message = (
            f"max_tokens is {asked}, but after {num_prompt_tokens} prompt tokens only {room} "
            f"of the model's context of {info.max_model_len} are left"
        )
        raise BadRequestError(message, param=_asked_field(body), code="context_length_exceeded")
    if (body.min_tokens or 0) > asked:
        message = f"min_tokens is {body.min_tokens}, but at most {asked} tokens may follow"
        raise BadRequestError(message, param="min_tokens")
    return asked


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> Sequence[int]:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return token_ids
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"{param}: {token_id} is no token of a vocabulary of {vocab_size}"
            raise BadRequestError(message, param=param, code="invalid_token_id")
    return token_ids


def _first(asked: Number | None, default: Number | None, otherwise: Number) -> Number:
    """The request's field, or else the profile's."""
    value = default if asked is None else asked
    return otherwise if value is None else value


def _check_stream_options(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream: true", param="stream_options")


def _asked_field(body: GenerationRequest) -> str:
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _asked_tokens(body: GenerationRequest) -> int | None:
    first, second = body.max_completion_tokens, body.max_tokens
    if first is not None and second is not None and first != second:
        message = "max_tokens and max_completion_tokens differ"
        raise BadRequestError(message, param="max_completion_tokens")
    asked = second if first is None else first
    scores = body.prompt_logprobs is not None or getattr(body, "echo", False)
    if asked == 0 and not scores:
        message = "max_tokens may be 0 only to score a prompt: with echo or prompt_logprobs"
        raise BadRequestError(message, param=_asked_field(body))
    return asked


def _chat_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise BadRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in bias:
        if not re.fullmatch("[0-9]{1,10}", key):
            message = f"logit_bias: {key[:40]!r} is no token id"
            raise BadRequestError(message, param="logit_bias", code="invalid_token_id")
    result = {int(key): value for key, value in bias.items()}
    check_token_ids(list(result), vocab_size, "logit_bias")
    return result


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise BadRequestError(f"stop: at most {MAX_STOPS} strings", param="stop")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            message = f"stop: a string must have 1 to {MAX_STOP_CHARS} characters"
            raise BadRequestError(message, param="stop")
    return stops
