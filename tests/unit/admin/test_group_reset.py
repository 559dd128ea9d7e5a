"""Plans of resets of a group: their partitions, positions, files and errors."""

import attrs
import msgspec
import numpy as np
import pytest
from adminkit import ResettingAdmin, planned
from enginekit import fold
from positionkit import (
    KEYS,
    NEW,
    OLD,
    OP,
    K,
    written,
)

from kafka_marshal.admin import group_reset
from kafka_marshal.admin.finishing import ResetResult
from kafka_marshal.admin.group_reset import (
    Facts,
    PositionSpec,
    describe_plan,
    partitions_of,
    plan_reset,
    read_plan,
    read_positions,
    topics_of_group,
    write_plan,
)
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    PositionError,
)
from kafka_marshal.ports import LogRange, TopicInfo
from kafka_marshal.protocol.items import Growth
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, TopicPartition

PLACE = TopicPartition("t", 0)
PLACES = tuple(TopicPartition("t", each) for each in range(KEYS))
TOPIC_ID = b"i" * 16


@pytest.fixture(name="cluster")
def _cluster():
    return written()


# --- which partitions


def test_partitions_that_the_cluster_does_not_have_are_refused():
    topics = {"a": TopicInfo(2, TOPIC_ID)}
    assert partitions_of({"a": None}, topics, group_id="g") == (("a", 0), ("a", 1))
    assert partitions_of({"a": frozenset({1})}, topics, group_id="g") == (("a", 1),)
    with pytest.raises(ConfigurationError, match="no partition 2"):
        partitions_of({"a": frozenset({1, 2})}, topics, group_id="g")
    forget = "does not exist.* marshal claims forget g --topic b$"
    with pytest.raises(ConfigurationError, match=forget):
        partitions_of({"b": None}, topics, group_id="g")


def test_a_reset_without_topics_covers_all_topics_of_the_group(cluster):
    worlds = [fold(cluster, t) for t in range(K)]
    assert topics_of_group(worlds, "g") == ("t",)
    with pytest.raises(ClaimRejected, match="marshal groups list"):
        topics_of_group(worlds, "unknown")
    assert [each.partition for each in planned(cluster).partitions] == list(PLACES)


# --- which positions


@pytest.mark.parametrize(
    ("spec", "after"),
    [
        (PositionSpec.earliest(), 0),
        (PositionSpec.latest(), 20),
        (PositionSpec.current(), OLD),
        (PositionSpec.to_offset(0), 0),
        (PositionSpec.shift_by(-4), OLD - 4),
        (PositionSpec.shift_by(4), OLD + 4),
        (PositionSpec.to_time(1_000), 7),
    ],
)
def test_each_rule_gives_its_new_position(cluster, spec, after):
    plan = planned(cluster, spec, topics=["t:0"])
    (row,) = plan.partitions
    assert (row.partition, row.before, row.after) == (PLACE, OLD, after)
    assert (row.lag_before, row.lag_after) == (20 - OLD, 20 - after)
    assert plan.to_csv() == f"t,0,{after}\n"
    (target,) = plan.positions.targets
    assert (target.position, len(target.topic_id)) == (after, 32)


def test_an_executed_plan_shows_the_positions_that_it_replaced(cluster):
    plan = planned(cluster, topics=["t:0,1"])
    moved = {PLACES[0]: (OLD + 1, NEW), PLACES[1]: (None, NEW)}
    done = ResetResult(op_id=OP, group_id="g", outcome="committed", moved=moved)
    assert [row.before for row in plan.executed(done)] == [OLD + 1, OLD]
    assert plan.executed(None) == plan.partitions


@pytest.mark.parametrize("early_ms", [-1, -2, -(10**15)])
def test_a_time_before_1970_is_before_all_records(early_ms):
    """Kafka takes a timestamp of -1 for the end of the log."""
    assert PositionSpec.to_time(early_ms) == PositionSpec.to_time(0)


def test_given_positions_select_the_partitions_to_reset(cluster):
    spec = PositionSpec.from_offsets({PLACES[2]: 3, PLACES[0]: 4})
    plan = planned(cluster, spec)
    assert [(r.partition, r.after) for r in plan.partitions] == [
        (PLACES[0], 4),
        (PLACES[2], 3),
    ]


