"""A client of a sidecar, interrupted wherever Python may run a signal handler."""

import queue
import sys
import threading

import pytest
from enginekit import T0, world
from fakesidecar import FakeSidecar, RequestsBy
from interrupting import interrupted
from slowness import until

from kafka_marshal import Marshal
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.errors import InvalidTransition
from kafka_marshal.remote import api
from kafka_marshal.remote import backend as module
from kafka_marshal.remote.answers import AsOf, GroupNow, OwnersNow, WorldNow
from kafka_marshal.remote.transport import Connection
from simulator.node import Recorder

AS_OF = AsOf(time_ms=1, offsets={})


class Assigning(FakeSidecar):
    """A sidecar that assigns what is subscribed to or claimed, and takes it back.

    It ends the stream of a client that closes, which cannot shut a fake one down.

    Attributes:
        has: Epochs of what the client has, by subscription; "" for claims.
    """

    def __init__(self):
        super().__init__()
        self.has = {}
        self._epochs = iter(range(1, 100_000))
        self._stream = None
        self._has_left = False
        # Of the last claim; one that is withdrawn late does not end a later one.
        self._number = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self):
        while not self._is_over.is_set():
            try:
                self._stream = self.streams.get(timeout=0.05)
            except queue.Empty:
                continue
            self._stream.push(self._snapshot())
            if self._has_left:
                self._stream.end()

    def _snapshot(self):
        return api.Snapshot(
            assigned=tuple(self._assigned(*each) for each in self.has.items()),
            releasing=(),
            paused=api.Paused(is_paused=False),
            subscriptions=(),
        )

    def handle_request(self, request):
        if request.method == "PUT" and request.url.path.endswith("/clients/c"):
            self._has_left = False
        return super().handle_request(request)

    def close(self):
        """Called as a client closes its connections."""
        self._has_left = True
        if self._stream is not None:
            self._stream.end()

    def _usual(self, method, path, request):
        if path.endswith("/world"):
            return self._answer(WorldNow(as_of=AS_OF, schema=1, partitions={}))
        if path.endswith("/owners/t"):
            return self._answer(OwnersNow(as_of=AS_OF, owners={0: "host-a"}))
        if path.endswith("/groups/g"):
            found = GroupNow(as_of=AS_OF, group="g", claims=(), pauses=())
            return self._answer(found)
        answer = super()._usual(method, path, request)
        if "/subscriptions/" in path and method == "PUT":
            self._assign(path.rpartition("/")[2])
        elif "/claims/" in path and method == "PUT":
            number = int(request.url.params["request"])
            if number != self._number:
                self._number = number
                self.has.pop("", None)
            self._assign("")
        elif path.endswith("/end"):
            self._end(path.split("/")[-2])
        elif "/claims/" in path and int(request.url.params["request"]) == self._number:
            self._end("")
        return answer

    def _assign(self, name):
        if name not in self.has:
            self.has[name] = next(self._epochs)
            if self._stream is not None:
                self._stream.push(self._assigned(name, self.has[name]))

    def _end(self, name):
        epoch = self.has.pop(name, None)
        if epoch is not None and self._stream is not None:
            self._stream.push(
                api.Lost(topic="t", partition=0, epoch=epoch, reason="released")
            )

    def _assigned(self, name, epoch):
        now_ms = self.clock.now_ms()
        return api.Assignment(
            subscription=name,
            topic="t",
            partition=0,
            epoch=epoch,
            token=f"1.0.{epoch}",
            client_id="host-a",
            incarnation=self.incarnation,
            secret="5e" * 16,
            position=0,
            is_anchored=True,
            soft_until_ms=now_ms + 600_000,
            hard_until_ms=now_ms + 900_000,
        )

    def end(self):
        self._is_over.set()
        self._thread.join()
        if self._stream is not None:
            self._stream.end()


@pytest.fixture
def reached(monkeypatch):
    """A sidecar that every ``Marshal`` of the test reaches, over a data topic ``t``."""
    reached = Assigning()
    plain = Connection.open

    def connect(*args, **rest):
        requests = RequestsBy(reached)
        return plain(*args, **rest, requests=requests, transport=reached)

    monkeypatch.setattr(Connection, "open", connect)
    monkeypatch.setattr(
        module,
        "open_data_log",
        lambda _: world(records=(10,)).kafka.data_log(),
    )
    yield reached
    reached.end()


def opened():
    return Marshal(
        group_id="g", client_id="c", sidecar="unix:/run/s.sock", observer=Recorder()
    )


def running():
    """Return the threads of clients of sidecars."""
    return [
        each
        for each in threading.enumerate()
        if each.name.startswith("marshal-remote-") and each.is_alive()
    ]


