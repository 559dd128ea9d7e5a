"""Connects one client to the sidecar of its host, which holds the client's claims.

Three threads: one reads the events, and registers again after a restart of the sidecar;
one sends heartbeats; one checks deadlines. The third must not wait for the other two,
because deadlines matter most while the sidecar does not answer (PROTOCOL 5.2).
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec

from kafka_marshal.clock import (
    SystemClock,
    SystemEntropy,
    ThreadBackground,
    WorkerPool,
    boot_id,
)
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine import Holding, Subscription
from kafka_marshal.engine.interfaces import ClaimPorts
from kafka_marshal.engine.proxy_grants import draw_grantee
from kafka_marshal.engine.replica import Glance, LastClaim
from kafka_marshal.errors import (
    ClientFenced,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    IdentityConflict,
    MarshalError,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import choose, open_data_log
from kafka_marshal.ports import Clock, DataLog, Entropy, Observer
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.types import Key, Owner, Token, TopicPartition
from kafka_marshal.remote import api, paths
from kafka_marshal.remote.answers import ClientsNow, GroupNow, OwnersNow, WorldNow
from kafka_marshal.remote.command_queue import CALLS_MAX, CommandQueue, may_pass
from kafka_marshal.remote.context import RemoteContext, RemoteEngine
from kafka_marshal.remote.grants import SidecarGrantRequester
from kafka_marshal.remote.session import RemoteSession
from kafka_marshal.remote.transport import Address, Connection, NotRegistered, Stream

TICK_S = 0.02
CALM_S = 0.1
REST_MS_MIN = 50
REST_MS_MAX = 2_000
CLOCK_MS_MAX = 2
JOIN_MS = 2_000
CARRIERS = 2
GRANTERS = 4
ASK_MS_MAX = 5_000

T = TypeVar("T", bound=msgspec.Struct)


class SidecarBackend:
    """Claims of one client that a sidecar holds.

    Args:
        connection: Connection to the sidecar.
        info: The sidecar's ``GET /v1/info`` at registration.
        data: Looks up and reads data topics.
        observer: Receives events.
        transport: The client library that reads the data.
        clock: Local time.
        entropy: Source of random numbers.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        info: api.Info,
        data: DataLog,
        observer: Observer,
        transport: str,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._connection = connection
        self._info = info
        self._transport = transport
        self._entropy = entropy or SystemEntropy()
        ports = ClaimPorts(
            data=data,
            clock=clock or SystemClock(),
            entropy=self._entropy,
            background=ThreadBackground(),
            observer=observer,
        )
        self._context = RemoteContext(
            ports=ports,
            heartbeat_interval_ms=info.heartbeat_interval_ms,
            span=info.span,
        )
        self._engine = RemoteEngine(self._context)
        self._session = RemoteSession(
            self._context,
            _claimant(info, connection),
            client_id=connection.client_id,
            # Unique to this process, even if it has taken over an instance of another
            # process (PROTOCOL 6.2).
            grantee=draw_grantee(self._entropy),
        )
        self._stopped = threading.Event()
        self._carriers = WorkerPool(
            "marshal-remote-commands", threads=CARRIERS, calls_max=CALLS_MAX
        )
        self._granters = WorkerPool(
            "marshal-remote-grants", threads=GRANTERS, calls_max=CALLS_MAX
        )
        self._session.commands = self._commands = CommandQueue(
            connection,
            lock=self._engine.changed,
            workers=self._carriers,
            stopped=self._stopped,
            progress=lambda: self._session.progress(everything=True),
            on_flushed=lambda response, reported: self._session.on_flushed(
                response, reported=reported
            ),
        )
        self._session.grants = SidecarGrantRequester(
            self._context,
            send=self._grant,
            run=self._granters.submit,
            under=self._under,
            on_end=self._session.after_verdict,
            rest=lambda: self._rest(REST_MS_MAX),
        )
        self._specs: dict[str, api.SubscriptionSpec] = {}
        self._numbers = itertools.count(1)
        self._stream: Stream | None = None
        self._is_known = True
        self._is_reached = True
        self._is_leaving = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        self._threads = [
            threading.Thread(target=target, name=f"marshal-remote-{name}", daemon=True)
            for name, target in (
                ("events", self._follow),
                ("beats", self._beat),
                ("clock", self._watch),
            )
        ]
        for thread in self._threads:
            thread.start()

    # --- what a client sees

    @property
    def engine(self) -> RemoteEngine:
        """Takes the place of an engine in this process."""
        return self._engine

    @property
    def session(self) -> RemoteSession:
        """This client's claims."""
        return self._session

    @property
    def coordination_topic(self) -> str:
        """Name of the coordination topic, by the sidecar."""
        return self._info.coordination_topic

    @property
    def transport(self) -> str:
        """The client library that reads the data."""
        return self._transport

    def subscribe(self, subscription: Subscription) -> None:
        """Subscribe a consumer.

        Raises:
            InvalidTransition: This client consumes one of the topics already.
            ConfigurationError: The settings cannot be sent to another process, or
                other clients of the sidecar have subscribed to one of the topics with
                other settings.
        """
        spec = msgspec.structs.replace(
            api.SubscriptionSpec.of(subscription.config),
            warms=subscription.can_warm,
            standbys=subscription.config.standbys,
        )
        name = f"{self._connection.instance[:8]}-{next(self._numbers)}"
        try:
            with self._engine.changed:
                self._session.subscribe(name, subscription)
                names = self._session.names  # others have ended
                self._specs = {n: s for n, s in self._specs.items() if n in names}
                self._specs[name] = spec
            self._retry(lambda: self._put_spec(name, spec), ASK_MS_MAX)
        except BaseException:
            with self._engine.changed:
                self._specs.pop(name, None)
                self._session.unsubscribe(subscription, release=True)
            raise

    def _put_spec(self, name: str, spec: api.SubscriptionSpec) -> None:
        path = self._connection.path(paths.SUBSCRIPTION, {"name": name})
        self._connection.ask(
            "PUT", path, answer=api.SubscribeResponse, body=spec, timeout_ms=ASK_MS_MAX
        )

    def contend_for(self, key: Key) -> Holding:
        """Contend for one key without consuming it.

        Raises:
            InvalidTransition: This or another client wants the key already.
        """
        is_known = key in self._session.wanted
        try:
            with self._engine.changed:
                holding = self._session.want(key)
                number = self._commands.want_number(key)
            self._retry(lambda: self._put_claim(key, number), ASK_MS_MAX)
        except BaseException:
            # Also on Ctrl-C: otherwise the key could be won later, but not used.
            if not is_known:
                with self._engine.changed:
                    self._session.forget_want(key)
            raise
        return holding

    def _put_claim(self, key: Key, number: int) -> None:
        parts = {"topic": key.topic, "partition": key.partition}
        path = self._connection.path(paths.CLAIM, parts)
        self._connection.send("PUT", path, query={"request": str(number)})

    def glance(self, key: Key) -> Glance | None:
        """Return the state of a key by the log, None if it is not known."""
        try:
            found = self._group(ASK_MS_MAX)
        except MarshalError:
            return None
        for claim in found.claims:
            if (claim["topic"], claim["partition"]) == (key.topic, key.partition):
                owner = claim["owner"] or {}
                holder = owner.get("client_id")
                if holder == self._info.client_id:
                    holder = self._neighbour(key) or holder
                return Glance(
                    holder=holder,
                    freshness=claim["freshness"],
                    age_ms=claim["age_ms"],
                    position=claim["position"],
                )
        return None

    def last_claims(self, timeout_ms: int) -> dict[TopicPartition, LastClaim]:
        """Return the newest claim of each key of the group, not older than this call.

        The log names the sidecar as the owner of the claims of all its clients. A
        claim that is subleased to no other client may belong to this one, even before
        its ``assigned`` event arrives.
        """
        rows = [
            (
                TopicPartition(claim["topic"], claim["partition"]),
                claim["owner"] and claim["owner"]["client_id"],
                claim["epoch"],
                claim.get("token"),
            )
            for claim in self._group(timeout_ms).claims
        ]
        sidecar = self._info.client_id
        is_owner = any(owner == sidecar for _, owner, *_ in rows)
        subleased = self._subleased_to_others() if is_owner else set()
        return {
            place: LastClaim(
                owner,
                epoch,
                may_be_ours=owner == sidecar and str(place) not in subleased,
                token=None if token is None else Token.parse(token),
            )
            for place, owner, epoch, token in rows
        }

    def world(self, timeout_ms: int) -> dict[str, Any]:
        """Return the world as plain data, not older than this call."""
        found = self._query(paths.WORLD, WorldNow, timeout_ms=timeout_ms)
        return {"schema": found.schema, "partitions": found.partitions}

    def owners(self, topic: str, timeout_ms: int) -> dict[TopicPartition, str | None]:
        """Return the owner of each partition of a topic that was ever claimed."""
        path = self._connection.path(paths.OWNERS, {"topic": topic})
        found = self._query(path, OwnersNow, timeout_ms=timeout_ms)
        return {TopicPartition(topic, n): who for n, who in found.owners.items()}

    def _group(self, timeout_ms: int) -> GroupNow:
        path = self._connection.path(paths.GROUP)
        return self._query(path, GroupNow, timeout_ms=timeout_ms)

    def _query(self, path: str, answer: type[T], *, timeout_ms: int) -> T:
        """Send a query that the sidecar answers from a fold not older than the call."""
        wait_ms = min(timeout_ms, api.WAIT_MS_MAX)
        return self._connection.ask(
            "GET",
            path,
            answer=answer,
            timeout_ms=wait_ms,
            query={"timeout_ms": str(wait_ms)},
        )

    def _neighbour(self, key: Key) -> str | None:
        """Return the client of the same sidecar that holds a key, None if not known."""
        try:
            found = self._connection.ask("GET", paths.CLIENTS, answer=ClientsNow)
        except MarshalError:
            return None
        place = str(key.topic_partition)
        for each in found.clients:
            if each.group == key.group_id and place in each.assigned:
                return each.client
        return None

    def _subleased_to_others(self) -> set[str]:
        """Return the partitions of other clients of the group at the same sidecar."""
        found = self._connection.ask("GET", paths.CLIENTS, answer=ClientsNow)
        own = self._connection
        return {
            place
            for each in found.clients
            if each.group == own.group_id and each.client != own.client_id
            for place in each.assigned
        }

    # --- leaving

    def restart(self) -> None:
        """Do nothing: the sidecar keeps the partitions for its clients."""

    def leave(self, *, release: bool, timeout_ms: int) -> None:
        """Leave the group and release all claims.

        With ``release=False`` the sidecar keeps the claims for a restart within one
        heartbeat interval. Does not wait for a sidecar that is gone.
        """
        self._is_leaving = True
        with self._engine.changed:
            returned = self._session.begin_close(release=release)
        wait_ms = min(timeout_ms, ASK_MS_MAX)
        request = api.LeaveRequest(
            returned=returned,
            release=release,
            reason="shutdown" if release else "restart",
            timeout_ms=wait_ms,
        )
        path = self._connection.path(paths.CLIENT)

        def send() -> None:
            # A sidecar that does not know this client holds no claims for it.
            with contextlib.suppress(NotRegistered):
                self._connection.ask(
                    "DELETE",
                    path,
                    answer=api.LeaveResponse,
                    body=request,
                    timeout_ms=wait_ms,
                )

        self._connection.count_gone_again()
        try:
            self._retry(send, timeout_ms, until=lambda: self._connection.is_gone)
        except MarshalError:
            # Leases that the sidecar keeps for this client expire.
            self._context.observe("close_unconfirmed", {})

    def close(self) -> None:
        """End the threads and close every connection. Idempotent."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.end()
        self._connection.close()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(JOIN_MS / 1000)
        self._carriers.close(JOIN_MS)
        self._granters.close(JOIN_MS)
        self._context.ports.background.close(JOIN_MS)
        self._context.ports.data.close(JOIN_MS)

    def _retry(
        self,
        call: Callable[[], None],
        timeout_ms: int,
        *,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Repeat a call until it is answered, while the error is transient.

        Args:
            call: The call.
            timeout_ms: How long to repeat it.
            until: Returns whether to give up earlier.
        """
        deadline = Deadline(timeout_ms, self._context.ports.clock.now_ms)
        while True:
            try:
                call()
            except MarshalError as error:
                is_over = deadline.is_over or until() or not may_pass(error)
                if is_over or self._rest(REST_MS_MIN):
                    raise
            else:
                return

    def _rest(self, most_ms: int) -> bool:
        """Wait for half of ``most_ms`` plus jitter; return whether this is closed."""
        half_ms = most_ms // 2
        rest_ms = half_ms + self._entropy.below(half_ms + 1)
        return self._stopped.wait(rest_ms / 1000)

    # --- the thread of the events

    def _follow(self) -> None:
        after: str | None = None
        rest_ms = REST_MS_MIN
        while not (self._is_over or self._session.failure):
            try:
                if not self._is_known:
                    self._join()
                for frame in self._frames(after):
                    if not frame.is_of(self._info.incarnation):
                        # The sidecar was restarted and kept the registration, but
                        # perhaps not the subscriptions.
                        self._join()
                    after = frame.id or after
                    rest_ms = REST_MS_MIN
                    self._on_event(frame.body)
            except NotRegistered:
                self._is_known = False
            except (IdentityConflict, ClientFenced, ConfigurationError) as error:
                self._under(partial(self._session.fail, error))
                return
            except MarshalError as error:
                self._note_unreachable(error)
            except Exception as error:  # noqa: BLE001 - a bug must not leave zombies
                self._fail_for(error)
                return
            if self._rest(rest_ms):
                return
            rest_ms = min(2 * rest_ms, REST_MS_MAX)

    def _frames(self, after: str | None) -> Iterator[api.Frame]:
        with self._connection.events(after) as stream:
            self._stream = stream
            try:
                yield from stream.frames()
            finally:
                self._stream = None

    def _on_event(self, body: api.EventBody) -> None:
        self._note_reached()
        self._under(lambda: self._session.on_event(body))

    def _join(self) -> None:
        """Register again, and repeat subscriptions and wanted keys."""
        clock, address = self._context.ports.clock, self._connection.address
        since_ms = clock.now_ms()
        # The heartbeat interval, which bounds this client's, may have changed.
        info = fetch_info(self._connection)
        try:
            registered = register(self._connection, info=info)
        except ConfigurationError:  # it was lowered since
            info = fetch_info(self._connection)
            registered = register(self._connection, info=info)
        require_same_clock(registered.info, clock, since_ms=since_ms, address=address)
        if registered.info.cluster_id != self._info.cluster_id:
            raise ConfigurationError(
                f"the sidecar at {self._connection.address.text} has moved to another "
                "cluster; open a new Marshal",
                setting="sidecar",
            )
        with self._engine.changed:
            self._info = registered.info
            self._context.span = registered.info.span
            interval_ms = registered.info.heartbeat_interval_ms
            self._context.heartbeat_interval_ms = interval_ms
            self._session.claimant = _claimant(registered.info, self._connection)
            self._session.on_acknowledged(None)
            names = self._session.names
            specs = {n: each for n, each in self._specs.items() if n in names}
            keys = [
                (key, self._commands.want_number(key)) for key in self._session.wanted
            ]
        for name, each in specs.items():
            self._put_spec(name, each)
        for key, number in keys:
            self._put_claim(key, number)
        self._is_known = True

    @property
    def _is_over(self) -> bool:
        return self._is_leaving or self._stopped.is_set()

    def _note_unreachable(self, error: MarshalError) -> None:
        if self._is_reached and not self._is_over:
            self._is_reached = False
            self._context.observe("sidecar_unreachable", {"error": error})

    def _note_reached(self) -> None:
        if not self._is_reached:
            self._is_reached = True
            self._context.observe("sidecar_reached", {"client": self._info.client_id})

    # --- the thread of the beats

    def _beat(self) -> None:
        while not self._stopped.wait(beat_ms_of(self._info) / 1000):
            if self._is_leaving or self._session.failure or not self._is_known:
                continue
            try:
                self._beat_once()
            except MarshalError as error:
                self._note_unreachable(error)
            except Exception as error:  # noqa: BLE001 - a bug must not leave zombies
                self._fail_for(error)
                return

    def _beat_once(self) -> None:
        """Report progress, and apply the deadlines that the sidecar answers.

        Raises:
            MarshalError: There was no answer.
        """
        with self._engine.changed:
            reported = self._session.progress(everything=False)[: api.PROGRESS_MAX]
            generation, info = self._session.acknowledgment(), self._info
        beat = api.HeartbeatRequest(progress=reported, generation=generation)
        try:
            response = self._connection.ask(
                "POST",
                self._connection.path(paths.BEAT),
                answer=api.HeartbeatResponse,
                # A beat without a body is one packet, which wakes the sidecar once.
                body=None if beat == api.HeartbeatRequest() else beat,
            )
        except NotRegistered:
            self._on_unknown(info)
            return
        with self._engine.changed:
            self._session.on_deadlines(response, reported=reported)
            # After a new registration the sidecar may not know the generation.
            if generation is not None and info is self._info:
                self._session.on_acknowledged(generation)
            self._engine.changed.notify_all()

    def _on_unknown(self, info: api.Info) -> None:
        """Have the events thread register again, unless it has since ``info``."""
        with self._engine.changed:
            if info is not self._info:
                return
            self._is_known = False
        stream = self._stream
        if stream is not None:
            stream.end()

    # --- the thread of the deadlines

    def _watch(self) -> None:
        rest_s = TICK_S
        while not self._stopped.wait(rest_s):
            try:
                with self._engine.changed:
                    before = len(self._session.holdings)
                    has_work = self._session.tick(self._context.now_ms)
                    if len(self._session.holdings) != before:
                        self._engine.changed.notify_all()
                rest_s = TICK_S if has_work else CALM_S
            except Exception as error:  # noqa: BLE001 - a bug must not leave zombies
                self._fail_for(error)
                return

    def _fail_for(self, error: Exception) -> None:
        failure = CoordinationError(
            f"a thread that communicates with the sidecar failed on an internal error: "
            f"{error!r}; all claims of this client have ended; open a new Marshal"
        )
        failure.__cause__ = error
        self._under(lambda: self._session.fail(failure))

    def _grant(self, ask: api.GrantRequest) -> api.GrantResponse:
        return self._connection.ask(
            "POST",
            self._connection.path(paths.GRANTS),
            answer=api.GrantResponse,
            body=ask,
            timeout_ms=ask.timeout_ms,
        )

    def _under(self, call: Callable[[], None]) -> None:
        """Make a call under the lock, then notify the waiting threads."""
        with self._engine.changed:
            call()
            self._engine.changed.notify_all()


