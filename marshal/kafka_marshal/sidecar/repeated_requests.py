"""Requests that repeat an earlier one of their connection, answered without parsing.

A client sends the same heartbeat again and again. What a head means, and who may send
it, depends only on its bytes and on the connection. So a head that equals, byte for
byte but for the length of the body, one that was parsed, checked and answered on this
connection needs no second check.
"""

import re
from collections.abc import Callable

import attrs

Answer = Callable[[bytes], bytes | None]
"""Returns the JSON response to a body at once; None where that takes longer, or the
request must be refused."""

BODY_BYTES_MAX = 16_384
# A client's library sends other headers with a body than without.
HEADS_MAX = 2
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,7})\r\n", re.IGNORECASE)
# Heads that ask for more than one response with a body of known length.
_SPECIAL = re.compile(
    rb"\r\n(transfer-encoding|expect|upgrade|connection:(?![ \t]*keep-alive\r\n))",
    re.IGNORECASE,
)
_END = b"\r\n\r\n"


@attrs.frozen
class RepeatedHead:
    """The head of an answered request, around the number of its content-length.

    Attributes:
        before: Its bytes before the number.
        after: Its bytes after the number, with the empty line.
    """

    before: bytes
    after: bytes

    @classmethod
    def of(cls, data: bytes) -> "RepeatedHead | None":
        """Return the head that bytes begin with.

        Returns:
            None if the head is incomplete, or means more than its body's length.
        """
        head, end, _ = data.partition(_END)
        head += end
        # A parser may end lines at a bare line feed, too.
        is_plain = bool(end) and head.count(b"\n") == head.count(b"\r\n")
        if not is_plain or head.lower().count(b"content-length") != 1:
            return None
        found = _LENGTH.search(head)
        if found is None or _SPECIAL.search(head):
            return None
        return cls(head[: found.start(1)], head[found.end(1) :])

    def body_of(self, data: bytes) -> tuple[int, int] | None:
        """Find the body of a request that begins with this head.

        Returns:
            Where the body begins, and where it ends; None if the bytes begin with
            another head, or one whose body is long.
        """
        if not data.startswith(self.before):
            return None
        start = len(self.before)
        end = data.find(b"\r", start, start + 8)
        digits = data[start:end] if end > start else b""
        if not digits.isdigit() or not data.startswith(self.after, end):
            return None
        length = int(digits)
        if length > BODY_BYTES_MAX:
            return None
        begin = end + len(self.after)
        return begin, begin + length


class RepeatedRequests:
    """Recognizes and answers the repeated requests of one connection.

    It gets each piece of data that arrives between two requests. On the event loop.
    """

    __slots__ = ("_begun", "_first", "_known")

    def __init__(self) -> None:
        self._first = b""
        self._begun = b""
        self._known: list[tuple[RepeatedHead, Answer]] = []

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Answer a repeated request.

        Returns:
            The response, or the bytes that are to be parsed; neither of them while the
            rest of the body is due.
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
            body = answer(data[begin:]) if len(data) == end else None
            if body is not None:
                return response(body), b""
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
