"""What the cluster says of the coordination topic when a run begins."""

from collections.abc import Mapping

import attrs

from kafka_marshal.kafka_io import open_coordination_log
from kafka_marshal.spark.audit.folding import Source


@attrs.frozen
class Log:
    """The log at one moment.

    Attributes:
        cluster_id: The cluster.
        topic_id: Kafka's id of the topic, hex, None where the cluster has none.
        ends: Next offset to be written, by coordinating partition.
    """

    cluster_id: str
    topic_id: str | None
    ends: Mapping[int, int]


def look(source: Source) -> Log:
    """Return what there is to read.

    Raises:
        TopicMisconfigured: There is no such topic.
        CoordinationError: The cluster did not answer.
    """
    log = open_coordination_log(
        source.settings(), heartbeat_interval_ms=None, timeout_ms=source.timeout_ms
    )
    try:
        ends = dict(log.end_offsets(source.timeout_ms))
    finally:
        log.close(0)
    topic_id = log.topic_id
    return Log(log.cluster_id, None if topic_id is None else topic_id.hex(), ends)