def beat_ms_of(info: api.Info) -> int:
    """Return the heartbeat interval of a client."""
    sixth_ms = info.heartbeat_interval_ms // api.BEATS_PER_H
    return max(1, min(sixth_ms, api.BEAT_MS_MAX, info.client_beat_ms_max))


def register(connection: Connection, *, info: api.Info) -> api.RegisterResponse:
    """Register this process, or register it again.

    Raises:
        IdentityConflict: Another process of that name is alive.
        CoordinationError: The sidecar cannot be reached, or is not ready.
    """
    request = api.RegisterRequest(
        instance=connection.instance, beat_ms=beat_ms_of(info)
    )
    path = connection.path(paths.CLIENT)
    return connection.ask(
        "PUT", path, answer=api.RegisterResponse, body=request, timeout_ms=ASK_MS_MAX
    )


def fetch_info(connection: Connection) -> api.Info:
    """Return the sidecar's ``GET /v1/info``."""
    return connection.ask("GET", paths.INFO, answer=api.Info, timeout_ms=ASK_MS_MAX)


def greet(
    connection: Connection,
    *,
    clock: Clock,
    check: Callable[[api.Info], None],
    timeout_ms: int,
) -> api.Info:
    """Register a process for the first time; wait for a sidecar that is starting.

    Args:
        connection: Connection to the sidecar.
        clock: Local time.
        check: Raises if the sidecar is not the expected one.
        timeout_ms: How long to wait.

    Raises:
        ConfigurationError: The sidecar is of another machine or release.
        IdentityConflict: Another process of that name is alive.
        CoordinationError: The sidecar cannot be reached, or was not ready in time.
    """
    deadline = Deadline(timeout_ms, clock.now_ms)
    rests = threading.Event()
    while True:
        try:
            since_ms = clock.now_ms()
            info = fetch_info(connection)
            require_level(info, connection)
            require_same_clock(
                info, clock, since_ms=since_ms, address=connection.address
            )
            check(info)
            return register(connection, info=info).info
        except (CoordinationError, DeadlineExceeded) as error:
            is_starting = may_pass(error) and not isinstance(error.__cause__, Exception)
            if not is_starting or deadline.is_over:
                raise
            rests.wait(REST_MS_MIN / 1000)


