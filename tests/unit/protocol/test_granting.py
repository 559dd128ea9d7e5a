import attrs
import msgspec
import pytest
from logkit import KEY, Log, ident, messages, release, transition
from logkit import beat as beat_record

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.granting import (
    ENDING,
    FASTER_AT_ONCE,
    FEWER_IN_A_ROW,
    GAIN_MIN,
    REQUESTS_IN_FLIGHT_MAX,
    WORK_PER_ROUND_US,
    AtMostOnce,
    GrantDepth,
    GrantRequest,
    GrantVerdict,
    Refusal,
    SentRequest,
    averaged,
    last_within,
    lead_for,
    refusal_of,
    step_for,
    verdict_of,
)
from kafka_marshal.protocol.losses import marks_of
from kafka_marshal.protocol.types import OffsetRange, Owner

GRANTEE = ident("grantee")
through = OffsetRange.through


def take(it, transition, *, head, **context):
    """Apply the fold's verdict on a record."""
    verdict, record = verdict_of(transition, head=head), transition.record
    return it.on_verdict(verdict, grantee=record.grantee, seq=record.seq, **context)


class Bench:
    """An AtMostOnce whose requests a real fold judges."""

    def __init__(self, start=0):
        self.log = Log(span=100)
        self.epoch = self.log.claimed("c1")
        self.log.append(beat_record(self.epoch, start))
        self.it = AtMostOnce(start or 0, grantee=GRANTEE)
        self.it.is_anchored = start is not None
        self.seq = 0

    def request(self, last, **sent):
        self.seq += 1
        return self.it.request(self.seq, last, **sent)

    def answer(self, request, **context):
        record = messages(
            self.epoch, request.offsets.first, request.offsets.last, seq=request.seq
        )
        return self.deliver(self.log.one(record), **context)

    def deliver(self, transition, **context):
        head = self.log.key().next_unclaimed()
        return take(self.it, transition, head=head, **context)

    def granted(self, last):
        assert self.answer(self.request(last)) is None


@pytest.fixture
def bench():
    return Bench()


def refused(reason, request):
    record = messages(1, request.offsets.first, request.offsets.last, seq=request.seq)
    return transition(reason=reason, offset=9, epoch=1, record=record)


# --- requests


def test_requests_do_not_overlap(bench):
    assert bench.request(4) == SentRequest(1, through(0, 4))
    assert bench.request(9, sent_ms=7) == SentRequest(2, through(5, 9), sent_ms=7)
    assert (bench.it.next_first, bench.it.outstanding_count) == (10, 2)
    with pytest.raises(InvalidTransition, match="up to 9"):
        bench.request(9)


def test_the_number_of_requests_in_flight_is_limited(bench):
    for last in range(REQUESTS_IN_FLIGHT_MAX):
        assert bench.it.may_request(1_000)
        bench.request(last)
    assert not bench.it.may_request(1_000)
    with pytest.raises(InvalidTransition):
        bench.request(REQUESTS_IN_FLIGHT_MAX)


def test_the_depth_limits_the_requests_in_flight(bench):
    assert bench.it.may_request(2)
    bench.request(4)
    assert not bench.it.may_request(1)
    assert bench.it.may_request(2)


def test_the_send_time_of_the_oldest_request_in_flight_is_known(bench):
    assert bench.it.oldest_sent_ms is None
    first = bench.request(4, sent_ms=7)
    bench.request(9, sent_ms=8)
    assert bench.it.oldest_sent_ms == 7
    bench.answer(first)
    assert bench.it.oldest_sent_ms == 8


def test_a_request_stays_within_the_span(bench):
    """If all earlier requests are lost, the last one is granted their ranges, too."""
    assert bench.it.last_within(4, 100) == 4
    assert bench.it.last_within(400, 100) == 99
    bench.request(49)
    assert bench.it.last_within(400, 100) == 99
    request = bench.request(99)
    assert bench.answer(request) is None
    assert bench.it.unused == (through(0, 99),)


def test_without_a_position_there_is_one_request_at_a_time():
    """A request that overtook another would leave out that one's range for ever."""
    bench = Bench(start=None)
    first = bench.request(4)
    assert not bench.it.may_request(REQUESTS_IN_FLIGHT_MAX)
    with pytest.raises(InvalidTransition):
        bench.request(9)
    assert bench.answer(first) is None
    assert bench.it.is_anchored
    bench.request(9)
    bench.request(14)


