"""The session of a client of a sidecar, event by event, by a simulated clock."""

import pytest
from enginekit import AMO, T0, H, values
from remotekit import INCARNATION, RemoteRig, key, lost, releasing

from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    DeadlineExceeded,
    InvalidTransition,
)
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.types import Key, Token
from kafka_marshal.remote import api


@pytest.fixture
def rig():
    return RemoteRig()


@pytest.fixture
def consumer(rig):
    """A consumer with partition 0, of ten records."""
    consumer = rig.consumer(most=4)
    rig.send(rig.snapshot(rig.assigned()))
    return consumer


def endings(rig):
    return [fields["ending"].reason for fields in rig.events("claim_ended")]


# --- Assigned, and consumed ---


def test_an_assigned_partition_is_consumed_under_its_token(rig, consumer):
    assert consumer.tokens() == {T0: Token(1, 0, 5)}
    found = consumer.poll()
    assert values(found) == {0: [0, 1, 2, 3]}
    assert {record.token for record in found[T0]} == {Token(1, 0, 5)}
    consumer.commit()
    (given,) = rig.session.progress(everything=False)
    assert (given.position, given.uncommitted_count, given.handed) == (4, 0, 4)
    assert rig.events("claimed")[0]["client"] == "c"


def test_an_assignment_states_which_operation_set_the_position(rig):
    consumer = rig.consumer()
    rig.send(rig.snapshot(rig.assigned(set_by="aa")))
    batch = next(consumer.batches())
    assert consumer.holding_of(batch).set_by == "aa"


def test_repeated_events_change_nothing(rig, consumer):
    consumer.poll()
    version = rig.session.subscriptions[0].version
    rig.send(rig.assigned())
    rig.send(rig.snapshot(rig.assigned()))
    assert rig.session.holdings[key()].uncommitted_count == 4
    assert rig.session.subscriptions[0].version == version
    assert len(rig.events("claimed")) == 1


def test_a_seek_takes_effect_once_the_sidecar_confirms_it(rig, consumer):
    consumer.poll()
    rig.commands.pending = {2}
    with pytest.raises(DeadlineExceeded):
        consumer.seek(T0, 1, timeout_ms=0)
    (sent,) = rig.session.progress(everything=False)
    assert (sent.position, sent.seek_count, sent.uncommitted_count) == (1, 1, 1)
    assert type(sent.uncommitted_count) is int, "as the API has it"
    rig.session.tick(rig.clock.now_ms())
    assert consumer.poll() == {}
    rig.commands.pending.clear()
    rig.session.tick(rig.clock.now_ms())
    consumer.poll()
    assert consumer.position(T0) == 5
    assert (rig.commands.flushed, consumer.committed(T0)) == (1, 1)


def test_a_seek_without_an_answer_is_reported_again(rig, consumer):
    rig.commands.pending = rig.commands.late = {2}
    with pytest.raises(DeadlineExceeded):
        consumer.seek(T0, 1, timeout_ms=0)
    rig.session.tick(rig.clock.now_ms())
    assert rig.commands.flushed == 2
    assert consumer.poll() == {}


def test_a_later_claim_of_a_key_replaces_the_earlier(rig, consumer):
    consumer.poll()
    rig.send(rig.assigned(epoch=9, position=2))
    with pytest.raises(ClaimLost, match="reassigned"):
        consumer.poll()
    assert values(consumer.poll()) == {0: [2, 3, 4, 5]}
    rig.send(rig.assigned(epoch=5))
    assert consumer.tokens() == {T0: Token(1, 0, 9)}


def test_a_lower_epoch_under_a_later_token_replaces_the_claim(rig, consumer):
    """PROTOCOL 10: the key moved to a coordinating partition with lower epochs."""
    consumer.poll()
    rig.send(rig.assigned(epoch=3, token="2.0.3", position=2))
    with pytest.raises(ClaimLost, match="reassigned"):
        consumer.poll()
    assert values(consumer.poll()) == {0: [2, 3, 4, 5]}
    rig.send(rig.assigned(epoch=5))
    assert consumer.tokens() == {T0: Token(2, 0, 3)}
    rig.send(api.Lost(topic="t", partition=0, epoch=3, reason="moving", was_lost=False))
    rig.send(rig.assigned(epoch=7, token="2.0.7", position=2))
    assert consumer.tokens() == {T0: Token(2, 0, 7)}


