"""PROTOCOL 7: snapshots, checkpoints and Resets."""

import pytest
from logkit import (
    H,
    Log,
    beat,
    begin,
    chunk,
    claim,
    config,
    finish,
    ident,
    messages,
    pause,
    release,
    resets,
)
from msgspec.structs import replace

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.checkpoints import Assembly, Watch, checkpoint_key, split
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import CheckpointEnd
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key


def story(level=1):
    log = Log(forget_ms=3 * H, operations=1)
    epoch = log.claimed(topic_id=ident("one"))
    log.append(beat(epoch, 5), after=H)
    log.append(messages(epoch, 0, 9))
    log.append(pause(log.now_ms + 7))
    log.append(release(epoch, 12, successor="c2"), after=3)
    log.append(b"?", after=4, epoch=1)
    log.append(pause(log.now_ms + H, op=ident("second"), group="h"))
    log.append(pause(0, op=ident("second"), group="h", seq=1))
    log.claimed("c2")
    log.append(config(2, era=2, level=level))
    log.append(b"", after=9 * H)
    return log


def test_7_4_a_snapshot_and_the_tail_give_the_state_of_the_whole_log():
    log = story()
    whole = to_bytes(log.state)
    for k in range(len(log.entries) + 1):
        head = WorldState(0)
        for entry in log.entries[:k]:
            apply(head, entry)
        state = from_bytes(to_bytes(head))
        assert digest(state) == digest(head)
        for entry in log.entries[k:]:
            apply(state, entry)
        assert to_bytes(state) == whole
        assert digest(state) == digest(log.state)


def test_7_1_a_damaged_snapshot_is_discarded():
    value = to_bytes(story().state)
    with pytest.raises(MalformedRecord):
        from_bytes(value[:-1])


FREE = Key("free", "t", 0)
STORY = [entry.value for entry in story(2).entries]


def checkpointed(k, *, records=None):
    """Return the story with a checkpoint begun before its entry ``k``.

    Entries of the story stand between the records of the checkpoint.

    Args:
        k: Index of the entry in the story.
        records: Number of the records written after the Begin, all by default.
    """
    log = Log(configured=False)
    left = [(value, 1) for value in STORY]
    log.append(config(level=2))
    for value, after in left[1:k]:
        log.append(value, after=after)
    place = checkpoint_key(0)
    generation = log.state.config.generation
    epoch = log.claimed("w", key=place, generation=generation)
    log.append(begin(epoch, client="w"))
    at, value = log.state.next_offset - 1, to_bytes(log.state)
    expected_digest = bytes.fromhex(digest(log.state))
    size = len(value) // 3 + 1
    parts = [value[n : n + size] for n in range(0, len(value), size)]
    own = [
        chunk(part, number, epoch=epoch, client="w")
        for number, part in enumerate(parts)
    ]
    fields = {
        "epoch": epoch,
        "parts": len(parts),
        "size": len(value),
        "digest": expected_digest,
    }
    own.append(finish(at, client="w", **fields))
    for number, record in enumerate(own[:records]):
        log.append(record)
        for value, after in left[max(k, 1) + number : max(k, 1) + number + 1]:
            log.append(value, after=after)
    for value, after in left[max(k, 1) + len(own[:records]) :]:
        log.append(value, after=after)
    return log


def newest(log):
    """Return the state of the newest complete checkpoint, as a reader finds it."""
    for entry in reversed(log.entries):
        record = decode(entry.value)
        if isinstance(record, CheckpointEnd):
            assembly = Assembly(record)
            for each in log.entries[record.begin_offset : entry.offset]:
                assembly.take(each)
            value = assembly.state(0)
            return None if isinstance(value, str) else from_bytes(value)
    return None


@pytest.mark.parametrize("k", range(1, len(STORY) + 1))
def test_7_2_a_checkpoint_and_the_tail_give_the_state_of_the_whole_log(k):
    log = checkpointed(k)
    state = newest(log)
    for entry in log.entries[state.next_offset :]:
        apply(state, entry)
    assert to_bytes(state) == to_bytes(log.state)
    assert digest(state) == digest(log.state)


