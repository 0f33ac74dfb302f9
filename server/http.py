"""uvicorn's HTTP protocol, with care for half-closed connections and for clients that stand still.

A client that has sent its request may close its sending side and still wait for the answer. On the
wire this looks the same as a client that has gone. The difference shows when something is sent: a
client that has gone refuses it. So, while there is no answer to send yet, an informational
`100 Continue` (which clients must skip, RFC 9110 section 15.2) is sent now and then.

A client has `RECEIVE_SECONDS` to send a whole request (more, as long as it sends at least
`RECEIVE_RATE` and has no answer yet: uploads of adapters are large; never more than that ahead of
what it sent last), and is cut off when it has taken nothing of its answer for `STALL_SECONDS`: else
a few thousand of them would hold every file descriptor. Connections beyond `MAX_CONNECTIONS` are
closed at once.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lorakeet.server.errors import error_body

PROBE_SECONDS = 0.25
RECEIVE_SECONDS = 60.0
RECEIVE_RATE = 2**17  # bytes a second
STALL_SECONDS = 60.0
MAX_CONNECTIONS = 2**14  # each may hold some 100 KiB of a request that is not whole
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HTTPProtocol(H11Protocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._half_closed = False
        self._receiving: asyncio.TimerHandle | None = None  # while a request is not whole
        self._deadline = 0.0  # until when it may come; all that comes puts it off
        self._stalled: asyncio.TimerHandle | None = None  # while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._receiving, self._stalled):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        earned = self._deadline + len(data) / RECEIVE_RATE
        self._deadline = min(earned, self.loop.time() + RECEIVE_SECONDS)
        super().data_received(data)
        self._watch_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

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
        elif self.timeout_keep_alive_task is None:  # the next request has begun
            self._watch_request()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg, "bad_request")

    def _watch_request(self) -> None:
        """Start or stop the time that a request has to come in."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._receiving is None and not self.transport.is_closing():
                self._deadline = self.loop.time() + RECEIVE_SECONDS
                self._receiving = self.loop.call_at(self._deadline, self._receive_timeout)
        elif self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _receive_timeout(self) -> None:
        answered = self.conn.our_state is h11.DONE  # nobody wants the rest
        if self._deadline > self.loop.time() and not answered:
            self._receiving = self.loop.call_at(self._deadline, self._receive_timeout)
            return
        message = f"The request took more than {RECEIVE_SECONDS:g} seconds, or came to a halt"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, message, "request_timeout")

    def _refuse(self, status: HTTPStatus, message: str, code: str) -> None:
        """Answer, unless an answer has begun, and close the connection."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # what still works on the request gets no more of it
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(status, message, code)
        self.transport.close()

    def _send_error(self, status: HTTPStatus, message: str, code: str) -> None:
        body = error_body(message, "invalid_request_error", None, code)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _probe(self) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not self.cycle.response_started:  # later the answer itself is the probe
            self.transport.write(_PROBE)
            self.loop.call_later(PROBE_SECONDS, self._probe)
