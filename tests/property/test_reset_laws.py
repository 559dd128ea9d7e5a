"""Random logs in which a Reset restores a state with locked keys (PROTOCOL 7.6)."""

import random

import attrs
import pytest
from author import write_log
from logkit import fold, resets, resolve
from msgspec.structs import replace

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.log_judge import LogJudge
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState

LOGS = 400


@attrs.frozen
class Written:
    """A log with a Reset.

    Attributes:
        entries: All entries, before, of and after the Reset.
        at: Number of entries up to the end of the Reset.
        carried: The state that the Reset carries; it has locked keys.
    """

    entries: list
    at: int
    carried: WorldState


def follow(entries, last, records):
    """Return entries of the records after entry ``last``, with its time."""
    return [
        replace(last, offset=last.offset + number, value=encode(record))
        for number, record in enumerate(records, 1)
    ]


def write(seed):
    """Return a log with a Reset that was accepted, None if this seed has none."""
    rng, entries = random.Random(seed), write_log(seed)
    state, saved = WorldState(0), None
    for index, entry in enumerate(entries):
        apply(state, entry)
        if state.locked and state.config is not None and index + 1 < len(entries):
            saved = index, to_bytes(state), digest(state)
            if rng.random() < 0.5:
                break
    if saved is None:
        return None
    index, value, checksum = saved
    at = rng.randint(index + 1, len(entries) - 1)
    parts = follow(entries, entries[at - 1], resets(value, checksum, bytes_max=200))
    more = len(parts)
    tail = [replace(one, offset=one.offset + more) for one in entries[at:]]
    before = fold([*entries[:at], *parts[:-1]])
    if apply(before, parts[-1])[0].effect != "reset":
        return None  # another Config is in force, or other limits
    return Written([*entries[:at], *parts, *tail], at + more, from_bytes(value))


@pytest.fixture(scope="module", name="logs")
def _logs():
    written = [one for one in map(write, range(LOGS)) if one is not None]
    assert len(written) >= LOGS // 20
    return written


def test_a_reset_restores_exactly_the_locks_of_its_state(logs):
    again = 0
    for log in logs:
        before, after = fold(log.entries[: log.at - 1]), fold(log.entries[: log.at])
        assert after.locked == log.carried.locked
        again += before.locked != after.locked
        for name, keys in after.locked.items():
            for key in keys:
                known = after.keys[key]
                assert (known.owner, known.lock.op_id) == (None, name[1])
    assert again > 0  # otherwise a Reset that leaves locks alone would pass


def test_a_fold_saved_at_each_entry_equals_the_whole_fold(logs):
    for log in logs:
        whole, chain = WorldState(0), WorldState(0)
        for entry in log.entries:
            apply(whole, entry)
            chain = from_bytes(to_bytes(chain))
            apply(chain, entry)
            assert digest(chain) == digest(whole)
        assert to_bytes(chain) == to_bytes(whole)


def test_derived_state_after_a_reset_equals_a_rebuild(logs):
    for log in logs:
        for end in (log.at, len(log.entries)):
            state = fold(log.entries[:end])
            derived = state.epochs.copy(), state.over.copy()
            lapses_ms = state.lapses_ms
            locked = {name: dict(keys) for name, keys in state.locked.items() if keys}
            state.rebuild_derived()
            assert (state.epochs, state.over) == derived
            # ``lapses_ms`` may still be that of a pause that has ended: a lower bound.
            if state.lapses_ms is not None:
                assert lapses_ms is not None
                assert lapses_ms <= state.lapses_ms
            assert state.locked == locked


def test_the_log_judge_finds_no_violation_in_logs_with_a_reset(logs):
    for log in logs:
        state = WorldState(0)
        judge = LogJudge(state)
        for entry in log.entries:
            for transition in apply(state, entry):
                assert judge.take(transition) == []


def test_locks_that_a_reset_restores_can_be_resolved(logs):
    for log in logs:
        entries = log.entries[: log.at]
        for group_id, op_id in log.carried.locked:
            verdict = log.carried.groups[group_id].verdict
            is_decided = verdict is not None and verdict.op_id == op_id
            record = resolve(commit=is_decided, op=op_id, group=group_id)
            entries = [*entries, *follow(entries, entries[-1], [record])]
        state = fold(entries)
        assert state.locked == {}
        assert all(known.lock is None for known in state.keys.values())
