"""The HTTP error tree: each error knows its status and writes itself as OpenAI does.

APIError
  ├ BadRequestError            400
  ├ AuthenticationError        401
  ├ ForbiddenError             403
  ├ NotFoundError              404
  │   └ ModelNotFoundError
  ├ ConflictError              409
  ├ BodyTooLargeError          413
  ├ OverloadedError            429
  ├ InternalError              500
  │   └ GenerationError
  ├ UnavailableError           503
  ├ RequestTimeoutError        504
  └ InsufficientStorageError   507
"""

from http import HTTPStatus
from typing import ClassVar

import orjson

MAX_CHARS = 1000  # of a message or a name: what a client has sent does not come back whole


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """The body of every error: `{"error": {"message", "type", "param", "code"}}`."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


class APIError(Exception):
    """Ends a request with an error that the client may read."""

    status: ClassVar[int] = HTTPStatus.INTERNAL_SERVER_ERROR
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.message = _shortened(message)
        super().__init__(self.message)
        self.param = None if param is None else _shortened(param)
        self.code = code or self.default_code

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.param, self.code)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "…"


class BadRequestError(APIError):
    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"


class AuthenticationError(APIError):
    status = HTTPStatus.UNAUTHORIZED
    type = "authentication_error"
    default_code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class ForbiddenError(APIError):
    status = HTTPStatus.FORBIDDEN
    type = "permission_error"


class NotFoundError(APIError):
    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFoundError(NotFoundError):
    default_code = "model_not_found"

    def __init__(self, name: str, *, param: str = "model") -> None:
        message = f"The model {name[:256]!r} does not exist"
        if param != "model":
            message = f"There is no adapter {name[:256]!r}: {param} takes adapters and aliases only"
        super().__init__(message, param=param)


class ConflictError(APIError):
    status = HTTPStatus.CONFLICT
    type = "invalid_request_error"


class BodyTooLargeError(APIError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    type = "invalid_request_error"
    default_code = "body_too_large"


class OverloadedError(APIError):
    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "rate_limit_error"
    default_code = "queue_full"

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": "1"}


class InternalError(APIError):
    default_code = "internal_error"

    def __init__(self, message: str = "Internal server error") -> None:
        super().__init__(message)


class GenerationError(InternalError):
    """The engine ended one sequence with an error."""

    default_code = "generation_failed"


class UnavailableError(APIError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": "5"}


class RequestTimeoutError(APIError):
    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "timeout_error"
    default_code = "request_timeout"


class InsufficientStorageError(APIError):
    status = HTTPStatus.INSUFFICIENT_STORAGE
    default_code = "insufficient_storage"
