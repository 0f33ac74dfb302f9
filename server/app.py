"""The HTTP application: routes, and the gate in front of them."""

import contextlib
import hmac
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorakeet.server.api import (
    adapters,
    aliases,
    chat,
    completions,
    health,
    models,
    tokenize,
)
from lorakeet.server.api.schemas import (
    AliasRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadRequest,
    TokenizeRequest,
    UnloadRequest,
    Wire,
)
from lorakeet.server.engine.client import EngineDeadError
from lorakeet.server.errors import (
    APIError,
    AuthenticationError,
    InternalError,
    OverloadedError,
    UnavailableError,
    error_body,
)
from lorakeet.server.state import Server

_SCHEMAS = "#/components/schemas/"
_BODIES: tuple[type[Wire], ...] = (
    ChatRequest,
    CompletionRequest,
    LoadRequest,
    UnloadRequest,
    AliasRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
OPEN_PATHS = {"/health", "/metrics"}  # all others need the key, and a server that is ready
CLIENT_GONE = 499  # in the log: the client went before there was an answer
MAX_HELD_BYTES = 256 * 2**20  # of all bodies; what is made of them takes several times as much
SMALL_BODY = 2**20  # bytes
RESERVED_BYTES = 64 * 2**20  # of those, for small bodies only: a few large ones shut out nobody
MAX_LOGGED = 256  # characters of what a client has sent
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

logger = structlog.stdlib.get_logger("lorakeet.request")


def create_app(server: Server) -> ASGIApp:
    """All routes; `/openapi.json` and `/docs` describe them."""
    app = FastAPI(
        title="Lorakeet",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        exception_handlers={
            APIError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            EngineDeadError: _engine_dead,
            Exception: _unexpected_error,
        },
    )
    _add(app, "POST", "/v1/chat/completions", chat.chat_completions, ChatRequest)
    _add(app, "POST", "/v1/completions", completions.completions, CompletionRequest)
    _add(app, "GET", "/v1/models", models.list_models)
    _add(app, "GET", "/v1/models/{model:path}", models.get_model)
    _add(app, "POST", "/v1/load_lora_adapter", adapters.load_lora_adapter, LoadRequest)
    _add(app, "POST", "/v1/unload_lora_adapter", adapters.unload_lora_adapter, UnloadRequest)
    _add(app, "GET", "/v1/adapters", adapters.list_adapters)
    _add(app, "POST", "/v1/adapters", adapters.create_adapter, LoadRequest)
    _add(app, "GET", "/v1/adapters/{name:path}", adapters.get_adapter)
    _add(app, "DELETE", "/v1/adapters/{name:path}", adapters.delete_adapter)
    _add(app, "GET", "/v1/aliases", aliases.list_aliases)
    _add(app, "POST", "/v1/aliases", aliases.put_alias, AliasRequest)
    _add(app, "GET", "/v1/aliases/{alias:path}", aliases.get_alias)
    _add(app, "DELETE", "/v1/aliases/{alias:path}", aliases.delete_alias)
    _add(app, "POST", "/tokenize", tokenize.tokenize, TokenizeRequest)
    _add(app, "POST", "/detokenize", tokenize.detokenize, DetokenizeRequest)
    _add(app, "GET", "/health", health.health)
    _add(app, "GET", "/metrics", health.metrics)
    _, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_SCHEMAS + "{model}"
    )
    app.openapi()["components"] = {"schemas": definitions["$defs"]}
    app.state.server = server
    return Gate(app, server)


def _add(
    app: FastAPI,
    method: str,
    path: str,
    endpoint: Callable[[Request], Awaitable[Response]],
    body: type[Wire] | None = None,
) -> None:
    """Endpoints read their own body (`read_body`): FastAPI routes to them and describes them."""
    extra: dict[str, Any] = {}
    if body is not None:
        schema = {"$ref": _SCHEMAS + body.__name__}
        extra["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        operation_id=endpoint.__name__,
        openapi_extra=extra,
        response_model=None,
    )


class _Bodies:
    """How much memory the bodies of all requests take that have no whole answer yet."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @contextlib.contextmanager
    def counted(self, headers: Headers, receive: Receive) -> Iterator[Receive]:
        """`receive`, which then raises OverloadedError when the bodies take too much."""
        own = 0

        async def receive_counted() -> Message:
            nonlocal own
            message = await receive()
            size = len(message.get("body", b""))
            reserved = RESERVED_BYTES if own + size > SMALL_BODY else 0
            if self._num_bytes + size > MAX_HELD_BYTES - reserved:
                text = "The requests that wait are too large: try again later"
                raise OverloadedError(text, code="bodies_too_large")
            self._num_bytes += size
            own += size
            return message

        kind = headers.get("content-type", "").lower()
        is_upload = kind.startswith("multipart/")  # it goes to the disk
        try:
            yield receive if is_upload else receive_counted
        finally:
            self._num_bytes -= own


class Gate:
    """In front of every route: request id, API key, readiness, the memory that bodies may take, one
    log line a request."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._bodies = _Bodies()
        key = server.settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        headers = Headers(scope=scope)
        begin = time.monotonic()
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        status = CLIENT_GONE
        path = scope["path"][:MAX_LOGGED]

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(scope["path"], headers)
            with self._bodies.counted(headers, receive) as counted:
                await self._app(scope, counted, send_with_id)
        except APIError as error:
            await _response(error)(scope, receive, send_with_id)
        except Exception:  # _unexpected_error has answered
            logger.exception("a request failed", request_id=request_id, path=path)
        finally:
            if scope["path"] not in OPEN_PATHS:
                logger.info(
                    "request",
                    request_id=request_id,
                    method=scope["method"][:MAX_LOGGED],
                    path=path,
                    status=status,
                    seconds=round(time.monotonic() - begin, 4),
                    **scope.get("lorakeet.log", {}),
                )

    def _check(self, path: str, headers: Headers) -> None:
        if path in OPEN_PATHS:
            return
        if self._key is not None:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip().encode("latin-1")  # the bytes as they were sent
            if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._key):
                raise AuthenticationError("Send the API key as: Authorization: Bearer KEY")
        self._server.check_ready()


def _response(error: APIError) -> Response:
    return Response(
        error.body(), error.status, headers=error.headers, media_type="application/json"
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    request.scope.setdefault("lorakeet.log", {}).setdefault("outcome", error.code)
    return _response(error)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    body = error_body(
        error.detail, "invalid_request_error", None, code.get(error.status_code, "bad_request")
    )
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


async def _client_gone(_: Request, __: Exception) -> Response:
    """It went while it sent its request: nobody reads this."""
    return Response(status_code=CLIENT_GONE)


async def _engine_dead(_: Request, __: Exception) -> Response:
    return _response(UnavailableError("The engine has died", code="dead"))


async def _unexpected_error(_: Request, __: Exception) -> Response:
    return _response(InternalError())
