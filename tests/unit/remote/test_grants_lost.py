"""Offsets granted to requests whose answers are lost are reported, once."""

import pytest
from enginekit import AMO, H, values
from remotekit import RemoteRig, granted, key, lost

from kafka_marshal.errors import CoordinationError, DeadlineExceeded
from kafka_marshal.remote.grants import VERDICT_MS_MAX

VERDICT_LIMIT_MS = max(VERDICT_MS_MAX, H)
NO_ANSWER = CoordinationError("no sidecar")
NOTHING_LEFT = {"outcome": "refused", "reason": "nothing_left"}


@pytest.fixture
def rig():
    return RemoteRig(records=(40, 10))


@pytest.fixture
def consumer(rig):
    """A consumer at most once of batches of four, with partition 0."""
    consumer = rig.consumer(delivery=AMO, most=4)
    rig.send(rig.assigned(set_by=""))
    return consumer


def renew(rig):
    rig.session.on_deadlines(rig.beaten(), reported=())


def give_up(rig):
    """Have the request in flight end without an answer."""
    for _ in range(5):
        rig.tick(VERDICT_LIMIT_MS // 4)
        renew(rig)
    rig.answer(DeadlineExceeded("no verdict"))


def request(rig, last):
    rig.session.grants.request(rig.session.holdings[key()], last)


def losses(rig):
    """Return the offsets reported as lost."""
    found = [run for event in rig.events("grant_lost") for run in event["ranges"]]
    offsets = [n for first, last in found for n in range(first, last + 1)]
    assert len(offsets) == len(set(offsets)), "each is reported once"
    return found


def test_an_unanswered_request_reports_its_range(rig, consumer):
    consumer.poll()
    rig.answer(NO_ANSWER)
    (event,) = rig.events("grant_unanswered")
    assert (event["key"], event["ranges"]) == (key(), [(0, 3)])


def test_a_later_grant_shows_that_earlier_offsets_are_lost(rig, consumer):
    consumer.poll()
    give_up(rig)
    assert losses(rig) == [], "it may not have been granted"
    request(rig, 7)
    rig.answer(granted(4, 7))
    assert losses(rig) == [(0, 3)]
    assert values(consumer.poll()) == {0: [4, 5, 6, 7]}


def test_a_later_refusal_shows_that_earlier_offsets_are_lost(rig, consumer):
    consumer.poll()
    give_up(rig)
    request(rig, 3)
    rig.answer(granted(None, None, head=4, **NOTHING_LEFT))
    assert losses(rig) == [(0, 3)]
    consumer.poll()
    rig.answer(granted(4, 7))
    assert losses(rig) == [(0, 3)]


def test_offsets_granted_to_a_later_request_are_not_lost(rig, consumer):
    consumer.poll()
    give_up(rig)
    request(rig, 7)
    rig.answer(granted(0, 7))
    assert values(consumer.poll(0, 8)) == {0: [0, 1, 2, 3, 4, 5, 6, 7]}
    assert losses(rig) == []


def test_offsets_that_a_request_in_flight_may_have_are_not_lost(rig, consumer):
    """That request landed in the log before the refused one."""
    consumer.poll()
    request(rig, 7)
    request(rig, 11)
    refused = granted(None, None, head=8, **NOTHING_LEFT)
    rig.answer(refused, granted(0, 7))
    assert losses(rig) == []
    rig.answer(granted(8, 11))
    assert losses(rig) == []


def test_offsets_are_lost_once_no_request_in_flight_can_have_them(rig, consumer):
    consumer.poll()
    give_up(rig)
    request(rig, 7)
    request(rig, 11)
    rig.answer(granted(4, 7))
    assert losses(rig) == [], "the other one may have it"
    rig.answer(granted(8, 11))
    assert losses(rig) == [(0, 3)]


def test_offsets_granted_to_the_next_owner_are_not_lost(rig, consumer):
    consumer.poll()
    give_up(rig)
    request(rig, 3)
    rig.answer(granted(None, None, head=9, outcome="ignored", reason="not_owner"))
    assert losses(rig) == []


def end_and_begin(rig, position, *, follows=5, set_by=""):
    rig.send(lost(epoch=5))
    rig.send(rig.assigned(epoch=9, position=position, follows=follows, set_by=set_by))


@pytest.mark.parametrize("is_early", [True, False])
def test_a_next_claim_that_begins_after_requested_offsets_reports_them(
    rig, consumer, is_early
):
    """As after a restart of the sidecar, which has forgotten the request."""
    consumer.poll()
    rig.answer(granted(0, 3))
    assert values(consumer.poll()) == {0: [0, 1, 2, 3]}
    consumer.poll()
    if is_early:
        rig.send(lost(epoch=5))
        rig.answer(NO_ANSWER)
        end_and_begin(rig, 8)
    else:
        end_and_begin(rig, 8)
        assert losses(rig) == []
        rig.answer(NO_ANSWER)
    assert losses(rig) == [(4, 7)]


def test_a_grant_received_after_the_next_claim_is_reported_once(rig, consumer):
    consumer.poll()
    end_and_begin(rig, 4)
    rig.answer(granted(0, 3))
    assert losses(rig) == [(0, 3)]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"follows": 7}, id="another-owner-in-between"),
        pytest.param({"follows": None}, id="not-known-which-was-before"),
        pytest.param({"set_by": "0f"}, id="an-admin-set-the-position"),
        pytest.param({"set_by": None}, id="not-known-who-set-it"),
    ],
)
def test_no_loss_is_reported_if_the_position_may_have_been_set(rig, consumer, how):
    consumer.poll()
    end_and_begin(rig, 4, **how)
    rig.answer(NO_ANSWER)
    assert losses(rig) == []


def test_a_next_claim_that_begins_at_requested_offsets_reports_no_loss(rig, consumer):
    consumer.poll()
    end_and_begin(rig, 0)
    rig.answer(NO_ANSWER)
    assert losses(rig) == []


def test_offsets_that_were_handed_out_are_not_lost(rig, consumer):
    """The claim ends while no request is in flight."""
    consumer.poll()
    rig.answer(granted(0, 3))
    assert values(consumer.poll()) == {0: [0, 1, 2, 3]}
    end_and_begin(rig, 4)
    consumer.poll()
    rig.answer(granted(4, 7))
    assert values(consumer.poll()) == {0: [4, 5, 6, 7]}
    assert losses(rig) == []
