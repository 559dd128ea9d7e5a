"""What the driver's process of one query has open: it loads all that claims need.

Spark makes readers in other processes as well, which only plan or read.
"""

import logging
import os
import signal
import socket
import sys
import threading

import attrs

from kafka_marshal.client import Marshal
from kafka_marshal.engine import Delivery
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
    """What the driver's process of one query has open."""

    marshal: Marshal
    cluster: Cluster
    claims: Claims

    @classmethod
    def open(cls, options: Options, *, is_new: bool) -> "Query":
        """Join the group, and begin to claim.

        Raises:
            MarshalError: What went wrong; nothing is left open.
        """
        _end_in_order()
        settings = options.settings
        cluster = Cluster(options)
        opened: list[Marshal | Cluster] = [cluster]
        try:
            starts = _starts(options, cluster, is_new=is_new)
            marshal = Marshal(
                settings.bootstrap_servers,
                group_id=options.group or "",
                client_id=options.client_id or _drawn_name(),
                coordination_topic=settings.coordination_topic,
                options=settings.options,
                transport=settings.transport,
                state_dir=options.state_dir,
                sidecar=options.sidecar,
                sidecar_token_file=options.sidecar_token_file,
            )
            opened.append(marshal)
            ranges = marshal.ranges(
                *options.topics,
                pattern=options.pattern,
                delivery=Delivery(options.delivery),
                policy=options.policy,
                claims_max=options.claims_max,
                starts=starts,
                isolation_level=options.isolation_level,
            )
        except BaseException:
            for each in reversed(opened):
                each.close()
            raise
        rules = Rules(
            is_at_most_once=options.delivery == "amo",
            fails_on_data_loss=options.fails_on_data_loss,
            max_delay_ms=options.max_delay_ms,
            patience_ms=2 * marshal.engine.context.heartbeat_interval_ms + PATIENCE_MS,
            claims_max=options.claims_max,
        )
        if options.delivery == "amo" and (
            options.min_partitions or options.max_task_offsets
        ):
            LOGGER.warning(
                "minPartitions and maxRecordsPerPartition are ignored at most once: a "
                "range is granted as a whole, to one task"
            )
        claims = Claims(ranges, cluster, rules)
        return cls(marshal, cluster, claims)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self.marshal.close(timeout_ms=CLOSE_MS_MAX)
        self.cluster.close()


def _starts(
    options: Options, cluster: Cluster, *, is_new: bool
) -> dict[TopicPartition, int]:
    """Return where to begin what the group has no position of, but at the earliest.

    As in Spark's own source, "latest" is the end when the query first starts: what
    comes later, of new partitions too, is read from its beginning.
    """
    bound = options.start or Bound(LATEST)
    if bound.is_plain and (bound.everywhere == EARLIEST or not is_new):
        return {}
    return cluster.resolve(bound, cluster.partitions(), name="startingOffsets")


def _drawn_name() -> str:
    """Return a name that no other query has.

    Only a name that stays lets a restart resume at once what it held.
    """
    host = "".join(
        c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname()
    )
    return f"spark-{host[:100] or 'host'}-{os.urandom(RANDOM_BYTES).hex()}"


def _exit(number: int, _frame: object) -> None:
    # Once: the same comes again at once, and would end the way to ``stop``.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def _end_in_order() -> None:
    """Have Spark's way of ending this process run ``stop``, which releases claims."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def end_undisturbed() -> None:
    """Let nothing cut short what ``stop`` does.

    Spark asks this process to end more than once, and closes its connection, which
    alone ends it in order.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
