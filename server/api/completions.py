"""`POST /v1/completions`."""

import time
import uuid

import orjson
from fastapi import Request, Response

from lorakeet.server import admission
from lorakeet.server.admission import Prompt, ValidRequest
from lorakeet.server.api.logprobs import completion_logprobs, prompt_logprobs, text_offsets
from lorakeet.server.api.schemas import CompletionRequest, read_body
from lorakeet.server.api.sse import Answer, EventWriter, Plan, Result
from lorakeet.server.blends import select
from lorakeet.server.engine.messages import TokenLogprob
from lorakeet.server.errors import BadRequestError
from lorakeet.server.generation import Choice, Delta, ScoredToken, Usage
from lorakeet.server.profiles import Profile
from lorakeet.server.state import Server, server_of
from lorakeet.server.versions import Version


async def completions(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, CompletionRequest)
    prompts = _split_prompt(body)

    async def prepare(version: Version | None) -> ValidRequest:
        profile = await server.profile(version)
        sampling = admission.sampling_params(body, profile)
        return ValidRequest(
            id=f"cmpl-{uuid.uuid4().hex}",
            model=body.model,
            adapter_id=0 if version is None else version.adapter_id,
            prompts=tuple([await _make_prompt(server, profile, body, one) for one in prompts]),
            sampling=sampling,
            eos_token_ids=profile.eos_token_ids,
            tokenizer=profile.tokenizer,
        )

    plan = Plan(
        selection=await select(server.registry, body),
        num_choices=(body.n or 1) * len(prompts),
        choices_param="n" if (body.n or 1) > 1 else "prompt",
        stream=bool(body.stream),
        include_usage=body.include_usage,
        prepare=prepare,
        make_format=lambda valid: CompletionFormat(valid, body),
    )
    return Answer(server, plan)


def _split_prompt(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequestError("The prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [*prompt]


async def _make_prompt(
    server: Server, profile: Profile, body: CompletionRequest, prompt: str | list[int]
) -> Prompt:
    info = server.engine.info
    if isinstance(prompt, str):
        token_ids = await server.encode(profile, prompt, "prompt")
        limit = admission.max_tokens(body, len(token_ids), info, profile)
        return Prompt(token_ids, prompt, limit)
    limit = admission.max_tokens(body, len(prompt), info, profile)
    admission.check_token_ids(prompt, profile.vocab_size, "prompt")
    return Prompt(prompt, None, limit)


class CompletionFormat:
    def __init__(self, request: ValidRequest, body: CompletionRequest) -> None:
        self._request = request
        self._body = body
        self._tokenizer = request.tokenizer
        self._created = int(time.time())
        self._events = EventWriter(request, "text_completion", self._created, body.include_usage)
        self._begun: set[int] = set()  # choices that have sent something, the echo first

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        echo = bool(self._body.echo) and delta.index not in self._begun
        if not (delta.text or delta.logprobs or delta.finish_reason or echo):
            return b""
        self._begun.add(delta.index)
        text = self._echo_text(choice) + delta.text if echo else delta.text
        logprobs = self._logprobs(choice, delta.logprobs, echo)
        fields = b'"text":%b,"logprobs":%b,"finish_reason":%b' % (
            orjson.dumps(text),
            orjson.dumps(logprobs),
            orjson.dumps(delta.finish_reason),
        )
        return self._events.chunk(delta.index, fields)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._events.usage(usage)

    def body(self, results: list[Result], usage: Usage) -> bytes:
        return orjson.dumps(
            {
                "id": self._request.id,
                "object": "text_completion",
                "created": self._created,
                "model": self._request.model,
                "choices": [self._choice(result) for result in results],
                "usage": usage.wire(),
            }
        )

    def _choice(self, result: Result) -> dict[str, object]:
        echo = bool(self._body.echo)
        text = self._echo_text(result.choice) + result.text if echo else result.text
        choice: dict[str, object] = {
            "index": result.choice.index,
            "text": text,
            "logprobs": self._logprobs(result.choice, result.scored, echo),
            "finish_reason": result.choice.finish_reason,
        }
        if self._body.prompt_logprobs is not None:
            scores = result.choice.prompt_logprobs or []
            choice["prompt_logprobs"] = prompt_logprobs(
                scores, self._body.prompt_logprobs, self._tokenizer
            )
        return choice

    def _echo_text(self, choice: Choice) -> str:
        prompt = choice.prompt
        return self._tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _logprobs(
        self, choice: Choice, scored: list[ScoredToken], echo: bool
    ) -> dict[str, object] | None:
        if self._body.logprobs is None:
            return None
        shift = len(self._echo_text(choice)) if self._body.echo else 0
        rows: list[tuple[int, int, TokenLogprob | None]] = []
        if echo:
            token_ids = choice.prompt.token_ids
            offsets = text_offsets(token_ids, self._tokenizer)
            rows += zip(offsets, token_ids, choice.prompt_logprobs or [], strict=True)
        rows += [(shift + one.offset, one.logprob.token_id, one.logprob) for one in scored]
        return completion_logprobs(rows, self._body.logprobs, self._tokenizer)