def test_an_assignment_adds_its_topic_to_the_subscription(rig):
    consumer = rig.consumer()
    rig.cluster.fill("u", (3,))
    rig.send(rig.assigned(topic="u"))
    assert {each.topic for each in consumer.assignment()} == {"u"}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"name": "other"}, id="a-consumer-that-closed"),
        pytest.param({"position": None}, id="without-a-position"),
        pytest.param({"name": ""}, id="a-claim-that-nobody-wants"),
    ],
)
def test_an_assignment_that_cannot_be_used_is_given_back(rig, given):
    consumer = rig.consumer()
    rig.session._had.add("other")
    message = rig.assigned(**given)
    rig.send(message)
    rig.send(message)
    (returned,) = rig.commands.returned
    assert (returned.epoch, returned.position) == (5, None)
    assert returned.reason == "unused"
    assert consumer.assignment() == set()


# --- Topics that are deleted, or created again ---


def of_topic(rig):
    """Assign partition 0 under the current id of its topic."""
    topic_id = rig.cluster.kafka.topic("t").topic_id.hex()
    rig.send(rig.snapshot(rig.assigned(topic_id=topic_id)))


def settle(rig, consumer):
    """Poll until the topic has been looked up; return the values received."""
    found = []
    for _ in range(20):
        found += [r.value for each in consumer.poll().values() for r in each]
        rig.tick(100)
    return found


def test_a_partition_of_a_recreated_topic_is_given_back(rig):
    consumer = rig.consumer()
    of_topic(rig)
    assert values(consumer.poll()) == {0: list(range(10))}
    consumer.commit()
    rig.cluster.kafka.recreate_topic("t", 1)
    for _ in range(20):
        rig.cluster.kafka.produce(T0, b"new")
    assert settle(rig, consumer) == []
    (returned,) = rig.commands.returned
    assert (returned.reason, returned.epoch, returned.position) == ("topic_gone", 5, 10)
    assert endings(rig) == ["topic_gone"]
    topic_id = rig.cluster.kafka.topic("t").topic_id.hex()
    rig.send(rig.assigned(epoch=9, topic_id=topic_id))
    assert settle(rig, consumer) == [b"new"] * 20


def test_a_partition_of_a_deleted_topic_is_given_back(rig):
    consumer = rig.consumer()
    of_topic(rig)
    consumer.poll()
    rig.cluster.kafka.delete_topic("t")
    settle(rig, consumer)
    assert [each.reason for each in rig.commands.returned] == ["topic_gone"]
    assert consumer.assignment() == set()


# --- Deadlines ---


def test_partitions_of_an_earlier_process_wait_for_a_subscription(rig):
    rig.send(rig.snapshot(rig.assigned(position=4)))
    assert not rig.commands.returned
    consumer = rig.consumer()
    assert values(consumer.poll()) == {0: [4, 5, 6, 7, 8, 9]}
    assert not rig.commands.returned


def test_a_release_before_the_subscription_gives_the_partition_back(rig):
    rig.send(rig.snapshot(rig.assigned()))
    rig.send(releasing())
    (returned,) = rig.commands.returned
    assert returned.reason == "unused"
    assert rig.consumer().poll() == {}


def test_a_partition_lost_before_the_subscription_is_not_consumed(rig):
    rig.send(rig.snapshot(rig.assigned()))
    rig.send(lost())
    assert rig.consumer().poll() == {}


def test_no_record_is_handed_out_after_the_soft_deadline(rig, consumer):
    consumer.poll()
    rig.tick(H)
    assert consumer.poll() == {}
    consumer.commit()
    rig.tick(H)
    (returned,) = rig.commands.returned
    assert (returned.reason, returned.position) == ("lease_expired", 4)
    assert consumer.assignment() == set()


