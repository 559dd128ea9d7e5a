"""Connections of the driver's process of one query.

Apart from ``source``, because it loads the whole client: Spark also makes readers in
processes that only plan or read.
"""

import logging
import os
import signal
import socket
import sys
import threading

import attrs

from kafka_marshal.client import Marshal
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.claims import Claims, Rules
from kafka_marshal.spark.offset_resolution import Cluster
from kafka_marshal.spark.options import EARLIEST, LATEST, Bound, Options

LOGGER = logging.getLogger("kafka_marshal")
CLOSE_MS_MAX = 5_000
PATIENCE_MS = 10_000
RANDOM_BYTES = 4


@attrs.define(eq=False)
class Query:
    """Client, cluster queries and claims of one query."""

    marshal: Marshal
    cluster: Cluster
    claims: Claims

    @classmethod
    def open(cls, options: Options, *, is_new: bool) -> "Query":
        """Join the group and start claiming.

        Raises:
            MarshalError: Opening failed; everything is closed again.
        """
        _handle_termination()
        settings = options.settings
        cluster = Cluster(options)
        opened: list[Marshal | Cluster] = [cluster]
        try:
            starts = _starts(options, cluster, is_new=is_new)
            marshal = Marshal(
                settings.bootstrap_servers,
                group_id=options.group or "",
                client_id=options.client_id or _random_name(),
                coordination_topic=settings.coordination_topic,
                options=settings.options,
                transport=settings.transport,
                state_dir=options.state_dir,
                sidecar=options.sidecar,
                sidecar_token_file=options.sidecar_token_file,
            )
            opened.append(marshal)
            ranges = marshal.open_ranges(attrs.evolve(options.config, starts=starts))
        except BaseException:
            for each in reversed(opened):
                each.close()
            raise
        rules = Rules(
            is_at_most_once=options.config.is_at_most_once,
            fails_on_data_loss=options.fails_on_data_loss,
            max_delay_ms=options.max_delay_ms,
            patience_ms=2 * marshal.engine.context.heartbeat_interval_ms + PATIENCE_MS,
            claims_max=options.config.claims_max,
        )
        if options.config.is_at_most_once and (
            options.min_partitions or options.max_task_offsets
        ):
            LOGGER.warning(
                "minPartitions and maxRecordsPerPartition are ignored at most once: a "
                "range is granted as a whole, to one task"
            )
        claims = Claims(ranges=ranges, logs=cluster, rules=rules)
        return cls(marshal, cluster, claims)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self.marshal.close(timeout_ms=CLOSE_MS_MAX)
        self.cluster.close()


def _starts(
    options: Options, cluster: Cluster, *, is_new: bool
) -> dict[TopicPartition, int]:
    """Return start offsets for partitions without a position; absent = earliest.

    As in Spark's own source, "latest" is the end when the query first starts: later
    records, also of new partitions, are read from the start.
    """
    bound = options.start or Bound(LATEST)
    if bound.is_plain and (bound.everywhere == EARLIEST or not is_new):
        return {}
    return cluster.resolve(bound, cluster.partitions(), name="startingOffsets")


def _random_name() -> str:
    """Return a unique client id.

    Only with a fixed client id does a restart resume its claims at once.
    """
    host = "".join(
        c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname()
    )
    return f"spark-{host[:100] or 'host'}-{os.urandom(RANDOM_BYTES).hex()}"


def _exit(number: int, _frame: object) -> None:
    # Ignore further signals, which would interrupt ``stop``.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def _handle_termination() -> None:
    """Make Spark's SIGTERM run ``stop``, which releases the claims."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def ignore_termination() -> None:
    """Ignore SIGTERM while ``stop`` runs.

    Spark sends it more than once, and closes its connection, which is enough to end the
    process in order.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
