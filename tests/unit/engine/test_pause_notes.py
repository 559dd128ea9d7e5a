"""Notes of pauses and directives: person, reason and begin."""

import pytest
from logkit import OP, START_MS, Log, direct, ident, pause, schedule
from msgspec.structs import replace

from kafka_marshal.engine.pause_notes import (
    By,
    PauseNote,
    directive_rows,
    joined,
    pause_rows,
)
from kafka_marshal.engine.replica import Replica
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.state import WorldState

UNTIL = START_MS + 50_000
NAME = ("g", OP)
ADA, BOB = person_to_tags("ada"), person_to_tags("bob")


def replicas(*records):
    """Return replicas of two coordinating partitions that have read these records."""
    found = {}
    for t in (0, 1):
        log = Log(t, k=2, level=SECOND_LEVEL)
        for number, record in enumerate(records):
            log.append(replace(record, seq=number + 1), after=1)
        found[t] = Replica(t, now_ms=0)
        for entry in log.entries:
            found[t].fold(entry, 0)
    return found


def rows(found, elapsed_ms=0):
    return pause_rows(
        [each.world for each in found.values()],
        joined({t: each.notes for t, each in found.items()}),
        elapsed_ms=lambda _: elapsed_ms,
    )


def test_a_pause_is_noted_with_person_reason_and_begin():
    first = replace(pause(UNTIL), reason="deploy", tags=ADA)
    again = pause(UNTIL + 1, client="other")
    again = replace(again, reason="still", tags=BOB)
    (row,) = rows(replicas(first, again))
    assert row == {
        "group_id": "g",
        "op_id": OP.hex(),
        "state": "paused",
        "client_id": "admin",
        "person": "ada",
        "renewed_by": "bob",
        "reason": "deploy",
        "begin_ms": START_MS + 1,
        "until_ms": UNTIL + 1,
        "topics": [],
        "partitions_count": 2,
    }


def test_a_pause_that_ended_is_not_listed_even_in_an_idle_log():
    found = replicas(pause(START_MS + 50))
    assert len(rows(found, 48)) == 1
    assert rows(found, 49) == []


def test_a_scheduled_pause_has_its_person_before_it_begins():
    begin_ms = START_MS + 1_000
    plan = replace(schedule(begin_ms, UNTIL), reason="rest", tags=ADA)
    (row,) = rows(replicas(plan))
    assert (row["state"], row["begin_ms"]) == ("scheduled", begin_ms)
    assert (row["person"], row["reason"]) == ("ada", "rest")


def test_notes_outlast_a_refold():
    replica = replicas(replace(pause(UNTIL), tags=ADA))[0]
    replica.begin(WorldState(0), 0)
    (note,) = replica.notes.by_name.values()
    assert note[:3] == (None, "ada", START_MS + 1)


def test_a_renewal_does_not_set_the_begin_of_a_pause_from_a_kept_state():
    known = replicas(replace(pause(UNTIL), tags=ADA))[0].world
    replica = Replica(0, now_ms=0)
    replica.begin(known, 0)
    replica.notes.take(replace(pause(UNTIL), tags=ADA), START_MS + 9)
    (note,) = replica.notes.by_name.values()
    assert (*note[:3], note.renewed_by) == (None, "ada", None, None)


def test_a_renewal_by_another_client_does_not_set_the_person():
    known = replicas(replace(pause(UNTIL), tags=ADA))[0].world
    replica = Replica(0, now_ms=0)
    replica.begin(known, 0)
    replica.notes.take(replace(pause(UNTIL, client="other"), tags=BOB), START_MS + 9)
    assert replica.notes.by_name[NAME].person is None
    assert replica.notes.by_name[NAME].renewed_by == "bob"


def test_a_kept_state_has_the_notes_of_its_open_pauses_alone():
    plan = schedule(START_MS + 1_000, UNTIL, op=ident("plan"))
    over = pause(UNTIL, op=ident("over"), group="h")
    end = pause(0, op=ident("over"), group="h")
    before = replicas(replace(pause(UNTIL), tags=ADA), plan, over, end)[0]
    notes = before.notes.of(before.world)
    assert set(notes) == {NAME, ("g", ident("plan"))}
    assert len(before.notes.by_name) == 3
    after = Replica(0, now_ms=0)
    after.begin(before.world, 0, notes=notes)
    assert rows({0: after}) == rows({0: before})
    assert rows({0: after})[0]["person"] == "ada"
    known = PauseNote(person="own")
    after.notes.begin(before.world, {NAME: known})
    assert after.notes.by_name[NAME].person == "ada", "what was read here stays"


