"""Sound logs pass; a fold that breaks a rule is reported with its invariant."""

import msgspec
import pytest
from logkit import (
    KEY,
    LOCK,
    MOVES,
    START_MS,
    STAYS,
    H,
    Log,
    batch,
    beat,
    claim,
    decide,
    fence,
    forgetting,
    ident,
    imported,
    layout_done,
    layout_fence,
    layout_final,
    layout_import,
    messages,
    offer,
    pause,
    planned,
    ready,
    release,
    resets,
    resolve,
    sound_log,
    source_log,
    stage,
    target_log,
)

from kafka_marshal.protocol.log_judge import LogJudge
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, Owner

OTHER = Key("g", "t", 1)


def judged(log, change=lambda world, transition: None, *, tokens=None):
    """Fold a log and return the findings.

    ``change`` breaks the fold: it gets the state behind each transition, and may return
    another transition.
    """
    world = WorldState(log.state.partition)
    judge = LogJudge(world)
    judge.tokens |= tokens or {}
    found = []
    for entry in log.entries:
        for transition in apply(world, entry):
            changed = change(world, transition) or transition
            found += judge.take(changed)
    return found


def on(effect, spoil):
    """Return a change that spoils the state behind an effect."""

    def change(world, transition):
        if transition.effect == effect:
            return spoil(world, transition)
        return None

    return change


def spoiling(**fields):
    """Return a function that sets fields of the key of a transition."""

    def spoil(world, transition):
        for name, value in fields.items():
            setattr(world.keys[transition.key], name, value)

    return spoil


def test_a_sound_log_passes():
    assert judged(sound_log()) == []


def test_a_takeover_of_a_stale_owner_passes():
    log = sound_log()
    log.append(b"", after=3 * H)
    log.claimed("c2")
    assert judged(log) == []


def test_a_judge_that_starts_from_a_state_has_its_keys():
    log = Log()
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    judge = LogJudge(log.state)
    assert judge.known[KEY].granted == judge.granted[KEY, None] == 10
    assert judge.tokens == {KEY: log.state.token(KEY)}
    log.state.config = None
    assert LogJudge(log.state).known == {}


@pytest.mark.parametrize(
    ("effect", "fields", "invariant", "text"),
    [
        ("claimed", {"owner": Owner("nobody", b"")}, "S1", "not to the claimant"),
        ("claimed", {"epoch": 0}, "S1", "has epoch 0"),
        ("renewed", {"owner": Owner("nobody", b"")}, "S1", "got the owner"),
        ("renewed", {"epoch": 0}, "S1", "got the epoch 0"),
        ("granted", {"position": 1}, "S10", "fell from position 5 to 1"),
        ("renewed", {"position": None}, "S10", "fell from position 10 to None"),
    ],
)
def test_a_key_with_a_wrong_field_is_reported(effect, fields, invariant, text):
    found = judged(sound_log(), on(effect, spoiling(**fields)))
    assert any(f.invariant == invariant and text in f.message for f in found), found


def test_a_refusal_that_changes_a_key_is_reported():
    def change(world, transition):
        if transition.reason == "held":
            world.keys[transition.key].position = 99

    (found, *_) = judged(sound_log(), change)
    text = f"offset 6: {KEY} was changed by a refused or ignored record"
    assert found == ("S1", text)


def test_a_renewal_by_another_client_than_the_owner_is_reported():
    log = Log()
    epoch = log.claimed()
    log.append(beat(epoch))

    def change(world, transition):
        if transition.effect == "renewed":
            record = msgspec.structs.replace(transition.record, client_id="c9")
            return msgspec.structs.replace(transition, record=record)
        return None

    (found,) = judged(log, change)
    assert found.invariant == "S1"
    assert "is renewed by ('c9'" in found.message


def test_a_renewal_in_a_pause_is_reported():
    log = Log()
    epoch = log.claimed()
    log.append(pause(log.now_ms + 10 * H))
    log.append(beat(epoch), after=1)

    def renew(world, transition):
        world.keys[KEY].renewed_ms = world.now_ms

    (found,) = judged(log, on("position_only", renew))
    assert (found.invariant, "paused" in found.message) == ("8.1", True)
    assert judged(log) == []


