"""A model cut over two processes, on the CPU: the same answers, and one end for all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from lorakeet.models.config import load_config
from lorakeet.models.kv_cache import kv_block_bytes
from lorakeet.server.llm import LLM, RequestResult, SamplingParams
from support.adapters import make_adapter
from support.models import tiny_model
from support.servers import ServerProcess, serve, wait_until

TOLERANCE = 1e-3  # of log-probabilities
NAMES = ("red", "green", "ends")
PROMPTS = ("the quick brown", "over the lazy dog and the fox")
BLEND = [{"name": "red", "weight": 0.5}, {"name": "green", "weight": -0.75}]
OPTIONS = ("--device", "cpu", "--served-model-name", "base", "--max-loras", "2")
NUM_BLOCKS = 24  # of 4 tokens: too few for four answers at a time
ENDLESS = 8000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that two ranks do not share evenly."""
    folder = tmp_path_factory.mktemp("parallel") / "model"
    return tiny_model(
        folder, num_hidden_layers=2, vocab_size=321, max_position_embeddings=2 * ENDLESS
    )


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    root = model.parent / "adapters"
    ends = ["embed_tokens", "lm_head", "o_proj"]
    kinds: list[dict[str, Any]] = [{}, {}, {"target_modules": ends, "use_dora": True}]
    return {
        name: make_adapter(root / name, model, seed=seed, **options)
        for seed, (name, options) in enumerate(zip(NAMES, kinds, strict=True))
    }


Answers = dict[str, Any]  # of completions, by what was asked


@pytest.fixture(scope="module")
def expected(model: Path, adapters: dict[str, Path]) -> Answers:
    """What a server of one process answers."""
    with serve(model.parent, model, *options_for(model, 1)) as server:
        return all_answers(server, adapters)


@pytest.fixture(scope="module")
def server(model: Path, adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    with serve(model.parent, model, *options_for(model, 2)) as server:
        assert len(ranks(server)) == 2
        yield server
        server.wait_idle()


def options_for(model: Path, size: int) -> list[str]:
    memory = NUM_BLOCKS * kv_block_bytes(load_config(model), 4, torch.float32)
    limits = f"--block-size 4 --max-model-len 64 --cpu-kv-memory {memory} --max-num-seqs 4"
    root = model.parent / "adapters"
    return [
        *(*OPTIONS, *limits.split(), "--adapter-dir", str(root)),
        *("--tensor-parallel-size", str(size)),
    ]


def ranks(server: ServerProcess) -> list[Any]:
    """The engine's processes; rank 0 is the first."""
    return [server.engine, *server.engine.children()]


def all_answers(server: ServerProcess, adapters: dict[str, Path]) -> Answers:
    """Base, adapters, a blend, all at once; then a swap in place, and an unload."""
    answers: Answers = {}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(model: str, prompt: str, **extra: Any) -> dict[str, Any]:
        answer = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=16,
            temperature=0,
            logprobs=2,
            extra_body={"ignore_eos": True, "prompt_logprobs": 1, **extra},
        )
        return answer.choices[0].model_dump()

    for name in ("base", *NAMES):
        for prompt in PROMPTS:
            answers[f"{name}: {prompt}"] = ask(name, prompt)
    answers["blend"] = ask("base", PROMPTS[0], adapters=BLEND)
    assert server.load("swapped", adapters["red"]).status_code == 200
    assert server.load("swapped", adapters["green"], load_inplace=True).status_code == 200
    answers["swapped"] = ask("swapped", PROMPTS[0])
    assert server.unload("swapped").status_code == 200
    with pytest.raises(openai.NotFoundError):
        ask("swapped", PROMPTS[0])
    return answers