def require_level(info: api.Info, connection: Connection) -> None:
    """Check the level of the sidecar's API.

    Raises:
        ConfigurationError: The sidecar has another level of the API.
    """
    if info.level != api.API_LEVEL:
        raise ConfigurationError(
            f"the sidecar at {connection.address.text} speaks level {info.level} of "
            f"the API, this library {api.API_LEVEL}; install the same release of both",
            setting="sidecar",
        )


def require_same_clock(
    info: api.Info, clock: Clock, *, since_ms: int, address: Address
) -> None:
    """Check that the sidecar reads the boot clock of this process.

    Args:
        info: An answer that has just arrived.
        clock: Local time.
        since_ms: When it was requested. This process may have stood still since.
        address: Address of the sidecar.

    Raises:
        ConfigurationError: The sidecar runs on another machine or in another time
            namespace, so its deadlines are not valid here.
    """
    ours, theirs = _plain(boot_id()), _plain(info.boot_id)
    is_other = bool(ours and theirs) and ours != theirs
    ahead_ms, behind_ms = info.now_ms - clock.now_ms(), since_ms - info.now_ms
    apart_ms = max(ahead_ms, behind_ms)
    if is_other or apart_ms > CLOCK_MS_MAX:
        raise ConfigurationError(
            f"the sidecar at {address.text} reads another clock ({apart_ms} ms apart), "
            "so its deadlines are not valid here; use the sidecar of this machine, in "
            "the same time namespace",
            setting="sidecar",
        )