def require_unlocked(engine, at):
    """Check that no thread holds the lock for good."""
    found = []

    def look():
        found.append(engine.changed.acquire(timeout=60))
        if found[-1]:
            engine.changed.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [True], at


def test_an_interrupted_open_leaves_nothing_running(reached):
    """Its heartbeats went on, and the name was in use as long as the process lived."""
    at, is_interrupted = 0, True
    while is_interrupted:
        is_interrupted, marshal = interrupted(opened, at, everywhere=True)
        if marshal is not None:
            marshal.close()
        until(lambda: running() == [], f"its threads end: {at}")
        at += 1
    assert at > 100


OPENINGS = {
    "consumer": lambda it: it.consumer("t"),
    "ranges": lambda it: it.ranges(ConsumerConfig(topics=("t",))),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_consumer_after_an_interrupted_one_gets_the_partition(reached, name):
    """Its topic was consumed by nobody, and could not be consumed."""
    with opened() as marshal:
        at, is_interrupted = 0, True
        while is_interrupted:
            is_interrupted, consumer = interrupted(
                lambda: OPENINGS[name](marshal), at, everywhere=True
            )
            require_unlocked(marshal.engine, at)
            # Python ignores what is raised as it closes a generator.
            if consumer is None:
                consumer = OPENINGS[name](marshal)
            until(lambda: len(marshal.session.holdings) == 1, f"it is assigned: {at}")
            consumer.close()
            assert marshal.session.names == {}, at
            at += 1
        assert at > 50
        until(lambda: reached.has == {}, "all is given back")


def test_an_interrupted_claim_is_given_up(reached):
    with opened() as marshal:
        at, is_interrupted = 0, True
        while is_interrupted:
            is_interrupted, claim = interrupted(
                lambda: marshal.claim("t", 0), at, everywhere=True
            )
            require_unlocked(marshal.engine, at)
            if claim is None:
                assert marshal.session.wanted == [], at
                claim = marshal.claim("t", 0)
            claim.check()
            claim.release()
            assert marshal.session.holdings == {}, at
            at += 1
        assert at > 50
        until(lambda: reached.has == {}, "all is given back")


QUESTIONS = {
    "world": lambda marshal, _: marshal.world(),
    "owners": lambda marshal, _: marshal.owners("t"),
    "assignment": lambda _, it: it.assignment(),
    "tokens": lambda _, it: set(it.tokens()),
    "position": lambda _, it: it.position(T0),
    "committed": lambda _, it: it.committed(T0),
    "lag": lambda _, it: it.lag(),
    "pause": lambda _, it: it.pause(T0) or it.paused(),
    "resume": lambda _, it: it.resume(T0) or it.paused(),
    "commit": lambda _, it: (it.poll(0, 2), it.commit())[1],
}


def consuming(marshal):
    consumer = marshal.consumer("t")
    until(consumer.assignment, "it is assigned")
    return consumer


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_call_after_an_interrupted_one_works(reached, name):
    with opened() as marshal:
        consumer = consuming(marshal)

        def call():
            return QUESTIONS[name](marshal, consumer)

        wanted, at = call(), 0
        while interrupted(call, at, everywhere=True)[0]:
            require_unlocked(marshal.engine, at)
            assert call() == wanted, at
            at += 1
        assert at > 0
        assert consumer.assignment() == {T0}


CLOSES = {
    "consumer": lambda _, it: it.close(),
    "marshal": lambda marshal, _: marshal.close(),
    "with": lambda marshal, _: marshal.__exit__(None, None, None),
}


def uninterrupted(monkeypatch, backend):
    """Have no interrupts from where a backend is closed."""
    plain = backend.close

    def close():
        sys.setprofile(None)
        plain()

    monkeypatch.setattr(backend, "close", close)


@pytest.mark.parametrize("name", CLOSES)
def test_what_was_interrupted_while_closing_is_closed(reached, name, monkeypatch):
    at, is_interrupted = 0, True
    while is_interrupted:
        marshal = opened()
        uninterrupted(monkeypatch, marshal._backend)
        engine, consumer = marshal.engine, consuming(marshal)
        is_interrupted, _ = interrupted(
            lambda a=marshal, b=consumer: CLOSES[name](a, b), at, everywhere=True
        )
        require_unlocked(engine, at)
        consumer.close()
        marshal.close()
        assert consumer.is_closed, at
        until(lambda: running() == [], f"its threads end: {at}")
        with pytest.raises(InvalidTransition, match="closed"):
            marshal.owners("t")
        reached.has.clear()
        at += 1 if at < 20 else 11
    assert at > 50
