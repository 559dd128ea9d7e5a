import pytest
from logkit import KEY, Log, ident, messages
from logkit import beat as beat_record

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.granting import (
    REQUESTS_IN_FLIGHT_MAX,
    AtMostOnce,
    Grant,
    GrantRequest,
)
from kafka_marshal.protocol.transition import Transition

GRANTEE = ident("grantee")


class Bench:
    """The ladder with a real fold behind it, and a note of everything handed out."""

    def __init__(self, start=0):
        self.log = Log(span=100)
        self.epoch = self.log.claimed("c1")
        self.log.append(beat_record(self.epoch, start))
        self.it = AtMostOnce(start, grantee=GRANTEE)
        self.seq = 0

    def request(self, last):
        self.seq += 1
        return self.it.request(self.seq, last)

    def answer(self, request):
        record = messages(self.epoch, request.first, request.last, seq=request.seq)
        return self.it.on_verdict(self.log.one(record))

    def granted(self, last):
        assert self.answer(self.request(last)) is None


@pytest.fixture
def bench():
    return Bench()


def test_requests_cover_offsets_once(bench):
    assert bench.request(4) == GrantRequest(1, 0, 4)
    assert bench.request(9) == GrantRequest(2, 5, 9)
    assert (bench.it.next_first, bench.it.outstanding_count) == (10, 2)
    with pytest.raises(InvalidTransition, match="up to 9"):
        bench.request(9)


def test_only_so_many_requests_are_under_way(bench):
    for last in range(REQUESTS_IN_FLIGHT_MAX):
        bench.request(last)
    with pytest.raises(InvalidTransition):
        bench.request(REQUESTS_IN_FLIGHT_MAX)


def test_nothing_is_handed_out_before_it_is_granted(bench):
    request = bench.request(4)
    assert bench.it.granted is None
    with pytest.raises(InvalidTransition, match="not granted"):
        bench.it.hand_out(0)
    assert bench.answer(request) is None
    assert bench.it.granted == Grant(0, 4)
    bench.it.hand_out(0)


def test_a_granted_offset_is_handed_out_once(bench):
    bench.granted(2)
    for offset in range(3):
        bench.it.hand_out(offset)
        with pytest.raises(InvalidTransition, match="not granted"):
            bench.it.hand_out(offset)
    assert (bench.it.granted, bench.it.unused) == (None, ())


def test_gaps_use_up_what_they_skip(bench):
    bench.granted(4)
    bench.granted(9)
    bench.it.hand_out(3)
    assert bench.it.unused == (Grant(4, 4), Grant(5, 9))
    bench.it.hand_out(7)
    assert bench.it.unused == (Grant(8, 9),)
    with pytest.raises(InvalidTransition):
        bench.it.hand_out(4)
    with pytest.raises(InvalidTransition):
        bench.it.hand_out(10)


def test_grants_are_used_in_log_order_whatever_the_order_of_requests(bench):
    first, second = bench.request(4), bench.request(9)
    assert bench.answer(second) is None  # the log took it first: 0 to 9
    assert bench.answer(first) == "nothing_left"
    assert bench.it.unused == (Grant(0, 9),)
    assert bench.it.outstanding_count == 0


def test_without_a_position_the_first_request_says_where_to_begin():
    bench = Bench(start=None)
    bench.it.next_first = 5
    bench.granted(9)
    assert bench.it.unused == (Grant(5, 9),)


def test_a_range_granted_to_an_earlier_owner_is_not_ours():
    bench = Bench(start=0)
    bench.log.append(messages(bench.epoch, 0, 3, seq=99))
    bench.granted(9)
    assert bench.it.unused == (Grant(4, 9),)


def test_a_wide_request_is_refused(bench):
    assert bench.answer(bench.request(100)) == "span"
    assert bench.it.unused == ()


def test_an_ignored_request_says_why(bench):
    request = bench.request(4)
    bench.epoch = 77
    assert bench.answer(request) == "old_epoch"


def test_a_verdict_of_another_process_is_not_ours(bench):
    """Matched by grantee, never by incarnation and number alone (PROTOCOL 6.2)."""
    request = bench.request(4)
    foreign = messages(bench.epoch, 0, 4, seq=request.seq)
    foreign = type(foreign)(
        *[getattr(foreign, name) for name in foreign.__struct_fields__[:7]],
        ident("task"),
        0,
        4,
    )
    assert bench.it.on_verdict(bench.log.one(foreign)) is None
    assert bench.it.unused == ()
    assert bench.it.outstanding_count == 1
    assert bench.it.on_verdict(bench.log.one(beat_record(bench.epoch))) is None


def test_an_acceptance_without_a_range_grants_nothing(bench):
    request = bench.request(4)
    record = messages(bench.epoch, 0, 4, seq=request.seq)
    strange = Transition(9, "accepted", "granted", None, KEY, 1, None, record)
    assert bench.it.on_verdict(strange) == "refused"
    assert bench.it.unused == ()


def test_an_unanswered_request_is_asked_again_and_counts_once(bench):
    late = bench.request(4)
    bench.it.forget_requests()
    bench.it.forget_requests()
    assert (bench.it.next_first, bench.it.outstanding_count) == (0, 0)
    again = bench.request(6)
    assert again.first == 0
    assert bench.answer(late) is None
    assert bench.it.unused == (Grant(0, 4),)
    assert bench.it.outstanding_count == 1
    assert bench.answer(again) is None
    assert bench.it.unused == (Grant(0, 4), Grant(5, 6))
    assert bench.it.next_first == 7


def test_a_late_grant_moves_what_is_asked_next(bench):
    late = bench.request(4)
    bench.it.forget_requests()
    assert bench.answer(late) is None
    assert bench.it.next_first == 5


@pytest.mark.parametrize(
    ("through", "unused"),
    [
        (-1, (Grant(0, 4), Grant(5, 9))),
        (0, (Grant(1, 4), Grant(5, 9))),
        (4, (Grant(5, 9),)),
        (6, (Grant(7, 9),)),
        (9, ()),
        (50, ()),
    ],
)
def test_offsets_without_records_are_skipped(bench, through, unused):
    bench.granted(4)
    bench.granted(9)
    bench.it.skip_through(through)
    assert bench.it.unused == unused


def test_what_is_given_up_is_reported(bench):
    bench.granted(4)
    bench.request(9)
    bench.it.hand_out(1)
    assert bench.it.discard() == (Grant(2, 4),)
    assert (bench.it.unused, bench.it.outstanding_count) == ((), 0)
    assert bench.it.discard() == ()
