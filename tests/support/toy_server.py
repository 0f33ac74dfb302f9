"""A toy engine behind the real application, served over real sockets.

The toy repeats its prompt, token by token, each shifted by the adapter's k (from its folder): the
text that comes back is known exactly, and a request that ran on another adapter shows it.
"""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterError, AdapterNotFoundError
from lorakeet.server.app import create_app
from lorakeet.server.engine.client import EngineDeadError
from lorakeet.server.engine.messages import (
    AdapterLoaded,
    AdapterState,
    AdapterUnloaded,
    AddRequest,
    EngineInfo,
    EngineStats,
    FinishReason,
    RequestOutput,
    TokenLogprob,
)
from lorakeet.server.http import HTTPProtocol
from lorakeet.server.state import Server
from support.models import BOS_ID, END_ID, EOS_ID, VOCAB_SIZE, tiny_tokenizer

FAULT_ID = 310  # past the tokenizer: when the toy would repeat it, the sequence fails
MAX_MODEL_LEN = 2048

T = TypeVar("T")


class ToyEngine:
    """An `Engine` without a model. Set `step_seconds`, `loads_open`, `max_running` to slow it."""

    def __init__(self, max_running: int = 1000, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.max_running = max_running
        self.running: dict[str, AddRequest] = {}
        self.waiting: dict[str, AddRequest] = {}
        self.adapters: dict[int, int] = {}  # id → k
        self.vocab_sizes: dict[int, int] = {}
        self.paths: dict[int, list[str]] = {}  # where they are read again
        self.pinned: set[int] = set()  # at most one
        self.peak_adapters = 0
        self.num_reads = 0
        self.aborted: list[str] = []
        self.requests: list[AddRequest] = []
        self.loads_open = True  # False: loads wait
        self.start_open = True  # False: start waits
        self._dead: str | None = None
        self._started = False
        self._callbacks: list[Callable[[str], None]] = []

    @property
    def info(self) -> EngineInfo:
        assert self._started
        return EngineInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=10,
            block_size=16,
            max_loras=4,
            device="toy",
            dtype="int",
            memory={"weights": 1, "kv_cache": 70},
            lora_row_bytes=100,
            max_blend_rows=20,
        )

    @property
    def stats(self) -> EngineStats:
        adapters = []
        for adapter_id in self.adapters:
            running = sum(r.adapter_id == adapter_id for r in self.running.values())
            waiting = sum(r.adapter_id == adapter_id for r in self.waiting.values())
            state = AdapterState(adapter_id, "gpu" if running else "host", running, waiting)
            adapters.append(state)
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_blocks_used=len(self.running),
            kv_blocks_total=10,
            adapters=adapters,
        )

    @property
    def healthy(self) -> bool:
        return self._started and self._dead is None

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def on_death(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)

    def on_stats(self, callback: Callable[[EngineStats], None]) -> None:
        self.report = callback

    async def start(self, model_folder: Path) -> None:
        while not self.start_open:
            await asyncio.sleep(0.01)
        self._started = True

    def die(self) -> None:
        self._dead = "toy"
        for callback in self._callbacks:
            callback("toy")

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        assert request.request_id not in self.running
        assert _ids(request) <= self.adapters.keys()
        self.requests.append(request)
        finished = False
        self.waiting[request.request_id] = request
        try:
            while len(self.running) >= self.max_running:
                await self._tick()
            self.running[request.request_id] = self.waiting.pop(request.request_id)
            for output in self._outputs(request):
                await self._tick()
                finished = output.finish_reason is not None
                yield output
        finally:
            self.waiting.pop(request.request_id, None)
            self.running.pop(request.request_id, None)
            if not finished:
                self.aborted.append(request.request_id)

    async def load_adapter(
        self, adapter_id: int, path: str, digest: str | None = None
    ) -> AdapterLoaded:
        while not self.loads_open:
            await asyncio.sleep(0.01)
        self.num_reads += 1
        config = Path(path) / "adapter_config.json"
        await asyncio.sleep(0.01)
        if not config.is_file():
            raise AdapterNotFoundError("adapter_config.json is missing")
        values = json.loads(config.read_text())
        if "bad" in values:
            raise AdapterError(values["bad"])
        found = hashlib.sha256(config.read_bytes()).hexdigest()
        if digest not in (None, found):
            raise AdapterError("its files have changed")
        self.adapters[adapter_id] = values["k"]
        self.vocab_sizes[adapter_id] = values.get("vocab_size", VOCAB_SIZE)
        self.paths[adapter_id] = [path]
        self.peak_adapters = max(self.peak_adapters, len(self.adapters))
        return AdapterLoaded(
            adapter_id,
            found,
            rank=8,
            modules=["q_proj"],
            num_bytes=1024,
            seconds={"read": 0.01, "check": 0.02},
            num_rows=8,
            blendable=values.get("blendable", True),
            vocab_size=values.get("vocab_size"),
        )

    async def update_adapter(self, adapter_id: int, paths: Sequence[str], pinned: bool) -> None:
        await asyncio.sleep(0.005)
        if pinned and len(self.pinned | {adapter_id}) > 1:
            raise AdapterError("pinning this adapter would leave no room for any other")
        if adapter_id not in self.adapters:
            return
        self.paths[adapter_id] = list(paths)
        (self.pinned.add if pinned else self.pinned.discard)(adapter_id)

    def unload_adapter(self, adapter_id: int) -> "asyncio.Future[AdapterUnloaded]":
        assert not any(adapter_id in _ids(request) for request in self.running.values())
        del self.adapters[adapter_id], self.paths[adapter_id]
        self.pinned.discard(adapter_id)
        future: asyncio.Future[AdapterUnloaded] = asyncio.get_running_loop().create_future()
        future.set_result(AdapterUnloaded(adapter_id, 1024, num_rows=2, num_blocks=3))
        return future

    async def shutdown(self) -> None:
        self._dead = self._dead or "shut down"

    async def _tick(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        await asyncio.sleep(self.step_seconds)
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _outputs(self, request: AddRequest) -> Iterator[RequestOutput]:
        sampling, prompt = request.sampling, request.prompt
        k = self.adapters.get(request.adapter_id, 0)
        k += round(sum(weight * self.adapters[part] for part, weight in request.blend))
        scores: list[TokenLogprob | None] | None = None
        if sampling.prompt_logprobs is not None:
            scores = [None, *(_score(token, sampling.prompt_logprobs) for token in prompt[1:])]
        if sampling.max_tokens == 0:
            yield RequestOutput(request.request_id, [], "length", None, None, scores, 0)
            return
        for count in range(1, sampling.max_tokens + 1):
            token = prompt[(count - 1) % len(prompt)]
            if token == FAULT_ID:
                yield RequestOutput(request.request_id, [], "error", error="NaN in the logits")
                return
            size = self.vocab_sizes.get(request.adapter_id, VOCAB_SIZE)
            token = (token + k + _noise(sampling.seed, sampling.temperature, count)) % size
            stops = (
                *sampling.stop_token_ids,
                *(() if sampling.ignore_eos else request.eos_token_ids),
            )
            stop = token if token in stops and count > sampling.min_tokens else None
            reason: FinishReason | None = "length" if count == sampling.max_tokens else None
            logprobs = None if sampling.logprobs is None else [_score(token, sampling.logprobs)]
            first = count == 1
            yield RequestOutput(
                request_id=request.request_id,
                token_ids=[token],
                finish_reason=reason if stop is None else "stop",
                stop_token=stop,
                logprobs=logprobs,
                prompt_logprobs=scores if first else None,
                cached_tokens=len(prompt) // 16 * 16 if first else None,
                queue_seconds=0.25 if first else None,
            )
            if stop is not None:
                return


def _noise(seed: int | None, temperature: float, count: int) -> int:
    if temperature == 0 or seed is None:
        return 0
    return hashlib.sha256(f"{seed}:{count}".encode()).digest()[0] % 5


def _score(token: int, num_top: int) -> TokenLogprob:
    top = [((token + i) % VOCAB_SIZE, -0.5 - i) for i in range(num_top)]
    return TokenLogprob(token, -0.5, top)


# --- folders --------------------------------------------------------------------------------------


def model_folder(folder: Path) -> Path:
    """A model's folder without weights."""
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID]})
    )
    return folder


