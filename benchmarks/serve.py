"""Serves a model of Llama-3.1-8B's shape with random adapters and load-tests it over HTTP.

    python benchmarks/serve.py [--adapters 32] [--ranks 16] [--rates 4,8,16] [--duration 30]

Starts `lorakeet serve --load-format dummy` as a process of its own, registers the adapters, runs
`lorakeet bench` (S-LoRA's workload) at each rate, and stops the server. Needs a CUDA GPU.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from shapes import LLAMA_8B, write_adapter, write_model
from tqdm import trange

LORAKEET = [sys.executable, "-m", "lorakeet.server.cli"]


def start_server(folder: Path, arguments: argparse.Namespace, log: Path) -> subprocess.Popen[bytes]:
    command = [*LORAKEET, "serve", str(folder / "model"), "--load-format", "dummy"]
    command += ["--served-model-name", "base", "--port", str(arguments.port)]
    command += ["--max-model-len", "4096", "--max-loras", str(arguments.max_loras)]
    command += ["--max-lora-rank", str(max(map(int, arguments.ranks.split(","))))]
    command += ["--adapter-dir", str(folder / "adapters"), *arguments.server_options]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


def bench(url: str, rate: float, arguments: argparse.Namespace, result: Path) -> None:
    command = [*LORAKEET, "bench", "--url", url, "--rate", str(rate), "--json", str(result)]
    command += ["--duration", str(arguments.duration), "--adapters", arguments.names]
    command += ["--vocab-size", "128000", "--seed", "1"]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--ranks", default="16", help="comma list, dealt out in turn")
    parser.add_argument("--max-loras", type=int, default=32)
    parser.add_argument("--names", default="all", help="as in `lorakeet bench --adapters`")
    parser.add_argument("--rates", default="4,8,16", help="requests a second, one run each")
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--port", type=int, default=8711)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the results")
    parser.add_argument("server_options", nargs="*", help="after --, for `lorakeet serve`")
    arguments = parser.parse_args()
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    url = f"http://127.0.0.1:{arguments.port}"
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), arguments.out / "server.log"
        write_model(folder / "model")
        for index in trange(arguments.adapters, desc="adapters"):
            target = folder / "adapters" / f"a{index}"
            write_adapter(target, LLAMA_8B, ranks[index % len(ranks)], seed=index)
        started = time.perf_counter()
        server = start_server(folder, arguments, log)
        try:
            wait_until_healthy(url, server, log)
            print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
            for rate in map(float, arguments.rates.split(",")):
                result = arguments.out / f"serve-{rate:g}.json"
                bench(url, rate, arguments, result)
                numbers = json.loads(result.read_text())
                print(f"rate {rate:g}: {numbers['output_tokens_per_second']:.0f} output tokens/s")
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
            print(f"the server ended with {code}", flush=True)


if __name__ == "__main__":
    main()
