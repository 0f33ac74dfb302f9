"""Serves a model of Llama-3.1-8B's shape with random adapters and load-tests it over HTTP.

    python benchmarks/serve.py [--adapters 32] [--ranks 16] [--rates 4,8,16] [--duration 30]

Starts `lorakeet serve --load-format dummy` as a process of its own, registers the adapters, runs
`lorakeet bench` (S-LoRA's workload) at each rate, and stops the server. The last line: requests
served a second, over those sent, at the highest rate. Needs a CUDA GPU.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from server_process import LORAKEET, served
from shapes import LLAMA_8B, write_adapter, write_model
from tqdm import trange


def server_options(folder: Path, arguments: argparse.Namespace) -> list[str]:
    options = ["--max-model-len", "4096", "--max-loras", str(arguments.max_loras)]
    options += ["--max-lora-rank", str(max(map(int, arguments.ranks.split(","))))]
    return [*options, "--adapter-dir", str(folder / "adapters"), *arguments.server_options]


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        for index in trange(arguments.adapters, desc="adapters"):
            target = folder / "adapters" / f"a{index}"
            write_adapter(target, LLAMA_8B, ranks[index % len(ranks)], seed=index)
        log, options = arguments.out / "server.log", server_options(folder, arguments)
        with served(folder / "model", options, log, arguments.port) as url:
            for rate in sorted(map(float, arguments.rates.split(","))):
                result = arguments.out / f"serve-{rate:g}.json"
                bench(url, rate, arguments, result)
                numbers = json.loads(result.read_text())
                print(f"rate {rate:g}: {numbers['output_tokens_per_second']:.0f} output tokens/s")
    print(f"served over sent, at {rate:g} a second: {numbers['requests_per_second'] / rate:.2f}")


if __name__ == "__main__":
    main()
