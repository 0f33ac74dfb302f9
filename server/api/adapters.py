"""Adapters: vLLM's load and unload routes, the same as a resource, and uploads."""

import orjson
from fastapi import Request
from starlette.responses import JSONResponse, Response

from lorakeet.server.api.schemas import LoadRequest, UnloadRequest, read_body
from lorakeet.server.catalog import Unloaded
from lorakeet.server.engine.messages import AdapterState
from lorakeet.server.errors import APIError, BadRequestError, NotFoundError
from lorakeet.server.registry import Loaded
from lorakeet.server.state import Server, is_work, server_of
from lorakeet.server.uploads import Upload
from lorakeet.server.versions import Version

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@is_work
async def load_lora_adapter(request: Request) -> Response:
    return await _load(request)


@is_work
async def unload_lora_adapter(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, UnloadRequest)
    return await _unload(server, body.lora_name)


async def _load(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, LoadRequest)
    loaded = await server.registry.load(
        body.lora_name,
        body.lora_path,
        load_inplace=bool(body.load_inplace),
        pinned=bool(body.pinned),
    )
    return _answer(server, loaded)


async def list_adapters(request: Request) -> Response:
    server = server_of(request)
    versions, unloaded = await server.registry.listing()
    states = _states(server)
    data = [_loaded(server, version, states) for version in versions]
    data += [_unloaded(server, name, found) for name, found in unloaded.items()]
    body = orjson.dumps({"object": "list", "data": data})
    return Response(body, media_type="application/json")


@is_work
async def create_adapter(request: Request) -> Response:
    """A folder of the server's by its path (JSON), or files that come with the request."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "multipart/form-data":
        return await _load(request)
    server = server_of(request)
    upload = await server.uploads.receive(request)
    return _answer(server, await _load_upload(server, upload))


async def get_adapter(request: Request) -> Response:
    server = server_of(request)
    name = request.path_params["name"]
    version = server.registry.find(name)
    if version is not None:
        return JSONResponse(_loaded(server, version, _states(server)))
    found = await server.registry.unloaded(name)
    if found is None:
        message = f"The adapter {name!r} does not exist"
        raise NotFoundError(message, code="adapter_not_found")
    return JSONResponse(_unloaded(server, name, found))


@is_work
async def delete_adapter(request: Request) -> Response:
    return await _unload(server_of(request), request.path_params["name"])


async def _load_upload(server: Server, upload: Upload) -> Loaded:
    fields = upload.fields
    sent = "name" if "name" in fields else "lora_name"
    try:
        name = fields.get(sent)
        if name is None:
            raise BadRequestError("Missing field: name", param="name", code="missing_field")
        return await server.registry.load_folder(
            name, upload.folder, _flag(fields, "load_inplace"), _flag(fields, "pinned")
        )
    except BaseException as error:
        server.registry.discard(upload.folder)
        if isinstance(error, APIError):  # what the registry names are the fields of JSON
            error.param = {"lora_name": sent, "lora_path": None}.get(error.param or "", error.param)
        raise


def _flag(fields: dict[str, str], name: str) -> bool:
    value = fields.get(name, "false").lower()
    if value not in _BOOLEANS:
        raise BadRequestError(f"{name} must be true or false", param=name, code="invalid_value")
    return _BOOLEANS[value]


async def _unload(server: Server, name: str) -> Response:
    freed = await server.registry.unload(name)
    return JSONResponse({"id": name, "object": "adapter", "deleted": True, **freed.wire()})


def _answer(server: Server, loaded: Loaded) -> Response:
    card = _loaded(server, loaded.version, _states(server))
    return JSONResponse({**card, "changed": loaded.changed, **loaded.freed.wire()})


def _states(server: Server) -> dict[int, AdapterState]:
    """By adapter id, from the engine's last report."""
    return {state.adapter_id: state for state in server.engine.stats.adapters}


def _loaded(server: Server, version: Version, states: dict[int, AdapterState]) -> dict[str, object]:
    loaded = version.loaded
    unreported = AdapterState(version.adapter_id, "host", 0, 0)  # newer than the last report
    state = states.get(version.adapter_id, unreported)
    row_bytes = server.engine.info.lora_row_bytes
    on_disk = "unloaded" if state.error is None else "failed"
    return {
        "id": version.name,
        "object": "adapter",
        "created": version.created,
        "path": str(version.path),
        "state": {"disk": on_disk, "loading": "loading"}.get(state.tier, "ready"),
        "tier": "host" if state.tier == "loading" else state.tier,
        "error": state.error,
        "rank": loaded.rank,
        "modules": loaded.modules,
        "bytes": loaded.num_bytes,
        "host_bytes": loaded.num_bytes if state.in_host else 0,
        "gpu_bytes": state.num_rows * row_bytes + state.vocabulary_bytes,
        "digest": loaded.digest,
        "pinned": version.pinned,
        "requests": {"running": state.num_running, "waiting": state.num_waiting},
    }


def _unloaded(server: Server, name: str, found: Unloaded) -> dict[str, object]:
    error = server.registry.catalog.errors.get(name)
    state = "unloaded" if error is None else "failed"
    return {
        "id": name,
        "object": "adapter",
        "created": None,
        "path": str(found.path),
        "state": "loading" if server.registry.is_loading(name) else state,
        "tier": "disk",
        "error": error,
        "rank": None,
        "modules": None,
        "bytes": None,
        "host_bytes": 0,
        "gpu_bytes": 0,
        "digest": found.digest,
        "pinned": found.pinned,
        "requests": {"running": 0, "waiting": 0},
    }
