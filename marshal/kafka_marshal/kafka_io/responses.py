"""Responses of one connection of kafka-python, each received into a buffer of its size.

kafka-python 3.0 copies the records of a response five times on average: while it
receives them, and while it decodes what follows them. Here the records of a fetch stay
where they were received, as views. kafka-python decodes everything else, from a copy
without the records.
"""

import mmap
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Self

from kafka.errors import InvalidReceiveError, KafkaProtocolError
from kafka.protocol.consumer import FetchResponse
from kafka.protocol.parser import KafkaProtocol

from kafka_marshal.kafka_io.driving import CallerSelector
from kafka_marshal.native import KnownIndex, Receiver, compiled

_SIZE = struct.Struct(">i")
_INT16 = struct.Struct(">h")
# Fetch versions whose responses are understood, and those in which fields appear.
_VERSION_MIN, _VERSION_MAX = 4, 13
_LOG_START, _SESSION, _REPLICA, _FLEXIBLE, _TOPIC_ID = 5, 7, 11, 12, 13
_UUID_BYTES = 16
_VARINT_BYTES_MAX = 5
# Smaller responses get a new buffer each; buffers of larger ones are multiples of this.
_LARGE_BYTES = 1_048_576
# Buffers to keep: as many as are in use while a consumer hands out several partitions
# in turn, some of which wait for grants.
KEPT_MAX = 16
# A wake-up costs 50 us of kafka-python's time, by default for every 100 KB that arrive.
# A response that is received in the foreground causes one only after this many of its
# missing bytes have arrived.
_WAKEUP_BYTES = 1_048_576
_WAKEUP_BYTES_MIN = 65_536
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")
# On other systems such a mark may be larger than the socket's buffer.
_HAS_WAKEUP_MARK = sys.platform == "linux"
# Bytes of an aborted transaction, without its tags.
_ABORTED_BYTES = 16
# If this much of a response is missing, a thread of its own receives it. The handover
# takes as long as receiving a tenth of it.
BACKGROUND_BYTES = 1_048_576
_NOT_YET = (
    BlockingIOError,
    InterruptedError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)


class Cut(NamedTuple):
    """Where a response has the records of a partition, and their length, in bytes.

    ``place`` is the number of partitions before this one.
    """

    place: int
    length_at: int
    start: int
    end: int


# A length of 0 in ordinary versions, and in flexible ones.
_NO_RECORDS = (_SIZE.pack(0), b"\x01")


class _Walk:
    """Walks through a response, field by field; raises as ``struct`` and views do."""

    def __init__(self, frame: memoryview, version: int) -> None:
        self._frame = frame
        self.at = 0
        self.is_flexible = version >= _FLEXIBLE

    def skip(self, size: int) -> None:
        self.at += size
        if size < 0 or self.at > len(self._frame):
            raise ValueError(f"{size} bytes are missing")

    def varint(self) -> int:
        found = 0
        for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
            byte = self._frame[self.at]
            self.at += 1
            found |= (byte & 127) << shift
            if byte < 128:  # noqa: PLR2004 - the last byte of a varint
                return found
        raise ValueError("a varint has no end")

    def size(self, fixed: struct.Struct = _SIZE) -> int:
        """Return a length or a number of elements; -1 for null."""
        if self.is_flexible:
            return self.varint() - 1
        (found,) = fixed.unpack_from(self._frame, self.at)
        self.at += fixed.size
        return int(found)

    def skip_tags(self) -> None:
        if self.is_flexible:
            for _ in range(self.varint()):
                self.varint()
                self.skip(self.varint())


