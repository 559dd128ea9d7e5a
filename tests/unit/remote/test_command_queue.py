"""What a client says is carried until it was heard, and its lock never waits."""

import threading
import time

import httpx
import pytest
from fakesidecar import FakeSidecar, connected, failure
from slowness import is_over

from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.command_queue import CALLS_MAX, CommandQueue, WorkerPool

WAIT_S = 60
KEY = Key("g", "t", 0)
STANDING = api.Progress(topic="t", partition=0, epoch=5, position=3)


class Office:
    """A commands over a sidecar in memory."""

    def __init__(self):
        self.sidecar = FakeSidecar()
        self.lock = threading.Condition(threading.RLock())
        self.stopped = threading.Event()
        self.workers = WorkerPool("test", threads=2)
        self.heard = []
        self.commands = CommandQueue(
            connected(self.sidecar),
            lock=self.lock,
            workers=self.workers,
            stopped=self.stopped,
            standings=lambda: (STANDING,),
            on_flushed=lambda answer, sent: self.heard.append((answer, sent)),
        )

    def wait_for(self, is_done):
        since_s = time.monotonic()
        with self.lock:
            while not is_done():
                assert not is_over(since_s, WAIT_S)
                self.lock.wait(0.01)

    def wait_heard(self, *seqs):
        self.wait_for(lambda: not self.commands.is_pending(seqs, late=False))

    def stop(self):
        self.stopped.set()
        self.workers.close(WAIT_S * 1_000)


@pytest.fixture
def office():
    office = Office()
    yield office
    office.stop()


def returned(partition=0, *, position=3):
    return api.Release(topic="t", partition=partition, epoch=5, position=position)


def test_what_is_given_back_is_told_until_it_was_heard(office):
    late = failure("DeadlineExceeded")
    office.sidecar.answers["POST", "released"] = [
        httpx.ConnectError("refused"),
        (503, failure("CoordinationError", retriable=True)),
        (504, late),
    ]
    with office.lock:
        office.commands.give_back([returned(), returned(1)])
        assert office.commands.returning_count == 2
    office.wait_for(lambda: office.commands.returning_count == 0)
    told = office.sidecar.named("POST", "/released")
    assert len(told) == 4
    assert [each["partition"] for each in told[0]["returned"]] == [0, 1]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((410, failure("ClaimLost", reason="gone")), id="not-known"),
        pytest.param((409, failure("InvalidTransition")), id="refused"),
    ],
)
def test_what_is_refused_is_not_told_again(office, answer):
    office.sidecar.answers["POST", "released"] = [answer]
    with office.lock:
        office.commands.give_back([returned()])
    office.wait_for(lambda: office.commands.returning_count == 0)
    assert len(office.sidecar.named("POST", "/released")) == 1


def test_nothing_given_back_is_nothing_to_tell(office):
    office.commands.give_back([])
    assert office.commands.returning_count == 0


@pytest.mark.parametrize("keep", [True, False])
def test_a_subscription_ends_with_its_positions(office, keep):
    with office.lock:
        seq = office.commands.end("s", [returned()], keep=keep)
        assert office.commands.is_pending([seq], late=True)
    office.wait_heard(seq)
    (told,) = office.sidecar.named("POST", "/subscriptions/s/end")
    assert told["returned"][0]["position"] == 3
    assert told["timeout_ms"] > 0


def test_a_claim_is_wanted_no_more(office):
    with office.lock:
        assert office.commands.want_number(KEY) == 1
        office.commands.unclaim(KEY)
        assert office.commands.want_number(KEY) == 2
    office.wait_for(lambda: office.sidecar.named("DELETE", "/claims/t/0"))


