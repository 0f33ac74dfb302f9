"""Answers: a request is run, and sent as one JSON body or as server-sent events.

    data: {chunk}      one for each piece of text
    data: {usage}      if asked for
    data: [DONE]       after success; an error is `data: {"error": …}` instead

The response begins with the first output of the engine, so that what goes wrong before has a
status of its own. The engine's work ends when the client goes, the time is up or the server stops.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from lorakeet.server.admission import ValidRequest
from lorakeet.server.blends import Selection, lease
from lorakeet.server.engine.client import EngineDeadError
from lorakeet.server.errors import (
    APIError,
    GenerationError,
    InternalError,
    RequestTimeoutError,
    UnavailableError,
)
from lorakeet.server.generation import Choice, Delta, Generation, ScoredToken, Usage
from lorakeet.server.state import Server
from lorakeet.server.tokens import TokenizerError
from lorakeet.server.versions import Version

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS = [(b"content-type", b"application/json")]


@dataclass
class Result:
    """A choice with all that it showed."""

    choice: Choice
    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)


class Format(Protocol):
    """How one endpoint writes its answers."""

    def chunk(self, choice: Choice, delta: Delta) -> bytes: ...
    def usage_chunk(self, usage: Usage) -> bytes: ...
    def body(self, results: list[Result], usage: Usage) -> bytes: ...


@dataclass(frozen=True)
class Plan:
    """What an endpoint has made of a request before any resource is taken for it."""

    selection: Selection
    num_choices: int
    choices_param: str  # the field that asks for them
    stream: bool
    include_usage: bool
    prepare: Callable[[Version | None], Awaitable[ValidRequest]]
    make_format: Callable[[ValidRequest], Format]


class EventWriter:
    """The parts of a chunk that stay the same, encoded once."""

    def __init__(self, request: ValidRequest, kind: str, created: int, include_usage: bool) -> None:
        values = {"id": request.id, "object": kind, "created": created, "model": request.model}
        self._head = b"data: " + orjson.dumps(values)[:-1]
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def chunk(self, index: int, fields: bytes) -> bytes:
        """A chunk with one choice; `fields` are its members in JSON, without braces."""
        return b'%b,"choices":[{"index":%d,%b%b' % (self._head, index, fields, self._tail)

    def usage(self, usage: Usage) -> bytes:
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, orjson.dumps(usage.wire()))


class Answer(Response):
    """Runs a plan and sends what comes of it."""

    def __init__(self, server: Server, plan: Plan) -> None:
        super().__init__()
        self._server = server
        self._plan = plan
        self._started = False  # the response has
        self._begin = time.monotonic()
        self._first_token: float | None = None
        self._generation: Generation | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        server.running += 1
        outcome = "error"
        try:
            outcome = await self._supervise(receive, send)
        except APIError as error:
            outcome = error.code or "error"
            if not self._started:
                raise
            event = b"data: %b\n\n" % error.body()
            await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            server.running -= 1
            self._report(outcome, scope.setdefault("lorakeet.log", {}))

    async def _supervise(self, receive: Receive, send: Send) -> str:
        """Run the work until it or its reason ends; returns how. Raises APIError."""
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(_disconnected(receive))
        finished = self._server.finished
        endings: list[asyncio.Future[Any]] = [work, gone, finished]
        try:
            await asyncio.wait(
                endings,
                timeout=self._server.settings.request_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            was_done = work.done()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})
        if was_done or not work.cancelled():
            return _outcome(work)
        if finished.done():
            raise finished.result()
        if gone.cancelled():
            seconds = self._server.settings.request_timeout
            raise RequestTimeoutError(f"The request took longer than {seconds:g} seconds")
        return "aborted"

    async def _work(self, send: Send) -> str:
        server, plan = self._server, self._plan
        with server.reserve(plan.num_choices, plan.choices_param):
            async with lease(server.registry, server.engine.info, plan.selection) as leased:
                request = await plan.prepare(leased.version)
                request = replace(request, blend=leased.blend)
                generation = Generation(server.engine, request)
                self._generation = generation
                output = plan.make_format(request)
                async with aclosing(generation.deltas()) as deltas:
                    if plan.stream:
                        await self._stream(send, deltas, generation, output)
                    else:
                        await self._send_body(send, deltas, generation, output)
        return generation.choices[0].finish_reason or "stop"

    async def _stream(
        self,
        send: Send,
        deltas: AsyncGenerator[Delta, None],
        generation: Generation,
        output: Format,
    ) -> None:
        async for delta in self._timed(deltas):
            if chunk := output.chunk(generation.choices[delta.index], delta):
                if not self._started:
                    await self._start(send, _EVENT_HEADERS)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        end = output.usage_chunk(generation.usage) if self._plan.include_usage else b""
        await send({"type": "http.response.body", "body": end + DONE, "more_body": False})

    async def _send_body(
        self,
        send: Send,
        deltas: AsyncGenerator[Delta, None],
        generation: Generation,
        output: Format,
    ) -> None:
        results = [Result(choice) for choice in generation.choices]
        async for delta in self._timed(deltas):
            results[delta.index].text += delta.text
            results[delta.index].scored += delta.logprobs
        body = output.body(results, generation.usage)
        length = (b"content-length", str(len(body)).encode())
        await self._start(send, [*_JSON_HEADERS, length])
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        who = self._plan.selection.label or self._server.base_name
        headers = [*headers, (b"x-lorakeet-adapter", who.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _timed(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        metrics = self._server.metrics
        last: dict[int, float] = {}  # when a choice's latest tokens came
        async for delta in deltas:
            if delta.queue_seconds is not None:
                metrics.queue_time.observe(delta.queue_seconds)
            if delta.num_tokens:
                now = time.monotonic()
                if self._first_token is None:
                    self._first_token = now
                    metrics.ttft.observe(now - self._begin)
                if delta.index in last:
                    metrics.inter_token.observe((now - last[delta.index]) / delta.num_tokens)
                last[delta.index] = now
            yield delta

    def _report(self, outcome: str, log: dict[str, object]) -> None:
        """Metrics, and the fields of the request's line in the log."""
        server, adapter = self._server, self._plan.selection.label
        seconds = time.monotonic() - self._begin
        server.metrics.requests.labels(outcome).inc()
        log |= {"adapter": adapter, "outcome": outcome}
        if self._generation is None:
            return
        usage = self._generation.usage
        server.metrics.e2e.observe(seconds)
        server.metrics.count_tokens(
            adapter or server.base_name, usage.prompt_tokens, usage.completion_tokens
        )
        log |= {
            "id": self._generation.id,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": [choice.finish_reason for choice in self._generation.choices],
        }
        if self._first_token is not None:
            log["ttft"] = round(self._first_token - self._begin, 4)


def _outcome(work: asyncio.Task[str]) -> str:
    """The finished work's result; raises APIError for every way that it can fail."""
    try:
        return work.result()
    except APIError:
        raise
    except EngineDeadError:
        raise UnavailableError("The engine has died", code="dead") from None
    except TokenizerError as error:  # an adapter's own, at tokens that it cannot show
        raise GenerationError(f"The tokenizer failed: {error}") from None
    except Exception:
        logger.exception("a request failed")
        raise InternalError from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
