"""Connections as uvicorn serves them, with a peer, limits, and answers of ours.

Uvicorn leaves three things open: who is at the other end, how many connections may
stand, and how long a request may take to arrive.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kafka_marshal.sidecar.app import App
from kafka_marshal.sidecar.asking import CONNECTION, Connection
from kafka_marshal.sidecar.config import CONNECTIONS_MAX
from kafka_marshal.sidecar.failures import (
    RETRY_AFTER_S,
    Answered,
    not_ready,
    refusal,
)
from kafka_marshal.sidecar.peers import peer_of
from kafka_marshal.sidecar.sockets import BACKLOG

HEAD_S_MAX = 10.0
HEAD_BYTES_MAX = 16_384
# Longer than clients keep an idle connection, so that none is used as it ends.
IDLE_S = 75
# What streams that nobody reads are waited for at the end.
GRACE_S = 2
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 503: b"Service Unavailable"}


def response_bytes(found: Answered) -> bytes:
    """Return a whole response that ends its connection."""
    body = msgspec.json.encode(found.failure)
    is_for_later = found.failure.retriable
    retry = b"retry-after: %d\r\n" % RETRY_AFTER_S if is_for_later else b""
    return b"".join(
        (
            b"HTTP/1.1 %d %b\r\n" % (found.status, _PHRASES[found.status]),
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            retry,
            b"connection: close\r\n\r\n",
            body,
        )
    )


class GuardedProtocol(H11Protocol):
    """One connection of the sidecar.

    Attributes:
        connections_max: Most connections at a time; set once, before serving.
    """

    connections_max = CONNECTIONS_MAX

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Learn who connected; turn away whoever is too many."""
        super().connection_made(transport)
        # What asyncio hands out has all that is asked of it, and is no socket.
        found = cast("socket.socket", transport.get_extra_info("socket"))
        connection = Connection(peer_of(found), is_local=found.family == socket.AF_UNIX)
        self.app_state = {**self.app_state, CONNECTION: connection}
        if len(self.connections) > self.connections_max:
            self._refuse(
                not_ready(
                    f"{self.connections_max} connections stand already; close one, "
                    "or try again soon"
                )
            )
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; what does not become a request in time is given up."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """Go on with what came meanwhile."""
        super().on_response_complete()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; a response that has begun is broken off."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        self._refuse(refusal(400, msg, setting="request"))

    def _refuse(self, found: Answered) -> None:
        self._forget_head()
        self.transport.write(response_bytes(found))
        self.transport.close()

    @property
    def _is_head_awaited(self) -> bool:
        """Whether a request is on its way that has not wholly arrived."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            return False
        # After a request uvicorn's own timer runs until the next bytes come; part
        # of the next request may have come with the one before.
        has_begun = bool(self.conn.trailing_data[0])
        return has_begun or self.timeout_keep_alive_task is None

    def _watch_head(self) -> None:
        if not self._is_head_awaited:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self._give_up)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self._is_head_awaited:
            self._refuse(
                refusal(408, f"no request within {HEAD_S_MAX:.0f} s", setting="request")
            )


class Server(uvicorn.Server):
    """Uvicorn without its signals: when to end is the daemon's to say."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def make_server(app: App, *, connections_max: int) -> Server:
    """Return a server of the application, for sockets that it is given."""

    class _Protocol(GuardedProtocol):
        pass

    _Protocol.connections_max = connections_max
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
    )
    return Server(config)