def test_a_claim_is_wanted_no_more_only_after_its_position_is_told(office):
    """On two threads: whoever lets go of it first would do so where it last heard."""
    refused = httpx.ConnectError("refused")
    office.sidecar.answers["POST", "released"] = [refused, refused]
    with office.lock:
        office.commands.give_back([returned(), returned(1)])
        office.commands.unclaim(KEY)
    office.wait_for(lambda: office.sidecar.named("DELETE", "/claims/t/0"))
    asked = [path for _, path, _ in office.sidecar.asked]
    before = asked[: next(n for n, path in enumerate(asked) if "/claims/" in path)]
    told = office.sidecar.named("POST", "/released")[: len(before)]
    assert len(told) > 2
    assert any({"t"} == {r["topic"] for r in each["returned"]} for each in told[2:])
    office.wait_for(lambda: office.commands.returning_count == 0)


def test_flushes_that_wait_are_one(office):
    office.sidecar.answers["POST", "beat"] = [httpx.ReadError("reset")]
    with office.lock:
        seqs = [office.commands.flush() for _ in range(3)]
        assert office.commands.is_pending(seqs[2:], late=False)
    office.wait_heard(*seqs)
    told = office.sidecar.named("POST", "/beat")
    assert len(told) == 2
    assert told[1]["flush"]
    assert told[1]["standings"][0]["position"] == 3
    assert [what for _, what in office.heard] == [(STANDING,)]


def test_what_was_never_heard_stays_so(office):
    office.sidecar.is_dead = True
    with office.lock:
        seqs = [office.commands.flush(), office.commands.end("s", [], keep=False)]
        office.commands.give_back([returned()])
    office.wait_for(lambda: office.sidecar.named("POST", "/beat"))
    office.stop()
    assert not office.commands.is_pending(seqs, late=False)
    assert office.commands.is_pending(seqs, late=True)
    assert office.commands.returning_count == 1


def test_after_the_end_nothing_is_carried(office):
    office.stop()
    with office.lock:
        seq = office.commands.end("s", [], keep=False)
    assert not office.commands.is_pending([seq], late=False)
    assert office.sidecar.asked == []


# --- Calls on threads: bounded, in order, and over when they are over ---


def test_calls_are_made_in_order_by_one_thread():
    workers = WorkerPool("test", threads=1)
    made, done = [], threading.Event()
    for number in range(20):
        assert workers.submit(lambda number=number: made.append(number))
    workers.submit(done.set)
    assert done.wait(WAIT_S)
    assert made == list(range(20))
    workers.close(1_000)


def test_calls_of_several_threads_overlap():
    workers = WorkerPool("test", threads=2)
    both = threading.Barrier(2)
    met = threading.Semaphore(0)

    def meet():
        both.wait(WAIT_S)
        met.release()

    for _ in range(2):
        assert workers.submit(meet)
    assert met.acquire(timeout=WAIT_S)
    assert met.acquire(timeout=WAIT_S)
    workers.close(1_000)


def test_what_is_full_or_closed_takes_nothing():
    workers = WorkerPool("test", threads=1)
    begun, free = threading.Event(), threading.Event()
    made = []

    def hold():
        begun.set()
        assert free.wait(WAIT_S)

    assert workers.submit(hold)
    assert begun.wait(WAIT_S)
    for _ in range(CALLS_MAX):
        assert workers.submit(lambda: made.append(1))
    assert not workers.submit(lambda: None)
    workers.close(0)
    free.set()
    workers.close(WAIT_S * 1_000)
    assert not workers.submit(lambda: None)
    assert made == []


def test_a_call_does_not_wait_for_a_thread_that_has_just_taken_another(monkeypatch):
    workers = WorkerPool("test", threads=2)
    taken, submitted = threading.Event(), threading.Event()
    second, made = threading.Event(), threading.Event()
    plain = workers._queue.get

    def get(*, block=True, timeout=None):
        call = plain(block=block, timeout=timeout)
        taken.set()
        assert submitted.wait(WAIT_S)
        return call

    def first():
        if second.wait(WAIT_S / 2):
            made.set()

    monkeypatch.setattr(workers._queue, "get", get)
    assert workers.submit(first)
    assert taken.wait(WAIT_S)
    assert workers.submit(second.set)
    submitted.set()
    assert made.wait(WAIT_S)
    workers.close(WAIT_S * 1_000)