@pytest.mark.parametrize("records", range(4))
def test_7_2_an_incomplete_checkpoint_does_not_count(records):
    for k in range(1, len(STORY) + 1):
        assert newest(checkpointed(k, records=records)) is None


def test_7_2_readers_of_the_same_log_compute_the_same_digest():
    for k in range(1, len(STORY) + 1):
        log, watch, state = checkpointed(k), Watch(), WorldState(0)
        seen = [watch.on_entry(state, apply(state, entry)) for entry in log.entries]
        (compared,) = [one for one in seen if one is not None]
        assert compared.is_equal


def test_7_2_a_snapshot_within_a_checkpoint_and_the_tail_give_the_whole():
    log = checkpointed(5)
    for k in range(len(log.entries)):
        head = WorldState(0)
        for entry in log.entries[:k]:
            apply(head, entry)
        state = from_bytes(to_bytes(head))
        for entry in log.entries[k:]:
            apply(state, entry)
        assert to_bytes(state) == to_bytes(log.state)


def test_7_2_checkpoint_records_do_not_change_the_state():
    log = Log(level=2)
    before = digest(log.state)
    for part in split(to_bytes(log.state)):
        for record in (begin(), chunk(part), finish(1, size=len(part))):
            assert log.one(record).outcome == "skipped"
    log.state.next_offset = 1
    assert digest(log.state) == before


def test_7_6_a_reset_replaces_the_state_and_begins_a_quiet_time():
    for k in range(2, len(STORY)):
        log = checkpointed(k)
        state = newest(log)
        if state.config != log.state.config:
            continue
        for record in resets(to_bytes(state), digest(state)):
            verdict = log.one(record)
        assert verdict.effect == "reset"
        assert {known.owner for known in log.state.keys.values()} == {None}
        assert log.state.keys.keys() == state.keys.keys()
        generation = state.config.generation
        assert (
            log.outcome_of(claim("c7", key=FREE, generation=generation), after=1)
            == "quiet"
        )


@pytest.mark.parametrize(
    ("waited_ms", "outcome"), [(59_999, "reset_damaged"), (60_000, "reset_order")]
)
def test_7_6_parts_are_kept_for_60_s_after_the_last(waited_ms, outcome):
    log = Log(level=2)
    first, second, third = resets(b"state", "00" * 16, bytes_max=2)
    log.append(first)
    log.append(second, after=59_999)
    log.append(b"", after=waited_ms)
    assert log.outcome_of(third) == outcome


FEW = {"keys": 10, "groups": 4, "operations": 3}
FEW_BYTES = 598_016 + 10 * 1_200 + 4 * 2_330 + 3 * 8_392
MANY = {"keys": 1_000_000}


@pytest.mark.parametrize(
    ("limits", "part_count", "size_bytes", "outcome"),
    [
        (FEW, 1 + FEW_BYTES // 48_128, FEW_BYTES, "reset_staged"),
        (FEW, 2 + FEW_BYTES // 48_128, FEW_BYTES, "limits"),
        (FEW, 1 + FEW_BYTES // 48_128, FEW_BYTES + 1, "limits"),
        (FEW, 2, 2 * 48_128, "reset_staged"),
        (FEW, 2, 2 * 48_128 + 1, "limits"),
        (MANY, 4_096, 4_096 * 48_128, "reset_staged"),
        (MANY, 4_097, 4_096 * 48_128, "limits"),
    ],
)
def test_7_6_a_reset_of_too_many_parts_or_bytes_is_refused(
    limits, part_count, size_bytes, outcome
):
    log = Log(level=2, **limits)
    (record,) = resets(b"state", "00" * 16)
    record = replace(record, part_count=part_count, size_bytes=size_bytes)
    assert log.outcome_of(record) == outcome
