"""A session over a whole log, by clauses of the protocol."""

import itertools

import pytest
from enginekit import (
    ALO,
    AMO,
    KEY,
    H,
    claim_of,
    fold,
    held_by,
    holders,
    lines,
    of,
    owning,
    pause_for,
    pause_scope,
    spec,
    takeovers,
    values,
    world,
    write,
)
from logkit import fence
from msgspec.structs import replace

from kafka_marshal.engine.acquirer import UNDER_WAY_MIN
from kafka_marshal.errors import ClientFenced, InvalidTransition
from kafka_marshal.ports import DataReader
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import Key
from simulator.fakedata import FakeDataReader
from simulator.fakestore import AppendFate

# --- Claiming (PROTOCOL 5.1) ---


def test_a_new_owner_sends_a_heartbeat_before_it_fetches(cluster, monkeypatch):
    """The first record after its claim is a heartbeat."""
    fetched_at = []
    plain = FakeDataReader.poll

    def poll(reader: DataReader, timeout_ms, max_records):
        if reader.positions():
            fetched_at.append(cluster.kafka.log(cluster.place(0)).end)
        return plain(reader, timeout_ms, max_records)

    monkeypatch.setattr(FakeDataReader, "poll", poll)
    node = cluster.node("a", spec=spec())
    while not node.consumer.poll(0):
        cluster.run(20)
    mine = [type(line.record) for line in of(cluster, "a")]
    claimed = mine.index(ClaimingPartition)
    assert mine[claimed + 1] is Heartbeat
    first_beat = of(cluster, "a", Heartbeat)[0]
    assert min(fetched_at) > first_beat.offset


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_a_new_owner_of_a_key_with_a_position_beats_before_it_fetches(
    cluster, monkeypatch, delivery
):
    """The start position needs no look-up; still the heartbeat comes first."""
    first = owning(cluster, delivery=delivery, most=4)
    while not first.consumer.poll(0):
        cluster.run(20)
    first.leave()
    cluster.run_until(lambda: fold(cluster).keys[KEY].owner is None, 3 * H)
    assert fold(cluster).keys[KEY].next_unclaimed() is not None
    fetched_at = []
    plain = FakeDataReader.poll

    def poll(reader: DataReader, timeout_ms, max_records):
        if reader.positions():
            fetched_at.append(cluster.kafka.log(cluster.place(0)).end)
        return plain(reader, timeout_ms, max_records)

    monkeypatch.setattr(FakeDataReader, "poll", poll)
    second = cluster.node("b", spec=spec(delivery=delivery))
    while not second.consumer.poll(0):
        cluster.run(20)
    mine = [type(line.record) for line in of(cluster, "b")]
    assert mine[mine.index(ClaimingPartition) + 1] is Heartbeat
    first_beat = of(cluster, "b", Heartbeat)[0]
    assert min(fetched_at) > first_beat.offset


def test_heartbeats_are_a_third_of_an_interval_apart(cluster):
    """In log time, give or take the jitter."""
    node = owning(cluster)
    cluster.run(20 * H, step_ms=50)
    times = [line.time_ms for line in of(cluster, "a", Heartbeat)][2:]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) > 50
    assert max(gaps) <= H / 3 * 1.1 + 50
    assert min(gaps) >= H / 3 * 0.9 - 50
    assert claim_of(node).is_valid(node.clock.now_ms())


def test_many_keys_of_a_coordinating_partition_share_a_heartbeat():
    cluster = world(records=[1] * 12)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 12), H)
    start = cluster.kafka.log(cluster.place(0)).end
    cluster.run(10 * H, step_ms=50)
    beats = [line for line in of(cluster, "a", BatchHeartbeat) if line.offset > start]
    assert {len(line.record.beats) for line in beats} == {12}
    assert {line.transition.effect for line in beats} == {"renewed"}
    assert not [x for x in of(cluster, "a", Heartbeat) if x.offset > start + 12]