def test_renewed_by_names_only_another_client():
    first, own = replace(pause(UNTIL), tags=ADA), pause(UNTIL + 2)
    (row,) = rows(replicas(first, own))
    assert (row["client_id"], row["renewed_by"]) == ("admin", None)
    (row,) = rows(replicas(first, pause(UNTIL + 1, client="other")))
    assert (row["client_id"], row["renewed_by"]) == ("admin", "other")


def test_a_refused_record_or_an_end_does_not_set_renewed_by():
    first = replace(pause(UNTIL), tags=ADA)
    scoped = schedule(0, UNTIL + 1, client="other", scope={"t": ()})
    (row,) = rows(replicas(first, scoped))
    assert (row["renewed_by"], row["until_ms"]) == (None, UNTIL)
    notes = replicas(first)[0].notes
    notes.take(pause(0, client="other"), START_MS + 9)
    assert notes.by_name[NAME].renewed_by is None
    # Entries that are read before they are judged may be refused.
    found = replicas(first)
    found[0].notes.take(replace(scoped, tags=BOB), START_MS + 9)
    (row,) = rows(found)
    assert row["renewed_by"] is None


def test_a_pause_without_notes_has_neither_person_nor_begin():
    found = replicas(replace(pause(UNTIL), tags=ADA))
    for each in found.values():
        each.notes.forget([NAME])
    (row,) = rows(found)
    assert (row["person"], row["reason"], row["begin_ms"]) == (None, None, None)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param(("a", "ada"), None, id="the same person and client"),
        pytest.param(("b", "ada"), None, id="the same person at another client"),
        pytest.param(("a", None), None, id="the same client without a person"),
        pytest.param(("b", "bob"), "bob", id="another person"),
        pytest.param(("b", None), "b", id="another client without a person"),
    ],
)
def test_if_other_names_the_person_or_client_that_differs(last, expected):
    assert By(*last).if_other(By("a", "ada")) == expected


def directives(found, *, elapsed_ms=0, group_id=None):
    return directive_rows(
        [each.world for each in found.values()],
        joined({t: each.notes for t, each in found.items()}),
        elapsed_ms=lambda _: elapsed_ms,
        group_id=group_id,
    )


def test_directives_are_listed_with_person_reason_and_times():
    first = replace(
        direct(host="m1", until=UNTIL, group="marshal"), reason="reboot", tags=ADA
    )
    again = direct(
        host="m1", until=UNTIL + 1, group="marshal", admin="other", inc=ident("other")
    )
    found = replicas(first, replace(again, reason="still", tags=BOB))
    row = {
        "group_id": None,
        "op_id": OP.hex(),
        "action": "drain",
        "client": None,
        "host": "m1",
        "client_id": "admin",
        "person": "ada",
        "reason": "reboot",
        "begin_ms": START_MS + 1,
        "until_ms": UNTIL + 1,
        "partitions_count": 2,
    }
    assert directives(found) == directives(found, group_id="g") == [row]
    assert directives(found, elapsed_ms=UNTIL) == []


def test_a_directive_of_a_group_is_listed_with_that_group_only():
    found = replicas(direct("c1", until=UNTIL))
    (row,) = directives(found, group_id="g")
    assert (row["client"], row["person"], row["partitions_count"]) == ("c1", None, 1)
    assert directives(found, group_id="h") == []


def test_notes_of_a_directive_come_only_from_its_first_record():
    record = replace(direct(until=UNTIL), reason="reboot", tags=ADA)
    replica = next(each for each in replicas(record).values() if each.world.directed)
    kept = replica.notes.of(replica.world)
    assert [note.person for note in kept.values()] == ["ada"]
    again = Replica(replica.world.partition, now_ms=0)
    again.begin(replica.world, 0)
    later = direct(until=UNTIL, admin="other", inc=ident("other"))
    again.notes.take(replace(later, reason="still", tags=BOB), START_MS + 9)
    (note,) = again.notes.by_name.values()
    assert (note.reason, note.person) == (None, None)
