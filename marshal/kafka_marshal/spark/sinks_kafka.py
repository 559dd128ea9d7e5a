"""Each row into a topic once: the broker itself keeps out whoever lost its claim.

Each topic partition that is read has a transactional id of its own. Whoever has the
claim begins with it before it writes, and from then on the broker refuses everybody
who began earlier, a process that slept through its own end included. Records and how
far they go stand in one transaction, so that what is replayed is not written again.
Consumers of the topic read with ``isolation.level = read_committed``.
"""

import logging
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io import ConnectionSettings
from kafka_marshal.protocol.codec import is_topic
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.fencing import Fence, require_columns, write_by_claim
from kafka_marshal.spark.options import parse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from kafka_marshal.kafka_io.fast.transactions import Outgoing

WRITE_MS_MAX = 60_000

_LOGGER = logging.getLogger("kafka_marshal")


@attrs.frozen
class KafkaSink:
    """A function for ``foreachBatch`` that writes each row to a topic once.

    The rows need the columns ``key`` and ``value`` beside those that say where they
    come from. ::

        sink = KafkaSink.of(OPTIONS, topic="bills")
        stream.writeStream.foreachBatch(sink).start()

    Attributes:
        topic: Topic to write to.
        fence: Of the stream.
        settings: Where the cluster is, of both topics.
        name: Name of the consumer group of Kafka's that keeps the positions, and
            first part of the transactional ids.
    """

    topic: str
    fence: Fence
    settings: ConnectionSettings
    name: str

    @classmethod
    def of(
        cls, options: Mapping[str, str], *, topic: str, name: str | None = None
    ) -> "KafkaSink":
        """Return the sink of a stream, by the options that it was made with.

        Raises:
            ConfigurationError: An option is wrong, or the extra ``fast`` is missing.
        """
        parsed = parse(options)
        fence = Fence.of(options)
        if not is_topic(topic):
            raise ConfigurationError(
                f"{topic!r} is no valid topic name", setting="topic"
            )
        _require_fast()
        name = name or f"{fence.group}.{topic}"
        return cls(topic, fence, parsed.settings, name)

    def __call__(self, df: "DataFrame", batch_id: int) -> None:  # noqa: ARG002
        """Write a batch; what was written before, or is stale, is left out.

        Raises:
            ConfigurationError: A column is missing.
        """
        require_columns(df)
        if "value" not in df.columns:
            raise ConfigurationError(
                "the batch has no column value, which is what is written",
                setting="value",
            )
        # A topic partition has one producer, so its rows have to be in one task.
        write_by_claim(df, self.write)

    def write(self, place: TopicPartition, *, token: str, rows: "Iterator[Row]") -> int:
        """Write rows of one topic partition and claim, in offset order.

        Returns:
            How many were written: none where the token is stale.

        Raises:
            ClaimLost: Somebody began after us with the same id; nothing was written.
            MarshalError: It was not confirmed; another try writes what is missing.
        """
        from kafka_marshal.kafka_io.fast.transactions import Transactions

        with Transactions(
            self.settings,
            f"{self.name}/{self.fence.group}/{place.topic}/{place.partition}",
            group_id=self.name,
            timeout_ms=WRITE_MS_MAX,
        ) as transactions:
            # Only now: whoever wins the claim after this look begins after us, and
            # the broker takes nothing from us then.
            if not self.fence.holds(*place, token=token):
                _LOGGER.warning(
                    "rows of %s under token %s are left out: the claim is over",
                    *(place, token),
                )
                return 0
            position = transactions.position(place) or 0
            new = [row for row in rows if row.offset >= position]
            if new:
                transactions.write(
                    self.topic,
                    (_outgoing(row) for row in new),
                    partition=place,
                    position=new[-1].offset + 1,
                )
            return len(new)


def _outgoing(row: "Row") -> "Outgoing":
    from kafka_marshal.kafka_io.fast.transactions import Outgoing

    return Outgoing(_bytes(getattr(row, "key", None)), _bytes(row.value))


def _bytes(value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return str(value).encode()


def _require_fast() -> None:
    if find_spec("confluent_kafka") is None:
        raise ConfigurationError(
            "writing in transactions needs the extra 'fast'; run: pip install "
            "'kafka-marshal[fast]', on the executors as well",
            setting="fast",
        )
