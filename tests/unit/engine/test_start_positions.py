"""Start positions of claims (PROTOCOL 5.6): from the log, a commit or a look-up."""

from concurrent.futures import Future

import pytest
from enginekit import AMO, KEY, T0, H, fold, of, owning, spec, world

from kafka_marshal.engine import start_positions
from kafka_marshal.engine.holding import StartLookup
from kafka_marshal.engine.start_positions import StartPositions
from kafka_marshal.errors import CoordinationError, PositionError
from kafka_marshal.protocol.records import ClaimingPartition, Heartbeat
from kafka_marshal.protocol.types import Key


def watch_requests(monkeypatch):
    """Note the partitions of each request for start positions."""
    requests = []
    plain = StartPositions._request

    def request(self, holdings):
        requests.append([(one.key.topic, one.key.partition) for one in holdings])
        return plain(self, holdings)

    monkeypatch.setattr(StartPositions, "_request", request)
    return requests


def claiming(cluster, *topics, **options):
    """Return a process that has sent its claims, and gets no answers to look-ups."""
    node = cluster.node("a", spec=spec(*topics, **options))
    cluster.run_until(lambda: of(cluster, "a", ClaimingPartition), 2 * H)
    node.background.is_held = True
    return node


def failures_of(node):
    return node.observer.named("start_lookup_failed")


def answer(cluster, node):
    node.background.is_held = False
    node.background.run_waiting()
    cluster.run(H)


def test_claims_of_one_topic_share_a_request(monkeypatch):
    cluster = world(records=(3,) * 150)
    requests = watch_requests(monkeypatch)
    node = claiming(cluster)
    cluster.run_until(lambda: len(node.held) == 150, 2 * H)
    answer(cluster, node)
    assert sorted(partition for one in requests for _, partition in one) == [
        *range(150)
    ]
    assert len(requests) <= start_positions.REQUESTS_MAX + 1
    assert not failures_of(node)
    assert all(held.progress is not None for held in node.held.values())


def test_the_number_of_pending_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(start_positions, "REQUEST_PARTITIONS_MAX", 2)
    monkeypatch.setattr(start_positions, "REQUESTS_MAX", 3)
    cluster = world(records=(3,) * 20)
    requests = watch_requests(monkeypatch)
    node = claiming(cluster)
    cluster.run_until(lambda: len(node.held) == 20, 2 * H)
    assert len(requests) == 3
    answer(cluster, node)
    assert max(map(len, requests)) == 2
    assert all(held.progress is not None for held in node.held.values())


def test_a_topic_that_may_not_be_read_fails_alone(monkeypatch):
    cluster = world(records=(3, 3))
    cluster.fill("other", (3, 3))
    node = cluster.node("a", spec=spec("t", "other"))
    plain = node.data.ranges

    def ranges(partitions, timeout_ms, **options):
        if partitions[0].topic == "other":
            raise CoordinationError("not authorized")
        return plain(partitions, timeout_ms, **options)

    monkeypatch.setattr(node.data, "ranges", ranges)
    cluster.run(H)
    started = {key.topic for key, held in node.held.items() if held.progress}
    assert started == {"t"}
    (failed,) = failures_of(node)
    assert failed.fields == {
        "group": "g",
        "topic": "other",
        "count": 2,
        "partitions": [0, 1],
        "error": "not authorized",
    }


def test_an_error_of_many_partitions_is_one_event_for_each_topic():
    cluster = world(records=(3,) * 40)
    cluster.fill("other", (3,) * 20)
    node = cluster.node("a", spec=spec("t", "other"))
    node.data.cut = True
    cluster.run(3 * H)
    found = {
        topic: sum(
            one.fields["count"]
            for one in failures_of(node)
            if one.fields["topic"] == topic
        )
        for topic in ("t", "other")
    }
    assert found == {"t": 40, "other": 20}
    assert len(failures_of(node)) <= start_positions.REQUESTS_MAX
    assert all(len(one.fields["partitions"]) <= 10 for one in failures_of(node))


def test_a_claim_that_ended_in_the_queue_is_not_looked_up(monkeypatch):
    monkeypatch.setattr(start_positions, "REQUESTS_MAX", 0)
    cluster = world(records=(3, 3))
    requests = watch_requests(monkeypatch)
    node = claiming(cluster)
    cluster.run_until(lambda: len(node.held) == 2, 2 * H)
    node.session.release(node.held[Key("g", "t", 0)], reason="surplus")
    monkeypatch.setattr(start_positions, "REQUESTS_MAX", 8)
    answer(cluster, node)
    assert requests[0] == [("t", 1)]


