"""The public consumer on a real broker: its methods, one after the other."""

import math
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from domain import Recorder, opened
from waiting import eventually, poll_all, read_out

from kafka_marshal import (
    ClaimLost,
    ConfigurationError,
    Delivery,
    InvalidTransition,
    Key,
    Marshal,
    PositionError,
    TopicPartition,
)

BOTH = pytest.mark.parametrize("delivery", list(Delivery), ids=lambda d: d.value)


@pytest.fixture(scope="module")
def domain(broker, unique, transport, via):
    with opened(broker, unique, h_ms=5_000, transport=transport, via=via) as domain:
        yield domain


def take(consumer, count):
    """Return the next ``count`` records; the consumer's own time-out bounds it."""
    found = []
    for record in consumer:
        found.append(record)
        if len(found) == count:
            break
    return found


def test_the_example_of_the_readme_consumes_all_records(domain, unique):
    payments = domain.data_topic(2, records_each=50)
    handled = []

    def handle(record, *, token):
        handled.append((record.partition, record.offset, token))

    group = unique("billing")
    with (
        Marshal(
            domain.servers,
            group_id=group,
            client_id="worker-1",
            coordination_topic=domain.topic,
        ) as marshal,
        marshal.consumer(payments, delivery=Delivery.AT_LEAST_ONCE) as consumer,
    ):
        for record in consumer:
            handle(record, token=record.token)
            consumer.commit(record)
            if len(handled) == 100:
                break
    assert sorted(h[:2] for h in handled) == [(p, n) for p in (0, 1) for n in range(50)]
    assert all(token is not None for *_, token in handled)
    positions = {k.partition: s.position for k, s in domain.states(group).items()}
    assert positions == {0: 50, 1: 50}


@pytest.mark.parametrize("endless", [sys.maxsize, math.inf])
def test_timeouts_may_be_endless(domain, unique, endless):
    topic = domain.data_topic(1, records_each=3)
    marshal = Marshal(
        domain.servers,
        group_id=unique("g"),
        client_id="c",
        coordination_topic=domain.topic,
        transport=domain.transport,
        timeout_ms=endless,
    )
    consumer = marshal.consumer(topic, timeout_ms=endless)
    (records,) = consumer.poll(endless).values()
    consumer.commit(records)
    consumer.flush(endless)
    assert consumer.lag(endless) == {TopicPartition(topic, 0): 3 - len(records)}
    consumer.seek_to_beginning(timeout_ms=endless)
    consumer.close(timeout_ms=endless)
    marshal.close(timeout_ms=endless)
    assert consumer.is_close_confirmed


def test_a_seek_is_in_the_log_and_the_next_owner_starts_there(domain, unique):
    topic, group = domain.data_topic(1, records_each=30), unique("g")
    place = TopicPartition(topic, 0)
    settings = {"max_poll_records": 10, "consumer_timeout_ms": 30_000}

    def position():
        return domain.states(group)[Key(group, *place)].position

    with (
        domain.marshal(group, "a") as marshal,
        marshal.consumer(topic, **settings) as consumer,
    ):
        consumer.commit(take(consumer, 20))
        consumer.flush()
        (late, *_) = take(consumer, 1)
        consumer.seek(place, 5)
        assert position() == 5
        assert [record.offset for record in take(consumer, 3)] == [5, 6, 7]
        with pytest.raises(ClaimLost, match="before a seek"):
            consumer.commit(late)
        with pytest.raises(PositionError, match="0 to 30"):
            consumer.seek(place, 31)
        consumer.seek_to_end()
        assert position() == 30
        consumer.seek(place, 8)
    with (
        domain.marshal(group, "b") as marshal,
        marshal.consumer(topic, **settings) as consumer,
    ):
        assert [record.offset for record in take(consumer, 2)] == [8, 9]


