"""Adapters: vLLM's load and unload routes, and the same as a resource."""

from pathlib import Path

from fastapi import Request
from starlette.responses import JSONResponse, Response

from lorakeet.server.api.schemas import LoadRequest, UnloadRequest, read_body
from lorakeet.server.engine.messages import AdapterState
from lorakeet.server.errors import NotFoundError
from lorakeet.server.registry import Version
from lorakeet.server.state import Server, server_of


async def load_lora_adapter(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, LoadRequest)
    version = await server.registry.load(
        body.lora_name,
        body.lora_path,
        load_inplace=bool(body.load_inplace),
        pinned=bool(body.pinned),
    )
    return JSONResponse(_loaded(version, _states(server)))


async def unload_lora_adapter(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, UnloadRequest)
    return await _unload(server, body.lora_name)


async def list_adapters(request: Request) -> Response:
    server = server_of(request)
    versions, on_disk = await server.registry.listing()
    states = _states(server)
    loaded = [_loaded(version, states) for version in versions]
    data = loaded + [_on_disk(server, name, folder) for name, folder in on_disk.items()]
    return JSONResponse({"object": "list", "data": data})


async def create_adapter(request: Request) -> Response:
    return await load_lora_adapter(request)


async def get_adapter(request: Request) -> Response:
    server = server_of(request)
    name = request.path_params["name"]
    version = server.registry.find(name)
    if version is not None:
        return JSONResponse(_loaded(version, _states(server)))
    if not server.registry.knows(name):
        message = f"The adapter {name!r} does not exist"
        raise NotFoundError(message, code="adapter_not_found")
    return JSONResponse(_on_disk(server, name, server.registry.path(name)))


async def delete_adapter(request: Request) -> Response:
    return await _unload(server_of(request), request.path_params["name"])


async def _unload(server: Server, name: str) -> Response:
    await server.registry.unload(name)
    return JSONResponse({"id": name, "object": "adapter", "deleted": True})


def _states(server: Server) -> dict[int, AdapterState]:
    """By adapter id, from the engine's last report."""
    return {state.adapter_id: state for state in server.engine.stats.adapters}


def _loaded(version: Version, states: dict[int, AdapterState]) -> dict[str, object]:
    loaded = version.loaded
    unreported = AdapterState(version.adapter_id, "host", 0, 0)  # newer than the last report
    state = states.get(version.adapter_id, unreported)
    return {
        "id": version.name,
        "object": "adapter",
        "created": version.created,
        "path": str(version.path),
        "state": "loading" if state.tier == "loading" else "ready",
        "tier": "gpu" if state.tier == "gpu" else "host",
        "rank": loaded.rank,
        "modules": loaded.modules,
        "bytes": loaded.num_bytes,
        "digest": loaded.digest,
        "pinned": version.pinned,
        "requests": {"running": state.num_running, "waiting": state.num_waiting},
    }


def _on_disk(server: Server, name: str, folder: Path) -> dict[str, object]:
    return {
        "id": name,
        "object": "adapter",
        "created": None,
        "path": str(folder),
        "state": "loading" if server.registry.is_loading(name) else "unloaded",
        "tier": "disk",
        "rank": None,
        "modules": None,
        "bytes": None,
        "digest": None,
        "pinned": False,
        "requests": {"running": 0, "waiting": 0},
    }