def test_the_hard_deadline_raises_claim_lost_in_the_consumer(rig, consumer):
    consumer.poll()
    rig.tick(2 * H)
    with pytest.raises(ClaimLost, match="lease_expired"):
        consumer.poll()


def test_a_commit_after_the_hard_deadline_is_refused_at_once(rig, consumer):
    consumer.poll()
    rig.cluster.clock.advance(2 * H)
    with pytest.raises(ClaimLost, match="lease_expired"):
        consumer.commit()
    rig.session.on_deadlines(rig.beaten(), reported=())
    with pytest.raises(ClaimLost, match="lease_expired"):
        consumer.poll()
    assert consumer.poll() == {}


def test_heartbeats_extend_the_deadlines(rig, consumer):
    rig.tick(H - 1)
    rig.session.on_deadlines(rig.beaten(), reported=())
    rig.tick(H - 1)
    assert consumer.poll() != {}


def test_an_answer_that_arrives_after_a_later_one_is_ignored(rig, consumer):
    late = rig.beaten(soft_ms=10 * H, hard_ms=20 * H)
    rig.tick(10)
    rig.session.on_deadlines(rig.beaten(soft_ms=20), reported=())
    rig.session.on_deadlines(late, reported=())
    rig.tick(20)
    assert consumer.poll() == {}


def test_a_repeated_assignment_does_not_extend_the_deadlines(rig, consumer):
    rig.send(rig.assigned(soft_until_ms=rig.now_ms + 20))
    rig.send(rig.snapshot(rig.assigned(soft_until_ms=rig.now_ms + 10 * H)))
    rig.tick(19)
    assert consumer.poll() != {}
    rig.tick(1)
    assert consumer.poll() == {}


def test_deadlines_of_another_claim_are_ignored(rig, consumer):
    rig.session.on_deadlines(rig.beaten(epoch=4, soft_ms=0, hard_ms=0), reported=())
    rig.tick()
    assert consumer.poll() != {}


def test_only_changed_progress_is_reported(rig, consumer):
    given = rig.session.progress(everything=False)
    assert len(given) == 1
    rig.session.on_deadlines(rig.beaten(), reported=given)
    assert rig.session.progress(everything=False) == ()
    assert rig.session.progress(everything=True) == given
    consumer.poll()
    assert len(rig.session.progress(everything=False)) == 1


def test_a_claim_missing_in_the_answer_to_a_flush_ends(rig, consumer):
    consumer.poll()
    given = rig.session.progress(everything=True)
    rig.session.on_flushed(rig.beaten(partitions=()), reported=given)
    with pytest.raises(ClaimLost, match="beat_ignored"):
        consumer.poll()


def test_a_flush_waits_for_its_answer(rig, consumer):
    consumer.flush()
    assert rig.commands.flushed == 1
    rig.commands.pending = {2}
    with pytest.raises(DeadlineExceeded):
        consumer.flush(timeout_ms=0)


# --- Release and loss ---


def test_a_release_is_confirmed_once_all_records_are_committed(rig, consumer):
    consumer.poll()
    rig.send(releasing())
    rig.tick()
    assert rig.commands.returned == []
    assert consumer.poll() == {}
    consumer.commit()
    rig.tick()
    (returned,) = rig.commands.returned
    assert (returned.reason, returned.position) == ("surplus", 4)
    assert consumer.poll() == {}


def test_a_release_without_a_commit_is_confirmed_at_its_deadline(rig, consumer):
    consumer.poll()
    rig.send(releasing(until_ms=rig.now_ms + 50))
    rig.tick(49)
    assert rig.commands.returned == []
    rig.tick(1)
    assert [each.position for each in rig.commands.returned] == [0]


def test_a_snapshot_without_a_release_calls_the_release_off(rig, consumer):
    rig.send(rig.snapshot(rig.assigned(), releasing=(releasing(),)))
    assert consumer.poll() == {}
    rig.send(rig.snapshot(rig.assigned()))
    assert consumer.poll() != {}