@BOTH
def test_a_consumer_pauses_resumes_commits_and_closes(domain, unique, delivery):
    topic = domain.data_topic(2, records_each=30)
    p0, p1 = TopicPartition(topic, 0), TopicPartition(topic, 1)
    claimed = []
    group = unique("verbs")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(
            topic,
            delivery=delivery,
            max_poll_records=10,
            on_claimed=lambda p, token: claimed.append((p, token)),
        )
        eventually(lambda: consumer.assignment() == {p0, p1}, "both are held")
        assert dict(claimed) == consumer.tokens()
        assert consumer.position(p0) == 0
        consumer.pause(p1)
        assert consumer.paused() == {p1}
        records = poll_all(consumer, 30)
        assert {r.partition for r in records} == {0}
        assert [r.offset for r in records] == list(range(30))
        assert consumer.poll(timeout_ms=300) == {}
        assert consumer.position(p0) == 30
        consumer.commit(records)
        assert consumer.committed(p0) == 30
        consumer.resume(p1)
        assert len(poll_all(consumer, 30)) == 30
        consumer.commit()
        consumer.flush()
        positions = {k.partition: s.position for k, s in domain.states(group).items()}
        assert positions == {0: 30, 1: 30}
        consumer.close()
        consumer.close()
        assert set(domain.owners(group).values()) == {None}
        with pytest.raises(InvalidTransition, match="closed"):
            consumer.poll()


@pytest.mark.parametrize(
    ("reset", "expected"), [("earliest", [0, 1, 2]), ("latest", [3, 4])]
)
def test_auto_offset_reset_sets_the_start_without_a_position(
    domain, unique, reset, expected
):
    topic = domain.data_topic(1, records_each=3)
    place = TopicPartition(topic, 0)
    with domain.marshal(unique("reset"), "w1") as marshal:
        consumer = marshal.consumer(topic, auto_offset_reset=reset)
        eventually(lambda: place in consumer.assignment(), "the claim")
        domain.produce(topic, 2)
        found = [r.offset for r in poll_all(consumer, len(expected))]
        assert found[: len(expected)] == expected


def test_a_new_group_starts_at_the_committed_offset_of_kafka(domain, unique):
    """An ordinary consumer group has committed it."""
    topic = domain.data_topic(1, records_each=10)
    group = unique("migrated")
    domain.commit(group, TopicPartition(topic, 0), 6)
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=700)
        assert [r.offset for r in read_out(consumer, 4)] == [6, 7, 8, 9]


def test_stop_ends_iteration_from_another_thread(domain, unique):
    topic = domain.data_topic(1)
    with domain.marshal(unique("stop"), "w1") as marshal:
        consumer = marshal.consumer(topic)
        threading.Timer(0.3, marshal.stop).start()
        assert list(consumer) == []


def test_a_consumer_closed_at_once_holds_nothing(domain, unique):
    """It also releases claims that were pending when it closed."""
    topic = domain.data_topic(4)
    group = unique("hasty")
    with domain.marshal(group, "w1") as marshal, domain.marshal(group, "w2") as other:
        consumer = marshal.consumer(topic)
        domain.wait_owned(group, topic, by={"w1"})  # which the consumer never learnt
        consumer.close()
        marshal.consumer(topic, policy="greedy").close()
        consumer = other.consumer(topic)
        eventually(lambda: len(consumer.assignment()) == 4, "w2 gets all four")


def test_a_handler_that_raises_loses_nothing(domain, unique):
    """The context managers close; uncommitted records are handed out again."""
    topic = domain.data_topic(1, records_each=10)
    group = unique("raises")

    def work():
        with (
            domain.marshal(group, "w1") as marshal,
            marshal.consumer(topic) as consumer,
        ):
            for record in consumer:
                if record.offset == 4:
                    raise ZeroDivisionError
                consumer.commit(record)

    with pytest.raises(ZeroDivisionError):
        work()
    assert set(domain.owners(group).values()) == {None}
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=700)
        assert [r.offset for r in read_out(consumer, 6)] == [4, 5, 6, 7, 8, 9]


def open_sockets():
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(each.readlink())
            if target.startswith("socket:"):
                found.add(target)
    return found