@pytest.mark.parametrize(
    ("ends", "spec", "partitions", "unordered"),
    [
        pytest.param(None, PositionSpec.latest(), {3}, {3}, id="announced"),
        pytest.param(None, PositionSpec.latest(), {1}, {1}, id="new-has-begun"),
        pytest.param((9, 9, 10), PositionSpec.current(), {3, 4, 5}, {5}, id="behind"),
        pytest.param((9, 9, 9), PositionSpec.earliest(), {0, 3}, {0, 3}, id="both"),
        pytest.param((9, 9, 9), PositionSpec.to_offset(2), {1}, {1}, id="old-back"),
        pytest.param((9, 9, 9), PositionSpec.to_offset(2), {4}, set(), id="new-back"),
        pytest.param((9, 9, 9), PositionSpec.latest(), {0, 3}, set(), id="passed"),
    ],
)
def test_a_plan_notes_partitions_whose_key_order_a_reset_loses(
    cluster, ends, spec, partitions, unordered
):
    """The topic grew from 3 to 6 partitions; all positions are 9 (PROTOCOL 9.10)."""
    growth = Growth("t", 3, 6, TOPIC_ID, offset=0, ends=ends)
    worlds = [fold(cluster, t) for t in range(K)]
    worlds[0].growths = (growth, growth._replace(topic="other"))
    places = [PLACES[each] for each in sorted(partitions)]
    facts = Facts(
        topics={"t": TopicInfo(6, TOPIC_ID)},
        ranges=dict.fromkeys(places, LogRange(0, 20)),
    )
    plan = plan_reset(
        worlds, spec, group_id="g", op_id=OP, partitions=places, facts=facts
    )
    again = describe_plan(worlds, plan.positions, facts=facts)
    for found in (plan, again):
        rows = found.partitions
        assert {r.partition.partition for r in rows if r.loses_order} == unordered
        assert {r.partition.partition for r in rows if r.note} == unordered
        assert found.unordered == tuple(PLACES[each] for each in sorted(unordered))


def test_a_time_after_the_last_record_gives_the_log_end(cluster):
    admin = ResettingAdmin(cluster, offset=None)
    plan = admin.plan_reset("g", PositionSpec.to_time(1))
    assert {row.after for row in plan.partitions} == {20}


@pytest.mark.parametrize(
    ("wanted", "clamped"), [(21, 20), (2, 3)], ids=["beyond the end", "below the start"]
)
def test_a_position_outside_of_its_log_is_refused_or_clamped(cluster, wanted, clamped):
    cluster.kafka.delete_records(PLACE, before=3)
    spec = PositionSpec.to_offset(wanted)
    with pytest.raises(PositionError, match=r"positions 3 to 20.*clamp=True") as raised:
        planned(cluster, spec, topics=["t:0"])
    assert (raised.value.log_start, raised.value.log_end) == (3, 20)
    plan = planned(cluster, spec, topics=["t:0"], clamp=True)
    assert [(r.after, r.is_clamped) for r in plan.partitions] == [(clamped, True)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PositionSpec.to_offset("5"),
        lambda: PositionSpec.to_time(1.5),
        lambda: PositionSpec.shift_by(None),
        lambda: PositionSpec.from_offsets({PLACE: "5"}),
    ],
)
def test_a_rule_without_whole_numbers_is_refused(make):
    with pytest.raises(ConfigurationError, match="must be a whole number"):
        make()


def test_without_a_position_the_offset_committed_to_kafka_is_used(cluster):
    cluster.kafka.create_topic("new", 2)
    for partition in range(2):
        for _ in range(5):
            cluster.kafka.produce(TopicPartition("new", partition), b"x")
    cluster.kafka.groups["g"] = {TopicPartition("new", 0): 3}
    plan = planned(cluster, PositionSpec.current(), topics=["new"])
    assert [(r.before, r.after) for r in plan.partitions] == [(3, 3), (None, 5)]
    assert plan.partitions[1].lag_before is None
    with pytest.raises(ClaimRejected, match="no position to shift") as raised:
        planned(cluster, PositionSpec.shift_by(1), topics=["new:1"])
    assert raised.value.reason == "unknown_position"


def one_key(known, spec=None, *, topic_id=TOPIC_ID, committed=None, **changes):
    """Return the row of a plan for one key in a given state."""
    world = WorldState(0)
    world.keys[Key("g", "t", 0)] = known
    return plan_reset(
        [world],
        spec or PositionSpec.to_offset(NEW),
        group_id="g",
        op_id=OP,
        partitions=[PLACE],
        facts=Facts(
            topics={"t": TopicInfo(1, topic_id)},
            ranges={PLACE: LogRange(0, 20)},
            committed={PLACE: committed},
        ),
        **changes,
    )


def known_key(cluster, **changes):
    state = fold(cluster, 0)
    return attrs.evolve(next(iter(state.keys.values())), **changes)


def test_a_reset_below_the_granted_end_repeats_an_at_most_once_key(cluster):
    known = known_key(cluster, position=4, granted=6)
    plan = one_key(known)
    assert (plan.partitions[0].before, plan.repeats_count) == (6, 1)
    assert one_key(known, PositionSpec.to_offset(6)).repeats_count == 0
    assert one_key(known_key(cluster, position=4)).repeats_count == 0


def test_a_position_in_an_earlier_topic_of_the_name_is_not_used(cluster):
    known = known_key(cluster, topic_id=b"e" * 16)
    assert one_key(known).partitions[0].before is None
    known = known_key(cluster, position=None, retired_topic_ids=(b"e" * 16,))
    assert one_key(known, committed=4).partitions[0].before is None


