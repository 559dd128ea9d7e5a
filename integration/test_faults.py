"""Faults of clients, topics, records and processes: each is reported or harmless."""

import os
import random
import secrets
import threading
import traceback

import pytest
from domain import Recorder, opened
from kafka import TopicPartition as Place
from waiting import WAIT_MS, eventually, read_out, wall_ms

from kafka_marshal import (
    ClaimRejected,
    CoordinationError,
    Delivery,
    InvalidTransition,
    Marshal,
    PositionError,
    TopicPartition,
)
from kafka_marshal.engine import rebuilding
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_data_log
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import LIMIT_DEFAULTS, Config, Heartbeat, Limits


def config_for(domain, *, partitions, cluster_id=None):
    """Return the Config that a format would write."""
    return Config(
        generation=1,
        format_id=secrets.token_bytes(16),
        era=1_000,
        cluster_id=cluster_id or domain.topics.cluster_id(),
        heartbeat_interval_ms=domain.h_ms,
        partition_count=partitions,
        feature_level=1,
        limits=Limits(**dict.fromkeys(LIMIT_DEFAULTS)),
    )


@pytest.fixture(scope="module")
def domain(broker, unique, transport):
    with opened(broker, unique, transport=transport) as domain:
        yield domain


# --- faults of the Kafka client


def test_a_resumed_partition_is_read_to_its_end(domain):
    """kafka-python drops records of a paused partition while another one is read."""
    topic = domain.data_topic(2)
    long, short = TopicPartition(topic, 0), TopicPartition(topic, 1)
    domain.produce_to(long, 100)
    domain.produce_to(short, 5)
    data = open_data_log(ConnectionConfig(domain.servers, transport=domain.transport))
    reader = data.reader()
    try:
        reader.assign([long])
        reader.seek(long, 0)
        found = []

        def look():
            found.extend(
                (record.partition, record.offset)
                for records in reader.poll(200, 10).values()
                for record in records
            )
            return found

        eventually(look, "the first ten")
        reader.pause([long])
        reader.assign([long, short])
        reader.seek(short, 0)
        eventually(lambda: (1, 4) in look(), "the short one is read to its end")
        reader.resume([long])
        eventually(lambda: (0, 99) in look(), "the long one is read on")
        assert len(set(found)) == len(found) == 105
    finally:
        reader.close(1_000)
        data.close(1_000)


def test_a_failed_fetch_is_reported_and_retried(domain, unique, monkeypatch):
    """A transient fault is an event, not an error of the application."""
    topic = domain.data_topic(1, records_each=3)
    recorder = Recorder()
    with domain.marshal(unique("fetch"), "w1", observer=recorder) as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=1_000)
        reader = consumer._reader
        poll, faults = reader.poll, [CoordinationError("no broker answered")] * 3

        def failing(timeout_ms, max_records):
            if faults:
                raise faults.pop()
            return poll(timeout_ms, max_records)

        monkeypatch.setattr(reader, "poll", failing)
        assert [record.offset for record in read_out(consumer, 3)] == [0, 1, 2]
    assert len(recorder.named("fetch_failed")) == 3


# --- the coordination topic


def test_partitions_added_to_the_coordination_topic_are_not_used(broker, unique):
    """PROTOCOL 2.5: the log has the number of partitions; all clients continue."""
    with opened(broker, unique, partitions=2) as domain:
        topic = domain.data_topic(3)
        group = unique("grown")
        with domain.marshal(group, "w1") as one:
            consumer = one.consumer(topic)
            eventually(lambda: len(consumer.assignment()) == 3, "all are held")
            tokens = consumer.tokens()
            domain.kafka.create_partitions({domain.topic: 5})
            eventually(
                lambda: domain.topics.describe_bare(domain.topic).partition_count == 5,
                "the topic has grown",
            )
            fresh = Marshal(
                f"localhost:{domain.servers.rpartition(':')[2]}",  # its own engine
                group_id=group,
                client_id="w2",
                coordination_topic=domain.topic,
                state_dir="",
            )
            with fresh as two:
                assert two.engine is not one.engine
                with pytest.raises(ClaimRejected, match="'w1'"):
                    two.claim(topic, 0, timeout_ms=3 * domain.h_ms)
            assert consumer.tokens() == tokens
        assert {step.t for step in domain.history().of("claimed")} <= {0, 1}


# Not cleanup.policy: a process that writes to a compacted log ends.
FLIPS = {
    "compression.type": "gzip",
    "message.timestamp.type": "CreateTime",
    "retention.ms": "3600000",
    "retention.bytes": "100000000",
    "unclean.leader.election.enable": "true",
    "max.message.bytes": "30000",
}


