"""One round of the demo: start, kill, pause, resume; every wait has a deadline.

A step that misses its deadline ends the round. A sentence states the problem, and
makes the verdict fail.
"""

import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import attrs
import msgspec

from kafka_marshal import (
    Admin,
    ConfigurationError,
    Delivery,
    MarshalError,
    WorldWatch,
)
from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.testing.producing import Producing, create_topic
from kafka_marshal.views.log_scan import LogScan
from kafka_marshal_cli.demo import journal
from kafka_marshal_cli.demo.evidence import Evidence, LogEvidence, Pause
from kafka_marshal_cli.demo.show import Board, PartitionRow, Show, WorkerRow
from kafka_marshal_cli.demo.worker import WorkerSettings

STOP_S = 15.0
TAIL_LINES = 5


class WorkerProcess:
    """A consumer process and its journal.

    Attributes:
        name: client_id.
        reader: Reader of its journal.
        was_killed: Whether the demo killed it.
        processed: Number of processed records.
        done_of_batch: Number of processed records of the last batch.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        """Start the process; it waits for ``start_consuming``."""
        self.name = settings.client_id
        self.was_killed = False
        self.reader = journal.JournalReader(settings.journal_path)
        self.processed = 0
        self.done_of_batch = 0
        self._batch: journal.Line | None = None
        self._log_path = Path(settings.folder, f"{self.name}.log")
        argument = msgspec.json.encode(settings).decode()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kafka_marshal_cli.demo.worker", argument],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # The demo handles an interrupt from the terminal.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def state(self) -> str:
        """State in one word."""
        if self.was_killed:
            return "killed"
        return "running" if self._process.poll() is None else "ended"

    @property
    def is_ready(self) -> bool:
        """Whether the worker has connected."""
        return bool(self.reader.lines)

    @property
    def left_of_batch(self) -> int:
        """Number of unprocessed records of the last batch."""
        batch = self._batch
        if batch is None:
            return 0
        return max(0, batch.last - batch.offset + 1 - self.done_of_batch)

    def read(self) -> list[journal.Line]:
        """Return the lines of the journal since the last call."""
        found = self.reader.read()
        for line in found:
            if line.kind == journal.BATCH:
                self._batch, self.done_of_batch = line, 0
            elif line.kind == journal.RECORD:
                self.done_of_batch += 1
                self.processed += 1
        return found

    def start_consuming(self) -> None:
        """Let the worker begin to consume."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        self.was_killed = True
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=STOP_S)

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def unexpected_end(self) -> str | None:
        """Return a sentence if the process ended by itself, else None."""
        code = self._process.poll()
        if code is None or self.was_killed:
            return None
        if code == 0:
            return f"{self.name} ended before SIGTERM."
        return f"{self.name} ended by itself ({code}): {self._last_words()}"

    def wait_stopped(self, deadline: Deadline) -> str | None:
        """Wait for an orderly end; return a sentence on what went wrong, or None."""
        try:
            code = self._process.wait(timeout=max(0.1, deadline.left_s))
        except subprocess.TimeoutExpired:
            return f"{self.name} did not stop within {STOP_S:.0f} s of SIGTERM."
        if code and not self.was_killed:
            return f"{self.name} failed while it stopped ({code}): {self._last_words()}"
        return None

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=STOP_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return " | ".join(lines[-TAIL_LINES:]) or "its log is empty."


# --- the round

POLL_MS = 50
# Limits for a busy machine; each wait ends as soon as its condition holds.
START_S = 60.0
SHARE_S = 60.0
RELEASE_S = 30.0
CATCH_UP_S = 80.0
REST_S = 2.0
JITTER_MS_MAX = 1_000
BATCH = 50
WORK_MS = 3.0
PER_SECOND = 200
PAUSE_MS = 180_000
HEARTBEAT_MS_LEAST = 500
HEARTBEAT_MS_MOST = 60_000


class StepFailed(MarshalError):
    """A step missed its deadline, or a consumer ended by itself."""


