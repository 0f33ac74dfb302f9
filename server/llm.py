"""The offline API: the server's own parts and its engine, in this process, without HTTP.

with LLM("path/to/model", adapters={"sql": "path/to/adapter"}) as llm:
    results = llm.generate(["SELECT"], SamplingParams(max_tokens=20), adapter="sql")
    print(results[0].outputs[0].text)
"""

import asyncio
import threading
import uuid
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from pydantic import TypeAdapter
from tqdm import tqdm

from lorakeet.configs import settings as settings_module
from lorakeet.configs.settings import Settings
from lorakeet.server import admission, generation
from lorakeet.server.admission import Prompt, ValidRequest
from lorakeet.server.api.chat import chat_tokens
from lorakeet.server.api.schemas import CompletionRequest, Message
from lorakeet.server.engine.inline import InlineEngine
from lorakeet.server.engine.messages import SamplingParams, TokenLogprob
from lorakeet.server.engine.process_client import EngineProcess
from lorakeet.server.errors import APIError, GenerationError
from lorakeet.server.profiles import Profile
from lorakeet.server.state import Server
from lorakeet.server.versions import Version

__all__ = ["LLM", "Choice", "RequestResult", "SamplingParams"]

T = TypeVar("T")
TextPrompt = str | Sequence[int]  # a text, or token ids
Conversation = Sequence[Mapping[str, Any]]  # messages: {"role": …, "content": …}
_MESSAGES = TypeAdapter(list[Message])


@dataclass(frozen=True)
class Choice:
    """One generated sequence."""

    text: str  # without the stop string or token that ended it
    token_ids: list[int]  # all that were generated, these included
    finish_reason: str  # "stop", "length" or "error"
    logprobs: list[TokenLogprob] | None = None  # one for each of token_ids, if they were asked for
    error: str | None = None  # what went wrong, with this sequence alone


@dataclass(frozen=True)
class RequestResult:
    """What came of one prompt."""

    prompt_token_ids: list[int]
    outputs: list[Choice]  # as many as the `n` of its parameters
    prompt_logprobs: list[TokenLogprob | None] | None = None  # None for the first token


@dataclass(frozen=True)
class _Job:
    prompt: TextPrompt | Conversation
    params: SamplingParams
    adapter: str | None


class LLM:
    """A model and its adapters. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **settings: Any,
    ) -> None:
        """`model` and `settings` are as in `Settings`; `adapters` maps names to PEFT folders.

        Raises SettingsError, what `Server.start` raises for a model that cannot be served, and
        ValueError for an adapter that cannot be loaded.
        """
        plan = settings_module.load(
            model=None if model is None else str(model),
            adapters={name: Path(path) for name, path in (adapters or {}).items()},
            **settings,
        )
        self._loop = _LoopThread()
        try:
            self._server = self._loop.run(_start(plan))
        except BaseException:
            self._loop.stop()
            raise
        self._close = weakref.finalize(self, _close, self._loop, self._server)

    def close(self) -> None:
        """Stop the engine and free its memory. May be called twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: TextPrompt | Sequence[TextPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestResult]:
        """Complete each prompt, a text or token ids; results are in the order of the prompts.

        `params` and `adapter` are for all prompts, or one for each. A bar shows the progress of
        several. Raises ValueError before anything runs for a prompt, parameter or name that is
        not possible, and EngineDeadError.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [cast(TextPrompt, prompts)]
        several = cast(Sequence[TextPrompt], prompts)
        return self._complete(several, params, adapter, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestResult]:
        """As `generate`, for one conversation or several, in the model's or adapter's template."""
        if messages and isinstance(messages[0], Mapping):
            messages = [cast(Conversation, messages)]
        several = cast(Sequence[Conversation], messages)
        return self._complete(several, params, adapter, progress)

    def _complete(
        self,
        prompts: Sequence[TextPrompt] | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        progress: bool,
    ) -> list[RequestResult]:
        if not self._close.alive:
            raise RuntimeError("this LLM is closed")
        count = len(prompts)
        params = SamplingParams() if params is None else params
        all_params = [params] * count if isinstance(params, SamplingParams) else params
        adapters = [adapter] * count if adapter is None or isinstance(adapter, str) else adapter
        if not len(all_params) == len(adapters) == count:
            message = f"{count} prompts, {len(all_params)} params and {len(adapters)} adapters"
            raise ValueError(f"{message}: give one for all, or one for each")
        jobs = [_Job(*job) for job in zip(prompts, all_params, adapters, strict=True)]
        with tqdm(total=count, unit="prompt", disable=not progress or count < 2) as bar:
            return self._loop.run(_run(self._server, jobs, bar))


class _LoopThread:
    """An event loop in a thread: notebooks have one of their own in the main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns; Ctrl-C cancels it. APIError becomes ValueError."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except APIError as error:
            raise ValueError(error.message) from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start(settings: Settings) -> Server:
    alone = settings.tensor_parallel_size == 1
    server = Server(settings, InlineEngine(settings) if alone else EngineProcess(settings))
    try:
        await server.start()
    except BaseException:
        await _shut_down(server)
        raise
    return server