def test_each_setting_that_is_changed_under_members_is_reported(domain, monkeypatch):
    """With a command that repairs the setting; claims are kept meanwhile."""
    monkeypatch.setattr(rebuilding, "TOPIC_CHECK_MS", 200)
    topic, recorder = domain.data_topic(1), Recorder()
    with (
        domain.marshal(domain.unique("flips"), "w1", observer=recorder) as marshal,
        marshal.claim(topic, 0, timeout_ms=WAIT_MS) as claim,
    ):
        context = marshal.engine.context
        for name, bad in FLIPS.items():
            domain.alter_coordination_topic(name, bad)
            eventually(lambda: context.wrong_settings, f"{name} is reported")
            (wrong,) = context.wrong_settings
            assert (wrong.setting, bad in wrong.problem) == (name, True)
            *_, change = wrong.command.partition(f"--entity-name {domain.topic} ")
            good = change.removeprefix(f"--add-config {name}=")
            assert good != change, wrong.command
            domain.alter_coordination_topic(name, good)
            eventually(lambda: not context.wrong_settings, f"{name} is mended")
        events = recorder.named("topic_misconfigured")
        assert [event.fields["setting"] for event in events] == list(FLIPS)
        assert claim.is_valid()


def test_claims_do_not_go_stale_in_a_topic_with_create_time(broker, unique):
    """With ``check_topic=False`` claims never go stale, so there is no takeover."""
    with opened(broker, unique, is_formatted=False, h_ms=2_000) as domain:
        domain.make_coordination_topic(
            partitions=1, **{"message.timestamp.type": "CreateTime"}
        )
        domain.append(encode(config_for(domain, partitions=1)))
        topic = domain.data_topic(1)
        group = unique("frozen")
        first = domain.marshal(group, "w1", check_topic=False)
        second = domain.marshal(group, "w2", check_topic=False)
        with first, second:
            with first.claim(topic, 0) as claim:
                with pytest.raises(ClaimRejected):
                    second.claim(topic, 0, timeout_ms=4 * domain.h_ms)
                assert claim.is_valid()
            with second.claim(topic, 0, timeout_ms=WAIT_MS) as claim:
                assert claim.is_valid()


# --- hostile bytes


def hostile_values():
    """Yield noise, deep nesting, and a record cut or changed at each byte."""
    chance = random.Random(5)  # the same each time
    yield from (b"", b"\x00", b"\xff" * 100, b"\x01\x01\x00" + b"\x91" * 5_000)
    for size in range(1, 40):
        yield chance.randbytes(size)
    beat = encode(
        Heartbeat(
            client_id="w1",
            group_id="g",
            incarnation=b"i" * 16,
            seq=1,
            topic="t",
            partition=0,
            epoch=1,
            position=5,
            rewind=True,
        )
    )
    for cut in range(1, len(beat)):
        yield beat[:cut]
    for at in range(3, len(beat)):
        yield beat[:at] + bytes([beat[at] ^ 0x55]) + beat[at + 1 :]


def test_hostile_bytes_cost_no_claim_and_no_record(domain, unique):
    """S9: they are written to every coordinating partition during consumption."""
    topic = domain.data_topic(2, records_each=200)
    group = unique("hostile")
    recorder = Recorder()
    values = list(hostile_values())
    with domain.marshal(group, "w1", observer=recorder) as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=WAIT_MS)
        found = []
        for record in consumer:
            found.append((record.partition, record.offset))
            consumer.commit(record)
            if len(found) == 400:
                break
            if values:
                domain.append(values.pop(), t=len(values) % 4)
        for left in values:
            domain.append(left, t=1)
        consumer.flush()
        assert len(set(found)) == len(found) == 400
        assert not recorder.named("claim_ended")
        assert not recorder.named("engine_failed")
    history = domain.history()
    assert [len(ts) for ts in history.tenures(group).values()] == [1, 1]
    assert history.counters()["undecodable"] > 30


# --- positions outside the log


def test_a_position_below_the_log_start_is_moved_to_it_and_reported(domain, unique):
    """Retention has deleted records that were not read yet."""
    topic = domain.data_topic(1, records_each=100)
    place = TopicPartition(topic, 0)
    group = unique("retention")
    recorder = Recorder()
    with domain.marshal(group, "w1", observer=recorder) as marshal:
        consumer = marshal.consumer(topic, max_poll_records=10)
        first = []

        def look():
            first.extend(r for rs in consumer.poll(100).values() for r in rs)
            return first

        eventually(look, "the first ten")
        consumer.commit(first)
        consumer.close()
        domain.kafka.delete_records({Place(*place): 60})
        consumer = marshal.consumer(topic, consumer_timeout_ms=1_000)
        found = read_out(consumer, 40)
        assert [record.offset for record in found] == [*range(60, 100)]
        (jump,) = recorder.named("position_jumped")
        assert jump.fields["error"].requested == len(first)
        assert jump.fields["error"].log_start == 60
        consumer.commit()
        consumer.flush()
    (known,) = domain.states(group).values()
    assert known.position == 100


@pytest.mark.parametrize("delivery", list(Delivery), ids=lambda d: d.value)
def test_a_position_beyond_the_log_end_raises_and_releases_the_claim(
    domain, unique, delivery
):
    """PROTOCOL 5.6: it is an error, and never a silent restart at earliest."""
    topic = domain.data_topic(1, records_each=10)
    place = TopicPartition(topic, 0)
    group = unique("beyond")
    domain.commit(group, place, 1_000)
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, delivery=delivery)

        def look():
            assert consumer.poll(timeout_ms=100) == {}

        with pytest.raises(PositionError) as raised:
            eventually(look, "it is reported")
        error = raised.value
        assert (error.requested, error.log_start, error.log_end) == (1_000, 0, 10)
        assert error.partition == place
        assert consumer.poll(timeout_ms=300) == {}
    assert domain.owners(group) == {place: None}


