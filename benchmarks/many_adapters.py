"""Thousands of registered adapters on the CPU: start, memory, and the latency of first requests.

    python benchmarks/many_adapters.py [--adapters 2000] [--rank 1] [--pool 8]

Writes adapters of different contents for the demo model, all seven projections, into one folder,
serves it with a pool for few of them, and measures: the time until the server is ready (beside one
without adapters), the memory of its processes, the time of `/v1/models`, and of requests for one
token of adapters that are on disk, in host memory, in the pool. Then every adapter is asked once.
The last line: the time until ready with the adapters over that without.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import torch
from shapes import write_adapter
from tqdm import tqdm, trange

from lorakeet.lora.pool import bytes_per_row
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from lorakeet.server.demo import model_folder

SAMPLE = 50  # requests behind each latency


@contextmanager
def server_of(model: Path, root: Path, options: list[str]) -> Iterator[tuple[httpx.Client, float]]:
    """A running server, and the seconds until it was ready."""
    port = 8712
    command = [sys.executable, "-m", "lorakeet.server.cli", "serve", str(model), "--device", "cpu"]
    command += ["--served-model-name", "base", "--adapter-dir", str(root), "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen([*command, *options, "--log-level", "error"])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            while not is_healthy(http):
                assert process.poll() is None, "the server has ended"
                time.sleep(0.02)
            yield http, time.perf_counter() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def memory_mib() -> str:
    """Of the API process and of the engine's."""
    (api,) = psutil.Process().children()
    sizes = [process.memory_info().rss for process in (api, *api.children())]
    return " + ".join(f"{size / 2**20:.0f}" for size in sizes) + " MiB"


def timed(http: httpx.Client, path: str) -> float:
    started = time.perf_counter()
    http.get(path).raise_for_status()
    return time.perf_counter() - started


def ask(http: httpx.Client, name: str) -> float:
    """Seconds of a request for one token."""
    body = {"model": name, "prompt": [1, 2, 3, 4, 5], "max_tokens": 1}
    started = time.perf_counter()
    http.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - started


def latency(http: httpx.Client, what: str, names: Iterable[str]) -> None:
    times = sorted(ask(http, name) for name in names)
    median, worst = statistics.median(times), times[-1]
    print(f"one token, {what}: median {median * 1e3:.1f} ms, longest {worst * 1e3:.1f} ms")


def measure(http: httpx.Client, names: list[str], pool: int) -> None:
    print(f"memory after the start: {memory_mib()}")
    first, second = timed(http, "/v1/models"), timed(http, "/v1/models")
    print(f"/v1/models: first {first * 1e3:.0f} ms, then {second * 1e3:.0f} ms")
    latency(http, "base model", ["base"] * SAMPLE)
    latency(http, "adapter on disk", names[:SAMPLE])
    latency(http, "adapter in host memory", names[:SAMPLE])
    for name in names[:pool]:
        ask(http, name)
    latency(http, "adapter in the pool", names[:pool] * (SAMPLE // pool))
    started = time.perf_counter()
    for name in tqdm(names, desc="requests", leave=False):
        ask(http, name)
    print(f"every adapter asked once: {time.perf_counter() - started:.0f} s, one after the other")
    print(f"memory afterwards: {memory_mib()}")
    tiers = [entry["tier"] for entry in http.get("/v1/adapters").json()["data"]]
    print("where they are: " + ", ".join(f"{tiers.count(t)} {t}" for t in ("gpu", "host", "disk")))
    latency(http, "adapter put out, read again", names[:SAMPLE])
    print(f"/v1/models: {timed(http, '/v1/models') * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--pool", type=int, default=8, help="adapters in the pool at a time")
    parser.add_argument("--host-lora-memory", default="512MiB")
    arguments = parser.parse_args()
    model = model_folder(None)
    config = json.loads((model / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    row_bytes = bytes_per_row(group_specs(load_config(model)), torch.float32)
    pool_bytes = arguments.pool * arguments.rank * row_bytes
    limits = ["--max-loras", str(arguments.pool), "--max-lora-rank", str(arguments.rank)]
    limits += ["--lora-memory", str(pool_bytes), "--max-num-seqs", str(arguments.pool)]
    limits += ["--host-lora-memory", arguments.host_lora_memory, "--max-model-len", "512"]
    with tempfile.TemporaryDirectory() as name:
        root, empty = Path(name) / "adapters", Path(name) / "empty"
        empty.mkdir()
        for index in trange(arguments.adapters, desc="adapters", leave=False):
            write_adapter(root / f"a{index}", config, arguments.rank, seed=index)
        with server_of(model, empty, limits) as (_, without):
            print(f"start without adapters: {without:.2f} s, memory {memory_mib()}")
        names = [f"a{index}" for index in range(arguments.adapters)]
        with server_of(model, root, limits) as (http, seconds):
            print(f"start with {arguments.adapters} adapters: {seconds:.2f} s")
            measure(http, names, arguments.pool)
    print(f"start with {arguments.adapters} adapters over one without: {seconds / without:.2f}")


if __name__ == "__main__":
    main()
