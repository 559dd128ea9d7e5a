"""Reading exact ranges, as columns: ``slices.SliceReader`` over librdkafka."""

import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as FastPartition

from kafka_marshal.errors import CoordinationError, InvalidTransition
from kafka_marshal.kafka_io.fast.clients import Client, close_consumer, new_consumer
from kafka_marshal.kafka_io.fast.reader import FETCHING
from kafka_marshal.kafka_io.fast.records import headers_of
from kafka_marshal.kafka_io.fast.translate import Access, translated
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.slices import (
    FIRST_RECORDS,
    POLL_MS,
    Patience,
    Slice,
    chunk_like,
    outside,
    uncollected,
)
from kafka_marshal.protocol.types import TopicPartition

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.untyped import Untyped

_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001 - its public name
_OUT_OF_PLACE = (
    KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001
    KafkaError._LOG_TRUNCATION,  # noqa: SLF001
    KafkaError.OFFSET_OUT_OF_RANGE,
)
_NO_GROUP = KafkaError.GROUP_AUTHORIZATION_FAILED
# What is asked for is there: an answer that waits for more only delays the next range.
_WAIT_MS = 10
# What is fetched beyond a range's end is thrown away, and it is as much as may wait
# here: two fetches, and one that is under way.
_QUEUE_KBYTES = 2_048
_RANGE_S = 2.0
_CLOSE_S = 5.0


class FastSliceReader:
    """``SliceReader`` over librdkafka."""

    def __init__(
        self, settings: ConnectionSettings, *, isolation_level: str, client_rack: str
    ) -> None:
        """Remember how to connect; the first range does."""
        self._settings = settings
        self._config = {
            **FETCHING,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": _WAIT_MS,
            "queued.max.messages.kbytes": _QUEUE_KBYTES,
            "isolation.level": isolation_level,
            "client.rack": client_rack,
        }
        self._client: Client | None = None
        self._pid = os.getpid()

    def read(
        self,
        partition: TopicPartition,
        span: tuple[int, int],
        *,
        timeout_ms: int,
        with_headers: bool,
    ) -> Iterator[Slice]:
        """Read every record of a range; see ``SliceReader``."""
        if os.getpid() != self._pid:
            raise InvalidTransition("a reader belongs to the process that opened it")
        at, end = span
        if at >= end:
            return
        if self._client is None:
            self._client = new_consumer(self._settings, self._config)
        handle = self._client.handle
        patience = Patience(partition, end, timeout_ms)
        chunk = FIRST_RECORDS
        try:
            handle.assign([FastPartition(partition.topic, partition.partition, at)])
            while at < end:
                # It waits until all are there that were asked for; so no more are.
                most = min(chunk, end - at)
                with uncollected():
                    messages = handle.consume(most, POLL_MS / 1000)
                    sound, ahead = self._sound(messages, partition, span=(at, end))
                    rows = _columns(sound, with_headers=with_headers)
                    del messages, sound
                if rows is not None:
                    chunk = chunk_like(rows)
                    yield rows
                if ahead > at:
                    at = ahead
                    patience.renew()
                else:
                    patience.check(at, "librdkafka")
        except KafkaException as error:
            raise self._told(error) from error
        finally:
            with suppress(KafkaException, RuntimeError):
                handle.unassign()

    def close(self) -> None:
        """Let go of every resource. Idempotent."""
        client, self._client = self._client, None
        if client is not None and os.getpid() == self._pid:
            close_consumer(client).join(timeout=_CLOSE_S)

    def _sound(
        self, messages: list[Any], partition: TopicPartition, *, span: tuple[int, int]
    ) -> tuple[list[Any], int]:
        """Return records of the range, and the next offset to look for."""
        first, end = span
        ahead = first
        if any(map(Message.error, messages)):
            sound = []
            for message in messages:
                error = message.error()
                if error is None:
                    sound.append(message)
                elif error.code() == _EOF:
                    # The log is read to here: what lies below and did not come has
                    # no record.
                    ahead = max(ahead, message.offset())
                elif error.code() in _OUT_OF_PLACE:
                    raise self._outside(partition, span)
                elif error.code() != _NO_GROUP:
                    raise KafkaException(error)
            messages = sound
        if self._client is not None and self._client.refusal is not None:
            raise self._client.refusal
        if messages:
            ahead = max(ahead, messages[-1].offset() + 1)
            if messages[0].offset() < first or messages[-1].offset() >= end:
                messages = [m for m in messages if first <= m.offset() < end]
        return messages, ahead

    def _outside(self, partition: TopicPartition, span: tuple[int, int]) -> Exception:
        assert self._client is not None
        place = FastPartition(*partition)
        until = time.monotonic() + _RANGE_S
        while time.monotonic() < until:
            with suppress(KafkaException):
                found = self._client.handle.get_watermark_offsets(place, timeout=1.0)
                if found is not None:
                    start, end = found
                    return outside(partition, span, log=(start, end))
        return CoordinationError(
            f"offset {span[0]} of {partition} was refused, and the range of its log "
            "could not be asked; try again"
        )

    def _told(self, error: Exception) -> Exception:
        # Whatever it knows now, a new one knows nothing.
        client, self._client = self._client, None
        if client is not None:
            close_consumer(client)
        return translated(
            error,
            doing="Reading data partitions",
            access=Access.READ,
            addresses=self._settings.addresses,
        )


def _columns(messages: Sequence[Any], *, with_headers: bool) -> Slice | None:
    """Take messages apart; no Python frame per record, but for headers."""
    if not messages:
        return None
    stamps = array("q", chain.from_iterable(map(Message.timestamp, messages)))
    return Slice(
        _offsets(messages),
        stamps[1::2],
        _kinds(stamps[::2]),
        list(map(Message.key, messages)),
        list(map(Message.value, messages)),
        [headers_of(each) for each in messages] if with_headers else None,
    )


def _offsets(messages: Sequence[Any]) -> Sequence[int]:
    first, last = messages[0].offset(), messages[-1].offset()
    # Offsets grow, so as many as there are places leave no gap.
    if last - first + 1 == len(messages):
        return range(first, last + 1)
    found: list[Untyped] = list(map(Message.offset, messages))
    return found


def _kinds(kinds: "array[int]") -> "array[int]":
    """Return PROTOCOL 2.1's numbers: librdkafka's are the wire's and one."""
    if kinds == kinds[:1] * len(kinds):
        return array("i", [kinds[0] - 1]) * len(kinds)
    return array("i", [kind - 1 for kind in kinds])
