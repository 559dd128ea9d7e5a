"""Requests that repeat an earlier one of their connection, answered without parsing.

A client sends the same heartbeat again and again. What a head means, and who may send
it, depends only on its bytes and on the connection. So a head that equals, byte for
byte but for the length of the body, one that was parsed, checked and answered on this
connection needs no second check.
"""

from collections.abc import Callable

from kafka_marshal.remote.repeated_heads import RepeatedHead


class Later:
    """A response that is made after its request. On the event loop."""

    __slots__ = ("_response", "_send", "is_cancelled")

    def __init__(self) -> None:
        self._response: bytes | None = None
        self._send: Callable[[bytes], None] | None = None
        self.is_cancelled = False

    def put(self, found: bytes) -> None:
        """Set the response, once; nothing happens if the connection is gone."""
        self._response = found
        if self._send is not None and not self.is_cancelled:
            self._send(found)

    def send_by(self, send: Callable[[bytes], None]) -> None:
        """Send the response once it is there."""
        self._send = send
        if self._response is not None:
            send(self._response)

    def cancel(self) -> None:
        """Send nothing: the connection is gone."""
        self.is_cancelled = True


Found = bytes | Later | None
Answer = Callable[[bytes], Found]
"""Returns the response to a body, at once or later; None where the request must be
parsed, or refused."""

# A client's library sends other headers with a body than without, and a task looks at
# the claims of some partitions in turn.
HEADS_MAX = 16


class RepeatedRequests:
    """Recognizes and answers the repeated requests of one connection.

    It gets each piece of data that arrives between two requests. On the event loop.
    """

    __slots__ = ("_begun", "_first", "_known")

    def __init__(self) -> None:
        self._first = b""
        self._begun = b""
        self._known: list[tuple[RepeatedHead, Answer]] = []

    def feed(self, data: bytes) -> tuple[bytes | Later, bytes]:
        """Answer a repeated request.

        Returns:
            The response, at once or later, or the bytes that are to be parsed; neither
            of them while the rest of the body is due.
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
        """Stop waiting for the rest of a body; return what is to be parsed."""
        data, self._begun = self._begun, b""
        return self._pass_on(data)[1]

    def _pass_on(self, data: bytes) -> tuple[bytes, bytes]:
        self._first = data
        return b"", data

    def on_response(self, answer: Answer | None) -> None:
        """Note the end of the response to a request that was parsed.

        Args:
            answer: Answers its repetitions, None where they must be parsed as well.
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
