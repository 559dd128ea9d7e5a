"""Rows of claims, pauses, members and groups, from a world."""

import msgspec
import pytest
from changekit import Change, group_at
from logkit import (
    KEY,
    START_MS,
    H,
    Log,
    beat,
    claim,
    fence,
    ident,
    member,
    offer,
    pause,
    release,
    schedule,
)

from kafka_marshal import Key, Token, World
from kafka_marshal.engine.pause_notes import PauseNote
from kafka_marshal.ports import PlainRecord
from kafka_marshal.protocol.applied import Applied, applied_to_tags
from kafka_marshal.protocol.state import ACCEPTED, why_to_tags
from kafka_marshal_cli import presenters
from kafka_marshal_cli.presenters import record_object

OTHER = Key("g", "t", 1)
UNTIL = 2_000_000


def world_of(*logs, elapsed_ms=0, notes=None):
    elapsed = dict.fromkeys(range(len(logs)), elapsed_ms)
    states = [log.state for log in logs]
    return World(states, elapsed, read_at_ms=5, notes=notes)


def test_as_of_has_the_read_time_and_the_offsets():
    assert presenters.as_of(world_of(Log(), Log(1, configured=False))) == {
        "time_ms": 5,
        "offsets": {"0": 1, "1": 0},
    }


def test_a_claim_row_has_an_age_and_an_estimated_age():
    log = Log()
    log.claimed()
    log.append(b"", after=10)
    (row,) = presenters.claim_rows(world_of(log, elapsed_ms=2 * H))
    assert (row["age_ms"], row["freshness"]) == (10, "fresh")
    assert (row["age_estimate_ms"], row["freshness_estimate"]) == (2 * H + 10, "stale")
    assert row["coordinating_partition"] == 0


@pytest.mark.parametrize(
    ("named", "count"),
    [({}, 1), ({"group_id": "marshal"}, 1), ({"topic": "/checkpoint"}, 1),
     ({"group_id": "g"}, 1), ({"topic": "t"}, 1), ({"group_id": "x"}, 0)],
)  # fmt: skip
def test_claims_of_the_protocol_are_listed_only_if_named(named, count):
    log = Log()
    log.claimed()
    log.append(claim("w", key=Key("marshal", "/checkpoint", 0)))
    rows = presenters.claim_rows(world_of(log), **named)
    assert len(rows) == count
    assert all(
        row["group_id"] == named.get("group_id", row["group_id"]) for row in rows
    )
    if not named:
        assert [row["group_id"] for row in presenters.group_rows(world_of(log))] == [
            "g"
        ]


def test_a_released_claim_has_no_age():
    log = Log()
    log.append(release(log.claimed(), 5))
    (row,) = presenters.claim_rows(world_of(log, elapsed_ms=9))
    assert (row["owner"], row["age_ms"], row["age_estimate_ms"]) == (None, None, None)
    assert (row["freshness_estimate"], row["position"]) == (None, 5)


def test_lag_needs_position_and_log_end():
    log = Log()
    epoch = log.claimed("c1")
    log.append(beat(epoch, 5))
    log.claimed("c2", key=Key("g", "t", 1))
    rows = presenters.claim_rows(world_of(log))
    t0, t1 = sorted(presenters.data_partitions(rows))

    def presented(ends):
        found = presenters.with_lag(rows, ends)
        return [(row["log_end_offset"], row["lag"]) for row in found]

    assert presented({t0: 12, t1: 9}) == [(12, 7), (9, None)], "one has no position yet"
    assert presented({t0: 3}) == [(3, 0), (None, None)], "no look back, none unknown"


@pytest.mark.parametrize("ending", ["released", "stale"])
def test_a_position_beyond_the_log_end_that_nobody_owns_has_no_lag(ending):
    """The topic was deleted and created again while the group was stopped."""
    log = Log()
    epoch = log.claimed("c1")
    log.append(beat(epoch, 5))
    if ending == "released":
        log.append(release(epoch, 5))
    else:
        log.append(b"", after=3 * H)
    rows = presenters.claim_rows(world_of(log))
    (place,) = presenters.data_partitions(rows)
    (row,) = presenters.with_lag(rows, {place: 3})
    assert (row["position"], row["log_end_offset"], row["lag"]) == (5, 3, None)


