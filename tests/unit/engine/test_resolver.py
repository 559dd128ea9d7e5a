"""Members finish a set position whose admin is gone (PROTOCOL 8.5)."""

import pytest
import variants
from enginekit import H, fold, lines, spec, world
from positionkit import (
    FOR_MS,
    HOME,
    KEYS,
    NEW,
    OLD,
    TIMEOUT_MS,
    K,
    die_at,
    is_paused,
    key,
    locks,
    operation,
    place_of,
    positions,
    write_key,
)

from kafka_marshal.engine.awaited_ends import RETRY_MS
from kafka_marshal.errors import ClaimRejected, CoordinationError
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    DecidePosition,
    ReleaseGroup,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import ACCEPTED, WorldState
from simulator.fakestore import AppendFate

ELSEWHERE = "elsewhere"
# A random part of an interval, and three steps of records.
SOON_MS = 2 * H


@pytest.fixture(name="cluster")
def _cluster():
    cluster = world(partitions=K, records=(20,) * KEYS)
    for partition in range(KEYS):
        write_key(cluster, partition)
    return cluster


def member(cluster, name="m", *, group_id=ELSEWHERE, **rest):
    node = cluster.node(name, group_id=group_id, **rest)
    cluster.run(40)
    assert node.engine.is_ready
    return node


def resolves(cluster):
    """Return each Resolve in the log: partition, time, record."""
    found = []
    for t in range(K):
        for stored in cluster.kafka.log(cluster.place(t)).records:
            record = decode(stored.value)
            if isinstance(record, ResolvePosition):
                found.append((t, stored.timestamp_ms, record))
    return found


def settle(cluster, limit_ms):
    cluster.run_until(lambda: not is_unresolved(cluster), limit_ms)


def is_unresolved(cluster):
    group = fold(cluster, HOME).groups.get("g")
    has_verdict = group is not None and group.unresolved is not None
    return has_verdict or bool(locks(cluster))


def reported(node):
    return [each.fields["outcome"] for each in node.observer.named("position_resolved")]


# --- outcomes


def test_a_commit_is_finished_by_a_member_of_any_group(cluster):
    node = member(cluster)
    die_at(cluster, ResolvePosition)
    settle(cluster, SOON_MS)
    assert positions(cluster) == [NEW] * KEYS
    assert not is_paused(cluster)
    sent = resolves(cluster)
    assert {each.client_id for *_, each in sent} == {"m"}
    home_offset = fold(cluster, HOME).groups["g"].verdict.offset
    assert {(each.commit, each.decided) for *_, each in sent} == {(True, home_offset)}
    cluster.run(H)
    assert reported(node) == ["committed"]


def test_members_wait_a_quarter_of_an_interval_for_the_admin(cluster, monkeypatch):
    """Then members wait for a random part of the rest."""
    node, drawn = member(cluster), []

    def least(limit):
        drawn.append(limit)
        return 0

    monkeypatch.setattr(node.engine.context.ports.entropy, "below", least)
    die_at(cluster, ResolvePosition)
    (decided_ms,) = [
        line.time_ms
        for line in lines(cluster, HOME)
        if isinstance(line.record, DecidePosition)
    ]
    settle(cluster, SOON_MS)
    assert min(at for _, at, _ in resolves(cluster)) >= decided_ms + H // 4
    assert H - H // 4 in drawn


def test_the_home_is_committed_last(cluster):
    member(cluster)
    die_at(cluster, ResolvePosition)
    settle(cluster, SOON_MS)
    times = {t: at for t, at, _ in resolves(cluster)}
    assert times.pop(HOME) > max(times.values())


def test_an_undecided_operation_is_aborted_once_its_pause_has_ended(cluster):
    node = member(cluster)
    die_at(cluster, DecidePosition)
    begun_ms = cluster.clock.wall_ms()
    settle(cluster, FOR_MS + SOON_MS)
    assert positions(cluster) == [OLD] * KEYS
    sent = resolves(cluster)
    assert {each.commit for *_, each in sent} == {False}
    assert min((at, t) for t, at, _ in sent)[1] == HOME
    # The pause was renewed just before the admin died: nobody is faster than that.
    assert min(at for _, at, _ in sent) >= begun_ms + FOR_MS // 2
    cluster.run(H)
    assert reported(node) == ["aborted"]


def test_an_idle_home_is_written_to_so_that_its_pause_ends(cluster):
    """Nobody else writes there: the member's own group has another home."""
    assert home_partition(ELSEWHERE, partition_count=K) != HOME
    member(cluster)
    die_at(cluster, DecidePosition)
    end = cluster.kafka.log(cluster.place(HOME)).end
    settle(cluster, FOR_MS + SOON_MS)
    records = cluster.kafka.log(cluster.place(HOME)).read(end, end + 2)
    assert [type(decode(each.value)) for each in records] == [ResolvePosition]


