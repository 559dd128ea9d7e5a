"""What a session does over a whole log; every clause by its number."""

import itertools

import pytest
from enginekit import (
    AMO,
    HARD_MS,
    KEY,
    T0,
    H,
    fold,
    held_by,
    holders,
    lines,
    of,
    takeovers,
    values,
    wish,
    world,
    write,
)

from kafka_marshal.errors import IdentityConflict, InvalidTransition
from kafka_marshal.ports import DataReader
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Member,
    ReleaseGroup,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import Key
from kafka_marshal.testing.fakedata import FakeDataReader
from kafka_marshal.testing.fakestore import AppendFate


@pytest.fixture
def cluster():
    return world()


def owning(cluster, client_id="a", **rest):
    """Start a node and run until it holds the one key."""
    node = cluster.node(client_id, wish=wish(**rest))
    cluster.run_until(held_by(node, 1), 3 * H)
    cluster.run(40)
    return node


def claim_of(node, key=KEY):
    return node.session.holdings[key].claim


def pause_record(cluster, until_ms, *, seq=1, op=b"o" * 16):
    inc = b"admin".ljust(16, b".")
    return ReleaseGroup("admin", "g", inc, seq, op, until_ms, None)


def pause_for(cluster, for_ms, **rest):
    until_ms = cluster.clock.wall_ms() + for_ms
    write(cluster, pause_record(cluster, until_ms, **rest))
    return until_ms


# --- Claiming (PROTOCOL 5.1) ---


def test_the_winner_beats_before_it_fetches(cluster, monkeypatch):
    """Acceptance M17: its first record after the claim is its heartbeat."""
    fetched_at = []
    plain = FakeDataReader.poll

    def poll(reader: DataReader, timeout_ms, max_records):
        fetched_at.append(cluster.kafka.log(cluster.place(0)).end)
        return plain(reader, timeout_ms, max_records)

    monkeypatch.setattr(FakeDataReader, "poll", poll)
    node = cluster.node("a", wish=wish())
    while not node.consumer.poll(0):
        cluster.run(20)
    mine = [type(line.record) for line in of(cluster, "a")]
    claimed = mine.index(ClaimingPartition)
    assert mine[claimed + 1] is Heartbeat
    first_beat = of(cluster, "a", Heartbeat)[0]
    assert min(fetched_at) > first_beat.offset


def test_beats_are_at_most_h_apart_in_log_time(cluster):
    """Acceptance M03; and no more often than every H/3 less the jitter."""
    node = owning(cluster)
    cluster.run(20 * H, step_ms=50)
    times = [line.time_ms for line in of(cluster, "a", Heartbeat)][2:]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) > 50
    assert max(gaps) <= H / 3 * 1.1 + 50
    assert min(gaps) >= H / 3 * 0.9 - 50
    assert claim_of(node).is_valid(node.clock.now_ms())


def test_many_keys_of_a_partition_beat_in_one_record():
    cluster = world(records=[1] * 12)
    node = cluster.node("a", wish=wish())
    cluster.run_until(held_by(node, 12), H)
    start = cluster.kafka.log(cluster.place(0)).end
    cluster.run(10 * H, step_ms=50)
    beats = [line for line in of(cluster, "a", BatchHeartbeat) if line.offset > start]
    assert {len(line.record.beats) for line in beats} == {12}
    assert {line.transition.effect for line in beats} == {"renewed"}
    assert not [x for x in of(cluster, "a", Heartbeat) if x.offset > start + 12]


def test_beats_beyond_the_limit_of_a_record_are_split():
    cluster = world(records=[1] * 7, beats=3)
    node = cluster.node("a", wish=wish())
    cluster.run_until(held_by(node, 7), H)
    cluster.run(3 * H)
    sizes = {len(line.record.beats) for line in of(cluster, "a", BatchHeartbeat)}
    assert sizes == {1, 3}
    assert len(node.held) == 7
    assert not takeovers(cluster)


def test_of_two_contenders_the_earliest_wins(cluster):
    a = cluster.node("a", wish=wish(policy="greedy"))
    b = cluster.node("b", wish=wish(policy="greedy"))
    cluster.run(H)
    accepted = [x for x in lines(cluster) if x.transition.effect == "claimed"]
    assert len(accepted) == 1
    assert len(holders(cluster)) == 1
    assert len(a.held) + len(b.held) == 1


