"""Resets of a group: which positions, of what files, and with which errors."""

import attrs
import msgspec
import numpy as np
import pytest
from enginekit import H, fold
from positionkit import (
    KEYS,
    NEW,
    OLD,
    OP,
    TIMEOUT_MS,
    K,
    die_at,
    following,
    locks,
    positions,
    written,
)

from kafka_marshal.admin.finishing import ignore_progress
from kafka_marshal.admin.group_reset import (
    Facts,
    GroupResets,
    PositionSpec,
    ResetResult,
    partitions_of,
    plan_reset,
    read_plan,
    read_positions,
    topics_of_group,
    write_plan,
)
from kafka_marshal.admin.pausing import Sender
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    PositionError,
)
from kafka_marshal.ports import LogRange, TopicInfo
from kafka_marshal.protocol.records import DecidePosition, ResolvePosition
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, TopicPartition

PLACE = TopicPartition("t", 0)
PLACES = tuple(TopicPartition("t", each) for each in range(KEYS))
TOPIC_ID = b"i" * 16


class Times:
    """Finds the same offset at every time."""

    def __init__(self, offset=None):
        self.offset = offset

    def at_times(self, times_ms, timeout_ms):
        return dict.fromkeys(times_ms, self.offset)


@pytest.fixture(name="cluster")
def _cluster():
    return written()


def resets(cluster, name="admin", *, data=None, times=None):
    follower = following(cluster, name)
    return GroupResets(
        follower,
        cluster.clock.view(),
        Sender(name),
        data=data or cluster.kafka.data_log(),
        times=times or Times(),
        config=cluster.config,
        timeout_ms=TIMEOUT_MS,
    )


def planned(cluster, spec=None, *, topics=None, **changes):
    options = {"is_clamped": False, "allows_reprocess": False, **changes}
    one = resets(cluster, "planner", times=Times(7))
    return one.plan("g", spec or PositionSpec.to_offset(NEW), topics=topics, **options)


def executed(cluster, plan, name="admin", **options):
    one = resets(cluster, name, **options)
    return one.execute(
        plan.positions, reason=None, drain_ms=None, on_progress=ignore_progress
    )


# --- which partitions


def test_partitions_that_the_cluster_does_not_have_are_refused():
    topics = {"a": TopicInfo(2, TOPIC_ID)}
    assert partitions_of({"a": None}, topics) == (("a", 0), ("a", 1))
    assert partitions_of({"a": frozenset({1})}, topics) == (("a", 1),)
    with pytest.raises(ConfigurationError, match="no partition 2"):
        partitions_of({"a": frozenset({1, 2})}, topics)
    with pytest.raises(ConfigurationError, match="does not exist"):
        partitions_of({"b": None}, topics)


def test_without_topics_those_of_the_group_are_reset(cluster):
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
def test_each_rule_for_new_positions(cluster, spec, after):
    plan = planned(cluster, spec, topics=["t:0"])
    (row,) = plan.partitions
    assert (row.partition, row.before, row.after) == (PLACE, OLD, after)
    assert (row.lag_before, row.lag_after) == (20 - OLD, 20 - after)
    assert plan.to_csv() == f"t,0,{after}\n"
    (target,) = plan.positions.targets
    assert (target.position, len(target.topic_id)) == (after, 32)


@pytest.mark.parametrize("early_ms", [-1, -2, -(10**15)])
def test_a_time_before_1970_is_before_all_records(early_ms):
    """To Kafka -1 ms is the end of the log."""
    assert PositionSpec.to_time(early_ms) == PositionSpec.to_time(0)


def test_positions_of_a_file_bring_their_partitions(cluster):
    spec = PositionSpec.from_offsets({PLACES[2]: 3, PLACES[0]: 4})
    plan = planned(cluster, spec)
    assert [(r.partition, r.after) for r in plan.partitions] == [
        (PLACES[0], 4),
        (PLACES[2], 3),
    ]


