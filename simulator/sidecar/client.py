"""A process in memory that works through the sidecar of its machine, step by step.

The session, the ladders, the commands and the consumer are production code. Instead of
threads and HTTP there is one call for each thing that a thread would do. Nothing runs
by itself, and nothing waits.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import msgspec

from kafka_marshal.consumer import Consumer
from kafka_marshal.engine import Holding, Subscription
from kafka_marshal.engine.interfaces import ClaimPorts
from kafka_marshal.engine.proxy_grants import PendingGrant
from kafka_marshal.engine.warm_fetches import new_fetcher
from kafka_marshal.errors import (
    ClaimLost,
    ClientFenced,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    IdentityConflict,
    MarshalError,
)
from kafka_marshal.policies import find_policy
from kafka_marshal.ports import TopicInfo
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.records import LIMIT_DEFAULTS
from kafka_marshal.protocol.types import Key, Owner
from kafka_marshal.remote import api, paths
from kafka_marshal.remote.command_queue import CommandQueue
from kafka_marshal.remote.context import RemoteContext, RemoteEngine
from kafka_marshal.remote.grants import SidecarGrantRequester, encode_verdict
from kafka_marshal.remote.session import RemoteSession
from kafka_marshal.remote.transport import NotRegistered, error_of
from kafka_marshal.sidecar.flush import Flush
from kafka_marshal.sidecar.grants import numbered_request
from kafka_marshal.sidecar.http_errors import GONE, UNKNOWN, to_http_error
from kafka_marshal.sidecar.process_monitor import Caller, Peer
from kafka_marshal.sidecar.service import SidecarService
from simulator.base import GROUP
from simulator.clock import InlineBackground, SeededEntropy
from simulator.handoffs import COLD, on_warm_of
from simulator.node import Cluster, ConsumerSpec, Recorder
from simulator.sidecar.host import SEED_BITS, Host

if TYPE_CHECKING:
    import threading

    from kafka_marshal.clock import WorkerPool
    from kafka_marshal.remote.transport import Connection
    from kafka_marshal.sidecar.events import EventCursor

T = TypeVar("T")

NAME = "s"
GRANTS_AT_A_TIME = 4
GRANTS_MAX = 64
BEAT_MS_MAX = 1_000
BEATS_PER_H = 6


class _NotYet(Exception):
    """A call must be made again later, because nothing may wait here."""


class _Stopped:
    """A condition that never waits: its caller is called again instead."""

    def __init__(self) -> None:
        self.is_over = False

    def is_set(self) -> bool:
        return self.is_over

    def wait(self, timeout: float) -> bool:
        del timeout
        if self.is_over:
            return True
        raise _NotYet


@attrs.define(eq=False)
class _WorkerPool:
    """A queue of calls to make."""

    waiting: list[Callable[[], None]] = attrs.field(factory=list)

    def submit(self, call: Callable[[], None]) -> bool:
        self.waiting.append(call)
        return True

    def step(self) -> None:
        """Make one call; it stays first if it must be made again."""
        if self.waiting:
            try:
                self.waiting[0]()
            except _NotYet:
                return
            del self.waiting[0]


@attrs.define(eq=False, kw_only=True)
class _GrantCall:
    """One request for offsets in flight.

    Attributes:
        call: The caller of the request; called again once there is an answer.
        service: Service of the sidecar that got the request, None before.
        pending: The request in flight.
        until_ms: Time at which the sidecar responds that there is no verdict.
        answer: The response to the client.
    """

    call: Callable[[], None]
    service: SidecarService | None = None
    pending: PendingGrant | None = None
    until_ms: int = 0
    answer: api.GrantResponse | MarshalError | None = None


class Line:
    """The connection to the sidecar: without HTTP, but with its errors.

    Attributes:
        is_cut: Whether nothing gets through.
        loses: Returns for each answer whether it is lost in transit.
    """

    def __init__(self, host: Host, who: Caller) -> None:
        """Connect a client."""
        self.host = host
        self.who = who
        self.is_cut = False
        self.loses: Callable[[], bool] = lambda: False
        self._named: dict[str, tuple[str, Mapping[str, object]]] = {}
        self._flush: _FlushCall | None = None

    def call(self, do: Callable[[SidecarService], T]) -> T:
        """Make a request.

        Raises:
            NotRegistered: The sidecar does not know this process.
            MarshalError: The sidecar refused, or the outcome is unknown.
        """
        service = self.host.service
        if service is None or self.is_cut:
            raise CoordinationError("no sidecar answers")
        if self.host.is_hung:
            self.host.backlog.append(do)
            raise CoordinationError("the sidecar does not answer")
        try:
            answer = do(service)
        except MarshalError as error:
            raise _as_received(error) from error
        if self.loses():
            raise CoordinationError("the connection broke off")
        return answer

    # The part of ``Connection`` that commands need.

    is_gone = False

    def count_gone_again(self) -> None:
        """Do nothing: commands are repeated until they succeed."""

    def path(self, template: str, parts: Mapping[str, object] | None = None) -> str:
        """Return the name of a path."""
        name = template.format_map(
            {"group": self.who.group_id, "client": self.who.client_id}
            | dict(parts or {})
        )
        self._named[name] = (template, parts or {})
        return name

    def send(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,  # noqa: ANN401 - of several kinds, as in HTTP
        timeout_ms: int = 0,
        query: Mapping[str, str] | None = None,
    ) -> None:
        """Make a request whose answer has no content."""
        del method, timeout_ms
        template, parts = self._named[path]
        if isinstance(body, api.ReleaseRequest):
            body = msgspec.structs.replace(body, timeout_ms=0)  # nothing may wait
        if template == paths.SUBSCRIPTION_END:
            name, keep = str(parts["name"]), bool(query)
            self.call(
                lambda service: service.unsubscribe(
                    self.who, name, release=body, keep=keep
                )
            )
        elif template == paths.READY:
            self.call(lambda service: service.ready(self.who, body))
        elif template == paths.RELEASED:
            self.call(lambda service: service.release(self.who, body))
        else:
            assert template == paths.CLAIM, template
            topic, number = str(parts["topic"]), int(str(parts["partition"]))
            request = int((query or {})["request"])
            self.call(
                lambda service: service.unclaim(
                    self.who, topic, partition=number, request=request
                )
            )

    def ask(
        self,
        method: str,
        path: str,
        *,
        answer: type[api.HeartbeatResponse],
        body: api.HeartbeatRequest,
        timeout_ms: int,
    ) -> api.HeartbeatResponse:
        """Report all positions; called again until the log has them.

        Raises:
            _NotYet: Call again later, with the same body.
        """
        del method, path, answer
        who, flush = self.who, self._flush
        if flush is None:
            until_ms = self.host.clock.now_ms() + timeout_ms
            begun = self.call(lambda service: service.begin_flush(who, body))
            self._flush = _FlushCall(self.host.service, begun, until_ms)
            raise _NotYet
        if self.host.service is not flush.service or self.is_cut:
            self._flush = None
            raise CoordinationError("the connection broke off")
        is_late = self.host.clock.now_ms() >= flush.until_ms
        if not is_late and (self.host.is_hung or not flush.begun.is_over):
            raise _NotYet
        self._flush = None
        if is_late:
            raise DeadlineExceeded("the log did not show the positions")
        return self.call(lambda service: service.end_flush(who, flush.begun))

    @property
    def is_flushing(self) -> bool:
        """Whether a report of all positions waits for its answer."""
        return self._flush is not None


@attrs.frozen
class _FlushCall:
    """A report of all positions in flight.

    Attributes:
        service: Service of the sidecar that got it.
        begun: The report at the sidecar.
        until_ms: Time at which the client gives up.
    """

    service: SidecarService | None
    begun: Flush
    until_ms: int


def _as_received(error: MarshalError) -> MarshalError:
    """Return an error of the sidecar as its client receives it."""
    if isinstance(error, ClaimLost) and error.reason in {GONE, UNKNOWN}:
        return NotRegistered(str(error))
    return error_of(to_http_error(error).failure)


class Hosted:
    """One process that works through the sidecar of its machine.

    Attributes:
        host: The machine.
        name: Its name in the group, known only to the sidecar.
        pid: Its process id; None if the sidecar cannot watch it.
        line: Its connection to the sidecar.
        session: The production session.
        consumer: Its consumer, None if it claims partitions one by one.
        claims: The keys that it claims one by one.
        mood: How it warms up.
        warming: Its calls of ``on_warm`` that have not ended.
        failure: The error after which it cannot continue.
        has_left: Whether the sidecar has received its leave request.
    """

    def __init__(
        self,
        host: Host,
        name: str,
        *,
        cluster: Cluster,
        pid: int | None,
        spec: ConsumerSpec | None,
        claims: tuple[Key, ...] = (),
        mood: str = COLD,
    ) -> None:
        """Start a process; it registers once it first reaches the sidecar."""
        self.mood = mood
        self.warming = InlineBackground(is_held=True)
        rng = host.rng
        self.host, self.name, self.pid, self.claims = host, name, pid, claims
        self.instance = rng.randbytes(16)
        self.line = Line(host, Caller(GROUP, name, self.instance.hex()))
        self.observer = Recorder()
        self.data = cluster.kafka.data_log()
        ports = ClaimPorts(
            data=self.data,
            clock=host.clock,
            entropy=SeededEntropy(rng.getrandbits(SEED_BITS)),
            background=InlineBackground(),
            observer=self.observer,
        )
        self._h = cluster.heartbeat_interval_ms
        self.context = RemoteContext(
            ports=ports, heartbeat_interval_ms=self._h, span=LIMIT_DEFAULTS["span"]
        )
        self.engine = RemoteEngine(self.context)
        # The process does not know the sidecar's name until it registers.
        nobody = Claimant(Owner(host.name, bytes(16)), GROUP, master=b"")
        self.session = RemoteSession(
            self.context, nobody, client_id=name, grantee=rng.randbytes(16)
        )
        self._carriers, self._grants = _WorkerPool(), list[_GrantCall]()
        self._stopped = _Stopped()
        self._answering: _GrantCall | None = None
        self._flushed: tuple[api.Progress, ...] = ()
        self._wire()
        self.consumer: Consumer | None = None
        self._spec: api.SubscriptionSpec | None = None
        if spec is not None:
            self._consume(spec, cluster)
        self.failure: MarshalError | None = None
        self.has_left = False
        self._leaving: api.LeaveRequest | None = None
        self._info: api.Info | None = None
        self._is_known = False
        self._feed: EventCursor | None = None
        self._response_of: SidecarService | None = None
        self._inbox: list[api.Frame] = []
        self._after: str | None = None
        self._beat_at_ms = 0
        self._reported: tuple[api.Progress, ...] | None = None
        self._response: api.HeartbeatResponse | None = None

    def _wire(self) -> None:
        session = self.session
        session.commands = self._commands = CommandQueue(
            cast("Connection", self.line),
            lock=self.engine.changed,
            workers=cast("WorkerPool", self._carriers),
            stopped=cast("threading.Event", self._stopped),
            progress=self._progress,
            on_flushed=lambda answer, sent: session.on_flushed(answer, reported=sent),
        )
        session.grants = SidecarGrantRequester(
            self.context,
            send=self._ask,
            run=self._run,
            under=lambda call: call(),
            on_end=session.after_verdict,
            rest=lambda: None,
        )

    def _progress(self) -> tuple[api.Progress, ...]:
        """Return all positions; those on their way until they are confirmed."""
        if not self.line.is_flushing:
            self._flushed = self.session.progress(everything=True)
        return self._flushed

    def _consume(self, spec: ConsumerSpec, cluster: Cluster) -> None:
        config = spec.config
        infos = {
            topic: TopicInfo(len(cluster.kafka.topic(topic).partitions), None)
            for topic in config.topics
        }
        subscription = Subscription(
            group_id=GROUP,
            topics=infos,
            policy=find_policy(config.policy),
            config=config,
            on_warm=on_warm_of(self.mood),
            warming=self.warming,
            warm_fetcher=new_fetcher(
                config,
                data=self.data,
                background=InlineBackground(),
                observe=self.context.observe,
            ),
        )
        self._spec = msgspec.structs.replace(
            api.SubscriptionSpec.of(config), warms=subscription.can_warm
        )
        self.session.subscribe(NAME, subscription)
        self.consumer = Consumer(
            self.engine,
            self.session,
            subscription=subscription,
            reader=self.data.reader(isolation_level=config.isolation_level),
            callbacks=spec.callbacks,
        )

    @property
    def now_ms(self) -> int:
        """Its clock, which is that of its machine."""
        return self.host.clock.now_ms()

    @property
    def held(self) -> dict[Key, Holding]:
        """Every key that it may use now, by its own lease."""
        now_ms = self.now_ms
        return {
            key: holding
            for key, holding in self.session.holdings.items()
            if holding.claim.is_valid(now_ms)
        }

    # --- steps of its threads

    def watch(self) -> None:
        """Check deadlines."""
        self.session.tick(self.now_ms)
        if not self.session.failure and self._leaving is None:
            for key in self.claims:
                if key not in self.session.holdings:
                    self.session.want(key)
                    self._is_known = False  # register again, with all wanted keys

    def follow(self, most: int) -> None:
        """Handle up to ``most`` events; register first if that is due."""
        if self.session.failure is not None:
            return
        try:
            if not self._is_known:
                self._join()
            self._listen()
            for frame in self._inbox[:most]:
                if self._info is None or not frame.is_of(self._info.incarnation):
                    self._join()
                del self._inbox[0]
                self._after = frame.id
                self.session.on_event(frame.body)
        except NotRegistered:
            self._is_known = False
            self._drop_feed()
        except (IdentityConflict, ClientFenced, ConfigurationError) as error:
            self.session.fail(error)
        except MarshalError:
            self._drop_feed()
        self.failure = self.session.failure

    def _listen(self) -> None:
        if self._response_of is not self.host.service:
            self._drop_feed()  # its sidecar is dead
            self._response_of = self.host.service
        if self._feed is None or self._feed.is_closed:
            self._inbox.clear()
            who, after = self.line.who, self._after
            self._feed = self.line.call(lambda service: service.feed(who, after))
        if self.host.service is None or self.host.is_hung or self.line.is_cut:
            raise CoordinationError("the stream broke off")
        self._inbox += self._feed.take()

    def _drop_feed(self) -> None:
        self._inbox.clear()
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _join(self) -> None:
        beat_ms = max(1, min(self._h // BEATS_PER_H, BEAT_MS_MAX))
        body = api.RegisterRequest(instance=self.instance.hex(), beat_ms=beat_ms)
        peer = Peer(self.pid, None, None if self.pid is None else 1)
        answer = self.line.call(
            lambda service: service.register(
                GROUP, self.name, registration=body, peer=peer
            )
        )
        info = self._info = answer.info
        self.context.span = info.span
        owner = Owner(info.client_id, bytes.fromhex(info.incarnation))
        self.session.claimant = Claimant(owner, GROUP, master=b"")
        spec = self._spec
        if spec is not None and NAME in self.session.names:
            self.line.call(
                lambda service: service.subscribe(self.line.who, NAME, spec=spec)
            )
        for key in self.session.wanted:
            self._claim(key, self._commands.want_number(key))
        self._is_known = True

    def _claim(self, key: Key, request: int) -> None:
        who, topic, number = self.line.who, key.topic, key.partition
        self.line.call(
            lambda service: service.claim(who, topic, partition=number, request=request)
        )

    def beat(self, phases: int) -> None:
        """Send a heartbeat if due; it has three phases, which may be far apart."""
        for _ in range(phases):
            if self._response is not None and self._reported is not None:
                self.session.on_deadlines(self._response, reported=self._reported)
                self._reported = self._response = None
            elif self._reported is not None:
                self._send_beat(self._reported)
            elif self._is_known and self.now_ms >= self._beat_at_ms:
                self._beat_at_ms = self.now_ms + min(self._h // BEATS_PER_H, 1_000)
                self._reported = self.session.progress(everything=False)

    def _send_beat(self, progress: tuple[api.Progress, ...]) -> None:
        body = api.HeartbeatRequest(progress=progress)
        try:
            self._response = self.line.call(
                lambda service: service.beat(self.line.who, body)
            )
        except NotRegistered:
            self._is_known, self._reported = False, None
        except MarshalError:
            self._reported = None

    def carry(self) -> None:
        """Send the next pending message."""
        self._carriers.step()
        if self._leaving is not None and not self.has_left:
            body = self._leaving
            try:
                self.line.call(lambda service: service.leave(self.line.who, body))
            except NotRegistered:
                pass
            except MarshalError:
                return
            self.has_left = True

    def leave(self) -> None:
        """Begin to leave; call ``carry`` until ``has_left``."""
        if self.consumer is not None:
            self.consumer.close(timeout_ms=0)
        returned = self.session.begin_close(release=True)
        self._leaving = api.LeaveRequest(returned=returned)

    # --- grants

    def _run(self, call: Callable[[], None]) -> bool:
        if len(self._grants) >= GRANTS_MAX:
            return False
        self._grants.append(_GrantCall(call=call))
        return True

    def _ask(self, ask: api.GrantRequest) -> api.GrantResponse:
        """Send a request, or return its answer: nothing may wait in between."""
        grant_call = self._answering
        assert grant_call is not None
        if isinstance(grant_call.answer, MarshalError):
            raise grant_call.answer
        if grant_call.answer is None:
            grant_call.pending = self.line.call(
                lambda service: service.begin_grant(numbered_request(GROUP, ask))
            )
            grant_call.service = self.host.service
            grant_call.until_ms = self.now_ms + ask.timeout_ms
            raise _NotYet
        return grant_call.answer

    def grant(self) -> None:
        """Request offsets, and handle answers, a few at a time."""
        for grant_call in self._grants[:GRANTS_AT_A_TIME]:
            if grant_call.pending is not None:
                grant_call.answer = self._answer(grant_call, grant_call.pending)
                if grant_call.answer is None:
                    continue
            self._answering = grant_call
            try:
                grant_call.call()
            except _NotYet:
                continue
            self._grants.remove(grant_call)

    def _answer(
        self, grant_call: _GrantCall, pending: PendingGrant
    ) -> api.GrantResponse | MarshalError | None:
        if self.host.service is not grant_call.service or self.line.is_cut:
            return CoordinationError("the connection broke off")
        if self.host.is_hung:
            return None
        if pending.verdict is not None:
            if self.line.loses():
                return CoordinationError("the connection broke off")
            return encode_verdict(pending.verdict)
        if self.now_ms < grant_call.until_ms:
            return None
        if self.host.node is not None:
            self.host.node.engine.proxy_grants.give_up(pending)
        return DeadlineExceeded("the log did not show the verdict")
