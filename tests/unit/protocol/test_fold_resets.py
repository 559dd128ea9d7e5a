import pytest
from logkit import (
    KEY,
    SECRET,
    H,
    Log,
    beat,
    begin,
    chunk,
    claim,
    config,
    finish,
    hashed,
    ident,
    member,
    messages,
    release,
    resets,
    resume,
    source_log,
)
from msgspec.structs import replace

from kafka_marshal.protocol import fold_resets
from kafka_marshal.protocol.claiming import estimate
from kafka_marshal.protocol.fold_resets import FOLDS, OPEN_MS_MAX, PARTS_MAX
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    KINDS,
    Reset,
)
from kafka_marshal.protocol.snapshot import (
    digest,
    from_bytes,
    outline,
    to_bytes,
)
from kafka_marshal.protocol.state import GroupState
from kafka_marshal.protocol.types import Key, Owner

OTHER = Key("g", "t", 1)


def kept(log):
    """Return the records of a Reset to the present state."""
    return resets(to_bytes(log.state), digest(log.state), bytes_max=40)


def story():
    """Return a log, and the records of a Reset to an earlier state of it."""
    log = Log(level=2)
    first = log.claimed(resume_hash=hashed(SECRET), topic_id=ident("topic"))
    log.append(messages(first, 0, 9), after=3)
    log.append(member())
    records = kept(log)
    log.append(release(first, 12, successor="c3"), after=5)
    log.claimed("c3")
    log.claimed("c2", key=OTHER)
    return log, records


def send_all(log, records, **where):
    return [log.outcome_of(record, **where) for record in records]


def test_this_module_folds_all_records_of_section_7():
    checkpoints = {kind.record for kind in KINDS if kind.number >= 130}
    assert set(FOLDS) == {Reset, *checkpoints}


@pytest.mark.parametrize("record", [begin(), chunk(b"?"), finish(0)], ids=type)
def test_checkpoints_change_only_the_clock(record):
    log, twin = Log(level=2), Log(level=2)
    transition = log.one(record, after=7)
    twin.append(b"", after=7)
    assert (transition.outcome, transition.effect) == ("skipped", None)
    assert (transition.reason, transition.key) == (None, None)
    assert to_bytes(log.state) == to_bytes(twin.state)
    assert log.state.soft.counters["skipped"] == 1


def test_a_reset_before_a_config_is_refused():
    (record,) = resets(b"state", ident("digest").hex())
    log = Log(configured=False)
    assert log.outcome_of(record) == "no_config"
    assert log.state.staging is None


def test_a_reset_puts_the_carried_state_in_force_without_owners():
    log, records = story()
    before_ms = from_bytes(b"".join(r.data for r in records)).now_ms
    *staged, last = send_all(log, records, after=1)
    assert set(staged) == {"reset_staged"}
    assert last == "reset"
    known = log.key()
    assert (known.owner, known.handoff, known.resume_hash) == (None, None, None)
    assert (known.epoch, known.position, known.granted) == (1, 10, 10)
    assert known.topic_id == ident("topic")
    assert list(log.state.keys) == [KEY]
    assert log.state.now_ms == known.active_ms == before_ms
    assert log.state.quiet_until_ms == before_ms + 2 * H + 1
    assert (log.state.staging, log.state.epoch_time_ms) == (None, None)
    assert log.state.next_offset == len(log.entries)
    assert (log.state.soft.members, log.state.soft.notes) == ({}, {})
    assert log.state.soft.counters["reset"] == 1


def test_claims_are_refused_after_a_reset_until_every_lease_has_expired():
    log, records = story()
    send_all(log, records)
    assert log.outcome_of(beat(1, 11)) == "not_owner"
    refused = log.one(claim("c2"), after=5)  # the first entry starts the clock
    assert (refused.reason, refused.detail) == ("quiet", {"remaining_ms": 2 * H - 4})
    assert log.outcome_of(claim("c2", key=Key("new", "t", 7)), after=5) == "quiet"
    assert log.outcome_of(resume(1), after=5) == "quiet"
    quiet = log.state
    hint = estimate(quiet, KEY, elapsed_ms=40, claimant=Owner("c2", ident("c2")))
    assert hint.wait_ms == quiet.quiet_until_ms - quiet.now_ms - 40
    left_ms = quiet.quiet_until_ms - quiet.now_ms
    assert log.outcome_of(claim("c2"), after=left_ms - 1) == "quiet"
    assert log.outcome_of(claim("c2"), after=1) == "claimed"
    assert (log.state.quiet_until_ms, log.state.ends_ms) == (None, None)


def test_replicas_that_differed_are_equal_after_a_reset():
    log, records = story()
    wrong = from_bytes(to_bytes(log.state))
    wrong.keys[OTHER].position = 77
    wrong.log_time_ms += 5
    wrong.append_time_ms += 9
    wrong.dirty[OTHER] = None
    send_all(log, records, epoch=1)
    log.append(b"?", after=9)
    for entry in log.entries[-len(records) - 1 :]:
        apply(wrong, entry)
    assert to_bytes(wrong) == to_bytes(log.state)
    assert digest(wrong) == digest(log.state)


def test_staged_parts_are_dropped_after_60_seconds():
    log, records = story()
    log.append(records[0])
    assert log.outcome_of(records[1], after=OPEN_MS_MAX - 1) == "reset_staged"
    log.append(b"", after=OPEN_MS_MAX)
    assert log.state.staging is None
    assert log.outcome_of(records[2]) == "reset_order"


