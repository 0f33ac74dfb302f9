"""Settings: files, overrides, and errors that name the key."""

import math
from pathlib import Path
from typing import Any

import pytest

from lorakeet.configs import settings
from lorakeet.configs.settings import SettingsError

CONFIGS = Path(settings.__file__).parent


def test_overrides_win_over_the_file_and_none_does_not(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("max_loras: 3\nport: 9000\nlora_memory: 512MiB\n")
    loaded = settings.load(file, max_loras=5, port=None)
    assert (loaded.max_loras, loaded.port, loaded.lora_memory) == (5, 9000, 512 * 2**20)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1k", 1024), ("8GiB", 2**33), ("1.5g", 3 * 2**29), ("77", 77), ("2 MB", 2**21)],
)
def test_sizes(text: str, size: int) -> None:
    assert settings.load(lora_memory=text).lora_memory == size


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_loras", 0),
        ("max_loras", "many"),
        ("lora_memory", "1 parrot"),
        ("lora_memory", -1),
        ("gpu_memory_utilization", 1.5),
        ("dtype", "int8"),
        ("port", 70000),
        ("no_such_setting", 1),
        ("api_key", ""),
        ("host", ""),
        ("request_timeout", math.inf),
        ("lora_memory", "9" * 400 + "T"),
    ],
)
def test_a_bad_setting_is_named(key: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=key):
        settings.load(**{key: value})


def test_what_an_unknown_setting_may_have_meant() -> None:
    with pytest.raises(SettingsError, match=r"^adapter_dir: .*\(did you mean adapter_dirs\?\)$"):
        settings.load(adapter_dir="x")


@pytest.mark.parametrize(
    "content",
    ["[1, 2]", "a: [", ": :", "1: 2", "port: 2024-13-45", "port: " + "9" * 5000, "[" * 5000],
    ids=range(7),
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"s\.yaml"):
        settings.load(file)
    with pytest.raises(SettingsError, match="absent"):
        settings.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_the_files_that_come_along_load(file: Path) -> None:
    assert settings.load(file).max_loras >= 1


def test_the_api_key_is_not_shown() -> None:
    assert "hush" not in repr(settings.load(api_key="hush"))


def test_uploads_need_a_folder_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "root"
    settings.load(adapter_dirs=(root,), adapter_upload_dir=tmp_path / "uploads")
    for inside in (tmp_path / "x" / ".." / "root", root / "uploads"):
        with pytest.raises(SettingsError, match=r"adapter_upload_dir: .*outside"):
            settings.load(adapter_dirs=(root,), adapter_upload_dir=inside)