def test_closed_clients_leave_no_thread_and_no_socket(domain, unique, tmp_path):
    topic = domain.data_topic(2, records_each=5)
    domain.sidecar_address  # noqa: B018 - what its start opens is not looked at
    threads, sockets = set(threading.enumerate()), open_sockets()
    for _ in range(2):
        group = unique("leak")
        with (
            domain.marshal(group, "w1", state_dir=tmp_path) as marshal,
            domain.marshal(group, "w2", state_dir=tmp_path),
            marshal.consumer(topic, consumer_timeout_ms=500) as consumer,
        ):
            consumer.commit(read_out(consumer, 10))
    with domain.admin() as admin:
        admin.describe_topic()
    domain.world()
    eventually(lambda: set(threading.enumerate()) <= threads, "all threads end")
    eventually(lambda: open_sockets() <= sockets, "all sockets are closed")


def ends_of(sockets):
    """Return the ports of the other ends of TCP sockets; 0 for one that listens."""
    tables = (Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6"))
    rows = [
        line.split() for table in tables for line in table.read_text().splitlines()[1:]
    ]
    return {
        int(row[2].rpartition(":")[2], 16)
        for row in rows
        if f"socket:[{row[9]}]" in sockets
    }


@pytest.mark.direct
def test_members_connect_only_to_brokers(domain, unique):
    """They listen on no port, and know each other by the log."""
    topic, group = domain.data_topic(2, records_each=5), unique("alone")
    before = open_sockets()
    with (
        domain.marshal(group, "w1") as marshal,
        domain.marshal(group, "w2") as other,
        marshal.consumer(topic) as consumer,
        other.consumer(topic) as second,
    ):
        eventually(
            lambda: len(consumer.assignment()) == len(second.assignment()) == 1,
            "they share",
        )
        consumer.commit(take(consumer, 5))
        port = int(domain.servers.rpartition(":")[2])
        assert ends_of(open_sockets() - before) == {port}


def test_a_failed_open_leaves_no_thread_and_no_socket(domain, unique):
    domain.sidecar_address  # noqa: B018 - what its start opens is not looked at
    threads, sockets = set(threading.enumerate()), open_sockets()
    group = unique("failed")
    with pytest.raises(ConfigurationError, match=f"{domain.h_ms}") as raised:
        domain.marshal(group, "w1", heartbeat_interval_ms=domain.h_ms + 1)
    assert f"{domain.h_ms + 1}" in str(raised.value)  # both values
    eventually(lambda: set(threading.enumerate()) <= threads, "all threads end")
    eventually(lambda: open_sockets() <= sockets, "all sockets are closed")


@pytest.mark.direct(reason="members of the log are sidecars")
def test_a_client_that_fails_to_open_does_not_join_the_group(domain, unique):
    group = unique("failed")
    with domain.marshal(group, "w1") as marshal:
        with pytest.raises(ConfigurationError):
            domain.marshal(group, "w2", heartbeat_interval_ms=domain.h_ms + 1)
        topic = domain.data_topic(2)
        consumer = marshal.consumer(topic)
        eventually(lambda: len(consumer.assignment()) == 2, "w1 gets both")
    assert {m.client_id for m in domain.history().members(group)} == {"w1"}


def test_every_marshal_notifies_its_own_observer(domain, unique):
    """Also if several of them share one engine."""
    one, two = Recorder(), Recorder()
    topic = domain.data_topic(1)
    with (
        domain.marshal(unique("first"), "w1", observer=one),
        domain.marshal(unique("second"), "w1", observer=two) as marshal,
    ):
        consumer = marshal.consumer(topic)
        eventually(consumer.assignment, "the claim")
        eventually(lambda: two.named("claimed"), "the second observer hears of it")


@BOTH
def test_a_later_consumer_continues_with_kept_claims(domain, unique, delivery):
    """close(release=False) keeps them; nothing is skipped, nothing is taken over."""
    topic = domain.data_topic(1, records_each=9)
    group = unique("kept")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, delivery=delivery, max_poll_records=3)
        consumer.commit(poll_all(consumer, 3))
        token = consumer.tokens()[TopicPartition(topic, 0)]
        consumer.close(release=False)
        again = marshal.consumer(topic, delivery=delivery)
        assert [r.offset for r in poll_all(again, 6)] == [3, 4, 5, 6, 7, 8]
        assert again.tokens() == {TopicPartition(topic, 0): token}
