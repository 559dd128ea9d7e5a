"""Tickets from the log itself: appended, and folded as they come back."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from kafka_marshal.clock import SystemClock, SystemEntropy
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.config_check import require_cluster, unformatted
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.replica import Replica, check_halt
from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    LogUnreadable,
)
from kafka_marshal.ports import Append, Clock, CoordinationLog, Entropy
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.granting import last_within, why_over
from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.records import ClaimingMessages, Config
from kafka_marshal.protocol.state import Transition
from kafka_marshal.protocol.types import Key

from .office import ClaimRef, Standing, TicketOffice, Verdict

POLL_MS = 100
RESEND_MS = 100
CLOSE_MS = 1_000
GRANTEE_BYTES = 16
# The owner counts from 0, so that its own numbers never come up here.
SEQ_FIRST = 2**62


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
    the last checkpoint the first time, and what is new from then on: a worker process
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
        self.clock = SystemClock() if clock is None else clock
        self._entropy = SystemEntropy() if entropy is None else entropy
        self._lock = threading.Lock()
        self._log: TicketLog | None = None
        self._follower: Follower | None = None
        self._begun: set[int] = set()

    def ask(
        self, ref: ClaimRef, wanted: tuple[int, int], *, timeout_ms: int
    ) -> Verdict:
        """Ask for offsets; see ``TicketOffice``."""
        with self._turn(timeout_ms) as left:
            replica, config = self._opened(ref.key, left)
            reason = why_over(
                replica.world.keys.get(ref.key), ref.owner, epoch=ref.epoch
            )
            if reason is not None:
                return Verdict(None, reason, None)
            first, last = wanted
            head = _head(replica, ref.key)
            span = config.limit("span")
            last = last_within(last, first if head is None else head, span=span)
            transition = self._settle(ref, (first, last), replica=replica, left=left)
            head = _head(replica, ref.key)
        detail = transition.detail
        granted = None
        if transition.effect == "granted" and detail is not None:
            granted = (detail["first"], detail["last"])
        return Verdict(granted, transition.reason, transition.offset, head)

    def newest(self, key: Key, *, timeout_ms: int) -> Standing | None:
        """Return the newest claim of a key; see ``TicketOffice``."""
        with self._turn(timeout_ms) as left:
            replica, _ = self._opened(key, left)
            self._catch_up(left)
            known, token = replica.world.keys.get(key), replica.world.token(key)
            if known is None or token is None:
                return None
            return Standing(str(token), known.epoch, known.owner)

    def close(self) -> None:
        """Let go of the log."""
        log, self._log, self._follower = self._log, None, None
        self._begun.clear()
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
        sending = _Sending(self._log, t, value, self.clock)
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

    def _opened(self, key: Key, left: "_Left") -> tuple[Replica, Config]:
        """Return the partition that judges a key, read to an end of it."""
        place = (key.topic, key.partition)

        def guess(count: int) -> Collection[int]:
            return (coordinating_partition(*place, partition_count=count),)

        if self._log is None:
            self._log = self._open_log(guess, left.ms())
            self._follower = Follower(self._log, self.clock)
        follower = self._follower
        assert follower is not None
        # As many partitions as the topic has is a guess at K; each Config tells it.
        count = self._log.partition_count
        (t,) = guess(count)
        config = self._config_of(t, left) or self._config_of(0, left)
        if config is None:
            raise unformatted(follower.worlds)
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
        if t not in self._begun:
            self._log.read_also(t, timeout_ms=left.ms())
            # Far from its start, a log is read from its last checkpoint on.
            self._follower.restore([t], sources=(LogCheckpoints(),))
            self._begun.add(t)
            self._catch_up(left)
        elif replica.world.config is None:
            self._catch_up(left)
        if t in self._follower.log_start_missing:
            # PROTOCOL 7.3: whoever cannot see the winning claims asks nothing.
            raise LogUnreadable(
                f"the log of coordinating partition {t} begins above offset 0, and no "
                "checkpoint leads up to it: records that decide who owns what may be "
                "gone; see: marshal doctor"
            )
        check_halt(replica)
        return replica.world.config

    def _catch_up(self, left: "_Left") -> None:
        assert self._follower is not None
        self._follower.catch_up(left.ms())

    @contextmanager
    def _turn(self, timeout_ms: int) -> Iterator["_Left"]:
        """Let one thread ask at a time; forget a log that cannot be read further."""
        left = _Left(self.clock, timeout_ms)
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


def _head(replica: Replica, key: Key) -> int | None:
    known = replica.world.keys.get(key)
    return None if known is None else known.next_unclaimed()