def test_a_claim_row_has_the_reason_of_its_last_change():
    log = Log()
    why = why_to_tags("fair: share 1 of 2; free")
    log.append(msgspec.structs.replace(claim(), tags=why))
    (row,) = presenters.claim_rows(world_of(log))
    assert row["why"] == {
        "change": "claimed",
        "client_id": "c1",
        "offset": 1,
        "reason": "fair: share 1 of 2; free",
    }
    (*_, cell) = [c.cell(row) for c in presenters.claim_columns(has_why=True)[-1:]]
    assert cell == "fair: share 1 of 2; free"
    log.append(msgspec.structs.replace(release(1), reason="lagging: lag 9"))
    (row,) = presenters.claim_rows(world_of(log))
    (*_, cell) = [c.cell(row) for c in presenters.claim_columns(has_why=True)[-1:]]
    assert (row["why"]["change"], cell) == (
        "released",
        "lagging: lag 9 (released by c1)",
    )
    log.state.soft.notes.clear()
    (row,) = presenters.claim_rows(world_of(log))
    (*_, cell) = [c.cell(row) for c in presenters.claim_columns(has_why=True)[-1:]]
    assert (row["why"], cell) == (None, "-")


def test_a_claim_row_shows_a_handoff_offer_until_it_ends():
    log = Log(level=2)
    log.append(offer(log.claimed()))
    (row,) = presenters.claim_rows(world_of(log))
    since_ms = log.state.now_ms
    assert (row["offer"]["phase"], row["offer"]["since_ms"]) == ("offered", since_ms)
    cell = presenters.claim_columns(has_handoff=True)[-1].cell
    assert cell(row) == "offered: c2"
    log.append(b"", after=H)
    (row,) = presenters.claim_rows(world_of(log))
    assert (row["offer"], cell(row)) == (None, "-"), "it has ended"


def test_claims_are_sorted_and_filtered_by_group_and_topic():
    log = Log()
    for key in (KEY, OTHER, Key("h", "u", 0)):
        log.claimed(key=key)
    world = world_of(log)
    names = [
        (r["group_id"], r["topic"], r["partition"])
        for r in presenters.claim_rows(world)
    ]
    assert names == [("g", "t", 0), ("g", "t", 1), ("h", "u", 0)]
    assert len(presenters.claim_rows(world, group_id="g")) == 2
    assert len(presenters.claim_rows(world, topic="u")) == 1
    assert presenters.claim_rows(world, group_id="g", topic="u") == []


def test_a_scheduled_pause_begins_and_ends_by_the_estimated_time():
    log = Log(level=2)
    log.append(schedule(START_MS + 10, START_MS + 30, op=ident("later")))
    log.append(pause(START_MS + 5, op=ident("now")))
    later, now = world_of(log).pauses()
    assert (later["state"], later["begin_ms"], now["state"]) == (
        *("scheduled", START_MS + 10),
        "paused",
    )
    (row,) = presenters.group_rows(world_of(log))
    assert (row["paused_until_ms"], row["next_pause"]) == (START_MS + 5, later)
    log.append(b"", after=5)
    (row,) = presenters.group_rows(world_of(log, elapsed_ms=5))
    assert (row["paused_from_ms"], row["next_pause"]) == (START_MS + 10, None)
    assert world_of(log, elapsed_ms=25).pauses() == []


def test_a_pause_is_listed_once_for_all_partitions():
    logs = [Log(k=2), Log(1, k=2)]
    for log, until in zip(logs, (UNTIL, UNTIL + 1), strict=True):
        log.append(pause(until))
    notes = {("g", ident("op")): PauseNote("deploy", "ada")}
    found = world_of(*logs, notes=notes)
    (row,) = found.pauses("g")
    assert (row["until_ms"], row["partitions_count"]) == (UNTIL + 1, 2)
    assert (row["client_id"], row["reason"]) == ("admin", "deploy")
    assert row["person"] == "ada"
    assert world_of(*logs).pauses("h") == []


@pytest.mark.parametrize(
    ("silent_ms", "state"), [(2 * H, "active"), (2 * H + 1, "silent")]
)
def test_a_member_is_active_for_two_intervals(silent_ms, state):
    log = Log()
    log.append(member())
    (row,) = presenters.member_rows(world_of(log, elapsed_ms=silent_ms))
    assert (row["state"], row["silent_estimate_ms"]) == (state, silent_ms)
    assert (row["host"], row["topics"], row["claims_count"]) == ("host", ["t"], 0)


