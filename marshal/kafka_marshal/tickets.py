"""At most once in another process than the owner's (PROTOCOL 6.2).

A query's driver holds the claims, its tasks process. Each attempt of a task asks
for its offsets itself: a ClaimingMessages under the driver's claim, with a grantee
that nobody else has ever used. Grants of a key are pairwise disjoint whatever is
late, doubled or lost, so of all attempts at a range, retried, speculative or of a
driver long gone, at most one is given it. What is not given is not processed.

The verdict comes from the fold of the log, read back here or by the sidecar of this
host. It is found by the grantee: sequence numbers are the owner's business.
"""

import atexit
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import attrs

from kafka_marshal.clock import SystemClock, SystemEntropy
from kafka_marshal.engine.agreement import require_cluster
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.replica import Replica, check_halt
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    LogUnreadable,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.kafka_io import ConnectionSettings, open_coordination_log
from kafka_marshal.kafka_io.settings import AUTO, COORDINATION_TOPIC
from kafka_marshal.ports import Append, Clock, CoordinationLog, Entropy
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.records import ClaimingMessages, Config
from kafka_marshal.protocol.transition import Transition
from kafka_marshal.protocol.types import Key, Owner

POLL_MS = 100
RESEND_MS = 100
CLOSE_MS = 1_000
GRANTEE_BYTES = 16
# The owner counts from 0, so that its own numbers never come up here.
SEQ_FIRST = 2**62


@attrs.frozen
class ClaimRef:
    """A claim as whoever works for its owner has to know it; can be pickled.

    Attributes:
        group_id: Group.
        client_id: Owner in the log.
        incarnation: Its process start.
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim.
        token: Its fencing token, dotted.
    """

    group_id: str
    client_id: str
    incarnation: bytes
    topic: str
    partition: int
    epoch: int
    token: str

    @property
    def key(self) -> Key:
        """The key that is claimed."""
        return Key(self.group_id, self.topic, self.partition)

    @property
    def owner(self) -> Owner:
        """The claimant."""
        return Owner(self.client_id, self.incarnation)


@attrs.frozen
class Verdict:
    """What the log says to one request.

    Attributes:
        granted: First and last offset that are this grantee's; None = nothing.
        reason: Why not, such as ``nothing_left`` or ``not_owner``.
        offset: Log offset of the request; None where none was needed, because
            the log had ended the claim before.
    """

    granted: tuple[int, int] | None
    reason: str | None
    offset: int | None


class TicketOffice(Protocol):
    """Where the tasks of one process ask. Thread-safe; one request at a time."""

    def spend(
        self, ref: ClaimRef, first: int, last: int, *, timeout_ms: int
    ) -> list[tuple[int, int]]:
        """Ask for offsets once, as a grantee that never asked before.

        Returns:
            The range that this call, and no other ever, may process, both ends
            inclusive; nothing where somebody else was granted it, or the claim is
            over. A range may begin below ``first``, where nobody was granted what
            lies before it, and above; it ends at ``last``, or below where the log
            grants less at a time.

        Raises:
            DeadlineExceeded: No verdict in time. Whether the range was granted is
                unknown: nothing of it may be processed, by this call's caller
                neither. Another call may be granted it if this one was not.
            MarshalError: The log or the sidecar cannot be used; the same holds.
        """
        if not 0 <= first <= last:
            return []
        verdict = self.ask(ref, (first, last), timeout_ms=timeout_ms)
        return [] if verdict.granted is None else [verdict.granted]

    def ask(
        self, ref: ClaimRef, wanted: tuple[int, int], *, timeout_ms: int
    ) -> Verdict:
        """Do what ``spend`` does, and tell why nothing was granted."""
        ...

    def is_current(self, ref: ClaimRef, *, timeout_ms: int) -> bool:
        """Return whether the claim stands, by a fold not older than the call.

        It may end the moment after: what must not be written twice needs a sink
        that compares tokens, or a grant.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
            MarshalError: The log or the sidecar cannot be used.
        """
        ...

    def close(self) -> None:
        """Let go of every connection. Idempotent."""
        ...


class TicketLog(CoordinationLog, Protocol):
    """A coordination log of which some partitions are read."""

    @property
    def cluster_id(self) -> str | None:
        """Cluster that it is of."""
        ...

    def read_also(self, partition: int, *, timeout_ms: int) -> None:
        """Read one more partition from its start."""
        ...

    def configure(self, heartbeat_interval_ms: int, *, timeout_ms: int) -> None:
        """Make ready to append, now that H is known."""
        ...


OpenLog = Callable[[Callable[[int], Collection[int]], int], TicketLog]
"""Opens a log: which partitions to read, by their number, and a timeout."""


