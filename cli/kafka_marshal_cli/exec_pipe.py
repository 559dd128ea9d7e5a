"""``consume --exec``: a process for each record or batch, committed when it is done.

One loop on one thread: look after the processes at work, start more where there
is room, wait. A partition has one process at a time, so its order is kept; no
more is polled than there is room for, so back-pressure comes by itself.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum

import attrs

from kafka_marshal import ClaimLost, Consumer, MarshalError, Record, TopicPartition
from kafka_marshal_cli.child import Child, wait_any
from kafka_marshal_cli.live import POLL_MS, Idle
from kafka_marshal_cli.records import record_object
from kafka_marshal_cli.render import to_json
from kafka_marshal_cli.shared import tell, wall_ms

# While processes are at work, records are asked for and claims are looked at so often.
WATCH_MS = 50
# How long a process may go on whose claim is lost: somebody else may have begun.
LOST_GRACE_MS = 1_000
# How long a verdict on what was asked for at most once is waited for at the end.
DRAIN_MS = 2_000
RETRY_MS_MIN, RETRY_MS_MAX = 500, 30_000
# Linux takes no longer string in an environment than 128 KiB.
KEY_BYTES_MAX = 32_768


class ExecMode(StrEnum):
    """What one process gets."""

    RECORD = "record"
    BATCH = "batch"


class ExecFormat(StrEnum):
    """How it gets it."""

    VALUE = "value"
    JSONL = "jsonl"


class OnError(StrEnum):
    """What is done about a process that failed."""

    STOP = "stop"
    RETRY = "retry"
    SKIP = "skip"


@attrs.frozen
class ExecOptions:
    """How processes are run.

    Attributes:
        argv: Program and arguments.
        mode: A process for each record, or for each batch of a partition.
        format: What it reads: values, or JSON objects.
        on_error: What is done when it fails for good.
        retries_max: Tries after the first.
        timeout_ms: When a process has failed that goes on; None for never.
        grace_ms: How long one may take that was told to end.
        workers: Most processes at a time.
        batch_max: Most records of one process.
        records_max: End after so many; 0 for no limit.
        at_most_once: Whether what is in hand was committed before.
        env: Added to the environment of every process.
    """

    argv: Sequence[str]
    mode: ExecMode = ExecMode.RECORD
    format: ExecFormat = ExecFormat.VALUE
    on_error: OnError = OnError.STOP
    retries_max: int = 0
    timeout_ms: int | None = None
    grace_ms: int = 5_000
    workers: int = 1
    batch_max: int = 1
    records_max: int = 0
    at_most_once: bool = False
    env: Mapping[str, str] = attrs.field(factory=dict)


@attrs.define
class Job:
    """Records of one partition that a process works on, or is to.

    Attributes:
        partition: The partition.
        records: At least one, in offset order.
        attempt: Which try this is, from 1.
        child: The process; None before it is started and between tries.
        due_s: When the next try is due.
        why: Why we ended it, where it was us.
    """

    partition: TopicPartition
    records: Sequence[Record]
    attempt: int = 1
    child: Child | None = None
    due_s: float = 0.0
    why: str | None = None

    @property
    def name(self) -> str:
        """The place, for people."""
        first, last = self.records[0].offset, self.records[-1].offset
        offsets = f"offset {first}" if first == last else f"offsets {first} to {last}"
        return f"{self.partition} {offsets}"


class ExecFailed(Exception):
    """A process failed for good, and that is to end the run."""


class ExecLoop:
    """Runs processes on what a consumer hands out.

    Args:
        consumer: The consumer; this loop is its one user.
        options: How processes are run.
        is_stopped: Whether we were asked to end.
        each_round: Called in every round, to tell what happened meanwhile.
    """

    def __init__(
        self,
        consumer: Consumer,
        options: ExecOptions,
        *,
        is_stopped: Callable[[], bool],
        each_round: Callable[[], None],
    ) -> None:
        self._consumer = consumer
        self._options = options
        self._is_stopped = is_stopped
        self._each_round = each_round
        self._jobs: list[Job] = []
        # Handed out with others and waiting for room.
        self._backlog: deque[Job] = deque()
        self._taken_count = 0
        self._done_count = 0
        # Nothing came after we were asked to stop: nothing will.
        self._is_dry = False
        self._end_s: float | None = None

    def run(self, idle: Idle) -> None:
        """Run until stopped, done, or idle for too long.

        Raises:
            ExecFailed: A process failed for good and ``on_error`` is stop.
        """
        try:
            while not self._is_over(idle):
                self._each_round()
                self._look_after()
                if self._is_ending():
                    self._end_all()
                else:
                    self._fill(idle)
                self._wait()
        finally:
            self._end_in_time()

    @property
    def done_count(self) -> int:
        """Number of records that were processed or skipped, and committed."""
        return self._done_count

    def kill(self) -> None:
        """Kill every process. For a signal handler, before we die ourselves."""
        for job in self._jobs:
            if job.child is not None:
                job.child.kill()

    # --- when to end

    @property
    def _is_done(self) -> bool:
        most = self._options.records_max
        return bool(most) and self._taken_count >= most

    def _is_ending(self) -> bool:
        """Whether nothing more is started and what runs is told to end.

        At most once, what is in hand is nobody else's ever: it may be finished,
        for as long as a process that is told to end may take.
        """
        if not self._is_stopped():
            return False
        now_s = time.monotonic()
        if self._end_s is None:
            grace_ms = self._options.grace_ms if self._options.at_most_once else 0
            self._end_s = now_s + grace_ms / 1000
        return now_s >= self._end_s

    def _is_over(self, idle: Idle) -> bool:
        if self._jobs:
            idle.touch()
            return False
        if self._is_ending():
            return True
        return not self._backlog and (self._is_done or self._is_dry or idle.is_over)

    def _end_all(self) -> None:
        for job in list(self._jobs):
            if job.child is None:
                self._forget(job)
            else:
                job.why = job.why or "we were asked to stop"
                job.child.end(grace_ms=self._options.grace_ms)

    def _end_in_time(self) -> None:
        """Leave nothing behind, whatever happened."""
        deadline_s = time.monotonic() + self._options.grace_ms / 1000 + 1
        while self._jobs and time.monotonic() < deadline_s:
            for job in list(self._jobs):
                child = job.child
                code = None if child is None else child.exit_code()
                if child is not None and code is None:
                    child.end(grace_ms=self._options.grace_ms)
                    continue
                self._jobs.remove(job)
                if code == 0:
                    # It was done all the same; what cannot be told is done again.
                    with suppress(MarshalError):
                        self._consumer.commit(job.records)
            self._wait()
        self.kill()

    # --- what is at work

    def _look_after(self) -> None:
        held = self._consumer.tokens()
        now_s = time.monotonic()
        for job in list(self._jobs):
            child = job.child
            is_lost = held.get(job.partition) != job.records[0].token
            if child is None:
                if is_lost:
                    self._drop_lost(job)
                elif now_s >= job.due_s and not self._is_ending():
                    self._start(job)
                continue
            code = child.exit_code()
            if code is not None:
                self._finish(job, code)
            elif is_lost:
                job.why = job.why or "its claim was lost"
                child.end(grace_ms=LOST_GRACE_MS)
            elif self._is_overdue(child, now_s):
                job.why = job.why or f"not done after {self._options.timeout_ms} ms"
                child.end(grace_ms=self._options.grace_ms)

    def _is_overdue(self, child: Child, now_s: float) -> bool:
        limit_ms = self._options.timeout_ms
        is_late = limit_ms is not None and (now_s - child.started_s) * 1000 >= limit_ms
        return child.is_told_to_end or is_late

    def _start(self, job: Job) -> None:
        job.why = None
        job.child = Child(
            self._options.argv,
            payload(job.records, self._options.format),
            env={**os.environ, **self._options.env, **variables(job)},
        )

    def _finish(self, job: Job, code: int) -> None:
        if code == 0:
            self._commit(job)
            return
        how = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
        if job.why is not None:
            how += f" ({job.why})"
        tries = self._options.retries_max + 1
        told = f"exec: {job.name}: {how}, try {job.attempt} of {tries}"
        if self._consumer.tokens().get(job.partition) != job.records[0].token:
            tell(told)
            self._drop_lost(job)
        elif self._is_ending():
            tell(f"{told}; {self._fate()}")
            self._forget(job)
        elif job.attempt < tries:
            wait_ms = min(RETRY_MS_MAX, RETRY_MS_MIN * 2 ** (job.attempt - 1))
            tell(f"{told}; tried again in {wait_ms} ms")
            job.child, job.due_s = None, time.monotonic() + wait_ms / 1000
            job.attempt += 1
        elif self._options.on_error is OnError.SKIP:
            tell(f"{told}; skipped")
            self._commit(job)
        else:
            self._forget(job)
            raise ExecFailed(f"{told}; {self._fate()}")

    def _fate(self) -> str:
        if self._options.at_most_once:
            return "nobody will process it again"
        return "it stays uncommitted"

    def _commit(self, job: Job) -> None:
        self._forget(job)
        try:
            self._consumer.commit(job.records)
        except ClaimLost as lost:
            tell(f"lost: {lost}")
        else:
            self._done_count += len(job.records)

    def _drop_lost(self, job: Job) -> None:
        tell(f"lost: {job.name}; its next owner decides")
        self._forget(job)

    def _forget(self, job: Job) -> None:
        self._jobs.remove(job)
        self._consumer.resume(job.partition)

    # --- what comes

    def _fill(self, idle: Idle) -> None:
        """Start processes while there is room and something to work on."""
        while len(self._jobs) < self._options.workers:
            if not self._backlog:
                self._poll()
            if not self._backlog:
                return
            job = self._backlog.popleft()
            self._jobs.append(job)
            idle.touch()
            # It may have waited: is it still ours?
            if self._consumer.tokens().get(job.partition) != job.records[0].token:
                self._drop_lost(job)
            else:
                self._start(job)

    def _poll(self) -> None:
        if self._is_done:
            return
        options = self._options
        most = options.batch_max if options.mode is ExecMode.BATCH else 1
        if options.records_max:
            most = min(most, options.records_max - self._taken_count)
        is_last = self._is_stopped()
        wait_ms = DRAIN_MS if is_last else POLL_MS
        # With processes at work their ends are waited for instead.
        handed = self._consumer.poll(0 if self._jobs else wait_ms, most)
        self._is_dry = is_last and not handed and not self._jobs
        for partition, records in handed.items():
            self._consumer.pause(partition)
            self._taken_count += len(records)
            self._backlog.append(Job(partition, records))

    def _wait(self) -> None:
        children = [job.child for job in self._jobs if job.child is not None]
        if self._jobs:
            wait_any(children, WATCH_MS)


def payload(records: Sequence[Record], form: ExecFormat) -> bytes:
    """Return what a process reads of these records.

    One value goes as it is, several with a newline behind each.
    """
    if form is ExecFormat.JSONL:
        now_ms = wall_ms()
        return "".join(
            to_json(record_object(record, now_ms)) + "\n" for record in records
        ).encode()
    if len(records) == 1:
        return records[0].value or b""
    return b"".join((record.value or b"") + b"\n" for record in records)


def variables(job: Job) -> dict[str, str]:
    """Return what a process is told in its environment."""
    first = job.records[0]
    told = {
        "MARSHAL_TOPIC": job.partition.topic,
        "MARSHAL_PARTITION": str(job.partition.partition),
        "MARSHAL_OFFSET": str(first.offset),
        "MARSHAL_LAST_OFFSET": str(job.records[-1].offset),
        "MARSHAL_COUNT": str(len(job.records)),
        "MARSHAL_TIMESTAMP_MS": str(first.timestamp_ms),
        "MARSHAL_TOKEN": str(first.token),
        "MARSHAL_ATTEMPT": str(job.attempt),
    }
    if len(job.records) > 1:
        return told
    if first.value is None:
        told["MARSHAL_VALUE_IS_NULL"] = "1"
    key = first.key
    if key is not None and len(key) <= KEY_BYTES_MAX and b"\0" not in key:
        told["MARSHAL_KEY"] = os.fsdecode(key)
    return told
