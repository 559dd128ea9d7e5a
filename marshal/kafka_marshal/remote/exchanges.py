"""Sends requests to the sidecar over kept connections: one write, and mostly one read.

A general HTTP client takes several times as long for each request, which matters if a
task waits for every grant. h11 makes and parses the messages; a head that repeats is
made and parsed only once.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import h11

from kafka_marshal.conditions import Condition
from kafka_marshal.deadline import Deadline
from kafka_marshal.remote.repeated_heads import RepeatedHead

CONNECTIONS_MAX = 16
# Shorter than a server keeps an idle connection, so that no request meets its end.
IDLE_S = 2.0
CONNECT_S = 2.0
HEAD_BYTES_MAX = 65_536
ANSWER_BYTES_MAX = 64 * 1024 * 1024
READ_BYTES = 65_536
# A process rarely sends more than this many different requests.
HEADS_MAX = 64
_OK = 200
_OK_LINE = b"HTTP/1.1 200 "


class ExchangeError(Exception):
    """A request got no complete answer.

    Attributes:
        was_sent: Whether the sidecar may have received the request.
    """

    def __init__(self, why: str, *, was_sent: bool) -> None:
        super().__init__(why)
        self.was_sent = was_sent


@attrs.frozen
class Answer:
    """A complete response."""

    status: int
    content: bytes


def open_tcp(place: tuple[str, int], timeout_s: float) -> socket.socket:
    """Return a connection to a TCP socket.

    Raises:
        OSError: No process listens there, or not in time.
    """
    found = socket.create_connection(place, timeout_s)
    # A request is one write, which TCP must not delay to join it with another one.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


class Exchanges:
    """Makes requests to one sidecar, over at most ``CONNECTIONS_MAX`` connections.

    A connection serves one request at a time. No request is repeated. Thread-safe.

    Args:
        connect: Returns a new connection to the sidecar; gets its timeout in seconds.
        host: The ``Host`` header.
        headers: Further headers of each request.
    """

    def __init__(
        self,
        connect: Callable[[float], socket.socket],
        *,
        host: str,
        headers: Mapping[str, str],
    ) -> None:
        self._connect = connect
        self._headers = [("Host", host), *headers.items()]
        # Heads of sent requests, by method, target and whether there is a body.
        self._heads: dict[tuple[str, str, bool], RepeatedHead] = {}
        self._changed = Condition()
        # Connections in use, by request; None while the connection is being opened.
        self._busy: dict[_Request, _Kept | None] = {}
        # Unused connections; the one that was used last is at the end.
        self._idle: list[_Kept] = []
        self._is_closed = False

    def request(
        self, method: str, target: str, *, body: bytes | None, timeout_ms: int
    ) -> Answer:
        """Make a request and return its response, whatever its status.

        Args:
            method: HTTP method.
            target: Path and query, escaped.
            body: A JSON document, None without one.
            timeout_ms: Limit for everything except connecting.

        Raises:
            ExchangeError: There was no complete response in time.
            RuntimeError: ``close`` was called.
        """
        deadline = Deadline(timeout_ms)
        request = _Request(method, target, body, self._headers)
        is_kept = False
        try:
            kept = self._taken(request, deadline)
            answer = kept.exchange(request, self._heads, deadline=deadline)
            is_kept = kept.can_repeat
        except (OSError, h11.ProtocolError) as error:
            why = str(error) or type(error).__name__
            raise ExchangeError(why, was_sent=True) from error
        finally:
            # Not in a separate function: a signal handler could raise on its entry.
            with self._changed:
                used = self._busy.pop(request, None)
                self._give_back(used, is_kept=is_kept)
        return answer

    def close(self) -> None:
        """Close every connection, and wake the threads that wait. Idempotent."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for busy in self._busy.values():
                if busy is not None:
                    busy.wake()
            self._changed.notify_all()
        for kept in idle:
            kept.close()

    def _taken(self, request: "_Request", deadline: Deadline) -> "_Kept":
        """Return a connection that no other thread uses, for a request."""
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: self._is_closed or len(self._busy) < CONNECTIONS_MAX,
                timeout=deadline.left_s,
            )
            if self._is_closed:
                raise RuntimeError("the connection was closed")
            if not is_free:
                why = f"{CONNECTIONS_MAX} requests wait for their answers"
                raise ExchangeError(why, was_sent=False)
            while self._idle:
                kept = self._idle.pop()
                if kept.is_usable:
                    self._busy[request] = kept
                    return kept
                kept.close()
            self._busy[request] = None
        try:
            opened = _Kept(self._connect(CONNECT_S))
        except OSError as error:
            raise ExchangeError(str(error), was_sent=False) from error
        with self._changed:
            self._busy[request] = opened
        return opened

    def _give_back(self, used: "_Kept | None", *, is_kept: bool) -> None:
        """Keep a connection for other requests, or close it. Under the lock."""
        if used is not None and is_kept and not self._is_closed:
            used.idle_since = time.monotonic()
            self._idle.append(used)
        elif used is not None:
            used.close()
        while self._idle and self._idle[0].is_expired:
            self._idle.pop(0).close()
        self._changed.notify()


