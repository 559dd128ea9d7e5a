"""Connections and requests: their limits, and the parsing of requests.

This module adds four things to uvicorn: it identifies the peer, and limits the number
of connections, the time in which a request must arrive, and the time in which its
response must be read. Invalid requests get a one-sentence error.
"""

import asyncio
import contextlib
import errno
import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import attrs
import h11
import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kafka_marshal.errors import RAISE_OPEN_FILES, IdentityConflict, MarshalError
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.protocol.codec import is_identifier, is_topic
from kafka_marshal.protocol.types import whole_number
from kafka_marshal.remote import api
from kafka_marshal.remote.transport import is_loopback
from kafka_marshal.sidecar.config import CONNECTIONS_MAX
from kafka_marshal.sidecar.group_actions import GroupActions
from kafka_marshal.sidecar.http_errors import (
    RETRY_AFTER_S,
    HttpError,
    http_error,
    to_http_error,
    unavailable,
)
from kafka_marshal.sidecar.process_monitor import (
    UNKNOWN_PEER,
    Caller,
    Peer,
    may_use,
    peer_of,
    represented_process,
)
from kafka_marshal.sidecar.repeated_requests import (
    Answer,
    Later,
    RepeatedRequests,
    SocketWriter,
)
from kafka_marshal.sidecar.routes import Route
from kafka_marshal.sidecar.service import SidecarService
from kafka_marshal.sidecar.sockets import BACKLOG

# --- Requests --------------------------------------------------------------------


BODY_BYTES_MAX = 4 * 1024 * 1024
BODY_BYTES_FREE = 16 * 1024
BODIES_BYTES_MAX = 64 * 1024 * 1024
BODY_S_MAX = 10.0
TIMEOUT_MS_DEFAULT = 10_000
CONNECTION = "connection"
_HEX = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,10}")
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:[0-9]*)?")
_PARTITION_MAX = 2**31 - 1
_FLAGS = {"true": True, "1": True, "": True, "false": False, "0": False}


@attrs.define(eq=False)
class Connection:
    """One connection.

    Attributes:
        peer: The process at the other end.
        is_local: Whether it is of the Unix socket, where the kernel reports the peer.
        client: The client that uses it; None before its first request.
        is_admitted: Whether it may use the sidecar, and has a place among the admitted
            connections.
        answer: Answers repetitions of the request in progress without parsing; None if
            repetitions must be parsed and checked, too.
    """

    peer: Peer = UNKNOWN_PEER
    is_local: bool = False
    client: Caller | None = attrs.field(default=None, kw_only=True)
    answer: Answer | None = attrs.field(default=None, init=False)
    _try_admit: Callable[[], bool] | None = attrs.field(default=None, kw_only=True)
    is_admitted: bool = attrs.field(init=False)

    @is_admitted.default
    def _is_admitted_at_first(self) -> bool:
        return self._try_admit is None

    def admit(self) -> bool:
        """Admit a connection that may use the sidecar; return if there was room."""
        if not self.is_admitted and self._try_admit is not None:
            self.is_admitted = self._try_admit()
        return self.is_admitted


@attrs.frozen(kw_only=True)
class ApiRequest:
    """One valid request.

    Attributes:
        actions: Actions on groups, None if they are not allowed.
        parts: Parts of the path.
        queries: Known query parameters.
        caller: The calling client, with empty names if the path names no client.
        peer: The calling process.
        body: The decoded body, None without one.
    """

    route: Route
    service: SidecarService
    actions: GroupActions | None = None
    parts: Mapping[str, str]
    queries: Mapping[str, int | bool]
    caller: Caller
    peer: Peer
    body: Any = None

    @property
    def timeout_ms(self) -> int:
        """Longest time that the request may take."""
        return int(self.queries.get("timeout_ms", TIMEOUT_MS_DEFAULT))

    @property
    def step_ms(self) -> int | None:
        """Longest time of each step of an action, None if the client sets no limit.

        A limit of 0 counts as 1 ms.
        """
        given = self.queries.get("timeout_ms")
        return None if given is None else max(1, int(given))

    @property
    def waits(self) -> bool:
        """Whether it may wait, so that it needs an executor for waiting requests."""
        # If the body has a timeout, the request waits only if that is above 0.
        return self.route.waits and getattr(self.body, "timeout_ms", 1) > 0


