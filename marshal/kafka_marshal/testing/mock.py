"""A consumer for tests of code that takes one: the real class, without a cluster.

Hand-out, commits, seeks, callbacks and both guarantees are those of ``Consumer``. Only
the layers below are replaced: the topics, and the log, which confirms every request at
once. If a call would wait, a simulated clock moves instead, so no test waits.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

from kafka_marshal.arguments import to_ms, to_partition
from kafka_marshal.client import Marshal
from kafka_marshal.clock import SystemEntropy, ThreadBackground
from kafka_marshal.conditions import Condition
from kafka_marshal.config import Callbacks, ConsumerConfig
from kafka_marshal.consumer import Consumer
from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine import Holding, StartRule, Subscription
from kafka_marshal.engine.grants import GrantRequester
from kafka_marshal.engine.holding import Drain
from kafka_marshal.engine.holdings import ClaimSession, Holdings
from kafka_marshal.engine.interfaces import ClaimPorts
from kafka_marshal.engine.subscription import SubscriptionSet
from kafka_marshal.errors import InvalidTransition, MarshalError
from kafka_marshal.observability import LoggingObserver
from kafka_marshal.outgoing import Outgoing, SourceProgress, TransactionalWriter
from kafka_marshal.policies import find_policy
from kafka_marshal.ports import (
    FAR_MS,
    Clock,
    DataLog,
    DataReader,
    LogRange,
    PlainRecord,
    Record,
    TopicInfo,
    joined_records,
)
from kafka_marshal.protocol.claiming import Claim, Claimant, Ending, Sublease
from kafka_marshal.protocol.granting import AtMostOnce, GrantRequest, GrantVerdict
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.state import ACCEPTED
from kafka_marshal.protocol.types import (
    Key,
    OffsetRange,
    Owner,
    TimestampType,
    Token,
    TopicPartition,
)
from kafka_marshal.remote.context import RemoteContext, RemoteEngine

if TYPE_CHECKING:
    from kafka_marshal.aio import AsyncConsumer

ME = Owner("mock-client", b"mock-incarnation")
GROUP_ID = "mock-group"
INTERVAL_MS = 10_000
OFFSETS_MAX = 1_000_000  # offsets of a request
P = ParamSpec("P")
_Make = Callable[["MockConsumer", ConsumerConfig, Callbacks], None]
# A waiting thread sleeps this long, so that others run.
REST_S = 0.001


class _Changed(Condition):
    """A condition whose wait moves the clock, and lets other threads run."""

    def __init__(self, lock: threading.RLock, topics: "_Topics") -> None:
        super().__init__(lock)
        self._topics = topics

    def wait(self, timeout: float | None = None) -> bool:
        self._topics.ms += int((timeout or 0) * 1000)
        return super().wait(REST_S)


class _Topics(DataReader, TransactionalWriter, Clock):
    """The records, their one reader, the producer of transactions, and the clock."""

    def __init__(self) -> None:
        self.logs: defaultdict[TopicPartition, list[Record]] = defaultdict(list)
        self.changed: _Changed
        self.ms = 0
        self.sent: list[Outgoing] = []
        self._done: dict[TopicPartition, SourceProgress] = {}
        self._places: dict[TopicPartition, tuple[int, Token | None]] = {}
        self._paused: set[TopicPartition] = set()

    def now_ms(self) -> int:
        return self.ms

    wall_ms = now_ms

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self._places = {p: self._places.get(p, (0, None)) for p in partitions}

    def seek(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        token: Token | None = None,
        topic_id: bytes | None = None,
    ) -> None:
        del topic_id
        self._places[partition] = offset, token

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)

    def poll(
        self, timeout_ms: int, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        found: dict[TopicPartition, Sequence[Record]] = {}
        with self.changed:
            for partition, (offset, token) in self._places.copy().items():
                records = self.logs[partition][offset : offset + max_records]
                if records and partition not in self._paused:
                    found[partition] = list(joined_records([records], token))
                    max_records -= len(records)
                    del self._places[partition]  # the next poll reads it last
                    self._places[partition] = offset + len(records), token
            if timeout_ms and not found:
                self.changed.wait(timeout_ms / 1000)
        return found

    def positions(self) -> Mapping[TopicPartition, int]:
        return {each: offset for each, (offset, _) in self._places.items()}

    def ends(self) -> Mapping[TopicPartition, int]:
        return {each: len(self.logs[each]) for each in self._places}

    def ranges(
        self, partitions: Sequence[TopicPartition], *_: object, **__: object
    ) -> Mapping[TopicPartition, LogRange]:
        return {each: LogRange(0, len(self.logs[each])) for each in partitions}

    def transactions(self, *_: object, **__: object) -> TransactionalWriter:
        return self

    def progress(
        self, partition: TopicPartition, *, timeout_ms: int
    ) -> SourceProgress | None:
        del timeout_ms
        return self._done.get(partition)

    def write(
        self,
        records: Iterable[Outgoing],
        *,
        partition: TopicPartition,
        position: int,
        metadata: str = "",
    ) -> None:
        self.sent += records
        self._done[partition] = SourceProgress(position, metadata)

    def close(self, timeout_ms: int = 0) -> None:
        del timeout_ms


class _Grants(GrantRequester):
    """Grants each request at once."""

    _span, _verdict_ms_max = OFFSETS_MAX, INTERVAL_MS

    def __init__(
        self, context: RemoteContext, *, on_end: Callable[[Holding], None]
    ) -> None:
        super().__init__(context, context.holdings, on_end=on_end)
        self.heads = context.heads

    def request(self, holding: Holding, last: int) -> None:
        super().request(holding, last)
        granted = OffsetRange.through(self._sent.first, self._sent.last)
        self.heads[holding.key] = granted.end
        verdict = GrantVerdict(
            outcome=ACCEPTED, reason=None, granted=granted, head=granted.end, offset=0
        )
        grantee = self._sent.grantee
        self._apply(holding.key, verdict, grantee=grantee, seq=0, holding=holding)

    def _send(self, holding: Holding, request: GrantRequest) -> tuple[int, int]:
        del holding
        self._sent = request
        return 0, self._context.now_ms

    def update_anchor(self, holding: Holding) -> None:
        if isinstance(holding.progress, AtMostOnce):
            holding.progress.is_anchored = True


class _Session(ClaimSession):
    """Has the claims that the test gives it; confirms every request at once."""

    handoff_counts: Mapping[str, int] = {}
    leaving_count = 0
    holdings: dict[Key, Holding]

    def __init__(self, context: RemoteContext, subscription: Subscription) -> None:
        self.claimant = Claimant(ME, GROUP_ID, master=b"")
        self.holdings, self._heads = context.holdings, context.heads
        self._subscription, self._epoch = subscription, 0
        self.positions: dict[Key, int] = {}
        self._held = Holdings(
            context,
            self,
            client_id=ME.client_id,
            by_key=self.holdings,
            wanted=SubscriptionSet([subscription]),
        )
        self.grants = _Grants(context, on_end=self._held.after_end)

    def claim(self, key: Key, position: int) -> None:
        if key in self.holdings:
            raise InvalidTransition(f"{key.topic_partition} is held already")
        delivery = self._subscription.config.delivery
        holding = Holding(Claim(self.claimant, key), delivery, StartRule())
        self._epoch += 1
        sublease = Sublease(
            claimant=self.claimant,
            epoch=self._epoch,
            token=Token(1, 0, self._epoch),
            secret=b"",
            lease=Lease(FAR_MS, FAR_MS),
            heartbeat_interval_ms=INTERVAL_MS,
        )
        holding.claim.assign(sublease)
        holding.begin(position, grantee=ME.incarnation)
        holding.set_by = ""  # not set by an admin: transactions need to know
        self.holdings[key] = holding
        self.positions[key] = self._heads[key] = position
        self._held.note_won(holding, effect="claimed", why=None, log_ms=0)
        self._subscription.version += 1

    def lose(self, key: Key, ending: Ending) -> None:
        if key not in self.holdings:
            raise InvalidTransition(f"{key.topic_partition} is not held")
        self._held.end(self.holdings[key], ending)

    def position_in_log(self, key: Key) -> int:
        holding = self.holdings.get(key)
        if holding is None:
            return self.positions.get(key, 0)
        return self._heads[key] if holding.position is None else holding.position

    def remove(self, holding: Holding) -> bool:
        if self.holdings.get(holding.key) is not holding:
            return False
        self.positions[holding.key] = self.position_in_log(holding.key)
        del self.holdings[holding.key]
        return True

    def release(self, holding: Holding, *, reason: str) -> None:
        self._held.release(holding, Drain(reason, None, None))

    def unwant(self, holding: Holding) -> None:
        self.release(holding, reason="released")

    def unsubscribe(self, subscription: Subscription, *, release: bool) -> list[int]:
        del subscription
        for holding in list(self.holdings.values()) if release else ():
            self.release(holding, reason="closed")
        return []

    def seek(self, holding: Holding, position: int) -> None:
        holding.seek(position)

    def is_pending(self, seqs: Iterable[int], *, late: bool = True) -> bool:
        del seqs, late
        return False

    def beat_now(self) -> list[int]:
        return []

    def taker_of(self, sub: Subscription, topic: str) -> None:
        """Return None: there is no other member."""

    def stuck_count(self, key: Key) -> int:
        del key
        return 0

    def send_release(self, holding: Holding, drain: Drain) -> None:
        """Do nothing: the release is confirmed already."""

    def on_release(self, key: Key, reason: str) -> None:
        """Do nothing, as above."""

    def on_end(self, holding: Holding, ending: Ending) -> None:
        """Do nothing, as above."""


class _Settings:
    """Stands in for a ``Marshal``, whose method ``consumer`` checks its arguments."""

    def open_consumer(
        self, config: ConsumerConfig, callbacks: Callbacks, *, timeout_ms: int
    ) -> tuple[ConsumerConfig, Callbacks]:
        to_ms("timeout_ms", timeout_ms)
        return config, callbacks


def _taking_what_consumer_takes(
    read: Callable[Concatenate[Marshal, P], Consumer],
) -> Callable[[_Make], Callable[Concatenate["MockConsumer", P], None]]:
    """Return a decorator that gives a constructor the arguments of ``read``."""

    def decorate(make: _Make) -> Callable[Concatenate["MockConsumer", P], None]:
        def init(self: "MockConsumer", /, *args: P.args, **kwargs: P.kwargs) -> None:
            given = {"consumer_timeout_ms": 0} | kwargs
            make(self, *cast("Any", read)(_Settings(), *args, **given))

        return wraps(read)(init)

    return decorate


class MockConsumer(Consumer):
    """A ``Consumer`` of records that a test adds, for code that takes a consumer.

    It claims a partition when the first record is added to it; commits are in the log
    at once. Iteration ends with the last record, unless ``consumer_timeout_ms`` is
    None. Claims, their loss, and failures are up to the test: it calls ``claim``,
    ``lose`` and ``fail``, from any thread, also in callbacks.

    Args:
        Those of ``Marshal.consumer``. There is no other member to hand off to, or to
            stand by for.

    Attributes:
        sent: Records that transactions have written, in order.
    """

    @_taking_what_consumer_takes(Marshal.consumer)
    def __init__(self, config: ConsumerConfig, callbacks: Callbacks) -> None:
        self._topics = data = _Topics()
        ports = ClaimPorts(
            data=cast("DataLog", data),
            clock=data,
            entropy=SystemEntropy(),
            background=ThreadBackground(),
            observer=LoggingObserver(),
        )
        context = RemoteContext(
            ports=ports, heartbeat_interval_ms=INTERVAL_MS, span=OFFSETS_MAX
        )
        engine = RemoteEngine(context)
        engine.changed = data.changed = _Changed(engine.lock, data)
        subscription = Subscription(
            group_id=GROUP_ID,
            topics={topic: TopicInfo(1, None) for topic in config.topics},
            policy=find_policy(config.policy),
            config=config,
            matches=config.matches(COORDINATION_TOPIC),
        )
        callbacks.require_fit(
            counts_topics=subscription.counts_topics, standbys=config.standbys
        )
        self._claims = _Session(context, subscription)
        Consumer.__init__(
            self,
            engine,
            self._claims,
            subscription=subscription,
            reader=data,
            callbacks=callbacks,
        )
        self.sent = data.sent

    def add(
        self,
        topic: str,
        partition: int,
        *values: bytes | None,
        key: bytes | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
        timestamp_ms: int = 0,
    ) -> None:
        """Append records to a partition; claim it with the first ones.

        Args:
            topic: Its topic.
            partition: Its number.
            values: The values; offsets begin at 0.
            key: Key of each.
            headers: Headers of each.
            timestamp_ms: Timestamp of each.

        Raises:
            InvalidTransition: The topic is not consumed.
            TypeError: A value or the key is not bytes.
        """
        for given in (key, *values):
            if not isinstance(given, bytes | None):
                raise TypeError(
                    f"records have bytes or None, not {type(given).__name__}"
                )
        with self._engine.changed:
            place = to_partition((topic, partition))
            if Key(GROUP_ID, *place) not in self._claims.positions:
                self.claim(place)
            log = self._topics.logs[place]
            for value in values:
                log.append(
                    PlainRecord(
                        topic=topic,
                        partition=partition,
                        offset=len(log),
                        timestamp_ms=timestamp_ms,
                        timestamp_type=TimestampType.CREATE_TIME,
                        key=key,
                        value=value,
                        headers=headers,
                    )
                )

    def claim(self, partition: TopicPartition, position: int | None = None) -> None:
        """Win a partition under a new token; by default at its position in the log.

        Raises:
            InvalidTransition: The topic is not consumed, or the partition is held.
        """
        key, subscription = Key(GROUP_ID, *to_partition(partition)), self._subscription
        is_wanted = subscription.matches or subscription.topics.__contains__
        if not is_wanted(key.topic):
            raise InvalidTransition(f"this consumer does not consume {key.topic!r}")
        with self._engine.changed:
            subscription.topics.setdefault(key.topic, TopicInfo(1, None))
            start = self._claims.position_in_log(key) if position is None else position
            self._claims.claim(key, start)

    def lose(
        self,
        partition: TopicPartition,
        reason: str = "taken_over",
        *,
        winner: str | None = None,
        was_lost: bool = True,
    ) -> None:
        """End a claim, as another client or an expired lease would.

        Args:
            partition: A partition that is held.
            reason: Reason that ``on_lost`` and ``ClaimLost`` report.
            winner: The client that holds it now, or None.
            was_lost: False if it was released, as planned.

        Raises:
            InvalidTransition: It is not held.
        """
        with self._engine.changed:
            key = Key(GROUP_ID, *to_partition(partition))
            self._claims.lose(key, Ending(reason, winner, was_lost=was_lost))

    def fail(self, error: MarshalError) -> None:
        """Fail for good: every later call raises this error."""
        with self._engine.changed:
            self._claims.fail(error)

    def position_in_log(self, partition: TopicPartition) -> int:
        """Return where the next owner starts, also after ``close``."""
        with self._engine.changed:
            return self._claims.position_in_log(Key(GROUP_ID, *to_partition(partition)))

    def as_async(self) -> "AsyncConsumer":
        """Return it for an event loop."""
        from kafka_marshal.aio import AsyncConsumer

        return AsyncConsumer(lambda: self)