def test_a_grant_of_granted_offsets_is_reported():
    def again(world, transition):
        return msgspec.structs.replace(transition, detail={"first": 0, "last": 9})

    log = Log()
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    log.append(messages(epoch, 10, 19))
    (found,) = judged(log, on("granted", again))
    assert found == (
        "S3",
        f"offset 3: {KEY} was granted 0 to 9, but all below 10 was before",
    )
    nothing = judged(
        log, on("granted", lambda _, t: msgspec.structs.replace(t, detail=None))
    )
    assert {each.invariant for each in nothing} == {"S3"}


def test_grants_from_before_the_first_topic_id_still_count():
    log = Log()
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    log.append(release(epoch))
    epoch = log.claimed("c2", topic_id=ident("topic"))
    log.append(messages(epoch, 10, 19, client="c2"))

    def again(world, transition):
        if transition.detail["first"] == 10:
            return msgspec.structs.replace(transition, detail={"first": 5, "last": 19})
        return None

    assert judged(log) == []
    assert [each.invariant for each in judged(log, on("granted", again))] == ["S3"]


def test_a_position_of_an_earlier_topic_is_reported():
    found = judged(sound_log(), on("claimed", spoiling(position=4)))
    assert "4.3" in {each.invariant for each in found}


def test_a_token_that_shrinks_or_is_missing_is_reported():
    log = sound_log()
    late = judged(log, tokens={KEY: log.state.token(KEY)})
    assert {each.invariant for each in late} == {"S7"}

    def lose(world, transition):
        world.config = None

    assert "S7" in {each.invariant for each in judged(log, on("claimed", lose))}


def test_an_effect_on_a_missing_or_never_claimed_key_is_reported():
    def lose(world, transition):
        del world.keys[KEY]

    log = Log()
    log.append(beat(log.claimed(), 5))
    (found,) = judged(log, on("renewed", lose))
    assert "does not exist after" in found.message

    def rename(world, transition):
        return msgspec.structs.replace(transition, effect="renewed")

    (found, *_) = judged(log, on("claimed", rename))
    assert "never claimed" in found.message


def test_an_ignored_beat_of_an_unknown_key_passes():
    log = Log()
    log.append(beat(1))
    assert judged(log) == []


def test_grants_of_a_forgotten_key_begin_again():
    log = Log(level=2)
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    log.append(release(epoch))
    log.append(forgetting(epoch))
    log.append(messages(log.claimed("c2"), 0, 9, client="c2"))
    assert log.key().granted == 10
    assert judged(log) == []


def test_the_position_of_a_dropped_silent_key_begins_again():
    log = Log(forget_ms=1)
    log.append(release(log.claimed(), 50))
    log.append(b"", after=10)
    log.claimed("c2")
    assert log.key().position is None
    assert judged(log) == []


def test_a_silent_key_with_grants_must_keep_its_position():
    log = Log(forget_ms=1)
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    log.append(release(epoch))
    log.append(b"", after=10)
    log.claimed("c2")
    assert log.key().granted == 10

    def lose(world, transition):
        if transition.record.client_id == "c2":
            world.keys[KEY].position = None

    assert [each.invariant for each in judged(log, on("claimed", lose))] == ["S10"]


def test_a_reset_takes_back_only_the_grants_after_its_state():
    log = Log(level=2)
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    value, expected_digest = to_bytes(log.state), digest(log.state)
    log.append(messages(epoch, 10, 30))
    log.append(messages(log.claimed("c2", key=OTHER), 0, 9, client="c2", key=OTHER))
    for record in resets(value, expected_digest):
        log.append(record)
    log.append(b"", after=1)
    log.append(b"", after=3 * H)
    log.append(messages(log.claimed("c2"), 0, 19, client="c2"))
    assert log.key().granted == 20
    assert judged(log) == []

    def again(world, transition):
        if transition.detail["last"] == 19:
            return msgspec.structs.replace(transition, detail={"first": 5, "last": 19})
        return None

    assert [each.invariant for each in judged(log, on("granted", again))] == ["S3"]


# --- a set position


