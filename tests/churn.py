"""Adapters that come, change and go under traffic, with faults at every step of their loads.

    python tests/churn.py --minutes 10

Rounds of traffic on a real server with a tiny model, each followed by quiet: everything is unloaded
and counted. Prints what each round left, and fails when something is held or grows, when a request
does not end, or when its text is not that of an adapter that its name meant while it ran.
"""

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from lorakeet.server.adapter_state import FILE_NAME
from lorakeet.server.metrics import OTHER
from support.adapters import make_adapter
from support.models import tiny_model
from support.servers import GREEDY, ServerProcess, wait_until

NUM_CONTENTS = 6
NUM_NAMES = 8
NUM_WORKERS = 6
FAULTS = (  # of loads
    *("missing", "truncated", "garbage", "rank", "tokenizer"),  # of files
    *("memory", "crash", "bad disk", "cut"),
    *("memory for tokenizer", "memory for file", "memory for block", "memory for copy"),
)
DELAYS = ("slow", "slow disk")
NOT_SAVED = 507  # but in effect
NO_STATE: dict[str, Any] = {"adapters": {}, "hidden": [], "aliases": {}}
PROMPTS = ([5, 9, 30, 31, 17], list(range(20, 60)), list(range(100, 230)))
LIMITS = (
    "--device cpu --served-model-name base --max-num-seqs 6 --max-loras 2 --max-lora-rank 4"
    " --max-model-len 256 --block-size 4 --cpu-kv-memory 600KiB --max-num-batched-tokens 64"
)
Outcomes = frozenset[int | None]  # contents whose text is right; None: an error is
ABSENT: Outcomes = frozenset([None])
FOREVER = float("inf")


class Name:
    """What requests of a name may end with, and from when until when."""

    def __init__(self) -> None:
        self.changing = threading.Lock()  # one worker at a time
        self.spans = [(0.0, FOREVER, ABSENT)]

    def change(self, outcomes: Outcomes, work: Callable[[], Outcomes | None]) -> None:
        """Meanwhile a request may find the old or the new; `work` says what there is then (None:
        no change)."""
        before = self.spans[-1][2]
        self.spans.append((time.monotonic(), FOREVER, outcomes))
        after = work()
        now = time.monotonic()
        ended = [(since, min(until, now), found) for since, until, found in self.spans]
        self.spans = [*ended, (now, FOREVER, before if after is None else after)]

    def between(self, start: float, end: float) -> Outcomes:
        found = (one for since, until, one in self.spans if since <= end and until >= start)
        return frozenset(itertools.chain.from_iterable(found))


@dataclass(frozen=True)
class Sizes:
    """What the server's process has in quiet, when all adapters are unloaded."""

    memory: int
    files: int
    threads: int
    series: int


