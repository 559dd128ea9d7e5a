"""Answers requests that repeat an earlier one of their connection, without parsing.

A client sends the same heartbeat again and again. The meaning of a request's head, and
the permission to send it, depend only on its bytes and on the connection. So a head
needs no check if an equal head, except for the length of the body, was parsed, checked
and answered on this connection before.
"""

import os
import threading
from collections.abc import Callable

from kafka_marshal.remote.repeated_heads import RepeatedHead


class Later:
    """A response that is made after its request, on any thread."""

    __slots__ = ("_is_sent", "_lock", "_response", "_send", "_wakes")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._response: bytes | None = None
        self._send: Callable[[Later, bytes], None] | None = None
        self._is_sent = False
        self._wakes = False

    def put(self, found: bytes) -> None:
        """Set the response, once, and send it; on any thread."""
        with self._lock:
            self._response, send = found, self._send
        if send is not None:
            send(self, found)

    def send_by(self, send: "Callable[[Later, bytes], None]") -> None:
        """Send the response once it is set.

        Args:
            send: Called on the thread that sets the response, or at once on this one if
                the response is set already.
        """
        with self._lock:
            self._send, found = send, self._response
        if found is not None:
            send(self, found)

    def on_sent(self) -> bool:
        """Record that all was sent; return whether the event loop waits for that."""
        with self._lock:
            self._is_sent = True
            return self._wakes

    def is_sent(self) -> bool:
        """Return whether all was sent; if not, the event loop waits for that."""
        with self._lock:
            self._wakes = self._wakes or not self._is_sent
            return not self._wakes


class SocketWriter:
    """Writes to the socket of a connection, from any thread, without waiting.

    If the event loop sent a response, that would wait until the loop runs, and first
    for the interpreter lock, which the thread that made the response often keeps for a
    while. Used only while nothing else writes to the connection.

    Args:
        number: File descriptor of the socket, which is open until ``close``.
    """

    __slots__ = ("_lock", "_number")

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._number: int | None = number

    def write(self, data: bytes) -> bytes:
        """Write data; return what did not fit. Ignores a connection that is lost."""
        with self._lock:
            if self._number is None:
                return b""
            try:
                return data[os.write(self._number, data) :]
            except BlockingIOError:
                return data
            except OSError:
                return b""  # the event loop notices the loss

    def close(self) -> None:
        """Write no more: the socket is about to be closed. Idempotent."""
        with self._lock:
            self._number = None


Found = bytes | Later | None
Answer = Callable[[bytes], Found]
"""Returns the response to a body, at once or later; None if the request must be
parsed, or refused."""

# A client's library sends different headers with and without a body, and a task may
# query the claims of several partitions in turn.
HEADS_MAX = 16


class RepeatedRequests:
    """Recognizes and answers the repeated requests of one connection.

    It receives the data that arrives between two requests. On the event loop.
    """

    __slots__ = ("_begun", "_first", "_known")

    def __init__(self) -> None:
        self._first = b""
        self._begun = b""
        self._known: list[tuple[RepeatedHead, Answer]] = []

    def feed(self, data: bytes) -> tuple[bytes | Later, bytes]:
        """Answer a repeated request.

        Returns:
            The response, at once or later, and the bytes that must be parsed instead.
            Both are empty while the rest of the body has not arrived.
        """
        if self._begun:
            data, self._begun = self._begun + data, b""
        for head, answer in self._known:
            found = head.body_of(data)
            if found is None:
                continue
            begin, end = found
            if len(data) < end:
                self._begun = data
                return b"", b""
            answered = answer(data[begin:]) if len(data) == end else None
            if answered is not None:
                return answered, b""
            break
        return self._pass_on(data)

    def give_up(self) -> bytes:
        """Stop waiting for the rest of a body; return the bytes to parse."""
        data, self._begun = self._begun, b""
        return self._pass_on(data)[1]

    def _pass_on(self, data: bytes) -> tuple[bytes, bytes]:
        self._first = data
        return b"", data

    def on_response(self, answer: Answer | None) -> None:
        """Record the end of the response to a request that was parsed.

        Args:
            answer: Answers its repetitions, None if they must be parsed as well.
        """
        first, self._first = self._first, b""
        if answer is not None:
            head = RepeatedHead.of(first)
            if head is not None:
                others = [each for each in self._known if each[0] != head]
                self._known = [(head, answer), *others][:HEADS_MAX]


def response(body: bytes) -> bytes:
    """Return the response with a JSON body, as the application sends it."""
    return (
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json"
        b"\r\n\r\n%b" % (len(body), body)
    )
