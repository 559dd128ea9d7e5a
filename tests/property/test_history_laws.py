"""Invariants of the history of every log, whatever records it has."""

import itertools
import random

import pytest
from author import write_log
from logkit import KEY, START_MS, H, Log, batch, beat, claim, config, pause, release
from msgspec.structs import asdict

from kafka_marshal.history.historian import Historian
from kafka_marshal.history.rows import (
    OPEN,
    Attempt,
    GrantRow,
    Handoff,
    Interval,
    PauseRow,
)
from kafka_marshal.protocol import fold_beats
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key
from kafka_marshal.spark.audit.folding import from_checkpoint, to_checkpoint

LOGS = 150
SAMPLE_MS = 3_000


def folded_rows(entries, *, saved_at=()):
    """Return all rows of a log; before the entries ``saved_at``, save and restore."""
    world, historian, rows = WorldState(0), Historian(sample_ms=SAMPLE_MS), []
    for at, entry in enumerate(entries):
        if at in saved_at:
            world, historian = from_checkpoint(
                to_checkpoint(world, historian), partition=0
            )
        transitions = apply(world, entry)
        rows += historian.take(world, entry, transitions=transitions)
        if world.halted is not None:
            break
    return world, historian, rows


@pytest.fixture(scope="module")
def stories():
    return [folded_rows(write_log(seed)) for seed in range(LOGS)]