@pytest.mark.parametrize(
    ("silent_ms", "state", "lag"), [(2 * H, "leaving", 2), (2 * H + 1, "left", None)]
)
def test_a_draining_member_has_left_after_two_intervals(silent_ms, state, lag):
    """A member that has left has no lag, although the log still grows."""
    log = Log()
    tags = applied_to_tags(Applied(applied={0: 1}, began={0: 0}))
    log.append(msgspec.structs.replace(member(), draining=True, tags=tags))
    log.append(b"")
    (row,) = presenters.member_rows(world_of(log, elapsed_ms=silent_ms))
    assert (row["state"], row["log_lag"]) == (state, lag)
    assert row["applied_offsets"] == {"0": 1}


def test_an_owner_that_never_announced_itself_is_unregistered():
    log = Log()
    log.append(member("c1"))
    log.claimed("c1")
    log.claimed("c2", key=OTHER)
    rows = presenters.member_rows(world_of(log), group_id="g")
    summary = [(row["client_id"], row["state"], row["claims_count"]) for row in rows]
    assert summary == [("c1", "active", 1), ("c2", "unregistered", 1)]
    assert presenters.member_rows(world_of(log), group_id="h") == []


def test_the_labels_column_appears_only_with_labels_to_show():
    """Labels that only the engine uses are in the row, but not in the table."""
    log = Log()
    log.append(member("c1", labels={"plans": "1"}))
    rows = presenters.member_rows(world_of(log))
    columns = presenters.client_columns(rows, has_group=True)
    assert "LABELS" not in [column.header for column in columns]
    labels = {"rack": "r1", "page": "http://host-1:8080", "fails:t": "0,3"}
    log.append(member("c2", labels={"plans": "1", **labels}))
    rows = presenters.member_rows(world_of(log))
    assert [row["labels"] for row in rows] == [{"plans": "1"}, {"plans": "1", **labels}]
    *_, shown = presenters.client_columns(rows, has_group=False)
    assert shown.header == "LABELS"
    texts = [shown.cell(row) for row in rows]
    assert texts == ["-", "fails:t=0,3, page=http://host-1:8080, rack=r1"]


def test_the_log_lag_column_appears_only_with_applied_offsets():
    """The lag is the largest over the partitions of the view."""
    logs = [Log(k=2), Log(1, k=2)]
    home = next(log for log in logs if log.append(member("c1"))[0].outcome == ACCEPTED)
    rows = presenters.member_rows(world_of(*logs))
    assert (rows[0]["log_lag"], rows[0]["log_read_count"]) == (None, None)
    columns = presenters.client_columns(rows, has_group=True)
    assert "LOG LAG" not in [column.header for column in columns]
    tags = applied_to_tags(Applied(applied={0: 1, 1: 2, 2: 9}, began={0: 0, 1: 2}))
    home.append(msgspec.structs.replace(member("c2"), tags=tags))
    for _ in range(5):
        logs[1].append(b"")
    rows = presenters.member_rows(world_of(*logs))
    ends = {log.state.partition: log.state.next_offset for log in logs}
    assert rows[1]["log_lag"] == ends[1] - 2
    assert rows[1]["log_read_count"] == 1
    assert rows[1]["applied_offsets"] == {"0": 1, "1": 2, "2": 9}
    assert rows[1]["began_offsets"] == {"0": 0, "1": 2}
    *_, lag, read = presenters.client_columns(rows, has_group=False)
    assert (lag.header, read.header) == ("LOG LAG", "LOG READ")
    assert [lag.cell(row) for row in rows] == ["-", str(ends[1] - 2)]
    assert [read.cell(row) for row in rows] == ["-", "1"]


def test_two_incarnations_of_a_client_are_two_rows():
    log = Log()
    log.append(member())
    log.append(member(inc=ident("again")))
    rows = presenters.member_rows(world_of(log))
    assert [row["incarnation"] for row in rows] == [
        ident("again").hex(),
        ident("c1").hex(),
    ]


def test_groups_with_members_claims_or_a_pause_are_listed():
    log = Log()
    log.append(member("c1", group="announced"))
    log.claimed(key=Key("claimed", "t", 0))
    log.append(
        release(log.claimed(key=Key("claimed", "t", 1)), key=Key("claimed", "t", 1))
    )
    log.append(pause(UNTIL, group="paused"))
    rows = {row["group_id"]: row for row in presenters.group_rows(world_of(log))}
    assert list(rows) == ["announced", "claimed", "paused"]
    assert rows["announced"]["members_count"] == 1
    assert (rows["claimed"]["owned_count"], rows["claimed"]["claims_count"]) == (1, 2)
    assert rows["paused"]["paused_until_ms"] == UNTIL
    assert rows["paused"]["paused_by"] == "admin"


