"""The work of one Spark task: checks the claim, and reads the range.

Runs in Spark's Python workers. A worker executes many tasks, and keeps only connections
between them.
"""

import gc
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kafka_marshal.clock import SystemClock
from kafka_marshal.errors import ClaimLost, PositionError
from kafka_marshal.kafka_io.slices import SliceReaders, TopicReplaced
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal.spark.java import python_options
from kafka_marshal.spark.options import Options
from kafka_marshal.spark.planning import Task
from kafka_marshal.spark.rows import arrow_schema, batch_maker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafka_marshal.grants import ClaimRef, GrantClient

LOGGER = logging.getLogger("kafka_marshal")
GRANT_MS_MAX = 30_000
# A check takes one or two round trips, a few percent of this time.
CHECK_MS = 500

_slices = SliceReaders()
# Id of this process once its heap is frozen; a forked child has another id.
_frozen: set[int] = set()
# Like the clock of leases, it continues while the machine is suspended.
_clock = SystemClock()


def read(
    task: Task, options: Options, *, schema: "StructType"
) -> Iterator["pa.RecordBatch"]:
    """Read one range as Arrow batches.

    At least once, the claim is checked against an up-to-date fold of the log before the
    first row, and again every ``CHECK_MS``: the driver may have died, and another owner
    may process the partition. At most once, the task requests a grant and reads only
    the granted offsets, which no other attempt gets (PROTOCOL 6.2).

    Raises:
        ClaimLost: The claim has ended.
        PositionError: Offsets of the range are lost, and ``failOnDataLoss`` is set.
        CoordinationError: The cluster or the sidecar did not answer.
    """
    checked_ms = _clock.now_ms()
    for span in allowed_ranges(task, options):
        for batch in _rows(task, span, options=options, schema=schema):
            now_ms = _clock.now_ms()
            if not options.config.is_at_most_once and now_ms - checked_ms >= CHECK_MS:
                _require_current(task, options)
                checked_ms = now_ms
            yield batch
    _freeze_heap()


def _freeze_heap() -> None:
    """Exclude the loaded modules of a Spark worker from garbage collection.

    Spark runs the collector after each task. With Spark, Arrow and Kafka loaded that
    takes 50 ms, as long as the task itself.
    """
    from pyspark import TaskContext

    if os.getpid() in _frozen or TaskContext.get() is None:
        return
    _frozen.add(os.getpid())
    gc.collect()
    gc.freeze()


def allowed_ranges(task: Task, options: Options) -> list[OffsetRange]:
    """Return the offsets that this attempt may read.

    Raises:
        ClaimLost: The claim has ended.
    """
    wanted = OffsetRange(task.first, task.end)
    if task.claim is None:
        return [wanted]
    if options.config.is_at_most_once:
        client = _grant_client(options)
        return _granted(client, task.claim, wanted)
    _require_current(task, options)
    return [wanted]


def _require_current(task: Task, options: Options) -> None:
    """Raise ``ClaimLost`` unless the claim is current in an up-to-date fold."""
    claim = task.claim
    if claim is None:
        return
    client = _grant_client(options)
    if not client.is_current(claim, timeout_ms=GRANT_MS_MAX):
        raise ClaimLost(
            f"{task.partition} is no longer held under token {claim.token}, and the "
            f"task of offsets {task.first} to {task.end - 1} reads no further: another "
            "process has it, or the driver could not renew it; start the query again "
            "from its checkpoint",
            reason="stale_token",
        )


def _grant_client(options: Options) -> "GrantClient":
    """Return this process's client for grants; batch reads never load it."""
    from kafka_marshal.grants import open_grant_client

    return open_grant_client(
        python_options(options.connection), sidecar=options.sidecar
    )


def _granted(
    client: "GrantClient", claim: "ClaimRef", wanted: OffsetRange
) -> list[OffsetRange]:
    found: list[OffsetRange] = []
    while wanted.count:
        granted = client.acquire(claim, wanted, timeout_ms=GRANT_MS_MAX)
        if granted is None:
            LOGGER.warning(
                "range_not_granted %s-%d offsets %d to %d, which this task does not "
                "read: they were granted to an earlier attempt of this task, or to an "
                "earlier action on this batch (persist() a batch that is used twice), "
                "or the claim has ended",
                *(claim.topic, claim.partition, wanted.first, wanted.last),
            )
            break
        found.append(granted)
        # A grant may cover less than was requested.
        wanted = OffsetRange(granted.end, wanted.end)
    return found


def _rows(
    task: Task, span: OffsetRange, *, options: Options, schema: "StructType"
) -> Iterator["pa.RecordBatch"]:
    token = None if task.claim is None else task.claim.token
    make = batch_maker(
        arrow_schema(schema),
        task.partition,
        token=token,
        topic_id=task.topic_id or None,
    )
    settings: dict[str, Any] = {
        "timeout_ms": options.poll_timeout_ms,
        "with_headers": options.has_headers,
        "topic_id": task.topic_id,
    }
    first, end = span.first, span.end
    failed_at = -1
    while first < end:
        reader = _slices.reader(
            options.settings,
            isolation_level=options.config.isolation_level,
            client_rack=options.rack,
        )
        try:
            for rows in reader.read(
                task.partition, OffsetRange(first, end), **settings
            ):
                first = int(rows.offsets[-1]) + 1
                yield make(rows)
        except PositionError as error:
            # Reading continues with a new reader, without this one's state.
            _slices.drop()
            first = _after_loss(error, OffsetRange(first, end), options=options)
            if first == failed_at:
                raise
            failed_at = first
        except GeneratorExit:
            raise
        except BaseException:
            # The next task must not reuse this reader's state.
            _slices.drop()
            raise
        else:
            return


def _after_loss(error: PositionError, span: OffsetRange, *, options: Options) -> int:
    """Return the offset at which to continue after offsets were lost.

    It is the first offset of the range that still exists, else the end of the range:
    what follows is for the next batch, which is planned by the log.

    Raises:
        PositionError: ``failOnDataLoss`` is set, or the log start is unknown.
    """
    first, end = span.first, span.end
    is_replaced = isinstance(error, TopicReplaced)
    known = (
        f"its log has offsets {error.log_start} to {error.log_end - 1}"
        if error.log_start >= 0
        else "the start of its log is unknown"
    )
    why = str(error) if is_replaced else known
    what = f"offset {error.requested} of {error.partition} cannot be read: {why}"
    if options.fails_on_data_loss:
        raise PositionError(
            f"{what}. Records were deleted by retention or by hand, the log was cut "
            "off, or the topic was recreated; set failOnDataLoss to false to "
            "continue without them",
            partition=error.partition,
            requested=error.requested,
            log_start=error.log_start,
            log_end=error.log_end,
        ) from error
    if is_replaced or 0 <= error.log_end <= error.requested:
        resumed_at = end
    elif error.log_start < 0:
        raise error
    else:
        resumed_at = min(max(first, error.log_start), end)
    LOGGER.warning("position_jumped %s; the task continues at %d", what, resumed_at)
    return resumed_at
