"""Connections as uvicorn serves them, with a peer, limits, and answers of ours.

Uvicorn leaves four things open: who is at the other end, how many connections may
stand, how long a request may take to arrive, and how long its answer may take to be
read.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import attrs
import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kafka_marshal.sidecar.app import PROBE_S_MAX, App
from kafka_marshal.sidecar.asking import BODY_S_MAX, CONNECTION, Connection
from kafka_marshal.sidecar.config import CONNECTIONS_MAX
from kafka_marshal.sidecar.failures import Answered, refusal
from kafka_marshal.sidecar.peers import may_use, peer_of
from kafka_marshal.sidecar.sockets import BACKLOG

HEAD_S_MAX = 10.0
HEAD_BYTES_MAX = 16_384
# A reader on this host takes megabytes in less; one that was stopped connects again.
WRITE_S_MAX = 30.0
# A connection that is not admitted has one request: head, body and answer.
GUEST_S_MAX = HEAD_S_MAX + BODY_S_MAX + PROBE_S_MAX
# As many as the loop accepts in one go, twice: whoever sends its token at once is
# admitted before others could push it out.
GUESTS_MAX = 2 * BACKLOG
# Of all places, this part is for the Unix socket alone.
LOCAL_PART = 8
# Longer than clients keep an idle connection, so that none is used as it ends.
IDLE_S = 75
# What streams that nobody reads are waited for at the end.
GRACE_S = 2
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout"}


def response_bytes(found: Answered) -> bytes:
    """Return a whole response that ends its connection."""
    body = msgspec.json.encode(found.failure)
    return b"".join(
        (
            b"HTTP/1.1 %d %b\r\n" % (found.status, _PHRASES[found.status]),
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
            body,
        )
    )


@attrs.define(eq=False)
class Places:
    """Bounds connections: those that may use the sidecar, and guests beside them.

    A connection is a guest until it has shown that it may use the sidecar: over the
    Unix socket by its peer, at once; over TCP by a request with the token. Guests
    take no place of the others: where they are too many, the one that has stood
    longest is ended, so that probes and clients always get in. Those of the Unix
    socket and those of TCP are counted apart.

    Attributes:
        connections_max: Most connections that may use the sidecar.
    """

    connections_max: int = CONNECTIONS_MAX
    _admitted: dict[bool, set["GuardedProtocol"]] = attrs.field(
        factory=lambda: {True: set(), False: set()}
    )
    _guests: dict[bool, dict["GuardedProtocol", None]] = attrs.field(
        factory=lambda: {True: {}, False: {}}
    )

    @property
    def guests_max(self) -> int:
        """Most guests of the Unix socket, and as many of TCP."""
        return max(1, min(GUESTS_MAX, self.connections_max // 4))

    def enter(self, protocol: "GuardedProtocol", *, is_local: bool) -> None:
        """Count a connection as a guest."""
        self._guests[is_local][protocol] = None

    def admit(self, protocol: "GuardedProtocol", *, is_local: bool) -> bool:
        """Move a guest to those that may use the sidecar, if there is a place."""
        guests = self._guests[is_local]
        if protocol not in guests:
            return False  # it has been ended
        of_tcp = len(self._admitted[False])
        if of_tcp + len(self._admitted[True]) >= self.connections_max:
            return False
        kept = max(1, self.connections_max // LOCAL_PART)
        if not is_local and of_tcp >= self.connections_max - kept:
            return False
        del guests[protocol]
        self._admitted[is_local].add(protocol)
        return True

    def end_oldest(self, *, is_local: bool) -> None:
        """End the guest that has stood longest, where there are too many."""
        guests = self._guests[is_local]
        if len(guests) > self.guests_max:
            oldest = next(iter(guests))
            del guests[oldest]
            oldest.abort()

    def leave(self, protocol: "GuardedProtocol") -> None:
        """Forget a connection that is over."""
        for is_local in (True, False):
            self._admitted[is_local].discard(protocol)
            self._guests[is_local].pop(protocol, None)


class GuardedProtocol(H11Protocol):
    """One connection of the sidecar.

    Attributes:
        places: Bounds the connections of this server; set once, before serving.
        socket_gid: Group whose members may use the Unix socket; set once.
    """

    places = Places()
    socket_gid: int | None = None

    _head_timer: asyncio.TimerHandle | None = None
    _guest_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Learn who connected, and whether it may use the sidecar."""
        super().connection_made(transport)
        # What asyncio hands out has all that is asked of it, and is no socket.
        found = cast("socket.socket", transport.get_extra_info("socket"))
        is_local = found.family == socket.AF_UNIX
        connection = Connection(
            peer_of(found), is_local, find_place=partial(self._admit, is_local=is_local)
        )
        self.app_state = {**self.app_state, CONNECTION: connection}
        self._guest_timer = self.loop.call_later(GUEST_S_MAX, self.abort)
        # Writing is paused whenever anything waits to be sent, and not above 64 KiB.
        transport.set_write_buffer_limits(high=0)
        self.places.enter(self, is_local=is_local)
        if is_local and may_use(connection.peer, self.socket_gid):
            connection.admit()
        self.places.end_oldest(is_local=is_local)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget_head()
        self._forget_guest()
        self._forget_write()
        self.places.leave(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop writing; what waits to be sent then has a deadline."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_S_MAX, self.abort)

    def resume_writing(self) -> None:
        """Go on writing: everything was sent."""
        self._forget_write()
        super().resume_writing()

    def _forget_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def abort(self) -> None:
        """End the connection at once, whatever was not sent yet."""
        self.transport.abort()

    def _admit(self, *, is_local: bool) -> bool:
        is_admitted = self.places.admit(self, is_local=is_local)
        if is_admitted:
            self._forget_guest()
        return is_admitted

    def _forget_guest(self) -> None:
        if self._guest_timer is not None:
            self._guest_timer.cancel()
            self._guest_timer = None

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


def make_server(
    app: App, *, connections_max: int, socket_gid: int | None = None
) -> Server:
    """Return a server of the application, for sockets that it is given."""

    class _Protocol(GuardedProtocol):
        pass

    _Protocol.places = Places(connections_max)
    _Protocol.socket_gid = socket_gid
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
