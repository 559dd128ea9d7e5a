"""A client of a sidecar without a sidecar: the test sends the events."""

from enginekit import H, spec, world

from kafka_marshal.consumer import Consumer
from kafka_marshal.engine import Subscription
from kafka_marshal.engine.interfaces import ClaimPorts
from kafka_marshal.engine.standbys import StandbyThread
from kafka_marshal.engine.warm_fetches import new_fetcher
from kafka_marshal.errors import CoordinationError
from kafka_marshal.policies import find_policy
from kafka_marshal.ports import TopicInfo
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.types import Key, Owner
from kafka_marshal.remote import api
from kafka_marshal.remote.context import RemoteContext, RemoteEngine
from kafka_marshal.remote.grants import SidecarGrantRequester
from kafka_marshal.remote.session import RemoteSession
from simulator.clock import InlineBackground, SeededEntropy
from simulator.node import Recorder

INCARNATION = "ab" * 16
GRANTEE = b"g" * 16
SECRET = "5e" * 16
NOT_PAUSED = api.Paused(is_paused=False)


class FakeCommandQueue:
    """Records the commands of a session."""

    def __init__(self):
        self.returned, self.ended, self.unclaimed, self.flushed = [], [], [], 0
        self.readied = []
        self.pending, self.late = set(), set()
        self.wanted = {}
        self.is_gone = False

    @property
    def returning_count(self):
        return 0

    def require_reachable(self):
        if self.is_gone:
            raise CoordinationError("gone")

    def give_back(self, returned):
        self.returned.extend(returned)

    def end(self, name, returned, *, keep):
        self.ended.append((name, tuple(returned), keep))
        return 1

    def unclaim(self, key):
        self.unclaimed.append(key)
        self.wanted[key] = self.want_number(key) + 1

    def want_number(self, key):
        return self.wanted.get(key, 1)

    def ready(self, key, epoch):
        self.readied.append((key.partition, epoch))

    def flush(self):
        self.flushed += 1
        return 2

    def is_pending(self, seqs, *, late):
        pending = self.pending if late else self.pending - self.late
        return bool(pending & set(seqs))


class RemoteRig:
    """One client over a cluster in memory and a virtual clock.

    Attributes:
        asked: Requests for offsets without a response.
    """

    def __init__(self, *, records=(10, 10), span=1_000):
        self.cluster = world(records=records)
        self.clock = self.cluster.clock.view()
        self.observer = Recorder()
        self.warming = InlineBackground(is_held=True)
        self.warm_fetches = InlineBackground()
        self.standing_by = InlineBackground(is_held=True)
        ports = ClaimPorts(
            data=self.cluster.kafka.data_log(),
            clock=self.clock,
            entropy=SeededEntropy(1),
            background=InlineBackground(),
            observer=self.observer,
        )
        self.context = RemoteContext(ports=ports, heartbeat_interval_ms=H, span=span)
        self.engine = RemoteEngine(self.context)
        owner = Owner("host-a", bytes.fromhex(INCARNATION))
        claimant = Claimant(owner, "g", master=b"")
        self.session = RemoteSession(
            self.context, claimant, client_id="c", grantee=GRANTEE
        )
        self.session.commands = self.commands = FakeCommandQueue()
        self.asked, self.waiting, self.answers = [], [], []
        self.has_room = True
        self.session.grants = SidecarGrantRequester(
            self.context,
            send=self._ask,
            run=self._run,
            under=lambda call: call(),
            on_end=self.session.after_verdict,
            rest=lambda: None,
        )

    def _ask(self, ask):
        self.asked.append(ask)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self, call):
        if self.has_room:
            self.waiting.append(call)
        return self.has_room

    def answer(self, *answers, order=None):
        """Respond to the open requests, one per answer, in the order ``order``."""
        self.answers = list(answers)
        calls = [self.waiting[n] for n in order or range(len(answers))]
        for call in calls:
            self.waiting.remove(call)
            call()

    @property
    def now_ms(self):
        return self.clock.now_ms()

    def subscribe(self, name="s", *, topic="t", **rest):
        wants = spec(topic, **rest)
        found = self.cluster.kafka.topic(topic)
        subscription = Subscription(
            group_id="g",
            topics={topic: TopicInfo(len(found.partitions), None)},
            policy=find_policy("fair"),
            config=wants.config,
            on_warm=wants.callbacks.on_warm,
            warming=self.warming,
            warm_fetcher=new_fetcher(
                wants.config,
                data=self.context.ports.data,
                background=self.warm_fetches,
                observe=self.context.observe,
            ),
        )
        on_standby = wants.callbacks.on_standby
        if on_standby is not None:
            subscription.standby = StandbyThread(on_standby, self.standing_by)
        self.session.subscribe(name, subscription)
        return subscription, wants

    def consumer(self, name="s", **rest):
        subscription, wants = self.subscribe(name, **rest)
        return Consumer(
            self.engine,
            self.session,
            subscription=subscription,
            reader=self.context.ports.data.reader(),
            callbacks=wants.callbacks,
        )

    def send(self, body):
        self.session.on_event(body)

    def assigned(self, partition=0, *, epoch=5, name="s", position=0, **rest):
        fields = {
            "subscription": name,
            "topic": "t",
            "partition": partition,
            "epoch": epoch,
            "token": f"1.0.{epoch}",
            "client_id": "host-a",
            "incarnation": INCARNATION,
            "secret": SECRET,
            "position": position,
            "is_anchored": True,
            "soft_until_ms": self.now_ms + H,
            "hard_until_ms": self.now_ms + 2 * H,
            "why": "fair",
        }
        return api.Assignment(**(fields | rest))

    def snapshot(self, *assigned, releasing=(), paused=NOT_PAUSED, standbys=()):
        return api.Snapshot(
            assigned=assigned,
            releasing=releasing,
            paused=paused,
            subscriptions=("s",),
            standbys=standbys,
        )

    def beaten(self, *, soft_ms=H, hard_ms=2 * H, epoch=5, partitions=(0,), takers=()):
        now_ms = self.now_ms
        return api.HeartbeatResponse(
            deadlines=tuple(
                api.Lease(
                    topic="t",
                    partition=each,
                    epoch=epoch,
                    soft_until_ms=now_ms + soft_ms,
                    hard_until_ms=now_ms + hard_ms,
                )
                for each in partitions
            ),
            now_ms=now_ms,
            topics_with_takers=takers,
        )

    def tick(self, after_ms=0):
        self.cluster.clock.advance(after_ms)
        self.session.tick(self.now_ms)

    def events(self, name):
        return [e.fields for e in self.observer.events if e.name == name]


def key(partition=0):
    return Key("g", "t", partition)


def granted(first, last, *, head=None, offset=50, outcome="accepted", reason=None):
    return api.GrantResponse(
        outcome=outcome,
        reason=reason,
        first=first,
        last=last,
        head=head if head is not None or last is None else last + 1,
        offset=offset,
    )


def releasing(partition=0, *, epoch=5, reason="surplus", until_ms=None):
    return api.Releasing(
        topic="t", partition=partition, epoch=epoch, reason=reason, until_ms=until_ms
    )


def lost(partition=0, *, epoch=5, reason="taken_over", **rest):
    return api.Lost(topic="t", partition=partition, epoch=epoch, reason=reason, **rest)