def test_one_member_of_many_resolves_an_operation(cluster):
    nodes = [member(cluster, f"m{number}") for number in range(6)]
    die_at(cluster, ResolvePosition)
    settle(cluster, SOON_MS)
    per_partition = [t for t, *_ in resolves(cluster)]
    assert len(per_partition) < 2 * K
    assert positions(cluster) == [NEW] * KEYS
    cluster.run(H)
    assert [each for node in nodes for each in reported(node)] == ["committed"]


def test_a_session_of_the_group_itself_sends_the_resolves(cluster):
    node = member(cluster)
    from kafka_marshal.engine import Session
    from kafka_marshal.protocol.claiming import Claimant
    from kafka_marshal.protocol.types import Owner

    session = Session(
        node.engine.context,
        Claimant(Owner("z", b"z" * 16), "g", master=bytes(32)),
    )
    node.engine.add_session(session)
    die_at(cluster, ResolvePosition)
    settle(cluster, SOON_MS)
    assert {each.client_id for *_, each in resolves(cluster)} == {"z"}


# --- processes that resolve nothing


def test_a_live_admin_resolves_its_own_operation(cluster):
    member(cluster)
    one = operation(cluster)
    waits_ms = 3 * FOR_MS
    end_ms = cluster.clock.now_ms() + waits_ms
    one._is_drained = lambda: cluster.clock.now_ms() >= end_ms
    plain = one._decide

    def decide(timeout_ms):
        # Locked for several pauses, each renewed in time.
        more_ms = cluster.clock.now_ms() + waits_ms
        one._pause.hold_until(lambda: cluster.clock.now_ms() >= more_ms, 2 * waits_ms)
        plain(timeout_ms)

    one._decide = decide
    result = one.run(TIMEOUT_MS, drain_ms=2 * waits_ms)
    assert result.outcome == "committed"
    assert result.moved == {key(p).topic_partition: (OLD, NEW) for p in range(KEYS)}
    assert {each.client_id for *_, each in resolves(cluster)} == {"admin"}


def test_a_process_without_a_session_resolves_nothing(cluster):
    node = member(cluster)
    node.engine.remove_session(node.session)
    die_at(cluster, ResolvePosition)
    cluster.run(4 * H)
    assert resolves(cluster) == []


def test_a_failed_session_resolves_nothing(cluster):
    node = member(cluster)
    node.session.fence(CoordinationError("nothing can be written"))
    die_at(cluster, ResolvePosition)
    cluster.run(4 * H)
    assert resolves(cluster) == []


def test_nothing_is_resolved_while_a_partition_is_folded_again(cluster):
    node = member(cluster)
    die_at(cluster, ResolvePosition)
    cluster.run(40)
    node.engine.context.rebuilding.add(K - 1)
    node.engine.rebuilder._targets = {}
    cluster.run(2 * H)
    assert resolves(cluster) == []


# --- entries that must be read first


def test_no_resolve_is_sent_before_the_log_ends_are_folded(cluster):
    """A member that reads the home late lacks the verdict, and must not abort."""
    node = member(cluster)
    begun = cluster.kafka.log(cluster.place(HOME)).end
    plain = node.log.poll
    node.log.poll = lambda timeout_ms: [
        (t, entry)
        for t, entry in plain(timeout_ms)
        if t != HOME or entry.offset < begun
    ]
    die_at(cluster, ResolvePosition)
    node.log.positions, positions_of = (
        lambda: {**positions_of(), HOME: begun},
        node.log.positions,
    )
    cluster.run(6 * H)
    assert locks(cluster)
    assert resolves(cluster) == []


def test_log_ends_are_requested_again_after_an_error(cluster):
    node = member(cluster)
    die_at(cluster, ResolvePosition)
    plain, failed = node.log.end_offsets, []

    def end_offsets(timeout_ms, partitions=None):
        if len(failed) < 2:
            failed.append(timeout_ms)
            raise CoordinationError("no answer")
        return plain(timeout_ms)

    node.log.end_offsets = end_offsets
    settle(cluster, 2 * RETRY_MS + SOON_MS)
    assert len(failed) == 2
    assert positions(cluster) == [NEW] * KEYS


def changing_first_ends(node, change):
    """Change each end of the first answer about ends; return a list of the requests."""
    plain, asked = node.log.end_offsets, []

    def end_offsets(timeout_ms, partitions=None):
        asked.append(timeout_ms)
        ends = plain(timeout_ms)
        return ends if len(asked) > 1 else {t: change(end) for t, end in ends.items()}

    node.log.end_offsets = end_offsets
    return asked


