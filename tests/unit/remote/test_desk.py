"""What a client says is carried until it was heard, and its lock never waits."""

import threading
import time

import httpx
import pytest
from fakesidecar import FakeSidecar, connected, failure

from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.desk import SidecarDesk
from kafka_marshal.remote.errands import Errands

WAIT_S = 10
KEY = Key("g", "t", 0)
STANDING = api.Standing(topic="t", partition=0, epoch=5, position=3)


class Office:
    """A desk over a sidecar in memory."""

    def __init__(self):
        self.sidecar = FakeSidecar()
        self.lock = threading.Condition(threading.RLock())
        self.stopped = threading.Event()
        self.errands = Errands("test", threads=2)
        self.heard = []
        self.desk = SidecarDesk(
            connected(self.sidecar),
            lock=self.lock,
            errands=self.errands,
            stopped=self.stopped,
            standings=lambda: (STANDING,),
            heard=lambda said, told: self.heard.append((said, told)),
        )

    def wait_for(self, is_done):
        deadline_s = time.monotonic() + WAIT_S
        with self.lock:
            while not is_done():
                assert time.monotonic() < deadline_s
                self.lock.wait(0.01)

    def wait_heard(self, *seqs):
        self.wait_for(lambda: not self.desk.is_pending(seqs, late=False))

    def stop(self):
        self.stopped.set()
        self.errands.close(WAIT_S * 1_000)


@pytest.fixture
def office():
    office = Office()
    yield office
    office.stop()


def returned(partition=0, *, position=3):
    return api.Returned(topic="t", partition=partition, epoch=5, position=position)


def test_what_is_given_back_is_told_until_it_was_heard(office):
    late = failure("DeadlineExceeded")
    office.sidecar.answers["POST", "released"] = [
        httpx.ConnectError("refused"),
        (503, failure("CoordinationError", retriable=True)),
        (504, late),
    ]
    with office.lock:
        office.desk.give_back([returned(), returned(1)])
        assert office.desk.returning_count == 2
    office.wait_for(lambda: office.desk.returning_count == 0)
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
        office.desk.give_back([returned()])
    office.wait_for(lambda: office.desk.returning_count == 0)
    assert len(office.sidecar.named("POST", "/released")) == 1


def test_nothing_given_back_is_nothing_to_tell(office):
    office.desk.give_back([])
    assert office.desk.returning_count == 0


@pytest.mark.parametrize("keep", [True, False])
def test_a_subscription_ends_with_its_positions(office, keep):
    with office.lock:
        seq = office.desk.end("s", [returned()], keep=keep)
        assert office.desk.is_pending([seq], late=True)
    office.wait_heard(seq)
    (told,) = office.sidecar.named("POST", "/subscriptions/s/end")
    assert told["returned"][0]["position"] == 3
    assert told["timeout_ms"] > 0


def test_a_claim_is_wanted_no_more(office):
    with office.lock:
        assert office.desk.wish_of(KEY) == 1
        office.desk.unclaim(KEY)
        assert office.desk.wish_of(KEY) == 2
    office.wait_for(lambda: office.sidecar.named("DELETE", "/claims/t/0"))


def test_a_claim_is_wanted_no_more_only_after_its_position_is_told(office):
    """On two threads: whoever lets go of it first would do so where it last heard."""
    refused = httpx.ConnectError("refused")
    office.sidecar.answers["POST", "released"] = [refused, refused]
    with office.lock:
        office.desk.give_back([returned(), returned(1)])
        office.desk.unclaim(KEY)
    office.wait_for(lambda: office.sidecar.named("DELETE", "/claims/t/0"))
    asked = [path for _, path, _ in office.sidecar.asked]
    before = asked[: next(n for n, path in enumerate(asked) if "/claims/" in path)]
    told = office.sidecar.named("POST", "/released")[: len(before)]
    assert len(told) > 2
    assert any({"t"} == {r["topic"] for r in each["returned"]} for each in told[2:])
    office.wait_for(lambda: office.desk.returning_count == 0)


def test_flushes_that_wait_are_one(office):
    office.sidecar.answers["POST", "beat"] = [httpx.ReadError("reset")]
    with office.lock:
        seqs = [office.desk.flush() for _ in range(3)]
        assert office.desk.is_pending(seqs[2:], late=False)
    office.wait_heard(*seqs)
    told = office.sidecar.named("POST", "/beat")
    assert len(told) == 2
    assert told[1]["flush"]
    assert told[1]["standings"][0]["position"] == 3
    assert [what for _, what in office.heard] == [(STANDING,)]


def test_what_was_never_heard_stays_so(office):
    office.sidecar.is_dead = True
    with office.lock:
        seqs = [office.desk.flush(), office.desk.end("s", [], keep=False)]
        office.desk.give_back([returned()])
    office.wait_for(lambda: office.sidecar.named("POST", "/beat"))
    office.stop()
    assert not office.desk.is_pending(seqs, late=False)
    assert office.desk.is_pending(seqs, late=True)
    assert office.desk.returning_count == 1


def test_after_the_end_nothing_is_carried(office):
    office.stop()
    with office.lock:
        seq = office.desk.end("s", [], keep=False)
    assert not office.desk.is_pending([seq], late=False)
    assert office.sidecar.asked == []