def test_without_a_position_the_next_request_covers_one_given_up():
    bench = Bench(start=None)
    late = bench.request(4)
    bench.it.forget_requests()
    again = bench.request(9)
    assert bench.answer(again) is None
    assert bench.answer(late) == "nothing_left"
    assert bench.it.unused == (through(0, 9),)


@pytest.mark.parametrize(
    ("last", "head", "within"), [(4, 0, 4), (99, 0, 99), (100, 0, 99), (400, 250, 349)]
)
def test_a_request_gets_at_most_the_span_from_the_head(last, head, within):
    assert last_within(last, head, span=100) == within


# --- verdicts


@pytest.mark.parametrize(
    ("reason", "refusal"),
    [
        ("nothing_left", Refusal.TAKEN),
        ("paused", Refusal.LATER),
        ("span", Refusal.LATER),
        ("not_owner", Refusal.OVER),
        ("old_epoch", Refusal.OVER),
        ("wrong_partition", Refusal.OVER),
        ("retired", Refusal.OVER),
        ("level", Refusal.UNEXPECTED),
        (None, Refusal.UNEXPECTED),
    ],
)
def test_each_reason_maps_to_one_refusal(reason, refusal):
    assert refusal_of(reason, last=9, head=10) is refusal
    assert (refusal_of(reason) in ENDING) == (refusal.value in {"over", "unexpected"})


def test_nothing_left_for_a_cut_request_means_later_not_taken():
    """A cut request may find nothing left although the wanted offsets are free."""
    assert refusal_of("nothing_left", last=9, head=9) is Refusal.LATER
    assert refusal_of("nothing_left", last=9, head=None) is Refusal.TAKEN


def request_of(bench, **changes):
    fields = {
        "key": KEY,
        "owner": Owner("c1", ident("c1")),
        "epoch": bench.epoch,
        "grantee": GRANTEE,
        "first": 0,
        "last": 4,
    }
    return GrantRequest(**fields | changes)


def test_a_claim_has_ended_once_the_log_shows_another_owner_or_none(bench):
    def reason(known, **changes):
        verdict = request_of(bench, **changes).verdict_if_over(known)
        return None if verdict is None else verdict.reason

    known, epoch = bench.log.key(), bench.epoch
    assert reason(None) is None, "it may not be read yet"
    assert reason(known) is None
    assert reason(known, epoch=epoch + 1) is None, "likewise"
    assert reason(known, epoch=epoch - 1) == "old_epoch"
    assert reason(known, owner=Owner("c1", ident("c2"))) == "not_owner"
    bench.log.append(release(epoch))
    assert request_of(bench).verdict_if_over(bench.log.key()) == GrantVerdict(
        outcome="ignored", reason="not_owner", head=0, offset=None
    )


@pytest.mark.parametrize(("head", "last"), [(None, 109), (0, 99), (20, 119)])
def test_a_request_is_cut_to_the_span(bench, head, last):
    """A grant begins at the first offset not granted, if known, else as requested."""
    request = request_of(bench, first=10, last=400)
    assert request.within(100, head=head) == attrs.evolve(request, last=last)
    assert request_of(bench).within(100, head=head).last == 4


def test_a_request_becomes_one_record_with_its_mark(bench):
    record = request_of(bench, mark=3).to_record(7)
    assert marks_of(record) == {0: 3}
    assert marks_of(request_of(bench).to_record(7)) == {}
    transition = bench.log.one(record)
    assert verdict_of(transition, head=5) == GrantVerdict(
        outcome="accepted",
        reason=None,
        granted=through(0, 4),
        head=5,
        offset=transition.offset,
    )


def test_the_rest_of_a_cut_request_is_requested_again(bench):
    """A sidecar cuts a request where ``span`` was lowered meanwhile."""
    request = bench.request(9)
    assert bench.answer(SentRequest(request.seq, through(0, 3))) is None
    assert bench.it.unused == (through(0, 3),)
    assert (bench.it.next_first, bench.it.outstanding_count) == (4, 0)
    bench.granted(9)
    assert bench.it.unused == (through(0, 9),)