def test_a_claim_of_a_stale_owner_is_not_counted_as_owned():
    log = Log()
    log.claimed()
    (row,) = presenters.group_rows(world_of(log, elapsed_ms=3 * H))
    assert (row["owned_count"], row["claims_count"]) == (0, 1)


def test_a_heartbeat_resets_the_age_of_a_claim():
    log = Log()
    epoch = log.claimed()
    log.append(beat(epoch, 3), after=H)
    (row,) = presenters.claim_rows(world_of(log))
    assert (row["age_ms"], row["position"]) == (0, 3)


def test_a_claimed_group_is_known_and_keys_have_texts():
    log = Log()
    log.append(claim())
    assert presenters.is_known(world_of(log), "g")
    assert not presenters.is_known(world_of(log), "h")
    assert presenters.key_texts([KEY, OTHER]) == ["t-0", "t-1"]


# --- records


def record(offset=0, *, key=None, value=b"v"):
    token = Token(1, 0, 5)
    return PlainRecord("t", 3, offset, 99, 0, key, value, token=token)


def test_a_record_is_shown_as_a_json_object():
    assert record_object(record(7, value="日\x1b".encode()), 1234) == {
        "topic": "t",
        "partition": 3,
        "offset": 7,
        "token": "1.0.5",
        "timestamp": 99,
        "handed_out_ms": 1234,
        "key": None,
        "value": "日\x1b",
    }


def test_bytes_that_are_not_text_are_base64():
    found = record_object(record(key=b"\xff", value=b"\xfe\x00"), 0)
    assert (found["key_base64"], found["value_base64"]) == ("/w==", "/gA=")
    assert "key" not in found
    assert "value" not in found


def test_a_fenced_client_is_listed_while_it_owns_partitions():
    log = Log(level=2)
    epoch = log.claimed("c1")
    log.append(member("c1"))
    log.append(fence("c1"))
    log.append(fence("c2"))
    world = world_of(log)
    found = [(row["client_id"], row["state"]) for row in presenters.member_rows(world)]
    assert found == [("c1", "fenced")]
    log.append(release(epoch))
    assert presenters.member_rows(world) == []


# --- while the partition count changes (PROTOCOL 10)


def moved(step):
    """Return the row of a moving key after some steps, and its source and target."""
    change = Change(2, 4)
    (key,) = change.moving()
    change.claimed(key)
    steps = (
        change.fence,
        lambda: change.released(key, position=7),
        lambda: change.imported(key),
        lambda: change.reclaimed(key),
    )
    for each in steps[:step]:
        each()
    world = World(change.states, {}, read_at_ms=5)
    (row,) = presenters.claim_rows(world)
    columns = presenters.claim_columns(rows=[row], has_why=True)
    names = [column.header for column in columns]
    assert ("MOVING" in names) == (row["moving"] is not None)
    places = [log.state.partition for log in (change.place(key), change.target(key))]
    return row, places


@pytest.mark.parametrize(
    ("step", "at", "moving", "why"),
    [
        (0, 0, None, "-"),
        (1, 0, "draining", "-"),
        (2, 0, "final", "- (released by c1)"),
        (3, 1, None, "imported"),
        (4, 1, None, "-"),
    ],
)
def test_a_key_that_moves_is_one_row(step, at, moving, why):
    row, places = moved(step)
    assert row["coordinating_partition"] == places[at]
    text = "-" if moving is None else f"{moving}, to {places[1]}"
    assert presenters.moving_text(row) == text
    assert presenters.why_text(row) == why


def test_a_group_counts_a_key_that_moves_once():
    change = Change(2, 4)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.tick(3 * H)
    change.imported(key)
    change.reclaimed(key)
    (row,) = presenters.group_rows(World(change.states, {}))
    assert (row["claims_count"], row["owned_count"]) == (1, 1)


def test_a_member_in_the_old_and_new_home_is_one_row():
    change = Change(2, 4)
    group = group_at(1, 2, to_home=3, to_count=4)
    change.logs[1].append(member(group=group))
    change.fence()
    change.logs[1].append(b"", after=3 * H)
    change.logs[3].append(member(group=group, seq=1))
    (row,) = presenters.member_rows(World(change.states, {}))
    assert (row["client_id"], row["state"]) == ("c1", "active")
