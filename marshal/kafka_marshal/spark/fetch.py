"""What a task does: looks at the claim, and reads its range.

It runs in Spark's Python workers, which live through many tasks: connections are
kept, nothing else is.
"""

import gc
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kafka_marshal.clock import SystemClock
from kafka_marshal.errors import ClaimLost, PositionError
from kafka_marshal.kafka_io.slices import SliceReaders, TopicReplaced
from kafka_marshal.spark.java import pythonic
from kafka_marshal.spark.options import Options
from kafka_marshal.spark.planning import Task
from kafka_marshal.spark.rows import arrow_schema, batch_maker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafka_marshal.tickets import ClaimRef, TicketOffice

LOGGER = logging.getLogger("kafka_marshal")
OFFICE_MS_MAX = 30_000
# A look costs a round trip or two: a few in a hundred of such a time at most.
LOOK_MS = 500

_slices = SliceReaders()
# Processes whose heap has settled: this one, or none yet.
_settled: set[int] = set()
# It goes on while the machine sleeps, as leases do.
_clock = SystemClock()


def read(
    task: Task, options: Options, *, schema: "StructType"
) -> Iterator["pa.RecordBatch"]:
    """Read one range as Arrow batches.

    At least once, the claim is looked at before the first row, by a fold of the log
    that is not older than that, and again before each batch that comes later than
    ``LOOK_MS`` after: the driver may be gone, and another owner at work. At most once,
    the range is asked for, and only what was granted to this very attempt is read
    (PROTOCOL 6.2); nobody else ever is.

    Raises:
        ClaimLost: Somebody else has the partition now.
        PositionError: Offsets of the range are gone, and ``failOnDataLoss``.
        CoordinationError: The cluster or the sidecar could not be asked.
    """
    looked_ms = _clock.now_ms()
    for first, last in spans(task, options):
        span = (first, last + 1)
        for batch in _rows(task, span, options=options, schema=schema):
            now_ms = _clock.now_ms()
            if options.delivery == "alo" and now_ms - looked_ms >= LOOK_MS:
                _require_current(task, options)
                looked_ms = now_ms
            yield batch
    _settle()


def _settle() -> None:
    """Have the garbage collector pass over what a worker of Spark has loaded.

    Spark looks for garbage after each task, which takes 50 ms for Spark, Arrow and
    Kafka: as long as the task itself. What is there once a range has been read stays.
    """
    from pyspark import TaskContext

    if os.getpid() in _settled or TaskContext.get() is None:
        return
    _settled.add(os.getpid())
    gc.collect()
    gc.freeze()


def spans(task: Task, options: Options) -> list[tuple[int, int]]:
    """Return which offsets this attempt may read, both ends inclusive.

    Raises:
        ClaimLost: Somebody else has the partition now.
    """
    wanted = (task.first, task.end - 1)
    if task.claim is None:
        return [wanted]
    if options.delivery == "amo":
        office = _office(options)
        return _granted(office, task.claim, wanted)
    _require_current(task, options)
    return [wanted]


def _require_current(task: Task, options: Options) -> None:
    """Raise unless the claim stands, by a fold that is not older than this call."""
    claim = task.claim
    if claim is None:
        return
    office = _office(options)
    if not office.is_current(claim, timeout_ms=OFFICE_MS_MAX):
        raise ClaimLost(
            f"{task.partition} is no longer held under token {claim.token}, and the "
            f"task of offsets {task.first} to {task.end - 1} reads no further: another "
            "process has it, or the driver could not renew it; start the query again "
            "from its checkpoint",
            reason="stale_token",
        )


def _office(options: Options) -> "TicketOffice":
    """Return this process's office; a read without a claim loads nothing of it."""
    from kafka_marshal.tickets import open_office

    return open_office(pythonic(options.connection), sidecar=options.sidecar)


def _granted(
    office: "TicketOffice", claim: "ClaimRef", wanted: tuple[int, int]
) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    first, last = wanted
    while first <= last:
        granted = office.spend(claim, first, last, timeout_ms=OFFICE_MS_MAX)
        if not granted:
            break
        found += granted
        # A log may grant less at a time than a batch has.
        first = granted[-1][1] + 1
    return found


def _rows(
    task: Task, span: tuple[int, int], *, options: Options, schema: "StructType"
) -> Iterator["pa.RecordBatch"]:
    token = None if task.claim is None else task.claim.token
    make = batch_maker(arrow_schema(schema), task.partition, token=token)
    settings: dict[str, Any] = {
        "timeout_ms": options.poll_timeout_ms,
        "with_headers": options.has_headers,
        "topic_id": task.topic_id,
    }
    first, end = span
    failed_at = -1
    while first < end:
        reader = _slices.reader(
            options.settings,
            isolation_level=options.isolation_level,
            client_rack=options.rack,
        )
        try:
            for rows in reader.read(task.partition, (first, end), **settings):
                first = int(rows.offsets[-1]) + 1
                yield make(rows)
        except PositionError as error:
            # The next attempt must not begin with what this reader knows of the log.
            _slices.drop()
            first = _after_loss(error, (first, end), options=options)
            if first == failed_at:
                raise
            failed_at = first
        except GeneratorExit:
            raise
        except BaseException:
            # Whatever state it is in, the next task must not begin there.
            _slices.drop()
            raise
        else:
            return


def _after_loss(
    error: PositionError, span: tuple[int, int], *, options: Options
) -> int:
    """Return where to go on once offsets are gone, where that is allowed.

    That is the first offset of the range that the log still has, or the end of the
    range where it has none: a stream plans anew from what it finds.

    Raises:
        PositionError: It is not allowed, or the log could not be asked.
    """
    first, end = span
    is_replaced = isinstance(error, TopicReplaced)
    known = (
        f"its log has {error.log_start} to {error.log_end - 1}"
        if error.log_start >= 0
        else "where its log begins is not known"
    )
    why = str(error) if is_replaced else known
    told = f"offset {error.requested} of {error.partition} is to be read, and {why}"
    if options.fails_on_data_loss:
        raise PositionError(
            f"{told}: records were deleted by retention or by hand, the log was cut "
            "off, or the topic was recreated; set failOnDataLoss to false to go on "
            "without them",
            partition=error.partition,
            requested=error.requested,
            log_start=error.log_start,
            log_end=error.log_end,
        ) from error
    if is_replaced or 0 <= error.log_end <= error.requested:
        goes_on = end
    elif error.log_start < 0:
        raise error
    else:
        goes_on = min(max(first, error.log_start), end)
    LOGGER.warning("position_jumped %s; the task continues at %d", told, goes_on)
    return goes_on
