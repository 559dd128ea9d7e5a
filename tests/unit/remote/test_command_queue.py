"""Commands to the sidecar are repeated until they are answered."""

import threading
import time

import httpx
import pytest
from fakesidecar import FakeSidecar, connected, failure
from slowness import is_over

from kafka_marshal.clock import WorkerPool
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.command_queue import CALLS_MAX, CommandQueue

WAIT_S = 60
KEY = Key("g", "t", 0)
PROGRESS = api.Progress(topic="t", partition=0, epoch=5, position=3)


class Rig:
    """A queue of commands to a sidecar in memory."""

    def __init__(self):
        self.sidecar = FakeSidecar()
        self.lock = threading.Condition(threading.RLock())
        self.stopped = threading.Event()
        self.workers = WorkerPool("test", threads=2, calls_max=CALLS_MAX)
        self.answered = []
        self.commands = CommandQueue(
            connected(self.sidecar),
            lock=self.lock,
            workers=self.workers,
            stopped=self.stopped,
            progress=lambda: (PROGRESS,),
            on_flushed=lambda answer, sent: self.answered.append((answer, sent)),
        )

    def wait_for(self, is_done):
        since_s = time.monotonic()
        with self.lock:
            while not is_done():
                assert not is_over(since_s, WAIT_S)
                self.lock.wait(0.01)

    def wait_answered(self, *seqs):
        self.wait_for(lambda: not self.commands.is_pending(seqs, late=False))

    def stop(self):
        self.stopped.set()
        self.workers.close(WAIT_S * 1_000)


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def returned(partition=0, *, position=3):
    return api.Release(topic="t", partition=partition, epoch=5, position=position)


def test_a_release_is_sent_until_it_is_answered(rig):
    late = failure("DeadlineExceeded")
    rig.sidecar.answers["POST", "released"] = [
        httpx.ConnectError("refused"),
        (503, failure("CoordinationError", retriable=True)),
        (504, late),
    ]
    with rig.lock:
        rig.commands.give_back([returned(), returned(1)])
        assert rig.commands.returning_count == 2
    rig.wait_for(lambda: rig.commands.returning_count == 0)
    posted = rig.sidecar.named("POST", "/released")
    assert len(posted) == 4
    assert [each["partition"] for each in posted[0]["returned"]] == [0, 1]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((410, failure("ClaimLost", reason="gone")), id="not-known"),
        pytest.param((409, failure("InvalidTransition")), id="refused"),
    ],
)
def test_a_refused_release_is_not_sent_again(rig, answer):
    rig.sidecar.answers["POST", "released"] = [answer]
    with rig.lock:
        rig.commands.give_back([returned()])
    rig.wait_for(lambda: rig.commands.returning_count == 0)
    assert len(rig.sidecar.named("POST", "/released")) == 1


def test_an_empty_release_sends_nothing(rig):
    rig.commands.give_back([])
    assert rig.commands.returning_count == 0


@pytest.mark.parametrize("keep", [True, False])
def test_the_end_of_a_subscription_is_sent_with_its_positions(rig, keep):
    with rig.lock:
        seq = rig.commands.end("s", [returned()], keep=keep)
        assert rig.commands.is_pending([seq], late=True)
    rig.wait_answered(seq)
    (posted,) = rig.sidecar.named("POST", "/subscriptions/s/end")
    assert posted["returned"][0]["position"] == 3
    assert posted["timeout_ms"] > 0


def test_unclaim_is_sent_and_advances_the_request_number(rig):
    with rig.lock:
        assert rig.commands.want_number(KEY) == 1
        rig.commands.unclaim(KEY)
        assert rig.commands.want_number(KEY) == 2
    rig.wait_for(lambda: rig.sidecar.named("DELETE", "/claims/t/0"))


def test_a_claim_is_ended_only_after_its_position_was_sent(rig):
    """Two threads could end the claim first, at an earlier position."""
    refused = httpx.ConnectError("refused")
    rig.sidecar.answers["POST", "released"] = [refused, refused]
    with rig.lock:
        rig.commands.give_back([returned(), returned(1)])
        rig.commands.unclaim(KEY)
    rig.wait_for(lambda: rig.sidecar.named("DELETE", "/claims/t/0"))
    asked = [path for _, path, _ in rig.sidecar.asked]
    before = asked[: next(n for n, path in enumerate(asked) if "/claims/" in path)]
    posted = rig.sidecar.named("POST", "/released")[: len(before)]
    assert len(posted) > 2
    assert any({"t"} == {r["topic"] for r in each["returned"]} for each in posted[2:])
    rig.wait_for(lambda: rig.commands.returning_count == 0)


def test_waiting_flushes_are_sent_as_one(rig):
    rig.sidecar.answers["POST", "beat"] = [httpx.ReadError("reset")]
    with rig.lock:
        seqs = [rig.commands.flush() for _ in range(3)]
        assert rig.commands.is_pending(seqs[2:], late=False)
    rig.wait_answered(*seqs)
    posted = rig.sidecar.named("POST", "/beat")
    assert len(posted) == 2
    assert posted[1]["flush"]
    assert posted[1]["progress"][0]["position"] == 3
    assert [what for _, what in rig.answered] == [(PROGRESS,)]


def test_commands_without_an_answer_stay_pending(rig):
    rig.sidecar.is_dead = True
    with rig.lock:
        seqs = [rig.commands.flush(), rig.commands.end("s", [], keep=False)]
        rig.commands.give_back([returned()])
    rig.wait_for(lambda: rig.sidecar.named("POST", "/beat"))
    rig.stop()
    assert not rig.commands.is_pending(seqs, late=False)
    assert rig.commands.is_pending(seqs, late=True)
    assert rig.commands.returning_count == 1


def test_after_the_stop_no_command_is_sent(rig):
    rig.stop()
    with rig.lock:
        seq = rig.commands.end("s", [], keep=False)
    assert not rig.commands.is_pending([seq], late=False)
    assert rig.sidecar.asked == []