@dataclass
class Churn:
    """A server and its adapters in `folder`."""

    folder: Path
    seed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.model = tiny_model(self.folder / "model")
        self.root = self.folder / "root"
        self.good = [
            make_adapter(self.root / "good" / str(i), self.model, seed=i, r=1 + i % 4)
            for i in range(NUM_CONTENTS)
        ]
        self.slow = [self._with_fault(self.root / "good" / delay, delay) for delay in DELAYS]
        self.uncopied = make_adapter(self.root / "good" / "copy", self.model, seed=99, r=4)
        self.broken = {fault: self._break(fault) for fault in FAULTS}
        self.names = {f"n{i}": Name() for i in range(NUM_NAMES)}

    def _with_fault(self, folder: Path, fault: str) -> Path:
        shutil.copytree(self.good[0], folder)
        (folder / "fault").write_text(fault)
        return folder

    def _break(self, fault: str) -> Path:
        folder = self._with_fault(self.root / "bad" / fault, fault)
        weights = folder / "adapter_model.safetensors"
        match fault:
            case "missing":
                weights.unlink()
            case "truncated":
                weights.write_bytes(weights.read_bytes()[:-1])
            case "garbage":
                (folder / "adapter_config.json").write_text("{")
            case "rank":
                make_adapter(folder, self.model, r=5)
            case "tokenizer":
                data = (self.model / "tokenizer.json").read_bytes()
                (folder / "tokenizer.json").write_bytes(data[:-1])
        return folder

    def __enter__(self) -> "Churn":
        size = (self.good[3] / "adapter_model.safetensors").stat().st_size  # of rank 4
        options = [
            *LIMITS.split(),
            *("--adapter-dir", str(self.root), "--host-lora-memory", str(3 * size)),
            *("--lora-memory", str(5 * size), "--state-dir", str(self.folder / "state")),
            *("--adapter-upload-dir", str(self.folder / "uploads")),
        ]
        script = Path(__file__).parent / "support" / "faults.py"
        command = (sys.executable, "-P", str(script))
        self.server = ServerProcess(self.folder, self.model, *options, command=command)
        self.server.wait_ready()
        self.process = psutil.Process(self.server.process.pid)
        self.texts = dict(self._learn())
        (self.uncopied / "fault").write_text("copy")
        (self.folder / "state" / "fault").write_text("full")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.server.kill_all()
        if kind is not None:
            lines = self.server.log.splitlines()
            print(*[line for line in lines if '"event": "request"' not in line][-50:], sep="\n")

    def _learn(self) -> Iterator[tuple[tuple[int, int], str]]:
        """The text of each content for each prompt, in quiet; -1 is the base model."""
        for content, path in enumerate([None, *self.good, self.uncopied], start=-1):
            name = "base" if path is None else "learn"
            if path is not None:
                assert self.server.load(name, path).status_code == 200
            for index, prompt in enumerate(PROMPTS):
                answer = self.server.complete(name, prompt)
                yield (content, index), answer["choices"][0]["text"]
            if path is not None:
                assert self.server.unload(name).status_code == 200

    # --- a round ---

    def round(self, seconds: float) -> Sizes:
        """Traffic for so long, then quiet."""
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(NUM_WORKERS) as threads:
            futures = []
            for _ in range(NUM_WORKERS):
                self.seed += 1
                futures.append(threads.submit(self._work, random.Random(self.seed), deadline))
            for future in futures:
                future.result()
        return self._quiet()

    def _work(self, dice: random.Random, deadline: float) -> None:
        changes = [self._load, self._load, self._fail, self._upload, self._unload, self._spoil]
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            while time.monotonic() < deadline:
                kind = dice.random()
                if kind < 0.45:
                    self._ask(dice, client)
                elif kind < 0.55:
                    self._leave(dice, client)
                elif kind < 0.6:
                    self._alias(dice, client)
                else:
                    name, meaning = dice.choice([*self.names.items()])
                    if meaning.changing.acquire(blocking=False):
                        try:
                            dice.choice(changes)(dice, client, name, meaning)
                        finally:
                            meaning.changing.release()

    def _count(self, kind: str, response: httpx.Response, *allowed: int) -> int:
        status = response.status_code
        assert status in allowed, (kind, status, response.is_closed and response.text[:500])
        self.outcomes[f"{kind}: {status}"] += 1
        return status

    # --- requests ---

    def _ask(self, dice: random.Random, client: httpx.Client) -> None:
        name, index = dice.choice([*self.names, "base"]), dice.randrange(len(PROMPTS))
        stream = dice.random() < 0.5
        body = {"model": name, "prompt": PROMPTS[index], **GREEDY, "stream": stream}
        start = time.monotonic()
        response = client.post("/v1/completions", json=body)
        end = time.monotonic()
        right: Outcomes = frozenset([-1])
        if name != "base":
            right = self.names[name].between(start, end)
        status = self._count("request", response, 200, *((400, 404, 500) if None in right else ()))
        text = None
        if status == 200:
            text = _streamed(response.text) if stream else response.json()["choices"][0]["text"]
        if text is None:
            assert None in right, (name, response.text)
        else:
            assert text in {self.texts[one, index] for one in right if one is not None}, name

    def _leave(self, dice: random.Random, client: httpx.Client) -> None:
        """A client that goes in the middle of its answer."""
        name = dice.choice([*self.names, "base"])
        body = {"model": name, "prompt": PROMPTS[2], **GREEDY, "max_tokens": 100, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            self._count("left", response, 200, 400, 404, 500)
            for _ in itertools.islice(response.iter_lines(), dice.randrange(8)):
                pass

    def _alias(self, dice: random.Random, client: httpx.Client) -> None:
        target = {"adapter": dice.choice([*self.names])}
        body = {"alias": "alias", "targets": [target, {"adapter": "base"}]}
        self._count("alias", client.post("/v1/aliases", json=body), 200, 404, NOT_SAVED)
        request = {"model": "alias", "prompt": PROMPTS[0], **GREEDY}
        response = client.post("/v1/completions", json=request)
        self._count("request of an alias", response, 200, 400, 404, 500)
        response = client.delete("/v1/aliases/alias")
        self._count("alias gone", response, 200, 404, NOT_SAVED)

    # --- changes ---

    def _load(self, dice: random.Random, client: httpx.Client, name: str, meaning: Name) -> None:
        kinds: list[tuple[Path, Outcomes, str]] = [
            (path, frozenset([i]), "good") for i, path in enumerate(self.good)
        ]
        kinds += [(path, frozenset([0]), path.name) for path in self.slow]
        kinds += [(self.uncopied, frozenset((NUM_CONTENTS, None)), "no copy")]
        path, outcomes, kind = dice.choice(kinds)
        options = {"load_inplace": dice.random() < 0.7, "pinned": dice.random() < 0.1}

        def work() -> Outcomes | None:
            response = _load(client, name, path, **options)
            status = self._count(f"load {kind}", response, 200, 400, NOT_SAVED)
            return None if status == 400 else outcomes

        meaning.change(outcomes, work)

    def _fail(self, dice: random.Random, client: httpx.Client, name: str, _: Name) -> None:
        fault = dice.choice(FAULTS)
        response = _load(client, name, self.broken[fault], load_inplace=True)
        self._count(f"load with fault {fault}", response, 400)

    def _upload(self, dice: random.Random, client: httpx.Client, name: str, meaning: Name) -> None:
        content = dice.randrange(NUM_CONTENTS)
        data = [(file, (self.good[content] / file).read_bytes()) for file in _FILES]
        is_cut = dice.random() < 0.2
        if is_cut:
            data[1] = (_FILES[1], data[1][1][:1000])

        def work() -> Outcomes | None:
            fields = {"name": name, "load_inplace": "true"}
            files = [("files", one) for one in data]
            response = client.post("/v1/adapters", data=fields, files=files)
            if is_cut:
                self._count("upload, cut", response, 400)
                return None
            self._count("upload", response, 200, NOT_SAVED)
            return frozenset([content])

        meaning.change(frozenset([content]), work)

    def _unload(self, _: random.Random, client: httpx.Client, name: str, meaning: Name) -> None:
        def work() -> Outcomes | None:
            response = client.delete(f"/v1/adapters/{name}")
            status = self._count("unload", response, 200, 404, 409, NOT_SAVED)
            return None if status == 409 else ABSENT

        meaning.change(ABSENT, work)

    def _spoil(self, dice: random.Random, client: httpx.Client, name: str, meaning: Name) -> None:
        """A folder that goes, or gets other content, once it is loaded: never other weights."""
        content, other = dice.sample(range(NUM_CONTENTS), 2)
        folder = Path(tempfile.mkdtemp(dir=self.root / "good"))
        shutil.copytree(self.good[content], folder, dirs_exist_ok=True)
        outcomes: Outcomes = frozenset((content, None))

        def work() -> Outcomes:
            response = _load(client, name, folder, load_inplace=True)
            self._count("load", response, 200, NOT_SAVED)
            if dice.random() < 0.5:
                shutil.copytree(self.good[other], folder, dirs_exist_ok=True)
            else:
                shutil.rmtree(folder)
            return outcomes

        meaning.change(outcomes, work)

    # --- quiet ---

    def _quiet(self) -> Sizes:
        server = self.server
        for name, meaning in self.names.items():
            assert server.unload(name).status_code in (200, 404, NOT_SAVED)
            meaning.spans = [(time.monotonic(), FOREVER, ABSENT)]
        server.wait_idle()
        wait_until(lambda: server.metric("lorakeet:lora_rows_used") == 0, "empty pool")
        wait_until(lambda: server.metric("lorakeet:lora_host_bytes") == 0, "empty host memory")
        assert server.http.get("/v1/adapters").json()["data"] == []
        uploads = self.folder / "uploads"
        wait_until(lambda: not any(path.is_dir() for path in uploads.iterdir()), "no uploads")
        state = self.folder / "state" / FILE_NAME
        wait_until(lambda: json.loads(state.read_bytes()) == NO_STATE, "empty state")
        for folder in (self.root / "good").glob("tmp*"):
            shutil.rmtree(folder)
        lines = server.http.get("/metrics").text.splitlines()
        once = (f'adapter="{OTHER}"', "outcome=")  # of which there are few, from their first use on
        series = [line for line in lines if not any(label in line for label in once)]
        return Sizes(
            self.process.memory_info().rss,
            self.process.num_fds(),
            self.process.num_threads(),
            len(series),
        )


_FILES = ("adapter_config.json", "adapter_model.safetensors")


def _load(client: httpx.Client, name: str, path: Path, **options: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **options}
    return client.post("/v1/load_lora_adapter", json=body)


def _streamed(body: str) -> str | None:
    """The text of a whole stream; None if it ended with an error. It ends once, one way."""
    *events, last = [line.removeprefix("data: ") for line in body.splitlines() if line]
    texts = [json.loads(event)["choices"][0]["text"] for event in events]
    if last == "[DONE]":
        return "".join(texts)
    assert "error" in json.loads(last)
    return None


def check(rounds: list[Sizes], max_growth: int) -> None:
    """After the first rounds, in which buffers and caches fill, nothing grows; memory, whose
    fragments come and go, by at most `max_growth` bytes."""
    warm, last = rounds[len(rounds) // 2], rounds[-1]
    assert last.files <= warm.files + 2, rounds
    assert last.threads <= warm.threads + 2, rounds
    assert last.series == warm.series, rounds
    assert last.memory <= warm.memory + max_growth, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--round", type=float, default=30, help="seconds of traffic in a round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = max(3, round(options.minutes * 60 / options.round))
    sizes: list[Sizes] = []
    with tempfile.TemporaryDirectory() as folder, Churn(Path(folder), options.seed) as churn:
        print("round  MiB of memory  files  threads  metrics series  requests and changes so far")
        for number in range(1, count + 1):
            sizes.append(now := churn.round(options.round))
            done = churn.outcomes.total()
            columns = (now.memory / 2**20, now.files, now.threads, now.series, done)
            print("{:5}  {:13.1f}  {:5}  {:7}  {:14}  {:27}".format(number, *columns), flush=True)
        for outcome, times in sorted(churn.outcomes.items()):
            print(f"{times:8} {outcome}")
    check(sizes, max_growth=16 * 2**20)
    print("nothing is held, nothing has grown")


if __name__ == "__main__":
    main()
