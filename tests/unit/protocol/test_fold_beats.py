"""The fast fold of runs of heartbeats gives the same state as the full fold."""

from copy import deepcopy

import msgspec
import pytest
from batchkit import packed
from logkit import (
    CREATE_TIME,
    KEY,
    START_MS,
    STAYS,
    H,
    Log,
    batch,
    beat,
    claim,
    config,
    decide,
    fence,
    ident,
    pause,
    release,
    schedule,
    source_log,
    stage,
)

from kafka_marshal.native import compiled
from kafka_marshal.protocol import fold_beats as module
from kafka_marshal.protocol.codec import header_of
from kafka_marshal.protocol.fold_beats import Beat, fold_beats
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP, CHECKPOINT_TOPIC
from kafka_marshal.protocol.items import Halt
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import Heartbeat
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import OFFSET_MAX, Key

OTHER = Key("g", "t", 1)
FORGET_MS = 100
BEGUN = 3  # entries of ``owned``: a Config and two claims


@pytest.fixture(params=["python", "compiled"], autouse=True)
def loop(request, monkeypatch):
    """Run each test with both loops, if one was compiled."""
    if request.param == "python":
        monkeypatch.setattr(module, "compiled", None)
    elif compiled is None:
        pytest.skip("nothing was compiled here")


def owned(**settings) -> Log:
    log = Log(**settings)
    assert log.claimed() == 1
    assert log.claimed("c2", key=OTHER) == 2
    return log


def both(log, *, begun=BEGUN) -> tuple[WorldState, int]:
    """Fold the entries from ``begun`` on with both folds, and compare.

    Returns:
        The state, and how many entries were folded as a run.
    """
    plain = WorldState(0)
    for entry in log.entries[:begun]:
        apply(plain, entry)
    state = deepcopy(plain)
    rest = log.entries[begun:]
    beats: list[Beat] = []
    stop = fold_beats(state, rest, start=0, beats=beats)
    for entry, folded in zip(rest[:stop], beats, strict=True):
        (transition,) = apply(plain, entry)
        assert transition.effect == "renewed"
        known = plain.keys[transition.key]
        at = (entry.offset, entry.timestamp_ms, known.epoch)
        assert folded == (*at, plain.now_ms, known.position)
    # Soft and derived fields are compared, too.
    assert state == plain
    assert to_bytes(state) == to_bytes(plain)
    assert digest(state) == digest(plain)
    return state, stop


def test_a_run_of_beats_is_folded_like_its_single_entries():
    log = owned()
    log.one(beat(1, 7), after=3)
    log.one(beat(2, None, client="c2", key=OTHER), after=5, offset=9)
    log.one(beat(1, 5), after=-1)
    log.one(beat(1, 8, seq=4))
    log.one(beat(1, None), after=2)
    state, stop = both(log)
    assert stop == 5
    assert state.keys[KEY].position == 8
    assert state.now_ms == START_MS + 9
    assert state.next_offset == 13
    assert state.soft.counters["renewed"] == 5


@pytest.mark.skipif(compiled is None, reason="nothing was compiled here")
def test_a_packed_run_is_folded_like_its_single_entries():
    log = owned()
    for position in range(4):
        log.one(beat(1, position), after=position)
    log.one(release(1))
    log.one(beat(2, 5, client="c2", key=OTHER), after=1)
    plain = WorldState(0)
    for entry in log.entries[:BEGUN]:
        apply(plain, entry)
    state, rest = deepcopy(plain), packed(log.entries[BEGUN:])
    assert fold_beats(plain, log.entries, start=BEGUN) == BEGUN + 4
    assert fold_beats(state, rest, start=0) == 4
    assert state == plain
    apply(state, rest[4])
    assert fold_beats(state, rest, start=5) == len(rest) == 6
    assert state == log.state


def test_the_fold_starts_at_the_given_index():
    log = owned()
    for position in range(4):
        log.one(beat(1, position), after=1)
    state = Log().state
    entries = log.entries
    for entry in entries[1:4]:
        apply(state, entry)
    assert fold_beats(state, entries[:6], start=4) == 6
    assert state.keys[KEY].position == 2
    assert fold_beats(state, entries, start=len(entries)) == len(entries)


def test_equal_timestamps_do_not_move_the_clock():
    """Also in a state from bytes, whose append time may be below that of its epoch."""
    log = owned()
    log.one(beat(1, 7), after=-2)
    log.state.append_time_ms = 0
    odd = from_bytes(to_bytes(log.state))
    plain = deepcopy(odd)
    log.one(beat(1, 8))
    assert fold_beats(odd, log.entries, start=BEGUN + 1) == BEGUN + 2
    apply(plain, log.entries[-1])
    assert odd == plain


