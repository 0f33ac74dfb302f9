"""What users install: the wheel, the sdist, the editable install, the image's build context."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "kernels", "lora", "models", "server")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMES_WITH = {"pydantic_core": "pydantic"}  # versions pinned to each other
ON_GPUS_ONLY = {"triton"}  # torch for CUDA brings the version it was built with
SCRIPTS = {"configs/demo-adapters/data.py", "configs/demo-adapters/train.py"}  # not installed


def packaged_files() -> set[str]:
    """What the package must hold, by looking at the folders."""
    wanted = [
        *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")),
        *ROOT.glob("configs/*.yaml"),
        *(file for file in ROOT.glob("configs/demo-adapters/*/*") if file.is_file()),
    ]
    names = {
        file.relative_to(ROOT).as_posix() for file in wanted if "__pycache__" not in file.parts
    }
    return names - SCRIPTS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in: builds leave files behind."""
    target = tmp_path_factory.mktemp("source")
    for folder in (*FOLDERS, ".package"):
        shutil.copytree(
            ROOT / folder,
            target / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / "README.md").write_text("# Lorakeet\n")
    return target


def run_hook(source: Path, hook: str, target: Path) -> tuple[Path, str]:
    """Call one hook of the build backend, as pip does; what it built and what it printed."""
    backend = PROJECT["build-system"]["build-backend"]
    code = f"import {backend} as backend, sys; print('=', backend.{hook}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        cwd=source,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return target / done.stdout.rpartition("= ")[2].strip(), done.stdout


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_hook(source, "build_wheel", tmp_path_factory.mktemp("wheel"))[0]


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert contents(wheel) == {f"lorakeet/{name}" for name in packaged_files()}


def test_wheel_of_the_sdist_is_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist, _ = run_hook(source, "build_sdist", tmp_path)
    shutil.unpack_archive(sdist, tmp_path)
    again, _ = run_hook(tmp_path / sdist.name.removesuffix(".tar.gz"), "build_wheel", tmp_path)
    assert contents(again) == contents(wheel)


def test_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import lorakeet.server.llm as llm, lorakeet.server.demo as demo\n"
        "from lorakeet.server import cli\n"
        "print(llm.__file__, *demo.demo_adapters().values(), sep='\\n', flush=True)\n"
        "cli.app(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,  # before the editable install on the path of the interpreter
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    module, *adapters = done.stdout.split()[:4]
    assert Path(module) == tmp_path / "lorakeet/server/llm.py"
    assert {Path(path).name for path in adapters} == {"headline", "json", "pirate"}
    assert all(Path(path).is_relative_to(tmp_path) for path in adapters)
    assert "adapters" in done.stdout


def test_wheel_brings_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "lorakeet = lorakeet.server.cli:main" in archive.read(entry_points).decode()


def test_editable_install_is_one_path_and_no_warning(source: Path, tmp_path: Path) -> None:
    wheel, printed = run_hook(source, "build_editable", tmp_path)
    (path_file,) = contents(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(path_file).decode().split() == [str(source / ".package")]
    assert "!!" not in printed


def test_our_folders_hide_no_package_of_others() -> None:
    """In the checkout `import kernels` finds our folder: transformers must not take it for its."""
    code = (
        "from transformers import LlamaForCausalLM\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "assert not is_kernels_available()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_dependencies_are_what_is_imported() -> None:
    imported: set[str] = set()
    for name in packaged_files():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported.add((node.module or "").split(".")[0])
    imported -= {"lorakeet", *sys.stdlib_module_names, *ON_GPUS_ONLY}
    distributions = importlib.metadata.packages_distributions()
    needed = {distributions[COMES_WITH.get(name, name)][0] for name in imported}
    assert {canonical(name) for name in needed} == {
        canonical(re.match(r"[\w.-]+", line)[0])  # type: ignore[index]
        for line in PROJECT["project"]["dependencies"]
    }


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_image_gets_all_that_is_packaged() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    assert kept == {*FOLDERS, ".package", "pyproject.toml", "README.md", "LICENSE"}
