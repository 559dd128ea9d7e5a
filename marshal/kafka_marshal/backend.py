"""Claims held by an engine of this process; for a sidecar see ``remote.backend``."""

import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import attrs

from kafka_marshal import runtime as runtimes
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine import Engine, Holding, Session, Subscription
from kafka_marshal.engine.checkpointing import checked_interval_ms
from kafka_marshal.engine.replica import Glance, LastClaim
from kafka_marshal.engine.waits import WAIT_SLICE_MS
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.identity import Identity, home_of
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import Observer
from kafka_marshal.protocol.claiming import Claimant, PreviousLife
from kafka_marshal.protocol.placement import standing_keys
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.text import world_to_object
from kafka_marshal.protocol.types import Key, Owner, Token, TopicPartition

MIRROR_CLOSE_MS_MAX = 1_000


@attrs.frozen(kw_only=True)
class ClientOptions:
    """Options of a client with its own engine.

    Attributes:
        group_id: The group.
        client_id: Name of the client.
        heartbeat_interval_ms: Expected heartbeat interval; None accepts any.
        state_dir: Directory of the identity; None for the user's directory.
        check_topic: Whether to refuse an unsafe coordination topic.
        mirror_offsets: Whether positions are also committed in Kafka.
        checkpoint_interval_ms: How often to write checkpoints; 0 = never.
        timeout_ms: Longest time to open.
        person: Person for whom the client claims, None for none.
        labels: Labels that its member announces besides those of the engine.
        can_plan: Whether the client may plan for its group.
    """

    group_id: str
    client_id: str
    heartbeat_interval_ms: int | None
    state_dir: str | Path | None
    check_topic: bool
    mirror_offsets: bool
    checkpoint_interval_ms: int
    timeout_ms: int
    person: str | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    can_plan: bool = True