def test_a_reset_to_a_fence_restores_the_positions_of_that_moment(cluster):
    then = WorldState(0)
    then.keys[Key("g", "t", 0)] = known_key(cluster, position=3, granted=None)
    then.keys[Key("g", "t", 1)] = known_key(cluster, position=None, granted=None)
    then.keys[Key("g", "t", 2)] = known_key(cluster, position=3, topic_id=b"e" * 16)
    then.keys[Key("other", "t", 3)] = known_key(cluster, position=3)
    plan = planned(cluster, PositionSpec.to_fence([then], "g"))
    assert [(row.partition, row.after) for row in plan.partitions] == [(PLACE, 3)]
    assert plan.positions.left_out == PLACES[1:]
    with pytest.raises(ConfigurationError, match="no position to set"):
        planned(cluster, PositionSpec.to_fence([], "g"))


# --- files


def test_a_stored_plan_is_not_overwritten_by_another(cluster, tmp_path):
    plan, other = planned(cluster).positions, planned(cluster).positions
    path = tmp_path / "plans" / "plan.json"
    write_plan(path, plan)
    assert (path.stat().st_mode & 0o777, read_plan(path)) == (0o600, plan)
    write_plan(path, plan)
    with pytest.raises(ConfigurationError, match="writable directory"):
        write_plan(path, other)
    assert read_plan(path) == plan
    with pytest.raises(ConfigurationError, match="writable directory"):
        write_plan(path / "within", plan)


def test_positions_are_read_from_csv_and_plans(cluster, tmp_path):
    plan = planned(cluster, topics=["t:0,2"])
    expected = {PLACES[0]: NEW, PLACES[2]: NEW}
    path = tmp_path / "positions"
    path.write_text(plan.to_csv() + "\n", encoding="utf-8")
    assert read_positions(path) == expected
    path.write_bytes(b"\n" + msgspec.json.format(plan.positions.to_bytes()))
    assert read_positions(path) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"t,0", "line 1"),
        (b"t,0,1\nt,x,1", "line 2"),
        (b"t,0,-1", "line 1"),
        (b"t,0,1\nt,0,2", "names t-0 again"),
        (b"\n", "no positions"),
        (b"t,0,\xff", "decode"),
        (b"{}", "not a plan"),
    ],
)
def test_a_file_without_positions_is_refused(tmp_path, text, why):
    path = tmp_path / "positions"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match=f"positions.* cannot be used.*{why}"):
        read_positions(path)


@pytest.mark.parametrize("read", [read_plan, read_positions])
def test_a_missing_file_is_refused(tmp_path, read):
    wrong = "missing' cannot be read: No such file"
    with pytest.raises(ConfigurationError, match=wrong):
        read(tmp_path / "missing")


def test_an_invalid_plan_is_refused_with_its_path(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"plan\.json' cannot be used.* not a"):
        read_plan(path)


def test_an_endless_file_is_refused(monkeypatch):
    monkeypatch.setattr(group_reset, "FILE_BYTES_MAX", 1_000)
    with pytest.raises(ConfigurationError, match="larger than 1000 bytes"):
        read_plan("/dev/zero")


# --- rules by name, and results


@pytest.mark.parametrize(
    ("rule", "value", "spec"),
    [
        pytest.param("to_earliest", True, PositionSpec.earliest(), id="earliest"),
        pytest.param("to_latest", True, PositionSpec.latest(), id="latest"),
        pytest.param("to_current", True, PositionSpec.current(), id="current"),
        pytest.param("to_offset", 5, PositionSpec.to_offset(5), id="offset"),
        pytest.param("shift_by", -5, PositionSpec.shift_by(-5), id="shift"),
        pytest.param("to_datetime", 5, PositionSpec.to_time(5), id="time"),
        pytest.param("by_duration", 5, PositionSpec.to_time(5), id="duration"),
    ],
)
def test_a_rule_is_found_by_its_name(rule, value, spec):
    assert PositionSpec.of(rule, value) == spec


def test_numpy_numbers_of_a_rule_become_python_values():
    spec = PositionSpec.to_offset(np.int64(5))
    assert (spec, type(spec.value)) == (PositionSpec.to_offset(5), int)
    spec = PositionSpec.from_offsets({("t", np.int64(0)): np.int64(7)})
    ((place, offset),) = spec.offsets.items()
    assert (type(place), place, type(offset)) == (TopicPartition, PLACE, int)
    with pytest.raises(TypeError, match="is not a partition"):
        PositionSpec.from_offsets({"t": 7})


def test_require_committed_refuses_an_aborted_reset():
    aborted = ResetResult(op_id=OP, group_id="g", outcome="aborted", moved={})
    with pytest.raises(ClaimRejected, match="was aborted: it set nothing") as refused:
        aborted.require_committed()
    assert refused.value.reason == "aborted"
    attrs.evolve(aborted, outcome="committed").require_committed()


def test_require_committed_refuses_an_unknown_outcome():
    unknown = ResetResult(op_id=OP, group_id="g", outcome="unknown", moved={})
    with pytest.raises(ClaimRejected, match="marshal groups history g") as refused:
        unknown.require_committed()
    assert refused.value.reason == "unknown"
    assert "set nothing" not in str(refused.value)