def find_records(frame: memoryview, version: int) -> list[Cut]:
    """Return where a Fetch response has records, partition by partition.

    Args:
        frame: The response, with its header.
        version: Its version, from 4 to 13.

    Raises:
        ValueError: It is no such response.
        IndexError: It ends too early.
        struct.error: It ends too early.
    """
    walk = _Walk(frame, version)
    walk.skip(4)  # correlation id
    walk.skip_tags()
    walk.skip(10 if version >= _SESSION else 4)
    # Index, error, high watermark, last stable offset, log start.
    fixed = 30 if version >= _LOG_START else 22
    found = []
    place = 0
    for _ in range(walk.size()):
        walk.skip(_UUID_BYTES if version >= _TOPIC_ID else walk.size(_INT16))
        for _ in range(walk.size()):
            walk.skip(fixed)
            for _ in range(walk.size()):
                walk.skip(_ABORTED_BYTES)
                walk.skip_tags()
            if version >= _REPLICA:
                walk.skip(4)
            length_at = walk.at
            size, start = walk.size(), walk.at
            walk.skip(max(0, size))
            if size > 0:
                found.append(Cut(place, length_at, start, walk.at))
            walk.skip_tags()
            place += 1
        walk.skip_tags()
    walk.skip_tags()
    if walk.at != len(frame):
        raise ValueError(f"{len(frame) - walk.at} bytes are left")
    return found


