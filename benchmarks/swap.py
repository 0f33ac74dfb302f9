"""A training loop that pushes new versions of its adapter: Llama-3.1-8B's shape, through HTTP.

    python benchmarks/swap.py [--versions 10] [--streams 8]
    python benchmarks/swap.py --smoke      (tiny, on the CPU)

Uploads one version after the other of an adapter of rank 16 on all seven projections (84 MB each)
under one name, with `load_inplace`, while streams decode on it, and asks each new version for a
token. Of all loads it prints the stages' means, as the server's metrics tell. The last line: the
goal over the median time from the start of an upload to its reply, after which new requests use the
new version.
"""

import argparse
import statistics
import tempfile
import time
from multiprocessing import Process
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from server_process import served
from shapes import LLAMA_8B, TINY, projections, write_copies, write_model

FILES = ("adapter_config.json", "adapter_model.safetensors")
PIECE = 2**20  # bytes
GOAL_MS = 300


def body_of(http: httpx.Client, folder: Path) -> httpx.Request:
    """The upload of a version, all of it in memory, in pieces: sent in one, the client would copy
    what is left of it again and again."""
    parts = [("files", (name, (folder / name).read_bytes())) for name in FILES]
    fields = {"name": "a", "load_inplace": "true"}
    form = http.build_request("POST", "/v1/adapters", data=fields, files=parts)
    body = form.read()
    pieces = [body[start : start + PIECE] for start in range(0, len(body), PIECE)]
    headers = {name: form.headers[name] for name in ("content-type", "content-length")}
    return http.build_request("POST", "/v1/adapters", content=iter(pieces), headers=headers)


def upload(http: httpx.Client, folder: Path) -> float:
    """Seconds that the upload of a version took."""
    request = body_of(http, folder)
    started = time.perf_counter()
    http.send(request).raise_for_status()
    return time.perf_counter() - started


def ask(http: httpx.Client, num_tokens: int) -> float:
    started = time.perf_counter()
    body = {"model": "a", "prompt": "w1 w2 w3", "max_tokens": num_tokens, "ignore_eos": True}
    http.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - started


def keep_busy(url: str, num_tokens: int) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        while True:
            ask(http, num_tokens)


def push(
    url: str, folders: list[Path], num_streams: int, stream_tokens: int
) -> list[tuple[float, float]]:
    """For each version, the seconds of its upload and of its first request."""
    with httpx.Client(base_url=url, timeout=60) as http:
        upload(http, folders[0])
        ask(http, 1)
        streams = [Process(target=keep_busy, args=(url, stream_tokens)) for _ in range(num_streams)]
        for stream in streams:
            stream.start()
        try:
            time.sleep(1)  # all have begun
            return [(upload(http, folder), ask(http, 1)) for folder in folders[1:]]
        finally:
            for stream in streams:
                stream.kill()
                stream.join()


def stage_seconds(url: str) -> dict[str, float]:
    """Of a load, the mean of each stage."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    (load,) = [one for one in families if one.name == "lorakeet:adapter_load_seconds"]
    sums, counts = (
        {one.labels["stage"]: one.value for one in load.samples if one.name.endswith(end)}
        for end in ("_sum", "_count")
    )
    return {stage: seconds / counts[stage] for stage, seconds in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8, help="that decode meanwhile")
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
            times = push(url, folders, args.streams, 100 if args.smoke else 400)
            stages = stage_seconds(url)
    uploads, firsts = ([1e3 * value for value in column] for column in zip(*times, strict=True))
    median = statistics.median(uploads)
    print(f"upload and swap, ms: median {median:.0f}, most {max(uploads):.0f}")
    print("stages, ms:", ", ".join(f"{stage} {1e3 * s:.0f}" for stage, s in stages.items()))
    print(f"first token of the new version, ms: median {statistics.median(firsts):.0f}")
    print(f"the goal of {GOAL_MS} ms over the median: {GOAL_MS / median:.2f}")


if __name__ == "__main__":
    main()