def test_the_rest_of_a_cut_request_is_granted_to_the_next_request(bench):
    first, second = bench.request(9), bench.request(19)
    assert bench.answer(SentRequest(first.seq, through(0, 3))) is None
    assert (bench.it.next_first, bench.it.outstanding_count) == (20, 1)
    assert bench.answer(second) is None
    assert bench.it.unused == (through(0, 19),)
    assert bench.it.next_first == 20


def test_a_refused_cut_request_is_repeated_from_the_next_free_offset(bench):
    request = bench.request(9)
    bench.log.append(messages(bench.epoch, 0, 5, seq=99))
    assert bench.answer(SentRequest(request.seq, through(0, 3))) == "nothing_left"
    assert (bench.it.next_first, bench.it.outstanding_count) == (6, 0)


def test_no_offset_is_handed_out_before_it_is_granted(bench):
    request = bench.request(4)
    assert bench.it.granted is None
    with pytest.raises(InvalidTransition, match="not granted"):
        bench.it.hand_out(0)
    assert bench.answer(request) is None
    assert bench.it.granted == through(0, 4)
    bench.it.hand_out(0)


def test_grants_are_used_in_log_order_whatever_the_order_of_requests(bench):
    first, second = bench.request(4), bench.request(9)
    assert bench.answer(second) is None  # first in the log: granted 0 to 9
    assert bench.it.outstanding_count == 0  # the other one will be refused
    assert bench.answer(first) == "nothing_left"
    assert bench.it.unused == (through(0, 9),)
    assert bench.it.next_first == 10


def test_the_next_request_covers_one_that_was_lost(bench):
    bench.request(4)
    second, third = bench.request(9), bench.request(14)
    assert bench.answer(second) is None
    assert bench.it.outstanding_count == 1
    assert bench.answer(third) is None
    assert bench.it.unused == (through(0, 14),)


def test_without_a_position_the_first_request_sets_the_start():
    bench = Bench(start=None)
    bench.it.next_first = 5
    bench.granted(9)
    assert bench.it.unused == (through(5, 9),)


def test_a_grant_leaves_out_offsets_that_were_granted_before():
    bench = Bench(start=0)
    bench.log.append(messages(bench.epoch, 0, 3, seq=99))
    bench.granted(9)
    assert bench.it.unused == (through(4, 9),)


def test_offsets_granted_by_another_request_are_not_requested_again(bench):
    request = bench.request(4)
    bench.log.append(messages(bench.epoch, 0, 20, seq=99))
    assert bench.answer(request) == "nothing_left"
    assert (bench.it.next_first, bench.it.outstanding_count) == (21, 0)


def test_a_request_refused_for_its_span_is_repeated_from_the_position(bench):
    bench.it.next_first = 300  # retention deleted the records between
    assert bench.answer(bench.request(310)) == "span"
    assert bench.it.unused == ()
    assert bench.it.next_first == 0
    assert bench.it.last_within(310, 100) == 99


def test_requests_behind_a_refused_one_are_repeated(bench):
    first, second, third = bench.request(4), bench.request(9), bench.request(14)
    assert bench.answer(first) is None
    assert bench.deliver(refused("paused", second)) == "paused"
    assert (bench.it.next_first, bench.it.outstanding_count) == (5, 0)
    assert bench.deliver(refused("paused", third)) == "paused"
    assert bench.it.next_first == 5
    again = bench.request(7)
    assert again.offsets.first == 5
    assert bench.answer(third) is None  # appended after the pause
    assert bench.answer(again) == "nothing_left"
    assert bench.it.unused == (through(0, 14),)


def test_a_refusal_without_a_position_repeats_the_request():
    bench = Bench(start=None)
    bench.it.next_first = 5
    request = bench.request(9)
    assert take(bench.it, refused("paused", request), head=None) == "paused"
    assert bench.it.next_first == 5


def test_an_ignored_request_returns_its_reason(bench):
    request = bench.request(4)
    bench.epoch = 77
    assert bench.answer(request) == "old_epoch"


def test_a_grant_to_another_process_is_not_used(bench):
    """Matched by grantee, not by incarnation and seq alone (PROTOCOL 6.2)."""
    request = bench.request(4)
    foreign = messages(bench.epoch, 0, 4, seq=request.seq)
    foreign = msgspec.structs.replace(foreign, grantee=ident("task"))
    assert bench.deliver(bench.log.one(foreign)) is None
    assert bench.it.unused == ()
    assert bench.it.outstanding_count == 1


