"""What clients may send. Types are strict, unknown fields are refused, and so is every field of
OpenAI's that is not supported, unless it holds a value that asks for nothing."""

from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.exceptions import HTTPException

from lorakeet.server.engine.messages import MAX_BLEND, MAX_LOGPROBS
from lorakeet.server.errors import BadRequestError

MAX_BODY_BYTES = 16 * 2**20
# What takes long to read is the number of values in a body, not their size, and all others wait
# meanwhile (a thread would not let go of the interpreter either).
MAX_VALUES = 2**20  # token ids, mostly
GROUP_VALUES = 4  # that a list or an object counts as
MAX_STRINGS = 2**16  # names of fields and values
MAX_ITEMS = 2**12  # of a list that is none of token ids
MAX_FAULTS = 1000  # that are described: it takes much longer than finding them
_NESTED = {"messages", "stream_options", "adapters", "targets"}
_UNION_BRANCHES = {"str", "int"}  # pydantic names the branch of a union in an error's location

WireModel = TypeVar("WireModel", bound="Wire")
Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]  # one fault is enough: there may be millions
Few = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)]


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _only(*neutral: object) -> AfterValidator:
    """A field that is not supported: null or a value that asks for nothing."""

    def check(value: object) -> object:
        same = (value == other and type(value) is type(other) for other in neutral)
        if value is not None and not any(same):
            raise PydanticCustomError("unsupported", "is not supported")
        return value

    return AfterValidator(check)


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, _only(False)] = None


class AdapterWeight(Wire):
    """One adapter of a blend."""

    name: str
    weight: Annotated[float, Field(ge=-1e6, le=1e6)]


class GenerationRequest(Wire):
    """The fields that chat and plain completions share."""

    model: str
    adapter: str | None = None
    adapters: Annotated[list[AdapterWeight], Field(max_length=MAX_BLEND)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_ITEMS)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Few[str] | None = None
    stop_token_ids: Few[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_ITEMS)] | None = None

    @property
    def include_usage(self) -> bool:
        """A stream is to end with a chunk that counts its tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(Wire):
    type: Literal["text"]
    text: str


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Few[TextPart]
    name: str | None = None
    tool_calls: Annotated[Any, _only([])] = None
    tool_call_id: Annotated[Any, _only()] = None
    function_call: Annotated[Any, _only()] = None
    refusal: Annotated[Any, _only()] = None
    audio: Annotated[Any, _only()] = None
    annotations: Annotated[Any, _only([])] = None

    def plain(self) -> dict[str, str]:
        """As chat templates want it: the parts of a text are joined by newlines."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message = {"role": str(self.role), "content": text}
        return message if self.name is None else {**message, "name": self.name}


class Conversation(Wire):
    messages: Annotated[Few[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Conversation, GenerationRequest):
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, _only(True, False)] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    audio: Annotated[Any, _only()] = None
    modalities: Annotated[Any, _only([], ["text"])] = None
    prediction: Annotated[Any, _only()] = None
    reasoning_effort: Annotated[Any, _only()] = None
    verbosity: Annotated[Any, _only()] = None
    web_search_options: Annotated[Any, _only()] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    store: Annotated[Any, _only(False)] = None


class CompletionRequest(GenerationRequest):
    prompt: str | Few[str] | Many[int] | Few[Many[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[Any, _only(1)] = None
    suffix: Annotated[Any, _only("")] = None


class TokenizeRequest(Wire):
    """Either `prompt` or `messages`."""

    model: str | None = None
    adapter: str | None = None
    prompt: str | None = None
    messages: Annotated[Few[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    model: str | None = None
    adapter: str | None = None
    tokens: Many[int]


class LoadRequest(Wire):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    pinned: bool | None = None
    base_model_name: Annotated[Any, _only()] = None


class AliasTarget(Wire):
    adapter: str
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0


class AliasRequest(Wire):
    alias: str
    targets: Annotated[list[AliasTarget], Field(min_length=1, max_length=100)]


class UnloadRequest(Wire):
    lora_name: str


async def read_body(request: Request, model: type[WireModel]) -> WireModel:
    """The request's body as `model`; raises BadRequestError naming the field that is wrong."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, "The body must be JSON, with content-type: application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes")
    _check_size(body)
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        raise _bad_request(error) from None


def _check_size(body: bytearray) -> None:
    """Commas and brackets in texts count, too; quotes do not, as they are escaped there."""
    groups = body.count(b"[") + body.count(b"{")
    if body.count(b",") + GROUP_VALUES * groups > MAX_VALUES:
        raise HTTPException(413, f"The body holds more than {MAX_VALUES} values")
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        raise HTTPException(413, f"The body holds more than {MAX_STRINGS} strings")


def _bad_request(error: ValidationError) -> BadRequestError:
    if error.error_count() > MAX_FAULTS:
        message = f"More than {MAX_FAULTS} fields of the body are wrong"
        return BadRequestError(message, code="invalid_value")
    details = error.errors(include_url=False, include_input=False)
    first = details[0]
    param = _param(first)
    if first["type"] == "json_invalid" or not param:
        message = f"The body is no valid JSON object: {first['msg']}"
        return BadRequestError(message, code="invalid_json")
    if first["type"] == "extra_forbidden":
        return BadRequestError(f"Unknown field: {param}", param=param, code="unknown_field")
    if first["type"] == "missing":
        return BadRequestError(f"Missing field: {param}", param=param, code="missing_field")
    if first["type"] == "unsupported":
        message = f"{param} is not supported by this server"
        return BadRequestError(message, param=param, code="unsupported_field")
    # a union reports one error for each of its types
    causes = dict.fromkeys(detail["msg"] for detail in details if _param(detail) == param)
    return BadRequestError(f"{param}: {', or '.join(causes)}", param=param, code="invalid_value")


def _param(detail: ErrorDetails) -> str:
    """The field, without the names of a union's types; inside of others `messages[0].content`."""
    if detail["loc"] and detail["loc"][0] not in _NESTED:
        return str(detail["loc"][0])
    path = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_BRANCHES or "[" in part:
            break
        else:
            path += f".{part}" if path else part
    return path