def connection_of(request: Request) -> Connection:
    """Return the connection of a request; an unknown connection has no rights."""
    found = request.scope.get("state", {}).get(CONNECTION)
    return found if isinstance(found, Connection) else Connection()


def require_loopback_host(request: Request) -> None:
    """Refuse a TCP request whose Host header names another machine.

    A web page whose name resolves to a loopback address (DNS rebinding) can reach the
    socket, but the header has the page's own name.

    Raises:
        HttpError: The Host header is not a loopback address or ``localhost``.
    """
    given = request.headers.get("host")
    if given is None:
        return  # HTTP/1.0, which no browser uses
    found = _HOST.fullmatch(given)
    if found is None or not is_loopback(found[1].strip("[]")):
        raise http_error(
            403,
            f"the Host header is {given[:200]!r}, which is not this machine; use the "
            "address that the sidecar listens on, such as 127.0.0.1",
            setting="host",
        )


def declares_body(scope: Scope) -> bool:
    """Return whether a request declares a body."""
    headers = dict(scope["headers"])
    return headers.get(b"content-length", b"0").strip(b"0 ") != b"" or (
        b"transfer-encoding" in headers
    )


def parse_path(given: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of a path.

    Raises:
        HttpError: A part is not a valid name, topic or number.
    """
    parts = dict(given)
    for name, value in parts.items():
        if name == "partition":
            is_good = _NUMBER.fullmatch(value) and int(value) <= _PARTITION_MAX
        else:
            is_good = (is_topic if name == "topic" else is_identifier)(value)
        if not is_good:
            raise http_error(
                400, f"{value[:200]!r} is not a valid {name} in the path", setting=name
            )
    return parts


def parse_queries(route: Route, request: Request) -> dict[str, int | bool]:
    """Return the known query parameters; others are ignored.

    Raises:
        HttpError: A value is not a number, or neither true nor false.
    """
    found: dict[str, int | bool] = {}
    for query in route.queries:
        value = request.query_params.get(query.name)
        if value is None:
            continue
        if query.kind == "boolean":
            if value.lower() not in _FLAGS:
                raise http_error(
                    400,
                    f"{query.name} is {value[:50]!r}; write true or false",
                    setting=query.name,
                )
            found[query.name] = _FLAGS[value.lower()]
        elif not _NUMBER.fullmatch(value) or int(value) > query.most:
            raise http_error(
                400,
                f"{query.name} is {value[:50]!r}; write 0 to {query.most}",
                setting=query.name,
            )
        else:
            found[query.name] = int(value)
    return found


def caller_of(route: Route, request: Request, *, parts: Mapping[str, str]) -> Caller:
    """Return the calling client; without a client in the path, all names are empty."""
    if "client" not in parts:
        return Caller("", "", "")
    instance = request.headers.get(api.INSTANCE_HEADER, "")
    if route.is_of_client and not _HEX.fullmatch(instance):
        raise http_error(
            400,
            f"the header {api.INSTANCE_HEADER} must have the instance that was "
            "registered: 16 bytes in lower-case hex",
            setting=api.INSTANCE_HEADER,
        )
    return Caller(parts["group"], parts["client"], instance)


def client_process(peer: Peer, registration: api.RegisterRequest) -> Peer:
    """Return the process of a client: the peer, or the process that the peer names.

    Raises:
        HttpError: No such process of the same user exists.
    """
    if registration.pid is None or peer.pid is None:
        return peer
    found = represented_process(peer, registration.pid)
    if found is None:
        raise http_error(
            400,
            f"there is no process {registration.pid} of your user to represent the "
            "client; omit pid to watch the process that connects",
            setting="pid",
        )
    return found


def require_one_client(connection: Connection, caller: Caller) -> None:
    """Refuse a second client on a connection."""
    known = connection.client
    if caller.client_id and known is not None and known != caller:
        raise to_http_error(
            IdentityConflict(
                f"this connection belongs to client {known.client_id!r} of group "
                f"{known.group_id!r}; open another connection for {caller.client_id!r}",
                holder=known.client_id,
            )
        )


async def read_body(
    route: Route, request: Request, *, bodies: "LongBodies"
) -> msgspec.Struct | None:
    """Return the decoded body of a request, read within limits.

    Raises:
        HttpError: The body is too long, too slow, or of the wrong type.
    """
    with bodies.reading() as body:
        data = await _read(request, body)
    if route.takes is None:
        return None
    if not data and route.is_body_optional:
        data = b"{}"
    try:
        found: msgspec.Struct = msgspec.json.decode(data, type=route.takes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise http_error(
            400,
            f"the body is not a valid {route.takes.__name__}: {error}",
            setting="body",
        ) from error
    return found


class LongBodies:
    """Limits the total bytes of bodies that are being read. On the event loop.

    The first bytes of each body are not counted, so that long bodies do not keep out
    ordinary requests.
    """

    def __init__(self) -> None:
        self._bytes = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator["BodyBytes"]:
        """Yield the counter of a body; its bytes are free again at the end."""
        body = BodyBytes(self)
        try:
            yield body
        finally:
            self._bytes -= body.charged

    def charge(self, count: int) -> None:
        """Count more bytes.

        Raises:
            HttpError: The limit would be exceeded; the client should retry.
        """
        if self._bytes + count > BODIES_BYTES_MAX:
            raise unavailable("too many long requests are being read; try again")
        self._bytes += count


class BodyBytes:
    """Bytes of one body that count towards the limit of all bodies.

    Attributes:
        charged: Number of bytes counted so far.
    """

    def __init__(self, bodies: LongBodies) -> None:
        self.charged = 0
        self._bodies = bodies

    def grow(self, size: int) -> None:
        """Count the growth of the body to this size.

        Raises:
            HttpError: The body is too long, or the limit of all bodies is reached.
        """
        if size > BODY_BYTES_MAX:
            raise _too_long()
        more = size - BODY_BYTES_FREE - self.charged
        if more > 0:
            self._bodies.charge(more)
            self.charged += more


async def _read(request: Request, body: BodyBytes) -> bytes:
    length = request.headers.get("content-length", "0")
    if whole_number(length, most=BODY_BYTES_MAX) is None:
        raise _too_long()
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for chunk in request.stream():
                data += chunk
                body.grow(len(data))
    except TimeoutError:
        raise http_error(
            408,
            f"the request body did not arrive within {BODY_S_MAX:.0f} s",
            error=MarshalError,
        ) from None
    return bytes(data)


def _too_long() -> HttpError:
    return http_error(
        413,
        f"the request body exceeds {BODY_BYTES_MAX} bytes; use several requests",
        setting="body",
    )


# --- Connections -----------------------------------------------------------------


HEAD_S_MAX = 10.0
PROBE_S_MAX = 10.0
HEAD_BYTES_MAX = 16_384
# How many bytes are parsed at once, while other connections wait. With asyncio's own
# limit, a quarter of a megabyte, chunks of one byte would take a fifth of a second.
READ_BYTES_MAX = 16_384
# How long to wait for the rest of a body before the client counts as slow.
REST_S_MAX = 0.1
# A client on this host reads megabytes in less time; a stopped one must reconnect.
WRITE_S_MAX = 30.0
# Lifetime of a connection that is not admitted: one request, its body and its answer.
GUEST_S_MAX = HEAD_S_MAX + BODY_S_MAX + PROBE_S_MAX
# Twice as many as the event loop accepts at once: a client that sends its token
# immediately is admitted before other guests can displace it.
GUESTS_MAX = 2 * BACKLOG
# One of this many connections is reserved for the Unix socket.
LOCAL_PART = 8
# Longer than clients keep an idle connection, so that the server never closes a
# connection that a client is about to use.
IDLE_S = 75
# How often the server checks whether it must end, besides each call of ``end``.
TICK_S = 60.0
# Shortest time between two log lines that no connection can be accepted.
REFUSAL_S = 60.0
# How long the shutdown waits for streams that no client reads.
GRACE_S = 2
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_log = logging.getLogger(LOGGER_NAME)


def failed(found: HttpError) -> Response:
    """Return the HTTP response of an error."""
    headers = {}
    if found.status == 503:  # noqa: PLR2004 - of HTTP
        headers["retry-after"] = str(RETRY_AFTER_S)
    if found.status == 401:  # noqa: PLR2004 - of HTTP
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(found.failure),
        found.status,
        headers=headers,
        media_type="application/json",
    )


def response_bytes(found: Response) -> bytes:
    """Return a whole response as it is sent."""
    phrase = HTTPStatus(found.status_code).phrase.encode()
    head = b"HTTP/1.1 %d %b\r\n" % (found.status_code, phrase)
    lines = [b"%b: %b\r\n" % header for header in found.raw_headers]
    return b"".join((head, *lines, b"\r\n", bytes(found.body)))


@attrs.define(eq=False)
class ConnectionLimits:
    """Limits connections: admitted connections and, separately, guests.

    A connection is a guest until it has shown that it may use the sidecar: over the
    Unix socket by its peer, at once; over TCP by a request with the token. Guests do
    not count as admitted connections. If there are too many guests, the oldest is
    closed, so that probes and clients can always connect. Guests of the Unix socket and
    of TCP are counted separately.

    Attributes:
        connections_max: Most admitted connections.
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
        """Most guests of the Unix socket; the same limit holds for TCP."""
        return max(1, min(GUESTS_MAX, self.connections_max // 4))

    def enter(self, protocol: "GuardedProtocol", *, is_local: bool) -> None:
        """Count a connection as a guest."""
        self._guests[is_local][protocol] = None

    def admit(self, protocol: "GuardedProtocol", *, is_local: bool) -> bool:
        """Admit a guest; return whether there was room."""
        guests = self._guests[is_local]
        if protocol not in guests:
            return False  # it was closed
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
        """Close the oldest guest if there are too many."""
        guests = self._guests[is_local]
        if len(guests) > self.guests_max:
            oldest = next(iter(guests))
            del guests[oldest]
            oldest.abort()

    def leave(self, protocol: "GuardedProtocol") -> None:
        """Forget a closed connection."""
        for is_local in (True, False):
            self._admitted[is_local].discard(protocol)
            self._guests[is_local].pop(protocol, None)


class GuardedProtocol(H11Protocol):
    """One connection of the sidecar.

    Attributes:
        limits: Limits of this server; set once, before serving.
        socket_gid: Group whose members may use the Unix socket; set once.
    """

    limits = ConnectionLimits()
    socket_gid: int | None = None

    _connection: Connection
    _repeated: RepeatedRequests
    _writer: SocketWriter
    _body_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _guest_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    # The response to a repeated request that another thread makes. After it was sent it
    # stays here until the next event of this connection: nothing wakes the loop for it.
    _later: Later | None = None
    # Bytes that arrived before that response was sent, and whether the input has ended.
    _early = b""
    _has_ended = False
    _is_ending = False
    # When a repeated request arrived last, by the loop's clock.
    _used_at = 0.0

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Identify the peer, and admit it if it may use the sidecar."""
        super().connection_made(transport)
        # asyncio returns a wrapper with the same methods.
        found = cast("socket.socket", transport.get_extra_info("socket"))
        is_local = found.family == socket.AF_UNIX
        connection = Connection(
            peer_of(found), is_local, try_admit=partial(self._admit, is_local=is_local)
        )
        self._connection, self._repeated = connection, RepeatedRequests()
        self._writer = SocketWriter(found.fileno())
        self.app_state = {**self.app_state, CONNECTION: connection}
        self._guest_timer = self.loop.call_later(GUEST_S_MAX, self.abort)
        transport.max_size = READ_BYTES_MAX  # type: ignore[attr-defined]
        # Pause writing as soon as anything is pending, not only above 64 KiB.
        transport.set_write_buffer_limits(high=0)
        self.limits.enter(self, is_local=is_local)
        if is_local and may_use(connection.peer, self.socket_gid):
            connection.admit()
        self.limits.end_oldest(is_local=is_local)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget_head()
        self._forget_body()
        self._forget_guest()
        self._forget_write()
        # asyncio closes the socket after this call.
        self._writer.close()
        self.limits.leave(self)
        # uvicorn does this only if no error ended the connection.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop writing; from now on pending bytes have a deadline."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_S_MAX, self.abort)

    def resume_writing(self) -> None:
        """Continue writing: everything was sent."""
        self._forget_write()
        super().resume_writing()

    def _forget_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def abort(self) -> None:
        """Close the connection at once; pending bytes are lost."""
        self.transport.abort()

    def _admit(self, *, is_local: bool) -> bool:
        is_admitted = self.limits.admit(self, is_local=is_local)
        if is_admitted:
            self._forget_guest()
        return is_admitted

    def _forget_guest(self) -> None:
        if self._guest_timer is not None:
            self._guest_timer.cancel()
            self._guest_timer = None

    def data_received(self, data: bytes) -> None:
        """Parse bytes; a request must be complete in time."""
        if self._is_later_due():
            # The kernel keeps further bytes.
            self._early += data
            self.flow.pause_reading()
            return
        if self._is_between_requests:
            answered, data = self._repeated.feed(data)
            self._forget_body()
            if not data:
                # The idle timer is not restarted here, because heartbeats are frequent;
                # its handler reads ``_used_at``.
                self._used_at = self.loop.time()
                if isinstance(answered, bytes):
                    self._send_repeated(answered)
                else:
                    self._await(answered)
                return
        super().data_received(data)
        self._watch_head()

    @property
    def _is_between_requests(self) -> bool:
        """Whether the next bytes begin a request, and its response can be written."""
        is_idle = self.conn.our_state is h11.IDLE and not self.conn.trailing_data[0]
        return is_idle and not self.flow.write_paused

    def _await(self, later: Later) -> None:
        """Send a response once it is made; parse bytes that arrive before it later."""
        self.server_state.total_requests += 1
        self._later = later
        later.send_by(self._send_made)

    def _is_later_due(self) -> bool:
        """Return whether another thread still makes a response.

        If so, ``_on_sent`` runs on the event loop after that response was sent.
        """
        if self._later is not None and self._later.is_sent():
            self._later = None
        return self._later is not None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Close the connection, after the responses to complete requests.

        A client may close its sending side after its request, and then read the
        response.
        """
        self._has_ended = True
        if self._is_response_due:
            return True
        if self._is_request_begun:
            self.send_400_response(
                "the connection was closed before the request was complete"
            )
        return False

    @property
    def _is_response_due(self) -> bool:
        """Whether a request is complete, but its response, not a stream, is not."""
        cycle: RequestResponseCycle | None = self.cycle
        if self._is_later_due():
            return True
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        # A response that has begun waits only for its reader, unless it is a stream.
        return not cycle.response_started or self.flow.write_paused

    @property
    def _is_request_begun(self) -> bool:
        """Whether part of a request has arrived."""
        is_body_due = self.conn.their_state is h11.SEND_BODY
        is_rest_due = self._body_timer is not None
        return is_body_due or is_rest_due or bool(self.conn.trailing_data[0])

    def _send_made(self, later: Later, answered: bytes) -> None:
        """Send a response; runs on the thread that has made it."""
        rest = self._writer.write(answered)
        if rest or later.on_sent():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._on_sent, rest)

    def _on_sent(self, rest: bytes) -> None:
        """Send the bytes that did not fit into the socket; read the next request."""
        self._later = None
        if self.transport.is_closing():
            return
        if rest:
            self.transport.write(rest)
        if self._is_ending:
            self.shutdown()
        elif self._has_ended:
            self.transport.close()
        elif self._early:
            data, self._early = self._early, b""
            self.flow.resume_reading()
            self.data_received(data)

    def shutdown(self) -> None:
        """End the connection, after the response in progress."""
        self._is_ending = True
        if not self._is_later_due():
            super().shutdown()

    def _send_repeated(self, answered: bytes) -> None:
        """Send the response to a repeated request, or wait for the rest of its body."""
        if answered:
            self.server_state.total_requests += 1
            self.transport.write(answered)
        else:
            self._body_timer = self.loop.call_later(REST_S_MAX, self._on_body_timeout)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it was idle for the whole keep-alive time."""
        idle_s = self.loop.time() - self._used_at
        if not self._is_later_due() and idle_s >= self.timeout_keep_alive:
            super().timeout_keep_alive_handler()
        elif not self.transport.is_closing():
            left_s = max(self.timeout_keep_alive - idle_s, REST_S_MAX)
            self.timeout_keep_alive_task = self.loop.call_later(
                left_s, self.timeout_keep_alive_handler
            )

    def _on_body_timeout(self) -> None:
        """Parse a request whose body is slow, within the limits of all requests."""
        self._body_timer = None
        if not self.transport.is_closing():
            super().data_received(self._repeated.give_up())
            self._watch_head()

    def _forget_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        answer, self._connection.answer = self._connection.answer, None
        self._repeated.on_response(answer)
        super().on_response_complete()
        if self._has_ended and not self.eof_received():
            self.transport.close()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP; if a response has begun, abort the connection."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        self._refuse(http_error(400, msg, setting="request"))

    def _refuse(self, found: HttpError) -> None:
        self._forget_head()
        response = failed(found)
        response.headers["connection"] = "close"
        self.transport.write(response_bytes(response))
        self.transport.close()

    @property
    def _is_head_awaited(self) -> bool:
        """Whether part of a request's head has arrived, or the first head is due."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            return False
        # After a request uvicorn's own timer runs until the next bytes arrive. Part of
        # the next request may have arrived with the previous request.
        has_begun = bool(self.conn.trailing_data[0])
        return has_begun or self.timeout_keep_alive_task is None

    def _watch_head(self) -> None:
        if not self._is_head_awaited:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self._on_head_timeout)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._is_head_awaited:
            self._refuse(
                http_error(
                    408,
                    f"no complete request head arrived within {HEAD_S_MAX:.0f} s",
                    setting="request",
                )
            )


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers and ticks; the daemon ends the server."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_over = asyncio.Event()
        self._next_refusal_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        await super().startup(sockets)

    def _on_error(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """Log an error of the event loop.

        If the process has no file descriptors left, asyncio tries to accept again after
        a second, but reports each attempt a hundred times, with a traceback.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_refusal_s:
            self._next_refusal_s = loop.time() + REFUSAL_S
            _log.warning(
                "the sidecar cannot accept new connections, which wait in the queue: "
                "%s; %s, or see who connects: marshal sidecar clients",
                error,
                RAISE_OPEN_FILES,
            )

    def end(self) -> None:
        """End the server after the responses in progress. On the event loop."""
        self.should_exit = True
        self._is_over.set()

    async def main_loop(self) -> None:
        """Wait for ``end``; uvicorn itself would check for it ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def make_server(
    app: ASGIApp, *, connections_max: int, socket_gid: int | None = None
) -> Server:
    """Return a server of the application, for existing sockets."""

    class _Protocol(GuardedProtocol):
        pass

    _Protocol.limits = ConnectionLimits(connections_max)
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
