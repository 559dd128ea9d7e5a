"""The public entry: a client of a group, with its consumers and claims."""

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafka_marshal.arguments import (
    require_flag,
    require_instance,
    to_ms,
    to_name,
    to_person,
    to_text,
    to_whole,
)
from kafka_marshal.closing import Closing, warn_unclosed
from kafka_marshal.config import (
    MAX_POLL_RECORDS,
    WARM_BYTES,
    Callbacks,
    ConsumerConfig,
    Delivery,
    OnClaimed,
    OnLost,
    OnStandby,
    OnTopics,
    OnWarm,
    checked_labels,
)
from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import CHECKPOINT_INTERVAL_MS
from kafka_marshal.errors import (
    ConfigurationError,
    InvalidTransition,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.observability import FanOut, LoggingObserver
from kafka_marshal.ports import READ_UNCOMMITTED, Observer
from kafka_marshal.protocol.codec import is_topic
from kafka_marshal.protocol.granting import DEPTH_MAX_DEFAULT
from kafka_marshal.protocol.types import PARTITION_MAX, Key, TopicPartition
from kafka_marshal.stopping import forget, stop_on

if TYPE_CHECKING:
    from kafka_marshal.backend import LocalBackend
    from kafka_marshal.claims import HeldClaim
    from kafka_marshal.consumer import Consumer
    from kafka_marshal.engine import Subscription
    from kafka_marshal.engine.holdings import ClaimSession
    from kafka_marshal.engine.interfaces import ClaimEngine
    from kafka_marshal.policies import Policy
    from kafka_marshal.ranges import RangeConsumer
    from kafka_marshal.remote.backend import SidecarBackend

# The engine and kafka-python are imported when a Marshal is opened, so a program that
# only names the class, for example to check its arguments, does not wait for them.
OPEN_MS_MAX = 30_000
CLOSE_MS_MAX = 10_000
# One observer for all clients of the process: they share the engine that sends events.
_LOGGING = LoggingObserver()


class Marshal(Closing):
    """One client of one group. Opening it connects and reads the log to its end.

    Objects of one process share a connection to the coordination log. A
    ``Marshal`` belongs to the process that opened it: after a fork the child
    must open its own (PROTOCOL 1.7).

    Args:
        bootstrap_servers: Addresses of the cluster, ``host:port`` with commas,
            or a sequence of addresses; one live address is enough. By default
            ``localhost:9092``, or the addresses that the sidecar uses.
        group_id: The group; each group reads independently of all others.
        client_id: Name of this client, unique in the group. With a stable name, a
            restart within one heartbeat interval resumes the claims.
        coordination_topic: Name of the coordination topic; by default
            ``__marshal``, or the sidecar's.
        options: Security and connection options, by kafka-python's names or
            librdkafka's dotted ones (``sasl.mechanism``, ``ssl_cafile``, ...).
        transport: The client library of the logs: ``fast`` (librdkafka, extra
            ``fast``), ``kafka-python``, or ``auto`` for the first that can be used.
        heartbeat_interval_ms: Heartbeat interval that this client expects. The log
            stores the interval; a different value here is an error. None accepts any.
        state_dir: Directory of the identity with which a restart resumes claims; None
            for the user's state directory, ``""`` for no identity.
        observer: One observer of events, or several; by default events are logged.
        check_topic: Whether to refuse a coordination topic whose settings would
            break the guarantees of claims, if this principal may read the settings.
        mirror_offsets: Whether positions are also committed as the group's
            offsets in Kafka, best effort, for tools that show lag.
        checkpoint_interval_ms: How often to write a checkpoint of a coordinating
            partition, unless another process has written one; 0 = never.
        sidecar: Address of a sidecar of this host that holds the claims instead of
            an engine of this process: ``unix:/path/of/the.sock`` or
            ``http://127.0.0.1:PORT``. Records are still read from Kafka directly. The
            sidecar has its own ``state_dir``, ``check_topic`` and ``mirror_offsets``.
        sidecar_token_file: File with the sidecar's token, for TCP.
        sidecar_instance: With a sidecar: 16 bytes that identify this process. A
            process that gives the bytes of an earlier process takes its place; the
            earlier process must be dead. None for random bytes.
        person: Name of the person for whom this client claims, which its claims in the
            log carry; None for no person. For tools that people run.
        labels: Labels for planners of the group and custom policies: ``rack``;
            ``target``, the number of partitions beyond which other members are
            preferred; ``replaces``, the client whose place this one takes after a
            restart under another name, or ``*`` for any client that is drained or
            restarts; and any others that a custom policy knows.
        can_plan: Whether this client may plan for its group, if the group has policy
            ``planner``.
        timeout_ms: Longest time to open the client.

    Raises:
        ConfigurationError: A setting is invalid.
        TopicMisconfigured: The coordination topic is missing, unformatted, torn (its
            partitions have different formats) or formatted for another cluster.
        IdentityConflict: Another live process on this machine has this client_id.
        CoordinationError: The cluster did not answer.
    """

    _backend: "LocalBackend | SidecarBackend"
    _consumers: "list[Consumer | RangeConsumer]"
    _closers: list[Callable[[], None]]

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        group_id: str,
        client_id: str,
        coordination_topic: str | None = None,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        heartbeat_interval_ms: int | None = None,
        state_dir: str | Path | None = None,
        observer: Observer | Sequence[Observer] | None = None,
        check_topic: bool = True,
        mirror_offsets: bool = True,
        checkpoint_interval_ms: int = CHECKPOINT_INTERVAL_MS,
        sidecar: str | None = None,
        sidecar_token_file: str | Path | None = None,
        sidecar_instance: bytes | None = None,
        person: str | None = None,
        labels: Mapping[str, str] | None = None,
        can_plan: bool = True,
        timeout_ms: int = OPEN_MS_MAX,
    ) -> None:
        from kafka_marshal.backend import ClientOptions, LocalBackend
        from kafka_marshal.remote.backend import ConnectOptions, open_backend

        names = _names(group_id=group_id, client_id=client_id)
        self._group_id, self._client_id = names.values()
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        every_ms = to_ms("checkpoint_interval_ms", checkpoint_interval_ms)
        heartbeat_interval_ms = _expected_ms(heartbeat_interval_ms)
        _require_flags(check_topic, mirror_offsets, can_plan)
        self._is_closed, self._pid = False, os.getpid()
        self._consumers, self._closers, self._is_stopped = [], [], False
        settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic or None,
            options=options,
            transport=transport,
        )
        observer = _one_observer(observer)
        if sidecar is None:
            _require_none(sidecar_token_file, sidecar_instance)
            local = ClientOptions(
                **names,
                heartbeat_interval_ms=heartbeat_interval_ms,
                state_dir=state_dir,
                check_topic=check_topic,
                mirror_offsets=mirror_offsets,
                checkpoint_interval_ms=every_ms,
                timeout_ms=timeout_ms,
                person=to_person(person),
                labels=checked_labels(labels or {}),
                can_plan=can_plan,
            )
            self._backend = LocalBackend(settings, local, observer=observer)
        else:
            _require_defaults(mirror_offsets, person=person, labels=labels)
            remote = ConnectOptions(
                sidecar=sidecar,
                token_file=sidecar_token_file,
                has_servers=bootstrap_servers is not None,
                coordination_topic=coordination_topic,
                heartbeat_interval_ms=heartbeat_interval_ms,
                settings=settings,
                instance=sidecar_instance,
            )
            self._backend = open_backend(
                remote, **names, observer=observer, timeout_ms=timeout_ms
            )

    # --- use

    @property
    def engine(self) -> "ClaimEngine":
        """The engine that drives the claims, for views and tests."""
        return self._backend.engine

    @property
    def session(self) -> "ClaimSession":
        """The engine's session of this client, for metrics and tests."""
        return self._backend.session

    @property
    def coordination_topic(self) -> str:
        """Name of the coordination topic."""
        return self._backend.coordination_topic

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    @property
    def transport(self) -> str:
        """The transport in use: ``fast`` or ``kafka-python``."""
        return self._backend.transport

    @property
    def client_id(self) -> str:
        """Name of this client."""
        return self._client_id

    @property
    def group_id(self) -> str:
        """The group."""
        return self._group_id

    def __repr__(self) -> str:
        """Return group, client and state; never waits."""
        failure = self.engine.failure or self.session.failure
        state = "open" if failure is None else f"failed: {failure}"
        return (
            f"<Marshal group_id={self._group_id!r} client_id={self._client_id!r} "
            f"{'closed' if self._is_closed else state}>"
        )

    def consumer(
        self,
        *topics: str,
        pattern: str | re.Pattern[str] | None = None,
        delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
        policy: "str | Policy" = "fair",
        claims_max: int = 0,
        auto_offset_reset: str = "earliest",
        isolation_level: str = READ_UNCOMMITTED,
        max_poll_records: int = MAX_POLL_RECORDS,
        max_granted_batches: int = DEPTH_MAX_DEFAULT,
        max_uncommitted: int = 10_000,
        max_fetched: int = 5_000,
        warm_bytes: int = WARM_BYTES,
        max_handling_ms: int | None = None,
        release_behind: bool = True,
        consumer_timeout_ms: int | None = None,
        metadata_refresh_ms: int = 30_000,
        standbys: int = 0,
        on_claimed: OnClaimed | None = None,
        on_lost: OnLost | None = None,
        on_topics: OnTopics | None = None,
        on_warm: OnWarm | None = None,
        on_standby: OnStandby | None = None,
        timeout_ms: int = OPEN_MS_MAX,
    ) -> "Consumer":
        """Return a consumer of some topics, which starts to claim partitions at once.

        The settings are described in docs/reference.md, and as attributes of
        ``kafka_marshal.config.ConsumerConfig``.

        Raises:
            ConfigurationError: A setting is invalid.
            LogUnreadable: A topic does not exist.
            InvalidTransition: This client already consumes one of the topics.
        """
        config = ConsumerConfig(
            topics=topics,
            pattern=pattern,
            delivery=delivery,
            policy=policy,
            claims_max=claims_max,
            auto_offset_reset=auto_offset_reset,
            isolation_level=isolation_level,
            max_poll_records=max_poll_records,
            max_granted_batches=max_granted_batches,
            max_uncommitted=max_uncommitted,
            max_fetched=max_fetched,
            warm_bytes=warm_bytes,
            max_handling_ms=max_handling_ms,
            release_behind=release_behind,
            consumer_timeout_ms=consumer_timeout_ms,
            metadata_refresh_ms=metadata_refresh_ms,
            standbys=standbys,
        )
        callbacks = Callbacks(
            on_claimed=on_claimed,
            on_lost=on_lost,
            on_topics=on_topics,
            on_warm=on_warm,
            on_standby=on_standby,
        )
        return self.open_consumer(config, callbacks, timeout_ms=timeout_ms)

    def open_consumer(
        self,
        config: ConsumerConfig,
        callbacks: Callbacks | None = None,
        *,
        timeout_ms: int = OPEN_MS_MAX,
    ) -> "Consumer":
        """Return a consumer with these settings; see ``consumer``."""
        from kafka_marshal.clock import ThreadBackground
        from kafka_marshal.consumer import Consumer
        from kafka_marshal.engine.standbys import StandbyThread
        from kafka_marshal.engine.warm_fetches import new_fetcher

        timeout_ms = to_ms("timeout_ms", timeout_ms)
        if callbacks is None:
            callbacks = Callbacks()
        require_instance("callbacks", callbacks, kind=Callbacks)
        data = self.engine.context.ports.data
        subscription = self._new_subscription(config, timeout_ms)
        callbacks.require_fit(
            counts_topics=subscription.counts_topics, standbys=config.standbys
        )
        if callbacks.on_warm is not None:
            subscription.on_warm = callbacks.on_warm
            subscription.warming = ThreadBackground(name="marshal-warm")
            subscription.warm_fetcher = new_fetcher(
                config,
                data=data,
                background=ThreadBackground(name="marshal-warm-fetch"),
                observe=self.engine.context.observe,
            )
        if callbacks.on_standby is not None:
            subscription.standby = StandbyThread(
                callbacks.on_standby, ThreadBackground(name="marshal-standby")
            )
        try:
            self._backend.subscribe(subscription)
            consumer = Consumer(
                self.engine,
                self.session,
                subscription=subscription,
                reader=data.reader(isolation_level=config.isolation_level),
                callbacks=callbacks,
            )
            self._keep(consumer)
        except BaseException:
            self._give_up(subscription)
            raise
        return consumer

    def ranges(
        self, config: ConsumerConfig, *, timeout_ms: int = OPEN_MS_MAX
    ) -> "RangeConsumer":
        """Hold partitions like a consumer, for records that other processes read.

        Args:
            config: The settings. ``max_handling_ms`` is the longest time without a call
                of ``held`` or a commit.
            timeout_ms: Longest time to look up the topics.

        Raises:
            LogUnreadable: A topic does not exist.
            InvalidTransition: This client already consumes one of the topics.
        """
        from kafka_marshal.ranges import RangeConsumer

        subscription = self._new_subscription(config, timeout_ms)
        try:
            self._backend.subscribe(subscription)
            ranges = RangeConsumer(
                self.engine,
                self.session,
                subscription=subscription,
                last_claims=self._backend.last_claims,
            )
            self._keep(ranges)
        except BaseException:
            self._give_up(subscription)
            raise
        return ranges

    def _new_subscription(
        self, config: ConsumerConfig, timeout_ms: int
    ) -> "Subscription":
        from kafka_marshal.subscribing import new_subscription

        self._require_open()
        require_instance("config", config, kind=ConsumerConfig)
        return new_subscription(
            config,
            self.engine.context.ports.data,
            group_id=self.group_id,
            coordination_topic=self.coordination_topic,
            timeout_ms=timeout_ms,
        )

    def _give_up(self, subscription: "Subscription") -> None:
        """End a subscription without a consumer, for example after Ctrl-C."""
        with self.engine.changed:
            self.session.unsubscribe(subscription, release=True)

    def _keep(self, opened: "Consumer | RangeConsumer") -> None:
        """Register a consumer to be closed with this client."""
        open_ones = [other for other in self._consumers if not other.is_closed]
        self._consumers = [*open_ones, opened]
        if self._is_stopped:
            opened.stop()

    def claim(
        self, topic: str, partition: int, *, timeout_ms: int = OPEN_MS_MAX
    ) -> "HeldClaim":
        """Claim one partition without consuming it, and wait until it is won.

        A partition that does not exist can be claimed; the event ``partition_unknown``
        reports it.

        Raises:
            ConfigurationError: The topic or the partition number is invalid.
            ClaimRejected: The claim was not won in time; another process holds the
                partition, or it is paused.
            InvalidTransition: This client already claims or consumes the partition.
        """
        from kafka_marshal.claims import HeldClaim, note_unknown_partition

        self._require_open()
        name: object = topic
        number = to_whole("partition", partition)
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        is_name = isinstance(name, str) and is_topic(name)
        if not is_name or not 0 <= number <= PARTITION_MAX:
            raise ConfigurationError(
                f"topic {topic!r} partition {partition!r} is invalid: give the name of "
                "a topic, and a partition number from 0",
                setting="topic",
            )
        backend = self._backend
        key = Key(self.group_id, to_text(topic), number)
        holding = backend.contend_for(key)
        try:
            note_unknown_partition(backend.engine.context, key.topic_partition)
            claim = HeldClaim(
                backend.engine, backend.session, holding=holding, glance=backend.glance
            )
            claim.wait_held(timeout_ms)
        except BaseException:
            # For example Ctrl-C: nobody would have the claim, if it was won.
            with backend.engine.changed:
                backend.session.unwant(holding)
            raise
        return claim

    def world(self, *, timeout_ms: int = OPEN_MS_MAX) -> dict[str, Any]:
        """Return the world, the state of the log, as plain data.

        It is not older than this call. ``marshal log replay`` prints the same document
        (PROTOCOL 3.8).

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
        """
        self._require_open()
        return self._backend.world(to_ms("timeout_ms", timeout_ms))

    def owners(
        self, topic: str, *, timeout_ms: int = OPEN_MS_MAX
    ) -> dict[TopicPartition, str | None]:
        """Return the client_id of each partition's owner in this group, by the log.

        A partition without an owner has None; one that the log does not know is absent.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
        """
        self._require_open()
        return self._backend.owners(topic, to_ms("timeout_ms", timeout_ms))

    def stop(self) -> None:
        """End the iteration of every consumer soon, also of later ones.

        For signal handlers: a signal may arrive before the consumer is open.
        """
        self._is_stopped = True
        for consumer in self._consumers:
            consumer.stop()

    def stop_on_signals(
        self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
    ) -> None:
        """Call ``stop`` when one of the signals arrives, until this client is closed.

        The handler in progress finishes, iteration ends, and closing flushes positions
        and releases partitions. Call this from the main thread. A signal stops all open
        clients of the process that called this. It does not affect forked children.

        Raises:
            InvalidTransition: This client is closed.
        """
        self._require_open()
        stop_on(signals, self)

    def expect_restart(self) -> None:
        """Announce that this client restarts soon, for all releases from now on.

        Like ``close(restarts=True)``, but before consumers are closed one by one.
        """
        if os.getpid() == self._pid:
            self._backend.restart()

    def close(
        self,
        *,
        release: bool = True,
        restarts: bool = False,
        timeout_ms: int = CLOSE_MS_MAX,
    ) -> None:
        """Close every consumer and claim, and leave the group. Idempotent.

        Args:
            release: False keeps the claims for a restart within one heartbeat interval.
            restarts: Whether this client, or one with the label ``replaces``, starts
                again soon. In a group with policy ``planner`` the partitions then wait
                for it, for at most ``grace_ms``. No effect with a sidecar.
            timeout_ms: Longest time in total. If the log did not confirm the close of
                one consumer in time, the rest of the close does not wait for the log.

        An exception of a signal handler, such as Ctrl-C, ends the wait for the log. The
        connections are closed all the same; claims that were not released expire. While
        the interpreter ends, as in ``__del__``, nothing is closed.

        Raises:
            ConfigurationError: An argument has the wrong type; nothing is closed.
        """
        require_flag("release", release)
        require_flag("restarts", restarts)
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        if self._is_closed:
            return
        if os.getpid() != self._pid:
            self._is_closed = True
            return
        try:
            self._is_closed = True
            forget(self)
            if restarts:
                self.expect_restart()
            self._leave(release=release, timeout_ms=timeout_ms)
        finally:  # also after Ctrl-C: otherwise the engine would go on renewing claims
            self._backend.close()
            for function in self._closers:
                function()

    def _leave(self, *, release: bool, timeout_ms: int) -> None:
        deadline = Deadline(timeout_ms, self.engine.context.ports.clock.now_ms)
        for consumer in self._consumers:
            consumer.close(release=release, timeout_ms=deadline.left_ms)
            if not consumer.is_close_confirmed:
                deadline = deadline.within(0)
        self._backend.leave(release=release, timeout_ms=deadline.left_ms)

    def __del__(self) -> None:
        """Warn if the client was not closed. Without a backend it was never open."""
        is_open = "_backend" in vars(self) and not self._is_closed
        if is_open and os.getpid() == self._pid:
            warn_unclosed(self)

    def call_on_close(self, function: Callable[[], None]) -> None:
        """Register a function to call after the close, on the closing thread."""
        self._closers.append(function)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidTransition(
                "this Marshal belongs to the parent process; open another one after "
                "the fork"
            )
        if self._is_closed:
            raise InvalidTransition("the Marshal is closed")
        failure = self.engine.failure or self.session.failure
        if failure is not None:
            raise failure