# --- handlers, and children


def test_a_stuck_handler_keeps_its_claim_and_delays_no_other_consumer(domain, unique):
    """There is no limit for handlers: the claim is kept by heartbeats."""
    topic, other = domain.data_topic(1, records_each=5), domain.data_topic(1, 5)
    group = unique("stuck")
    release = threading.Event()
    caught = []
    with domain.marshal(group, "w1") as marshal, domain.marshal(group, "w2") as rival:

        def work():
            consumer = marshal.consumer(topic, max_handling_ms=0)
            for record in consumer:
                caught.append(record)
                release.wait(timeout=120)
                consumer.commit(record)
                return

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            eventually(lambda: caught, "it is stuck")
            begun_ms = wall_ms()
            waiting = rival.consumer(topic)
            sound = marshal.consumer(other, consumer_timeout_ms=1_000)
            assert len(read_out(sound, 5)) == 5
            sound.commit()
            sound.close()
            assert sound.is_close_confirmed, "it did not wait for the other"
            assert not waiting.poll(timeout_ms=3 * domain.h_ms)

            def beats():
                return [
                    step
                    for step in domain.history().of("renewed", group_id=group)
                    if step.key.topic == topic and step.timestamp_ms > begun_ms
                ]

            eventually(lambda: len(beats()) >= 5, "it beats on")
            assert domain.owners(group)[TopicPartition(topic, 0)] == "w1"
        finally:
            release.set()
            thread.join(timeout=60)
    tenures = domain.history().tenures(group)[group, topic, 0]
    assert (tenures[0].client_id, tenures[0].position) == ("w1", 1)


def in_a_child(work) -> list[str]:
    """Run ``work`` in a forked child; return the lines that it yields."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            os.write(write, "\n".join(work()).encode())
            status = 0
        except BaseException:  # noqa: BLE001 - sent to the parent
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        message = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, message
    return message.splitlines()


def test_a_forked_child_cannot_use_its_parents_clients(domain, unique, tmp_path):
    """PROTOCOL 1.7: every use raises at once, and the parent's clients still work."""
    topic, other = domain.data_topic(1, records_each=4), domain.data_topic(1)
    group = unique("fork")
    with (
        domain.marshal(group, "w1", state_dir=tmp_path) as marshal,
        domain.admin() as admin,
    ):
        consumer = marshal.consumer(topic, max_poll_records=2)
        records = []

        def look():
            records.extend(r for rs in consumer.poll(100).values() for r in rs)
            return records

        eventually(look, "two records")
        claim = marshal.claim(other, 0)
        admin.held(group)
        uses = {
            "poll": lambda: consumer.poll(100),
            "iterate": lambda: next(iter(consumer)),
            "commit": lambda: consumer.commit(records),
            "flush": consumer.flush,
            "assignment": consumer.assignment,
            "position": lambda: consumer.position(TopicPartition(topic, 0)),
            "pause": lambda: consumer.pause(TopicPartition(topic, 0)),
            "consumer": lambda: marshal.consumer(other),
            "claim": lambda: marshal.claim(other, 0),
            "world": marshal.world,
            "owners": lambda: marshal.owners(topic),
            "check": claim.check,
            "set_position": lambda: claim.set_position(3),
            "pause_group": lambda: admin.pause_group(group, for_ms=1_000),
        }

        def child():
            for name, use in uses.items():
                try:
                    use()
                    yield f"{name}: nothing happened"
                except InvalidTransition:
                    pass
                except Exception as error:  # noqa: BLE001 - sent to the parent
                    yield f"{name}: {error!r}"
            yield f"valid: {claim.is_valid()}"
            claim.release()
            consumer.close()
            marshal.close()
            admin.close()
            # The child can open a Marshal of its own.
            for _ in range(3):
                try:
                    with domain.marshal(unique("child"), "w1") as own:
                        own.claim(other, 0)
                        yield "own: held"
                        return
                except CoordinationError as error:
                    if not error.retriable:
                        raise

        assert in_a_child(child) == ["valid: False", "own: held"]
        consumer.commit(records)
        consumer.flush()
        assert claim.is_valid()
        assert domain.owners(group)[TopicPartition(topic, 0)] == "w1"


def test_a_forked_child_does_not_keep_its_parents_client_id(domain, unique, tmp_path):
    """The child outlives the parent's client; a successor gets the client_id anyway."""
    group = unique("orphan")
    marshal = domain.marshal(group, "w1", state_dir=tmp_path)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # lives until the parent closes the pipe
        os._exit(0)
    os.close(read)
    try:
        marshal.close()
        domain.marshal(group, "w1", state_dir=tmp_path).close()
    finally:
        os.close(write)
        os.waitpid(pid, 0)
