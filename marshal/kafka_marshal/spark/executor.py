"""Consumes topics within a Spark task, through the sidecar of its host.

For long tasks: in barrier mode, in ``mapInArrow`` and ``mapInPandas``, in plain
workers. The sidecar holds the claims and renews them independently of the worker. At
least once, claims outlive the worker: Spark may kill it and start another, which
continues under the same claims from the last confirmed position. No other client gets
the partitions meanwhile, while the executor lives and until the deadline that the
sidecar sent. ::

    def work(_):
        for batch in consume_in_task("orders", sidecar=ADDRESS, group_id="billing"):
            yield handle(batch)


    spark.range(0, 4, 1, 4).mapInArrow(work, schema, barrier=True)
"""

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_marshal.arguments import to_name
from kafka_marshal.batches import Batch
from kafka_marshal.client import Marshal
from kafka_marshal.config import Delivery, to_delivery
from kafka_marshal.consumer import Consumer
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import ClaimLost, ConfigurationError, IdentityConflict
from kafka_marshal.identity import Identity
from kafka_marshal.remote import paths
from kafka_marshal.remote.api import Children
from kafka_marshal.remote.backend import INSTANCE_BYTES
from kafka_marshal.remote.transport import Address, Connection
from kafka_marshal.spark.rows import times_column

if TYPE_CHECKING:
    import pyarrow as pa

LOGGER = logging.getLogger("kafka_marshal")
TURN_MS_MAX = 60_000
POLL_S = 0.05


def consume_in_task(
    *topics: str,
    sidecar: str,
    sidecar_token_file: str | None = None,
    group_id: str,
    name: str | None = None,
    delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
    max_records: int = 500,
    idle_ms: int | None = None,
    for_ms: int | None = None,
    max_handling_ms: int | None = None,
    turn_ms: int = TURN_MS_MAX,
) -> Iterator["pa.RecordBatch"]:
    """Yield batches of records, each of one topic partition.

    A batch is committed when the next one is requested, so finish its work before. A
    batch is yielded only within the deadline of its claim. If the claim is lost before
    the commit, the next owner processes the batch again.

    Args:
        topics: Topics to share.
        sidecar: Address of the sidecar on the host of the task.
        sidecar_token_file: File with the sidecar's token on that host, for TCP.
        group_id: Group that shares the topics.
        name: Name of this client, by default the task's; a restarted worker continues.
        delivery: ``alo`` or ``amo``. At most once, claims end with the worker.
        max_records: Most records of a batch.
        idle_ms: End after this time without a record; None = never.
        for_ms: End after this time, or with the batch in progress; None = never.
        max_handling_ms: Limit for the work on a batch, after which other members get
            the partition; see ``Marshal.consumer``.
        turn_ms: Longest wait for another worker of the same name to end.

    Yields:
        Columns as in ``format("marshal")``, and ``token``.

    Raises:
        ConfigurationError: A setting is wrong, or an extra is missing.
        IdentityConflict: Another worker of the same name is alive.
        CoordinationError: The sidecar cannot be reached.
    """
    delivery = to_delivery(delivery)
    name = name or _name_of_task()
    deadline = None if for_ms is None else Deadline(for_ms)
    with (
        _exclusive(sidecar, group_id, name=name, timeout_ms=turn_ms) as instance,
        Marshal(
            group_id=group_id,
            client_id=name,
            sidecar=sidecar,
            sidecar_token_file=sidecar_token_file,
            sidecar_instance=instance if delivery is Delivery.AT_LEAST_ONCE else None,
        ) as marshal,
    ):
        if delivery is Delivery.AT_LEAST_ONCE:
            _keep_claims_beyond_worker(sidecar, group_id, name=name, instance=instance)
        consumer = marshal.consumer(
            *topics,
            delivery=delivery,
            max_poll_records=max_records,
            consumer_timeout_ms=idle_ms,
            max_handling_ms=max_handling_ms,
        )
        with _stopping(consumer, deadline):
            for batch in consumer.batches():
                yield to_arrow(batch)
                # If the claim is lost, the next owner processes the batch again.
                with suppress(ClaimLost):
                    batch.commit()