def set_log(*, commit=True):
    """Return a log in which the position of a key with grants is set back to 2."""
    log = Log(level=SECOND_LEVEL)
    epoch = log.claimed(topic_id=ident("topic"))
    log.append(messages(epoch, 0, 9))
    log.append(pause(START_MS + 100 * H))
    log.append(stage((0, 2)), after=2 * H + 1)
    if commit:
        log.append(decide())
    log.append(resolve(commit=commit))
    return log


@pytest.mark.parametrize("commit", [True, False])
def test_a_set_position_passes(commit):
    log = set_log(commit=commit)
    epoch = log.claimed("c2")
    log.append(messages(epoch, 0, 20, client="c2"))
    assert judged(log) == []


@pytest.mark.parametrize(
    ("effect", "fields", "invariant", "text"),
    [
        ("staged", {"position": 2}, "8.3", "changes its position before the commit"),
        ("staged", {"owner": Owner("c1", b"")}, "S1", "is staged, but has the owner"),
        ("staged", {"heartbeat_interval_ms": 2 * H}, "8.3", "after its owner's"),
        ("position_set", {"lock": LOCK}, "8.3", "is position_set with the lock"),
        ("position_set", {"position": 9}, "8.5", "is position_set, but has position 9"),
        ("position_set", {"epoch": 7}, "S1", "is position_set, but has the owner"),
    ],
)
def test_a_fold_that_sets_a_position_wrongly_is_reported(
    effect, fields, invariant, text
):
    found = judged(set_log(), on(effect, spoiling(**fields)))
    assert any(f.invariant == invariant and text in f.message for f in found), found


def test_an_abort_that_moves_a_key_is_reported():
    found = judged(set_log(commit=False), on("unlocked", spoiling(position=3)))
    assert any("is unlocked, but has position 3" in f.message for f in found), found


def test_a_resolve_of_a_key_locked_by_another_operation_is_reported():
    log = set_log()

    def change(world, transition):
        if transition.effect == "position_set":
            record = msgspec.structs.replace(transition.record, op_id=ident("other"))
            return msgspec.structs.replace(transition, record=record)
        return None

    found = judged(log, change)
    assert [f.invariant for f in found] == ["8.5"]


def test_a_claim_of_a_locked_key_is_reported():
    log = set_log()
    state, judge = WorldState(0), None
    judge = LogJudge(state)
    found = []
    for entry in log.entries[:5]:
        (transition,) = apply(state, entry)
        found += judge.take(transition)
    state.keys[KEY].lock = None
    state.groups["g"].pause = None
    epoch = state.next_offset
    (transition,) = apply(state, msgspec.structs.replace(log.entries[1], offset=epoch))
    found += judge.take(transition)
    assert [f.invariant for f in found] == ["8.3"]


def fenced_log(**settings):
    """Return a log whose owner is fenced, and still sends records of all kinds."""
    log = Log(level=2, **settings)
    epoch = log.claimed()
    log.append(fence())
    log.append(beat(epoch, 3), after=1)
    log.append(batch((epoch, 4)), after=1)
    log.append(messages(epoch, 4, 5), after=1)
    log.append(claim(key=OTHER))
    log.append(release(epoch, 6))
    return log


def forget_fences(world, _):
    """Make the fold ignore fences."""
    world.fences.clear()


def test_beats_and_releases_of_a_fenced_client_pass():
    assert judged(fenced_log()) == []


def test_renewals_grants_and_claims_of_a_fenced_client_are_reported():
    found = judged(fenced_log(), on("fenced", forget_fences))
    assert {one.invariant for one in found} == {"4.13"}
    assert [one.message.split(" is ")[1].split(" by ")[0] for one in found] == [
        *("renewed", "renewed", "granted", "claimed")
    ]


def test_a_judge_that_starts_from_a_state_knows_its_fences():
    log = fenced_log()
    world = WorldState(0)
    for entry in log.entries[:3]:
        apply(world, entry)
    judge = LogJudge(world)
    world.fences.clear()
    (transition,) = apply(world, log.entries[3])
    assert [one.invariant for one in judge.take(transition)] == ["4.13"]


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        pytest.param({"operations": 1}, ["h"], id="those of a partition"),
        pytest.param({}, ["g"] * 64, id="those of a group"),
    ],
)
def test_a_claim_of_a_client_whose_fence_was_dropped_passes(settings, others):
    log = Log(level=2, **settings)
    log.append(fence())
    for number, group in enumerate(others):
        log.append(fence(f"other-{number}", group=group))
    log.claimed()
    assert judged(log) == []