@pytest.mark.parametrize("h", [H // 2, 2 * H])
def test_a_beat_under_another_interval_is_left_to_the_full_fold(h):
    log = owned()
    log.one(config(2, era=2, h=h))
    log.one(beat(1, 7), after=H)
    assert both(log, begun=BEGUN + 1)[1] == 0
    log.one(beat(1, 8), after=1)
    assert both(log, begun=BEGUN + 2)[1] == 1


LEFT = {
    "another record": {"what": batch((1, 9))},
    "no value": {"what": None},
    "a payload that is none": {"what": header_of(Heartbeat) + b"\x00"},
    "an epoch that no key has": {"what": beat(0, 9)},
    "an epoch of another key": {"what": beat(2, 9)},
    "another client": {"what": beat(1, 9, client="c3")},
    "another incarnation": {"what": beat(1, 9, inc=b"z" * 16)},
    "a rewind": {"what": beat(1, 2, rewind=True)},
    "CreateTime": {"what": beat(1, 9), "kind": CREATE_TIME},
    "a new leader epoch": {"what": beat(1, 9), "epoch": 5},
    "the end of time": {"what": beat(1, 9), "at": 2 * OFFSET_MAX},
}


@pytest.mark.parametrize("odd", LEFT.values(), ids=LEFT)
def test_records_other_than_plain_beats_are_left_to_the_full_fold(odd):
    log = owned()
    log.one(beat(1, 7), after=3)
    log.append(**odd)
    log.one(beat(1, 10), after=0)
    assert both(log)[1] == 1


def test_an_offset_that_goes_back_is_left_to_the_full_fold():
    log = owned()
    log.one(beat(1, 7))
    log.entries.append(log.entries[-1])
    assert both(log)[1] == 1


def test_a_value_dumped_as_undecodable_is_left_to_the_full_fold():
    log = owned()
    log.one(beat(1, 7))
    entry = msgspec.structs.replace(log.entries[-1], undecodable="as it says")
    log.entries[-1] = entry
    assert both(log)[1] == 0


def test_a_beat_of_a_released_key_is_left_to_the_full_fold():
    log = owned()
    log.one(release(1, 7))
    log.append(beat(1, 8))
    assert both(log, begun=BEGUN + 1)[1] == 0


def test_beats_of_checkpoint_writers_are_left_to_the_full_fold():
    log = owned()
    key = Key(CHECKPOINT_GROUP, CHECKPOINT_TOPIC, 0)
    assert log.claimed(key=key) == 3
    log.one(beat(1, 7))
    log.one(beat(3, None, key=key))
    assert both(log, begun=BEGUN + 1)[1] == 1


def test_no_beats_are_folded_without_a_config_or_an_append_time():
    log = Log(configured=False)
    log.append(beat(1, 7))
    assert both(log, begun=1)[1] == 0
    assert fold_beats(WorldState(0), log.entries, start=0) == 0
    timeless = owned().state
    timeless.epoch_time_ms = None
    assert fold_beats(timeless, log.entries, start=0) == 0


def test_no_beats_of_a_paused_group_are_folded():
    log = owned()
    log.one(pause(START_MS + 10))
    log.one(beat(1, 7))
    assert both(log, begun=BEGUN + 1)[1] == 0


def test_beats_of_a_fenced_client_are_left_to_the_full_fold():
    log = owned(level=2)
    log.one(fence())
    begun = len(log.entries)
    log.one(beat(2, 7, client="c2", key=OTHER), after=3)
    log.one(beat(1, 7), after=3)
    assert both(log, begun=begun)[1] == 1
    log.entries.pop(begun)
    assert both(log, begun=begun)[1] == 0


def test_beats_of_another_group_are_folded_while_one_is_paused():
    log = owned()
    log.one(pause(START_MS + 10, group="h"))
    log.one(beat(1, 7), after=9)
    log.one(beat(1, 8), after=1)
    log.one(beat(1, 9))
    state, stop = both(log, begun=BEGUN + 1)
    assert (stop, state.lapses_ms) == (1, START_MS + 10)


def test_beats_are_folded_until_a_scheduled_pause_begins():
    log = owned(level=2)
    log.one(schedule(START_MS + 10, START_MS + 20))
    log.one(beat(1, 7), after=9)
    log.one(beat(1, 8), after=1)
    log.one(beat(1, 9))
    assert both(log, begun=BEGUN + 1)[1] == 1


def test_no_beats_are_folded_where_a_pause_begins_with_the_next_entry():
    log = owned(level=2)
    log.one(pause(START_MS + 50))
    log.one(schedule(START_MS + 10, START_MS + 40, op=ident("due")))
    log.one(b"", after=10)
    log.one(pause(0, seq=1))
    log.one(beat(1, 7))
    assert both(log, begun=BEGUN + 4)[1] == 0


def test_beats_are_folded_beside_a_locked_key_and_an_unresolved_verdict():
    log = owned(level=2)
    log.one(release(1, 5))
    log.one(pause(START_MS + 10))
    assert log.outcome_of(stage((0, 2))) == "staged"
    assert log.outcome_of(decide()) == "decided"
    assert log.outcome_of(b"", after=10) == "undecodable"  # the end of the pause
    begun = len(log.entries)
    log.one(beat(2, 7, client="c2", key=OTHER), after=3)
    log.one(beat(2, 9, client="c2", key=OTHER), after=3)
    state, stop = both(log, begun=begun)
    assert stop == 2
    assert state.keys[KEY].lock is not None
    assert state.groups["g"].unresolved is not None
    log.append(beat(1, 8))
    assert both(log, begun=begun)[1] == 2


def test_no_beats_are_folded_while_the_quiet_time_of_a_reset_may_end():
    log = owned()
    log.state.quiet_until_ms = START_MS + 5
    log.state.note_next_end()
    log.one(beat(1, 7))
    before = to_bytes(log.state)
    assert fold_beats(log.state, log.entries, start=BEGUN) == BEGUN
    assert to_bytes(log.state) == before


def test_no_beats_are_folded_in_a_halted_partition():
    log = owned()
    log.state.halted = Halt(3, 9)
    assert fold_beats(log.state, owned().entries, start=0) == 0


def test_a_run_ends_where_a_silent_key_is_dropped():
    """PROTOCOL 4.9: each entry may drop keys."""
    log = owned(forget_ms=FORGET_MS)
    log.one(release(2, None, client="c2", key=OTHER))
    log.one(beat(1, 7), after=FORGET_MS)
    log.one(beat(1, 8), after=1)
    log.one(beat(1, 9), after=1)
    assert OTHER not in log.state.keys
    state, stop = both(log, begun=BEGUN + 1)
    assert stop == 1
    assert OTHER in state.keys
    assert both(log, begun=BEGUN + 3)[1] == 1


def test_a_run_begins_once_all_silent_keys_are_dropped():
    log = owned(forget_ms=FORGET_MS)
    many = [Key("g", "t", number) for number in range(10, 22)]
    for key in many:
        epoch = log.claimed("c2", key=key)
        log.one(release(epoch, None, client="c2", key=key))
    begun = len(log.entries)
    log.one(beat(1, 7), after=FORGET_MS + 1)
    log.one(beat(1, 8))
    log.one(beat(1, 9))
    # The first beat drops eight keys, the second the others.
    assert both(log, begun=begun)[1] == 0
    assert both(log, begun=begun + 1)[1] == 0
    assert both(log, begun=begun + 2)[1] == 1


def test_a_run_ends_at_a_claim_and_leaves_beats_of_the_earlier_epoch():
    log = owned()
    log.one(beat(1, 7))
    log.one(claim("c3"), after=2 * H + 1)
    log.append(beat(1, 8))
    assert both(log)[1] == 1
    assert both(log, begun=BEGUN + 2)[1] == 0


def test_a_run_ends_at_a_heartbeat_of_the_excepted_epoch():
    log = owned()
    for epoch, client, key in ((2, "c2", OTHER), (2, "c2", OTHER), (1, "c1", KEY)):
        log.append(beat(epoch, 5, client=client, key=key), after=1)
    state = WorldState(0)
    for entry in log.entries[:BEGUN]:
        apply(state, entry)
    rest = log.entries[BEGUN:]
    assert fold_beats(deepcopy(state), rest, start=0) == 3
    assert fold_beats(deepcopy(state), rest, start=0, except_epoch=2) == 0
    assert fold_beats(state, rest, start=0, except_epoch=1) == 2
    assert (state.keys[KEY].position, state.keys[OTHER].position) == (None, 5)


def test_no_beats_are_folded_while_the_partition_count_changes():
    log, _, epoch = source_log()
    other = Log(level=2)
    other.append(beat(epoch, key=STAYS), offset=9)
    assert fold_beats(log.state, other.entries[-1:], start=0) == 0
