import pytest
from logkit import KEY, H, beat, claim, ident, messages, release

from kafka_marshal.protocol.history_rows import Interval, Moment
from kafka_marshal.protocol.tenures import (
    CONTENDERS_MAX,
    Track,
    handoff,
    move,
    note_stray,
    note_waiting,
    taken_away,
)
from kafka_marshal.protocol.transition import ACCEPTED, Transition
from kafka_marshal.protocol.types import Token

EPOCH = 5
TOPIC_ID = ident("topic")


def interval(client="c1", *, log_ms=1_000, epoch=EPOCH):
    return Interval(
        KEY,
        client,
        ident(client),
        Token(1, 0, epoch),
        "claimed",
        None,
        Moment(epoch, log_ms, log_ms),
        H,
        epoch,
        log_ms,
    )


def transition(record, *, epoch=EPOCH):
    return Transition(9, ACCEPTED, "renewed", None, KEY, epoch, None, record)


# --- strays


@pytest.mark.parametrize(
    ("record", "epoch", "count"),
    [
        pytest.param(beat(EPOCH), EPOCH, 0, id="beat"),
        pytest.param(release(EPOCH), EPOCH, 0, id="release"),
        pytest.param(messages(EPOCH, 0, 1), EPOCH, 0, id="grant"),
        pytest.param(beat(EPOCH - 1), EPOCH, 1, id="names-an-older-epoch"),
        pytest.param(messages(EPOCH - 1, 0, 1), EPOCH, 1, id="asks-under-an-older"),
        pytest.param(beat(EPOCH, inc=ident("c2")), EPOCH, 1, id="another-process"),
        pytest.param(claim(), EPOCH - 1, 1, id="the-world-has-another-epoch"),
    ],
)
def test_accepted_records_of_others_are_counted(record, epoch, count):
    found = interval()
    note_stray(found, transition(record, epoch=epoch))
    assert found.stray_count == count


def test_nothing_is_accepted_after_the_end():
    found = interval()
    found.ending = "released"
    note_stray(found, transition(beat(EPOCH)))
    assert found.stray_count == 1


# --- positions


def test_a_position_goes_on_or_back_on_purpose_or_against_the_rules():
    track = Track(interval(), EPOCH, 0)
    for position, rewinds in ((4, False), (4, False), (9, False), (2, True)):
        move(track, position, rewinds=rewinds)
    found = track.interval
    assert (found.first_position, found.position) == (4, 2)
    assert (found.rewinds_count, track.rewinds_count) == (1, 1)
    assert found.steps_back_count == 0
    move(track, 1, rewinds=False)
    move(track, None, rewinds=False)
    assert (found.steps_back_count, found.position) == (2, None)


# --- who waits


def test_the_last_refusal_of_a_process_counts():
    track = Track(interval(), EPOCH, 0)
    for log_ms, reason in ((1, "held"), (2, "handoff"), (3, "held")):
        note_waiting(track, ident("c2"), reason=reason, at=Moment(1, log_ms, 0))
    assert track.waiting == [(ident("c2"), 3)]
    note_waiting(track, ident("c2"), reason="paused", at=Moment(1, 4, 0))
    assert track.waiting == []


def test_a_few_contenders_are_remembered():
    track = Track(interval(), EPOCH, 0)
    for number in range(CONTENDERS_MAX + 3):
        name = ident(f"c{number}")
        note_waiting(track, name, reason="held", at=Moment(1, number, 0))
    assert len(track.waiting) == CONTENDERS_MAX
    assert track.waiting[-1] == (ident(f"c{CONTENDERS_MAX + 2}"), CONTENDERS_MAX + 2)


# --- handoffs


def ended(ending, *, log_ms):
    found = interval()
    found.ending, found.end = ending, Moment(20, log_ms, log_ms)
    found.reason = "closed"
    return found


def test_who_waits_for_a_silent_owner_may_have_it_after_2h():
    before = ended("taken_over", log_ms=1_000 + 2 * H + 30)
    track = Track(before, EPOCH, 0, waiting=[(ident("c2"), 1_500)])
    row = handoff(before, interval("c2", log_ms=1_000 + 2 * H + 30), track=track)
    assert (row.gap_ms, row.late_ms) == (2 * H + 30, 29)
    assert row.reason is None


def test_who_came_later_is_late_from_then_on():
    before = ended("taken_over", log_ms=9_000)
    track = Track(before, EPOCH, 0, waiting=[(ident("c2"), 8_000)])
    row = handoff(before, interval("c2", log_ms=9_000), track=track)
    assert row.late_ms == 1_000


def test_what_is_kept_for_a_successor_is_not_free():
    before = ended("released", log_ms=2_000)
    track = Track(before, EPOCH, 0, kept_ms=2_500, waiting=[(ident("c2"), 2_100)])
    row = handoff(before, interval("c2", log_ms=2_600), track=track)
    assert (row.gap_ms, row.late_ms, row.reason) == (600, 100, "closed")


def test_nobody_is_late_who_was_not_seen_waiting():
    before = ended("taken_over", log_ms=90_000)
    row = handoff(before, interval("c2", log_ms=90_000), track=Track(before, EPOCH, 0))
    assert row.late_ms is None


# --- resets


@pytest.mark.parametrize(("quiet_ms", "kept_ms"), [(3_001, 3_001), (None, 1_500)])
def test_a_reset_ends_every_claim_that_stands(quiet_ms, kept_ms):
    tracks = {name: Track(interval(name), EPOCH, 9_000) for name in ("c2", "c1", "c3")}
    tracks["c3"].interval.ending = "released"
    at = Moment(12, 1_500, 1_500)
    rows = list(taken_away(tracks, "admin", at=at, until_ms=quiet_ms))
    assert [row.client_id for row in rows] == ["c1", "c2"]
    for row in rows:
        told = (row.ending, row.ended_by, row.reason, row.end)
        assert told == ("released", "admin", "reset", at)
        assert tracks[row.client_id].kept_ms == kept_ms
    # Log time may have gone back: samples are not waited for until it is there again.
    assert {each.sample_due_ms for each in tracks.values()} == {1_500}
