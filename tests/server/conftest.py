"""A model's folder without weights, and a server with the toy engine, for the tests of the API."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorakeet.server import logs
from support.toy_server import ToyServer, adapter_folder, model_folder, toy_server


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    logs.configure("error")


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyServer]:
    """A server with the adapters "three" and "five", which add 3 and 5 to every token."""
    root = tmp_path_factory.mktemp("adapters")
    adapters = {
        "three": adapter_folder(root / "three", 3),
        "five": adapter_folder(root / "five", 5),
    }
    with toy_server(toy_model, adapters=adapters) as server:
        yield server


@pytest.fixture
def toy(shared: ToyServer) -> Iterator[ToyServer]:
    """The shared server; after each test nothing may be left of it."""
    yield shared
    shared.wait_idle()