class ResponseBuffer(mmap.mmap):
    """Buffer for a response, with the known indexes of the records in it.

    Anonymous memory, in huge pages if the system has them: to clear and map ordinary
    pages takes longer than receiving.
    """

    def __new__(cls, size: int) -> Self:
        """Return a buffer of this size in bytes.

        Raises:
            MemoryError: There is no memory for it.
        """
        try:
            made = super().__new__(
                cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise MemoryError(f"{size} bytes for a response") from error
        if _HAS_HUGE_PAGES:
            with suppress(OSError):
                made.madvise(mmap.MADV_HUGEPAGE)
        return made

    def __init__(self, size: int) -> None:  # noqa: ARG002 - for __new__
        """Begin without indexes."""
        self._indexes: dict[int, KnownIndex] = {}

    def is_free(self) -> bool:
        """Return whether no view of it is left: only then it can be resized."""
        try:
            self.resize(len(self))
        except BufferError:
            return False
        except SystemError:
            pass  # this system cannot resize, but checks for views first
        return True

    def set_indexes(self, indexes: Iterable[KnownIndex]) -> None:
        """Replace the known indexes of its records."""
        self._indexes = {each[0]: each for each in indexes}

    def take_index(self, address: int, size: int) -> Any:
        """Return the index of the records at an address, once; None if unknown."""
        _, known, index = self._indexes.pop(address, (0, 0, None))
        return index if known == size else None


def take_index(records: memoryview) -> Any:
    """Return the known index of a response's records, as ``index_records`` would.

    None if it is unknown, or was returned before.
    """
    buffer = records.obj
    if not isinstance(buffer, ResponseBuffer) or compiled is None:
        return None
    return buffer.take_index(compiled.address_of(records), len(records))


class Buffers:
    """Buffers of large responses, which are used again once nothing refers to them.

    That saves time: the kernel clears each page of a new buffer. A small response frees
    all buffers: it shows that there is no backlog.
    """

    def __init__(self) -> None:
        self._kept: list[ResponseBuffer] = []

    def take(self, size: int) -> memoryview:
        """Return a buffer of this size, with any content."""
        if size < _LARGE_BYTES:
            self._kept.clear()
            return memoryview(bytearray(size))
        for buffer in self._kept:
            if len(buffer) >= size and buffer.is_free():
                buffer.set_indexes(())
                return memoryview(buffer)[:size]
        made = ResponseBuffer(_rounded(size))
        large = [each for each in self._kept if len(each) >= size]
        if len(large) < KEPT_MAX:
            self._kept = [*large, made]
        return memoryview(made)[:size]


def _rounded(size: int) -> int:
    """Return a buffer size that also fits responses which are slightly larger."""
    return -(-size // _LARGE_BYTES) * _LARGE_BYTES


class ResponseReader(KafkaProtocol):  # type: ignore[misc] # untyped library
    """Requests and responses of a connection, in place of kafka-python's.

    Used on the thread that runs the connection. ``missing`` returns the buffer to
    receive into; ``receive_bytes`` returns complete responses.

    Args:
        client_id: Client id of requests.
        bytes_max: Size of the largest response that is accepted.
    """

    def __init__(self, *, client_id: str, bytes_max: int) -> None:
        super().__init__(client_id=client_id, receive_message_max_bytes=bytes_max)
        self._bytes_max = bytes_max
        self._head = memoryview(bytearray(_SIZE.size))
        # The buffer that is being filled: for the size of a response, or a response.
        self._target = self._head
        self._at = 0
        self._buffers = Buffers()
        self._frames: deque[memoryview] = deque()
        self._error: Exception | None = None
        self._wakeup_bytes = 1
        # Receives large responses; made for the first one.
        self._receiver: Receiver | None = None
        self._is_filling = False
        # Where the next response is received before its size is known.
        self._ahead: memoryview | None = None
        # Size of the last response if it was large, else 0.
        self._large_bytes = 0
        # Fetch version of the last response; None if it was no fetch response.
        self._last_version: int | None = None

    @classmethod
    def replace(cls, other: Any, config: Mapping[str, Any]) -> Self:
        """Return a reader that replaces another, which has received nothing yet."""
        made = cls(
            client_id=config["client_id"],
            bytes_max=config["receive_message_max_bytes"],
        )
        made.in_flight_requests = other.in_flight_requests
        made.bytes_to_send = other.bytes_to_send
        return made

    def missing(self) -> memoryview:
        """Return where the next bytes belong; empty if no more are to be received."""
        if self._error is not None or len(self._frames) > len(self.in_flight_requests):
            return self._head[:0]
        return self._target[self._at :]

    def advance(self, count: int) -> None:
        """Note that this many of the missing bytes were received."""
        self._at += count
        while self._at == len(self._target):
            self._at = 0
            if self._target is not self._head:
                self._frames.append(self._target)
                self._target = self._head
                return
            (size,) = _SIZE.unpack(self._head)
            if not 0 <= size <= self._bytes_max:
                self._error = InvalidReceiveError(f"Invalid frame length: {size}")
                return
            self._large_bytes = size if size >= BACKGROUND_BYTES else 0
            ahead, self._ahead = self._ahead, None
            self._target = self._buffers.take(size) if ahead is None else ahead[:size]

    def receive_from(
        self, sock: socket.socket, selector: CallerSelector | None = None
    ) -> bool:
        """Receive the bytes that have arrived.

        Args:
            sock: A socket that does not block.
            selector: Event loop that waits for it, if a large response may be received
                in the background.

        Returns:
            True if bytes were received, or may still arrive. False at the end of the
            connection, and for an error, which the next read meets again.

        Raises:
            MemoryError: There is no memory for the response.
        """
        can_fill = (
            compiled is not None
            and selector is not None
            and not isinstance(sock, ssl.SSLSocket)
        )
        has_received = False
        if self._is_filling:
            assert self._receiver is not None
            assert selector is not None
            found = self._receiver.finish()
            if found is None:
                return True
            selector.set_receiver(sock, None)
            count, indexes = found
            self._fill_ended(count, indexes)
            # Without any bytes, the connection has ended.
            has_received = can_fill = count > 0
        try:
            try:
                while missing := self.missing():
                    if can_fill and self._fill(sock):
                        assert selector is not None
                        selector.set_receiver(sock, self._receiver)
                        return True
                    count = sock.recv_into(missing)
                    if not count:
                        break
                    has_received = True
                    self.advance(count)
            finally:
                if not self._is_filling:
                    self.limit_wakeups(sock)
        except _NOT_YET:
            return True
        except OSError:
            pass
        return has_received

    def _fill(self, sock: socket.socket) -> bool:
        """Receive a large response in the background; return whether that has begun.

        A response that follows a large one is assumed to be large as well.
        """
        is_begun = self._target is not self._head
        if is_begun and len(self.missing()) < BACKGROUND_BYTES:
            return False
        if not is_begun and (self._at or not self._large_bytes):
            return False
        if self._receiver is None:
            assert compiled is not None
            try:
                self._receiver = compiled.Receiver(sock.fileno())
            except OSError:
                return False  # such as at a limit of threads or files
        if is_begun:
            parts = (self._head[:0], self._target)
        else:
            self._ahead = self._buffers.take(_rounded(self._large_bytes))
            parts = (self._head, self._ahead)
        self._set_wakeups(sock, 1)
        self._receiver.start(*parts, self._at, self._version_to_come())
        self._is_filling = True
        return True

    def _fill_ended(self, count: int, indexes: Iterable[KnownIndex]) -> None:
        """Note what was received in the background: bytes, and indexes of records."""
        self._is_filling = False
        body = self._target if self._ahead is None else self._ahead
        assert isinstance(body.obj, ResponseBuffer)
        body.obj.set_indexes(indexes)
        if self._ahead is not None:
            head = min(count, _SIZE.size)
            count -= head
            if not count:
                self._ahead = None
            self.advance(head)
        self.advance(count)

    def limit_wakeups(self, sock: socket.socket) -> None:
        """Make a socket readable only once many of the missing bytes have arrived.

        Not with TLS, which may have read some of these bytes from the socket.

        Raises:
            OSError: The socket is closed.
        """
        if not _HAS_WAKEUP_MARK or isinstance(sock, ssl.SSLSocket):
            return
        count = min(len(self.missing()), _WAKEUP_BYTES)
        self._set_wakeups(sock, count if count >= _WAKEUP_BYTES_MIN else 1)

    def _set_wakeups(self, sock: socket.socket, count: int) -> None:
        if count != self._wakeup_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wakeup_bytes = count

    def receive_bytes(self, data: bytes) -> list[tuple[int, Any]]:
        """Add some more bytes, and return the responses that are complete.

        Raises:
            KafkaProtocolError: A response is invalid.
        """
        rest = memoryview(data)
        while rest:
            missing = self.missing()
            if not missing:
                break
            count = min(len(rest), len(missing))
            missing[:count] = rest[:count]
            self.advance(count)
            rest = rest[count:]
        found: list[tuple[int, Any]] = []
        while self._frames:
            found += self._decoded(self._frames.popleft())
        if self._error is not None:
            raise self._error
        return found

    def _decoded(self, frame: memoryview) -> list[tuple[int, Any]]:
        version = self._fetch_version()
        self._last_version = version
        try:
            cuts = [] if version is None else find_records(frame, version)
        except (ValueError, IndexError, struct.error):
            cuts = []  # kafka-python raises the error
        parts: list[bytes | memoryview] = []
        at = 0
        for cut in cuts:
            none = _NO_RECORDS[version is not None and version >= _FLEXIBLE]
            parts += frame[at : cut.length_at], none
            at = cut.end
        rest = b"".join((*parts, frame[at:]))
        try:
            found: list[tuple[int, Any]] = super().receive_bytes(
                _SIZE.pack(len(rest)) + rest
            )
        except KafkaProtocolError:
            raise
        except Exception as error:
            # Any other error would end the task that reads, but not the connection.
            raise KafkaProtocolError(f"Unable to decode response: {error}") from error
        if cuts:
            ((_, response),) = found
            places = [each for topic in response.responses for each in topic.partitions]
            for cut in cuts:
                places[cut.place].records = frame[cut.start : cut.end]
        return found

    def _version_to_come(self) -> int:
        """Return the Fetch version of the response being received; -1 for any other.

        If its request has not been sent yet, it is assumed to be like the last one.
        """
        place = len(self._frames)
        is_sent = place < len(self.in_flight_requests)
        version = self._fetch_version(place) if is_sent else self._last_version
        return -1 if version is None else version

    def _fetch_version(self, place: int = 0) -> int | None:
        """Return the version of an expected response if it is a known one of Fetch."""
        if len(self.in_flight_requests) <= place:
            return None
        header = self.in_flight_requests[place]
        version = int(header.request_api_version)
        is_fetch = header.request_api_key == FetchResponse.API_KEY
        return version if is_fetch and _VERSION_MIN <= version <= _VERSION_MAX else None
