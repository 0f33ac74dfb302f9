"""uvicorn's HTTP protocol, with care for half-closed connections.

A client that has sent its request may close its sending side and still wait for the answer. On the
wire this looks the same as a client that has gone. The difference shows when something is sent: a
client that has gone refuses it. So, while there is no answer to send yet, an informational
`100 Continue` (which clients must skip, RFC 9110 section 15.2) is sent now and then.
"""

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lorakeet.server.errors import error_body

PROBE_SECONDS = 0.25
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HTTPProtocol(H11Protocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._half_closed = False

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always closes
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body
        if not waits or self.scope["http_version"] == "1.0":  # 1.0 knows no informational answers
            return False
        self._half_closed = True
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True  # keep the connection open for the answer

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        body = error_body(msg, "invalid_request_error", None, "bad_request")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _probe(self) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not self.cycle.response_started:  # later the answer itself is the probe
            self.transport.write(_PROBE)
            self.loop.call_later(PROBE_SECONDS, self._probe)
