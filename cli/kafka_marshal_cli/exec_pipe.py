"""``consume --exec``: runs a process for each record or batch, then commits it.

One loop on one thread supervises the running processes, starts more while workers are
free, and waits. A partition has one process at a time, which keeps its order. The loop
polls records only for free workers.
"""

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import (
    ClaimLost,
    ConfigurationError,
    Consumer,
    MarshalError,
    Record,
    TopicPartition,
)
from kafka_marshal.deadline import Deadline
from kafka_marshal.system_calls import open_pidfd
from kafka_marshal_cli import parsing
from kafka_marshal_cli.follow_loop import POLL_MS, Idle
from kafka_marshal_cli.presenters import record_object
from kafka_marshal_cli.render import to_json
from kafka_marshal_cli.shared import OptionGroup, notify, wall_ms

# A new pipe takes this many bytes without blocking, on any system.
PIPE_BYTES_MIN = 4096
# How often to poll for the end of a child on systems without pidfd.
POLL_EVERY_S = 0.01
# Only a deadline: a process that has ended is reaped at once.
REAP_S = 10


class Child:
    """A running process that gets bytes on its stdin.

    The process leads a session of its own, so that all processes that it starts can be
    killed with it, and a Ctrl-C on the terminal does not reach it.

    Args:
        argv: Program and arguments.
        payload: Bytes for its stdin.
        env: Its environment.

    Raises:
        ConfigurationError: The program cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], payload: bytes, *, env: Mapping[str, str]
    ) -> None:
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, env=dict(env), start_new_session=True
            )
        except OSError as error:
            raise ConfigurationError(
                f"--exec: {argv[0]!r} cannot be started: {error}", setting="--exec"
            ) from error
        self.started_s = time.monotonic()
        self._terminated_at_s: float | None = None
        self._code: int | None = None
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = open_pidfd(self._process.pid)
        if len(payload) <= PIPE_BYTES_MIN:
            self._feed(payload)
        else:
            # A process that never reads its input must not block the loop.
            feeder = threading.Thread(target=self._feed, args=(payload,), daemon=True)
            feeder.start()

    def _feed(self, payload: bytes) -> None:
        # The process may end without reading its input.
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(payload)

    @property
    def is_terminating(self) -> bool:
        """Whether ``terminate`` was called."""
        return self._terminated_at_s is not None

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs.

        If a signal killed the process, the code is minus the number of the signal.
        Processes that it left in the background are killed.
        """
        if self._code is None and self._has_ended():
            self.kill()
            self._code = self._process.wait(timeout=REAP_S)
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        return self._code

    def _has_ended(self) -> bool:
        waitid = getattr(os, "waitid", None)
        if waitid is None:
            return self._process.poll() is not None
        # Do not reap the process yet: until then no other process group gets its id.
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return waitid(os.P_PID, self._process.pid, how) is not None

    def terminate(self, *, grace_ms: int) -> None:
        """Send SIGTERM at the first call, SIGKILL at a call after the grace time."""
        now_s = time.monotonic()
        if self._terminated_at_s is None:
            self._terminated_at_s = now_s
            self._kill_group(signal.SIGTERM)
        elif (now_s - self._terminated_at_s) * 1000 >= grace_ms:
            self.kill()

    def kill(self) -> None:
        """Kill the process and all that it started. Safe in a signal handler."""
        self._kill_group(signal.SIGKILL)

    def _kill_group(self, number: int) -> None:
        # macOS returns EPERM for a group that has only a zombie.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._code is None:
                os.killpg(self._process.pid, number)

    @property
    def fd(self) -> int | None:
        """A descriptor, readable once the process has ended; None without pidfd."""
        return self._fd


def wait_any(children: Sequence[Child], timeout_ms: int) -> None:
    """Wait until one of the processes has ended, at most for the timeout."""
    fds = [child.fd for child in children if child.fd is not None]
    if len(fds) == len(children):
        poller = select.poll()  # select refuses descriptors above 1023
        for fd in fds:
            poller.register(fd, select.POLLIN)
        poller.poll(timeout_ms)
        return
    deadline = Deadline(timeout_ms)
    while not deadline.is_over:
        if any(child.exit_code() is not None for child in children):
            return
        time.sleep(POLL_EVERY_S)


# --- the loop

