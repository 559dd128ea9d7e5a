"""Invariants of every log, whatever records it has (PROTOCOL 11, S1 to S10)."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from author import TINY, Author, write_log
from hypothesis import given, settings
from hypothesis import strategies as st
from logkit import LOG_APPEND_TIME, Log, config, fold
from naive import Naive
from slices import HANG_S

from kafka_marshal.protocol.fold_beats import fold_beats
from kafka_marshal.protocol.items import ERAS_MAX
from kafka_marshal.protocol.rationalizer import apply, replay
from kafka_marshal.protocol.records import Member
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import ERAS, RING_ENTRIES_MAX, WorldState
from kafka_marshal.protocol.text import object_to_entry
from kafka_marshal.protocol.types import LogEntry

HERE = Path(__file__).resolve().parent
LOGS = 120


@pytest.fixture(scope="module", name="logs")
def _logs():
    return [write_log(seed) for seed in range(LOGS)]


# --- S2, S5: one state, however a log is folded ---


def test_a_snapshot_and_its_tail_equal_the_whole_log(logs):
    for entries in logs[:40]:
        whole = WorldState(0)
        saved = [to_bytes(whole)]
        digests = [digest(whole)]
        for entry in entries:
            apply(whole, entry)
            saved.append(to_bytes(whole))
            digests.append(digest(whole))
        for k in range(len(entries) + 1):
            state = from_bytes(saved[k])
            for at, entry in enumerate(entries[k:], k + 1):
                apply(state, entry)
                if at % 7 == 0 or at == len(entries):
                    assert digest(state) == digests[at]
            assert to_bytes(state) == saved[-1]


def test_a_fold_saved_at_each_entry_equals_the_whole_fold(logs):
    for entries in logs:
        whole, chain = WorldState(0), WorldState(0)
        for entry in entries:
            expected = apply(whole, entry)
            chain = from_bytes(to_bytes(chain))
            transitions = apply(chain, entry)
            # Members are soft state: a snapshot does not contain them.
            assert transitions == expected or isinstance(transitions[0].record, Member)
            assert digest(chain) == digest(whole)


def test_the_digest_does_not_depend_on_earlier_digests(logs):
    for entries in logs:
        asked = WorldState(0)
        for entry in entries:
            apply(asked, entry)
            digest(asked)
        assert digest(asked) == digest(fold(entries))


def test_chunks_of_any_size_give_the_same_state(logs):
    for seed, entries in enumerate(logs):
        rng = random.Random(seed)
        state, at = WorldState(0), 0
        while at < len(entries):
            size = rng.randint(1, 9)
            replay(state, entries[at : at + size])
            at += size
        assert to_bytes(state) == to_bytes(fold(entries))


def test_heartbeats_folded_in_runs_give_the_same_state(logs):
    taken = taken_locked = 0
    for seed, entries in enumerate(logs):
        rng = random.Random(seed)
        state, at = WorldState(0), 0
        while at < len(entries):
            chunk = entries[at : at + rng.randint(1, 9)]
            at, next_ = at + len(chunk), 0
            while next_ < len(chunk):
                stop = fold_beats(state, chunk, start=next_)
                taken += stop - next_
                is_operating = any(one.unresolved for one in state.groups.values())
                if state.locked or is_operating:
                    taken_locked += stop - next_
                if stop < len(chunk):
                    apply(state, chunk[stop])
                next_ = stop + 1
        # The comparison includes soft and derived state.
        assert state == fold(entries)
    assert taken > LOGS
    assert taken_locked > 0


def test_derived_state_equals_a_rebuild(logs):
    for entries in logs:
        state = fold(entries)
        before = state.epochs.copy(), state.over.copy(), state.lapses_ms
        locked = {name: dict(keys) for name, keys in state.locked.items()}
        counts = {name: group.key_count for name, group in state.groups.items()}
        fences, scopes = state.fences.copy(), state.scopes.copy()
        state.rebuild_derived()
        assert state.epochs == before[0]
        assert state.over == before[1]
        assert state.locked == locked
        assert (state.fences, state.scopes) == (fences, scopes)
        # The kept ``lapses_ms`` is a lower bound of the exact one.
        assert before[2] is None or before[2] <= (state.lapses_ms or before[2])
        assert before[2] is not None or state.lapses_ms is None
        assert counts == {n: group.key_count for n, group in state.groups.items()}


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
from hashlib import blake2b
from author import write_log
from logkit import fold
from kafka_marshal.protocol.records import Member
from kafka_marshal.protocol.snapshot import digest, to_bytes
whole = blake2b()
for seed in range(30):
    state = fold(write_log(seed))
    whole.update(digest(state).encode() + to_bytes(state))
print(whole.hexdigest())
"""


