"""The command line: what reaches the settings, and what is refused before anything starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorakeet.configs.settings import Settings
from lorakeet.server import serve
from lorakeet.server.cli import app
from support.adapters import edit_config, make_adapter
from support.models import tiny_model

_OPTIONS = {"adapters": "--adapter", "adapter_dirs": "--adapter-dir", "model": "[model]"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that servers were started with; none is."""
    started: list[Settings] = []
    monkeypatch.setattr(serve, "run", started.append)
    monkeypatch.delenv("LORAKEET_API_KEY", raising=False)
    return started


def call(*arguments: str) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_every_setting_has_an_option() -> None:
    code, text = call("serve", "--help")
    assert code == 0
    for name in Settings.model_fields:
        assert _OPTIONS.get(name, "--" + name.replace("_", "-")) in text


def test_options_win_over_the_file(served: list[Settings], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: here\nport: 1\nmax_loras: 3\nadapters: {a: /a}\n")
    options = "--port 2 --adapter b=/b --adapter c=/c --adapter-dir /d --lora-memory 1MiB"
    assert call("serve", "--config", str(file), *options.split()) == (0, "")
    (settings,) = served
    assert (settings.model, settings.port, settings.max_loras) == ("here", 2, 3)
    assert settings.adapters == {"b": Path("/b"), "c": Path("/c")}
    assert settings.adapter_dirs == (Path("/d"),)
    assert settings.lora_memory == 2**20


def test_without_a_model_the_demo(served: list[Settings]) -> None:
    assert call("serve") == (0, "")
    assert served[0].model is None
    assert served[0].served_model_name == "smollm2-135m-instruct"


def test_the_key_from_the_environment(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAKEET_API_KEY", "secret")
    call("serve", "m")
    call("serve", "m", "--api-key", "other")
    assert [settings.api_key for settings in served] == ["secret", "other"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("m --adapter x", "--adapter"),
        ("m --adapter =/x", "--adapter"),
        ("m --adapter x=/x --adapter x=/y", "given twice"),
        ("m --port 70000", "port"),
        ("m --dtype int8", "dtype"),
        ("m --lora-memory much", "lora_memory"),
        ("m --config /nowhere.yaml", "/nowhere.yaml"),
        ("m --bogus", "--bogus"),
    ],
)
def test_refused_by_name(served: list[Settings], options: str, named: str) -> None:
    code, text = call("serve", *options.split())
    assert code == 2
    assert named in text
    assert not served


def test_adapters_check(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", num_hidden_layers=1)
    adapter = make_adapter(tmp_path / "adapter", model)
    check = ("adapters", "check", str(adapter), "--model", str(model))
    code, text = call(*check)
    assert code == 0
    assert "rank         8" in text
    code, text = call(*check, "--max-lora-rank", "4")
    assert code == 1
    assert "its largest rank is 8, the limit is 4" in text
    edit_config(adapter, use_dora=True)
    code, text = call(*check)
    assert code == 1
    assert "use_dora, but the file has no magnitude" in text
    code, text = call("adapters", "check", str(adapter), "--model", str(tmp_path / "none"))
    assert code == 2
    assert "There is no file or folder" in text


def test_adapters_check_without_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache that cannot be made is one line that names it, not a traceback."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("LORAKEET_CACHE", str(file / "cache"))
    code, text = call("adapters", "check", str(tmp_path))
    assert code == 2
    assert text.startswith("lorakeet: ")
    assert str(file) in text
    assert len(text.splitlines()) == 1