def test_a_claim_passes_after_a_reset_took_its_fence_back():
    log = Log(level=2)
    log.append(release(log.claimed()))
    value, before = to_bytes(log.state), digest(log.state)
    log.append(fence())
    log.append(resets(value, before, bytes_max=10_000)[0])
    log.append(b"")
    log.append(b"", after=3 * H)
    log.claimed()
    assert judged(log) == []


def test_a_handoff_passes():
    log = Log(level=SECOND_LEVEL)
    epoch = log.claimed()
    for record in (offer(epoch), ready(epoch), release(epoch, 5, successor="c2")):
        log.append(record)
    log.claimed("c2")
    assert judged(log) == []


def test_a_ready_that_changes_the_owner_is_reported():
    log = Log(level=SECOND_LEVEL)
    epoch = log.claimed()
    log.append(offer(epoch))
    log.append(ready(epoch))

    def take_over(world, transition):
        world.keys[transition.key].owner = Owner("c2", ident("c2"))

    (finding,) = judged(log, on("ready", take_over))
    assert finding.invariant == "9.4"


def test_plans_that_follow_each_other_pass():
    log = Log(level=2, forget_ms=100)
    log.append(planned(0))
    log.append(planned(0, client="c2"))
    log.append(planned(1, client="c2"), after=9)
    # The group is dropped after silence, and begins again.
    log.append(b"", after=101)
    log.append(planned(0))
    assert log.state.plan_generation("g") == 1
    assert judged(log) == []


def test_an_accepted_plan_that_does_not_follow_the_last_is_reported():
    log = Log(level=2)
    log.append(planned(0))
    log.append(planned(1))

    def forget_the_last(world, _):
        world.groups["g"].planned = None

    log.append(planned(0))
    assert judged(log) == []
    (finding,) = judged(log, on("planned", forget_the_last))[-1:]
    assert finding.invariant == "9.2"


def test_a_judge_that_starts_from_a_state_knows_its_plans():
    log = Log(level=2)
    log.append(planned(0))
    log.append(planned(1))
    world = WorldState(0)
    for entry in log.entries[:2]:
        apply(world, entry)
    judge = LogJudge(world)
    (transition,) = apply(world, log.entries[2])
    assert judge.take(transition) == []


# --- changes of the partition count (PROTOCOL 10)


def followed(log, *records):
    """Return what a judge finds in a log as it grows."""
    judge, found = LogJudge(log.state), []
    for record in records:
        for transition in log.append(record):
            found += judge.take(transition)
    return found, judge


def test_plans_begin_again_where_a_home_moves_away_and_back():
    back = {"generation": 3, "era": 3}
    log = Log(level=2)
    found, _ = followed(
        log,
        planned(0, group=MOVES),
        planned(1, group=MOVES),
        layout_fence(2),
        layout_final(),
        layout_fence(1, 2, **back),
        layout_done(0, source=1),
        layout_final(),
        planned(0, group=MOVES),
    )
    assert found == []
    assert log.state.plan_generation(MOVES) == 1


def test_fences_from_before_a_partition_came_into_use_are_gone():
    log = Log(1, k=2, level=2)
    back = {"generation": 3, "era": 3}
    found, _ = followed(
        log,
        fence("c1"),
        layout_fence(1, 2),
        layout_final(),
        layout_fence(2, 1, **back),
        layout_done(0),
        layout_final(),
        claim(generation=3),
        beat(7, 5),
    )
    assert found == []
    assert log.key().owner is not None


def test_keys_that_move_away_are_gone_and_come_back_as_imported():
    log, *_ = source_log()
    found, judge = followed(log, layout_final())
    assert (found, list(judge.known)) == ([], [STAYS])
    found, judge = followed(
        target_log(),
        layout_import(imported(position=5, granted=7)),
        claim(generation=2),
        messages(2, 7, 8),
    )
    assert found == []
    assert judge.granted[KEY, None] == 9
