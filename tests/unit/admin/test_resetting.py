"""Resets of groups in a cluster: executed, undone and finished."""

import msgspec
import pytest
from adminkit import ResettingAdmin, planned
from enginekit import H
from positionkit import (
    KEYS,
    NEW,
    OLD,
    OP,
    TIMEOUT_MS,
    die_at,
    locks,
    positions,
    written,
)

from kafka_marshal.admin.group_reset import PositionSpec
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    PositionError,
)
from kafka_marshal.protocol.records import DecidePosition, ResolvePosition
from kafka_marshal.protocol.types import TopicPartition

PLACES = tuple(TopicPartition("t", each) for each in range(KEYS))


@pytest.fixture(name="cluster")
def _cluster():
    return written()


def executed(cluster, plan, name="admin"):
    return ResettingAdmin(cluster, name).execute(plan)


def test_a_plan_is_executed_and_mirrored_to_kafka(cluster):
    result = executed(cluster, planned(cluster))
    assert (result.outcome, result.mirror_error) == ("committed", None)
    assert result.moved == dict.fromkeys(PLACES, (OLD, NEW))
    assert positions(cluster) == [NEW] * KEYS
    assert cluster.kafka.groups["g"] == dict.fromkeys(PLACES, NEW)


def test_a_reset_is_committed_although_kafka_refuses_the_mirror(cluster):
    admin = ResettingAdmin(cluster)

    def commit(*_, **__):
        raise CoordinationError("the group has members of Kafka's protocol")

    admin._data.commit = commit
    result = admin.execute(planned(cluster))
    assert (result.outcome, positions(cluster)) == ("committed", [NEW] * KEYS)
    assert "members" in result.mirror_error


def undo(cluster, op_id, **options):
    return ResettingAdmin(cluster, "undoing").plan_undo(op_id, **options)


def test_an_undo_shows_and_restores_the_positions_before(cluster):
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
    plan = undo(cluster, op_id, partial=True)
    assert [row.partition for row in plan.partitions] == [("other", 0)]


def test_a_reset_of_a_group_without_positions_cannot_be_undone(cluster):
    plan = ResettingAdmin(cluster, "new").plan_reset(
        "h", PositionSpec.latest(), topics=["t"]
    )
    op_id = executed(cluster, plan, "new").op_id
    with pytest.raises(ClaimRejected, match="no positions before") as raised:
        undo(cluster, op_id)
    assert raised.value.reason == "unknown_position"


def test_a_stored_plan_of_a_topic_that_was_created_again_is_refused(cluster):
    stored = planned(cluster).positions
    cluster.kafka.recreate_topic("t", KEYS)
    with pytest.raises(ClaimRejected, match=r"created again.*marshal groups finish g;"):
        ResettingAdmin(cluster, "again").describe_plan(stored)


def test_a_position_beyond_the_log_end_is_not_restored(cluster):
    executed(cluster, planned(cluster, PositionSpec.latest()))
    op_id = executed(cluster, planned(cluster, PositionSpec.earliest()), "two").op_id
    for place in PLACES:
        cluster.kafka.truncate(place, end=5, leader=0)
    with pytest.raises(PositionError, match=r"its log were lost.*marshal groups reset"):
        undo(cluster, op_id)


def test_an_unknown_operation_cannot_be_undone(cluster):
    with pytest.raises(ClaimRejected, match="not committed") as raised:
        undo(cluster, OP)
    assert raised.value.reason == "unknown_operation"
    for text in ("the last one", OP[:8]):
        with pytest.raises(ConfigurationError, match="32 hex digits"):
            undo(cluster, text)


@pytest.mark.parametrize(
    ("kind", "outcome", "expected"),
    [(DecidePosition, "aborted", OLD), (ResolvePosition, "committed", NEW)],
)
def test_finish_commits_or_aborts_an_open_operation(cluster, kind, outcome, expected):
    die_at(cluster, kind)
    cluster.run(20)
    (result,) = ResettingAdmin(cluster, "other").finish("g")
    assert (result.op_id, result.outcome) == (OP, outcome)
    assert (positions(cluster), locks(cluster)) == ([expected] * KEYS, [])
    mirrored = dict.fromkeys(PLACES, NEW) if kind is ResolvePosition else {}
    assert cluster.kafka.groups.get("g", {}) == mirrored
    assert ResettingAdmin(cluster, "late").finish("g") == ()


def test_the_wait_for_the_drain_is_bounded_by_default(cluster):
    admin = ResettingAdmin(cluster)
    found = {}

    def run(self, timeout_ms, *, drain_ms):
        found["drain_ms"] = drain_ms
        raise CoordinationError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kafka_marshal.admin.resetting.SetPosition.run", run)
        with pytest.raises(CoordinationError):
            admin.execute(planned(cluster))
    assert found["drain_ms"] == 2 * H + TIMEOUT_MS


@pytest.mark.parametrize(("limit_ms", "for_ms"), [(None, 30_000), (900, 900)])
def test_the_pause_is_no_longer_than_max_pause_ms(cluster, limit_ms, for_ms):
    limits = msgspec.structs.replace(cluster.config.limits, max_pause_ms=limit_ms)
    admin = ResettingAdmin(cluster)
    config = msgspec.structs.replace(cluster.config, limits=limits)
    admin._settled = lambda: config
    found = []

    class Never:
        def __init__(self, *_, **fields):
            found.append(fields["for_ms"])
            raise CoordinationError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kafka_marshal.admin.resetting.SetPosition", Never)
        with pytest.raises(CoordinationError):
            admin.execute(planned(cluster))
    assert found == [for_ms]
