"""Has kafka-python read large answers where they are to lie.

It reads four kilobytes at a time, joins them, copies them into the answer's buffer
and copies that twice more. Where whole megabytes are fetched, this takes longer than
taking their records apart.
"""

import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from kafka.protocol.frame import KafkaBytes

from kafka_marshal.kafka_io.tolerant import change_transports
from kafka_marshal.kafka_io.untyped import Untyped

# Below this a copy costs less than seeing to it.
LARGE = 65_536
_PIECE = 4_096
_NOT_YET = (
    BlockingIOError,
    InterruptedError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)


class Answer:
    """Stands in for the buffer of an answer, which is decoded where it lies."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Untyped) -> None:
        """Go on with kafka-python's buffer, and with what it has received."""
        self.buffer = buffer

    def __len__(self) -> int:
        return len(self.buffer)

    def tell(self) -> int:
        """Return the place of the next byte."""
        at: int = self.buffer.tell()
        return at

    def seek(self, at: int) -> None:
        """Go to a place."""
        self.buffer.seek(at)

    def write(self, data: bytes) -> None:
        """Take what comes next."""
        self.buffer.write(data)

    def read(self, nbytes: int | None = None) -> "bytes | memoryview":
        """Return what comes next; as a view of it, where it is large."""
        start = self.tell()
        count = len(self) - start if nbytes is None else nbytes
        if count < LARGE:
            found: bytes = self.buffer.read(count)
            return found
        end = min(start + count, len(self))
        self.seek(end)
        return memoryview(self.buffer)[start:end]


def read_in_place(consumer: Untyped) -> None:
    """Have the connections that a consumer opens from now on read in place.

    Without the inner parts of kafka-python that this counts on, nothing changes.
    """
    change_transports(getattr(consumer, "_client", None), _change)


def _change(transport: Untyped) -> None:
    ordinary = transport._sock_recv  # noqa: SLF001 - there is no other way in
    transport._sock_recv = partial(receive, transport, ordinary)  # noqa: SLF001


def receive(
    transport: Any,  # noqa: ANN401 - kafka-python's
    ordinary: Callable[[], tuple[bytes, Exception | None]],
) -> tuple[bytes, Exception | None]:
    """Read what has come: into the answer under way, as far as it is a large one.

    All but its last byte is read so. That one goes the ordinary way, by which
    kafka-python learns that the answer is whole; and so does whatever goes wrong.

    Returns:
        What is for kafka-python to put where it belongs, and what went wrong.
    """
    sock = transport._sock  # noqa: SLF001 - there is no other way in
    parser = getattr(transport.get_protocol(), "parser", None)
    if sock is None or parser is None:
        return ordinary()
    try:
        answer = _under_way(parser)
        if answer is not None:
            _fill(sock, answer)
        elif not isinstance(sock, ssl.SSLSocket):
            # Only the beginning, so that the rest is read in place. (What TLS has
            # deciphered, nobody would be woken for.)
            piece = sock.recv(_PIECE)
            if piece:
                return piece, None
    except _NOT_YET:
        return b"", None
    except (OSError, EOFError):
        # It is met again at once.
        pass
    return ordinary()


def _under_way(parser: Untyped) -> "Answer | None":
    """Return the buffer of the large answer that is being read, if there is one."""
    if not getattr(parser, "_receiving", False):
        return None
    buffer = parser._rbuffer  # noqa: SLF001 - there is no other way in
    if type(buffer) is KafkaBytes and len(buffer) - buffer.tell() > LARGE:
        buffer = parser._rbuffer = Answer(buffer)  # noqa: SLF001
    return buffer if isinstance(buffer, Answer) else None


def _fill(sock: Untyped, answer: Answer) -> None:
    """Read all but the last byte; raise where no more has come yet."""
    at, last = answer.tell(), len(answer) - 1
    with memoryview(answer.buffer) as whole:
        try:
            while at < last:
                count = sock.recv_into(whole[at:last])
                if not count:
                    raise EOFError
                at += count
        finally:
            answer.seek(at)