def fleet_log(chance):
    """Return a log that consists mostly of heartbeats, as those of fleets do."""
    log, epochs = Log(), {}
    keys = [Key("g", "t", number) for number in range(4)]
    while len(log.entries) < 200:
        key, after = chance.choice(keys), chance.choice([0, 1, H // 9, H // 9, H])
        client = f"c{key.partition}"
        epoch, position = epochs.get(key), chance.choice([None, *range(5)])
        kind = chance.choice(["beat"] * 30 + ["batch", "rewind", "release", "claim"])
        if epoch is None:
            (won,) = log.append(claim(client, key=key), after=after)
            epochs[key] = won.offset if won.effect == "claimed" else None
        elif kind == "release":
            log.append(release(epoch, position, client=client, key=key), after=after)
            epochs[key] = None
        elif kind == "claim":
            log.append(claim("other", key=key), after=chance.choice([after, 3 * H]))
            epochs = dict.fromkeys(keys)
        elif kind == "batch":
            log.append(batch((epoch, position), client=client), after=after)
        else:
            record = beat(
                *(epoch, position),
                client=client,
                key=key,
                rewind=kind == "rewind" and position is not None,
            )
            log.append(record, after=after)
    return log.entries


@pytest.mark.parametrize("loop", ["python", "compiled"])
@pytest.mark.parametrize("author", [write_log, lambda n: fleet_log(random.Random(n))])
def test_a_run_of_entries_gives_the_rows_of_single_entries(monkeypatch, author, loop):
    if loop == "python":
        monkeypatch.setattr(fold_beats, "compiled", None)
    beats_count = 0

    class Watched(Historian):
        def _run_of_beats(self, world, beats):
            nonlocal beats_count
            beats_count += len(beats)
            return super()._run_of_beats(world, beats)

    for seed in range(40):
        entries, chance = author(seed), random.Random(seed)
        world, whole, rows = folded_rows(entries)
        state, historian = WorldState(0), Watched(sample_ms=SAMPLE_MS)
        found, at = [], 0
        while at < len(entries):
            run = entries[at : at + chance.randint(1, 20)]
            found += historian.take_run(state, run)
            at += len(run)
        assert found == rows, seed
        assert asdict(historian) == asdict(whole), seed
        assert digest(state) == digest(world), seed
    assert beats_count > (1_000 if author is not write_log else 0)


def claims_of(historian, rows):
    found = {}
    for row in (*rows, *historian.open_rows()):
        if isinstance(row, Interval):
            found.setdefault(row.key, []).append(row)
    return found


def test_open_rows_are_the_claims_and_pauses_in_force(stories):
    for world, historian, _ in stories:
        open_rows = [r for r in historian.open_rows() if isinstance(r, Interval)]
        owned = {
            key: (*known.owner, known.epoch, known.position)
            for key, known in world.keys.items()
            if known.owner is not None
        }
        assert owned == {
            row.key: (row.client_id, row.incarnation, row.token.offset, row.position)
            for row in open_rows
        }
        rows = [each for each in historian.open_rows() if isinstance(each, PauseRow)]
        pauses = [
            (name, pause.op_id, pause.until_ms)
            for name, group in world.groups.items()
            for pause in group.pauses
        ]
        found = [(row.group_id, row.op_id, row.until_ms) for row in rows]
        assert sorted(found) == sorted(pauses)


def test_claims_of_a_key_do_not_overlap_and_their_tokens_grow(stories):
    for _, historian, rows in stories:
        for claims in claims_of(historian, rows).values():
            for before, after in itertools.pairwise(claims):
                assert before.end.offset <= after.start.offset
                assert before.token < after.token
            assert all(row.ending != OPEN for row in claims[:-1])
            assert sum(r.stray_count + r.steps_back_count for r in claims) == 0


def test_each_claim_has_a_won_attempt_and_takeovers_wait_2h(stories):
    for _, historian, rows in stories:
        claims = claims_of(historian, rows)
        won = [r for r in rows if isinstance(r, Attempt) and r.outcome == "won"]
        assert len(won) == sum(map(len, claims.values()))
        handed = [row for row in rows if isinstance(row, Handoff)]
        assert len(handed) <= len(won) - len(claims)
        for row in handed:
            if row.ending == "taken_over":
                assert row.gap_ms > 2 * row.heartbeat_interval_ms


def test_grants_of_a_topic_are_disjoint(stories):
    for _, _, rows in stories:
        reached = {}
        for row in rows:
            if isinstance(row, GrantRow) and row.outcome == "granted":
                # A set position discards earlier grants, as does a Reset.
                place = (row.key, row.topic_id, row.resets_count)
                assert row.first > reached.get(place, -1)
                reached[place] = row.last


def test_the_logs_have_rows_of_every_kind(stories):
    kinds = {type(row).__name__ for _, _, rows in stories for row in rows}
    assert kinds >= {"Interval", "Attempt", "Handoff", "GrantRow", "PauseRow"}
    endings = {
        row.ending
        for _, _, rows in stories
        for row in rows
        if isinstance(row, Interval)
    }
    assert endings == {"released", "resumed", "taken_over"}


def test_a_historian_restored_from_checkpoints_gives_the_same_rows(stories):
    for seed in range(40):
        _, whole, rows = stories[seed]
        entries = write_log(seed)
        for step in (1, 7):
            places = range(0, len(entries), step)
            _, chain, parted = folded_rows(entries, saved_at=places)
            assert parted == rows, seed
            assert chain == whole, seed


# --- runs


def history_of(log, change, *, in_runs):
    """Return historian, rows and strays after the tracked claim was falsified."""
    state, historian = WorldState(0), Historian(sample_ms=10 * H)
    rows = list(historian.take_run(state, log.entries[:2]))
    interval = historian.tracks[KEY].interval
    if change == "epoch":
        historian.tracks[KEY].epoch += 1
    elif change == "incarnation":
        interval.incarnation = bytes(16)
    elif change == "ended":
        interval.end = interval.start
    rest = log.entries[2:]
    if in_runs:
        rows += historian.take_run(state, rest)
    else:
        for entry in rest:
            transitions = apply(state, entry)
            rows += historian.take(state, entry, transitions=transitions)
    return historian, rows, interval.stray_count


@pytest.mark.parametrize("change", [None, "epoch", "incarnation", "ended"])
def test_a_run_counts_beats_that_do_not_fit_the_tracked_claim(change):
    log = Log()
    epoch = log.claimed()
    for position in (5, 6, 6, 9):
        log.append(beat(epoch, position), after=7 * H // 4)
    log.append(b"?")
    found = history_of(log, change, in_runs=True)
    assert found == history_of(log, change, in_runs=False)
    assert found[-1] == (0 if change is None else 4)


def test_a_run_ends_where_the_fold_halts():
    log = Log()
    log.append(beat(log.claimed()))
    halting = log.append(config(2, era=2, level=9))[0].offset
    log.append(beat(1))
    state, historian = WorldState(0), Historian()
    list(historian.take_run(state, log.entries))
    assert historian.entries_count == halting + 1
    assert list(historian.take_run(state, log.entries)) == []


def test_a_pause_that_runs_out_within_a_run_has_its_row():
    log = Log(level=2)
    epoch = log.claimed()
    log.append(pause(START_MS + H))
    for _ in range(3):
        log.append(beat(epoch), after=H // 2)
    state, historian = WorldState(0), Historian()
    rows = list(historian.take_run(state, log.entries))
    (row,) = [each for each in rows if isinstance(each, PauseRow)]
    assert (row.ending, row.end.offset) == ("ran_out", 4)