def _ids(request: AddRequest) -> set[int]:
    """Of the adapters that it runs on."""
    return {request.adapter_id, *(part for part, _ in request.blend)} - {0}


def adapter_folder(folder: Path, k: int = 0, **config: Any) -> Path:
    """An adapter that adds k to every token."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"k": k, **config}))
    return folder


# --- a server in a thread -------------------------------------------------------------------------


class ToyServer:
    """The real application on a real socket; `http` is a client for it."""

    def __init__(self, settings: Settings, engine: ToyEngine) -> None:
        self.settings = settings
        self.engine = engine
        self.server: Server
        self.port: int
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the server's event loop."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout=20)

    def wait_idle(self) -> None:
        """All requests have left the engine and every place is free; fails after 5 seconds."""

        def is_idle() -> bool:
            server = self.server
            is_free = not (server.running or server._reserved or server.registry._leases)
            return self.engine.idle and is_free

        async def wait() -> None:
            async with asyncio.timeout(5):
                while not is_idle():
                    await asyncio.sleep(0.01)

        self.call(wait())

    def __enter__(self) -> "ToyServer":
        self._thread.start()
        assert self._ready.wait(timeout=30)
        if self._failure is not None:
            raise self._failure
        self.http = httpx.Client(base_url=self.url, timeout=20)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = Server(self.settings, self.engine)
        config = uvicorn.Config(
            create_app(self.server),
            port=0,
            http=HTTPProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        config.timeout_graceful_shutdown = 2
        web = uvicorn.Server(config)
        serving = asyncio.create_task(web.serve())
        try:
            await self.server.start()
            while not web.started:
                await asyncio.sleep(0.01)
            self.port = web.servers[0].sockets[0].getsockname()[1]
            self._ready.set()
            await self._stop.wait()
        except BaseException as error:
            self._failure = error  # raised by __enter__
        finally:
            self._ready.set()
            web.should_exit = True
            await serving
            await self.server.close()


@contextlib.contextmanager
def toy_server(
    model: Path, engine: ToyEngine | None = None, **settings: Any
) -> Iterator[ToyServer]:
    """A server of `model_folder`'s folder as "base"; afterwards no request may be left."""
    values = {"model": str(model), "served_model_name": "base", **settings}
    with ToyServer(Settings(**values), engine or ToyEngine()) as server:
        yield server
        server.wait_idle()
