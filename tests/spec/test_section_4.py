"""PROTOCOL 4: the fold."""

import json
from pathlib import Path

import pytest
from logkit import (
    CREATE_TIME,
    INC,
    INC_AGAIN,
    KEY,
    LOCK,
    SECRET,
    START_MS,
    H,
    Log,
    batch,
    beat,
    claim,
    config,
    fence,
    fold,
    forgetting,
    hashed,
    ident,
    member,
    messages,
    pause,
    release,
    resume,
)

from kafka_marshal.errors import LogTruncated, LogUnreadable
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.text import object_to_entry
from kafka_marshal.protocol.types import Key, LogEntry

GOLDEN = Path(__file__).parent / "golden.json"
FOR_EVER = 2**62


def test_4_the_golden_log_has_its_frozen_digest_and_canonical_bytes():
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    state = fold(object_to_entry(line)[1] for line in golden["log"])
    assert digest(state) == golden["digest"]
    assert to_bytes(state).hex() == golden["canonical"]


# --- 4.1 Clock ---


@pytest.mark.parametrize(
    ("offset", "epoch", "error"),
    [(0, 0, LogTruncated), (1, -1, LogUnreadable), (1, None, LogUnreadable)],
)
def test_4_1_an_offset_or_leader_epoch_out_of_order_is_an_error(offset, epoch, error):
    log = Log()
    with pytest.raises(error):
        fold(
            [
                *log.entries,
                LogEntry(
                    offset=offset,
                    leader_epoch=epoch,
                    timestamp_ms=START_MS,
                    timestamp_type=1,
                    value=b"",
                ),
            ]
        )


def test_4_1_a_leader_epoch_that_goes_back_is_a_truncation():
    entries = [
        LogEntry(offset=0, leader_epoch=5, timestamp_ms=0, timestamp_type=1, value=b""),
        LogEntry(offset=1, leader_epoch=4, timestamp_ms=0, timestamp_type=1, value=b""),
    ]
    with pytest.raises(LogTruncated):
        fold(entries)


@pytest.mark.parametrize("kind", [0, 1])
def test_4_1_the_first_entry_starts_log_time(kind):
    state = fold(
        [
            LogEntry(
                offset=0,
                leader_epoch=0,
                timestamp_ms=70,
                timestamp_type=kind,
                value=b"",
            )
        ]
    )
    assert state.log_time_ms == 70
    assert state.append_time_ms == (70 if kind == 1 else 0)


def test_4_1_an_entry_with_create_time_is_counted_and_moves_no_clock():
    log = Log()
    log.append(b"", after=50, kind=CREATE_TIME)
    assert log.state.now_ms == START_MS
    assert log.state.soft.counters["timestamp_type"] == 1


def test_4_1_log_time_grows_only_within_a_leader_epoch():
    log = Log()
    log.append(b"", after=9 * H, epoch=1)
    assert log.state.now_ms == START_MS
    log.append(b"", after=5)
    assert log.state.now_ms == START_MS + 5
    log.append(b"", after=-3)
    assert log.state.now_ms == START_MS + 5
    log.append(b"", after=4)
    assert log.state.now_ms == START_MS + 6


def test_4_1_m_is_the_largest_append_time_ever():
    log = Log()
    log.append(b"", after=9)
    log.append(b"", at=5, epoch=1)
    assert log.state.append_time_ms == START_MS + 9


# --- 4.2 Freshness ---


@pytest.mark.parametrize(
    ("age", "expected"),
    [(H - 1, "fresh"), (H, "unknown"), (2 * H, "unknown"), (2 * H + 1, "stale")],
)
def test_4_2_freshness_follows_the_age_of_the_last_renewal(age, expected):
    log = Log()
    log.claimed()
    log.append(b"", after=age)
    assert log.key().freshness(log.state.now_ms).value == expected


def test_4_2_freshness_uses_the_h_of_the_last_renewal():
    log = Log()
    log.claimed()
    log.append(config(2, era=2, h=1))
    assert log.outcome_of(claim("c2", generation=2), after=2 * H) == "held"
    assert log.outcome_of(claim("c2", generation=2), after=1) == "claimed"


# --- 4.3 Claims ---


def occupied(**settings):
    """Return a log that can refuse a claim for each reason."""
    log = Log(**settings)
    epoch = log.claimed("c2", topic_id=ident("old"))
    log.append(release(epoch, client="c2"))
    epoch = log.claimed("c2", topic_id=ident("now"), expected=epoch)
    return log


