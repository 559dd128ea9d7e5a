"""Grants requested through a sidecar, by the verdicts of the fold."""

import pytest
import variants
from enginekit import AMO, T0, H, values
from remotekit import GRANTEE, SECRET, RemoteRig, granted, key, lost, releasing

from kafka_marshal.errors import (
    ClaimLost,
    CoordinationError,
    DeadlineExceeded,
    InvalidTransition,
)
from kafka_marshal.protocol.granting import GrantRequest, GrantVerdict
from kafka_marshal.protocol.types import OffsetRange, Owner, Token
from kafka_marshal.remote.grants import (
    VERDICT_MS_MAX,
    decode_request,
    decode_verdict,
    encode_request,
    encode_verdict,
)
from kafka_marshal.remote.transport import NotRunning

VERDICT_LIMIT_MS = max(VERDICT_MS_MAX, H)


@pytest.fixture
def rig():
    return RemoteRig(records=(40, 10))


@pytest.fixture
def consumer(rig):
    """A consumer at most once of batches of four, with partition 0."""
    consumer = rig.consumer(delivery=AMO, most=4)
    rig.send(rig.assigned())
    return consumer


def renew(rig):
    partitions = tuple(each.partition for each in rig.session.holdings)
    rig.session.on_deadlines(rig.beaten(partitions=partitions), reported=())


def progress(rig):
    return rig.session.holdings[key()].progress


def test_a_request_names_claim_and_process(rig, consumer):
    assert consumer.poll() == {}
    rig.answer(granted(0, 3))
    (ask,) = rig.asked
    assert (ask.client_id, ask.epoch, ask.grantee) == ("host-a", 5, GRANTEE.hex())
    assert (ask.first, ask.last, ask.done) == (0, 3, 0)
    assert ask.secret == SECRET, "as it was assigned"
    assert ask.token == str(rig.session.holdings[key()].claim.token)
    assert values(consumer.poll()) == {0: [0, 1, 2, 3]}


def test_only_granted_offsets_are_handed_out(rig, consumer):
    consumer.poll()
    rig.answer(granted(None, None, outcome="refused", reason="paused"))
    assert consumer.poll() == {}
    rig.answer(granted(0, 1))
    assert values(consumer.poll()) == {0: [0, 1]}
    assert consumer.committed(T0) == 2


def test_answers_are_applied_in_the_order_of_requests(rig, consumer):
    consumer.poll()
    holding = rig.session.holdings[key()]
    rig.session.grants.request(holding, 7)
    rig.answer(granted(4, 7), granted(0, 3), order=[1, 0])
    assert [(each.first, each.last) for each in progress(rig).unused] == [(0, 7)]
    assert values(consumer.poll(0, 8)) == {0: [0, 1, 2, 3, 4, 5, 6, 7]}


def asked_within_the_span(rig, consumer):
    """Fetch more records than one request may cover, and request all of them."""
    rig.context.span = 3
    assert consumer.poll() == {}
    rig.session.grants.request(rig.session.holdings[key()], 7)
    assert len(rig.waiting) == 1, "what is under way must be answered first"
    rig.answer(granted(0, 2))
    assert values(consumer.poll()) == {0: [0, 1, 2]}
    assert consumer.poll() == {}
    rig.answer(granted(3, 5))
    assert [(ask.first, ask.last) for ask in rig.asked] == [(0, 2), (3, 5)]


def test_no_request_exceeds_the_span_of_the_sidecar(rig, consumer):
    """The fold refuses a wider one: nothing would ever be granted."""
    asked_within_the_span(rig, consumer)


def test_a_request_beyond_the_span_is_caught(rig, consumer, monkeypatch):
    variants.ask_beyond_the_span(monkeypatch)
    with pytest.raises(AssertionError):
        asked_within_the_span(rig, consumer)


def test_offsets_that_the_sidecar_cut_off_are_requested_again(rig, consumer):
    """The span was lowered after the sidecar reported it."""
    consumer.poll()
    rig.answer(granted(0, 1))
    assert values(consumer.poll()) == {0: [0, 1]}
    assert consumer.poll() == {}
    rig.answer(granted(2, 5))
    assert [ask.first for ask in rig.asked] == [0, 2]
    assert values(consumer.poll()) == {0: [2, 3, 4, 5]}


def test_a_request_that_overtook_another_is_granted_both_ranges(rig, consumer):
    consumer.poll()
    rig.session.grants.request(rig.session.holdings[key()], 7)
    late = granted(None, None, head=8, outcome="refused", reason="nothing_left")
    rig.answer(late, granted(0, 7))
    assert values(consumer.poll(0, 8)) == {0: [0, 1, 2, 3, 4, 5, 6, 7]}
    assert progress(rig).next_first >= 8


def test_a_release_waits_for_a_request_that_overtook_a_refused_one(rig, consumer):
    """The key moves: it is given back once nothing of it is requested or granted."""
    consumer.poll()
    rig.session.grants.request(rig.session.holdings[key()], 7)
    rig.send(releasing(reason="moving"))
    rig.answer(granted(None, None, head=8, outcome="refused", reason="moving"))
    rig.session.tick(rig.now_ms)
    assert key() in rig.session.holdings
    rig.answer(granted(0, 7))
    assert values(consumer.poll(0, 8)) == {0: [0, 1, 2, 3, 4, 5, 6, 7]}
    assert rig.events("grant_lost") == []