def _one_observer(given: Observer | Sequence[Observer] | None) -> Observer:
    if given is None:
        return _LOGGING
    every = given if isinstance(given, Sequence) else [given]
    for each in every:
        if not callable(getattr(each, "observe", None)):
            raise ConfigurationError(
                f"observer {each!r} has no method observe(event); derive it from "
                "kafka_marshal.Observer",
                setting="observer",
            )
    return FanOut(*every) if isinstance(given, Sequence) else given


def _require_none(sidecar_token_file: object, sidecar_instance: object) -> None:
    given = {
        "sidecar_token_file": sidecar_token_file,
        "sidecar_instance": sidecar_instance,
    }
    for setting, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"{setting} is used only with a sidecar; set sidecar, too",
                setting="sidecar",
            )


def _require_defaults(
    mirror_offsets: object, *, person: object, labels: object
) -> None:
    if labels:
        raise ConfigurationError(
            "labels cannot be set with a sidecar, which is the member of the group; "
            "leave them out",
            setting="labels",
        )
    if person is not None:
        raise ConfigurationError(
            "person cannot be set with a sidecar, which claims for its clients; leave "
            "it out",
            setting="person",
        )
    if not mirror_offsets:
        raise ConfigurationError(
            "with a sidecar mirror_offsets cannot be turned off, because the sidecar "
            "mirrors for all its clients; omit it",
            setting="mirror_offsets",
        )


def _names(**given: object) -> dict[str, str]:
    return {setting: to_name(setting, name) for setting, name in given.items()}


def _expected_ms(heartbeat_interval_ms: object) -> int | None:
    if heartbeat_interval_ms is None:
        return None
    return to_ms("heartbeat_interval_ms", heartbeat_interval_ms)


def _require_flags(
    check_topic: object, mirror_offsets: object, can_plan: object
) -> None:
    require_flag("check_topic", check_topic)
    require_flag("mirror_offsets", mirror_offsets)
    require_flag("can_plan", can_plan)