def _plain(uuid: str) -> str:
    return uuid.replace("-", "").lower()


def _claimant(info: api.Info, connection: Connection) -> Claimant:
    owner = Owner(info.client_id, bytes.fromhex(info.incarnation))
    return Claimant(owner, connection.group_id, master=b"")


INSTANCE_BYTES = 16


@attrs.frozen(kw_only=True)
class ConnectOptions:
    """Options of a connection to a sidecar, and what the client expects of it.

    Attributes:
        sidecar: Address of the sidecar.
        token_file: File with its token, for TCP.
        has_servers: Whether the client names brokers; else it uses the sidecar's.
        coordination_topic: Expected coordination topic; None accepts any.
        heartbeat_interval_ms: Expected heartbeat interval; None accepts any.
        settings: Connection to the data.
        instance: Id of the process that this one replaces, which is dead; None draws
            a new one.
    """

    sidecar: str
    token_file: str | Path | None
    has_servers: bool
    coordination_topic: str | None
    heartbeat_interval_ms: int | None
    settings: ConnectionConfig
    instance: bytes | None = None


def _require_instance(instance: object) -> None:
    if instance is None:
        return
    if not isinstance(instance, bytes) or len(instance) != INSTANCE_BYTES:
        raise ConfigurationError(
            f"sidecar_instance must be {INSTANCE_BYTES} bytes, not {instance!r}",
            setting="sidecar_instance",
        )


