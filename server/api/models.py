"""`GET /v1/models`: the base model first, then every adapter, then every alias."""

import orjson
from fastapi import Request
from starlette.responses import JSONResponse, Response

from lorakeet.server.errors import ModelNotFoundError
from lorakeet.server.state import Server, server_of


async def list_models(request: Request) -> Response:
    server = server_of(request)
    versions, unloaded = await server.registry.listing()
    folders = {version.name: version.path for version in versions}
    folders |= {name: found.path for name, found in unloaded.items()}
    cards = [_base_card(server, server.base_name)]
    cards += [_adapter_card(server, name, str(folder)) for name, folder in folders.items()]
    cards += [_adapter_card(server, alias, alias) for alias in server.registry.aliases.all()]
    body = orjson.dumps({"object": "list", "data": cards})
    return Response(body, media_type="application/json")


async def get_model(request: Request) -> Response:
    server = server_of(request)
    asked = request.path_params["model"]
    name = asked.removeprefix(server.base_name + ":")
    for known in dict.fromkeys((asked, name)):
        if known == server.base_name:
            return JSONResponse(_base_card(server, asked))
        if known in server.registry.aliases:
            return JSONResponse(_adapter_card(server, asked, known))
        if (version := server.registry.find(known)) is not None:
            return JSONResponse(_adapter_card(server, asked, str(version.path)))
        if (found := await server.registry.unloaded(known)) is not None:
            return JSONResponse(_adapter_card(server, asked, str(found.path)))
    raise ModelNotFoundError(asked)


def _base_card(server: Server, name: str) -> dict[str, object]:
    return _card(server, name, server.settings.model or server.base_name, None)


def _adapter_card(server: Server, name: str, root: str) -> dict[str, object]:
    return _card(server, name, root, server.base_name)


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