def test_an_accepted_request_without_a_range_grants_nothing(bench):
    request = bench.request(4)
    record = messages(bench.epoch, 0, 4, seq=request.seq)
    strange = transition("granted", offset=9, epoch=1, record=record)
    assert take(bench.it, strange, head=None) == "refused"
    assert bench.it.unused == ()


def test_a_repeated_request_and_its_late_grant_are_counted_once(bench):
    late = bench.request(4)
    bench.it.forget_requests()
    bench.it.forget_requests()
    assert (bench.it.next_first, bench.it.outstanding_count) == (0, 0)
    again = bench.request(6)
    assert again.offsets.first == 0
    assert bench.answer(late) is None
    assert bench.it.unused == (through(0, 4),)
    assert bench.it.outstanding_count == 1
    assert bench.answer(again) is None
    assert bench.it.unused == (through(0, 6),)
    assert bench.it.next_first == 7


def test_the_next_request_starts_behind_a_late_grant(bench):
    late = bench.request(4)
    bench.it.forget_requests()
    assert bench.answer(late) is None
    assert bench.it.next_first == 5


def test_the_round_trip_is_averaged_over_requests_not_given_up(bench):
    first, late = bench.request(4, sent_ms=10), bench.request(9, sent_ms=20)
    assert bench.answer(first, now_ms=14) is None
    assert bench.it.round_trip_us == 4_000
    bench.it.forget_requests()
    assert bench.answer(late, now_ms=90) is None
    assert bench.it.round_trip_us == 4_000
    quick = bench.request(14, sent_ms=100)
    assert bench.answer(quick, now_ms=100) is None
    assert bench.it.round_trip_us == averaged(4_000, 1)


# --- hand-outs


def test_the_ahead_count_has_granted_and_requested_offsets(bench):
    assert (bench.it.ahead_count, bench.it.unused_count) == (0, 0)
    one, two = bench.request(9), bench.request(19)
    assert (bench.it.ahead_count, bench.it.unused_count) == (20, 0)
    bench.answer(one)
    assert (bench.it.ahead_count, bench.it.unused_count) == (20, 10)
    bench.it.hand_out(3)
    bench.it.skip_through(5)
    assert (bench.it.ahead_count, bench.it.unused_count) == (14, 4)
    bench.answer(two)
    bench.it.hand_out(12)
    assert (bench.it.ahead_count, bench.it.unused_count) == (7, 7)


def test_dropped_grants_are_neither_counted_nor_reported(bench):
    bench.granted(9)
    bench.it.drop_grants()
    assert (bench.it.unused_count, bench.it.granted_end) == (0, 0)
    assert bench.it.discard() == ()


def test_the_granted_end_is_zero_once_grants_are_used_or_given_up(bench):
    assert bench.it.granted_end == 0
    bench.granted(9)
    bench.granted(19)
    assert bench.it.granted_end == 20
    bench.it.hand_out(19)
    assert bench.it.granted_end == 0
    bench.granted(29)
    bench.it.discard()
    assert bench.it.granted_end == 0


def test_a_granted_offset_is_handed_out_once(bench):
    bench.granted(2)
    for offset in range(3):
        bench.it.hand_out(offset)
        with pytest.raises(InvalidTransition, match="not granted"):
            bench.it.hand_out(offset)
    assert (bench.it.granted, bench.it.unused) == (None, ())


def test_a_hand_out_uses_up_the_granted_offsets_below_it(bench):
    bench.granted(4)
    bench.granted(9)
    bench.it.hand_out(3)
    assert bench.it.unused == (through(4, 9),), "grants that adjoin are one range"
    assert bench.it.unused_count == 6
    bench.it.hand_out(7)
    assert bench.it.unused == (through(8, 9),)
    with pytest.raises(InvalidTransition):
        bench.it.hand_out(4)
    with pytest.raises(InvalidTransition):
        bench.it.hand_out(10)