def test_a_loss_names_winner_and_offset(rig, consumer):
    consumer.poll()
    rig.send(lost(winner="host-b", at_offset=77))
    with pytest.raises(ClaimLost) as caught:
        consumer.poll()
    error = caught.value
    assert (error.winner, error.at_offset, error.reason) == (
        "host-b",
        77,
        "taken_over",
    )


def test_late_events_of_an_ended_claim_are_ignored(rig, consumer):
    rig.send(lost(epoch=4))
    assert consumer.poll() != {}
    rig.send(lost())
    rig.send(rig.assigned())
    rig.send(releasing())
    assert rig.session.holdings == {}
    assert rig.commands.returned == []


@pytest.mark.parametrize(
    ("incarnation", "reason"),
    [
        pytest.param(INCARNATION, "reassigned", id="the-same-sidecar"),
        pytest.param("cd" * 16, "sidecar_restarted", id="a-restarted-one"),
    ],
)
def test_a_claim_that_a_snapshot_does_not_list_ends(rig, consumer, incarnation, reason):
    consumer.poll()
    claimant = rig.session.claimant
    owner = claimant.owner._replace(incarnation=bytes.fromhex(incarnation))
    rig.session.claimant = type(claimant)(owner, "g", master=b"")
    rig.send(rig.snapshot(rig.assigned(epoch=9, incarnation=incarnation)))
    assert endings(rig) == [reason]
    with pytest.raises(ClaimLost, match=reason):
        consumer.poll()
    assert values(consumer.poll()) == {0: [0, 1, 2, 3]}


def test_a_failure_ends_all_claims(rig, consumer):
    message = api.Failure(error="ConfigurationError", message="no", setting="policy")
    rig.send(api.Failed(failure=message))
    with pytest.raises(ConfigurationError, match="no"):
        consumer.poll()
    rig.send(rig.assigned(epoch=9))
    assert rig.session.holdings == {}
    assert [(x.epoch, x.reason) for x in rig.commands.returned] == [
        (5, "failed"),
        (9, "unused"),
    ]


def test_a_pause_of_the_group_is_known(rig, consumer):
    rig.send(api.Paused(is_paused=True, until_wall_ms=1, reason="r"))
    assert rig.context.is_paused("g")
    assert rig.context.is_key_paused(Key("g", "t", 0))
    assert not rig.context.is_key_paused(Key("g", "/planner", 0)), "PROTOCOL 2.3"
    rig.send(rig.snapshot(rig.assigned()))
    assert not rig.context.is_paused("g")
    assert not rig.context.is_key_paused(Key("g", "t", 0))
    del consumer


def test_a_pause_of_some_partitions_is_known(rig, consumer):
    topics = (
        api.PausedTopic(topic="s"),
        api.PausedTopic(topic="t", partitions=(0, 3)),
    )
    rig.send(api.Paused(is_paused=False, topics=topics))
    paused = rig.context.is_key_paused
    assert not rig.context.is_paused("g")
    assert [paused(Key("g", "t", n)) for n in (0, 1, 3)] == [True, False, True]
    assert paused(Key("g", "s", 9))
    rig.send(api.Paused(is_paused=False))
    assert not paused(Key("g", "s", 9))
    assert not paused(Key("g", "t", 0))
    del consumer


# --- At most once ---


def test_at_most_once_no_record_is_handed_out_before_a_grant(rig):
    consumer = rig.consumer(delivery=AMO)
    rig.send(rig.assigned(position=3))
    assert consumer.poll() == {}
    (call,) = rig.waiting
    assert call is not None
    (given,) = rig.session.progress(everything=True)
    assert (given.position, given.done) == (None, 3)


# --- Closing ---


def test_closing_a_consumer_gives_its_partitions_back(rig, consumer):
    consumer.poll()
    consumer.commit()
    consumer.close()
    ((name, returned, keep),) = rig.commands.ended
    assert (name, keep) == ("s", False)
    assert [(each.position, each.reason) for each in returned] == [(4, "closed")]
    assert rig.session.subscriptions == ()
    consumer.close()
    assert len(rig.commands.ended) == 1


