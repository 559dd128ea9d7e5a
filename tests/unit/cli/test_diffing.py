"""What differs between two worlds, and nothing else."""

import json

import attrs
from logkit import Log, claim, config, pause

from kafka_marshal.protocol.snapshot import from_bytes, to_bytes
from kafka_marshal_cli.diffing import difference


def copied(state):
    return from_bytes(to_bytes(state))


def log():
    made = Log()
    made.append(claim())
    return made


def shown(one, other):
    """Return what, name and field of each row; it must be JSON."""
    rows = difference(one, other)
    assert json.loads(json.dumps(rows)) == rows
    return [(row["what"], row["name"], row["field"]) for row in rows]


def test_equal_worlds_do_not_differ():
    state = log().state
    assert difference({0: state}, {0: copied(state)}) == []
    assert difference({}, {}) == []


def test_a_partition_that_one_of_them_lacks():
    state = log().state
    (row,) = difference({0: state}, {})
    assert (row["what"], row["field"], row["other"]) == ("partition", "digest", None)
    assert difference({}, {0: state})[0]["one"] is None


def test_each_field_of_a_key_that_differs():
    before, after = log().state, log().state
    (key,) = after.keys
    after.keys[key] = attrs.evolve(after.keys[key], position=7, topic_id=b"\x01")
    after.rebuild_derived()
    rows = difference({0: before}, {0: after})
    name = f"{key.group_id}/{key.topic}/{key.partition}"
    assert [(r["what"], r["name"], r["field"], r["one"], r["other"]) for r in rows] == [
        ("key", name, "position", None, 7),
        ("key", name, "topic_id", None, "01"),
    ]


def test_a_key_and_a_group_that_only_one_has():
    empty = Log().state
    found = shown({0: empty}, {0: log().state})
    assert ("header", "", "next_offset") in found
    assert {what for what, _, _ in found} == {"header", "key", "group"}
    assert ("group", "g", "known") in found
    assert {what for what, _, _ in shown({0: log().state}, {0: empty})} == {
        "header",
        "key",
        "group",
    }


def test_a_pause():
    other = log()
    other.append(pause(other.state.append_time_ms + 10_000))
    assert ("group", "g", "pause") in shown({0: log().state}, {0: other.state})


def test_a_config():
    other = log()
    other.append(config(2, era=2))
    found = shown({0: log().state}, {0: other.state})
    assert ("config", "", "generation") in found
    assert ("config", "", "heartbeat_interval_ms") not in found