def assert_equal(answer: dict[str, Any], other: dict[str, Any]) -> None:
    one, two = answer["logprobs"], other["logprobs"]
    assert one["tokens"] == two["tokens"]
    assert one["token_logprobs"] == pytest.approx(two["token_logprobs"], abs=TOLERANCE)
    prompt = zip(answer["prompt_logprobs"][1:], other["prompt_logprobs"][1:], strict=True)
    for first, second in prompt:
        for token in first.keys() & second.keys():
            score = second[token]["logprob"]
            assert first[token]["logprob"] == pytest.approx(score, abs=TOLERANCE)


def test_answers_are_those_of_one_process(
    server: ServerProcess, expected: Answers, adapters: dict[str, Path]
) -> None:
    answers = all_answers(server, adapters)
    assert answers.keys() == expected.keys()
    for asked, answer in answers.items():
        assert_equal(answer, expected[asked])
    prompts = {asked: answer["logprobs"]["tokens"] for asked, answer in answers.items()}
    assert prompts["swapped"] == prompts[f"green: {PROMPTS[0]}"]
    assert len({str(tokens) for tokens in prompts.values()}) == len(prompts) - 1


def test_streams_that_are_left_and_answers_that_are_preempted(
    server: ServerProcess, expected: Answers
) -> None:
    with server.stream("red", PROMPTS[0], max_tokens=48) as events:
        assert len(events.take(1)) == 1
    server.wait_idle()
    before = server.metric("lorakeet:preemptions_total")
    body = {"prompt": list(PROMPTS), "n": 2, "max_tokens": 30}
    answer = server.complete("red", body.pop("prompt"), **body)  # type: ignore[arg-type]
    server.wait_report()
    assert server.metric("lorakeet:preemptions_total") > before
    for index, choice in enumerate(answer["choices"]):
        wanted = expected[f"red: {PROMPTS[index // 2]}"]["logprobs"]
        assert choice["logprobs"]["tokens"][:16] == wanted["tokens"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_the_end_of_all(tmp_path: Path, model: Path, victim: int) -> None:
    server = ServerProcess(tmp_path, model, *OPTIONS, "--tensor-parallel-size", "2")
    try:
        server.wait_ready()
        with server.stream("base", PROMPTS[0], max_tokens=ENDLESS) as events:
            assert len(events.take(1)) == 1
            ranks(server)[victim].kill()
            assert list(events)[-1]["error"]["code"] == "dead"
            assert not server.is_healthy
        assert not events.is_done
        assert server.wait_exit() == 1
        wait_until(lambda: server.processes() == [], "no process is left")
    finally:
        server.kill_all()
    named = "the engine process" if victim == 0 else "rank 1: the process"
    assert f"{named} was ended by SIGKILL" in server.log


def test_a_rank_that_hangs_at_start_is_named(tmp_path: Path, model: Path) -> None:
    options = ("--tensor-parallel-size", "2", "--start-timeout", "6")
    server = ServerProcess(tmp_path, model, *OPTIONS, *options)
    try:
        server.wait_listening()
        wait_until(lambda: len(server.processes()) >= 3, "rank 1 has a process", 60)
        for process in server.processes():
            if "engine.follower" in " ".join(process.cmdline()):
                process.suspend()
        assert server.wait_exit(60) == 1
        wait_until(lambda: server.processes() == [], "no process is left")
    finally:
        server.kill_all()
    assert "cannot start: rank 1 has not started after 6 seconds (start_timeout)" in server.log
    assert "Traceback" not in server.log


def test_offline(model: Path, adapters: dict[str, Path]) -> None:
    def generate(size: int) -> list[RequestResult]:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
        with LLM(model, adapters, device="cpu", tensor_parallel_size=size) as llm:
            names = [None, *NAMES]
            return llm.generate([PROMPTS[0]] * len(names), params, names, progress=False)

    before = psutil.Process().children(recursive=True)
    results = generate(2)
    assert set(psutil.Process().children(recursive=True)) <= set(before)
    for one, two in zip(generate(1), results, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        scores = zip(one.outputs[0].logprobs or [], two.outputs[0].logprobs or [], strict=True)
        for first, second in scores:
            assert first.logprob == pytest.approx(second.logprob, abs=TOLERANCE)