def test_partitions_kept_at_closing_pass_to_the_next_consumer(rig, consumer):
    consumer.poll()
    consumer.close(release=False)
    ((_, returned, keep),) = rig.commands.ended
    assert (returned, keep, rig.commands.flushed) == ((), True, 1)
    again = rig.consumer("s2", most=3)
    assert values(again.poll()) == {0: [0, 1, 2]}


def test_begin_close_returns_the_final_positions(rig, consumer):
    consumer.poll()
    consumer.commit()
    (returned,) = rig.session.begin_close(release=False)
    assert (returned.position, returned.epoch) == (4, 5)
    assert rig.session.holdings == {}


def test_two_consumers_of_a_topic_are_refused(rig, consumer):
    with pytest.raises(InvalidTransition, match="already consumed"):
        rig.subscribe("s2")
    del consumer


def test_a_subscription_without_partitions_can_be_ended(rig):
    rig.session.unsubscribe(rig.subscribe()[0], release=True)
    assert rig.session.subscriptions == ()
    assert rig.commands.ended == [("s", (), False)]


# --- Claims without consumption ---


@pytest.mark.parametrize("is_held", [False, True])
def test_a_forgotten_claim_is_withdrawn_once(rig, is_held):
    """As after an interrupt, before or after the claim is held."""
    rig.session.want(key())
    if is_held:
        rig.send(rig.assigned(name="", position=None))
    rig.session.forget_want(key())
    rig.session.forget_want(key())
    assert (rig.session.wanted, rig.session.holdings) == ([], {})
    assert rig.commands.unclaimed == [key()]


def test_a_partition_can_be_claimed_without_consuming_it(rig):
    holding = rig.session.want(key())
    with pytest.raises(InvalidTransition, match="already claimed"):
        rig.session.want(key())
    assert rig.session.wanted == [key()]
    rig.send(rig.assigned(name="", position=None))
    assert holding.claim.phase is Phase.HELD
    assert rig.context.glance(key()).holder == "host-a"
    rig.session.unwant(holding)
    assert rig.commands.unclaimed == [key()]
    assert [each.reason for each in rig.commands.returned] == ["released"]
    assert rig.context.glance(key()) is None


def claiming(rig, **rest):
    """Return a claim without consumption, of epoch 5."""
    holding = rig.session.want(key())
    rig.send(rig.assigned(name="", position=None, **rest))
    return holding


def restart(rig):
    """Replace the sidecar by another process."""
    claimant = rig.session.claimant
    owner = claimant.owner._replace(incarnation=b"n" * 16)
    rig.session.claimant = type(claimant)(owner, "g", master=b"")


def test_a_claim_without_consumption_survives_a_sidecar_restart(rig):
    """Under a later token, if no other process can have held it in between."""
    holding = claiming(rig)
    holding.progress.position = 7
    restart(rig)
    rig.tick(1_000)
    rig.send(rig.snapshot())
    assert holding.claim.token == Token(1, 0, 5)
    rig.send(rig.assigned(name="", position=4, epoch=9))
    assert holding.claim.is_valid(rig.now_ms + 2 * H - 1)
    assert (holding.claim.token, holding.position) == (Token(1, 0, 9), 7)
    rig.send(lost(epoch=5))
    rig.send(rig.assigned(name="", position=4, epoch=5))
    assert rig.session.holdings[key()].claim.epoch == 9
    assert [e["effect"] for e in rig.events("claimed")] == ["claimed", "resumed"]
    assert (endings(rig), rig.commands.returned) == ([], [])
    rig.send(lost(epoch=9))
    assert endings(rig) == ["taken_over"]


def test_a_claim_without_consumption_is_not_resumed_after_its_deadline(rig):
    holding = claiming(rig)
    restart(rig)
    rig.cluster.clock.advance(2 * H)
    rig.send(rig.assigned(name="", position=4, epoch=9))
    assert endings(rig) == ["reassigned"]
    assert holding.claim.token == Token(1, 0, 5)
    assert [each.reason for each in rig.commands.returned] == ["unused"]
    assert rig.session.wanted == []