def test_the_quiet_time_and_the_staged_parts_end_independently():
    log, records = story()
    send_all(log, records)
    again = kept(log)
    log.append(again[0])
    log.append(b"", after=2 * H + 1)
    assert log.state.quiet_until_ms is None
    assert log.state.staging is not None
    assert log.state.ends_ms == log.state.staging.until_ms


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"number": 2}, id="one left out"),
        pytest.param({"number": 1, "op_id": ident("else")}, id="another operation"),
        pytest.param({"number": 1, "client_id": "else"}, id="another sender"),
        pytest.param({"number": 1, "incarnation": ident("x")}, id="another process"),
        pytest.param({"number": 1, "part_count": 9}, id="another count"),
        pytest.param({"number": 1, "size_bytes": 9}, id="another size"),
        pytest.param({"number": 1, "digest": ident("x")}, id="another digest"),
    ],
)
def test_a_part_that_does_not_follow_the_last_one_is_refused(change):
    log, records = story()
    log.append(records[0])
    before = log.state.staging
    assert log.outcome_of(replace(records[1], **change)) == "reset_order"
    assert log.state.staging == before
    assert send_all(log, records[1:])[-1] == "reset"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"part_count": PARTS_MAX + 1}, id="too many parts"),
        pytest.param({"size_bytes": 2**31 - 1}, id="more than parts can hold"),
    ],
)
def test_a_reset_of_too_many_parts_or_bytes_is_refused(change):
    log, records = story()
    assert log.outcome_of(replace(records[0], **change)) == "limits"
    assert log.state.staging is None


def test_parts_beyond_the_announced_size_are_refused():
    log, records = story()
    first, second, *_ = records
    assert (
        log.outcome_of(replace(first, size_bytes=len(first.data) - 1))
        == "reset_damaged"
    )
    assert log.state.staging is None
    for size, outcome in ((-1, "reset_damaged"), (0, "reset_staged")):
        size_bytes = len(first.data) + len(second.data) + size
        log.append(replace(first, size_bytes=size_bytes))
        assert log.outcome_of(replace(second, size_bytes=size_bytes)) == outcome
        staging = log.state.staging
        assert staging is not None
        assert len(staging.parts) == (1 if outcome == "reset_damaged" else 2)


def as_one(log, value, expected_digest, **change):
    """Return the verdict on a Reset of one part."""
    (record,) = resets(value, expected_digest, bytes_max=10**6)
    return log.outcome_of(replace(record, **change))


def test_a_state_of_another_partition_or_config_or_later_offset_is_refused():
    log, _ = story()
    strangers = [Log(1, level=2), Log(level=2, h=3), Log(configured=False)]
    ahead = from_bytes(to_bytes(log.state))
    ahead.next_offset = 1_000
    for state in (*(stranger.state for stranger in strangers), ahead):
        assert as_one(log, to_bytes(state), digest(state)) == "reset_foreign"


@pytest.mark.parametrize("spoiled", ["keys", "groups", "digest", "foreign"])
def test_a_reset_can_be_refused_before_its_state_is_decoded(monkeypatch, spoiled):
    log, _ = story()
    value, expected_digest = to_bytes(log.state), digest(log.state)
    if spoiled == "digest":
        expected_digest = "00" * 16
    elif spoiled == "foreign":
        log.append(config(2, era=2, level=2))
    else:
        bounds = {spoiled: 1}
        rich = from_bytes(value)
        rich.config = log.state.config = config(level=2, **bounds)
        rich.keys[KEY._replace(group_id="h")] = rich.keys.pop(OTHER)
        rich.groups["h"] = GroupState()
        rich.rebuild_derived()
        value, expected_digest = to_bytes(rich), digest(rich)
    monkeypatch.setattr(fold_resets, "from_bytes", None)
    expected = {"digest": "reset_damaged", "foreign": "reset_foreign"}
    assert as_one(log, value, expected_digest) == expected.get(spoiled, "limits")


def test_an_impossible_row_is_refused_even_with_a_correct_digest():
    log, _ = story()
    value = to_bytes(log.state).replace(b"\xa1g", b"\xa1/")
    assert as_one(log, value, outline(value).digest()) == "reset_damaged"


def test_a_reset_to_a_state_with_staged_parts_is_refused():
    log, records = story()
    log.append(records[0])
    value, expected_digest = to_bytes(log.state), digest(log.state)
    assert as_one(log, value, expected_digest) == "reset_damaged"


def test_damaged_resets_never_raise_and_never_replace_the_state():
    log, records = story()
    for at, record in enumerate(records):
        for data in (b"\xc1", b"\x95" * 50, record.data[::-1]):
            damaged = replace(record, data=data)
            whole = replace(damaged, number=0, part_count=1)
            assert log.outcome_of(whole) == "reset_damaged"
            parts = [*records[:at], damaged, *records[at + 1 :]]
            outcomes = [log.outcome_of(part) for part in parts]
            assert outcomes == ["reset_staged"] * (len(parts) - 1) + ["reset_damaged"]
    assert log.key().owner == Owner("c3", ident("c3"))


def test_a_reset_is_refused_while_the_partition_count_changes():
    log, *_ = source_log()
    value = to_bytes(log.state)
    for part in resets(value, digest(log.state)):
        assert log.outcome_of(part) == "busy"
    assert log.state.staging is None
