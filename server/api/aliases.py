"""`/v1/aliases`: stable names for adapters, and canary splits."""

from collections.abc import Sequence

from fastapi import Request
from starlette.responses import JSONResponse, Response

from lorakeet.server.aliases import Target
from lorakeet.server.api.schemas import AliasRequest, read_body
from lorakeet.server.state import is_work, server_of


async def list_aliases(request: Request) -> Response:
    aliases = server_of(request).registry.aliases.all()
    data = [_card(alias, targets) for alias, targets in aliases.items()]
    return JSONResponse({"object": "list", "data": data})


@is_work
async def put_alias(request: Request) -> Response:
    body = await read_body(request, AliasRequest)
    targets = [Target(target.adapter, target.weight) for target in body.targets]
    await server_of(request).registry.put_alias(body.alias, targets)
    return JSONResponse(_card(body.alias, targets))


async def get_alias(request: Request) -> Response:
    alias = request.path_params["alias"]
    return JSONResponse(_card(alias, server_of(request).registry.aliases.get(alias)))


@is_work
async def delete_alias(request: Request) -> Response:
    alias = request.path_params["alias"]
    await server_of(request).registry.remove_alias(alias)
    return JSONResponse({"id": alias, "object": "alias", "deleted": True})


def _card(alias: str, targets: Sequence[Target]) -> dict[str, object]:
    return {
        "id": alias,
        "object": "alias",
        "alias": alias,
        "targets": [{"adapter": target.adapter, "weight": target.weight} for target in targets],
    }