def test_a_time_behind_the_last_record_is_the_end(cluster):
    one = resets(cluster, times=Times(None))
    plan = one.plan(
        "g",
        PositionSpec.to_time(1),
        topics=None,
        is_clamped=False,
        allows_reprocess=False,
    )
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
    plan = planned(cluster, spec, topics=["t:0"], is_clamped=True)
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
def test_a_rule_has_whole_numbers(make):
    with pytest.raises(ConfigurationError, match="must be a whole number"):
        make()


def test_a_partition_without_a_position_starts_where_kafka_has_it(cluster):
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


def test_at_most_once_the_grants_count(cluster):
    known = known_key(cluster, position=4, granted=6)
    plan = one_key(known)
    assert (plan.partitions[0].before, plan.repeats_count) == (6, 1)
    assert one_key(known, PositionSpec.to_offset(6)).repeats_count == 0
    assert one_key(known_key(cluster, position=4)).repeats_count == 0


def test_a_position_of_an_earlier_topic_is_none(cluster):
    known = known_key(cluster, topic_id=b"e" * 16)
    assert one_key(known).partitions[0].before is None
    known = known_key(cluster, position=None, retired_topic_ids=(b"e" * 16,))
    assert one_key(known, committed=4).partitions[0].before is None


def test_a_group_goes_back_to_where_it_was(cluster):
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


# --- executed


def test_a_plan_is_executed_and_mirrored_to_kafka(cluster):
    result = executed(cluster, planned(cluster))
    assert (result.outcome, result.mirror_error) == ("committed", None)
    assert result.moved == dict.fromkeys(PLACES, (OLD, NEW))
    assert positions(cluster) == [NEW] * KEYS
    assert cluster.kafka.groups["g"] == dict.fromkeys(PLACES, NEW)


def test_kafka_may_refuse_the_mirror(cluster):
    data = cluster.kafka.data_log()

    def commit(*_, **__):
        raise CoordinationError("the group has members of Kafka's protocol")

    data.commit = commit
    result = executed(cluster, planned(cluster), data=data)
    assert (result.outcome, positions(cluster)) == ("committed", [NEW] * KEYS)
    assert "members" in result.mirror_error


def undo(cluster, op_id, **changes):
    options = {"is_partial": False, "allows_reprocess": False, **changes}
    return resets(cluster, "undoing").plan_undo(op_id, **options)


def test_an_undo_shows_what_it_does(cluster):
    op_id = executed(cluster, planned(cluster)).op_id
    plan = undo(cluster, op_id)
    assert {(r.before, r.after, r.lag_after) for r in plan.partitions} == {
        (NEW, OLD, 20 - OLD)
    }
    assert (plan.positions.undoes, plan.group_id) == (op_id, "g")
    executed(cluster, plan, "undoing")
    assert positions(cluster) == [OLD] * KEYS


def test_the_position_of_a_topic_that_was_created_again_is_not_restored(cluster):
    cluster.kafka.create_topic("other", 1)
    cluster.kafka.produce(TopicPartition("other", 0), b"x")
    executed(cluster, planned(cluster, PositionSpec.latest(), topics=["t", "other"]))
    second = planned(cluster, PositionSpec.earliest(), topics=["t", "other"])
    op_id = executed(cluster, second, "two").op_id
    cluster.kafka.recreate_topic("t", KEYS)
    with pytest.raises(ClaimRejected, match="created again"):
        undo(cluster, op_id)
    plan = undo(cluster, op_id, is_partial=True)
    assert [row.partition for row in plan.partitions] == [("other", 0)]


def test_a_position_beyond_the_end_is_not_restored(cluster):
    executed(cluster, planned(cluster, PositionSpec.latest()))
    op_id = executed(cluster, planned(cluster, PositionSpec.earliest()), "two").op_id
    for place in PLACES:
        cluster.kafka.truncate(place, end=5, leader=0)
    with pytest.raises(PositionError, match=r"lost its end.*marshal groups reset"):
        undo(cluster, op_id)


def test_an_unknown_operation_cannot_be_undone(cluster):
    with pytest.raises(ClaimRejected, match="not committed") as raised:
        undo(cluster, OP)
    assert raised.value.reason == "unknown_operation"
    with pytest.raises(ConfigurationError, match="32 hex digits"):
        undo(cluster, "the last one")


