"""`lorakeet serve`: the HTTP server and its engine, from start to exit.

    start → ready → SIGTERM or SIGINT: drain → exit 0
                  → the engine dies → exit 1

Draining: no new work; what runs (requests, uploads, loads and other changes) may finish within
`drain_timeout`, then it ends with an error. A second signal ends it at once.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator
from typing import Any, NoReturn

import uvicorn
import uvloop

from lorakeet.configs.settings import Settings
from lorakeet.models.config import UnsupportedModelError
from lorakeet.models.hub import ModelNotFoundError
from lorakeet.server import logs
from lorakeet.server.app import create_app
from lorakeet.server.demo import DemoModelError, demo_adapters, usage_lines
from lorakeet.server.engine.client import Engine, EngineDeadError
from lorakeet.server.engine.process_client import EngineProcess
from lorakeet.server.errors import APIError, UnavailableError
from lorakeet.server.files import FolderError
from lorakeet.server.http import HTTPProtocol
from lorakeet.server.state import Server
from lorakeet.server.text_config import TextConfigError

logger = logging.getLogger(__name__)

DEATH_SECONDS = 1.0  # health checks and open streams learn of the engine's death in this time
CLOSE_SECONDS = 2  # for clients to read the end of their answers
KEEP_ALIVE_SECONDS = 75  # longer than most load balancers keep an idle connection


_START_ERRORS = (
    ModelNotFoundError,
    UnsupportedModelError,
    DemoModelError,
    TextConfigError,
    EngineDeadError,
    FolderError,
    APIError,
    OSError,  # a cache or a temporary folder that cannot be written
)


def run(settings: Settings) -> None:
    """Serve until a signal comes; ends the process: with 0 after a drain, 1 after a failure."""
    logs.configure(settings.log_level)
    settings = _with_demo(settings)
    uvloop.run(_serve_with_engine(settings))


async def _serve_with_engine(settings: Settings) -> NoReturn:
    gc.freeze()  # as the engine does
    code = await serve(settings, EngineProcess(settings))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that still fetches the model must not hold the process back


async def serve(settings: Settings, engine: Engine) -> int:
    """As `run`, in a running event loop of the main thread; returns the exit code."""
    try:
        listener = _listen(settings.host, settings.port)
    except (OSError, TypeError) as error:  # TypeError: a name that no host can have
        logger.error("cannot listen on %s:%d: %s", settings.host, settings.port, error)
        return 1
    server = Server(settings, engine)
    web = _WebServer(
        uvicorn.Config(
            create_app(server),
            http=HTTPProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
    )
    signals = _Signals()
    serving = asyncio.create_task(web.serve([listener]))
    url = _url(settings.host, listener.getsockname()[1])
    logger.info("listening on %s; loading the model", url)
    try:
        code = await _live(server, signals, url)
    finally:
        await engine.shutdown()  # what still waits for it is answered before the web server goes
        web.should_exit = True
        await serving
        await server.close()
        signals.close()
    if code == 0:
        logger.info("stopped")
    return code


async def _live(server: Server, signals: "_Signals", url: str) -> int:
    starting = asyncio.create_task(server.start())
    await _first_of(starting, signals.first.wait())
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return 0
    try:
        starting.result()
    except _START_ERRORS as error:
        logger.error("cannot start: %s", error)
        return 1
    info, adapters = server.engine.info, server.registry.versions()
    place = f"{info.device}, {info.dtype}"
    logger.info("ready: %s on %s with %d adapters loaded", server.base_name, place, len(adapters))
    if server.settings.model is None:
        _print_usage(server, url)

    await _first_of(signals.first.wait(), _done(server.finished))
    if server.phase != "dead":
        logger.info("draining %d requests; a second signal ends them", server.running)
        server.drain()
        limit = asyncio.sleep(server.settings.drain_timeout)
        await _first_of(server.drained(), limit, signals.second.wait(), _done(server.finished))
    if server.phase == "dead":
        await asyncio.sleep(DEATH_SECONDS)
        return 1
    server.finish(UnavailableError("The server is shutting down", code="draining"))
    return 0


async def _done(future: "asyncio.Future[Any]") -> None:
    await asyncio.wait({future})


async def _first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait for one; the others are cancelled, except those that are tasks of the caller."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, awaitable in zip(tasks, awaitables, strict=True):
        if task is not awaitable:
            task.cancel()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _url(host: str, port: int) -> str:
    """Where clients on this machine reach the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _print_usage(server: Server, url: str) -> None:
    adapters = [version.name for version in server.registry.versions()]
    needs_key = server.settings.api_key is not None
    print(*usage_lines(url, server.base_name, adapters, needs_key), sep="\n", flush=True)


def _with_demo(settings: Settings) -> Settings:
    """Without a model, the demo model's adapters are served as well, and may be loaded again."""
    if settings.model is not None:
        return settings
    adapters = demo_adapters()
    roots = dict.fromkeys([*settings.adapter_dirs, *(path.parent for path in adapters.values())])
    changed = {"adapters": adapters | settings.adapters, "adapter_dirs": tuple(roots)}
    return settings.model_copy(update=changed)


class _WebServer(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """SIGTERM and SIGINT: the first one, and the second."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
