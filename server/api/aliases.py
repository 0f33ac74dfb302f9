"""`/v1/aliases`: stable names for adapters, and canary splits."""

from fastapi import Request
from starlette.responses import JSONResponse, Response

from lorakeet.server.aliases import Target
from lorakeet.server.api.schemas import AliasRequest, read_body
from lorakeet.server.errors import BadRequestError, ConflictError, NotFoundError
from lorakeet.server.registry import Registry
from lorakeet.server.state import Server, server_of


async def list_aliases(request: Request) -> Response:
    server = server_of(request)
    data = [_card(server, alias) for alias in server.registry.aliases.all()]
    return JSONResponse({"object": "list", "data": data})


async def put_alias(request: Request) -> Response:
    """Make an alias, or point it elsewhere: requests see all of the change, or nothing."""
    server = server_of(request)
    registry = server.registry
    body = await read_body(request, AliasRequest)
    targets = [Target(target.adapter, target.weight) for target in body.targets]
    names = [target.adapter for target in targets]
    registry.catalog.check_name(body.alias, "alias")
    if len(set(names)) < len(names):
        raise BadRequestError("A target is named twice", param="targets", code="invalid_value")
    async with registry.hold([body.alias, *names]):
        if body.alias not in registry.aliases and await registry.knows(body.alias):
            message = f"There is an adapter {body.alias!r}"
            raise ConflictError(message, param="alias", code="name_taken")
        for name in names:
            await _check_target(registry, name)
        registry.aliases.put(body.alias, targets)
        card = _card(server, body.alias)
    await registry.save()
    return JSONResponse(card)


async def get_alias(request: Request) -> Response:
    server = server_of(request)
    return JSONResponse(_card(server, _existing(server, request)))


async def delete_alias(request: Request) -> Response:
    server = server_of(request)
    alias = _existing(server, request)
    server.registry.aliases.remove(alias)
    await server.registry.save()
    return JSONResponse({"id": alias, "object": "alias", "deleted": True})


async def _check_target(registry: Registry, name: str) -> None:
    if name in registry.aliases:
        message = f"The target {name!r} is an alias itself"
        raise BadRequestError(message, param="targets", code="alias_of_alias")
    if name != registry.base_name and not await registry.knows(name):
        message = f"The target {name!r} does not exist"
        raise NotFoundError(message, param="targets", code="adapter_not_found")


def _existing(server: Server, request: Request) -> str:
    alias: str = request.path_params["alias"]
    if alias not in server.registry.aliases:
        raise NotFoundError(f"The alias {alias!r} does not exist", code="alias_not_found")
    return alias


def _card(server: Server, alias: str) -> dict[str, object]:
    targets = server.registry.aliases[alias]
    return {
        "id": alias,
        "object": "alias",
        "alias": alias,
        "targets": [{"adapter": target.adapter, "weight": target.weight} for target in targets],
    }