def open_backend(
    options: ConnectOptions,
    *,
    group_id: str,
    client_id: str,
    observer: Observer,
    timeout_ms: int,
) -> SidecarBackend:
    """Register with a sidecar, and start to follow its events.

    Raises:
        ConfigurationError: An address or a token is invalid, or the sidecar is not as
            expected.
        IdentityConflict: Another process of this name is alive.
        CoordinationError: The sidecar cannot be reached, or was not ready in time.
    """
    address = Address.parse(options.sidecar)
    _require_instance(options.instance)
    clock, entropy = SystemClock(), SystemEntropy()
    instance = options.instance or entropy.random_bytes(INSTANCE_BYTES)
    connection = Connection.open(
        address,
        token=address.token(options.token_file),
        group_id=group_id,
        client_id=client_id,
        instance=instance.hex(),
    )
    data: DataLog | None = None
    backend: SidecarBackend | None = None
    try:
        info = greet(
            connection,
            clock=clock,
            check=partial(_require_expected, options),
            timeout_ms=timeout_ms,
        )
        settings = attrs.evolve(
            options.settings,
            coordination_topic=info.coordination_topic,
            bootstrap_servers=options.settings.bootstrap_servers
            if options.has_servers
            else info.bootstrap_servers,
        )
        data = open_data_log(settings)
        backend = SidecarBackend(
            connection,
            info=info,
            data=data,
            observer=observer,
            transport=choose(settings).name,
            clock=clock,
            entropy=entropy,
        )
        backend.start()
    except BaseException:
        # Also on Ctrl-C: otherwise its threads would continue to send heartbeats.
        if backend is not None:
            backend.leave(release=True, timeout_ms=0)
            backend.close()
        elif data is not None:
            data.close(JOIN_MS)
        connection.close()
        raise
    return backend


def _require_expected(options: ConnectOptions, info: api.Info) -> None:
    expected = options.coordination_topic
    if expected is not None and expected != info.coordination_topic:
        raise ConfigurationError(
            f"the sidecar at {options.sidecar} uses coordination topic "
            f"{info.coordination_topic!r}, not {expected!r}; omit coordination_topic, "
            "or use another sidecar",
            setting="coordination_topic",
        )
    h_ms = options.heartbeat_interval_ms
    if h_ms is not None and h_ms != info.heartbeat_interval_ms:
        raise ConfigurationError(
            f"heartbeat_interval_ms is {h_ms} here and {info.heartbeat_interval_ms} in "
            "the log, where it applies to all clients; omit it, or change that "
            "of the log with: marshal topic alter",
            setting="heartbeat_interval_ms",
        )
