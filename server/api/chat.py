"""`POST /v1/chat/completions`."""

import time
import uuid

import orjson
from fastapi import Request, Response

from lorakeet.server import admission
from lorakeet.server.admission import Prompt, ValidRequest
from lorakeet.server.api.logprobs import chat_logprobs, prompt_logprobs
from lorakeet.server.api.schemas import ChatRequest, Message, read_body
from lorakeet.server.api.sse import Answer, EventWriter, Plan, Result
from lorakeet.server.blends import select
from lorakeet.server.errors import BadRequestError
from lorakeet.server.generation import Choice, Delta, ScoredToken, Usage
from lorakeet.server.profiles import Profile
from lorakeet.server.state import Server, server_of
from lorakeet.server.templates import TemplateError
from lorakeet.server.versions import Version

_RESERVED = {"messages", "add_generation_prompt", "tools", "documents"}


async def chat_completions(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, ChatRequest)

    async def prepare(version: Version | None) -> ValidRequest:
        profile = await server.profile(version)
        sampling = admission.sampling_params(body, profile)
        token_ids = await chat_tokens(
            server,
            profile,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs or {},
        )
        limit = admission.max_tokens(body, len(token_ids), server.engine.info, profile)
        return ValidRequest(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            model=body.model,
            adapter_id=0 if version is None else version.adapter_id,
            prompts=(Prompt(token_ids, None, limit),),
            sampling=sampling,
            eos_token_ids=profile.eos_token_ids,
            tokenizer=profile.tokenizer,
        )

    plan = Plan(
        selection=await select(server.registry, body),
        num_choices=body.n or 1,
        choices_param="n",
        stream=bool(body.stream),
        include_usage=body.include_usage,
        prepare=prepare,
        make_format=lambda valid: ChatFormat(valid, body),
    )
    return Answer(server, plan)


async def chat_tokens(
    server: Server,
    profile: Profile,
    messages: list[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: dict[str, object],
    add_special_tokens: bool = False,
) -> list[int]:
    """The messages in the template of the adapter, or else of the model, as tokens.

    Raises BadRequestError.
    """
    text = profile.text
    if text.chat_template is None:
        message = "The model has no chat template: use /v1/completions"
        raise BadRequestError(message, param="messages", code="no_chat_template")
    if continue_final_message and add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise BadRequestError(message, param="continue_final_message")
    if taken := template_kwargs.keys() & (_RESERVED | text.special_tokens.keys()):
        message = f"chat_template_kwargs must not set {min(taken)!r}"
        raise BadRequestError(message, param="chat_template_kwargs")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    variables = {
        **text.special_tokens,
        **template_kwargs,
        "messages": [message.plain() for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        rendered = await server.renderer(text.chat_template).render(
            text.chat_template, variables, continue_final_message
        )
    except TemplateError as error:
        message = str(error)
        raise BadRequestError(message, param="messages", code="chat_template_error") from None
    return await server.encode(profile, rendered, "messages", add_special_tokens)


class ChatFormat:
    def __init__(self, request: ValidRequest, body: ChatRequest) -> None:
        self._request = request
        self._body = body
        self._tokenizer = request.tokenizer
        self._created = int(time.time())
        self._events = EventWriter(
            request, "chat.completion.chunk", self._created, body.include_usage
        )
        self._introduced: set[int] = set()  # choices whose role was sent

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        events = b""
        if delta.index not in self._introduced:
            self._introduced.add(delta.index)
            events = self._event(delta.index, b'{"role":"assistant","content":""}')
        if delta.text or delta.logprobs:
            content = b'{"content":%b}' % orjson.dumps(delta.text)
            logprobs = b"null"
            if self._body.logprobs:
                logprobs = orjson.dumps(self._logprobs(delta.logprobs))
            events += self._event(delta.index, content, logprobs)
        if delta.finish_reason is not None:
            reason = b'"%b"' % delta.finish_reason.encode()
            events += self._event(delta.index, b"{}", finish_reason=reason)
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._events.usage(usage)

    def body(self, results: list[Result], usage: Usage) -> bytes:
        choices = [
            {
                "index": result.choice.index,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": self._logprobs(result.scored) if self._body.logprobs else None,
                "finish_reason": result.choice.finish_reason,
            }
            for result in results
        ]
        answer: dict[str, object] = {
            "id": self._request.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
            "usage": usage.wire(),
        }
        if self._body.prompt_logprobs is not None:
            scores = results[0].choice.prompt_logprobs or []
            answer["prompt_logprobs"] = prompt_logprobs(
                scores, self._body.prompt_logprobs, self._tokenizer
            )
        return orjson.dumps(answer)

    def _event(
        self, index: int, delta: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null"
    ) -> bytes:
        fields = b'"delta":%b,"logprobs":%b,"finish_reason":%b' % (delta, logprobs, finish_reason)
        return self._events.chunk(index, fields)

    def _logprobs(self, scored: list[ScoredToken]) -> dict[str, object]:
        return chat_logprobs(scored, self._body.top_logprobs or 0, self._tokenizer)
