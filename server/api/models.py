"""`GET /v1/models`: the base model first, then every adapter."""

from pathlib import Path

from fastapi import Request
from starlette.responses import JSONResponse, Response

from lorakeet.server.state import Server, server_of


async def list_models(request: Request) -> Response:
    server = server_of(request)
    versions, on_disk = await server.registry.listing()
    folders = {version.name: version.path for version in versions} | on_disk
    cards = [_base_card(server, server.base_name)]
    cards += [_adapter_card(server, name, folder) for name, folder in folders.items()]
    return JSONResponse({"object": "list", "data": cards})


async def get_model(request: Request) -> Response:
    server = server_of(request)
    asked = request.path_params["model"]
    adapter = server.registry.resolve(asked)
    if adapter is None:
        return JSONResponse(_base_card(server, asked))
    return JSONResponse(_adapter_card(server, asked, server.registry.path(adapter)))


def _base_card(server: Server, name: str) -> dict[str, object]:
    return _card(server, name, server.settings.model or server.base_name, None)


def _adapter_card(server: Server, name: str, folder: Path) -> dict[str, object]:
    return _card(server, name, str(folder), server.base_name)


def _card(server: Server, name: str, root: str, parent: str | None) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "lorakeet",
        "root": root,
        "parent": parent,
        "max_model_len": server.engine.info.max_model_len,
    }