@contextmanager
def _stopping(consumer: Consumer, deadline: Deadline | None) -> Iterator[None]:
    """Stop a consumer at a deadline, also while it waits for records."""
    if deadline is None:
        yield
        return
    timer = threading.Timer(deadline.left_s, consumer.stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def to_arrow(batch: Batch) -> "pa.RecordBatch":
    """Return a batch of records as an Arrow batch, with the token of its claim.

    Raises:
        LogUnreadable: Spark cannot represent a timestamp.
    """
    import pyarrow as pa

    records = batch.records
    count = len(records)
    times_ms = [r.timestamp_ms for r in records]
    times = times_column(times_ms, batch.offsets, partition=batch.partition)
    columns = {
        "key": pa.array([r.key for r in records], pa.binary()),
        "value": pa.array([r.value for r in records], pa.binary()),
        "topic": pa.array([batch.partition.topic] * count, pa.string()),
        "partition": pa.array([batch.partition.partition] * count, pa.int32()),
        "offset": pa.array([r.offset for r in records], pa.int64()),
        "timestamp": times,
        "timestampType": pa.array([r.timestamp_type for r in records], pa.int32()),
        "token": pa.array([str(batch.token)] * count, pa.string()),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _name_of_task() -> str:
    """Return a name that all attempts of a task share."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise ConfigurationError(
            "no Spark task runs here, which would have a name; set the argument name",
            setting="name",
        )
    return f"task-{context.partitionId()}"


# --- one worker of a name at a time


@contextmanager
def _exclusive(
    sidecar: str, group_id: str, *, name: str, timeout_ms: int
) -> Iterator[bytes]:
    """Wait until no other worker has the name; yield the name's instance id.

    The operating system releases the lock when the process ends. So the next holder
    knows that the last worker is dead, and may replace it under the same instance id.
    """
    deadline = Deadline(timeout_ms)
    while True:
        try:
            identity = Identity.take(
                Path(tempfile.gettempdir()) / f"kafka-marshal-tasks-{os.getuid()}",
                domain=hashlib.sha256(sidecar.encode()).hexdigest(),
                group_id=to_name("group_id", group_id),
                client_id=to_name("name", name),
            )
            break
        except IdentityConflict as error:
            if deadline.is_over:
                raise IdentityConflict(
                    f"another worker on this host consumes as {name!r} of group "
                    f"{group_id!r}; give each task a name of its own",
                    holder=name,
                ) from error
        except OSError as error:
            raise ConfigurationError(
                f"{error}; set TMPDIR to your own folder", setting="TMPDIR"
            ) from error
        time.sleep(POLL_S)
    try:
        known = [life.incarnation for life in identity.lives]
        instance, *_ = known or [os.urandom(INSTANCE_BYTES)]
        if not known:
            identity.remember(instance, master=b"")
        yield instance
        identity.erase()  # at a normal end everything was released
    finally:
        identity.close()


def _keep_claims_beyond_worker(
    sidecar: str, group_id: str, *, name: str, instance: bytes
) -> None:
    """Make the claims outlive this worker, while its executor lives.

    If the sidecar cannot watch this worker, as over TCP or in another PID namespace,
    they outlive it anyway, until the deadline that the sidecar sent.
    """
    address = Address.parse(sidecar)
    if address.socket is None:
        return  # over TCP the sidecar watches no process, so claims stay anyway
    connection = Connection.open(
        address,
        token=None,
        group_id=group_id,
        client_id=name,
        instance=instance.hex(),
    )
    path = connection.path(paths.CHILDREN)
    try:
        connection.send("PUT", path, body=Children(pids=(executor_pid(),)))
    except ConfigurationError as error:
        if error.setting != "pids":
            raise
        LOGGER.warning(
            "executor_unwatched: the sidecar of this host cannot watch the executor "
            "of this task: %s. Its claims stay until the sidecar's deadline",
            error,
        )
    finally:
        connection.close()


def executor_pid(read: Callable[[str], str] | None = None) -> int:
    """Return the process id of the executor, or without ``/proc`` that of the daemon.

    The executor's JVM starts PySpark's daemon, which forks the workers, outlives them,
    and ends with the executor. Only Linux shows which process started the daemon.
    """
    parent = os.getppid()
    try:
        stat = (read or _read)(f"/proc/{parent}/stat")
    except OSError as error:
        LOGGER.warning(
            "executor_unknown: %s. The claims of this task stay while process %d "
            "lives, the daemon of PySpark's workers, which ends with its executor",
            *(error, parent),
        )
        return parent
    grandparent = int(stat.rpartition(")")[2].split()[1])
    # Process 1 has adopted the daemon, or has started it in a container.
    return grandparent if grandparent > 1 else parent


def _read(path: str) -> str:
    return Path(path).read_text()
