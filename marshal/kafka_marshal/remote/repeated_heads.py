"""Heads of HTTP messages that repeat, so that they are parsed once.

Client and sidecar exchange the same few messages again and again. The meaning of a head
depends only on its bytes. So a head needs no parsing if an equal head, except for the
length of the body, was parsed before.
"""

import re

import attrs

BODY_BYTES_MAX = 16_384
HEAD_BYTES_MAX = 2_048
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,7})\r\n", re.IGNORECASE)
# Headers that demand more than one message with a body of known length.
_SPECIAL = re.compile(
    rb"\r\n(transfer-encoding|expect|upgrade|connection:(?![ \t]*keep-alive\r\n))",
    re.IGNORECASE,
)
_END = b"\r\n\r\n"


@attrs.frozen
class RepeatedHead:
    """The head of a request or response, split at the number of its content-length.

    Attributes:
        before: Its bytes before the number.
        after: Its bytes after the number, with the empty line. If the head has no
            content-length, this is None, and ``before`` is the whole head.
    """

    before: bytes
    after: bytes | None

    @classmethod
    def of(cls, data: bytes) -> "RepeatedHead | None":
        """Return the head at the beginning of these bytes.

        Returns:
            None if the head is incomplete, too long, or one that must be parsed.
        """
        head, end, _ = data.partition(_END)
        head += end
        # A parser may also end a line at a line feed without a carriage return.
        is_plain = bool(end) and head.count(b"\n") == head.count(b"\r\n")
        if not is_plain or len(head) > HEAD_BYTES_MAX or _SPECIAL.search(head):
            return None
        lengths = head.lower().count(b"content-length")
        if not lengths:
            return cls(head, None)
        found = _LENGTH.search(head)
        if found is None or lengths > 1:
            return None
        return cls(head[: found.start(1)], head[found.end(1) :])

    def message(self, body: bytes) -> bytes:
        """Return a message with this head and a body, for which it needs a length."""
        if self.after is None:
            assert not body
            return self.before
        return b"%b%d%b%b" % (self.before, len(body), self.after, body)

    def body_of(self, data: bytes) -> tuple[int, int] | None:
        """Find the body of a message that begins with this head.

        Returns:
            Where the body begins, and where it ends; None if the bytes begin with
            another head, or the body is too long.
        """
        if not data.startswith(self.before):
            return None
        start = len(self.before)
        if self.after is None:
            return start, start
        end = data.find(b"\r", start, start + 8)
        digits = data[start:end] if end > start else b""
        if not digits.isdigit() or not data.startswith(self.after, end):
            return None
        length = int(digits)
        if length > BODY_BYTES_MAX:
            return None
        begin = end + len(self.after)
        return begin, begin + length
