"""A training loop that pushes new versions of its adapter: Llama-3.1-8B's shape, through HTTP.

    python benchmarks/swap.py [--versions 10]
    python benchmarks/swap.py --smoke      (tiny, on the CPU)

Uploads one version after the other of an adapter of rank 16 on all seven projections (84 MB each)
under one name, with `load_inplace`, while streams decode on it, and asks each new version for a
token. The last line: the median time from the start of an upload to its reply, after which new
requests use the new version, in milliseconds.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import httpx
from server_process import served
from shapes import LLAMA_8B, TINY, projections, write_copies, write_model

FILES = ("adapter_config.json", "adapter_model.safetensors")
STREAMS = 8


async def upload(http: httpx.AsyncClient, folder: Path) -> float:
    """Seconds that the upload of a version took."""
    parts = [("files", (name, (folder / name).read_bytes())) for name in FILES]
    started = time.perf_counter()
    fields = {"name": "a", "load_inplace": "true"}
    reply = await http.post("/v1/adapters", data=fields, files=parts)
    reply.raise_for_status()
    return time.perf_counter() - started


async def ask(http: httpx.AsyncClient, num_tokens: int) -> float:
    started = time.perf_counter()
    body = {"model": "a", "prompt": "w1 w2 w3", "max_tokens": num_tokens, "ignore_eos": True}
    reply = await http.post("/v1/completions", json=body)
    reply.raise_for_status()
    return time.perf_counter() - started


async def push(url: str, folders: list[Path], stream_tokens: int) -> list[tuple[float, float]]:
    """For each version, the seconds of its upload and of its first request."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await upload(http, folders[0])
        await ask(http, 1)
        busy = asyncio.gather(*(keep_busy(http, stream_tokens) for _ in range(STREAMS)))
        times = [(await upload(http, folder), await ask(http, 1)) for folder in folders[1:]]
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    return times


async def keep_busy(http: httpx.AsyncClient, num_tokens: int) -> None:
    while True:
        await ask(http, num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--port", type=int, default=8977)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    config = TINY if args.smoke else LLAMA_8B
    options = ["--max-model-len", "1024" if not args.smoke else "128"]
    options += ["--device", "cpu"] if args.smoke else ["--dtype", "bfloat16"]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = write_model(root / "model", config)
        (root / "uploads").mkdir()
        ranks = [16] * (args.versions + 1)
        size = write_copies(root / "versions", config, ranks, list(projections(config)))
        print(f"{size / len(ranks) / 1e6:.1f} MB a version", flush=True)
        folders = [root / "versions" / f"a{number}" for number in range(len(ranks))]
        options += ["--adapter-upload-dir", str(root / "uploads")]
        with served(model, options, root / "log", args.port) as url:
            times = asyncio.run(push(url, folders, 100 if args.smoke else 400))
    uploads, firsts = ([1e3 * value for value in column] for column in zip(*times, strict=True))
    print(f"upload and swap, ms: median {statistics.median(uploads):.0f}, most {max(uploads):.0f}")
    print(f"first token of the new version, ms: median {statistics.median(firsts):.0f}")
    print(f"from the start of an upload to its reply, median: {statistics.median(uploads):.0f} ms")


if __name__ == "__main__":
    main()