class LocalBackend:
    """Claims held by an engine of this process, which all its clients share."""

    def __init__(
        self, settings: ConnectionConfig, options: ClientOptions, *, observer: Observer
    ) -> None:
        """Connect, or share the existing connection, and read the log to its end.

        Raises:
            ConfigurationError: The checkpoint interval is invalid.
            MarshalError: Opening failed; nothing is left open.
        """
        self._options = options
        self._observer = observer
        self._identity: Identity | None = None
        self._runtime = runtimes.acquire(
            settings,
            partial(
                runtimes.Runtime.open,
                settings,
                observer,
                state_home=home_of(options.state_dir),
                checkpoint_interval_ms=checked_interval_ms(
                    options.checkpoint_interval_ms, setting="checkpoint_interval_ms"
                ),
            ),
            timeout_ms=options.timeout_ms,
        )
        self._runtime.observers.add(observer)
        try:
            if options.check_topic:
                self._runtime.require_safe_topic()
            self._require_interval()
            self._session = self._open_session()
        except BaseException:
            self.close()
            raise

    def _open_session(self) -> Session:
        engine, options = self._runtime.engine, self._options
        entropy = self._runtime.ports.entropy
        owner, master = (
            Owner(options.client_id, entropy.random_bytes(16)),
            entropy.random_bytes(32),
        )
        lives = self._take_identity(owner.incarnation, master)
        session = Session(
            engine.context,
            Claimant(owner, options.group_id, master=master, person=options.person),
            host=socket.gethostname(),
            lives=lives,
            mirrors_offsets=options.mirror_offsets,
            can_plan=options.can_plan,
            labels=options.labels,
        )
        with engine.changed:
            engine.add_session(session)
        return session

    def _take_identity(
        self, incarnation: bytes, master: bytes
    ) -> tuple[PreviousLife, ...]:
        """Lock the identity, store this incarnation in it, return the earlier ones."""
        state_dir = self._options.state_dir
        home = home_of(state_dir)
        context = self._runtime.engine.context
        if home is None:
            if state_dir is None:
                why = "the user has no home directory; set MARSHAL_STATE_DIR"
                context.observe("identity_unavailable", {"error": why})
            return ()
        try:
            self._identity = Identity.take(
                home,
                domain=context.settled.format_id.hex(),
                group_id=self._options.group_id,
                client_id=self._options.client_id,
            )
            lives = self._identity.lives
            self._identity.remember(incarnation, master=master)
        except OSError as error:
            if self._identity is not None:  # such as on a full disk
                self._identity.close()
                self._identity = None
            if state_dir is not None:
                raise ConfigurationError(
                    f"state_dir {str(home)!r} cannot be used: {error}; name a "
                    "writable directory, or '' to start without resuming",
                    setting="state_dir",
                ) from error
            context.observe("identity_unavailable", {"error": error})
            return ()
        return lives

    def _require_interval(self) -> None:
        expected_ms = self._options.heartbeat_interval_ms
        actual_ms = self._runtime.engine.context.heartbeat_interval_ms
        if expected_ms is not None and expected_ms != actual_ms:
            raise ConfigurationError(
                f"heartbeat_interval_ms is {expected_ms} here and {actual_ms} in the "
                "log, where it applies to all clients; omit it, or change that "
                "of the log with: marshal topic alter",
                setting="heartbeat_interval_ms",
            )

    @property
    def engine(self) -> Engine:
        """The engine of this process."""
        return self._runtime.engine

    @property
    def session(self) -> Session:
        """The engine's session of this client."""
        return self._session

    @property
    def coordination_topic(self) -> str:
        """Name of the coordination topic."""
        return self._runtime.description.name

    @property
    def transport(self) -> str:
        """The transport in use."""
        return self._runtime.transport

    def subscribe(self, subscription: Subscription) -> None:
        """Subscribe a consumer, at once."""
        with self.engine.changed:
            self._session.subscribe(subscription)
            self.engine.act(self._session)

    def contend_for(self, key: Key) -> Holding:
        """Contend for one key, at once."""
        is_known = key in self._session.holdings
        try:
            with self.engine.changed:
                holding = self._session.want(key)
                self.engine.act(self._session)
        except BaseException:
            # For example Ctrl-C: the claim would be won later, for nobody.
            if not is_known:
                self._forget(key)
            raise
        return holding

    def _forget(self, key: Key) -> None:
        with self.engine.changed:
            self._session.forget_want(key)
            holding = self._session.holdings.get(key)
            if holding is not None:
                self._session.unwant(holding)

    def glance(self, key: Key) -> Glance | None:
        """Return the state of a key in the log as folded so far."""
        with self.engine.changed:
            return self.engine.context.glance(key)

    def world(self, timeout_ms: int) -> dict[str, Any]:
        """Read the log to its end, and return the world."""
        self.engine.catch_up(timeout_ms)
        with self.engine.changed:
            replicas = self.engine.context.replicas.values()
            return world_to_object(replica.world for replica in replicas)

    def owners(self, topic: str, timeout_ms: int) -> dict[TopicPartition, str | None]:
        """Read the log to its end, and return the owner of each partition."""
        self.engine.catch_up(timeout_ms)
        with self.engine.changed:
            return {
                key.topic_partition: None if known.owner is None else known.owner[0]
                for key, known, _ in self._keys()
                if (key.group_id, key.topic) == (self._options.group_id, topic)
            }

    def _keys(self) -> Iterator[tuple[Key, KeyState, Token | None]]:
        """Yield every key once, in order, with its state and token."""
        worlds = {
            t: replica.world for t, replica in self.engine.context.replicas.items()
        }
        for key, world in sorted(standing_keys(worlds).items(), key=itemgetter(0)):
            yield key, world.keys[key], world.token(key)

    def last_claims(self, timeout_ms: int) -> dict[TopicPartition, LastClaim]:
        """Read the log to its end, and return the newest claim of each key."""
        self.engine.catch_up(timeout_ms)
        ours = self._session.claimant.owner
        with self.engine.changed:
            return {
                key.topic_partition: LastClaim(
                    known.owner and known.owner.client_id,
                    known.epoch,
                    may_be_ours=known.owner == ours,
                    token=token,
                )
                for key, known, token in self._keys()
                if key.group_id == self._options.group_id
            }

    def restart(self) -> None:
        """Announce with all releases from now on that this client restarts soon."""
        with self.engine.changed:
            self._session.restart()

    def leave(self, *, release: bool, timeout_ms: int) -> None:
        """Release every claim, or send a last heartbeat; wait until it is read back."""
        session = self._session
        with self.engine.changed:
            seqs = session.begin_close(release=release)
            # Claims without a confirmed release expire within two heartbeat intervals.
            self._await_while(
                lambda: (
                    session.leaving_count > 0 or session.is_pending(seqs, late=False)
                ),
                timeout_ms,
            )
            self._await_while(
                lambda: session.is_mirror_behind, min(timeout_ms, MIRROR_CLOSE_MS_MAX)
            )
            self.engine.remove_session(session)

    def _await_while(self, is_busy: Callable[[], bool], timeout_ms: int) -> None:
        engine = self.engine
        deadline = Deadline(timeout_ms, engine.context.ports.clock.now_ms)
        while engine.failure is None and is_busy() and not deadline.is_over:
            engine.changed.wait(min(deadline.left_ms, WAIT_SLICE_MS) / 1000)

    def close(self) -> None:
        """Release the identity and the connection."""
        if self._identity is not None:
            self._identity.close()
            self._identity = None
        self._runtime.observers.remove(self._observer)
        runtimes.release(self._runtime)