def test_4_3_a_claim_gets_the_first_reason_that_applies():
    other = {"generation": 2, "expected": 99, "topic_id": ident("old")}
    assert Log(configured=False).outcome_of(claim(**other)) == "no_config"
    # Each step removes the reason of the refusal before it.
    log = occupied()
    log.append(pause(FOR_EVER))
    log.key().lock = LOCK
    assert log.outcome_of(claim(**other)) == "wrong_generation"
    other.pop("generation")
    misplaced = Log(k=2)
    assert misplaced.outcome_of(claim(**other)) == "wrong_partition"
    full = Log(keys=1)
    full.claimed(key=Key("g", "t", 9))
    full.append(pause(FOR_EVER))
    assert full.outcome_of(claim(**other)) == "limits"
    assert log.outcome_of(claim(**other)) == "paused"
    log.append(pause(0, seq=1))
    log.key().handoff = ("c3", FOR_EVER)
    assert log.outcome_of(claim(**other)) == "locked"
    log.key().lock = None
    assert log.outcome_of(claim("c2", **other)) == "handoff"
    log.key().handoff = None
    assert log.outcome_of(claim("c2", **other)) == "duplicate"
    assert log.outcome_of(claim(**other)) == "held"
    log.append(b"", after=2 * H + 1)
    assert log.outcome_of(claim(**other)) == "cas"
    other["expected"] = log.key().epoch
    assert log.outcome_of(claim(**other)) == "old_topic"
    assert log.outcome_of(claim(topic_id=ident("old"))) == "old_topic"
    assert log.outcome_of(claim(topic_id=ident("new"))) == "cas"
    assert (
        log.outcome_of(claim(topic_id=ident("new"), expected=log.key().epoch))
        == "claimed"
    )


def test_4_3_a_claim_with_an_expected_epoch_of_an_unknown_key_is_refused():
    assert Log().outcome_of(claim(expected=0)) == "cas"


def test_4_3_the_earliest_claim_wins():
    log = Log()
    transitions = [log.one(claim(f"c{number}")) for number in range(50)]
    assert [one.outcome for one in transitions] == ["accepted"] + ["refused"] * 49
    assert {one.epoch for one in transitions} == {1}


def test_4_3_an_accepted_claim_keeps_the_position_within_a_topic_id():
    log = Log()
    log.append(release(log.claimed("c2", resume_hash=hashed(SECRET)), 7, client="c2"))
    log.claimed()
    known = log.key()
    assert (known.owner.client_id, known.epoch) == ("c1", 3)
    assert (known.position, known.resume_hash, known.handoff) == (7, None, None)
    log.append(release(3))
    log.claimed(topic_id=ident("now"))
    assert log.key().position == 7
    log.append(release(5))
    log.claimed(topic_id=ident("new"), expected=5)
    assert (log.key().position, log.key().granted) == (None, None)


# --- 4.4 Resume ---


def resumable():
    log = Log()
    log.claimed(resume_hash=hashed(SECRET))
    return log


def test_4_4_a_resume_gets_the_first_reason_that_applies():
    bad = {"secret": ident("guess"), "generation": 2}
    assert Log(configured=False).outcome_of(resume(1, **bad)) == "no_config"
    log = resumable()
    log.append(pause(FOR_EVER))
    log.key().lock = LOCK
    assert log.outcome_of(resume(1, **bad)) == "wrong_generation"
    bad.pop("generation")
    assert Log(k=2).outcome_of(resume(1, **bad)) == "wrong_partition"
    assert log.outcome_of(resume(1, **bad)) == "paused"
    log.append(pause(0, seq=1))
    assert log.outcome_of(resume(1, **bad)) == "locked"
    log.key().lock = None
    assert log.outcome_of(resume(1, **bad), after=H) == "resume_mismatch"
    assert log.outcome_of(resume(1)) == "resume_not_fresh"


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": 0},
        {"epoch": 1, "client": "c2"},
        {"epoch": 1, "before": ident("third")},
        {"epoch": 1, "inc": INC},
        {"epoch": 1, "secret": ident("guess")},
    ],
    ids=lambda wrong: list(wrong)[-1],
)
def test_4_4_a_resume_must_match_the_earlier_claim_in_every_field(wrong):
    assert resumable().outcome_of(resume(**wrong)) == "resume_mismatch"


def test_4_4_an_accepted_resume_replaces_the_earlier_incarnation():
    log = resumable()
    transition = log.one(resume(1), after=H - 1)
    assert (transition.effect, transition.epoch) == ("resumed", 2)
    assert log.outcome_of(beat(1)) == "not_owner"
    assert log.outcome_of(beat(2, inc=INC_AGAIN)) == "renewed"
    assert log.outcome_of(resume(2, before=INC_AGAIN, inc=INC)) == "resume_mismatch"