def test_a_stale_owner_is_replaced_within_2h_and_a_little(cluster):
    a = owning(cluster)
    b = cluster.node("b", wish=wish())
    cluster.run(H)
    cluster.crash(a)
    last = of(cluster, "a", Heartbeat)[-1].time_ms
    cluster.run_until(held_by(b, 1), 4 * H)
    taken = of(cluster, "b", ClaimingPartition)[-1].time_ms
    assert 2 * H < taken - last <= 2 * H + min(1_000, H // 10) + 100


def test_an_idle_log_does_not_keep_a_dead_owner_alive(cluster):
    """PROTOCOL 4.11: nobody appends, so log time stands still until we claim."""
    a = owning(cluster)
    cluster.crash(a)
    cluster.run(10 * H)
    b = cluster.node("b")
    b.session.want(KEY)
    # Neither a member nor a beat: only the claim itself moves the clock.
    cluster.run_until(held_by(b, 1), 2 * H + H // 2)


def test_claims_max_is_never_exceeded():
    cluster = world(records=[1] * 10)
    nodes = [cluster.node(n, wish=wish(claims_max=3)) for n in "ab"]
    nodes.append(cluster.node("c", wish=wish(claims_max=2, policy="greedy")))
    for _ in range(300):
        cluster.run(50, step_ms=50)
        assert [
            len(node.held) <= most for node, most in zip(nodes, (3, 3, 2), strict=True)
        ]
        for node, most in zip(nodes, (3, 3, 2), strict=True):
            assert len(node.held) <= most
    assert sum(len(node.held) for node in nodes) == 8


def test_two_claims_of_one_key_in_a_process_are_refused(cluster):
    node = cluster.node("a", wish=wish())
    with pytest.raises(InvalidTransition, match="already claimed"):
        node.session.want(KEY)
    with pytest.raises(InvalidTransition, match="already consumed"):
        node.consume(wish())
    other = Key("g", "u", 0)
    node.session.want(other)
    with pytest.raises(InvalidTransition, match="already claimed"):
        node.session.want(other)
    cluster.kafka.create_topic("u", 1)
    with pytest.raises(InvalidTransition, match="already consumed"):
        node.consume(wish("u"))


def test_a_key_released_at_once_is_taken_at_once(cluster):
    """A refusal that named 2H is not waited for where the owner lets go."""
    a, b = cluster.node("a"), cluster.node("b")
    for node in (a, b):
        node.session.want(KEY)
    cluster.run_until(lambda: len(holders(cluster)) == 1, H)
    winner, other = (a, b) if a.held else (b, a)
    cluster.run(100)
    winner.session.unwant(winner.session.holdings[KEY])
    assert cluster.run_until(held_by(other, 1), H) <= 200


# --- Leases (PROTOCOL 5.2) ---


def test_soft_stop_then_hard_stop(cluster):
    node = owning(cluster, most=1)
    claim = claim_of(node)
    assert values(node.consumer.poll(0)) == {0: [0]}
    node.cut(is_cut=True)
    sent_ms = claim.lease.soft_until_ms - H
    cluster.run_until(lambda: node.clock.now_ms() >= sent_ms + H - 20, 2 * H, step_ms=1)
    node.data.cut = False  # records could be had, only the lease runs out
    assert values(node.consumer.poll(0)) == {0: [1]}
    cluster.run_until(lambda: node.clock.now_ms() == sent_ms + H, H, step_ms=1)
    assert node.consumer.poll(0) == {}
    assert claim.is_valid(node.clock.now_ms())
    cluster.run_until(
        lambda: node.clock.now_ms() == sent_ms + HARD_MS - 1, 2 * H, step_ms=1
    )
    assert claim.phase is Phase.HELD
    cluster.run(1, step_ms=1)
    assert claim.phase is Phase.ENDED
    assert claim.ending.reason == "lease_expired"


def test_what_was_fetched_before_a_pause_is_not_handed_out_after_it(cluster):
    """A process that was stopped for long looks at its lease before anything."""
    node = owning(cluster, most=1)
    node.consumer.poll(0)
    cluster.clock.advance(H)
    assert node.consumer.poll(0) == {}
    assert node.consumer.position(T0) == 1


def test_an_acknowledged_beat_that_is_not_read_back_renews_nothing(cluster):
    node = owning(cluster)
    node.log.read_lag_ms = 10 * H
    cluster.run(2 * H)
    assert len(of(cluster, "a", Heartbeat)) > 5
    assert not node.held


def test_a_beat_that_lands_late_renews_from_its_sending(cluster):
    node = owning(cluster)
    cluster.run(H)
    cluster.fates["a"] = AppendFate(delay_ms=500)
    cluster.run(H)
    base_ms = claim_of(node).lease.soft_until_ms - H
    assert node.clock.now_ms() - base_ms >= 500
    assert node.held


def test_an_ignored_beat_stops_at_once(cluster):
    node = owning(cluster)
    claim = claim_of(node)
    # Somebody with our full identity gives the key up behind our back.
    owner = node.owner
    forged = ReleasingPartition(
        owner.client_id,
        "g",
        owner.incarnation,
        0,
        "t",
        0,
        claim.epoch,
        None,
        None,
        None,
    )
    write(cluster, forged)
    cluster.run(H // 2)
    assert claim.phase is Phase.ENDED


def test_a_leader_that_steps_ahead_shortens_leases(cluster):
    node = owning(cluster)
    cluster.run(H)
    before = claim_of(node).lease
    cluster.run_until(lambda: claim_of(node).lease != before, H)
    before = claim_of(node).lease
    cluster.kafka.set_skew(0, 700)
    write(cluster, b"tick")
    cluster.run(20)
    assert claim_of(node).lease.hard_until_ms == before.hard_until_ms - 700
    assert node.observer.named("clock_step")[0].fields["surplus_ms"] >= 690


def test_a_failover_to_a_skewed_leader_costs_nobody_a_key(cluster):
    node = owning(cluster)
    for leader, skew_ms in ((1, 5 * H), (2, -5 * H), (0, 0)):
        cluster.kafka.set_skew(leader, skew_ms)
        cluster.kafka.fail_over(cluster.place(0), leader=leader)
        cluster.run(2 * H)
    assert node.held
    assert not takeovers(cluster)


# --- Ghosts (PROTOCOL 5.3) ---


def test_a_ghost_claim_is_released_at_once(cluster):
    """Given up as unanswered, it lands and wins all the same."""
    cluster.fates["a"] = AppendFate(delay_ms=H, fails_after_ms=10)
    node = cluster.node("a", wish=wish())
    cluster.run(H // 2)
    cluster.fates.clear()
    node.consumer.close(timeout_ms=0)
    assert not node.session.holdings or claim_of(node).is_under_way
    cluster.run_until(lambda: KEY in fold(cluster).keys, 2 * H)
    cluster.run(100)
    assert fold(cluster).keys[KEY].owner is None
    assert of(cluster, "a", ReleasingPartition)[0].record.reason in {"ghost", "closed"}


def test_a_claim_that_lands_after_its_lease_is_released_and_tried_again(cluster):
    cluster.fates["a"] = AppendFate(delay_ms=2 * H, fails_after_ms=10)
    node = cluster.node("a", wish=wish())
    cluster.run(H // 4)
    cluster.fates.clear()
    cluster.run(4 * H)
    assert node.held


def test_a_ghost_whose_release_is_lost_is_released_again(cluster):
    node = owning(cluster)
    cluster.fates["a"] = AppendFate(is_lost=True)
    node.leave()
    cluster.run(H)
    assert fold(cluster).keys[KEY].owner is not None
    assert not node.has_left
    cluster.fates.clear()
    cluster.run(H)
    assert fold(cluster).keys[KEY].owner is None
    assert node.has_left


def test_the_end_of_an_old_claim_does_not_hide_a_newer_ghost(cluster):
    """A late claim wins while the old one runs out: both must be let go."""
    node = owning(cluster)
    claim = claim_of(node)
    old_epoch = claim.epoch
    # An earlier claiming record of ours lands once more, when we are stale.
    again = of(cluster, "a", ClaimingPartition)[0].record
    node.log.cut = True
    cluster.clock.advance(2 * H + 10)
    ghost = write(cluster, again)
    cluster.fates["a"] = AppendFate(is_lost=True)
    node.log.cut = False
    node.step()
    cluster.fates.clear()
    cluster.run_until(lambda: fold(cluster).keys[KEY].epoch > ghost, 2 * H)
    assert old_epoch < ghost
    cluster.run(H)
    assert holders(cluster) == ["a"]


# --- Identity (PROTOCOL 4.4, 5.5) ---


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_restart_with_its_identity_keeps_all_keys(restarts):
    """Acceptance M08, M20: within H, no takeover in the log."""
    cluster = world(records=[1] * 6)
    cluster.node("b", wish=wish())
    a = cluster.node("a", wish=wish())
    cluster.run_until(held_by(a, 3), 2 * H)
    kept = set(a.held)
    for _ in range(restarts):
        cluster.run(H // 3)
        cluster.crash(a)
        cluster.run(H // 4)
        before = cluster.kafka.log(cluster.place(0)).end
        a = cluster.node("a", wish=wish(), lives=a.lives)
        cluster.run_until(held_by(a, 3), H // 4)
        assert set(a.held) == kept
        since = [x for x in lines(cluster) if x.offset >= before]
        assert {x.transition.effect for x in since} & {"claimed", "resumed"} == {
            "resumed"
        }
    assert not takeovers(cluster)


def test_a_restart_without_its_identity_waits_like_anybody(cluster):
    a = owning(cluster)
    cluster.crash(a)
    again = cluster.node("a", wish=wish())
    cluster.run(H)
    assert not again.held
    cluster.run_until(held_by(again, 1), 3 * H)
    assert len(takeovers(cluster)) == 1


def test_a_restart_that_is_not_fresh_claims_normally(cluster):
    a = owning(cluster)
    cluster.crash(a)
    cluster.run(int(1.5 * H))
    again = cluster.node("a", wish=wish(), lives=a.lives)
    cluster.run_until(held_by(again, 1), 2 * H)
    effects = [x.transition.effect for x in of(cluster, "a", ClaimingPartition)]
    assert "resumed" not in effects


def test_a_wrong_secret_resumes_nothing_and_claims_normally(cluster):
    a = owning(cluster)
    cluster.crash(a)
    (life,) = a.lives
    wrong = (type(life)(life.incarnation, b"w" * 32),)
    again = cluster.node("a", wish=wish(), lives=wrong)
    cluster.run_until(held_by(again, 1), 3 * H)
    reasons = [x.transition.reason for x in of(cluster, "a", ClaimingPartition)]
    assert reasons.count("resume_mismatch") == 1


@pytest.mark.parametrize("first", [0, 1], ids=["older-holds", "younger-holds"])
def test_of_two_live_sessions_with_one_client_id_one_fails(first):
    """Exactly one holds, the other is told, whichever claims first."""
    cluster = world(records=[1] * 3)
    nodes = [cluster.node("a"), cluster.node("a")]
    cluster.run(H)  # both have announced themselves
    nodes[first].consume(wish())
    cluster.run(H // 2)
    nodes[1 - first].consume(wish())
    cluster.run(5 * H)
    failed = [node for node in nodes if node.session.failure is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].session.failure, IdentityConflict)
    (alive,) = [node for node in nodes if node not in failed]
    assert len(alive.held) == 3
    assert not failed[0].held
    with pytest.raises(IdentityConflict, match="another live process"):
        failed[0].consumer.poll(0)


def test_a_second_start_of_a_live_client_fails_and_takes_nothing(cluster):
    a = owning(cluster)
    twin = cluster.node("a", wish=wish())
    cluster.run_until(lambda: twin.session.failure is not None, 2 * H)
    with pytest.raises(IdentityConflict, match="host-of-a"):
        twin.consumer.poll(0)
    cluster.run(5 * H)
    assert a.held
    assert not takeovers(cluster)


def test_whoever_is_resumed_by_another_stops(cluster):
    """PROTOCOL 5.5: a copy of the identity directory; nobody resumes back."""
    a = owning(cluster)
    copy = cluster.node("a", wish=wish(), lives=a.lives)
    cluster.run_until(held_by(copy, 1), H)
    cluster.run(H)
    assert isinstance(a.session.failure, IdentityConflict)
    assert holders(cluster) == ["a"]
    assert copy.held
    resumed = [x for x in lines(cluster) if x.transition.effect == "resumed"]
    assert len(resumed) == 1


def test_a_late_announcement_of_a_dead_process_is_no_conflict(cluster):
    """One record may still be on its way; only a second one shows life."""
    a = owning(cluster)
    cluster.fates["a"] = AppendFate(delay_ms=H // 2)
    cluster.run(H // 3 + 100)  # announces once more, and that is on its way
    cluster.crash(a)
    cluster.fates.clear()
    again = cluster.node("a", wish=wish())
    cluster.run(3 * H)
    assert again.session.failure is None
    assert again.held


# --- Pausing a group (PROTOCOL 8.1) ---


def test_a_pause_drains_releases_and_ends(cluster):
    node = owning(cluster, most=2)
    (records,) = node.consumer.poll(0).values()
    until_ms = pause_for(cluster, 3 * H)
    cluster.run(100)
    assert node.consumer.poll(0) == {}
    assert node.session.holdings[KEY].drain.reason == "paused"
    assert fold(cluster).keys[KEY].owner is not None  # still two in hand
    node.consumer.commit(records)
    cluster.run(100)
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.position) == (None, 2)
    assert of(cluster, "a", ReleasingPartition)[0].record.reason == "paused"
    cluster.run(H)
    assert not of(cluster, "a", ClaimingPartition)[1:]
    # The log may be idle when the pause ends: local time tells (4.11).
    cluster.run_until(held_by(node, 1), 3 * H)
    claimed = of(cluster, "a", ClaimingPartition)[-1]
    assert claimed.time_ms >= until_ms
    assert claimed.time_ms - until_ms < 500
    cluster.run(100)
    assert values(node.consumer.poll(0)) == {0: [2, 3]}


def test_a_handler_that_holds_on_loses_the_key_at_the_hard_stop(cluster):
    node = owning(cluster, most=2)
    node.consumer.poll(0)
    pause_for(cluster, 10 * H)
    cluster.run(H)
    claim = claim_of(node)
    assert claim.is_valid(node.clock.now_ms())
    cluster.run(H)
    assert claim.ending.reason in {"paused", "lease_expired"}
    assert fold(cluster).keys[KEY].owner is None


def test_beats_in_a_pause_move_the_position_only(cluster):
    node = owning(cluster, most=2)
    (records,) = node.consumer.poll(0).values()
    pause_for(cluster, 10 * H)
    cluster.run(100)
    node.consumer.commit(records[0])
    cluster.run(H // 2)
    beat = of(cluster, "a", Heartbeat)[-1]
    assert beat.transition.effect == "position_only"
    assert fold(cluster).keys[KEY].position == 1


def test_a_pause_that_is_ended_early_lets_all_go_on(cluster):
    node = owning(cluster)
    pause_for(cluster, 100 * H)
    cluster.run(H)
    assert not node.held
    pause_for(cluster, -1, seq=2)
    assert cluster.run_until(held_by(node, 1), H) <= 500


def test_a_pause_holds_resumes_back(cluster):
    a = owning(cluster)
    pause_for(cluster, 3 * H)
    cluster.crash(a)
    again = cluster.node("a", wish=wish(), lives=a.lives)
    cluster.run(2 * H)
    assert not again.held
    cluster.run_until(held_by(again, 1), 3 * H)


# --- Sharing ---


def test_a_newcomer_is_given_its_share_by_name():
    cluster = world(partitions=2, records=[1] * 8)
    a = cluster.node("a", wish=wish())
    cluster.run_until(held_by(a, 8), H)
    cluster.run(H)
    b = cluster.node("b", wish=wish())
    took_ms = cluster.run_until(held_by(b, 4), 2 * H)
    assert took_ms < H
    assert len(a.held) == 4
    released = [
        x.record
        for t in range(2)
        for x in of(cluster, "a", ReleasingPartition, partition=t)
    ]
    assert {r.reason for r in released} == {"surplus"}
    assert {r.successor for r in released} == {"b"}
    assert not takeovers(cluster, 0)
    assert not takeovers(cluster, 1)


def test_nothing_moves_once_shared():
    """Acceptance L31."""
    cluster = world(partitions=2, records=[1] * 7)
    nodes = [cluster.node(name, wish=wish()) for name in "abc"]
    cluster.run_until(lambda: sum(len(n.held) for n in nodes) == 7, 3 * H)
    cluster.run(3 * H)
    ends = [cluster.kafka.log(cluster.place(t)).end for t in range(2)]
    cluster.run(10 * H, step_ms=50)
    later = {
        type(line.record)
        for t in range(2)
        for line in lines(cluster, t)
        if line.offset >= ends[t]
    }
    assert later == {Heartbeat, BatchHeartbeat, Member}


def test_surplus_is_finished_before_it_is_given_up():
    cluster = world(records=[4, 4])
    a = cluster.node("a", wish=wish(most=100))
    cluster.run_until(held_by(a, 2), H)
    polled = a.consumer.poll(0)
    b = cluster.node("b", wish=wish())
    cluster.run(H // 2)
    assert not b.held
    for records in polled.values():
        a.consumer.commit(records)
    cluster.run_until(held_by(b, 1), H)
    (key,) = b.held
    assert fold(cluster).keys[key].position == 4


def test_a_leaver_hands_all_over_at_once():
    cluster = world(records=[1] * 4)
    a, b = (cluster.node(name, wish=wish()) for name in "ab")
    cluster.run_until(lambda: len(a.held) == len(b.held) == 2, 3 * H)
    a.leave()
    assert cluster.run_until(held_by(b, 4), H) <= 500
    assert a.has_left


# --- The log's own troubles ---


def test_l24_a_failed_claim_does_not_wipe_the_position(cluster):
    """Acceptance L24: claim, consume, lose, fail to claim, claim: same position."""
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
def test_l27_a_forged_release_is_ignored(cluster, what):
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
            forged["client_id"],
            "g",
            forged["incarnation"],
            9,
            "t",
            0,
            forged["epoch"],
            99,
            None,
            None,
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


def test_a_log_that_is_cut_off_for_long_is_joined_again(cluster):
    a = owning(cluster)
    cluster.node("b", wish=wish())
    cluster.run(H)
    a.cut(is_cut=True)
    cluster.run(4 * H)
    assert holders(cluster) == ["b"]
    a.cut(is_cut=False)
    cluster.run(4 * H)
    assert len(holders(cluster)) == 1
    assert a.engine.failure is None


# --- At most once (PROTOCOL 6.2) ---


@pytest.mark.parametrize("patience_ms", [0, int(0.75 * H)], ids=["asked", "granted"])
def test_a_grant_that_is_late_counts_once(cluster, patience_ms):
    """Whichever lands first, the late one or the one asked for again."""
    node = owning(cluster, delivery=AMO, most=3)
    cluster.fates["a"] = AppendFate(delay_ms=int(0.7 * H), fails_after_ms=10)
    assert node.consumer.poll(0) == {}
    cluster.fates.clear()
    cluster.run(patience_ms)
    got = []
    for _ in range(200):
        cluster.run(20)
        for records in node.consumer.poll(0).values():
            got.extend(record.offset for record in records)
    assert got == list(range(10))
    asked = of(cluster, "a", ClaimingMessages)
    again = [x.transition.effect for x in asked if x.record.first == 0]
    assert again == (["granted"] if patience_ms else ["granted", None])


def test_nothing_is_handed_out_before_its_grant_is_read_back(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    assert node.consumer.poll(0) == {}
    assert of(cluster, "a", ClaimingMessages)[0].transition.effect == "granted"
    assert node.consumer.poll(0) == {}
    cluster.run(20)
    assert values(node.consumer.poll(0)) == {0: [0, 1, 2]}


def test_an_owner_that_was_replaced_processes_no_more_grants(cluster):
    endings = []
    node = owning(cluster, delivery=AMO, most=3, on_lost=lambda *it: endings.append(it))
    node.consumer.poll(0)
    node.log.cut = True
    b = cluster.node("b", wish=wish(delivery=AMO))
    got = []
    for _ in range(int(4 * H / 20)):
        cluster.run(20)
        for records in b.consumer.poll(0).values():
            got.extend(record.offset for record in records)
    node.log.cut = False
    cluster.run(20)
    assert node.consumer.poll(0) == {}
    assert [ending.reason for _, ending in endings] == ["lease_expired"]
    # 0 to 2 were granted to a process that never learnt of it: lost, not doubled.
    assert got == [3, 4, 5, 6, 7, 8, 9]


def test_an_ignored_request_ends_the_claim(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    claim = claim_of(node)
    owner = node.owner
    write(
        cluster,
        ReleasingPartition(
            owner.client_id,
            "g",
            owner.incarnation,
            0,
            "t",
            0,
            claim.epoch,
            None,
            None,
            None,
        ),
    )
    node.consumer.poll(0)
    cluster.run(20)
    assert claim.phase is Phase.ENDED
    assert claim.ending.reason == "grant_ignored"


def test_a_drain_waits_for_what_was_granted(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    node.consumer.poll(0)
    cluster.run(20)
    pause_for(cluster, 10 * H)
    cluster.run(100)
    assert claim_of(node).phase is Phase.HELD
    assert values(node.consumer.poll(0)) == {0: [0, 1, 2]}
    # They are in the application's hands until it asks for more.
    cluster.run(100)
    assert claim_of(node).phase is Phase.HELD
    assert node.consumer.poll(0) == {}
    cluster.run(40)
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.granted) == (None, 3)
