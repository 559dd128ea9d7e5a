"""Follows the coordination log, and records everything that it accepts.

Accepted records are the evidence for the demo's verdict: who owned each key, from
when on, at which position, and which offsets were granted. The log judge also checks
each record.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping

import attrs

from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.kept_states import POLL_MS
from kafka_marshal.errors import CoordinationError, DeadlineExceeded, MarshalError
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.protocol.log_judge import LogJudge
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import ACCEPTED, KeyState, Transition, WorldState
from kafka_marshal.protocol.types import Key, LogEntry, OffsetRange

OPEN_MS_MAX = 15_000
CLOSE_MS_MAX = 5_000
DELAYS_KEPT_MAX = 20_000
FINDINGS_KEPT_MAX = 20
NS_PER_MS = 1_000_000
_LOOK_INTERVAL_S = 0.01


@attrs.frozen(kw_only=True)
class Fact:
    """One accepted record about one key.

    Attributes:
        key: The key.
        effect: Its effect, as named in PROTOCOL 3.8 (``claimed``, ...).
        client_id: Writer of the record.
        epoch: The key's epoch after it; the offset of the winning claim.
        offset: Offset of the record in its coordinating partition.
        timestamp_ms: When the broker appended it, by the broker's clock.
        position: The key's position after it, or None.
        granted: The offsets that it granted, or None.
    """

    key: Key
    effect: str
    client_id: str
    epoch: int
    offset: int
    timestamp_ms: int
    position: int | None
    granted: OffsetRange | None = None


@attrs.frozen
class Holder:
    """The owner of a key now, by the log; ``client_id`` is None once released."""

    client_id: str | None
    token: str
    position: int | None


class LogWatch(Closing):
    """Reads the whole coordination log on its own thread. Context manager."""

    def __init__(self, bootstrap_servers: str) -> None:
        """Connect and start to read, from the log's start.

        Args:
            bootstrap_servers: Addresses of the cluster.

        Raises:
            TopicMisconfigured: There is no such topic.
            CoordinationError: The cluster did not answer.
        """
        self._log = open_coordination_log(
            ConnectionConfig(bootstrap_servers),
            heartbeat_interval_ms=None,
            timeout_ms=OPEN_MS_MAX,
        )
        self._worlds = [WorldState(t) for t in range(self._log.partition_count)]
        self._judges = [LogJudge(world) for world in self._worlds]
        self._findings: deque[str] = deque(maxlen=FINDINGS_KEPT_MAX)
        self._facts: list[Fact] = []
        self._delays: deque[tuple[float, int]] = deque(maxlen=DELAYS_KEPT_MAX)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._ends: dict[int, int] | None = None
        self._failure: MarshalError | None = None
        self._thread = threading.Thread(
            target=self._run, name="marshal-watch", daemon=True
        )
        self._thread.start()

    def facts(self, group_id: str) -> tuple[Fact, ...]:
        """Return everything accepted so far about the keys of one group.

        Raises:
            CoordinationError: The log cannot be read any more.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            return tuple(fact for fact in self._facts if fact.key.group_id == group_id)

    def holders(self, group_id: str) -> Mapping[Key, Holder]:
        """Return the holder of each key of a group that was ever claimed, in order."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            found = {
                key: _holder(world, key, known)
                for world in self._worlds
                for key, known in world.keys.items()
                if key.group_id == group_id
            }
        return dict(sorted(found.items()))

    def findings(self) -> tuple[str, ...]:
        """Return the last violated invariants of the log, a line each."""
        with self._lock:
            return tuple(self._findings)

    def slowest_read_ms(self, *, since_s: float) -> int:
        """Return the longest delay from a record's append to its arrival here.

        Correct only if the broker has the same clock, as an embedded one does.

        Args:
            since_s: Only of records that arrived after this ``time.monotonic``.
        """
        with self._lock:
            delays = [delay for at, delay in self._delays if at >= since_s]
        return max(delays, default=0)

    def catch_up(self, timeout_ms: int = OPEN_MS_MAX) -> None:
        """Wait until all records that the log has now are read.

        Raises:
            CoordinationError: The log cannot be read.
            DeadlineExceeded: Not in time.
        """
        deadline = Deadline(timeout_ms)
        with self._lock:
            self._ends = None
        while not self._has_caught_up():
            if deadline.is_over:
                raise DeadlineExceeded(
                    f"the coordination log was not read to its end in {timeout_ms} ms"
                )
            time.sleep(_LOOK_INTERVAL_S)

    def close(self) -> None:
        """Stop reading and close the connection. Idempotent."""
        self._is_over.set()
        self._thread.join(timeout=CLOSE_MS_MAX / 1000)
        self._log.close(CLOSE_MS_MAX)

    def _has_caught_up(self) -> bool:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            ends = self._ends
            return ends is not None and all(
                world.next_offset >= ends.get(world.partition, 0)
                for world in self._worlds
            )

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._step()
            except MarshalError as error:
                if isinstance(error, CoordinationError) and error.retriable:
                    self._is_over.wait(POLL_MS / 1000)
                    continue
                with self._lock:
                    self._failure = error
                return

    def _step(self) -> None:
        # Only this thread may use the log, so it looks up the end.
        with self._lock:
            is_asked = self._ends is None
        if is_asked:
            ends = self._log.end_offsets(OPEN_MS_MAX)
            with self._lock:
                self._ends = dict(ends)
        entries = self._log.poll(POLL_MS)
        now, wall_ms = time.monotonic(), time.time_ns() // NS_PER_MS
        with self._lock:
            for partition, entry in entries:
                self._delays.append((now, wall_ms - entry.timestamp_ms))
                world = self._worlds[partition]
                for transition in apply(world, entry):
                    for found in self._judges[partition].take(transition):
                        self._findings.append(f"{found.invariant}: {found.message}")
                    self._note(world, entry, transition)

    def _note(self, world: WorldState, entry: LogEntry, found: Transition) -> None:
        key, record = found.key, found.record
        if found.outcome != ACCEPTED or key is None or record is None:
            return
        known = world.keys.get(key)
        granted = None
        if found.effect == "granted" and found.detail is not None:
            granted = OffsetRange.through(found.detail["first"], found.detail["last"])
        self._facts.append(
            Fact(
                key=key,
                effect=found.effect or "",
                client_id=getattr(record, "client_id", ""),
                epoch=found.epoch or 0,
                offset=entry.offset,
                timestamp_ms=entry.timestamp_ms,
                position=None if known is None else known.position,
                granted=granted,
            )
        )


def _holder(world: WorldState, key: Key, known: KeyState) -> Holder:
    owner = None if known.owner is None else known.owner.client_id
    return Holder(owner, str(world.token(key)), known.position)