def test_heartbeats_beyond_the_limit_of_a_record_are_split():
    cluster = world(records=[1] * 7, beats=3)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 7), H)
    cluster.run(3 * H)
    sizes = {len(line.record.beats) for line in of(cluster, "a", BatchHeartbeat)}
    assert sizes == {1, 3}
    assert len(node.held) == 7
    assert not takeovers(cluster)


def test_the_earliest_of_two_claims_wins(cluster):
    a = cluster.node("a", spec=spec(policy="greedy"))
    b = cluster.node("b", spec=spec(policy="greedy"))
    cluster.run(H)
    accepted = [x for x in lines(cluster) if x.transition.effect == "claimed"]
    assert len(accepted) == 1
    assert len(holders(cluster)) == 1
    assert len(a.held) + len(b.held) == 1


def test_a_single_member_claims_without_delay(cluster):
    node = cluster.node("a")
    cluster.run(20)
    node.consume(spec())
    node.step()
    assert len(of(cluster, "a", ClaimingPartition)) == 1


def test_a_fleet_that_starts_on_free_keys_claims_each_about_once():
    cluster = world(4, records=[0] * 400)
    names = [f"c{number}" for number in range(6)]
    cluster.fates |= {name: AppendFate(delay_ms=15) for name in names}
    nodes = [cluster.node(name, spec=spec()) for name in names]
    cluster.run_until(lambda: sum(len(node.held) for node in nodes) == 400, 4 * H)
    claims = [
        line
        for partition in range(4)
        for name in names
        for line in of(cluster, name, ClaimingPartition, partition=partition)
    ]
    # Before the first verdicts members do not know each other. Keys that move to
    # another member afterwards are claimed once more.
    assert len(claims) <= 2 * 400 + len(names) * UNDER_WAY_MIN


def waited_ms(number):
    cluster = world()
    cluster.node("b")
    node = cluster.node("a")
    cluster.run(40)
    node.entropy.random_bytes(number)
    start_ms = cluster.clock.now_ms()
    node.consume(spec())
    cluster.run_until(lambda: of(cluster, "a", ClaimingPartition), H, step_ms=1)
    return cluster.clock.now_ms() - start_ms


def test_one_of_several_members_claims_after_a_random_delay():
    waits = {waited_ms(number) for number in range(8)}
    assert len(waits) > 1
    assert max(waits) <= 51


