"""A sink that writes each row to a topic exactly once; the broker fences stale owners.

Each source partition has its own transactional id. Before the owner of the claim
writes, it initializes a producer with this id. From then on the broker refuses earlier
producers with the id, even if their process was only suspended. Records and the
position are written in one transaction, so repeated rows are not written again.
Consumers of the topic must read with ``isolation.level = read_committed``.
"""

import logging
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.outgoing import MURMUR2_RANDOM, PARTITIONERS, Outgoing
from kafka_marshal.protocol.codec import is_topic
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.fencing import (
    SINK_COLUMNS,
    Fence,
    require_columns,
    warn_of_written_rows,
    write_by_claim,
)
from kafka_marshal.spark.options import parse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

WRITE_MS_MAX = 60_000
# Type of the column ``headers``, as in Spark's own source and sink.
_HEADERS = "array<struct<key:string,value:binary>>"
_NESTED = ("array<", "map<", "struct<")

_LOGGER = logging.getLogger("kafka_marshal")


@attrs.frozen
class KafkaSink:
    """A function for ``foreachBatch`` that writes each row to a topic once.

    The rows need the column ``value`` and those of fencing (``SINK_COLUMNS``). Columns
    ``key`` and ``headers`` are written if they exist.
    ::

        sink = KafkaSink.of(OPTIONS, topic="bills")
        stream.writeStream.foreachBatch(sink).start()

    Attributes:
        topic: Target topic.
        fence: Fence of the stream.
        settings: Connection to the cluster of both topics.
        name: Kafka consumer group that stores the positions, and prefix of
            transactional ids. Two sinks in one ``foreachBatch`` need different names.
        partitioner: How a key chooses the partition, by the names of librdkafka.
    """

    topic: str
    fence: Fence
    settings: ConnectionConfig
    name: str
    partitioner: str = attrs.field(default=MURMUR2_RANDOM, kw_only=True)

    @classmethod
    def of(
        cls,
        options: Mapping[str, str],
        *,
        topic: str,
        name: str | None = None,
        partitioner: str = MURMUR2_RANDOM,
    ) -> "KafkaSink":
        """Return the sink of a stream, from its options.

        Args:
            options: Options of the stream.
            topic: Target topic.
            name: Prefix of transactional ids, and Kafka consumer group that stores the
                positions; by default made of group and topic.
            partitioner: How a key chooses the partition: by default as Java's clients
                and Spark's own sink do; ``consistent_random`` as clients of librdkafka
                do by default. In a topic with records, another partitioner than before
                sends later records of a key to other partitions.

        Raises:
            ConfigurationError: An option is wrong, or the extra ``fast`` is missing.
        """
        parsed = parse(options)
        fence = Fence.of(options)
        if not is_topic(topic):
            raise ConfigurationError(
                f"{topic!r} is no valid topic name", setting="topic"
            )
        if partitioner not in PARTITIONERS:
            raise ConfigurationError(
                f"partitioner {partitioner!r} is none of {', '.join(PARTITIONERS)}",
                setting="partitioner",
            )
        _require_fast()
        name = name or f"{fence.group}.{topic}"
        return cls(topic, fence, parsed.settings, name, partitioner=partitioner)

    def __call__(self, df: "DataFrame", batch_id: int) -> None:  # noqa: ARG002
        """Write a batch without rows that are stale or written already.

        Raises:
            ConfigurationError: A column is missing, or is of another type.
        """
        require_columns(df, SINK_COLUMNS)
        if "value" not in df.columns:
            raise ConfigurationError(
                "the batch has no column value, which KafkaSink writes; add it",
                setting="value",
            )
        types = dict(df.dtypes)
        for name in ("key", "value"):
            if types.get(name, "").startswith(_NESTED):
                raise ConfigurationError(
                    f"the column {name} has the type {types[name]}, which has no "
                    "standard form as bytes; convert it, for example with to_json",
                    setting=name,
                )
        if "headers" in df.columns and (found := types["headers"]) != _HEADERS:
            raise ConfigurationError(
                f"the column headers has the type {found}, and headers of records are "
                f"{_HEADERS}; rename or drop the column, or read with option "
                "includeHeaders = true",
                setting="headers",
            )
        # A source partition has one producer, so its rows must be in one task.
        write_by_claim(df, self.write)

    def write(
        self,
        place: TopicPartition,
        *,
        token: str,
        rows: "Iterable[Row]",
        topic_id: str = "",
    ) -> int:
        """Write rows of one topic partition and claim, in offset order.

        Args:
            place: The topic partition.
            token: Token of the claim.
            rows: Rows that were read under the claim.
            topic_id: Kafka's id of the topic in hex, empty if unknown. A position that
                was stored for another id does not count.

        Returns:
            Number of written rows; 0 if the token is stale.

        Raises:
            ClaimLost: A later producer has the same id; nothing was written.
            MarshalError: The outcome is unknown; a retry writes the missing rows.
        """
        from kafka_marshal.kafka_io.fast.transactions import Transactions

        with Transactions(
            self.settings,
            f"{self.name}/{self.fence.group}/{place.topic}/{place.partition}",
            group_id=self.name,
            timeout_ms=WRITE_MS_MAX,
            partitioner=self.partitioner,
        ) as transactions:
            # Check after opening the producer: an owner that wins the claim after this
            # check opens a later producer, and then the broker refuses this one.
            if not self.fence.holds(*place, token=token):
                _LOGGER.warning(
                    "rows of %s under token %s are dropped: the claim has ended",
                    *(place, token),
                )
                return 0
            position = transactions.position(place, topic_id=topic_id) or 0
            rows = list(rows)
            new = [row for row in rows if row.offset >= position]
            if rows and not new:
                warn_of_written_rows(place, position, option="name")
            if new:
                transactions.write(
                    (_outgoing(self.topic, row) for row in new),
                    partition=place,
                    position=new[-1].offset + 1,
                    metadata=topic_id,
                )
            return len(new)


def _outgoing(topic: str, row: "Row") -> Outgoing:
    headers = getattr(row, "headers", None) or ()
    return Outgoing(
        topic,
        _bytes(getattr(row, "key", None)),
        _bytes(row.value),
        tuple((each["key"], _bytes(each["value"])) for each in headers),
    )


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
