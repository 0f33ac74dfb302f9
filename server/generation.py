"""A valid request → its choices: one engine request (child) for each, their text, their usage."""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from lorakeet.server.admission import Prompt, ValidRequest
from lorakeet.server.engine.client import Engine
from lorakeet.server.engine.messages import (
    AddRequest,
    RequestOutput,
    TokenLogprob,
)
from lorakeet.server.errors import GenerationError
from lorakeet.server.tokens import OutputText


@dataclass(frozen=True, slots=True)
class ScoredToken:
    offset: int  # of its first character in the choice's text
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine output adds to one choice."""

    index: int
    text: str
    num_tokens: int
    logprobs: list[ScoredToken]
    finish_reason: str | None
    queue_seconds: float | None  # with the first one: how long it waited for the engine


@dataclass
class Choice:
    """One sequence: its engine request, and what has come of it so far."""

    index: int
    prompt: Prompt
    request: AddRequest
    output: OutputText
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    _scored: deque[ScoredToken] = field(default_factory=deque)  # their text is not shown yet

    def accept(self, output: RequestOutput) -> Delta:
        """Take the engine's output. Raises GenerationError if it ends the sequence badly."""
        if output.finish_reason in ("error", "abort"):
            raise GenerationError(output.error or "The engine ended the request")
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        before = self.num_tokens
        cut = self._add_tokens(output)
        if not cut and output.finish_reason is not None:
            cut = self.output.finish()
            self.finish_reason = "stop" if cut else output.finish_reason
        text = self.output.take()
        scored = self._take_scored(whole=self.finish_reason is not None and not cut)
        num_tokens = self.num_tokens - before
        return Delta(self.index, text, num_tokens, scored, self.finish_reason, output.queue_seconds)

    def _add_tokens(self, output: RequestOutput) -> bool:
        """True: a stop string cuts the text."""
        last = len(output.token_ids) - 1
        for at, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if at == last and output.stop_token is not None:
                return False
            if output.logprobs is not None:
                self._scored.append(ScoredToken(self.output.decoded, output.logprobs[at]))
            if self.output.add(token_id):
                self.finish_reason = "stop"
                return True
        return False

    def _take_scored(self, whole: bool) -> list[ScoredToken]:
        """Scores of tokens whose text has begun to show; those behind a cut never do."""
        taken = []
        while self._scored and (whole or self._scored[0].offset < self.output.shown):
            taken.append(self._scored.popleft())
        return taken


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def wire(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Generation:
    """All choices of one request."""

    def __init__(self, engine: Engine, request: ValidRequest) -> None:
        self.id = request.id
        self._engine = engine
        self._num_children = request.sampling.n
        self.choices = [
            _make_choice(request, prompt, position * request.sampling.n + child, child)
            for position, prompt in enumerate(request.prompts)
            for child in range(request.sampling.n)
        ]

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        firsts = self.choices[:: self._num_children]
        return Usage(
            prompt_tokens=sum(len(choice.prompt.token_ids) for choice in firsts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
        )

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Run every choice to its end. Closing it aborts what still runs.

        Raises GenerationError, EngineDeadError.
        """
        runs = [self._run(choice) for choice in self.choices]
        async with aclosing(runs[0] if len(runs) == 1 else _merge(runs)) as merged:
            async for delta in merged:
                yield delta

    async def _run(self, choice: Choice) -> AsyncGenerator[Delta, None]:
        async with aclosing(self._engine.generate(choice.request)) as outputs:
            async for output in outputs:
                yield choice.accept(output)
                if choice.finish_reason is not None:
                    return  # a stop string: closing ends it in the engine as well


def _make_choice(request: ValidRequest, prompt: Prompt, index: int, child: int) -> Choice:
    sampling = request.sampling
    own = msgspec.structs.replace(
        sampling,
        n=1,
        max_tokens=prompt.max_tokens,
        seed=_child_seed(sampling.seed, child),
        stop=(),  # ours to find
    )
    engine_request = AddRequest(
        request_id=f"{request.id}-{index}",
        prompt=prompt.token_ids,
        sampling=own,
        adapter_id=request.adapter_id,
        eos_token_ids=request.eos_token_ids,
        blend=request.blend,
    )
    output = OutputText(request.tokenizer, prompt.token_ids, sampling.stop, sampling.min_tokens)
    return Choice(index, prompt, engine_request, output)


def _child_seed(seed: int | None, child: int) -> int | None:
    """The first child has the plain seed: it is what the request with n=1 would give."""
    if seed is None or child == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{child}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


async def _merge(runs: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Items as they come. The first error ends all."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def pump(run: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(run):
                async for delta in run:
                    queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:  # raised again in the merged stream
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
