"""From options to partitions and offsets, by queries to the cluster."""

from collections.abc import Collection, Mapping, Sequence

from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.kafka_io import KafkaDataLog
from kafka_marshal.kafka_io.data import KafkaOffsets
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.options import EARLIEST, LATEST, Bound, Options

ASK_MS_MAX = 15_000
CLOSE_MS_MAX = 1_000


class Cluster:
    """Queries of the cluster that planning needs. Blocking; for one thread."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._data = KafkaDataLog(options.settings)
        self._offsets = KafkaOffsets(
            options.settings, isolation_level=options.config.isolation_level
        )

    def partitions(self) -> list[TopicPartition]:
        """Return the current partitions of the topics in the options.

        Raises:
            LogUnreadable: A topic does not exist.
        """
        options = self._options
        names: Sequence[str] = options.config.topics
        matches = options.config.matches(options.settings.coordination_topic)
        if matches is not None:
            names = list(filter(matches, self._data.topics(ASK_MS_MAX)))
        found = self._data.describe(names, ASK_MS_MAX)
        for name in names:
            if name not in found:
                raise LogUnreadable(
                    f"topic {name!r} does not exist on this cluster; check its name, "
                    "or create it first"
                )
        every = [
            TopicPartition(name, number)
            for name in sorted(found)
            for number in range(found[name].partition_count)
        ]
        if missing := set(options.assigned) - set(every):
            raise LogUnreadable(f"{min(missing)} does not exist on this cluster")
        return list(options.assigned) or every

    def resolve(
        self, bound: Bound, partitions: Sequence[TopicPartition], *, name: str
    ) -> dict[TopicPartition, int]:
        """Return the offset of a bound by partition.

        Raises:
            ConfigurationError: It names a partition that is not read, or a time after
                the last record.
        """
        if extra := (set(bound.offsets) | set(bound.times_ms)) - set(partitions):
            raise ConfigurationError(
                f"option {name} names {min(extra)}, which is not read; correct it, or "
                "subscribe to that topic",
                setting=name,
            )
        wanted = {p: bound.offsets.get(p, bound.everywhere) for p in partitions}
        times_ms = dict(bound.times_ms)
        if bound.time_ms is not None:
            times_ms = dict.fromkeys(partitions, bound.time_ms)
        for place, offset in self._offsets.at_times(times_ms, ASK_MS_MAX).items():
            if offset is None and bound.is_strict and name.startswith("starting"):
                raise ConfigurationError(
                    f"option {name}: {place} has no record as young as "
                    f"{times_ms[place]}; choose an earlier time, or set "
                    "startingOffsetsByTimestampStrategy to latest",
                    setting=name,
                )
            wanted[place] = LATEST if offset is None else offset
        starts = [place for place, offset in wanted.items() if offset == EARLIEST]
        ends = [place for place, offset in wanted.items() if offset == LATEST]
        wanted |= self._offsets.starts(starts, ASK_MS_MAX)
        wanted |= self._offsets.ends(ends, ASK_MS_MAX)
        return wanted

    def topic_ids(self, topics: Collection[str]) -> dict[str, str]:
        """Return Kafka's ids of topics in hex; topics without one are absent."""
        found = self._data.describe(sorted(topics), ASK_MS_MAX)
        ids = {name: info.topic_id for name, info in found.items()}
        return {name: each.hex() for name, each in ids.items() if each is not None}

    def ranges(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, LogRange]:
        """Return the offset range of each partition, with uncommitted records."""
        return self._data.ranges(partitions, ASK_MS_MAX)

    def ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the readable end of each partition."""
        return self._offsets.ends(partitions, ASK_MS_MAX)

    def starts(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the log start offset of each partition."""
        return self._offsets.starts(partitions, ASK_MS_MAX)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._offsets.close(CLOSE_MS_MAX)
        self._data.close(CLOSE_MS_MAX)
