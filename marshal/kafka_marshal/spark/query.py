"""Connections of one query in its process on the driver, and lookups of offsets.

Not part of ``source``, because this module imports the whole client: Spark also creates
readers in processes that only plan or read.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs

from kafka_marshal.client import Marshal
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    IdentityConflict,
    LogUnreadable,
    PositionError,
)
from kafka_marshal.identity import Identity, forget_client, home_of, host_label
from kafka_marshal.kafka_io.data import KafkaDataLog, KafkaOffsets
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.claims import Claims, Rules
from kafka_marshal.spark.options import EARLIEST, LATEST, STARTS, Bound, Options
from kafka_marshal.spark.planning import Origin

LOGGER = logging.getLogger("kafka_marshal")
CLOSE_MS_MAX = 5_000
# Time within which an earlier process with the same client_id has closed, and the
# pause between attempts.
OPEN_S_MAX, RETRY_S = 6.0, 0.2
OUTCOME_MS = 10_000
RANDOM_BYTES = 4
ASK_MS_MAX = 15_000
LOOKUP_CLOSE_MS_MAX = 1_000


class Cluster:
    """Lookups in the cluster for planning. Blocking; for one thread."""

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
        self, bound: Bound, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the offset that a bound means in each partition.

        Raises:
            ConfigurationError: The bound names a partition that is not read, or a start
                time after the last record, if it is strict.
        """
        if extra := (set(bound.offsets) | set(bound.times_ms)) - set(partitions):
            raise ConfigurationError(
                f"option {bound.option} names {min(extra)}, which is not read; correct "
                "it, or subscribe to that topic",
                setting=bound.option,
            )
        wanted = {p: bound.offsets.get(p, bound.everywhere) for p in partitions}
        times_ms = dict(bound.times_ms)
        if bound.time_ms is not None:
            times_ms = dict.fromkeys(partitions, bound.time_ms)
        for place, offset in self._offsets.at_times(times_ms, ASK_MS_MAX).items():
            if offset is None and bound.is_strict and bound.option in STARTS:
                raise ConfigurationError(
                    f"option {bound.option}: {place} has no record with a "
                    f"timestamp of {times_ms[place]} ms or later; choose an earlier "
                    "time, or set "
                    "startingOffsetsByTimestampStrategy to latest",
                    setting=bound.option,
                )
            wanted[place] = LATEST if offset is None else offset
        starts = [place for place, offset in wanted.items() if offset == EARLIEST]
        ends = [place for place, offset in wanted.items() if offset == LATEST]
        wanted |= self._offsets.starts(starts, ASK_MS_MAX)
        wanted |= self._offsets.ends(ends, ASK_MS_MAX)
        return wanted

    def within(
        self, bound: Bound, offsets: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Return resolved offsets, with named ones beyond a log's end moved to its end.

        Raises:
            PositionError: There are such offsets, and ``failOnDataLoss`` is set.
        """
        named = sorted(place for place, offset in bound.offsets.items() if offset >= 0)
        logs = self.ranges(named) if named else {}
        beyond = [place for place in named if offsets[place] > logs[place].end]
        if beyond and self._options.fails_on_data_loss:
            place = beyond[0]
            raise PositionError(
                f"{bound.option} has {offsets[place]} for {place}, whose log ends at "
                f"{logs[place].end}; correct it, or set failOnDataLoss to false to use "
                "the end instead",
                partition=place,
                requested=offsets[place],
                log_start=logs[place].start,
                log_end=logs[place].end,
            )
        return {**offsets, **self._offsets.ends(beyond, ASK_MS_MAX)}

    def topic_ids(self, topics: Collection[str]) -> dict[str, str]:
        """Return Kafka's ids of topics in hex; topics without one are absent."""
        found = self._data.describe(sorted(topics), ASK_MS_MAX)
        ids = {name: info.topic_id for name, info in found.items()}
        return {name: each.hex() for name, each in ids.items() if each is not None}

    def ranges(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, LogRange]:
        """Return start and end of existing partitions, with uncommitted records."""
        return self._data.ranges(partitions, ASK_MS_MAX)

    def ends(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return log ends of existing partitions, at the options' isolation level."""
        level = self._options.config.isolation_level
        return self._data.ends(partitions, ASK_MS_MAX, isolation_level=level)

    def starts(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the log start offsets of partitions that exist."""
        return {place: there.start for place, there in self.ranges(partitions).items()}

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._offsets.close(LOOKUP_CLOSE_MS_MAX)
        self._data.close(LOOKUP_CLOSE_MS_MAX)


@attrs.define(eq=False, kw_only=True)
class Query:
    """Client, cluster lookups and claims of one query, and the origin of its claims."""

    marshal: Marshal
    cluster: Cluster
    claims: Claims
    origin: Origin

    @classmethod
    def open(cls, options: Options, *, is_new: bool) -> "Query":
        """Join the group and start claiming.

        Raises:
            MarshalError: Opening failed; everything is closed again.
        """
        _handle_termination()
        cluster = Cluster(options)
        opened: list[Marshal | Cluster] = [cluster]
        try:
            starts = _starts(options, cluster, is_new=is_new)
            marshal = _opened_in_turn(options)
            opened.append(marshal)
            ranges = marshal.ranges(attrs.evolve(options.config, starts=starts))
        except BaseException:
            for each in reversed(opened):
                each.close()
            raise
        rules = Rules(
            is_at_most_once=options.config.is_at_most_once,
            fails_on_data_loss=options.fails_on_data_loss,
            max_delay_ms=options.max_delay_ms,
            outcome_ms=2 * marshal.engine.context.heartbeat_interval_ms + OUTCOME_MS,
            claims_max=options.config.claims_max,
        )
        if options.config.is_at_most_once and (
            options.min_partitions or options.max_task_offsets
        ):
            LOGGER.warning(
                "minPartitions and maxRecordsPerPartition are ignored with "
                "delivery = amo: a range is granted as a whole, to one task"
            )
        claims = Claims(ranges=ranges, logs=cluster, rules=rules)
        return cls(
            marshal=marshal,
            cluster=cluster,
            claims=claims,
            origin=_origin(options, cluster),
        )

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self.marshal.close(timeout_ms=CLOSE_MS_MAX)
        self.cluster.close()


def _opened_in_turn(options: Options) -> Marshal:
    """Open the client of a query, after an earlier process with its name has closed.

    Raises:
        IdentityConflict: That process does not close: the name belongs to another
            query, or to another source of this query.
    """
    until = time.monotonic() + OPEN_S_MAX
    while True:
        with ExitStack() as held:
            try:
                if options.client_id is not None and options.state_dir == "":
                    _lock_name(options, held)
                marshal = _opened(options)
            except IdentityConflict as error:
                if time.monotonic() >= until:
                    raise IdentityConflict(
                        f"{error}. Each source of a query is a client of its own: two "
                        "sources need a clientId each, and a group each if both read "
                        "the same topic",
                        holder=error.holder,
                        host=error.host,
                        age_ms=error.age_ms,
                    ) from error
            else:
                marshal.call_on_close(held.pop_all().close)
                return marshal
        time.sleep(RETRY_S)


def _opened(options: Options) -> Marshal:
    marshal = Marshal(
        **options.settings.arguments,
        group_id=options.group or "",
        client_id=options.client_id or _random_name(),
        state_dir=options.state_dir,
        sidecar=options.sidecar,
        sidecar_token_file=options.sidecar_token_file,
    )
    home = home_of(options.state_dir)
    if options.client_id is None and options.sidecar is None and home is not None:
        marshal.call_on_close(partial(_forget, marshal, home))
    return marshal


def _forget(marshal: Marshal, home: Path) -> None:
    """Remove the identity of a random client_id, which is never used again."""
    # There is no sidecar, so this is the context of an engine in this process.
    context: Any = marshal.engine.context
    with suppress(OSError, IdentityConflict):
        forget_client(
            home,
            domain=context.settled.format_id.hex(),
            group_id=marshal.group_id,
            client_id=marshal.client_id,
        )


def _lock_name(options: Options, held: ExitStack) -> None:
    """Lock the client_id of a query without identity directory, which has its own lock.

    Without a lock only the log shows that two processes use one client_id, half a
    heartbeat interval later (PROTOCOL 13).

    Raises:
        IdentityConflict: Another process of this user on this machine uses it.
    """
    settings = options.settings
    cluster = f"{settings.addresses} {settings.coordination_topic}"
    # If the lock file cannot be created, the log decides.
    with suppress(OSError):
        lock = Identity.take(
            Path(tempfile.gettempdir()) / f"kafka-marshal-names-{os.getuid()}",
            domain=sha256(cluster.encode()).hexdigest()[:32],
            group_id=options.group or "",
            client_id=options.client_id or "",
        )
        held.callback(lock.close)


def _starts(
    options: Options, cluster: Cluster, *, is_new: bool
) -> dict[TopicPartition, int]:
    """Return start offsets for partitions without a position; absent = earliest.

    As in Spark's own source, "latest" means the log end when the query first starts:
    all later records are read, and new partitions from their start. When the query
    starts again, options that no longer fit the log are no error.
    """
    bound = options.start or Bound(LATEST)
    if bound.is_plain and (bound.everywhere == EARLIEST or not is_new):
        return {}
    partitions = cluster.partitions()
    if is_new:
        return cluster.within(bound, cluster.resolve(bound, partitions))
    return cluster.resolve(bound.of_restart(partitions), partitions)


def _origin(options: Options, cluster: Cluster) -> Origin:
    """Return the group, delivery and log to which the claims of a query belong."""
    topic, ids = options.settings.coordination_topic, {}
    # With a sidecar, the driver may have no permission to describe that topic.
    with suppress(CoordinationError):
        ids = cluster.topic_ids({topic})
    return Origin(
        group=options.group or "",
        delivery=options.config.delivery.value,
        coordination=ids.get(topic, ""),
    )


def _random_name() -> str:
    """Return a unique client_id. Only with a fixed one can a restart resume claims."""
    return f"spark-{host_label()}-{os.urandom(RANDOM_BYTES).hex()}"


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
