"""Sidecars in memory over a fake cluster, and clients whose steps a test calls."""

import contextlib

from enginekit import H, Stepping, fold, of

from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io.topic_rules import TopicDescription
from kafka_marshal.observability import FanOut
from kafka_marshal.protocol.records import ReleasingPartition
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.runtime import Runtime
from kafka_marshal.sidecar.health import Lifecycle, State
from kafka_marshal.sidecar.process_monitor import Caller, Peer
from kafka_marshal.sidecar.service import SidecarService

BEAT_MS = 400


class FakeWatched:
    """A watched process that a test can end."""

    def __init__(self, children, on_dead):
        self.on_dead = on_dead
        self.is_dead = self.is_closed = False
        self.children = tuple(children)
        self.dead = set()

    def replace(self, pids):
        self.children = tuple(pids)
        return True

    def without_dead(self, pids):
        return tuple(pid for pid in pids if pid not in self.dead)

    def close(self):
        self.is_closed = True


class FakeWatch:
    """A death watch to which a test reports deaths."""

    def __init__(self):
        self.watched = []
        self.dead = set()

    def watch(self, pid, started, *, children=(), on_dead):
        found = FakeWatched(children, on_dead)
        found.pid = pid  # type: ignore[attr-defined]
        found.is_dead = pid in self.dead
        self.watched.append(found)
        return found

    def report(self):
        """Report processes that died before they were watched."""
        for each in [w for w in self.watched if w.is_dead and not w.is_closed]:
            each.on_dead()

    def kill(self, pid):
        """End a process and report it, as the poller's thread does."""
        self.dead.add(pid)
        for each in [w for w in self.watched if w.pid == pid and not w.is_closed]:
            each.is_dead = True
            each.on_dead()


class Machine:
    """A host with a sidecar that can crash and restart.

    Attributes:
        service: The service of the current process.
        node: Its engine.
        watch: Its death watch.
    """

    def __init__(self, cluster, name="host-1", *, state_dir=None, member=None):
        self.cluster = cluster
        self.name = name
        self.member = member
        self.state_dir = state_dir
        self.watch = FakeWatch()
        self.clock = cluster.clock.view()
        self.start()

    def start(self):
        cluster = self.cluster
        self.node = cluster.node(self.name, group_id="of-nobody", clock=self.clock)
        self.node.engine.remove_session(self.node.session)
        self.node.engine.changed = Stepping(cluster)
        cluster.run_until(lambda: self.node.engine.is_ready, H)
        self.states = Lifecycle(self.clock)
        for state in (State.STARTING, State.RECOVERY, State.RUNNING):
            self.states.move(state, reason="a test")
        ports = self.node.engine.context.ports
        description = TopicDescription(name="__marshal", exists=True, partition_count=1)
        observers = FanOut()
        self.service = SidecarService(
            Runtime(self.node.engine, ports, description, observers, "fake"),
            client_id=self.name,
            state_dir=self.state_dir,
            version="0",
            states=self.states,
            watch=self.watch,
            member=self.member,
        )
        self.expected = self.service.restore(timeout_ms=1_000)
        self.watch.report()
        return self

    def crash(self):
        """Crash the sidecar; its clients continue."""
        self.cluster.crash(self.node)
        for host in self.service.groups:
            if host.identity is not None:
                host.identity.close()
        for watched in self.watch.watched:
            watched.is_closed = True

    def restart(self):
        self.crash()
        return self.start()

    @property
    def events(self):
        return self.node.observer