def test_hash_seeds_do_not_change_the_state():
    found = set()
    for seed in ("0", "1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, HERE, HERE.parent / "support"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1


# --- S1, S3, S7, S10: transitions of a key ---


def test_epochs_and_tokens_grow_and_positions_do_not_fall(logs):
    for entries in logs:
        state = WorldState(0)
        last = {}
        for entry in entries:
            transitions = apply(state, entry)
            rewound = {
                one.key
                for one in transitions
                if getattr(one.record, "rewind", False) or one.effect == "position_set"
            }
            now = {
                key: (known.epoch, state.token(key), known.position)
                for key, known in state.keys.items()
            }
            for key, (epoch, token, position) in now.items():
                if key not in last:
                    continue
                old_epoch, old_token, old_position = last[key]
                assert epoch >= old_epoch
                assert token >= old_token
                # A claim keeps its token when a new Config is accepted.
                assert (epoch == old_epoch) == (bytes(token) == bytes(old_token))
                if epoch == old_epoch and key not in rewound:
                    assert (position or 0) >= (old_position or 0)
            # A forgotten key starts again with a higher epoch than before.
            last = {**last, **now}


def test_no_renewal_ends_a_lease_earlier(logs):
    for entries in logs:
        state = WorldState(0)
        ends = {}
        for entry in entries:
            apply(state, entry)
            before, ends = (
                ends,
                {
                    (key, known.epoch): known.renewed_ms
                    + 2 * known.heartbeat_interval_ms
                    for key, known in state.keys.items()
                },
            )
            for claim, end_ms in ends.items():
                assert end_ms >= before.get(claim, end_ms)


def test_epochs_are_the_offsets_of_accepted_claims(logs):
    for entries in logs:
        state = WorldState(0)
        claims = {}
        for entry in entries:
            for one in apply(state, entry):
                if one.effect in ("claimed", "resumed"):
                    assert one.epoch == one.offset
                    claims[one.key] = one.offset
            for key, known in state.keys.items():
                assert known.epoch == claims[key]
            assert state.epochs == {k.epoch: key for key, k in state.keys.items()}


def test_grants_are_disjoint_until_a_position_is_set_or_dropped(logs):
    for entries in logs:
        state = WorldState(0)
        granted = {}
        for entry in entries:
            for one in apply(state, entry):
                if one.effect == "claimed":
                    known = state.keys[one.key]
                    if known.granted is None:  # a new key, or another topic id
                        granted[one.key] = -1
                if one.effect == "position_set":
                    granted[one.key] = -1
                if one.effect == "granted":
                    first, last = one.detail["first"], one.detail["last"]
                    assert granted.get(one.key, -1) < first <= last
                    granted[one.key] = last


def test_an_owner_is_replaced_only_when_stale_released_or_resumed(logs):
    for entries in logs:
        state = WorldState(0)
        for entry in entries:
            before = {key: (k.owner, k) for key, k in state.keys.items()}
            ages = {
                key: (known.renewed_ms, known.heartbeat_interval_ms)
                for key, (_, known) in before.items()
            }
            for one in apply(state, entry):
                if one.effect != "claimed" or one.key not in before:
                    continue
                renewed_ms, interval_ms = ages[one.key]
                was_stale = state.now_ms - renewed_ms > 2 * interval_ms
                assert before[one.key][0] is None or was_stale


# --- S6, S9: hostile bytes ---


@given(
    st.lists(st.binary(max_size=80), max_size=40),
    st.integers(0, LOGS - 1),
)
@settings(max_examples=60)
def test_hostile_bytes_move_only_the_clock(values, seed):
    entries = write_log(seed, 20)
    state = fold(entries)
    # From here on the clock stands still; this entry drops all that has expired.
    apply(state, entry_after(state, entries[-1], b""))
    before = hard_part(state)
    for value in values:
        (transition,) = apply(state, entry_after(state, entries[-1], value))
        assert transition.outcome == "undecodable"
        assert hard_part(state) == before
    assert len(state.soft.undecodable) <= RING_ENTRIES_MAX
    assert all(len(noted.head) <= 64 for noted in state.soft.undecodable)


def entry_after(state, last, value):
    return LogEntry(
        offset=state.next_offset,
        leader_epoch=state.leader_epoch,
        timestamp_ms=last.timestamp_ms,
        timestamp_type=last.timestamp_type,
        value=value,
    )


def hard_part(state):
    back = from_bytes(to_bytes(state))
    back.next_offset = 0
    return to_bytes(back)


def test_no_log_grows_the_state_beyond_its_limits(logs):
    for entries in logs:
        state = WorldState(0)
        for entry in entries:
            apply(state, entry)
            if state.config is None:
                assert (state.keys, state.groups) == ({}, {})
                continue
            limit = state.config.limit
            assert len(state.keys) <= limit("keys")
            assert len(state.groups) <= limit("groups")
            assert len(state.over) <= limit("operations")
            locked = {key for keys in state.locked.values() for key in keys}
            assert locked == {key for key, known in state.keys.items() if known.lock}
            assert all(state.keys[key].owner is None for key in locked)
            waiting = len(state.awaiting) + state.stale_count
            assert len(state.forgettable) == waiting <= 2 * len(state.keys)
            assert state.awaiting <= state.keys.keys()
            assert set(state.dirty) <= {*state.keys, *state.groups, ERAS}
            assert len(state.eras) <= ERAS_MAX
            for group in state.groups.values():
                assert len(group.over) <= 64
                pause = group.pause
                assert pause is None or len(pause.incarnations) <= 16
                assert pause is None or state.append_time_ms < pause.until_ms
                assert all(
                    state.append_time_ms < each.until_ms for each in group.scoped
                )
                assert len(group.scoped_operations) <= 8
            assert len(state.scopes) <= limit("operations")
            rows = [group.scoped_operations for group in state.groups.values()]
            assert len(state.scopes) == sum(map(len, rows))


def test_a_group_is_kept_only_with_keys_operations_or_settings(logs):
    for entries in logs:
        state = fold(entries)
        for name, group in state.groups.items():
            keys = sum(key.group_id == name for key in state.keys)
            assert group.key_count == keys
            has_rest = group.over or group.unresolved or group.fences or group.planned
            assert keys or group.lapses_ms or has_rest or group.settings


@pytest.mark.parametrize("kind", ["keys", "groups", "operations", "members"])
def test_a_flood_of_new_names_stays_within_the_limits(kind):
    # Records of random logs, each with new names.
    limits = {name: value for name, value in TINY.items() if value is not None}
    log = Log(**limits)
    rng = random.Random(kind)
    for number in range(300):
        naive = Naive(0)
        author = Author(rng.choice, naive)
        naive.config = {"generation": 1, "era": 1, "K": 1, "limits": {}}
        line = author.write()
        data = line.get("payload", {}).get("data", {})
        if "group_id" in data and kind in ("groups", "operations"):
            data["group_id"] = f"group-{number}"
        if "topic" in data:
            data["topic"] = f"topic-{number}"
        if "op_id" in data:
            data["op_id"] = number.to_bytes(16, "big").hex()
        if kind == "members" and "incarnation" in data:
            data["incarnation"] = number.to_bytes(16, "big").hex()
        entry = object_to_entry(line)[1]
        log.append(entry.value, after=rng.randint(0, 9), kind=LOG_APPEND_TIME)
    assert len(log.state.keys) <= TINY["keys"]
    assert len(log.state.groups) <= TINY["groups"]
    assert len(log.state.over) <= TINY["operations"]
    assert len(log.state.soft.members) <= TINY["keys"]


def test_a_config_above_the_known_level_halts_at_its_offset(logs):
    for entries in logs[:20]:
        state = fold(entries)
        if state.config is None:
            continue
        log = Log()
        log.state = state
        now = state.config
        beyond = config(
            now.generation + 1,
            era=now.era + 1,
            format_id=now.format_id,
            cluster_id=now.cluster_id,
            k=now.partition_count,
            level=3,
        )
        offset = state.next_offset
        # A Config whose era is too far ahead of the clock is refused.
        transition = log.one(beyond, at=1_000 * now.era, epoch=state.leader_epoch)
        assert transition.outcome == "halted"
        assert (state.halted.offset, state.next_offset) == (offset, offset)


def test_an_operation_that_has_ended_never_pauses_again(logs):
    for entries in logs:
        state = WorldState(0)
        over = {}
        for entry in entries:
            for one in apply(state, entry):
                record = one.record
                if one.effect == "paused":
                    # An operation that the partition no longer remembers, because
                    # others ended since, may pause again (PROTOCOL 13).
                    group = state.groups[record.group_id]
                    now = {op_id for _, op_id in group.over}
                    assert record.op_id not in over.get(record.group_id, set()) & now
            over = {
                name: {op_id for _, op_id in group.over}
                for name, group in state.groups.items()
            }