def test_4_4_limits_expected_epoch_and_topic_id_do_not_refuse_a_resume():
    log = Log(keys=1, groups=1)
    log.claimed(resume_hash=hashed(SECRET))
    again = resume(1, expected=99, topic_id=ident("topic"))
    assert log.outcome_of(again) == "resumed"
    assert log.key().topic_id is None


# --- 4.5 Heartbeat ---


def test_4_5_only_beats_of_the_owner_under_its_epoch_count():
    log = Log()
    log.claimed()
    assert log.outcome_of(beat(1)) == "renewed"
    assert log.outcome_of(beat(0)) == "old_epoch"
    assert log.outcome_of(beat(1, client="c2")) == "not_owner"
    assert log.outcome_of(beat(1, inc=INC_AGAIN)) == "not_owner"
    log.append(release(1))
    assert log.outcome_of(beat(1)) == "not_owner"


def test_4_5_a_beat_lowers_the_position_only_with_rewind():
    log = Log()
    log.claimed()
    log.append(messages(1, 0, 8))
    for position, rewind, expected in (
        (12, False, 12),
        (3, False, 12),
        (None, True, 12),
        (3, True, 3),
    ):
        log.append(beat(1, position, rewind=rewind))
        assert (log.key().position, log.key().granted) == (expected, 9)


def test_4_5_a_beat_in_a_paused_group_moves_only_the_position():
    log = Log()
    log.claimed()
    log.append(pause(FOR_EVER))
    assert log.outcome_of(beat(1, 5), after=7) == "position_only"
    assert (log.key().position, log.key().renewed_ms) == (5, START_MS)
    (transition,) = log.append(batch((1, 6)))
    assert transition.effect == "position_only"


def test_4_5_a_beat_of_a_stale_owner_still_renews():
    log = Log()
    log.claimed()
    assert log.outcome_of(beat(1), after=9 * H) == "renewed"
    assert log.outcome_of(claim("c2"), after=2 * H) == "held"


@pytest.mark.parametrize("write", [beat, lambda epoch: batch((epoch, None))])
def test_4_5_a_renewal_never_makes_a_key_stale_earlier(write):
    log = Log(h=60)
    log.claimed()
    log.append(config(2, era=2, h=10), after=10)
    # The lease still ends at 120, not at 30.
    assert log.outcome_of(write(1)) == "renewed"
    assert log.outcome_of(claim("c2", generation=2), after=21) == "held"
    # From 100 on, a renewal under the new interval ends no lease earlier.
    assert log.outcome_of(write(1), after=68) == "renewed"
    assert log.one(claim("c2", generation=2)).detail == {"remaining_ms": 22}
    assert log.outcome_of(write(1), after=1) == "renewed"
    assert log.outcome_of(claim("c2", generation=2), after=20) == "held"
    assert log.outcome_of(claim("c2", generation=2), after=1) == "claimed"


# --- 4.6 Release ---