def test_a_claim_without_consumption_ends_if_a_snapshot_omits_it(rig):
    claiming(rig)
    rig.send(rig.snapshot())
    assert endings(rig) == ["reassigned"]


@pytest.mark.parametrize("by", ["event", "snapshot"])
def test_the_answer_to_a_withdrawn_request_does_not_win_the_next_claim(rig, by):
    """The sidecar releases the claim that the withdrawn request has won."""
    rig.session.want(key())
    rig.session.forget_want(key())
    holding = rig.session.want(key())
    late = rig.assigned(name="", position=None, request=1)
    rig.send(late if by == "event" else rig.snapshot(late))
    assert (holding.claim.is_owned, rig.commands.returned) == (False, [])
    rig.send(rig.assigned(name="", position=None, epoch=6, request=2))
    assert holding.claim.token == Token(1, 0, 6)
    assert rig.session.holdings[key()] is holding


def test_an_answer_without_a_request_number_wins_the_claim(rig):
    """Sidecars of an earlier release send no number."""
    rig.session.want(key())
    rig.session.forget_want(key())
    holding = rig.session.want(key())
    rig.send(rig.assigned(name="", position=None))
    assert holding.claim.is_owned


def test_a_wanted_claim_can_be_given_up_before_it_is_won(rig):
    holding = rig.session.want(key())
    rig.session.unwant(holding)
    assert holding.claim.ending.reason == "given_up"
    assert (rig.commands.unclaimed, rig.commands.returned) == ([key()], [])


# --- Figures ---


def test_the_session_reports_lag_and_numbers_of_claims(rig, consumer):
    rig.tick()
    rig.tick()
    consumer.poll()
    consumer.commit()
    assert rig.session.end_of(key()) == 10
    assert rig.session.lag_of(key()) == 6
    assert rig.session.lag_of(key(1)) is None
    assert rig.session.meters.won == {("t", "claimed"): 1}
    rig.send(lost())
    assert rig.session.meters.lost == {("t", "taken_over"): 1}


# --- a partition that moved to another coordinating partition (PROTOCOL 10)


def test_a_lower_epoch_under_a_later_token_is_accepted_after_a_release(rig, consumer):
    """Its epoch, an offset there, is below that of the claim before."""
    assert values(consumer.poll()) == {0: [0, 1, 2, 3]}
    rig.send(lost(reason="released", was_lost=False, token="1.0.5"))
    assert consumer.tokens() == {}
    rig.send(rig.assigned(epoch=2, token="2.0.2", position=4))
    assert consumer.tokens() == {T0: Token(2, 0, 2)}
    rig.send(rig.assigned(epoch=5, position=0))
    assert consumer.tokens() == {T0: Token(2, 0, 2)}, "an earlier claim"


def test_an_equal_epoch_under_a_later_token_is_another_claim(rig, consumer):
    assert consumer.tokens() == {T0: Token(1, 0, 5)}
    rig.send(rig.assigned(epoch=5, token="2.0.5", position=4))
    assert consumer.tokens() == {T0: Token(2, 0, 5)}
    assert endings(rig) == ["reassigned"]


@pytest.mark.parametrize("token", [None, "1.0.5"])
def test_a_claim_that_ended_before_its_subscription_is_not_revived(rig, token):
    rig.send(rig.snapshot(rig.assigned(name="later")))
    rig.send(lost(token=token))
    consumer = rig.consumer(name="later")
    rig.send(rig.assigned(name="later"))
    assert consumer.tokens() == {}
    rig.send(rig.assigned(name="later", epoch=2, token="2.0.2"))
    assert consumer.tokens() == {T0: Token(2, 0, 2)}


def test_a_claim_without_consumption_continues_after_its_key_moved(rig):
    holding = rig.session.want(key())
    rig.send(rig.assigned(name="", position=4))
    rig.send(rig.assigned(name="", position=4, epoch=2, token="2.0.2"))
    assert rig.session.holdings[key()] is holding
    assert (holding.claim.epoch, holding.claim.token) == (2, Token(2, 0, 2))
    rig.send(rig.assigned(name="", position=4, epoch=9))
    assert holding.claim.epoch == 2, "an earlier claim"
