"""An admin reads the outcome of a set position, and ends an open one."""

import pytest
from countkit import commit_at_an_earlier_home
from enginekit import fold
from logkit import OP as PLAIN_OP
from positionkit import (
    FOR_MS,
    HOME,
    KEYS,
    NEW,
    OLD,
    OP,
    TIMEOUT_MS,
    K,
    die_at,
    following,
    is_paused,
    key,
    locks,
    place_of,
    positions,
    set_all,
    written,
)

from kafka_marshal.admin.finishing import (
    UNKNOWN,
    Resolution,
    open_operations,
    require_resolved,
)
from kafka_marshal.admin.pausing import Sender
from kafka_marshal.errors import ClaimRejected
from kafka_marshal.protocol.items import Verdict
from kafka_marshal.protocol.records import DecidePosition, ResolvePosition
from kafka_marshal.protocol.resolving import ABORTED, COMMITTED, UNDECIDED

LATER = "1f" * 16


@pytest.fixture(name="cluster")
def _cluster():
    return written()


def resolution(cluster, name="other", *, op=OP, **changes):
    follower = following(cluster, name)
    return Resolution(
        follower,
        Sender(name),
        group_id="g",
        op_id=op,
        config=cluster.config,
        **changes,
    )


def worlds(cluster):
    return [fold(cluster, t) for t in range(K)]


# --- outcomes


def test_an_operation_that_never_began_is_undecided(cluster):
    assert resolution(cluster).outcome == UNDECIDED


def test_a_committed_operation_stays_committed_after_later_ones(cluster):
    """Its verdict is replaced; keys that no later operation has set show the commit."""
    set_all(cluster)
    set_all(cluster, 7, op=LATER, count=1)
    assert fold(cluster, HOME).groups["g"].verdict.op_id.hex() == LATER
    assert resolution(cluster).outcome == COMMITTED
    result = resolution(cluster, "again").finish(TIMEOUT_MS)
    assert result.outcome == COMMITTED
    assert result.moved == {key(p).topic_partition: (OLD, NEW) for p in range(1, KEYS)}


def test_the_outcome_is_unknown_once_all_keys_were_set_again(cluster):
    set_all(cluster)
    set_all(cluster, 7, op=LATER)
    one = resolution(cluster)
    assert one.outcome == UNKNOWN
    ends = [world.next_offset for world in worlds(cluster)]
    assert one.finish(TIMEOUT_MS).outcome == UNKNOWN
    assert [world.next_offset for world in worlds(cluster)] == ends


def test_an_operation_that_ended_after_the_last_commit_was_aborted(cluster):
    set_all(cluster, 7, op=LATER)
    resolution(cluster).finish(TIMEOUT_MS)
    assert resolution(cluster, "again").outcome == ABORTED


def test_the_outcome_of_an_abort_before_a_later_commit_is_unknown(cluster):
    resolution(cluster).finish(TIMEOUT_MS)
    set_all(cluster, 7, op=LATER)
    assert resolution(cluster, "again").outcome == UNKNOWN


def test_an_operation_with_locks_after_a_later_commit_is_aborted(cluster):
    """An operation is decided only after earlier commits have left no locks."""
    die_at(cluster, DecidePosition)
    cluster.run(3 * FOR_MS)
    one = resolution(cluster)
    home = one._world(HOME).groups["g"]
    home.over = ((1, bytes.fromhex(OP)),)
    home.verdict = Verdict(bytes.fromhex(LATER), bytes(16), 1, 5, is_resolved=True)
    assert one.outcome == ABORTED


def test_an_at_most_once_key_is_reported_as_moved_from_its_granted_end(cluster):
    set_all(cluster)
    one = resolution(cluster)
    moved = one._world(place_of(0)).keys[key(0)]
    moved.previous = moved.previous._replace(granted=OLD + 3)
    assert one.finish(TIMEOUT_MS).moved[key(0).topic_partition] == (OLD + 3, NEW)


# --- ends of open operations


def test_finish_aborts_an_undecided_operation_without_its_plan(cluster):
    die_at(cluster, DecidePosition)
    assert locks(cluster)
    result = resolution(cluster).finish(TIMEOUT_MS)
    assert (result.outcome, result.moved) == (ABORTED, {})
    assert positions(cluster) == [OLD] * KEYS
    assert (locks(cluster), is_paused(cluster)) == ([], False)


def test_finish_applies_a_committed_operation_without_its_plan(cluster):
    die_at(cluster, ResolvePosition)
    steps = []
    result = resolution(cluster, on_progress=steps.append).finish(TIMEOUT_MS)
    assert result.moved == {key(p).topic_partition: (OLD, NEW) for p in range(KEYS)}
    assert positions(cluster) == [NEW] * KEYS
    assert [(each.step, each.left_count) for each in steps] == [
        ("resolve", K - 1),
        ("resolve", 1),
    ]


def test_the_home_is_resolved_last(cluster):
    die_at(cluster, ResolvePosition, at=HOME)
    assert fold(cluster, HOME).groups["g"].unresolved is not None
    steps = []
    resolution(cluster, on_progress=steps.append).finish(TIMEOUT_MS)
    assert [each.left_count for each in steps] == [0, 1]
    assert fold(cluster, HOME).groups["g"].unresolved is None


# --- open operations


def test_an_operation_is_open_until_all_partitions_are_resolved(cluster):
    assert open_operations(worlds(cluster)) == ()
    die_at(cluster, DecidePosition)
    (one,) = open_operations(worlds(cluster), "g")
    assert (one.op_id, one.is_committed, one.client_id) == (OP, False, "admin")
    assert one.locked == tuple(key(p) for p in range(KEYS))
    assert open_operations(worlds(cluster), "other") == ()
    cluster.run(3 * FOR_MS)
    resolution(cluster).finish(TIMEOUT_MS)
    assert open_operations(worlds(cluster)) == ()


def test_a_commit_is_open_until_the_home_is_resolved(cluster):
    die_at(cluster, ResolvePosition, at=HOME)
    (one,) = open_operations(worlds(cluster))
    assert one.is_committed
    with pytest.raises(ClaimRejected, match="marshal groups finish g") as raised:
        require_resolved(worlds(cluster))
    assert raised.value.reason == "busy"
    resolution(cluster).finish(TIMEOUT_MS)
    require_resolved(worlds(cluster))


def test_a_commit_unresolved_at_an_earlier_home_is_resolved_there():
    """PROTOCOL 8.5: the present home knows no commit, and refuses to resolve one."""
    cluster, group_id, home = commit_at_an_earlier_home()
    follower = following(cluster, "other")
    (found,) = open_operations(follower.worlds, group_id)
    one = Resolution(
        follower,
        Sender("other"),
        group_id=group_id,
        op_id=found.op_id,
        config=cluster.config,
    )
    assert bytes.fromhex(found.op_id) == PLAIN_OP
    assert one.finish(TIMEOUT_MS).outcome == COMMITTED
    assert fold(cluster, home).groups[group_id].verdict.is_resolved
    assert open_operations(following(cluster, "later").worlds, group_id) == ()