def test_a_log_end_from_a_lagging_leader_does_not_count(cluster):
    node = member(cluster)
    die_at(cluster, ResolvePosition)
    asked = changing_first_ends(node, lambda end: 0)
    settle(cluster, RETRY_MS + SOON_MS)
    assert len(asked) == 2


def test_a_log_end_that_is_never_reached_is_requested_again(cluster):
    """The log was truncated below that end before the reader got there."""
    node = member(cluster)
    die_at(cluster, ResolvePosition)
    asked = changing_first_ends(node, lambda end: end + 100)
    settle(cluster, RETRY_MS + SOON_MS)
    assert len(asked) == 2
    assert positions(cluster) == [NEW] * KEYS


def test_a_member_waits_for_a_pending_request_of_log_ends(cluster):
    node = member(cluster)
    node.background.is_held = True
    die_at(cluster, ResolvePosition)
    cluster.run(2 * H)
    assert resolves(cluster) == []
    node.background.is_held = False
    node.background.run_waiting()
    settle(cluster, SOON_MS)
    assert positions(cluster) == [NEW] * KEYS


# --- partial operations


def test_a_commit_waits_for_a_partition_that_cannot_be_written(cluster):
    node = member(cluster)
    die_at(cluster, ResolvePosition)
    blocked = next(t for t in map(place_of, range(KEYS)) if t != HOME)
    plain = node.log.append

    def append(partition, value):
        is_cut = cluster.clock.now_ms() < healed_ms and partition == blocked
        cluster.fates["m"] = AppendFate(is_lost=is_cut)
        return plain(partition, value)

    node.log.append = append
    healed_ms = cluster.clock.now_ms() + 4 * H
    cluster.run(3 * H)
    assert {place_of(each.partition) for each in locks(cluster)} >= {blocked}
    assert fold(cluster, HOME).groups["g"].unresolved is not None
    settle(cluster, 3 * H)
    assert positions(cluster) == [NEW] * KEYS


def test_a_verdict_without_locks_is_resolved(cluster):
    """The admin died between the last partition and the home."""
    member(cluster)
    die_at(cluster, ResolvePosition, at=HOME)
    group = fold(cluster, HOME).groups["g"]
    assert group.unresolved is not None
    settle(cluster, SOON_MS)
    assert positions(cluster) == [NEW] * KEYS


@pytest.mark.parametrize("kind", [ReleaseGroup, StagePosition, DecidePosition])
def test_a_member_aborts_an_operation_whose_admin_died_undecided(cluster, kind):
    member(cluster)
    die_at(cluster, kind)
    cluster.run(FOR_MS + SOON_MS)
    assert locks(cluster) == []
    assert positions(cluster) == [OLD] * KEYS


def test_owners_continue_at_the_staged_position(cluster):
    node = member(cluster, "c", group_id="g", spec=spec())
    die_at(cluster, ResolvePosition, drain_ms=10 * H)
    cluster.run_until(lambda: len(node.held) == KEYS, 3 * FOR_MS)
    assert {h.claim.start_position for h in node.held.values()} == {NEW}


def test_locks_restored_by_a_truncation_are_resolved_as_the_home_decided(cluster):
    """The log of another partition lost its Resolve (PROTOCOL 7.5)."""
    operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    t = next(t for t in map(place_of, range(KEYS)) if t != HOME)
    log = cluster.kafka.log(cluster.place(t))
    state = WorldState(t)
    for stored in log.records:
        steps = apply(state, stored.entry())
        if steps[0].effect == "position_set" and steps[0].outcome == ACCEPTED:
            break
    cluster.kafka.truncate(cluster.place(t), end=stored.offset, leader=9)
    assert locks(cluster)
    member(cluster)
    settle(cluster, 2 * SOON_MS)
    assert positions(cluster) == [NEW] * KEYS


PLANTED = {
    variants.resolve_the_home_first: test_the_home_is_committed_last,
    variants.resolve_before_all_is_folded: (
        test_a_log_end_from_a_lagging_leader_does_not_count
    ),
    variants.abort_what_the_home_does_not_know: (
        test_no_resolve_is_sent_before_the_log_ends_are_folded
    ),
    variants.disturb_an_admin_that_lives: test_a_live_admin_resolves_its_own_operation,
}


def test_the_table_lists_every_variant():
    listed = variants.listed("broken set positions of fleets")
    here = {name for name, row in listed.items() if row[0] == "unit"}
    assert here == {plant.__name__ for plant in PLANTED}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_each_broken_variant_fails_its_test(monkeypatch, cluster, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, ClaimRejected)):
        PLANTED[plant](cluster)