class LogOffice(TicketOffice):
    """Asks the log itself: appends, and folds what comes back.

    Only the coordinating partitions of the keys that are asked for are read, from
    the log's start the first time, and what is new from then on: a worker process
    that is used again pays for the log once.
    """

    def __init__(
        self,
        open_log: OpenLog,
        *,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        """Connect to nothing yet; the first call does."""
        self._open_log = open_log
        self._clock = SystemClock() if clock is None else clock
        self._entropy = SystemEntropy() if entropy is None else entropy
        self._lock = threading.Lock()
        self._log: TicketLog | None = None
        self._follower: Follower | None = None

    def ask(
        self, ref: ClaimRef, wanted: tuple[int, int], *, timeout_ms: int
    ) -> Verdict:
        """Ask for offsets; see ``TicketOffice``."""
        with self._turn(timeout_ms) as left:
            replica, config = self._opened(ref, left)
            if _is_over(replica, ref):
                return Verdict(None, _why_over(replica, ref), None)
            first, last = wanted
            last = min(last, first + config.limit("span") - 1)
            transition = self._settle(ref, (first, last), replica=replica, left=left)
        detail = transition.detail
        granted = None
        if transition.effect == "granted" and detail is not None:
            granted = (detail["first"], detail["last"])
        return Verdict(granted, transition.reason, transition.offset)

    def is_current(self, ref: ClaimRef, *, timeout_ms: int) -> bool:
        """Return whether the claim stands; see ``TicketOffice``."""
        with self._turn(timeout_ms) as left:
            replica, _ = self._opened(ref, left)
            self._catch_up(left)
            known = replica.world.keys.get(ref.key)
            return (
                known is not None
                and known.owner == ref.owner
                and known.epoch == ref.epoch
            )

    def close(self) -> None:
        """Let go of the log."""
        log, self._log, self._follower = self._log, None, None
        if log is not None:
            log.close(CLOSE_MS)

    # --- one request

    def _settle(
        self,
        ref: ClaimRef,
        wanted: tuple[int, int],
        *,
        replica: Replica,
        left: "_Left",
    ) -> Transition:
        """Append a request and return the fold's verdict on it."""
        assert self._log is not None
        assert self._follower is not None
        t = replica.world.partition
        # PROTOCOL 6.2: a grantee is one attempt, and drawn anew for each.
        grantee = self._entropy.random_bytes(GRANTEE_BYTES)
        seq = SEQ_FIRST + int.from_bytes(grantee[:7], "big")
        value = encode(
            ClaimingMessages(
                ref.client_id,
                ref.group_id,
                ref.incarnation,
                seq,
                ref.topic,
                ref.partition,
                ref.epoch,
                grantee,
                *wanted,
            )
        )
        sending = _Sending(self._log, t, value, self._clock)
        while True:
            for partition, transition in self._follower.step(left.slice_ms()):
                record = transition.record
                if (
                    partition == t
                    and isinstance(record, ClaimingMessages)
                    and record.grantee == grantee
                ):
                    return transition
            check_halt(replica)
            sending.look()

    # --- the log

    def _opened(self, ref: ClaimRef, left: "_Left") -> tuple[Replica, Config]:
        """Return the partition that judges a claim, read to an end of it."""
        place = (ref.topic, ref.partition)

        def guess(count: int) -> Collection[int]:
            return (coordinating_partition(*place, partition_count=count),)

        if self._log is None:
            self._log = self._open_log(guess, left.ms())
            self._follower = Follower(self._log, self._clock)
            self._catch_up(left)
        follower = self._follower
        assert follower is not None
        # As many partitions as the topic has is a guess at K; each Config tells it.
        count = self._log.partition_count
        (t,) = guess(count)
        config = self._config_of(t, left) or self._config_of(0, left)
        if config is None:
            raise TopicMisconfigured(
                "the coordination topic is not formatted; run: marshal topic format",
                problems=("not formatted: partition 0 carries no Config",),
            )
        require_cluster(config, self._log.cluster_id)
        self._log.configure(config.heartbeat_interval_ms, timeout_ms=left.ms())
        (t,) = guess(config.partition_count)
        self._config_of(t, left)
        return follower.replicas[t], config

    def _config_of(self, t: int, left: "_Left") -> Config | None:
        """Return the Config of a partition; read it first where it is new here."""
        assert self._log is not None
        assert self._follower is not None
        replica = self._follower.replicas[t]
        if replica.world.config is None:
            self._log.read_also(t, timeout_ms=left.ms())
            self._catch_up(left)
            if self._log.start_offsets(left.ms())[t] > 0:
                # PROTOCOL 7.3: whoever cannot see the winning claims asks nothing.
                raise LogUnreadable(
                    f"the log of coordinating partition {t} begins above offset 0: "
                    "records that decide who owns what may be gone; set "
                    "retention.ms=-1, then format a new coordination topic"
                )
        check_halt(replica)
        return replica.world.config

    def _catch_up(self, left: "_Left") -> None:
        assert self._follower is not None
        self._follower.catch_up(left.ms())

    @contextmanager
    def _turn(self, timeout_ms: int) -> Iterator["_Left"]:
        """Let one thread ask at a time; forget a log that cannot be read further."""
        left = _Left(self._clock, timeout_ms)
        if not self._lock.acquire(timeout=max(0, timeout_ms) / 1000):
            raise _late("another thread still waits for its own verdict")
        try:
            yield left
        except CoordinationError as error:
            if not error.retriable:
                self.close()
            raise
        finally:
            self._lock.release()


class _Left:
    """What is left of a call's time."""

    def __init__(self, clock: Clock, timeout_ms: int) -> None:
        self._clock = clock
        self._until_ms = clock.now_ms() + timeout_ms

    def ms(self) -> int:
        """Return the time left.

        Raises:
            DeadlineExceeded: There is none.
        """
        left_ms = self._until_ms - self._clock.now_ms()
        if left_ms <= 0:
            raise _late("check the brokers with: marshal doctor")
        return left_ms

    def slice_ms(self) -> int:
        """Return how long to wait now, at most what is left."""
        return min(POLL_MS, self.ms())


class _Sending:
    """A request on its way; sent again where it is told to have failed.

    PROTOCOL 1.4: it may land all the same, and then twice. Both name the same
    grantee, and the first that lands leaves nothing for the second.
    """

    def __init__(self, log: TicketLog, t: int, value: bytes, clock: Clock) -> None:
        self._log, self._t, self._value, self._clock = log, t, value, clock
        self._send()

    def _send(self) -> None:
        self._append: Append = self._log.append(self._t, self._value)
        self._sent_ms = self._clock.now_ms()

    def look(self) -> None:
        """Send it again if it failed.

        Raises:
            MarshalError: The log refuses this process for good.
        """
        error = self._append.error() if self._append.is_done() else None
        if error is None:
            return
        if not error.retriable:
            raise error
        if self._clock.now_ms() - self._sent_ms >= RESEND_MS:
            self._send()


def _late(what: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"no verdict of the coordination log in time, so nothing is processed; {what}"
    )


def _is_over(replica: Replica, ref: ClaimRef) -> bool:
    """Return whether the fold shows that the claim has ended.

    Epochs of a key only grow, so this never becomes untrue. A key that is unknown
    here, or stands at an earlier epoch, says nothing: it may be yet to be read.
    """
    known = replica.world.keys.get(ref.key)
    if known is None or known.epoch < ref.epoch:
        return False
    return known.epoch > ref.epoch or known.owner is None


def _why_over(replica: Replica, ref: ClaimRef) -> str:
    known = replica.world.keys[ref.key]
    return "old_epoch" if known.owner == ref.owner else "not_owner"


# --- one office per process and connection

_lock = threading.Lock()
_offices: dict[object, TicketOffice] = {}


def _forget_lock() -> None:
    """Make the lock anew in a forked child: its holder is not there (PROTOCOL 1.7)."""
    global _lock  # noqa: PLW0603 - the one place that may
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def open_office(
    connection: Mapping[str, str], *, sidecar: str | None = None
) -> TicketOffice:
    """Return this process's office for a connection, made where there is none.

    Nothing is connected before it is asked something.

    Args:
        connection: ``bootstrap_servers``; ``coordination_topic`` and ``transport``
            unless they are the usual; connection options by any of their names.
        sidecar: Address of this host's sidecar, such as ``unix:/run/...``. Where
            it does not answer the call, the log is asked instead.

    Raises:
        ConfigurationError: Something in ``connection`` is missing or impossible.
    """
    settings = _settings(connection)
    name = (os.getpid(), sidecar, *sorted(connection.items()))
    with _lock:
        found = _offices.get(name)
        if found is None:
            found = _office_of(settings)
            _offices[name] = found
            if len(_offices) == 1:
                atexit.register(close_offices)
        return found


def close_offices() -> None:
    """Close every office of this process; the next call makes new ones."""
    with _lock:
        gone = list(_offices.items())
        _offices.clear()
    for name, office in gone:
        if isinstance(name, tuple) and name[0] == os.getpid():
            with suppress(MarshalError):
                office.close()


def _settings(connection: Mapping[str, str]) -> ConnectionSettings:
    options: dict[str, Any] = dict(connection)
    servers = options.pop("bootstrap_servers", None)
    if servers is None:
        raise ConfigurationError(
            "bootstrap_servers is missing: name at least one broker, like "
            "broker-1:9092",
            setting="bootstrap_servers",
        )
    topic = options.pop("coordination_topic", COORDINATION_TOPIC)
    transport = options.pop("transport", AUTO)
    return ConnectionSettings(servers, topic, options, transport=transport)


def _office_of(settings: ConnectionSettings) -> TicketOffice:
    def open_log(only: Callable[[int], Collection[int]], timeout_ms: int) -> TicketLog:
        return open_coordination_log(
            settings, heartbeat_interval_ms=None, timeout_ms=timeout_ms, only=only
        )

    return LogOffice(open_log)
