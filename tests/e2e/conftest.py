"""One real server for the tests of a module, and adapters that it may load."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lorakeet.lora.pool import bytes_per_row
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from support.adapters import make_adapter
from support.models import tiny_model
from support.servers import ServerProcess, serve

NAMES = ("red", "green", "blue", "grey")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context is so long that an answer that fills it takes half a minute."""
    folder = tmp_path_factory.mktemp("e2e") / "model"
    return tiny_model(folder, max_position_embeddings=8192)


@pytest.fixture(scope="session")
def root(model: Path) -> Path:
    """What the servers may load adapters from."""
    return model.parent / "adapters"


@pytest.fixture(scope="session")
def adapters(model: Path, root: Path) -> dict[str, Path]:
    """Four of rank 8; they lie too deep to be served under their folders' names."""
    return {
        name: make_adapter(root / "store" / name, model, seed=seed)
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def shared(model: Path, root: Path, adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    """Room for 4 requests that run and 20 that wait, 2 adapters at a time and in the pool."""
    row_bytes = bytes_per_row(group_specs(load_config(model)), torch.float32)
    options = (
        "--device cpu --served-model-name base --max-num-seqs 4 --max-queue 20 --max-loras 2"
        f" --max-lora-rank 8 --lora-memory {20 * row_bytes} --adapter-dir {root}"
    )
    with serve(model.parent, model, *options.split()) as server:
        yield server


@pytest.fixture
def live(shared: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server. Whatever a test does, afterwards nothing of it may be held."""
    before = shared.processes()
    yield shared
    for adapter in shared.loaded():
        assert shared.unload(adapter).status_code == 200
    shared.wait_idle()
    shared.wait_unloaded()
    assert shared.processes() == before