@attrs.frozen(kw_only=True)
class DemoOptions:
    """The options of a demo.

    Attributes:
        heartbeat_interval_ms: Heartbeat interval.
        partitions: Partitions of each data topic.
        records: Records in each data topic at the start.
        consumers: Number of consumer processes.
        seed: Chooses the consumer to kill.
        keep: Whether journals and logs are kept.
    """

    heartbeat_interval_ms: int
    partitions: int
    records: int
    consumers: int
    seed: int
    keep: bool

    def __attrs_post_init__(self) -> None:
        least, most = HEARTBEAT_MS_LEAST, HEARTBEAT_MS_MOST
        if not least <= self.heartbeat_interval_ms <= most:
            raise ConfigurationError(
                f"--heartbeat-interval must be {least} ms to {most // 1000} s, not "
                f"{self.heartbeat_interval_ms} ms",
                setting="--heartbeat-interval",
            )

    @property
    def jitter_ms(self) -> int:
        """The longest random delay before a claim (PROTOCOL 5.1)."""
        return min(self.heartbeat_interval_ms // 10, JITTER_MS_MAX)

    @property
    def stale_s(self) -> float:
        """Two heartbeat intervals, in seconds."""
        return 2 * self.heartbeat_interval_ms / 1000


@attrs.frozen(kw_only=True)
class Plan:
    """Settings that differ between the rounds.

    Attributes:
        delivery: ``alo`` or ``amo``.
        topic: Data topic to create.
        group_id: The consumers' group.
        folder: Folder of journals and logs.
        deadline: When the round must be over.
    """

    delivery: str
    topic: str
    group_id: str
    folder: Path
    deadline: Deadline


class Stage(Closing):
    """Runs one round and gathers its evidence. A context manager."""

    def __init__(
        self, plan: Plan, options: DemoOptions, *, bootstrap_servers: str, show: Show
    ) -> None:
        self._plan = plan
        self._options = options
        self._servers = bootstrap_servers
        self._show = show
        self._open = ExitStack()
        self._workers: list[WorkerProcess] = []
        self._processed: dict[int, set[int]] = defaultdict(set)
        self._problems: list[str] = []
        self._killed: WorkerProcess | None = None
        self._pause: Pause | None = None
        self._slowest_read_ms = self._round_trip_ms = 0
        self._names = [f"{plan.topic}-{n}" for n in range(options.partitions)]
        self._title = plan.topic
        # Set while the stage is open.
        self._watch: WorldWatch
        self._producing: Producing

    def close(self) -> None:
        """Stop all that the round has started. Idempotent."""
        self._open.close()

    def run(self) -> Evidence:
        """Run the round to its end or to the first failure; return the evidence."""
        self._prepare()
        try:
            self._start_workers()
            self._kill_one()
            self._pause_group()
            self._finish()
        except MarshalError as error:
            self._problems.append(_sentence(error))
            self._show.step(_sentence(error))
        return self._evidence()

    # --- the steps

    def _prepare(self) -> None:
        plan, options = self._plan, self._options
        plan.folder.mkdir(parents=True, exist_ok=True)
        self._title = "Filling the topic"
        create_topic(self._servers, plan.topic, partitions=options.partitions)
        self._watch = self._open.enter_context(WorldWatch.open(self._servers))
        self._producing = self._open.enter_context(
            Producing(self._servers, plan.topic, partitions=options.partitions)
        )
        self._producing.fill(options.records)
        self._producing.start(per_second=PER_SECOND)
        self._show.step(
            f"Topic {plan.topic}: {options.partitions} partitions, "
            f"{options.records:,} "
            f"records at the start, {PER_SECOND} more each second."
        )

    def _start_workers(self) -> None:
        plan = self._plan
        for number in range(1, self._options.consumers + 1):
            settings = WorkerSettings(
                bootstrap_servers=self._servers,
                group_id=plan.group_id,
                client_id=f"worker-{number}",
                topic=plan.topic,
                delivery=Delivery(plan.delivery),
                batch=BATCH,
                work_ms=WORK_MS,
                folder=str(plan.folder),
            )
            worker = WorkerProcess(settings)
            self._open.callback(worker.close)
            self._workers.append(worker)
        self._title = "Consumers start"
        self._wait(
            lambda: all(worker.is_ready for worker in self._workers),
            START_S,
            "The consumer processes did not all start",
        )
        for worker in self._workers:
            worker.start_consuming()
        self._wait(
            self._is_shared,
            SHARE_S,
            "The consumers did not come to hold an equal share each",
        )
        pids = ", ".join(f"{each.name} is process {each.pid}" for each in self._workers)
        self._show.step(
            f"{len(self._workers)} consumers share group {plan.group_id}: {pids}."
        )

    def _kill_one(self) -> None:
        self._title = "All consumers work"
        enough = min(100, self._options.records // (4 * self._options.consumers))
        self._wait(
            lambda: all(worker.processed >= enough for worker in self._holding()),
            SHARE_S,
            f"The consumers did not each process {enough} records",
        )
        victim = self._choose_victim()
        self._wait(
            lambda: victim.left_of_batch > 0,
            SHARE_S,
            f"{victim.name} never had work in progress",
        )
        held = self._held_by(victim.name)
        killed_at = time.monotonic()
        self._slowest_read_ms = 0
        victim.kill()
        self._update()
        self._killed = victim
        batch = victim.done_of_batch + victim.left_of_batch
        self._title = f"{victim.name} is dead; who takes over?"
        self._show.step(
            f"Killed {victim.name} (process {victim.pid}) with SIGKILL, "
            f"{victim.done_of_batch} records into a batch of {batch}. "
            f"It held {', '.join(held)}."
        )
        limit_s = 2 * self._options.stale_s + RELEASE_S
        self._wait(
            lambda: not self._held_by(victim.name) and not self._held_by(None),
            limit_s,
            f"Not every partition of {victim.name} was taken over",
        )
        slowest_ack_ms = self._producing.slowest_ack_ms(since_s=killed_at)
        self._round_trip_ms = self._slowest_read_ms + slowest_ack_ms
        self._report_takeovers()

    def _report_takeovers(self) -> None:
        for each in self._read_log().takeovers():
            self._show.step(
                f"{each.after.client_id} took over {each.after.key.topic_partition} "
                f"from {each.before.client_id}, {each.took_ms / 1000:.2f} s after its "
                f"last heartbeat (two intervals are {self._options.stale_s:.1f} s)."
            )

    def _pause_group(self) -> None:
        plan = self._plan
        self._wait_for(1.0)  # the new owners process records meanwhile
        self._title = "Pausing the group"
        admin = self._open.enter_context(Admin(self._servers, client_id="demo-admin"))
        asked_at_ms = journal.monotonic_ms()
        admin.pause_group(plan.group_id, for_ms=PAUSE_MS, reason="demo")
        self._wait(
            lambda: not self._held(),
            self._options.stale_s + RELEASE_S,
            "The paused consumers did not release every partition",
        )
        drained_at_ms = journal.monotonic_ms()
        before = sum(worker.processed for worker in self._workers)
        self._show.step(
            f"Paused the group: all partitions were released after "
            f"{(drained_at_ms - asked_at_ms) / 1000:.2f} s."
        )
        self._title = "The group is paused: no consumer works"
        self._wait_for(REST_S)
        done = sum(worker.processed for worker in self._workers) - before
        self._show.step(
            f"{done} records processed in {REST_S:.0f} s, while {PER_SECOND} more were "
            "produced each second."
        )
        ended_at_ms = journal.monotonic_ms()
        admin.resume_group(plan.group_id, reason="demo")
        self._pause = Pause(asked_at_ms, drained_at_ms, ended_at_ms)
        self._title = "The group is resumed"
        self._wait(
            lambda: not self._held_by(None),
            self._options.stale_s + RELEASE_S,
            "Not every partition was claimed again after the pause",
        )
        self._show.step("Resumed the group: every partition has an owner again.")

    def _finish(self) -> None:
        self._title = "The rest is processed"
        produced = dict(self._producing.finish())
        total = sum(produced.values())
        self._wait(
            self._is_all_done,
            CATCH_UP_S,
            "Not everything that was produced was processed",
        )
        self._show.step(f"All partitions are at their end: {total:,} records.")
        self._title = "Consumers stop"
        for worker in self._workers:
            worker.terminate()
        deadline = self._plan.deadline.within(int(STOP_S * 1_000))
        for worker in self._workers:
            problem = worker.wait_stopped(deadline)
            if problem is not None:
                self._problems.append(problem)
        self._update()

    # --- queries

    def _choose_victim(self) -> WorkerProcess:
        """Choose a worker with the most partitions; only the seed decides which."""
        counts = {each.name: len(self._held_by(each.name)) for each in self._workers}
        most = max(counts.values())
        able = [each for each in self._workers if counts[each.name] == most]
        return random.Random(self._options.seed).choice(able)  # noqa: S311 - a demo

    def _holding(self) -> list[WorkerProcess]:
        """Return workers that hold partitions, which may be too few for all workers."""
        return [worker for worker in self._workers if self._held_by(worker.name)]

    def _owners(self) -> dict[str, tuple[str, str]]:
        """Return the client and token of each partition that has an owner."""
        owners = {}
        for key, state in self._watch.world().standing().items():
            owner = state.keys[key].owner
            if key.group_id == self._plan.group_id and owner is not None:
                place = str(key.topic_partition)
                owners[place] = owner.client_id, str(state.token(key))
        return owners

    def _holders(self) -> dict[str, str | None]:
        known = {name: owner for name, (owner, _) in self._owners().items()}
        return {name: known.get(name) for name in self._names}

    def _held_by(self, name: str | None) -> list[str]:
        return [place for place, holder in self._holders().items() if holder == name]

    def _held(self) -> list[str]:
        return [place for place, holder in self._holders().items() if holder]

    def _is_shared(self) -> bool:
        counts = [len(self._held_by(worker.name)) for worker in self._workers]
        is_whole = sum(counts) == self._options.partitions
        return is_whole and max(counts) - min(counts) <= 1

    def _is_all_done(self) -> bool:
        return all(
            count - 1 in self._processed[partition]
            for partition, count in self._producing.written().items()
        )

    # --- waiting and showing

    def _wait(self, is_done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait for a condition.

        Raises:
            StepFailed: The deadline passed, or a consumer ended.
        """
        deadline = self._plan.deadline.within(int(limit_s * 1_000))
        while True:
            self._update()
            if is_done():
                return
            for worker in self._workers:
                problem = worker.unexpected_end()
                if problem is not None:
                    raise StepFailed(problem)
            if deadline.is_over:
                raise StepFailed(f"{what} within {deadline.timeout_ms / 1_000:.0f} s.")

    def _wait_for(self, seconds: float) -> None:
        pause = Deadline(int(seconds * 1_000))
        self._wait(lambda: pause.is_over, seconds + 1, "The wait did not end")

    def _update(self) -> None:
        for folded in self._watch.read(POLL_MS):
            # The broker has the clock of this machine.
            late_ms = time.time_ns() // journal.NS_PER_MS - folded.entry.timestamp_ms
            self._slowest_read_ms = max(self._slowest_read_ms, late_ms)
        for worker in self._workers:
            for line in worker.read():
                if line.kind == journal.RECORD:
                    self._processed[line.partition].add(line.offset)
        self._show.update(self._board())

    def _board(self) -> Board:
        produced, owners = self._producing.written(), self._owners()
        rows = []
        for number, name in enumerate(self._names):
            holder, token = owners.get(name, (None, ""))
            rows.append(
                PartitionRow(
                    name=name,
                    holder=holder,
                    token=token,
                    processed=len(self._processed[number]),
                    produced=produced.get(number, 0),
                )
            )
        counts = [row.holder for row in rows]
        workers = tuple(
            WorkerRow(
                name=each.name,
                pid=each.pid,
                state=each.state,
                held=counts.count(each.name),
                processed=each.processed,
            )
            for each in self._workers
        )
        return Board(self._title, tuple(rows), workers)

    # --- evidence

    def _evidence(self) -> Evidence:
        found = LogEvidence()
        try:
            found = self._read_log()
            self._update()
        except MarshalError as error:
            self._problems.append(_sentence(error))
        return Evidence(
            delivery=self._plan.delivery,
            produced=dict(self._producing.written()),
            journals={each.name: tuple(each.reader.lines) for each in self._workers},
            log=found,
            killed=None if self._killed is None else self._killed.name,
            pause=self._pause,
            heartbeat_interval_ms=self._options.heartbeat_interval_ms,
            jitter_ms=self._options.jitter_ms,
            round_trip_ms=self._round_trip_ms,
            batch=BATCH,
            problems=tuple(self._problems),
        )

    def _read_log(self) -> LogEvidence:
        with LogScan(self._servers) as scan:
            return LogEvidence.of(scan, self._plan.group_id)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."