def test_grants_separated_by_another_grant_are_not_joined(bench):
    bench.granted(4)
    bench.log.append(messages(bench.epoch, 0, 7, seq=99))
    bench.granted(12)
    assert bench.it.unused == (through(0, 4), through(8, 12))
    bench.it.hand_out(4)
    with pytest.raises(InvalidTransition):
        bench.it.hand_out(5)
    bench.it.hand_out(8)
    assert bench.it.unused == (through(9, 12),)


def test_granted_records_put_back_are_handed_out_again(bench):
    for last in (4, 9, 19):
        bench.granted(last)
    bench.it.hand_out(1)
    bench.it.mark_processed()
    bench.it.hand_out(12)
    assert bench.it.unused_count == 7
    bench.it.put_back(3)
    bench.it.put_back(3)
    assert bench.it.unused == (OffsetRange(3, 20),)
    assert (bench.it.unused_count, bench.it.done) == (17, 2)
    bench.it.hand_out(5)
    bench.it.mark_processed()
    assert (bench.it.done, bench.it.unused_count) == (6, 14)


def test_an_interrupted_hand_out_is_put_back_whole(bench):
    bench.granted(4)
    bench.granted(9)
    bench.it._handed = 8  # before the grants were used up
    bench.it.put_back(0)
    assert bench.it.unused == (OffsetRange(0, 10),)
    assert bench.it.unused_count == 10


@pytest.mark.parametrize(
    ("through", "unused"),
    [
        (-1, (through(0, 9),)),
        (0, (through(1, 9),)),
        (6, (through(7, 9),)),
        (9, ()),
        (50, ()),
    ],
)
def test_offsets_without_records_are_skipped(bench, through, unused):
    bench.granted(4)
    bench.granted(9)
    bench.it.skip_through(through)
    assert bench.it.unused == unused


def test_handed_out_records_count_as_processed_at_the_next_request(bench):
    bench.granted(9)
    bench.it.hand_out(3)
    assert bench.it.done == 0
    bench.it.mark_processed()
    assert bench.it.done == 4
    bench.it.skip_through(7)
    bench.it.mark_processed()
    assert bench.it.done == 8


def test_offsets_without_records_are_done_once_all_before_them_are(bench):
    bench.granted(9)
    bench.it.skip_through(1)
    assert bench.it.done == 2
    bench.it.hand_out(2)
    bench.it.skip_through(4)
    assert bench.it.done == 2, "what was handed out is still in hand"
    bench.it.mark_processed()
    assert bench.it.done == 5


def test_the_next_position_is_the_first_offset_not_handed_out(bench):
    assert bench.it.resume_at == 0
    first = bench.request(4)
    bench.request(9)
    assert bench.it.resume_at == 0
    bench.answer(first)
    bench.it.hand_out(2)
    assert bench.it.resume_at == 3
    bench.it.hand_out(4)
    assert bench.it.resume_at == 5
    bench.it.forget_requests()
    bench.granted(12)
    bench.it.hand_out(12)
    assert bench.it.resume_at == 13


def test_given_up_ranges_are_reported_once_and_never_handed_out(bench):
    bench.granted(4)
    bench.request(9)
    bench.it.hand_out(1)
    assert bench.it.discard() == (through(2, 4),)
    assert (bench.it.granted, bench.it.outstanding_count) == (None, 0)
    with pytest.raises(InvalidTransition, match="not granted"):
        bench.it.hand_out(2)
    assert bench.it.discard() == ()


# --- depth of the pipeline


@pytest.mark.parametrize(
    ("round_trip_us", "batch_us", "lead"),
    [
        pytest.param(1, 1, 1, id="equal"),
        pytest.param(3_000, 10_000, 1, id="shorter"),
        pytest.param(10_000, 10_000 * GAIN_MIN, 0, id="next-to-nothing"),
        pytest.param(10_000, 10_000 * GAIN_MIN - 1, 1, id="worth-it"),
        pytest.param(10_001, 10_000, 2, id="just-above"),
        pytest.param(30_000, 10_000, 3, id="three-batches"),
    ],
)
def test_the_lead_in_batches_hides_a_round_trip(round_trip_us, batch_us, lead):
    assert lead_for(round_trip_us, batch_us) == lead


@pytest.mark.parametrize(
    ("batch_us", "step"),
    [(1, WORK_PER_ROUND_US), (WORK_PER_ROUND_US - 1, 2), (WORK_PER_ROUND_US, 1)],
)
def test_short_batches_are_requested_several_at_a_time(batch_us, step):
    assert step_for(batch_us) == step


