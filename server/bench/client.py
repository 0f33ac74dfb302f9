"""Sends a planned workload to an OpenAI-compatible server and times every answer."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from lorakeet.server.bench.workload import Planned


class BenchError(Exception):
    """The server cannot be measured; the message says why."""


@dataclass
class Record:
    """One request as it went. Times are seconds; `sent` counts from the start of the run."""

    adapter: str | None
    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between chunks that carry tokens
    error: str | None = None

    @property
    def latency(self) -> float:
        return self.end - self.sent


class Target:
    """The server under test."""

    def __init__(self, url: str, base_model: str | None, api_key: str | None, ignore_eos: bool):
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._base_model = base_model
        self._ignore_eos = ignore_eos
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Target":
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def discover(self, adapters: str) -> tuple[str | None, ...]:
        """Names to ask for: `all` of the server's adapters, a comma list, or "" for the base.

        Raises BenchError if the server does not answer or lacks one of the names.
        """
        assert self._session is not None
        try:
            async with self._session.get(f"{self._url}/models") as response:
                if response.status != 200:
                    raise BenchError(f"{self._url}/models answered {response.status}")
                models = (await response.json())["data"]
        except aiohttp.ClientError as error:
            raise BenchError(f"no server at {self._url}: {error}") from None
        known = [model["id"] for model in models]
        bases = [model["id"] for model in models if model.get("parent") is None]
        self._base_model = self._base_model or (bases or known)[0]
        if not adapters:
            return (None,)
        if adapters == "all":
            names = [model["id"] for model in models if model.get("parent") is not None]
            if not names:
                raise BenchError("the server has no adapters; load some or leave out --adapters")
            return tuple(names)
        wanted = [name.strip() for name in adapters.split(",")]
        missing = [name for name in wanted if name not in known and name != "base"]
        if missing:
            raise BenchError(f"the server has no model or adapter {', '.join(missing)}")
        return tuple(None if name == "base" else name for name in wanted)

    async def ask(self, planned: Planned, start: float) -> Record:
        """Send one request, read its stream to the end; failures are recorded, not raised."""
        record = Record(planned.adapter, sent=time.perf_counter() - start)
        try:
            await self._stream(planned, record, start)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            record.error = str(error) or type(error).__name__
        record.end = time.perf_counter() - start
        return record

    async def _stream(self, planned: Planned, record: Record, start: float) -> None:
        assert self._session is not None
        body: dict[str, Any] = {
            "model": planned.adapter or self._base_model,
            "prompt": planned.prompt,
            "max_tokens": planned.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        async with self._session.post(f"{self._url}/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                raise ValueError(f"status {response.status}: {text}")
            last: float | None = None
            chunks = 0
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = time.perf_counter() - start
                chunk = orjson.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(str(chunk["error"])[:200])
                if usage := chunk.get("usage"):
                    record.prompt_tokens = usage["prompt_tokens"]
                    record.output_tokens = usage["completion_tokens"]
                if not chunk.get("choices"):
                    continue
                if last is None:
                    record.ttft = now - record.sent
                else:
                    record.gaps.append(now - last)
                last = now
                chunks += 1
            record.output_tokens = record.output_tokens or chunks  # a server that sends no usage
            if last is None:
                raise ValueError("the stream ended without a token")


async def run_plan(
    target: Target, plan: list[Planned], on_done: Callable[[Record], None]
) -> list[Record]:
    """Send each request at its time, whether or not earlier ones are answered (open loop)."""
    start = time.perf_counter()

    async def one(planned: Planned) -> Record:
        await asyncio.sleep(max(0.0, planned.at - (time.perf_counter() - start)))
        record = await target.ask(planned, start)
        on_done(record)
        return record

    return await asyncio.gather(*(one(planned) for planned in plan))