class Local:
    """A client of a sidecar, with the leases that its events gave it.

    Attributes:
        held: Epoch and last deadline by key.
        received: All events.
        generation: The Config generation after the applied events.
        acknowledges: Whether its heartbeats report that generation.
    """

    _count = 0

    def __init__(self, machine, name, *, pid=None, group="g", instance=None):
        Local._count += 1
        self.machine = machine
        self.name = name
        self.group = group
        self.instance = instance or f"{Local._count:032x}"
        self.pid = pid
        self.held = {}
        self.leaving = {}
        self.received = []
        self.positions = {}
        self.seeks = {}
        self.tokens = {}
        self.secrets = {}
        self.feed = None
        self.after = None
        self.failure = None
        self.is_paused = False
        self.warm = {}
        self.standbys = {}
        self.generation = None
        self.acknowledges = False
        self.register()

    @property
    def service(self):
        return self.machine.service

    @property
    def who(self):
        return Caller(self.group, self.name, self.instance)

    @property
    def now_ms(self):
        return self.machine.clock.now_ms()

    def register(self):
        beat_ms = min(BEAT_MS, self.service.info().client_beat_ms_max)
        registration = api.RegisterRequest(instance=self.instance, beat_ms=beat_ms)
        peer = Peer(self.pid, 0, None if self.pid is None else 1)
        self.registered = self.service.register(
            self.group, self.name, registration=registration, peer=peer
        )
        self.failure = None
        self.follow()
        return self

    def follow(self):
        self.feed = self.service.feed(self.who, self.after)
        return self.feed

    def subscribe(self, *topics, name="s", **rest):
        spec = api.SubscriptionSpec(topics=topics or ("t",), **rest)
        return self.service.subscribe(self.who, name, spec=spec)

    def claim(self, partition, topic="t"):
        self.service.claim(self.who, topic, partition=partition)
        return Key(self.group, topic, partition)

    def key(self, event):
        return Key(self.group, event.topic, event.partition)

    def take(self):
        """Apply new events."""
        for frame in self.feed.take():
            self.after = frame.id
            self.apply(frame.body)

    def apply(self, body):
        self.received.append(body)
        self.generation = getattr(body, "generation", self.generation)
        match body:
            case api.Snapshot():
                self.reset(body)
            case api.Assignment():
                self.assigned(body)
            case api.Warm():
                self.warm[self.key(body)] = body
            case api.Standby():
                self.standbys[self.key(body)] = body
                if body.owner is None:
                    del self.standbys[self.key(body)]
            case api.Releasing():
                key = self.key(body)
                if self.held.get(key, (None,))[0] == body.epoch:
                    self.leaving[key] = body
            case api.Lost():
                key = self.key(body)
                if self.held.get(key, (None,))[0] == body.epoch:
                    self.drop(key)
            case api.Paused():
                self.is_paused = body.is_paused
            case api.Failed():
                self.failure = body.failure
                with contextlib.suppress(MarshalError):
                    self.give_back(*self.held, reason="failed")

    def reset(self, body):
        """Apply a snapshot."""
        named = {(self.key(x), x.epoch) for x in body.assigned}
        for key, (epoch, _) in list(self.held.items()):
            if (key, epoch) not in named:
                self.drop(key)
        self.leaving = {self.key(x): x for x in body.releasing}
        for each in body.assigned:
            self.assigned(each)
        self.is_paused = body.paused.is_paused
        for each in body.warming:
            self.apply(each)
        self.standbys.clear()
        for each in body.standbys:
            self.apply(each)

    def assigned(self, event):
        key = self.key(event)
        epoch, _ = self.held.get(key, (-1, 0))
        if event.epoch < epoch:
            return
        self.held[key] = (event.epoch, event.hard_until_ms)
        self.warm.pop(key, None)
        self.standbys.pop(key, None)
        self.tokens[key] = event.token
        self.secrets[key] = event.secret
        if event.epoch != epoch:
            self.positions[key] = event.position
            self.leaving.pop(key, None)

    def drop(self, key):
        self.held.pop(key, None)
        self.leaving.pop(key, None)

    @property
    def valid(self):
        """Keys that the client may use now, by its own deadlines."""
        now_ms = self.now_ms
        return {key for key, (_, until_ms) in self.held.items() if now_ms < until_ms}

    def progress(self):
        return tuple(
            api.Progress(
                topic=key.topic,
                partition=key.partition,
                epoch=epoch,
                position=self.positions.get(key),
                seek_count=self.seeks.get(key, 0),
            )
            for key, (epoch, _) in self.held.items()
        )

    def beat(self, **rest):
        if self.acknowledges:
            rest.setdefault("generation", self.generation)
        answer = self.service.beat(
            self.who, api.HeartbeatRequest(progress=self.progress(), **rest)
        )
        for each in answer.deadlines:
            key = self.key(each)
            if self.held.get(key, (None,))[0] == each.epoch:
                self.held[key] = (each.epoch, each.hard_until_ms)
        return answer

    def returned(self, key, **rest):
        epoch, _ = self.held[key]
        return api.Release(
            topic=key.topic,
            partition=key.partition,
            epoch=epoch,
            position=self.positions.get(key),
            **rest,
        )

    def give_back(self, *keys, timeout_ms=0, **rest):
        """Stop using keys, then release them."""
        returned = tuple(self.returned(key, **rest) for key in keys)
        for key in keys:
            self.drop(key)
        self.service.release(
            self.who, api.ReleaseRequest(returned=returned, timeout_ms=timeout_ms)
        )
        return returned

    def ready(self, key, *, epoch=None):
        """Report that the client has warmed up for a key."""
        epoch = self.warm[key].epoch if epoch is None else epoch
        self.service.ready(
            self.who,
            api.ReadyRequest(topic=key.topic, partition=key.partition, epoch=epoch),
        )

    def live(self):
        """Run one round: apply events, release, send a heartbeat."""
        self.take()
        if self.failure is not None:
            return
        if self.feed.is_closed:
            self.follow()
            self.take()
        if self.leaving:
            self.give_back(*self.leaving)
        self.beat()

    def named(self, kind):
        return [body for body in self.received if isinstance(body, kind)]