@attrs.frozen(eq=False)
class _Request:
    """One request, with the headers of all requests. Equal to itself only."""

    method: str
    target: str
    body: bytes | None
    common: Sequence[tuple[str, str]]

    @property
    def name(self) -> tuple[str, str, bool]:
        """All that determines its head, except the length of the body."""
        return self.method, self.target, self.body is not None

    def send(self, http: h11.Connection) -> bytes:
        """Return its bytes, and make h11 expect the response."""
        headers = [*self.common]
        if self.body is not None:
            headers.append(("Content-Type", "application/json"))
        if self.body is not None or self.method != "GET":
            headers.append(("Content-Length", str(len(self.body or b""))))
        head = h11.Request(method=self.method, target=self.target, headers=headers)
        data = http.send(head) or b""
        if self.body:
            data += http.send(h11.Data(data=self.body)) or b""
        return data + (http.send(h11.EndOfMessage()) or b"")


class _Kept:
    """One connection. For one thread at a time, except ``wake``.

    Attributes:
        idle_since: When its last response ended, by ``time.monotonic``.
        can_repeat: Whether another request may follow the last one.
    """

    def __init__(self, opened: socket.socket) -> None:
        self.idle_since = time.monotonic()
        self.can_repeat = False
        self._socket = opened
        # Head of an earlier response that may be repeated, None if there was none.
        self._head: RepeatedHead | None = None
        self._http = h11.Connection(
            h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX
        )

    def exchange(
        self,
        request: _Request,
        heads: dict[tuple[str, str, bool], RepeatedHead],
        *,
        deadline: Deadline,
    ) -> Answer:
        """Send a request and return its response.

        Args:
            request: The request.
            heads: Heads of earlier requests of any connection; a new one is added.
            deadline: When to give up.
        """
        self.can_repeat = False
        head = heads.get(request.name)
        if head is None:
            data = request.send(self._http)
            self._send(data, deadline)
            found = RepeatedHead.of(data)
            if found is not None:
                if len(heads) >= HEADS_MAX:
                    heads.clear()
                heads[request.name] = found
            return self._parsed(deadline)
        self._send(head.message(request.body or b""), deadline)
        if self._head is None:
            request.send(self._http)
            return self._parsed(deadline)
        received = self._receive(deadline)
        place = self._head.body_of(received)
        if place is not None and len(received) == place[1]:
            self.can_repeat = True
            return Answer(_OK, received[place[0] :])
        request.send(self._http)
        self._http.receive_data(received)
        return self._parsed(deadline)

    def _send(self, data: bytes, deadline: Deadline) -> None:
        self._limit(deadline)
        # A server that refuses a request may answer and close before it has read it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def _receive(self, deadline: Deadline) -> bytes:
        self._limit(deadline)
        return self._socket.recv(READ_BYTES)

    def _parsed(self, deadline: Deadline) -> Answer:
        """Return the response, parsed by h11, to a request that h11 knows."""
        http, first = self._http, None
        status, content = 0, bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                received = self._receive(deadline)
                first = received if first is None else b""
                http.receive_data(received)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                content += event.data
                if len(content) > ANSWER_BYTES_MAX:
                    raise OSError(f"the answer exceeds {ANSWER_BYTES_MAX} bytes")
            elif isinstance(event, h11.EndOfMessage):
                self._end_cycle()
                self._learn(first or b"", content)
                return Answer(status, bytes(content))

    def _end_cycle(self) -> None:
        """Prepare h11 for another request, if one may follow."""
        http = self._http
        is_done = http.our_state is h11.DONE and http.their_state is h11.DONE
        self.can_repeat = is_done and not http.trailing_data[0]
        if self.can_repeat:
            http.start_next_cycle()

    def _learn(self, received: bytes, content: bytes | bytearray) -> None:
        """Keep the head of a response that was received in one piece."""
        if self.can_repeat and received.startswith(_OK_LINE):
            head = RepeatedHead.of(received)
            if head is not None and head.after is not None:
                place = head.body_of(received)
                if place is not None and received[place[0] :] == content:
                    self._head = head

    def _limit(self, deadline: Deadline) -> None:
        left_s = deadline.left_s
        if not left_s:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)

    @property
    def is_expired(self) -> bool:
        """Whether the server may close it at any moment."""
        return time.monotonic() - self.idle_since > IDLE_S

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent: it is open, and has no unexpected bytes."""
        if self.is_expired:
            return False
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return not waiting.poll(0)

    def wake(self) -> None:
        """End the exchange of another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
