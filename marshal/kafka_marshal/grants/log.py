"""Requests grants from the log itself: appends requests, and folds the verdicts."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kafka_marshal.clock import SystemClock, SystemEntropy
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.checkpoint_reader import SHORT_MAX, LogCheckpoints
from kafka_marshal.engine.config_check import require_cluster, unformatted
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.kept_states import POLL_MS
from kafka_marshal.engine.proxy_grants import draw_grantee, draw_seq
from kafka_marshal.engine.replica import Replica, check_halt
from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    LogUnreadable,
)
from kafka_marshal.ports import Clock, Entropy
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.granting import GrantRequest, GrantVerdict, verdict_of
from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.placement import (
    Worlds,
    counts_of,
    partition_of,
    standing_of,
)
from kafka_marshal.protocol.records import ClaimingMessages, Config
from kafka_marshal.protocol.state import IGNORED, WorldState
from kafka_marshal.protocol.types import Key, OffsetRange, Token

from .client import ClaimRef, ClaimState, GrantClient

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.topiclog import TopicLog

RESEND_MS = 100
CLOSE_MS = 1_000


OpenLog = Callable[[Callable[[int], Collection[int]], int], "TopicLog"]
"""Opens a log; takes the partitions to read, given their number, and a timeout."""


class LogGrantClient(GrantClient):
    """Requests grants from the log itself: appends requests, and folds the verdicts.

    It reads only the coordinating partitions of the requested keys: at first from the
    last checkpoint, later only new entries. A reused worker process reads the log once.
    """

    def __init__(
        self,
        open_log: OpenLog,
        *,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        """Open nothing; the first call connects."""
        self._open_log = open_log
        self.clock = SystemClock() if clock is None else clock
        self._entropy = SystemEntropy() if entropy is None else entropy
        self._lock = threading.Lock()
        self._log: TopicLog | None = None
        self._follower: Follower | None = None
        self._started: set[int] = set()

    def request(
        self, ref: ClaimRef, wanted: OffsetRange, *, timeout_ms: int
    ) -> GrantVerdict:
        """Make one request; see ``GrantClient``."""
        # PROTOCOL 6.2: a grantee is drawn for each attempt.
        request = ref.request(wanted, grantee=draw_grantee(self._entropy))
        with self._locked(timeout_ms) as deadline:
            replica, config = self._claimed(ref, deadline)
            over = _verdict_if_over(request, replica.world, token=ref.token)
            if over is not None:
                return over
            head = _head(replica, ref.key)
            cut = request.within(config.limit("span"), head=head)
            return self._append(cut, replica=replica, deadline=deadline)

    def newest(self, key: Key, *, timeout_ms: int) -> ClaimState | None:
        """Return the newest claim of a key; see ``GrantClient``."""
        with self._locked(timeout_ms) as deadline:
            self._opened(key, deadline)
            self._catch_up(deadline)
            worlds, _ = self._opened(key, deadline)
            world = standing_of(worlds, key)
            if world is None:
                return None
            known, token = world.keys[key], world.token(key)
            assert token is not None  # a known key has a Config
            return ClaimState(str(token), known.epoch, known.owner)

    def close(self) -> None:
        """Close the log."""
        log, self._log, self._follower = self._log, None, None
        self._started.clear()
        if log is not None:
            log.close(CLOSE_MS)

    # --- one request

    def _append(
        self, request: GrantRequest, *, replica: Replica, deadline: Deadline
    ) -> GrantVerdict:
        """Append a request and return the fold's verdict on it.

        An append that is reported as failed is repeated. It may land all the same
        (PROTOCOL 1.4), and then the request is in the log twice. Both records have the
        same grantee, and the first leaves nothing for the second.

        Raises:
            MarshalError: The log refuses this process for good.
        """
        assert self._log is not None
        assert self._follower is not None
        t = replica.world.partition
        value = encode(request.to_record(draw_seq(self._entropy)))
        append, sent_ms = self._log.append(t, value), self.clock.now_ms()
        while True:
            for partition, transition in self._follower.step(
                min(POLL_MS, deadline.require_ms(_late))
            ):
                record = transition.record
                if (
                    partition == t
                    and isinstance(record, ClaimingMessages)
                    and record.grantee == request.grantee
                ):
                    return verdict_of(transition, head=_head(replica, request.key))
            check_halt(replica)
            error = append.error() if append.is_done() else None
            if error is None:
                continue
            if not error.retriable:
                raise error
            if self.clock.now_ms() - sent_ms >= RESEND_MS:
                append, sent_ms = self._log.append(t, value), self.clock.now_ms()

    # --- the log

    def _claimed(self, ref: ClaimRef, deadline: Deadline) -> tuple[Replica, Config]:
        """Return the replica that has a claim, or a later one, and the Config.

        If a key has moved, tokens of its two partitions can be compared, epochs cannot
        (PROTOCOL 10). A claim that neither partition has is not read yet.
        """
        token, key = Token.parse(ref.token), ref.key
        worlds, config = self._opened(key, deadline)
        if _newest_token(worlds, key) < token:
            self._catch_up(deadline)
            worlds, config = self._opened(key, deadline)
        place = max(worlds, key=lambda t: _token_of(worlds[t], key))
        if _newest_token(worlds, key) < token:
            found = partition_of(worlds, key)
            place = place if found is None else found
        assert self._follower is not None
        return self._follower.replicas[place], config

    def _opened(
        self, key: Key, deadline: Deadline
    ) -> tuple[dict[int, WorldState], Config]:
        """Return the coordinating partitions that may know a key, and the Config.

        Each is read once, from its last checkpoint. There are two while the partition
        count changes.
        """
        place = (key.topic, key.partition)

        def guess(count: int) -> Collection[int]:
            return (coordinating_partition(*place, partition_count=count),)

        if self._log is None:
            self._log = self._open_log(guess, deadline.require_ms(_late))
            self._follower = Follower(self._log, self.clock)
        follower = self._follower
        assert follower is not None
        # Guess from the topic's number of partitions; each Config has the true count.
        (t,) = guess(self._log.partition_count)
        config = self._config_of(t, deadline) or self._config_of(0, deadline)
        if config is None:
            raise unformatted(follower.worlds)
        require_cluster(config, self._log.cluster_id)
        self._log.configure(
            config.heartbeat_interval_ms, timeout_ms=deadline.require_ms(_late)
        )
        worlds: dict[int, WorldState] = {}
        wanted = set(guess(config.partition_count))
        while left := wanted - worlds.keys():
            if max(left) >= self._log.partition_count:
                # Partitions were added since the log was opened.
                self.close()
                return self._opened(key, deadline)
            for t in left:
                self._config_of(t, deadline)
                worlds[t] = follower.replicas[t].world
                wanted.update(*map(guess, counts_of({0: worlds[t]})))
        newest = max(
            (world.config for world in worlds.values() if world.config is not None),
            key=lambda each: each.generation,
            default=config,
        )
        return worlds, newest

    def _config_of(self, t: int, deadline: Deadline) -> Config | None:
        """Return the Config of a partition; catch up first if it was never read."""
        assert self._log is not None
        assert self._follower is not None
        replica = self._follower.replicas[t]
        if t not in self._started:
            self._log.read_also(t, timeout_ms=deadline.require_ms(_late))
            # Read a long log from its last checkpoint.
            self._follower.restore(
                [t],
                sources=(LogCheckpoints(whole_max=SHORT_MAX),),
                timeout_ms=deadline.require_ms(_late),
            )
            self._started.add(t)
            self._catch_up(deadline)
        elif replica.world.config is None:
            self._catch_up(deadline)
        if t in self._follower.log_start_missing:
            # PROTOCOL 7.3: no requests without the records of the winning claims.
            raise LogUnreadable(
                f"the log of coordinating partition {t} begins above offset 0, and no "
                "checkpoint replaces the missing records, which may decide who owns a "
                "partition, so nothing is granted; see: marshal doctor"
            )
        check_halt(replica)
        return replica.world.config

    def _catch_up(self, deadline: Deadline) -> None:
        assert self._follower is not None
        self._follower.catch_up(deadline.require_ms(_late))

    @contextmanager
    def _locked(self, timeout_ms: int) -> Iterator[Deadline]:
        """Serve one thread at a time; close a log that cannot be read further."""
        deadline = Deadline(timeout_ms, self.clock.now_ms)
        if not self._lock.acquire(timeout=max(0, timeout_ms) / 1000):
            raise _late("another thread still waits for its own verdict")
        try:
            yield deadline
        except CoordinationError as error:
            if not error.retriable:
                self.close()
            raise
        finally:
            self._lock.release()


def _late(what: str = "check the brokers with: marshal doctor") -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the coordination log gave no verdict in time, so nothing is processed; {what}"
    )


def _token_of(world: WorldState, key: Key) -> Token:
    """Return the token of a key's last claim in a partition; the least without one."""
    known, token = world.keys.get(key), world.token(key)
    is_claimed = known is not None and known.epoch > 0
    return token if token is not None and is_claimed else Token(-1, -1, -1)


def _newest_token(worlds: Worlds, key: Key) -> Token:
    return max(_token_of(world, key) for world in worlds.values())


def _verdict_if_over(
    request: GrantRequest, world: WorldState, *, token: str
) -> GrantVerdict | None:
    """Return the verdict if the claim has ended, None if the log must decide."""
    newest, mine = _token_of(world, request.key), Token.parse(token)
    if newest.era == mine.era or newest < mine:
        known = world.keys.get(request.key) if newest.era == mine.era else None
        return request.verdict_if_over(known)
    known = world.keys[request.key]
    return GrantVerdict(
        outcome=IGNORED,
        reason="not_owner",
        head=known.next_unclaimed(),
        offset=None,
    )


def _head(replica: Replica, key: Key) -> int | None:
    known = replica.world.keys.get(key)
    return None if known is None else known.next_unclaimed()