def run(cluster, clients, duration_ms, *, step_ms=100):
    """Let time pass while the clients run."""
    for _ in range(-(-duration_ms // step_ms)):
        cluster.run(step_ms)
        for client in clients:
            client.live()


def run_until(cluster, clients, condition, limit_ms, *, step_ms=20):
    """Run until a condition holds; return the time in milliseconds."""
    start_ms = cluster.clock.now_ms()
    while not condition():
        took_ms = cluster.clock.now_ms() - start_ms
        assert took_ms < limit_ms, f"not within {limit_ms} ms of virtual time"
        run(cluster, clients, step_ms, step_ms=step_ms)
    return cluster.clock.now_ms() - start_ms


def sizes(*clients):
    return [len(client.valid) for client in clients]


def find(machine, client):
    """Return the sidecar's record of a client."""
    return machine.service.groups[0].find(client.name, client.instance)


def records(cluster, kind, name="host-1"):
    """Return a host's records of a kind from both coordinating partitions."""
    return [
        line.record for t in (0, 1) for line in of(cluster, name, kind, partition=t)
    ]


def releases(cluster, name="host-1"):
    return records(cluster, ReleasingPartition, name)


def keys(cluster):
    """Return the state of every key in the log."""
    return fold(cluster, 0).keys | fold(cluster, 1).keys


def having(machine, name="a", *topics, count=8, pid=1, **rest):
    """Return a client that holds every partition."""
    client = Local(machine, name, pid=pid)
    client.subscribe(*topics, **rest)
    run_until(machine.cluster, [client], lambda: len(client.valid) == count, 3 * H)
    return client


def sharing(cluster, machine):
    """Return two clients that hold four of eight partitions each."""
    a, b = having(machine), Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    return a, b


def leaving(client, **rest):
    returned = tuple(client.returned(key) for key in sorted(client.held))
    client.held.clear()
    return client.service.leave(
        client.who, api.LeaveRequest(returned=returned, timeout_ms=1_000, **rest)
    )