MS = 1_000
# A round trip of ten batches of 10 ms.
FAR_US = 100 * MS


def paced(pace, times, work_us, round_trip_us, partitions=1):
    depths = []
    for _ in range(times):
        pace.on_sample(work_us, round_trip_us=round_trip_us, partitions=partitions)
        depths.append(pace.depth)
    return depths


def test_a_depth_limit_of_one_disables_pipelining():
    pace = GrantDepth(1)
    assert set(paced(pace, 20, 0, 900 * MS)) == {1}


def test_the_pipeline_begins_with_one_request_and_doubles():
    pace = GrantDepth(4)
    assert pace.depth == 1
    assert paced(pace, 5, 10 * MS, FAR_US) == [2, 4, 4, 4, 4]


def test_the_depth_covers_a_round_trip_and_the_work_of_a_round():
    batches = WORK_PER_ROUND_US // (10 * MS)
    assert paced(GrantDepth(99), 9, 10 * MS, 9 * MS)[-1] == 1 + batches
    assert paced(GrantDepth(99), 9, 10 * MS, 15 * MS)[-1] == 2 + batches


def test_partitions_share_the_work_of_a_round():
    alone, shared = GrantDepth(99), GrantDepth(99)
    paced(alone, 9, 1 * MS, 4 * MS)
    paced(shared, 9, 1 * MS, 4 * MS, partitions=4)
    assert alone.depth == 4 * shared.depth


def test_the_depth_stays_until_a_round_trip_is_measured():
    pace = GrantDepth(4)
    assert paced(pace, 1, 10 * MS, 0) == [1]
    assert pace.work_us == 0


def test_the_pipeline_shrinks_only_after_many_samples():
    pace = GrantDepth(4)
    paced(pace, 3, 10 * MS, FAR_US)
    pace.work_us = 40 * MS
    assert set(paced(pace, FEWER_IN_A_ROW - 1, 40 * MS, 40 * MS)) == {4}
    paced(pace, 1, 40 * MS, 4 * FAR_US)  # a sample that needs the full depth
    assert set(paced(pace, FEWER_IN_A_ROW - 1, 40 * MS, 40 * MS)) == {4}
    assert paced(pace, 1, 40 * MS, 40 * MS) == [3]


def test_the_pipeline_depth_settles():
    """Samples that vary about a mean do not change a depth that has settled."""
    pace = GrantDepth(32)
    depths = set()
    for number in range(400):
        work_ms = (7, 13, 10, 4, 16)[number % 5]
        pace.on_sample(work_ms * MS, round_trip_us=25 * MS, partitions=1)
        if number >= 100:
            depths.add(pace.depth)
    assert len(depths) == 1


def test_one_very_long_sample_does_not_keep_the_depth_low():
    pace = GrantDepth(4)
    assert paced(pace, 1, 3_600_000 * MS, 10 * MS) == [1]
    assert paced(pace, 8, 10 * MS, 10 * MS)[-1] > 1


def test_one_long_wait_does_not_reduce_the_depth():
    """The wait for a first large fetch is no work."""
    pace = GrantDepth(64)
    paced(pace, 8, 1 * MS, 4 * MS, partitions=8)
    before = pace.depth
    paced(pace, 1, 200 * MS, 4 * MS, partitions=8)
    assert pace.work_us > 10 * MS
    paced(pace, 1, 1 * MS, 4 * MS, partitions=8)
    assert pace.work_us == FASTER_AT_ONCE * MS
    assert pace.depth == before


def test_a_slow_handler_gets_no_pipelining():
    pace = GrantDepth(4)
    assert set(paced(pace, 40, 5_000 * MS, 10 * MS)) == {1}


def test_a_handler_that_takes_no_time_gets_the_largest_depth():
    pace = GrantDepth(4)
    assert paced(pace, 10, 0, 5 * MS)[-1] == 4
    assert pace.work_us == 1


@pytest.mark.parametrize(
    ("average", "sample", "now"),
    [(0, 7, 7), (100, 100, 100), (100, 200, 125), (100, 0, 75), (1, 0, 1)],
)
def test_an_average_follows_its_samples(average, sample, now):
    assert averaged(average, sample) == now
