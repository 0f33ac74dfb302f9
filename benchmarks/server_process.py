"""A `lorakeet serve` as a process of its own, and who asks it. Not a command."""

import asyncio
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from lorakeet.server.bench.client import Target

LORAKEET = [sys.executable, "-m", "lorakeet.server.cli"]
BASE = "base"  # the model's name

_T = TypeVar("_T")


@contextmanager
def served(
    model: Path, options: Sequence[str], log: Path, port: int, load_format: str = "dummy"
) -> Iterator[str]:
    """The URL of a server that is ready; it is ended at the end. Its output goes to `log`."""
    command = [*LORAKEET, "serve", str(model), "--load-format", load_format, "--port", str(port)]
    command += ["--served-model-name", BASE, *options]
    url, started = f"http://127.0.0.1:{port}", time.perf_counter()
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_healthy(url, server, log)
        print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
        print(f"the server ended with {code}", flush=True)


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


def with_client(url: str, work: Callable[[Target], Awaitable[_T]]) -> _T:
    """What `work` returns, done with the client of `lorakeet bench`."""

    async def run() -> _T:
        async with Target(url, BASE, api_key=None, ignore_eos=True) as target:
            return await work(target)

    return asyncio.run(run())
