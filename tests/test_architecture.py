"""The folders and what each may import, and that the package lists are complete."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "configs": set(),
    "kernels": set(),
    "models": {"kernels", "configs"},
    "lora": {"models", "kernels", "configs"},
    "server": {"lora", "models", "kernels", "configs"},
}
THIRD_PARTY_OF_KERNELS = {"torch", "triton", "numpy"}


def modules(folder: str) -> list[Path]:
    return [file for file in (ROOT / folder).rglob("*.py") if "demo-adapters" not in file.parts]


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_lies_below_them(folder: str) -> None:
    files = modules(folder)
    assert files
    for file in files:
        for name in imported(file):
            if name.startswith("lorakeet."):
                other = name.split(".")[1]
                assert other == folder or other in MAY_IMPORT[folder], f"{file} imports {name}"


def test_kernels_need_torch_and_triton_only() -> None:
    import sys

    for file in modules("kernels"):
        roots = {name.split(".")[0] for name in imported(file)} - set(sys.stdlib_module_names)
        assert roots <= THIRD_PARTY_OF_KERNELS | {"lorakeet"}, f"{file} imports {roots}"


@pytest.mark.parametrize(
    "file", ["server/engine/blocks.py", "server/engine/scheduler.py", "lora/slots.py"]
)
def test_bookkeeping_never_imports_torch(file: str) -> None:
    assert not {name for name in imported(ROOT / file) if name.split(".")[0] == "torch"}


def test_every_folder_with_code_is_packaged() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {file.parent for folder in MAY_IMPORT for file in modules(folder)}
    found = {"lorakeet." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(listed) == found | {"lorakeet"}


def test_no_folder_is_a_regular_package() -> None:
    assert not [
        file for folder in MAY_IMPORT for file in modules(folder) if file.stem == "__init__"
    ]


def test_files_stay_readable() -> None:
    for folder in MAY_IMPORT:
        for file in modules(folder):
            assert len(file.read_text().splitlines()) <= 400, f"{file} is too long"


def test_the_map_names_every_file() -> None:
    """Each by itself or by its folder, `folder/` or `folder/*`; and no file that is gone."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:configs|kernels|lora|models|server)/[\w./*]*)`", text))
    found = {file.relative_to(ROOT).as_posix() for folder in MAY_IMPORT for file in modules(folder)}
    folders = {name.rstrip("*") for name in named if name.endswith(("/", "/*"))}
    missing = [name for name in found - named if not name.startswith(tuple(folders))]
    assert not missing
    gone = [name for name in named if name.endswith(".py") and name not in found]
    assert not gone
