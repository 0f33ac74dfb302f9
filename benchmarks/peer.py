"""A decode step of whole servers, over HTTP: ours, or any other that speaks OpenAI's API.

    python benchmarks/peer.py http://127.0.0.1:8000 http://127.0.0.1:8001 [--points 64:64,128:64]

Asks running servers, one after the other. A point is batch:distinct adapters: so many requests are
sent at once, with random prompts of 128 tokens, and take the adapters in turn (those that
/v1/models lists with a `parent`; 0: the base model). A step is the time of 320 tokens without that
of 64, over 256: what a request costs once is in both. Each is the median of three, after one that
loads the adapters. Answers are not streamed, so the client is idle meanwhile. The last line: the
last server's step over the first's, at the point where that is least.
"""

import argparse
import asyncio
import statistics
import time

import aiohttp
import numpy as np

PROMPT, SHORT, LONG, ROUNDS = 128, 64, 320, 3


class Server:
    def __init__(self, session: aiohttp.ClientSession, url: str, vocab_size: int) -> None:
        self.session, self.url, self.vocab_size = session, url.rstrip("/"), vocab_size
        self.random = np.random.default_rng()  # what an earlier run has asked may be cached

    async def models(self, adapters: int) -> list[str]:
        """So many adapters; the base model for 0."""
        async with self.session.get(f"{self.url}/v1/models", raise_for_status=True) as response:
            models = (await response.json())["data"]
        names = [model["id"] for model in models if bool(model.get("parent")) == (adapters > 0)]
        count = max(adapters, 1)
        assert len(names) >= count, f"{self.url} has {len(names)} of {count} models: {names}"
        return names[:count]

    async def ask(self, model: str, tokens: int) -> None:
        low = min(1000, self.vocab_size // 2)  # the first ids are often special tokens
        body = {
            "model": model,
            "prompt": self.random.integers(low, self.vocab_size, PROMPT).tolist(),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            answer = await response.json()
        found = answer.get("usage", {}).get("completion_tokens")
        assert found == tokens, f"{self.url}: {found} of {tokens} tokens: {answer}"

    async def seconds(self, models: list[str], batch: int, tokens: int) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(self.ask(models[i % len(models)], tokens) for i in range(batch)))
        return time.perf_counter() - started

    async def step_ms(self, batch: int, adapters: int) -> float:
        models = await self.models(adapters)
        await self.seconds(models, batch, SHORT)
        times: dict[int, list[float]] = {SHORT: [], LONG: []}
        for _ in range(ROUNDS):
            for tokens, found in times.items():
                found.append(await self.seconds(models, batch, tokens))
        short, long = (statistics.median(found) for found in times.values())
        return 1e3 * (long - short) / (LONG - SHORT)


async def measure(urls: list[str], points: list[str], vocab_size: int) -> None:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    ratios = {}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        servers = [Server(session, url, vocab_size) for url in urls]
        for point in points:
            batch, adapters = map(int, point.split(":"))
            steps = [await server.step_ms(batch, adapters) for server in servers]
            ratios[point] = steps[-1] / steps[0]
            print(f"{point:>8}", *(f"{step:8.2f} ms" for step in steps), sep="  ", flush=True)
    least = min(ratios, key=lambda point: ratios[point])
    print(f"the last server's step over the first's, least, at {least}: {ratios[least]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("urls", nargs="+", metavar="URL", help="ours first")
    parser.add_argument("--points", default="64:64,128:64,256:64")
    parser.add_argument("--vocab-size", type=int, default=32000, help="token ids are below this")
    args = parser.parse_args()
    asyncio.run(measure(args.urls, args.points.split(","), args.vocab_size))


if __name__ == "__main__":
    main()