def test_a_missing_partition_is_looked_up_again(monkeypatch):
    cluster = world(records=(3, 3))
    node = cluster.node("a", spec=spec())
    gone = []
    plain = node.data.ranges

    def ranges(partitions, timeout_ms, **options):
        found = dict(plain(partitions, timeout_ms, **options))
        if not gone:
            gone.extend(partitions)
            del found[partitions[0]]
        return found

    monkeypatch.setattr(node.data, "ranges", ranges)
    cluster.run(H)
    (failed,) = failures_of(node)
    assert failed.fields["partitions"] == [gone[0].partition]
    assert failed.fields["error"] == "the partition does not exist"
    assert all(held.progress is not None for held in node.held.values())


def test_the_outcome_of_a_look_up_without_a_request_is_an_error():
    lookup = StartLookup(Key("g", "t", 0).topic_partition, may_use_commit=True)
    assert not lookup.done()
    assert isinstance(lookup.outcome(), Exception)


def test_positions_of_the_log_need_no_look_up(monkeypatch):
    cluster = world(records=(3,))
    first = owning(cluster)
    first.consumer.poll(0)
    cluster.run(H)
    first.leave()
    cluster.run(H)
    requests = watch_requests(monkeypatch)
    owning(cluster, "b")
    assert not requests


def test_the_sessions_of_an_engine_share_the_limit_of_requests(monkeypatch):
    monkeypatch.setattr(start_positions, "REQUESTS_MAX", 2)
    cluster = world(records=(3,) * 4)
    requests = watch_requests(monkeypatch)
    node = claiming(cluster)
    pending = Future()
    node.engine.context.start_requests += [pending, pending]
    cluster.run_until(lambda: len(node.held) == 4, 2 * H)
    assert requests == []
    pending.set_result(None)
    answer(cluster, node)
    assert all(held.progress is not None for held in node.held.values())


def polled(node):
    """Poll once; return the records of the one partition."""
    return node.consumer.poll(0).get(T0, [])


@pytest.mark.parametrize(
    ("reset", "committed", "first"),
    [
        pytest.param("earliest", None, 0, id="earliest"),
        pytest.param("latest", None, 10, id="latest"),
        pytest.param("latest", 0, 0, id="committed-zero-is-real"),
        pytest.param("none", 4, 4, id="committed"),
        pytest.param("earliest", 10, 10, id="committed-at-the-end"),
    ],
)
def test_a_claim_starts_at_the_commit_or_by_auto_offset_reset(
    cluster, reset, committed, first
):
    if committed is not None:
        cluster.kafka.groups["g"] = {T0: committed}
    node = owning(cluster, auto_offset_reset=reset)
    cluster.kafka.produce(T0, b"new")
    assert [r.offset for r in polled(node)] == list(range(first, 11))
    assert fold(cluster).keys[KEY].position == first


def test_reset_none_without_a_position_names_the_command_and_holds_no_key(cluster):
    node = cluster.node("a", spec=spec(auto_offset_reset="none"))
    cluster.run(H)
    command = "marshal groups reset g --topic t --to-earliest"
    with pytest.raises(PositionError, match=f"positions with: {command}$"):
        node.consumer.poll(0)
    assert not node.held


def test_the_position_in_the_log_precedes_a_commit(cluster):
    a = owning(cluster, most=4)
    a.consumer.commit(polled(a))
    a.leave()
    cluster.run(200)
    cluster.kafka.groups["g"] = {T0: 9}
    b = owning(cluster, "b")
    assert [r.offset for r in polled(b)] == [4, 5, 6, 7, 8, 9]


def test_position_zero_in_the_log_precedes_auto_offset_reset(cluster):
    a = owning(cluster)
    a.leave()
    cluster.run(200)
    assert fold(cluster).keys[KEY].position == 0
    b = owning(cluster, "b", auto_offset_reset="latest")
    assert [r.offset for r in polled(b)][:1] == [0]


def test_at_most_once_starts_after_all_granted_offsets(cluster):
    a = owning(cluster, delivery=AMO, most=4)
    polled(a)
    cluster.run(40)
    cluster.crash(a)
    b = owning(cluster, "b", delivery=AMO)
    polled(b)
    cluster.run(20)
    assert [r.offset for r in polled(b)] == [4, 5, 6, 7, 8, 9]


def test_at_least_once_after_at_most_once_starts_at_position(cluster):
    a = owning(cluster, delivery=AMO, most=4)
    polled(a)
    cluster.run(40)
    a.leave()
    cluster.run(200)
    b = owning(cluster, "b")
    assert [r.offset for r in polled(b)][:1] == [4]


def test_a_look_up_that_fails_is_tried_again(cluster):
    node = cluster.node("a", spec=spec())
    node.data.cut = True
    cluster.run(3 * H)
    # Each error is reported once, even if it persists, as for a missing right.
    errors = [str(one.fields["error"]) for one in failures_of(node)]
    assert errors
    assert len(errors) == len(set(errors))
    assert polled(node) == []
    assert of(cluster, "a", Heartbeat)  # the claim is kept alive meanwhile
    node.data.cut = False
    cluster.run(H)
    assert [r.offset for r in polled(node)] == list(range(10))