def test_4_6_a_release_reserves_the_key_for_its_successor():
    log = Log()
    log.claimed()
    assert log.outcome_of(release(1, 5, successor="c2")) == "released"
    assert (log.key().owner, log.key().position) == (None, 5)
    assert log.outcome_of(claim("c3"), after=H // 2 - 1) == "handoff"
    assert log.outcome_of(claim("c2")) == "claimed"
    assert log.outcome_of(release(1, 9)) == "not_owner"


def test_4_6_the_reservation_ends_after_half_of_h():
    log = Log()
    log.claimed()
    log.append(release(1, successor="c2"))
    assert log.outcome_of(claim("c3"), after=H // 2) == "claimed"


# --- 4.7 ClaimingMessages ---


def test_4_7_a_claim_of_messages_gets_the_first_reason_that_applies():
    log = Log(span=10)
    log.claimed()
    log.append(beat(1, 5))
    assert log.outcome_of(messages(0, 0, 99)) == "old_epoch"
    log.append(pause(FOR_EVER))
    assert log.outcome_of(messages(1, 0, 4)) == "paused"
    assert log.outcome_of(messages(1, 0, 99)) == "paused"
    log.append(pause(0, seq=1))
    assert log.outcome_of(messages(1, 0, 4)) == "nothing_left"
    assert log.outcome_of(messages(1, 0, 15)) == "span"
    assert log.one(messages(1, 0, 14)).detail == {"first": 5, "last": 14}


def test_4_7_grants_are_disjoint_and_never_renew():
    log = Log()
    log.claimed()
    assert log.one(messages(1, 3, 9), after=5).detail == {"first": 3, "last": 9}
    assert log.outcome_of(messages(1, 3, 9)) == "nothing_left"
    assert log.one(messages(1, 3, 12)).detail == {"first": 10, "last": 12}
    assert (log.key().position, log.key().granted) == (13, 13)
    assert log.key().renewed_ms == START_MS


# --- 4.8 ReleaseGroup ---


def test_4_8_a_release_group_gets_the_first_reason_that_applies():
    assert Log(configured=False).outcome_of(pause(0)) == "no_config"
    log = Log(groups=1)
    log.append(pause(START_MS + 5))
    assert log.outcome_of(pause(0, group="other")) == "limits"
    assert log.outcome_of(pause(0, op=ident("other"))) == "busy"
    assert log.outcome_of(pause(0)) == "old_seq"
    log.append(b"", after=5)
    assert log.outcome_of(pause(0, seq=1)) == "op_over"
    assert log.outcome_of(pause(log.now_ms, op=ident("other"))) == "expired"
    assert log.outcome_of(pause(log.now_ms + 1, op=ident("other"))) == "paused"


def test_4_8_a_pause_accepts_sixteen_incarnations_of_its_operation():
    log = Log()
    for number in range(16):
        assert log.outcome_of(pause(FOR_EVER, inc=ident(str(number)))) == "paused"
    assert log.outcome_of(pause(FOR_EVER, inc=ident("16"))) == "limits"
    assert log.outcome_of(pause(FOR_EVER, inc=ident("0"), seq=9)) == "old_seq"
    assert log.outcome_of(pause(FOR_EVER, inc=ident("15"), seq=1)) == "paused"


def test_4_8_a_pause_is_bounded_and_ends():
    log = Log(max_pause_ms=50)
    log.append(pause(FOR_EVER))
    assert log.state.active_pause("g").until_ms == START_MS + 50
    assert log.outcome_of(claim(), after=49) == "paused"
    assert log.outcome_of(claim(), after=1) == "claimed"
    assert log.outcome_of(pause(FOR_EVER, seq=1)) == "op_over"


def test_4_8_an_ended_pause_cannot_begin_again():
    log = Log()
    log.append(pause(FOR_EVER))
    assert log.outcome_of(pause(START_MS, seq=1)) == "unpaused"
    assert log.outcome_of(pause(FOR_EVER, seq=2)) == "op_over"


# --- 4.9 Forgetting ---


def test_4_9_each_entry_drops_up_to_eight_silent_keys():
    log = Log(forget_ms=100)
    keys = [Key("g", "t", number) for number in range(10)]
    for key in keys:
        log.append(release(log.claimed(key=key), key=key))
    log.append(b"", after=100)
    assert len(log.state.keys) == 10
    log.append(beat(0, key=keys[0]), after=1)
    assert sorted(log.state.keys) == [keys[0], keys[9]]
    log.append(batch((log.key(keys[9]).epoch, None)))
    assert sorted(log.state.keys) == [keys[9]]
    log.append(b"")
    assert log.state.keys == {}


@pytest.mark.parametrize("held_by", ["owner", "lock", "granted"])
def test_4_9_an_owned_locked_or_granted_key_is_not_dropped(held_by):
    log = Log(forget_ms=0)
    log.claimed()
    if held_by == "granted":
        log.append(messages(1, 0, 5))
    if held_by == "lock":
        log.key().lock = LOCK
    if held_by != "owner":
        log.append(release(1))
    log.append(b"", after=H)
    assert KEY in log.state.keys


def test_4_9_a_forgetting_record_drops_a_key_without_a_live_owner():
    log = Log(level=2)
    assert log.outcome_of(forgetting(0)) == "cas"
    epoch = log.claimed()
    log.append(messages(epoch, 0, 5))
    assert log.outcome_of(forgetting(epoch)) == "held"
    log.append(release(epoch))
    assert log.outcome_of(forgetting(epoch + 1)) == "cas"
    assert log.outcome_of(forgetting(epoch)) == "forgotten"
    assert (log.state.keys, log.state.groups) == ({}, {})
    assert log.claimed() > epoch
    assert log.outcome_of(forgetting(log.key().epoch), after=2 * H) == "held"
    assert log.outcome_of(forgetting(log.key().epoch), after=1) == "forgotten"


# --- 4.11, 4.12 ---


def test_4_11_an_idle_log_never_turns_an_owner_stale():
    log = Log()
    log.claimed()
    # Only an append moves log time; here it is that of the claim itself.
    assert log.key().freshness(log.state.now_ms).value == "fresh"
    assert log.outcome_of(claim("c2"), after=2 * H + 1) == "claimed"


def test_4_12_a_config_that_does_not_follow_the_one_in_force_is_refused():
    log = Log()
    for bad in (
        config(3, era=2),
        config(1, era=2),
        config(2, era=2, cluster_id="x"),
        config(2, era=2, format_id=ident("x")),
        config(2, era=2, k=2),
        config(2, era=1),
        config(2, era=START_MS // 1_000 + 86_401),
    ):
        transition = log.one(bad)
        assert (transition.outcome, transition.reason) == ("refused", "config")
    assert log.outcome_of(config(2, era=2)) == "configured"
    assert log.outcome_of(claim(generation=1)) == "wrong_generation"
    assert log.outcome_of(claim(generation=2)) == "claimed"


# --- 4.13: fences of processes ---


def fenced(**settings):
    """Return a log whose owner is fenced, and the epoch of its key."""
    log = Log(level=2, **settings)
    epoch = log.claimed(resume_hash=hashed(SECRET))
    assert log.outcome_of(fence()) == "fenced"
    return log, epoch


def test_4_13_a_fenced_process_keeps_its_key_until_it_is_stale():
    log, epoch = fenced()
    assert log.outcome_of(beat(epoch, 7), after=2 * H) == "position_only"
    assert (log.key().position, log.key().renewed_ms) == (7, START_MS)
    assert log.outcome_of(claim("c2")) == "held"
    assert log.outcome_of(claim("c2"), after=1) == "claimed"


def test_4_13_a_fenced_process_may_release_its_key():
    log, epoch = fenced()
    assert log.outcome_of(release(epoch, 7)) == "released"
    assert log.outcome_of(claim("c2")) == "claimed"


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(claim(key=Key("g", "t", 1)), id="a claim"),
        pytest.param(claim(key=Key("g", "/planner", 0)), id="a claim of the planner"),
        pytest.param(resume(1, inc=INC, before=INC_AGAIN), id="a resume"),
        pytest.param(messages(1, 0, 5), id="a request for offsets"),
        pytest.param(member(), id="an announcement"),
    ],
)
def test_4_13_claims_requests_and_members_of_a_fenced_process_are_refused(record):
    log, _ = fenced()
    transition = log.one(record)
    assert (transition.outcome, transition.reason) == ("refused", "sender_fenced")


def test_4_13_the_announcement_of_a_fenced_process_is_dropped():
    log = Log(level=2)
    log.append(member())
    log.append(fence())
    assert log.state.soft.members == {}


def test_4_13_a_second_fence_changes_nothing():
    log, _ = fenced()
    before = log.state.groups["g"].fences
    assert log.outcome_of(fence(admin="admin-2", reason="again")) == "fenced"
    assert log.state.groups["g"].fences == before == ((2, "c1", INC),)


def test_4_13_a_fence_affects_only_one_incarnation_in_one_group():
    log, epoch = fenced()
    assert log.outcome_of(claim(key=Key("h", "t", 0))) == "claimed"
    assert log.outcome_of(claim(key=Key("g", "t", 1), inc=INC_AGAIN)) == "claimed"
    assert log.outcome_of(resume(epoch)) == "resumed"


def test_4_13_a_group_with_nothing_but_a_fence_counts_for_the_limit():
    log = Log(level=2, groups=1)
    log.append(fence())
    assert log.outcome_of(claim("c2", key=Key("h", "t", 0))) == "limits"
    assert log.outcome_of(fence(group="h")) == "limits"


def test_4_13_below_level_2_a_fence_is_ignored():
    """S6."""
    log = Log(level=1)
    epoch = log.claimed()
    transition = log.one(fence())
    assert (transition.outcome, transition.reason) == ("ignored", "level")
    assert log.outcome_of(beat(epoch)) == "renewed"


def test_13_the_last_64_fences_of_a_group_are_remembered():
    log = Log(level=2)
    for number in range(65):
        log.append(fence(f"c{number}"))
    assert log.outcome_of(claim("c0")) == "claimed"
    for number in range(1, 65):
        assert (
            log.outcome_of(claim(f"c{number}", key=Key("g", "t", 1))) == "sender_fenced"
        )


def test_13_a_partition_remembers_the_last_fences_of_all_groups():
    log = Log(level=2, operations=2)
    for group in ("a", "b", "c"):
        log.append(fence(group=group))
    names = [name[0] for name in log.state.fences]
    assert (names, sorted(log.state.groups)) == (["b", "c"], ["b", "c"])
