"""`GET /health` and `GET /metrics`."""

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from lorakeet.server.state import server_of


async def health(request: Request) -> Response:
    server_of(request).check_ready()
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    return Response(
        server_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST}
    )