def test_a_request_without_an_answer_is_sent_again(rig, consumer):
    consumer.poll()
    rig.answer(CoordinationError("no sidecar"))
    assert progress(rig).outstanding_count == 1
    rig.answer(granted(0, 3))
    first, second = rig.asked
    assert first == second, "under the same number it is the same request"
    assert first.request is not None
    assert len(rig.events("grant_unanswered")) == 1
    assert values(consumer.poll()) == {0: [0, 1, 2, 3]}


def test_requests_have_numbers_of_their_own(rig, consumer):
    consumer.poll()
    rig.session.grants.request(rig.session.holdings[key()], 7)
    rig.answer(granted(0, 3), granted(4, 7))
    assert len({ask.request for ask in rig.asked}) == 2


def test_a_request_that_the_sidecar_refuses_is_not_repeated(rig, consumer):
    consumer.poll()
    rig.answer(ClaimLost("another claim"))
    assert not rig.waiting
    assert progress(rig).outstanding_count == 0


def test_a_repeated_request_is_given_up_after_the_verdict_limit(rig, consumer):
    consumer.poll()
    for _ in range(4):
        rig.tick(VERDICT_LIMIT_MS // 4)
        renew(rig)
        rig.answer(DeadlineExceeded("no verdict"))
    rig.tick(1)
    rig.answer(DeadlineExceeded("no verdict"))
    assert not rig.waiting
    assert progress(rig).outstanding_count == 0


def test_a_request_to_a_sidecar_that_is_gone_is_not_repeated(rig, consumer):
    """Its answer is gone, too, so a stopped consumer finishes without it."""
    consumer.poll()
    rig.answer(CoordinationError("it does not answer"))
    consumer.stop()
    assert not consumer.is_finished
    rig.answer(NotRunning("connection refused"))
    assert not rig.waiting
    assert consumer.is_finished


def test_a_request_under_an_ended_claim_is_not_repeated(rig, consumer):
    consumer.poll()
    rig.send(lost())
    rig.answer(CoordinationError("no sidecar"))
    assert not rig.waiting


def test_offsets_whose_grant_was_not_received_are_never_handed_out(rig, consumer):
    consumer.poll()
    rig.answer(CoordinationError("no answer, and granted all the same"))
    consumer.poll()
    rig.answer(granted(None, None, head=4, outcome="refused", reason="nothing_left"))
    consumer.poll()
    assert rig.waiting
    rig.answer(granted(4, 7))
    assert values(consumer.poll()) == {0: [4, 5, 6, 7]}


def test_a_request_that_hangs_is_given_up_after_the_verdict_limit(rig, consumer):
    consumer.poll()
    rig.tick(VERDICT_LIMIT_MS // 4)
    renew(rig)
    assert progress(rig).outstanding_count == 1
    for _ in range(4):
        rig.tick(VERDICT_LIMIT_MS // 4)
        renew(rig)
    rig.tick(1)
    assert progress(rig).outstanding_count == 0


def test_a_request_without_a_free_worker_is_sent_later(rig, consumer):
    rig.has_room = False
    consumer.poll()
    assert progress(rig).outstanding_count == 0
    rig.has_room = True
    consumer.poll()
    assert len(rig.waiting) == 1


def test_a_grant_after_the_end_of_the_claim_is_reported_lost(rig, consumer):
    consumer.poll()
    rig.send(lost())
    rig.answer(granted(0, 3))
    assert consumer.poll() == {}
    assert [each["ranges"] for each in rig.events("grant_lost")] == [[(0, 3)]]


def test_unused_grants_are_reported_lost_when_the_claim_ends(rig, consumer):
    consumer.poll()
    rig.answer(granted(0, 3))
    rig.send(lost())
    with pytest.raises(ClaimLost, match="taken_over"):
        consumer.poll()
    assert [each["ranges"] for each in rig.events("grant_lost")] == [[(0, 3)]]


@pytest.mark.parametrize("offset", [60, None])
def test_a_request_that_the_log_ignored_ends_the_claim(rig, consumer, offset):
    """Without an offset the claim had ended before, and nothing was appended."""
    consumer.poll()
    ignored = granted(None, None, outcome="ignored", reason="old_epoch", offset=offset)
    rig.answer(ignored)
    (ended,) = rig.events("claim_ended")
    ending = ended["ending"]
    assert (ending.reason, ending.at_offset) == ("grant_ignored", offset)
    assert rig.session.holdings == {}


def test_a_grant_request_at_least_once_is_refused(rig):
    rig.consumer()
    rig.send(rig.assigned())
    with pytest.raises(InvalidTransition, match="not consumed at most once"):
        rig.session.grants.request(rig.session.holdings[key()], 3)


# --- messages


@pytest.mark.parametrize(("mark", "token"), [(None, None), (3, Token(7, 0, 5))])
def test_a_request_survives_its_message(mark, token):
    request = GrantRequest(
        key=key(),
        owner=Owner("host-a", b"i" * 16),
        epoch=5,
        grantee=GRANTEE,
        first=1,
        last=4,
        mark=mark,
        token=token,
    )
    message = encode_request(request, secret=b"s" * 16, number=2, timeout_ms=100)
    assert decode_request("g", message) == request
    assert message.secret == (b"s" * 16).hex()
    assert (message.request, message.timeout_ms) == (2, 100)


@pytest.mark.parametrize("run", [None, OffsetRange(0, 4)])
def test_a_verdict_survives_its_message(run):
    outcome = "refused" if run is None else "accepted"
    verdict = GrantVerdict(outcome=outcome, reason=None, granted=run, head=4, offset=50)
    assert decode_verdict(encode_verdict(verdict)) == verdict


def test_only_an_accepted_request_is_granted():
    refused = granted(0, 3, outcome="refused", reason="paused")
    assert decode_verdict(refused).granted is None
