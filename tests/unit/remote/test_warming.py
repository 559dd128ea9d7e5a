"""A client of a sidecar warms up and stands by as events request."""

import pytest
from enginekit import Application, H, values
from remotekit import RemoteRig, key

from kafka_marshal.engine import standbys
from kafka_marshal.remote import api, warming


class Warm:
    """An application that warms up when the test lets it."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def __call__(self, partition, position, from_client):
        self.calls.append((partition.partition, position, from_client))
        if self.error is not None:
            raise self.error


@pytest.fixture
def rig():
    return RemoteRig()


@pytest.fixture
def warm(rig):
    found = Warm()
    rig.subscribe(on_warm=found)
    return found


def offer(rig, partition=0, *, epoch=5, **rest):
    fields = {
        "subscription": "s",
        "topic": "t",
        "partition": partition,
        "epoch": epoch,
        "owner": "w1",
        "position": 3,
        "until_ms": rig.now_ms + 10 * H,
    }
    return api.Warm(**(fields | rest))


def finish(rig):
    rig.warming.run_waiting()
    rig.session.tick(rig.now_ms)


def test_the_application_is_called_with_partition_position_and_owner(rig, warm):
    rig.send(offer(rig))
    assert not warm.calls
    rig.session.tick(rig.now_ms)
    assert not rig.commands.readied
    assert rig.session.handoff_counts == {"warming": 1}
    finish(rig)
    assert warm.calls == [(0, 3, "w1")]
    assert rig.commands.readied == [(0, 5)]
    assert rig.session.handoff_counts == {"warming": 0}
    (begun,), (ended,) = rig.events("warming"), rig.events("warmed")
    assert (begun["key"], begun["from"], begun["position"]) == (key(), "w1", 3)
    assert ended["warm_ms"] == 0


def test_a_repeated_event_calls_the_application_once(rig, warm):
    rig.send(offer(rig))
    rig.send(offer(rig))
    finish(rig)
    assert len(warm.calls) == 1
    rig.send(snapshot(rig, offer(rig)))
    assert len(warm.calls) == 1
    # It is repeated, as the first report may not have arrived.
    assert rig.commands.readied == [(0, 5), (0, 5)]


def snapshot(rig, *offers):
    return api.Snapshot(
        assigned=(),
        releasing=(),
        paused=api.Paused(is_paused=False),
        subscriptions=("s",),
        warming=offers,
    )


def test_a_snapshot_begins_the_warm_ups_that_it_lists(rig, warm):
    rig.send(snapshot(rig, offer(rig, 0), offer(rig, 1)))
    finish(rig)
    assert sorted(rig.commands.readied) == [(0, 5), (1, 5)]
    assert len(warm.calls) == 2


def test_a_later_claim_of_the_owner_restarts_the_warm_up(rig, warm):
    rig.send(offer(rig, epoch=5))
    rig.send(offer(rig, epoch=9))
    finish(rig)
    assert len(warm.calls) == 2
    assert rig.commands.readied == [(0, 9)]


def test_a_warm_up_that_fails_is_not_reported_as_ready(rig):
    rig.subscribe(on_warm=Warm(ValueError("no disk")))
    rig.send(offer(rig))
    finish(rig)
    rig.send(offer(rig))
    assert not rig.commands.readied
    assert str(rig.events("warm_failed")[0]["error"]) == "no disk"


def test_an_expired_offer_is_forgotten(rig, warm):
    rig.send(offer(rig, until_ms=rig.now_ms))
    finish(rig)
    assert not rig.commands.readied
    rig.send(offer(rig))
    finish(rig)
    assert len(warm.calls) == 2
    assert rig.commands.readied == [(0, 5)]


def test_an_assignment_ends_the_warm_up_of_its_partition(rig, warm):
    rig.send(offer(rig))
    finish(rig)
    rig.send(rig.assigned(epoch=8))
    assert key() in rig.session.holdings
    rig.send(offer(rig, epoch=8))
    finish(rig)
    assert len(warm.calls) == 2


def test_an_application_without_on_warm_is_not_asked(rig):
    rig.subscribe()
    rig.send(offer(rig))
    finish(rig)
    assert not rig.commands.readied
    assert not rig.events("warming")


def test_an_offer_for_an_unknown_subscription_is_ignored(rig, warm):
    rig.send(offer(rig, subscription="x"))
    finish(rig)
    assert not warm.calls


def test_warm_ups_beyond_the_limit_are_ignored(rig, warm, monkeypatch):
    monkeypatch.setattr(warming, "TASKS_MAX", 1)
    rig.send(offer(rig, 0))
    rig.send(offer(rig, 1))
    finish(rig)
    assert len(warm.calls) == 1


# --- records fetched during a warm-up


def fetching(rig):
    """Return a consumer that warms up, and its fetcher."""
    consumer = rig.consumer(on_warm=Warm())
    (sub,) = rig.session.subscriptions
    return consumer, sub.warm_fetcher


def fetched_offer(rig, **rest):
    return offer(rig, topic_id=rig.cluster.kafka.topic("t").topic_id.hex(), **rest)


def assign(rig, **rest):
    topic_id = rig.cluster.kafka.topic("t").topic_id.hex()
    rig.send(rig.assigned(epoch=8, **{"topic_id": topic_id, **rest}))


def test_the_first_poll_after_the_assignment_needs_no_fetch(rig):
    consumer, _ = fetching(rig)
    rig.send(fetched_offer(rig))
    finish(rig)
    rig.context.ports.data.cut = True
    assert not consumer.poll(0)
    assign(rig, position=4)
    assert values(consumer.poll(0)) == {0: [4, 5, 6, 7, 8, 9]}


def test_records_fetched_under_another_topic_id_are_not_used(rig):
    consumer, _ = fetching(rig)
    rig.send(fetched_offer(rig))
    finish(rig)
    rig.context.ports.data.cut = True
    assign(rig, position=4, topic_id="ab" * 16)
    assert not consumer.poll(0)


def test_an_offer_without_a_topic_id_fetches_nothing(rig):
    _, fetcher = fetching(rig)
    rig.send(offer(rig))
    finish(rig)
    assert fetcher.held_bytes == 0


@pytest.mark.parametrize("over", ["late", "failed", "again", "closed"])
def test_an_offer_that_ended_frees_its_fetched_records(rig, over):
    failing = Warm(ValueError("no disk")) if over == "failed" else Warm()
    consumer = rig.consumer(on_warm=failing)
    (sub,) = rig.session.subscriptions
    rig.send(fetched_offer(rig))
    rig.session.tick(rig.now_ms)
    assert sub.warm_fetcher.held_bytes > 0
    if over == "late":
        rig.cluster.clock.advance(10 * H)
        rig.session.tick(rig.now_ms)
    elif over == "failed":
        finish(rig)
    elif over == "again":
        rig.send(fetched_offer(rig, epoch=9))
    else:
        consumer.close(timeout_ms=0)
    assert sub.warm_fetcher.held_bytes == 0


def test_a_claim_is_expected_once_the_client_is_ready(rig):
    consumer, _ = fetching(rig)
    sub = consumer._subscription
    rig.send(fetched_offer(rig))
    rig.session.tick(rig.now_ms)
    assert not sub.expects_claim
    finish(rig)
    assert sub.expects_claim
    assign(rig)
    assert not sub.expects_claim


def test_a_drained_partition_is_given_back_with_the_last_commit(rig):
    consumer = rig.consumer()
    rig.send(rig.assigned())
    assert consumer.poll(0)
    rig.send(
        api.Releasing(topic="t", partition=0, epoch=5, reason="surplus", successor=None)
    )
    rig.session.tick(rig.now_ms)
    assert not rig.commands.returned
    consumer.commit()
    assert len(rig.commands.returned) == 1


@pytest.fixture
def standby_rig():
    return RemoteRig(records=(10,) * 20)


@pytest.fixture
def application(standby_rig):
    found = Application()
    standby_rig.subscribe(on_standby=found, standbys=1)
    return found


def standby(partition=0, *, owner="w1", position=3, name="s"):
    return api.Standby(
        subscription=name,
        topic="t",
        partition=partition,
        owner=owner,
        position=None if owner is None else position,
    )


def load(standby_rig):
    standby_rig.session.tick(standby_rig.now_ms)
    standby_rig.standing_by.run_waiting()
    standby_rig.session.tick(standby_rig.now_ms)


def keys(standby_rig):
    return {each.partition for each in standby_rig.session._standbys.keys}


def test_on_standby_is_called_with_partition_position_and_owner(
    standby_rig, application
):
    standby_rig.send(standby())
    standby_rig.send(standby())
    load(standby_rig)
    assert application.calls == [(0, 3, "w1")]
    (begun,) = standby_rig.events("standby_begun")
    assert (begun["key"], begun["from"]) == (key(), "w1")
    standby_rig.send(standby(owner=None))
    standby_rig.send(standby(owner=None))
    load(standby_rig)
    assert application.calls[1:] == [(0, None, None)]
    assert standby_rig.events("standby_ended") == [{"key": key(), "is_owner": False}]


def test_an_assignment_ends_a_standby_without_a_call(standby_rig, application):
    standby_rig.send(standby())
    load(standby_rig)
    standby_rig.send(standby_rig.assigned())
    load(standby_rig)
    assert len(application.calls) == 1
    assert standby_rig.events("standby_ended") == [{"key": key(), "is_owner": True}]


def test_a_failed_standby_is_reported_once(standby_rig, application):
    application.error = ValueError("no disk")
    standby_rig.send(standby())
    load(standby_rig)
    load(standby_rig)
    (failed,) = standby_rig.events("standby_failed")
    assert str(failed["error"]) == "no disk"


def test_a_snapshot_replaces_all_standbys(standby_rig, application):
    for number in (0, 1):
        standby_rig.send(standby(number))
    load(standby_rig)
    standby_rig.send(standby_rig.snapshot(standbys=(standby(1), standby(2))))
    load(standby_rig)
    assert keys(standby_rig) == {1, 2}
    assert application.calls[2:] == [(0, None, None), (2, 3, "w1")]


def test_at_most_loading_max_standbys_load_at_a_time(
    standby_rig, application, monkeypatch
):
    monkeypatch.setattr(standbys, "LOADING_MAX", 2)
    for number in range(5):
        standby_rig.send(standby(number))
    standby_rig.session.tick(standby_rig.now_ms)
    standby_rig.session.tick(standby_rig.now_ms)
    assert standby_rig.standing_by.waiting_count == 2
    # A standby that has not begun ends without a call.
    standby_rig.send(standby(4, owner=None))
    for _ in range(3):
        load(standby_rig)
    assert [call[0] for call in application.calls] == [0, 1, 2, 3]
    assert standby_rig.events("standby_ended") == []


def test_standbys_beyond_the_limit_are_ignored(standby_rig, application, monkeypatch):
    monkeypatch.setattr(warming, "STANDBYS_MAX", 1)
    standby_rig.send(standby(0))
    standby_rig.send(standby(1))
    assert keys(standby_rig) == {0}


def test_events_for_subscriptions_without_standbys_are_ignored(
    standby_rig,
):
    standby_rig.send(standby(name="gone"))
    standby_rig.subscribe()
    standby_rig.send(standby())
    load(standby_rig)
    assert not keys(standby_rig)