@pytest.mark.parametrize(
    ("kind", "outcome", "expected"),
    [(DecidePosition, "aborted", OLD), (ResolvePosition, "committed", NEW)],
)
def test_open_operations_are_finished(cluster, kind, outcome, expected):
    die_at(cluster, kind)
    cluster.run(20)
    one = resets(cluster, "other")
    (result,) = one.finish("g", reason=None, on_progress=ignore_progress)
    assert (result.op_id, result.outcome) == (OP, outcome)
    assert (positions(cluster), locks(cluster)) == ([expected] * KEYS, [])
    mirrored = dict.fromkeys(PLACES, NEW) if kind is ResolvePosition else {}
    assert cluster.kafka.groups.get("g", {}) == mirrored
    assert resets(cluster, "late").finish("g", reason=None, on_progress=print) == ()


def test_the_wait_for_the_drain_is_bounded_by_default(cluster):
    one = resets(cluster)
    found = {}

    def run(self, timeout_ms, *, drain_ms):
        found["drain_ms"] = drain_ms
        raise CoordinationError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kafka_marshal.admin.group_reset.SetPosition.run", run)
        with pytest.raises(CoordinationError):
            one.execute(
                planned(cluster).positions,
                reason=None,
                drain_ms=None,
                on_progress=ignore_progress,
            )
    assert found["drain_ms"] == 2 * H + TIMEOUT_MS


@pytest.mark.parametrize(("limit_ms", "for_ms"), [(None, 30_000), (900, 900)])
def test_the_pause_is_no_longer_than_the_log_allows(cluster, limit_ms, for_ms):
    limits = msgspec.structs.replace(cluster.config.limits, max_pause_ms=limit_ms)
    one = resets(cluster)
    one._config = msgspec.structs.replace(cluster.config, limits=limits)
    found = []

    class Never:
        def __init__(self, *_, **fields):
            found.append(fields["for_ms"])
            raise CoordinationError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kafka_marshal.admin.group_reset.SetPosition", Never)
        with pytest.raises(CoordinationError):
            one.execute(
                planned(cluster).positions,
                reason=None,
                drain_ms=None,
                on_progress=ignore_progress,
            )
    assert found == [for_ms]


# --- files


def test_a_plan_is_stored_once(cluster, tmp_path):
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
        (b"t,0,\xff", "cannot be used"),
        (b"{}", "no plan"),
    ],
)
def test_a_file_without_positions_is_refused(tmp_path, text, why):
    path = tmp_path / "positions"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match=why):
        read_positions(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be used"):
        read_positions(tmp_path / "missing")


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
def test_rules_have_names(rule, value, spec):
    assert PositionSpec.of(rule, value) == spec


def test_a_rule_has_numbers_of_python():
    spec = PositionSpec.to_offset(np.int64(5))
    assert (spec, type(spec.value)) == (PositionSpec.to_offset(5), int)
    spec = PositionSpec.from_offsets({("t", np.int64(0)): np.int64(7)})
    ((place, offset),) = spec.offsets.items()
    assert (type(place), place, type(offset)) == (TopicPartition, PLACE, int)
    with pytest.raises(TypeError, match="is no partition"):
        PositionSpec.from_offsets({"t": 7})


def test_an_aborted_reset_is_refused():
    aborted = ResetResult(op_id=OP, group_id="g", outcome="aborted", moved={})
    with pytest.raises(ClaimRejected, match="was aborted: it set nothing") as refused:
        aborted.require_committed()
    assert refused.value.reason == "aborted"
    attrs.evolve(aborted, outcome="committed").require_committed()


def test_a_reset_that_ended_long_ago_may_have_set_positions():
    unknown = ResetResult(op_id=OP, group_id="g", outcome="unknown", moved={})
    with pytest.raises(ClaimRejected, match="marshal groups history g") as refused:
        unknown.require_committed()
    assert refused.value.reason == "unknown"
    assert "set nothing" not in str(refused.value)
