"""What all routes share: the engine, the tokenizer, the registry, and its phase of life."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import Request, Response

from lorakeet.configs.settings import Settings
from lorakeet.server.adapter_state import StateFile
from lorakeet.server.adapter_tokenizers import AdapterTokenizers
from lorakeet.server.admission import check_token_ids
from lorakeet.server.demo import model_folder
from lorakeet.server.engine.client import Engine
from lorakeet.server.engine.messages import EngineStats
from lorakeet.server.errors import APIError, BadRequestError, OverloadedError, UnavailableError
from lorakeet.server.metrics import Metrics
from lorakeet.server.profiles import Profile, base_profile
from lorakeet.server.registry import Registry
from lorakeet.server.templates import TemplateRenderer
from lorakeet.server.text_config import read_text_config
from lorakeet.server.tokens import Tokenizer, TokenizerError
from lorakeet.server.uploads import Uploads
from lorakeet.server.versions import Version

T = TypeVar("T")
Phase = Literal["loading", "ready", "draining", "dead"]

_PHASE_MESSAGES = {
    "loading": "The server is loading its model",
    "draining": "The server is shutting down",
    "dead": "The engine has died",
}


class Server:
    """Made before the model is there; `start` brings it up, `finish` ends what still runs."""

    tokenizer: Tokenizer  # the base model's
    _profile: Profile  # the base model's

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.base_name = settings.served_model_name or (settings.model or "demo").rstrip("/")
        self.metrics = Metrics(self.base_name)
        self.uploads = Uploads(settings.adapter_upload_dir, settings.adapter_upload_limit)
        self._state_file = StateFile(settings.state_dir)
        self.registry = Registry(
            settings, self.base_name, engine, self.metrics, self._state_file, self.uploads
        )
        self.phase: Phase = "loading"
        self.created = int(time.time())
        self.running = 0  # answers that are being made
        self.finished: asyncio.Future[APIError] = asyncio.get_running_loop().create_future()
        self._checking: asyncio.Task[None] | None = None
        self._reserved = 0  # choices of all requests, queued or running
        self._renderer = TemplateRenderer()
        self._adapter_renderer = TemplateRenderer()  # a bad one must not hold the model's own up

    async def start(self) -> None:
        """Load tokenizer, engine and the adapters of the settings; then the server is ready.

        Raises DemoModelError, ModelNotFoundError, UnsupportedModelError, TextConfigError,
        EngineDeadError, FolderError, and APIError for an adapter that cannot be loaded.
        """
        await self._restore()
        folder = await asyncio.to_thread(model_folder, self.settings.model)
        text = await asyncio.to_thread(read_text_config, folder)
        self.engine.on_stats(self._observe_slot_loads)
        self.tokenizer, _ = await asyncio.gather(
            asyncio.to_thread(Tokenizer, folder), self.engine.start(folder)
        )
        self._profile = base_profile(text, self.tokenizer, self.engine.info.vocab_size)
        self.registry.use_model(self._profile, AdapterTokenizers(self.tokenizer, folder))
        self.engine.on_death(lambda _: self.die())
        await self.registry.load_at_start()
        self.metrics.watch_engine(
            self.settings, self.engine.info, lambda: self.engine.stats, self._adapter_ids
        )
        self._checking = asyncio.create_task(self.registry.catalog.warn_of_missing())
        if self.phase == "loading":
            self.phase = "ready"

    async def _restore(self) -> None:
        state = await asyncio.to_thread(self._state_file.open)
        used = [Path(known.path) for known in state.adapters.values()]
        await asyncio.to_thread(self.uploads.open, used)
        self.registry.restore(state)

    def check_ready(self) -> None:
        """Raises UnavailableError unless new work is taken."""
        phase = self.phase if self.phase != "ready" or self.engine.healthy else "dead"
        if phase != "ready":
            raise UnavailableError(_PHASE_MESSAGES[phase], code=phase)

    @contextlib.contextmanager
    def reserve(self, num_choices: int, param: str) -> Iterator[None]:
        """Places for a request's choices, which the field `param` asks for. Raises OverloadedError
        when the queue is full, BadRequestError when it never has so many."""
        limit = self.settings.max_num_seqs + self.settings.max_queue
        if num_choices > limit:
            message = f"The request asks for {num_choices} choices; at most {limit} are possible"
            raise BadRequestError(message, param=param)
        if self._reserved + num_choices > limit:
            raise OverloadedError("Too many requests are waiting: try again later")
        self._reserved += num_choices
        try:
            yield
        finally:
            self._reserved -= num_choices

    async def profile(self, version: Version | None) -> Profile:
        """How requests of an adapter, or of the base model, are read and written.

        Raises BadRequestError when its tokenizer has to be read again, and cannot be.
        """
        return self._profile if version is None else await self.registry.profile(version)

    async def encode(
        self, profile: Profile, text: str, param: str, add_special_tokens: bool = True
    ) -> list[int]:
        """Raises BadRequestError for a text that is too long to take the time to encode it, and
        for one with tokens that the tokenizer knows and the model does not."""
        limit = self.engine.info.max_model_len
        tokenizer = profile.tokenizer
        try:
            if await asyncio.to_thread(tokenizer.exceeds, text, limit):
                message = f"The prompt has more than the {limit} tokens of the model's context"
                raise BadRequestError(message, param=param, code="context_length_exceeded")
            token_ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
        except TokenizerError as error:
            raise _tokenizer_failed(error, param) from None
        check_token_ids(token_ids, profile.vocab_size, param)
        return token_ids

    async def decode(self, profile: Profile, token_ids: list[int], param: str) -> str:
        """Special tokens too. Raises BadRequestError."""
        check_token_ids(token_ids, profile.vocab_size, param)
        try:
            return await asyncio.to_thread(profile.tokenizer.decode, token_ids, False)
        except TokenizerError as error:
            raise _tokenizer_failed(error, param) from None

    def renderer(self, template: str) -> TemplateRenderer:
        is_base = template == self._profile.text.chat_template
        return self._renderer if is_base else self._adapter_renderer

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Work that a drain waits for, and that `finish` ends. Raises what it raises, or that."""
        self.running += 1
        task = asyncio.create_task(work)
        try:
            endings: set[asyncio.Future[Any]] = {task, self.finished}
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            was_done = task.done()
        finally:
            try:
                task.cancel()
                await asyncio.wait({task})  # it cleans up
            finally:
                self.running -= 1
        if not was_done and (task.cancelled() or task.exception() is not None):
            raise self.finished.result()
        return task.result()

    async def drained(self) -> None:
        """Return when no answer is being made any more."""
        while self.running:
            await asyncio.sleep(0.02)

    def drain(self) -> None:
        """Take no new work."""
        self.phase = "draining"

    def die(self) -> None:
        """The engine is gone: nothing can be answered."""
        self.phase = "dead"
        self.finish(UnavailableError(_PHASE_MESSAGES["dead"], code="dead"))

    def finish(self, error: APIError) -> None:
        """End all that still runs with this error."""
        if not self.finished.done():
            self.finished.set_result(error)

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        await self._state_file.stop()
        await self.uploads.close()
        self._state_file.close()
        await self._renderer.close()
        await self._adapter_renderer.close()

    def _adapter_ids(self) -> Mapping[str, int]:
        return {version.name: version.adapter_id for version in self.registry.versions()}

    def _observe_slot_loads(self, stats: EngineStats) -> None:
        """Each report holds the copies since the one before."""
        for seconds in stats.slot_load_seconds:
            self.metrics.load_time.labels("copy").observe(seconds)


def _tokenizer_failed(error: TokenizerError, param: str) -> BadRequestError:
    """An adapter's own, at a text or tokens that it cannot take."""
    message = f"The tokenizer failed: {error}"
    return BadRequestError(message, param=param, code="tokenizer_error")


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def is_work(endpoint: Endpoint) -> Endpoint:
    """An endpoint that `Server.run` runs, as it changes what is served."""

    @functools.wraps(endpoint)
    async def run(request: Request) -> Response:
        return await server_of(request).run(endpoint(request))

    return run