# How often to poll for records and to check claims while processes run.
WATCH_MS = 50
# Grace time of a process whose claim is lost: the next owner may have begun.
LOST_GRACE_MS = 1_000
# With delivery at most once: how long to wait at the end for requested grants.
DRAIN_MS = 2_000
RETRY_MS_MIN, RETRY_MS_MAX = 500, 30_000
# On Linux a string in the environment has at most 128 KiB.
KEY_BYTES_MAX = 32_768


class ExecMode(StrEnum):
    """What one process handles: a record, or a batch of a partition."""

    RECORD = "record"
    BATCH = "batch"


class ExecFormat(StrEnum):
    """Format of the input of a process."""

    VALUE = "value"
    JSONL = "jsonl"


class OnError(StrEnum):
    """What to do after a process failed."""

    STOP = "stop"
    RETRY = "retry"
    SKIP = "skip"


@attrs.frozen(kw_only=True)
class ExecOptions:
    """Options of the processes; ``of_run`` adds options of the whole run.

    Attributes:
        argv: Program and arguments.
        mode: A process for each record, or for each batch of a partition.
        format: Input: values, or JSON objects.
        on_error: What to do when all tries have failed.
        retries_max: Tries after the first.
        timeout_ms: Longest time of a process; None for no limit.
        grace_ms: Time between SIGTERM and SIGKILL.
        workers: Most processes at a time.
        batch_max: Most records of one process.
        records_max: End after this many records; 0 for no limit.
        at_most_once: Whether records are committed before they are handed out.
        env: Variables to add to the environment of every process.
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

    def of_run(
        self, *, at_most_once: bool, batch_max: int, records_max: int, group: str
    ) -> "ExecOptions":
        """Return these options with the options of the whole run added.

        Raises:
            ConfigurationError: The options exclude each other.
        """
        if at_most_once and self.retries_max:
            raise ConfigurationError(
                "at most once there are no retries: omit --retries and --on-error "
                "retry, or use --delivery alo",
                setting="--retries",
            )
        if at_most_once and self.workers > 1:
            raise ConfigurationError(
                "at most once there is one process at a time: omit --workers, "
                "or use --delivery alo",
                setting="--workers",
            )
        return attrs.evolve(
            self,
            at_most_once=at_most_once,
            batch_max=batch_max,
            records_max=records_max,
            env={"MARSHAL_GROUP": group},
        )


@attrs.define(kw_only=True)
class Job:
    """Records of one partition, processed by one process.

    Attributes:
        partition: The partition.
        records: At least one, in offset order.
        attempt: Number of the try, from 1.
        child: The process; None before it is started and between tries.
        due_s: When the next try is due, by the monotonic clock.
        why: Why the loop terminated the process, else None.
    """

    partition: TopicPartition
    records: Sequence[Record]
    attempt: int = 1
    child: Child | None = None
    due_s: float = 0.0
    why: str | None = None

    @property
    def name(self) -> str:
        """Partition and offsets, as text for people."""
        first, last = self.records[0].offset, self.records[-1].offset
        offsets = f"offset {first}" if first == last else f"offsets {first} to {last}"
        return f"{self.partition} {offsets}"


@attrs.frozen
class Hooks:
    """Functions that a loop over records calls.

    Attributes:
        is_stopped: Returns whether a signal has stopped the command.
        each_round: Writes events; called in every round.
    """

    is_stopped: Callable[[], bool]
    each_round: Callable[[], None]


class ExecFailed(Exception):
    """All tries of a process failed and ``on_error`` is stop, so the run ends."""


class ExecLoop:
    """Runs processes on the records of a consumer.

    Args:
        consumer: The consumer; only this loop uses it.
        options: Options of the processes.
        hooks: Functions that the loop calls.
    """

    def __init__(self, consumer: Consumer, options: ExecOptions, hooks: Hooks) -> None:
        self._consumer = consumer
        self._options = options
        self._hooks = hooks
        self._jobs: list[Job] = []
        # Jobs of the last poll whose processes are not started yet.
        self._backlog: deque[Job] = deque()
        self._polled_count = 0
        self._done_count = 0
        # After a stop, a poll has returned nothing: there are no more records.
        self._is_exhausted = False
        self._end_s: float | None = None

    def run(self, idle: Idle) -> None:
        """Run until a signal, the limit of records, or the idle limit ends the loop.

        Raises:
            ExecFailed: All tries of a process failed and ``on_error`` is stop.
        """
        try:
            while not self._is_over(idle):
                self._hooks.each_round()
                self._supervise()
                if self._is_ending():
                    self._end_all()
                else:
                    self._fill(idle)
                self._wait()
        finally:
            self._end_within_grace()

    @property
    def done_count(self) -> int:
        """Number of records that were processed or skipped, and committed."""
        return self._done_count

    def kill(self) -> None:
        """Kill every process. For a signal handler, before the command kills itself."""
        for job in self._jobs:
            if job.child is not None:
                job.child.kill()

    # --- when to end

    @property
    def _is_done(self) -> bool:
        most = self._options.records_max
        return bool(most) and self._polled_count >= most

    def _is_ending(self) -> bool:
        """Return whether to terminate running processes and start no more.

        With delivery at most once, no other client will process the records, so their
        processes get the grace time to finish before they are terminated.
        """
        if not self._hooks.is_stopped():
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
        return not self._backlog and (
            self._is_done or self._is_exhausted or idle.is_over
        )

    def _end_all(self) -> None:
        for job in list(self._jobs):
            if job.child is None:
                self._remove(job)
            else:
                job.why = job.why or "the command was stopped"
                job.child.terminate(grace_ms=self._options.grace_ms)

    def _end_within_grace(self) -> None:
        """End every process within the grace time, even after an error."""
        deadline = Deadline(self._options.grace_ms + 1_000)
        while self._jobs and not deadline.is_over:
            for job in list(self._jobs):
                child = job.child
                code = None if child is None else child.exit_code()
                if child is not None and code is None:
                    child.terminate(grace_ms=self._options.grace_ms)
                    continue
                self._jobs.remove(job)
                if code == 0:
                    # If the commit fails, the records are processed again.
                    with suppress(MarshalError):
                        self._consumer.commit(job.records)
            self._wait()
        self.kill()

    # --- running processes

    def _supervise(self) -> None:
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
                child.terminate(grace_ms=LOST_GRACE_MS)
            elif self._is_overdue(child, now_s):
                job.why = job.why or f"not done after {self._options.timeout_ms} ms"
                child.terminate(grace_ms=self._options.grace_ms)

    def _is_overdue(self, child: Child, now_s: float) -> bool:
        limit_ms = self._options.timeout_ms
        is_late = limit_ms is not None and (now_s - child.started_s) * 1000 >= limit_ms
        return child.is_terminating or is_late

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
        failure = f"exec: {job.name}: {how}, try {job.attempt} of {tries}"
        if self._consumer.tokens().get(job.partition) != job.records[0].token:
            notify(failure)
            self._drop_lost(job)
        elif self._is_ending():
            notify(f"{failure}; {self._consequence()}")
            self._remove(job)
        elif job.attempt < tries:
            wait_ms = min(RETRY_MS_MAX, RETRY_MS_MIN * 2 ** (job.attempt - 1))
            notify(f"{failure}; tried again in {wait_ms} ms")
            job.child, job.due_s = None, time.monotonic() + wait_ms / 1000
            job.attempt += 1
        elif self._options.on_error is OnError.SKIP:
            notify(f"{failure}; skipped")
            self._commit(job)
        else:
            self._remove(job)
            raise ExecFailed(f"{failure}; {self._consequence()}")

    def _consequence(self) -> str:
        if self._options.at_most_once:
            return "the records will not be processed again"
        return "the records stay uncommitted"

    def _commit(self, job: Job) -> None:
        self._remove(job)
        try:
            self._consumer.commit(job.records)
        except ClaimLost as lost:
            notify(f"lost: {lost}")
        else:
            self._done_count += len(job.records)

    def _drop_lost(self, job: Job) -> None:
        notify(f"lost: {job.name}; its next owner continues")
        self._remove(job)

    def _remove(self, job: Job) -> None:
        self._jobs.remove(job)
        self._consumer.resume(job.partition)

    # --- new records

    def _fill(self, idle: Idle) -> None:
        """Start processes while there are free workers and records."""
        while len(self._jobs) < self._options.workers:
            if not self._backlog:
                self._poll()
            if not self._backlog:
                return
            job = self._backlog.popleft()
            self._jobs.append(job)
            idle.touch()
            # The claim may have been lost while the job waited.
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
            most = min(most, options.records_max - self._polled_count)
        is_last = self._hooks.is_stopped()
        wait_ms = DRAIN_MS if is_last else POLL_MS
        # While processes run, do not wait here: ``_wait`` waits until one ends.
        handed = self._consumer.poll(0 if self._jobs else wait_ms, most)
        self._is_exhausted = is_last and not handed and not self._jobs
        for partition, records in handed.items():
            self._consumer.pause(partition)
            self._polled_count += len(records)
            self._backlog.append(Job(partition=partition, records=records))

    def _wait(self) -> None:
        children = [job.child for job in self._jobs if job.child is not None]
        if self._jobs:
            wait_any(children, WATCH_MS)


def payload(records: Sequence[Record], form: ExecFormat) -> bytes:
    """Return the input of a process.

    A single value is passed unchanged, several with a newline after each.
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
    """Return the variables that a process gets in its environment."""
    first = job.records[0]
    env = {
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
        return env
    if first.value is None:
        env["MARSHAL_VALUE_IS_NULL"] = "1"
    key = first.key
    if key is not None and len(key) <= KEY_BYTES_MAX and b"\0" not in key:
        env["MARSHAL_KEY"] = os.fsdecode(key)
    return env


# --- the options

RETRIES_DEFAULT = 3
_option: Any = partial(
    typer.Option, rich_help_panel="A process for each record or batch"
)


@attrs.frozen(kw_only=True)
class ExecForm:
    """``--exec`` and its options, as given on the command line."""

    exec_: Annotated[
        str | None,
        _option(
            "--exec",
            metavar="CMD",
            help="Run this command for each record, passed on stdin; exit code 0 "
            "commits. Words are split as in a shell.",
        ),
    ] = None
    exec_mode: Annotated[
        ExecMode, _option(help="A process for each record, or batch of a partition.")
    ] = ExecMode.RECORD
    exec_format: Annotated[
        ExecFormat | None,
        _option(
            help="Input: bare values (default for records), or JSON lines as printed "
            "without --exec (default for batches).",
        ),
    ] = None
    exec_shell: Annotated[
        bool, _option("--exec-shell", help="Run CMD by /bin/sh, so that pipes work.")
    ] = False
    exec_timeout: Annotated[
        str | None,
        _option(metavar="MS", help="A process that takes longer is ended, as failed."),
    ] = None
    exec_grace: Annotated[
        str, _option(metavar="MS", help="Time between TERM and KILL.")
    ] = "5s"
    on_error: Annotated[
        OnError,
        _option(
            help="If a process fails: stop with exit code 1, without commit; retry, "
            "then stop; or skip and commit, with a line on stderr.",
        ),
    ] = OnError.STOP
    retries: Annotated[
        int | None,
        _option(
            min=0,
            metavar="N",
            help="Tries after the first; pauses double from 0.5 s to 30 s. By "
            f"default {RETRIES_DEFAULT} with --on-error retry, else 0.",
        ),
    ] = None
    workers: Annotated[
        int,
        _option(
            min=1,
            help="Maximum processes; each partition has one at most, in order.",
        ),
    ] = 1

    def chosen(self) -> ExecOptions | None:
        """Return the options of the processes, None without ``--exec``.

        Raises:
            ConfigurationError: The command does not exist, or an option that needs
                ``--exec`` was given without it.
        """
        text = self.exec_
        if text is None:
            for each in attrs.fields(ExecForm):
                if getattr(self, each.name) != each.default:
                    option = "--" + each.name.replace("_", "-")
                    raise ConfigurationError(
                        f"{option} needs --exec CMD", setting=option
                    )
            return None
        is_batch = self.exec_mode is ExecMode.BATCH
        default_form = ExecFormat.JSONL if is_batch else ExecFormat.VALUE
        retries, timeout = self.retries, self.exec_timeout
        if retries is None:
            retries = RETRIES_DEFAULT if self.on_error is OnError.RETRY else 0
        return ExecOptions(
            argv=["/bin/sh", "-c", text] if self.exec_shell else _words(text),
            mode=self.exec_mode,
            format=self.exec_format or default_form,
            on_error=self.on_error,
            retries_max=retries,
            timeout_ms=None
            if timeout is None
            else parsing.duration_ms("--exec-timeout", timeout),
            grace_ms=parsing.duration_ms("--exec-grace", self.exec_grace),
            workers=self.workers,
        )


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--exec is {text!r}: {error}; quote it as for a shell", setting="--exec"
        ) from error
    if not words:
        raise ConfigurationError("--exec names no command", setting="--exec")
    if shutil.which(words[0]) is None:
        raise ConfigurationError(
            f"--exec: there is no program {words[0]!r}; add --exec-shell for "
            "commands of the shell",
            setting="--exec",
        )
    return words


EXEC = OptionGroup.of(ExecForm, ExecForm.chosen)
