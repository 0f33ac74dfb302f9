"""The offline API, against PEFT."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorakeet.configs.settings import SettingsError
from lorakeet.server.engine.client import Engine, EngineDeadError
from lorakeet.server.llm import LLM, SamplingParams
from support.adapters import make_adapter, peft_greedy, peft_logprobs
from support.copies import CopyThreads, copy_threads_alive
from support.engines import overflowing_adapter
from support.models import tiny_model, tiny_tokenizer
from support.servers import wait_until

SMALL: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "block_size": 4, "max_loras": 2}
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    names = ("red", "green", "blue")
    return {n: make_adapter(model.parent / n, model, seed=i) for i, n in enumerate(names)}


@pytest.fixture(scope="module")
def llm(model: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(model, adapters=adapters, **SMALL) as made:
        yield made


def test_texts_and_tokens_each_with_its_adapter(
    llm: LLM, model: Path, adapters: dict[str, Path]
) -> None:
    tokenizer = tiny_tokenizer()
    prompts: list[str | list[int]] = [
        "the quick brown",
        [5, 6, 7],
        "fox jumps",
        "the lazy dog",
        [9],
        "x",
    ]
    names = ["red", "green", None, "blue", "red", None]
    results = llm.generate(prompts * 2, GREEDY, adapter=names * 2)
    for prompt, name, result in zip(prompts * 2, names * 2, results, strict=True):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        path = adapters[name] if name else None
        assert result.prompt_token_ids == ids
        (choice,) = result.outputs
        assert choice.token_ids == peft_greedy(model, path, ids, 5)
        shown = tokenizer.decode(ids + choice.token_ids, skip_special_tokens=True)
        assert shown.endswith(choice.text)
        assert (choice.finish_reason, choice.logprobs) == ("length", None)


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    (text,) = llm.generate("the quick", GREEDY, adapter="red")
    (tokens,) = llm.generate(text.prompt_token_ids, GREEDY, adapter="red")
    assert text == tokens
    assert llm.generate([], GREEDY) == []


def test_chat_uses_the_template(llm: LLM, model: Path) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    ids = tiny_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    (single,) = llm.chat(messages, GREEDY)
    assert single.prompt_token_ids == ids
    assert single.outputs[0].token_ids == peft_greedy(model, None, ids, 5)
    assert llm.chat([messages, messages], GREEDY) == [single, single]


def test_parameters_of_each_prompt(llm: LLM, model: Path) -> None:
    several = SamplingParams(max_tokens=6, n=3, seed=1, ignore_eos=True)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
    scored = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, ignore_eos=True)
    first, second, third = llm.generate([[5, 6, 7]] * 3, [several, scoring, scored])
    assert len({tuple(choice.token_ids) for choice in first.outputs}) > 1
    assert first == llm.generate([5, 6, 7], several)[0]
    assert second.outputs[0].token_ids == []
    expected = peft_logprobs(model, None, [5, 6, 7, *third.outputs[0].token_ids])
    assert second.prompt_logprobs is not None
    assert second.prompt_logprobs[0] is None
    for position, score in enumerate(second.prompt_logprobs[1:]):
        assert score is not None
        value = float(expected[position, score.token_id])
        assert score.logprob == pytest.approx(value, abs=1e-3)
    assert third.outputs[0].logprobs is not None
    for position, score in enumerate(third.outputs[0].logprobs, 2):
        assert score.logprob == pytest.approx(float(expected[position].max()), abs=1e-3)


def test_stop_strings_and_eos_end_a_text(llm: LLM, model: Path) -> None:
    long = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    whole = llm.generate("the", long)[0].outputs[0].text
    stop = whole[3:5]
    (result,) = llm.generate("the", SamplingParams(max_tokens=40, temperature=0.0, stop=(stop,)))
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].text == whole[: whole.find(stop)]
    to_eos = SamplingParams(max_tokens=3, temperature=0.0, logit_bias={1: 100.0})
    (result,) = llm.generate("the", to_eos)
    assert (result.outputs[0].text, result.outputs[0].token_ids) == ("", [1])
    assert result.outputs[0].finish_reason == "stop"


def steps_so_far(llm: LLM) -> int:
    """The second report from now: the first may have been made before."""
    for _ in range(2):
        wait_for_report(llm._server.engine)
    return llm._server.engine.stats.num_steps


def wait_for_report(engine: Engine) -> None:
    last = engine.stats
    wait_until(lambda: engine.stats is not last, "a report of the engine")


@pytest.mark.parametrize(
    ("prompt", "params", "adapter", "message"),
    [
        ("x", SamplingParams(), "purple", "purple"),
        ("x", SamplingParams(temperature=-1.0), None, "temperature"),
        ("x", SamplingParams(top_p=float("nan")), None, "top_p"),
        ([5, 320], SamplingParams(), None, "320 is no token"),
        ([], SamplingParams(), None, "no tokens"),
        ([5] * 600, SamplingParams(), None, "600 tokens"),
        ([5] * 500, SamplingParams(max_tokens=50), None, "max_tokens is 50"),
    ],
)
def test_what_is_not_possible_raises_before_anything_runs(
    llm: LLM, prompt: str | list[int], params: SamplingParams, adapter: str | None, message: str
) -> None:
    steps = steps_so_far(llm)
    with pytest.raises(ValueError, match=message):
        llm.generate(["good", prompt], [GREEDY, params], [None, adapter])
    assert steps_so_far(llm) == steps


def test_numbers_must_agree(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts, 3 params and 2 adapters"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_a_fault_of_one_sequence_is_told_in_its_choice(model: Path, tmp_path: Path) -> None:
    broken = overflowing_adapter(tmp_path / "broken", model)
    with LLM(model, {"broken": broken}, **SMALL) as llm:
        bad, good = llm.generate([[5, 6], [5, 6]], GREEDY, ["broken", None])
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in str(bad.outputs[0].error)
    assert good.outputs[0].token_ids == peft_greedy(model, None, [5, 6], 5)


def own_threads() -> set[threading.Thread]:
    """All but tqdm's, which looks after the bars of the whole process."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


def test_errors_at_the_start(model: Path, tmp_path: Path) -> None:
    before = own_threads()
    gc.disable()  # it ends a thread whose owner forgot to, some time
    try:
        with pytest.raises(SettingsError, match="no_such"):
            LLM(model, no_such=1)
        with pytest.raises(EngineDeadError, match="max_model_len"):
            LLM(model, max_model_len=10**6, **SMALL)
        with pytest.raises(ValueError, match="no adapter folder"):
            LLM(model, adapters={"a": tmp_path / "nowhere"}, **SMALL)
        wait_until(lambda: own_threads() <= before, "its threads have ended")
    finally:
        gc.enable()


def test_a_closed_llm_leaves_no_thread(
    model: Path, tmp_path: Path, copy_threads: CopyThreads
) -> None:
    before = own_threads()
    with LLM(model, {"red": make_adapter(tmp_path / "red", model, seed=1)}, **SMALL) as llm:
        llm.generate("the quick", GREEDY, adapter="red")
        assert len(copy_threads_alive()) == 1
    assert copy_threads_alive() == []
    wait_until(lambda: own_threads() <= before, "its threads have ended")


def test_a_closed_llm_says_so(model: Path) -> None:
    llm = LLM(model, **SMALL)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


def test_a_script_that_does_not_close_ends_cleanly(model: Path) -> None:
    script = (
        "import sys; from lorakeet.server.llm import LLM\n"
        "llm = LLM(sys.argv[1], device='cpu')\n"
        "print(len(llm.generate(['a', 'b'])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(model)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert "Traceback" not in done.stderr
