"""What holds of the history of every log, whatever was written."""

import itertools

import pytest
from author import write_log

from kafka_marshal.history.historian import Historian
from kafka_marshal.history.rows import (
    OPEN,
    Attempt,
    GrantRow,
    Handoff,
    Interval,
    PauseRow,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.spark.audit.folding import from_checkpoint, to_checkpoint

LOGS = 150
SAMPLE_MS = 3_000


def folded_rows(entries, *, saved_at=()):
    """Return all rows of a log; the fold is put away and taken up again on the way."""
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


def claims_of(historian, rows):
    found = {}
    for row in (*rows, *historian.open_rows()):
        if isinstance(row, Interval):
            found.setdefault(row.key, []).append(row)
    return found


def test_open_rows_are_the_claims_of_the_world(stories):
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


def test_claims_of_a_key_follow_one_another(stories):
    for _, historian, rows in stories:
        for claims in claims_of(historian, rows).values():
            for before, after in itertools.pairwise(claims):
                assert before.end.offset <= after.start.offset
                assert before.token < after.token
            assert all(row.ending != OPEN for row in claims[:-1])
            assert sum(r.stray_count + r.steps_back_count for r in claims) == 0


def test_every_claim_was_won_and_every_next_one_handed_on(stories):
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
                # A position that was set discards earlier grants, as a Reset does.
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


def test_a_chain_of_runs_reports_the_rows_of_one_run(stories):
    for seed in range(40):
        _, whole, rows = stories[seed]
        entries = write_log(seed)
        for step in (1, 7):
            places = range(0, len(entries), step)
            _, chain, parted = folded_rows(entries, saved_at=places)
            assert parted == rows, seed
            assert chain.to_bytes() == whole.to_bytes(), seed