def test_a_stale_owner_is_replaced_within_2h_and_jitter(cluster):
    a = owning(cluster)
    b = cluster.node("b", spec=spec())
    cluster.run(H)
    cluster.crash(a)
    last = of(cluster, "a", Heartbeat)[-1].time_ms
    cluster.run_until(held_by(b, 1), 4 * H)
    taken = of(cluster, "b", ClaimingPartition)[-1].time_ms
    assert 2 * H < taken - last <= 2 * H + min(1_000, H // 10) + 100


def test_an_idle_log_does_not_keep_a_dead_owner_alive(cluster):
    """PROTOCOL 4.11: nobody appends, so log time stands still until the claim."""
    a = owning(cluster)
    cluster.crash(a)
    cluster.run(10 * H)
    b = cluster.node("b")
    b.session.want(KEY)
    # Neither announcements nor heartbeats: only the claim itself moves log time.
    cluster.run_until(held_by(b, 1), 2 * H + H // 2)


def test_claims_max_is_never_exceeded():
    cluster = world(records=[1] * 10)
    nodes = [cluster.node(n, spec=spec(claims_max=3)) for n in "ab"]
    nodes.append(cluster.node("c", spec=spec(claims_max=2, policy="greedy")))
    for _ in range(300):
        cluster.run(50, step_ms=50)
        for node, most in zip(nodes, (3, 3, 2), strict=True):
            assert len(node.held) <= most
    assert sum(len(node.held) for node in nodes) == 8


def test_two_claims_of_one_key_in_a_process_are_refused(cluster):
    node = cluster.node("a", spec=spec())
    with pytest.raises(InvalidTransition, match="already claimed"):
        node.session.want(KEY)
    with pytest.raises(InvalidTransition, match="already consumed"):
        node.consume(spec())
    other = Key("g", "u", 0)
    node.session.want(other)
    with pytest.raises(InvalidTransition, match="already claimed"):
        node.session.want(other)
    cluster.kafka.create_topic("u", 1)
    with pytest.raises(InvalidTransition, match="already consumed"):
        node.consume(spec("u"))


def test_a_released_key_is_claimed_at_once_by_a_refused_member(cluster):
    """A release ends the wait that a refusal started."""
    a, b = cluster.node("a"), cluster.node("b")
    for node in (a, b):
        node.session.want(KEY)
    cluster.run_until(lambda: len(holders(cluster)) == 1, H)
    winner, other = (a, b) if a.held else (b, a)
    cluster.run(100)
    winner.session.unwant(winner.session.holdings[KEY])
    assert cluster.run_until(held_by(other, 1), H) <= 200


# --- Pausing a group (PROTOCOL 8.1) ---


def test_a_pause_drains_and_releases_keys_until_it_ends(cluster):
    node = owning(cluster, most=2)
    (records,) = node.consumer.poll(0).values()
    until_ms = pause_for(cluster, 3 * H)
    cluster.run(100)
    assert node.consumer.poll(0) == {}
    assert node.session.holdings[KEY].drain.reason == "paused"
    assert fold(cluster).keys[KEY].owner is not None  # two are still uncommitted
    node.consumer.commit(records)
    cluster.run(100)
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.position) == (None, 2)
    assert of(cluster, "a", ReleasingPartition)[0].record.reason == "paused"
    cluster.run(H)
    assert not of(cluster, "a", ClaimingPartition)[1:]
    # The log may be idle when the pause ends: local time decides (4.11).
    cluster.run_until(held_by(node, 1), 3 * H)
    claimed = of(cluster, "a", ClaimingPartition)[-1]
    assert claimed.time_ms >= until_ms
    assert claimed.time_ms - until_ms < 500
    cluster.run(100)
    assert values(node.consumer.poll(0)) == {0: [2, 3]}


def test_a_handler_that_does_not_commit_in_a_pause_loses_the_key(cluster):
    node = owning(cluster, most=2)
    node.consumer.poll(0)
    pause_for(cluster, 10 * H)
    cluster.run(H)
    claim = claim_of(node)
    assert claim.is_valid(node.clock.now_ms())
    cluster.run(H)
    assert claim.ending.reason in {"paused", "lease_expired"}
    assert fold(cluster).keys[KEY].owner is None


def test_heartbeats_in_a_pause_move_only_the_position(cluster):
    node = owning(cluster, most=2)
    (records,) = node.consumer.poll(0).values()
    pause_for(cluster, 10 * H)
    cluster.run(100)
    node.consumer.commit(records[0])
    cluster.run(H // 2)
    beat = of(cluster, "a", Heartbeat)[-1]
    assert beat.transition.effect == "position_only"
    assert fold(cluster).keys[KEY].position == 1


def test_a_key_is_claimed_at_once_when_a_pause_ends_early(cluster):
    node = owning(cluster)
    pause_for(cluster, 100 * H)
    cluster.run(H)
    assert not node.held
    pause_for(cluster, -1, seq=2)
    assert cluster.run_until(held_by(node, 1), H) <= 500


def test_a_restarted_process_does_not_resume_in_a_pause(cluster):
    a = owning(cluster)
    pause_for(cluster, 3 * H)
    cluster.crash(a)
    again = cluster.node("a", spec=spec(), lives=a.lives)
    cluster.run(2 * H)
    assert not again.held
    cluster.run_until(held_by(again, 1), 3 * H)


def two_topics():
    cluster = world(records=(10, 10))
    cluster.fill("u", (10, 10))
    nodes = [cluster.node(name, spec=spec("t", "u")) for name in "ab"]
    cluster.run_until(lambda: all(len(node.held) == 2 for node in nodes), 9 * H)
    return cluster, nodes


def topics_of(nodes):
    return sorted(key.topic + str(key.partition) for node in nodes for key in node.held)


def test_a_pause_of_a_topic_leaves_other_topics_alone():
    cluster, nodes = two_topics()
    others = [key for node in nodes for key in node.held if key.topic == "u"]
    epochs = {key: fold(cluster).keys[key].epoch for key in others}
    until_ms = pause_scope(cluster, 6 * H, {"t": ()})
    cluster.run_until(lambda: topics_of(nodes) == ["u0", "u1"], 3 * H)
    reasons = {
        line.record.reason
        for name in "ab"
        for line in of(cluster, name, ReleasingPartition)
        if line.record.topic == "t" and line.time_ms > until_ms - 6 * H
    }
    assert reasons == {"paused"}
    cluster.run(2 * H)
    # Each keeps what it had where the shares are even without the paused topic.
    shares = sorted(len(node.held) for node in nodes)
    assert shares == [1, 1]
    moved = {key for key in others if fold(cluster).keys[key].epoch != epochs[key]}
    assert len(moved) <= 1
    cluster.run_until(lambda: len(topics_of(nodes)) == 4, 6 * H)
    claimed = [
        line.time_ms
        for name in "ab"
        for line in of(cluster, name, ClaimingPartition)
        if line.record.topic == "t" and line.time_ms > until_ms - 3 * H
    ]
    assert min(claimed) >= until_ms


def test_a_pause_of_a_partition_drains_and_releases_that_partition(cluster):
    node = owning(cluster, most=2)
    (records,) = node.consumer.poll(0).values()
    until_ms = pause_scope(cluster, 3 * H, {"t": (0, 9)})
    cluster.run(100)
    assert node.consumer.poll(0) == {}
    assert node.session.holdings[KEY].drain.reason == "paused"
    node.consumer.commit(records)
    cluster.run(100)
    assert (fold(cluster).keys[KEY].owner, fold(cluster).keys[KEY].position) == (
        None,
        2,
    )
    cluster.run_until(held_by(node, 1), 4 * H)
    assert of(cluster, "a", ClaimingPartition)[-1].time_ms >= until_ms


# --- Faults of the log ---


def test_a_refused_claim_does_not_change_the_position(cluster):
    """Claim, consume, lose, fail to claim, claim: same position."""
    a = owning(cluster, most=4)
    (records,) = a.consumer.poll(0).values()
    a.consumer.commit(records)
    cluster.run(H)
    cluster.crash(a)
    b = cluster.node("b")
    b.session.want(KEY)
    write(cluster, of(cluster, "a", ClaimingPartition)[0].record)  # refused: duplicate
    assert fold(cluster).keys[KEY].position == 4
    cluster.run_until(held_by(b, 1), 4 * H)
    assert fold(cluster).keys[KEY].position == 4
    b.session.unwant(b.session.holdings[KEY])
    c = owning(cluster, "c")
    assert values(c.consumer.poll(0)) == {0: [4, 5, 6, 7, 8, 9]}


@pytest.mark.parametrize("what", ["client_id", "incarnation", "epoch"])
def test_a_forged_release_is_ignored(cluster, what):
    node = owning(cluster)
    owner, epoch = node.owner, claim_of(node).epoch
    forged = {
        "client_id": owner.client_id,
        "incarnation": owner.incarnation,
        "epoch": epoch,
    }
    forged[what] = {"client_id": "x", "incarnation": b"x" * 16, "epoch": epoch + 1}[
        what
    ]
    write(
        cluster,
        ReleasingPartition(
            client_id=forged["client_id"],
            group_id="g",
            incarnation=forged["incarnation"],
            seq=9,
            topic="t",
            partition=0,
            epoch=forged["epoch"],
            position=99,
            successor=None,
            reason=None,
        ),
    )
    cluster.run(3 * H)
    counters = fold(cluster).soft.counters
    assert counters["old_epoch" if what == "epoch" else "not_owner"] == 1
    assert node.held
    assert fold(cluster).keys[KEY].position != 99


def test_copies_of_appends_change_nothing(cluster):
    cluster.fates["a"] = AppendFate(copies=2)
    node = owning(cluster)
    cluster.run(5 * H)
    assert node.held
    assert len([x for x in lines(cluster) if x.transition.effect == "claimed"]) == 1


def test_hostile_bytes_change_nothing(cluster):
    node = owning(cluster)
    for value in (None, b"", b"\xff" * 100, b"\x01\x02\x00", b"\x01\x07\x00\x90"):
        write(cluster, value)
    cluster.run(3 * H)
    assert node.held
    assert fold(cluster).soft.counters["undecodable"] >= 4


def test_a_member_cut_off_from_the_log_recovers(cluster):
    a = owning(cluster)
    cluster.node("b", spec=spec())
    cluster.run(H)
    a.cut(is_cut=True)
    cluster.run(4 * H)
    assert holders(cluster) == ["b"]
    a.cut(is_cut=False)
    cluster.run(4 * H)
    assert len(holders(cluster)) == 1
    assert a.engine.failure is None


def test_a_session_uses_neither_of_two_claims_accepted_late(cluster):
    """The leader's clock steps forward: the second takes over from the first."""
    node = cluster.node("a")
    cluster.run(100)
    node.log.read_lag_ms = 10 * H
    node.consume(spec())
    cluster.run_until(lambda: len(of(cluster, "a", ClaimingPartition)) == 1, H)
    leader = cluster.kafka.log(cluster.place(0)).leader
    cluster.kafka.set_skew(leader, 3 * H)
    cluster.run_until(lambda: len(of(cluster, "a", ClaimingPartition)) == 2, 3 * H)
    first, second = of(cluster, "a", ClaimingPartition)
    assert [x.transition.effect for x in (first, second)] == ["claimed", "claimed"]
    node.log.read_lag_ms = 0
    cluster.run(2 * H)
    assert node.engine.failure is None
    ends = [e.fields["ending"] for e in node.observer.named("claim_ended")]
    assert ("taken_over", "a", second.offset) in [
        (end.reason, end.winner, end.at_offset) for end in ends
    ]
    assert claim_of(node).epoch > second.offset


# --- Fences (PROTOCOL 4.13) ---


def fence_of(node, *, reason="hung"):
    """Return an admin's fence of a node's process, in the name of a person."""
    name, inc = node.owner
    return replace(fence(name, inc=inc, reason=reason), tags=person_to_tags("alice"))


def test_a_fenced_process_releases_at_its_position_and_fails(cluster):
    a = owning(cluster)
    polled = a.consumer.poll(0)
    while not polled:
        cluster.run(20)
        polled = a.consumer.poll(0)
    a.consumer.commit()
    position = a.session.holdings[KEY].position
    b = cluster.node("b", spec=spec())
    cluster.run(H // 2)
    at_ms = cluster.clock.now_ms()
    offset = write(cluster, fence_of(a))
    cluster.run_until(held_by(b, 1), H // 2)
    assert cluster.clock.now_ms() - at_ms < H // 2
    assert fold(cluster).keys[KEY].position == position == values(polled)[0][-1] + 1
    (release,) = of(cluster, "a", ReleasingPartition)
    assert release.record.reason == "fenced_by_admin"
    with pytest.raises(ClientFenced, match=r"'a'.*'alice'.*hung") as caught:
        a.consumer.poll(0)
    error = caught.value
    assert (error.by, error.reason, error.at_offset) == ("alice", "hung", offset)
    assert a.engine.failure is None


def test_the_ending_of_a_fenced_claim_is_a_loss(cluster):
    a = owning(cluster)
    claim = claim_of(a)
    write(cluster, fence_of(a))
    cluster.run(40)
    assert (claim.ending.reason, claim.ending.was_lost) == ("fenced_by_admin", True)
    assert not claim.is_valid(cluster.clock.now_ms())
    assert [event.fields["error"].by for event in a.observer.named("session_failed")]


def test_at_most_once_a_fenced_process_hands_out_nothing_more(cluster):
    a = owning(cluster, delivery=AMO)
    write(cluster, fence_of(a))
    cluster.run(40)
    with pytest.raises(ClientFenced):
        a.consumer.poll(0)
    assert KEY not in a.held


def test_a_fence_of_another_incarnation_or_group_changes_nothing(cluster):
    a = owning(cluster)
    name, _ = a.owner
    write(cluster, fence(name, inc=b"another".ljust(16)))
    write(cluster, fence(name, inc=a.owner.incarnation, group="h"))
    cluster.run(4 * H)
    assert holders(cluster) == ["a"]
    assert a.session.failure is None


def test_a_fenced_process_that_does_not_read_loses_its_key_within_2h(cluster):
    a = owning(cluster)
    cluster.run(H)
    b = cluster.node("b", spec=spec())
    cluster.run(H)
    write(cluster, fence_of(a))
    a.cut(is_cut=True)
    cluster.run_until(held_by(b, 1), 2 * H + H // 2)
    a.cut(is_cut=False)
    cluster.run(H)
    assert holders(cluster) == ["b"]
    assert isinstance(a.session.failure, ClientFenced)


def test_a_fenced_process_renews_no_lease(cluster, monkeypatch):
    """Even if it ignores its fence: its heartbeats only carry positions."""
    a = owning(cluster)
    b = cluster.node("b", spec=spec())
    cluster.run(H)
    monkeypatch.setattr(a.session, "_fail_as_fenced", lambda transition: None)
    write(cluster, fence_of(a))
    cluster.run_until(held_by(b, 1), 2 * H + H // 2)
    beats = of(cluster, "a", Heartbeat)
    assert {line.transition.effect for line in beats[-2:]} <= {"position_only", None}
    cluster.run(2 * H)
    assert holders(cluster) == ["b"]


def test_a_refused_announcement_alone_fails_a_fenced_process(cluster, monkeypatch):
    """A process that folds its log again may not read the fence itself."""
    a = owning(cluster)
    monkeypatch.setattr(a.session, "_on_fence", lambda record, transition: None)
    write(cluster, fence_of(a))
    cluster.run(H)  # its next announcement is refused
    assert isinstance(a.session.failure, ClientFenced)
    assert (a.session.failure.by, KEY in a.held) == ("", False)


def test_a_restart_of_a_fenced_client_claims_again(cluster):
    a = owning(cluster)
    write(cluster, fence_of(a))
    cluster.run(H)
    cluster.crash(a)
    again = cluster.node("a", spec=spec())
    cluster.run_until(held_by(again, 1), H)
    cluster.run(3 * H)
    assert again.session.failure is None
    assert again.owner in [node.owner for node in cluster.nodes if KEY in node.held]


def test_the_keys_of_a_fenced_member_are_claimed_at_once(cluster):
    """They do not wait until its announcement is too old."""
    a = owning(cluster)
    b = cluster.node("b", spec=spec())
    cluster.run(H)
    write(cluster, fence_of(a))
    cluster.run_until(held_by(b, 1), H // 2)
    home = b.engine.context.replicas[0].world
    assert [m.record.client_id for m in home.live_members("g")] == ["b"]


def test_closing_after_a_fence_awaits_no_record(cluster):
    a = owning(cluster)
    write(cluster, fence_of(a))
    cluster.run(40)
    seqs = a.session.begin_close(release=True)
    cluster.run(H)
    assert not a.session.is_pending(seqs)
    assert a.session.leaving_count == 0