async def _shut_down(server: Server) -> None:
    await server.close()
    await server.engine.shutdown()


def _close(loop: _LoopThread, server: Server) -> None:
    loop.run(_shut_down(server))
    loop.stop()


async def _run(server: Server, jobs: Sequence[_Job], bar: "tqdm[Any]") -> list[RequestResult]:
    """Check all jobs, then run them, some more at a time than the engine computes."""
    limit = asyncio.Semaphore(2 * server.settings.max_num_seqs)

    async def run_one(request: ValidRequest) -> RequestResult:
        async with limit:
            result = await _generate(server, request)
        bar.update()
        return result

    async with AsyncExitStack() as leases:
        versions = {}
        for adapter in dict.fromkeys(job.adapter for job in jobs):
            name = await server.registry.resolve(server.base_name, adapter)
            versions[adapter] = await leases.enter_async_context(server.registry.lease(name))
        requests = [await _check(server, job, versions[job.adapter]) for job in jobs]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run_one(request)) for request in requests]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
    return [task.result() for task in running]


async def _check(server: Server, job: _Job, version: Version | None) -> ValidRequest:
    """Raises APIError or ValueError."""
    body = _wire(server.base_name, job.params)
    profile = await server.profile(version)
    sampling = admission.sampling_params(body, profile)
    text = job.prompt if isinstance(job.prompt, str) else None
    token_ids = await _tokens(server, profile, job.prompt)
    admission.check_token_ids(token_ids, profile.vocab_size, "prompt")
    limit = admission.max_tokens(body, len(token_ids), server.engine.info, profile)
    return ValidRequest(
        id=f"llm-{uuid.uuid4().hex}",
        model=server.base_name,
        adapter_id=0 if version is None else version.adapter_id,
        prompts=(Prompt(token_ids, text, limit),),
        sampling=sampling,
        eos_token_ids=profile.eos_token_ids,
        tokenizer=profile.tokenizer,
    )


async def _tokens(server: Server, profile: Profile, prompt: TextPrompt | Conversation) -> list[int]:
    if isinstance(prompt, str):
        return await server.encode(profile, prompt, "prompt")
    if not prompt or not isinstance(prompt[0], Mapping):
        return list(cast(Sequence[int], prompt))
    return await chat_tokens(
        server,
        profile,
        _MESSAGES.validate_python(prompt),
        add_generation_prompt=True,
        continue_final_message=False,
        template_kwargs={},
    )


def _wire(model: str, params: SamplingParams) -> CompletionRequest:
    """The parameters as a client would send them, so that the same checks apply.

    Raises pydantic's ValidationError, which is a ValueError.
    """
    values = {name: getattr(params, name) for name in params.__struct_fields__}
    values["stop"] = list(params.stop)
    values["stop_token_ids"] = list(params.stop_token_ids)
    values["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return CompletionRequest(model=model, prompt="", **values)


async def _generate(server: Server, request: ValidRequest) -> RequestResult:
    choices = generation.Generation(server.engine, request).choices
    outputs = await asyncio.gather(*(_follow(server, choice) for choice in choices))
    return RequestResult(request.prompts[0].token_ids, outputs, choices[0].prompt_logprobs)


async def _follow(server: Server, choice: generation.Choice) -> Choice:
    """Run one choice to its end. Raises EngineDeadError."""
    text, token_ids, logprobs = "", list[int](), list[TokenLogprob]()
    async with aclosing(server.engine.generate(choice.request)) as outputs:
        async for output in outputs:
            token_ids += output.token_ids
            logprobs += output.logprobs or []
            try:
                text += choice.accept(output).text
            except GenerationError as error:
                return Choice(text, token_ids, "error", error=error.message)
            if choice.finish_reason is not None:
                break
    wants_logprobs = choice.request.sampling.logprobs is not None
    reason = choice.finish_reason or "error"
    return Choice(text, token_ids, reason, logprobs if wants_logprobs else None)
