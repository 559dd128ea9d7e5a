"""From a consumer group to claims, and back: no record lost, none handled twice."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from domain import opened
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as Place
from kafka.errors import RebalanceInProgressError
from kafka.structs import OffsetAndMetadata
from slices import HANG_S
from typer.testing import CliRunner
from waiting import eventually, subscribed

from kafka_marshal import Key, KeyHistory, Marshal
from kafka_marshal.errors import ClaimRejected, ConfigurationError, LogUnreadable
from kafka_marshal_cli.adoption import Action, adopt, plan_adoption
from kafka_marshal_cli.assembly import app

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "migration"
PARTITIONS = 3
RECORDS = 20
# How long an example waits for a record that is there, on a busy machine.
WAIT = ("--idle-ms", "60000")


@pytest.fixture
def domain(broker, unique):
    with opened(broker, unique) as made:
        yield made


def ran(domain, name, *arguments):
    """Run an example to its end; return the (partition, offset) pairs it handled."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        env=os.environ
        | {
            "BOOTSTRAP_SERVER": domain.servers,
            "MARSHAL_COORDINATION_TOPIC": domain.topic,
            "MARSHAL_STATE_DIR": "",
        },
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"^done (\d+) (\d+)$", done.stdout, re.MULTILINE)
    return [(int(part), int(offset)) for part, offset in pairs]


def everything(count, *, first=0):
    return [
        (part, offset) for part in range(PARTITIONS) for offset in range(first, count)
    ]


def rest_of(*done):
    """Return arguments with which an example handles the rest, and ends."""
    left = PARTITIONS * RECORDS - sum(map(len, done))
    return ("--max-records", str(left), *WAIT)


def adoption(domain, group, *arguments):
    return CliRunner().invoke(
        app,
        ["groups", "adopt", group, *arguments, "-o", "json"],
        env={
            "MARSHAL_BOOTSTRAP_SERVER": domain.servers,
            "MARSHAL_COORDINATION_TOPIC": domain.topic,
        },
    )


def adopted(domain, group, *arguments, code=0):
    done = adoption(domain, group, *arguments)
    assert done.exit_code == code, (done.exit_code, done.stdout, done.stderr)
    return json.loads(done.stdout) if done.stdout else done.stderr


def commit(domain, group, offsets):
    consumer = KafkaConsumer(
        bootstrap_servers=domain.servers, group_id=group, enable_auto_commit=False
    )

    consumer.assign([Place(*place) for place in offsets])
    consumer.commit(
        {Place(*p): OffsetAndMetadata(at, "", -1) for p, at in offsets.items()}
    )
    consumer.close()


def committed(consumer):
    """Commit; return False while the consumer's group rebalances."""
    try:
        consumer.commit()
    except RebalanceInProgressError:
        consumer.poll(200)
        return False
    return True


def test_a_group_is_adopted_and_moved_back_without_loss_or_repetition(domain, unique):
    topic, group = domain.data_topic(PARTITIONS, RECORDS), unique("billing")
    before = ran(domain, "kafka_group", topic, group, "--max-records", "25", *WAIT)

    # A plan writes nothing.
    plan = adopted(domain, group)
    assert {row["action"] for row in plan["partitions"]} == {"set"}
    assert not plan["is_executed"]
    assert not domain.world().claims(group)

    assert adopted(domain, group, "--execute", "--as", "alice")["is_executed"]
    (first, *_) = plan["partitions"]
    key = Key(group, topic, first["partition"])
    events = KeyHistory.open(
        domain.servers, key=key, coordination_topic=domain.topic
    ).events
    assert [e.person for e in events if e.what == "claimed"] == ["alice"]
    some = ("--max-records", "15", *WAIT)
    during = ran(domain, "marshal_group", topic, group, "w1", *some)
    # A second adoption has nothing to do, and sets no position back.
    again = adopted(domain, group, "--execute")
    assert {row["action"] for row in again["partitions"]} == {"done"}

    # Mirrored offsets let the old group continue.
    rest = rest_of(before, during)
    after = ran(domain, "kafka_group", topic, group, *rest)
    assert sorted(before + during + after) == everything(RECORDS)


def test_adoption_under_another_name_does_not_change_the_old_group(domain, unique):
    topic, old, new = domain.data_topic(PARTITIONS, RECORDS), unique("v1"), unique("v2")
    before = ran(domain, "kafka_group", topic, old, "--max-records", "25", *WAIT)
    adopted(domain, new, "--from-group", old, "--execute")
    after = ran(domain, "marshal_group", topic, new, "w1", *rest_of(before))
    assert sorted(before + after) == everything(RECORDS)
    rest = ran(domain, "kafka_group", topic, old, *rest_of(before))
    assert sorted(before + rest) == everything(RECORDS)


def test_a_group_with_active_consumers_is_not_adopted(domain, unique):
    topic, group = domain.data_topic(PARTITIONS, RECORDS), unique("busy")
    consumer = subscribed(
        topic,
        bootstrap_servers=domain.servers,
        group_id=group,
        auto_offset_reset="earliest",
        max_poll_records=5,
    )
    try:
        eventually(lambda: consumer.poll(200), "records of the old group")
        eventually(lambda: committed(consumer), "a commit outside of a rebalance")
        checked = adoption(domain, group)
        assert json.loads(checked.stdout)["is_source_active"]
        assert f"stop the consumers of group {group!r}" in checked.stderr
        found = adopted(domain, group, "--execute", code=3)
        assert not found["is_executed"]
        assert not domain.world().claims(group)
    finally:
        consumer.close()
    assert adopted(domain, group, "--execute")["is_executed"]


def test_a_held_partition_blocks_the_adoption_of_all_partitions(domain, unique):
    topic, group = domain.data_topic(PARTITIONS, RECORDS), unique("blocked")
    commit(domain, group, {(topic, part): 5 for part in range(PARTITIONS)})
    with (
        Marshal(
            domain.servers,
            group_id=group,
            client_id="w1",
            coordination_topic=domain.topic,
            state_dir="",
        ) as marshal,
        marshal.claim(topic, 1),
    ):
        plan = adopted_plan(domain, group)
        assert [step.action for step in plan.steps] == [
            Action.SET,
            Action.HELD,
            Action.SET,
        ]
        with pytest.raises(ClaimRejected, match="held by 'w1'"):
            adopt(connection_of(domain), plan)
    positions = {key: known.position for key, known in domain.world().claims(group)}
    assert set(positions.values()) == {None}


def test_offsets_beyond_the_log_are_shown_and_not_adopted(domain, unique):
    topic, group = domain.data_topic(PARTITIONS, RECORDS), unique("odd")
    commit(domain, group, {(topic, 0): 5, (topic, 1): 999})
    plan = adopted_plan(domain, group)
    assert [step.action for step in plan.steps] == [Action.SET, Action.BEYOND]
    # Only topics that are named are adopted.
    with pytest.raises(ClaimRejected, match="no committed offsets of these topics"):
        adopted_plan(domain, group, topics=["elsewhere"])


def connection_of(domain):
    return {"bootstrap_servers": domain.servers, "coordination_topic": domain.topic}


def adopted_plan(domain, group, **options):
    return plan_adoption(connection_of(domain), group_id=group, **options)


def test_offsets_committed_after_the_plan_fail_the_adoption(domain, unique):
    topic, group = domain.data_topic(PARTITIONS, RECORDS), unique("moving")
    commit(domain, group, {(topic, 0): 5})
    plan = adopted_plan(domain, group)
    commit(domain, group, {(topic, 0): 6})
    with pytest.raises(ClaimRejected, match="was active during"):
        adopt(connection_of(domain), plan)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["nobody"], 3, "no committed offsets", id="unknown-group"),
        pytest.param(["a b"], 2, "not a valid group", id="bad-name"),
        pytest.param(["g", "--from-topic", "nowhere"], 1, "does not exist", id="topic"),
    ],
)
def test_an_error_about_wrong_arguments_names_the_mistake(
    domain, arguments, code, words
):
    assert words in adopted(domain, *arguments, code=code)


def test_adoption_refuses_its_own_coordination_topic_as_source(domain):
    with pytest.raises(ConfigurationError, match="name another topic"):
        adopted_plan(domain, "g", from_topic=domain.topic)
    with pytest.raises(LogUnreadable, match="does not exist"):
        adopted_plan(domain, "g", from_topic="nowhere")


def test_positions_of_the_go_original_are_adopted(domain, unique):
    topic, group = domain.data_topic(PARTITIONS, RECORDS), unique("original")
    theirs = unique("original-marshal")
    domain.topics.create_data_topic(theirs, partitions=2, replication=1)
    long_ago = int(time.time()) - 3_600

    def line(kind, part, offset, at_s=long_ago):
        text = f"{kind}/1/{at_s}/i1/client-1/{group}/{topic}/{part}"
        return f"{text}/{offset}".encode()

    producer = KafkaProducer(bootstrap_servers=domain.servers)
    for value in (
        line("Heartbeat", 0, 3),
        line("Heartbeat", 0, 9),
        line("ReleasingPartition", 1, 4),
        b"not a record",
        line("Heartbeat", 2, 2),
    ):
        producer.send(theirs, value, partition=1).get(timeout=60)
    # The original commits to Kafka too; the larger of the two counts, as there.
    commit(domain, group, {(topic, 0): 7, (topic, 2): 6})

    plan = adopted(domain, group, "--from-topic", theirs, "--execute")
    rows = {
        row["partition"]: (row["position"], row["source"]) for row in plan["partitions"]
    }
    assert rows == {0: (9, "heartbeat"), 1: (4, "heartbeat"), 2: (6, "committed")}
    assert plan["unreadable_count"] == 1
    handled = ran(domain, "go_original", topic, group, "w1", "--idle-ms", "8000")
    starts = {0: 9, 1: 4, 2: 6}
    assert sorted(handled) == [
        (part, offset)
        for part in range(PARTITIONS)
        for offset in range(starts[part], RECORDS)
    ]

    # A recent heartbeat shows that the source group is active.
    producer.send(theirs, line("Heartbeat", 0, 9, int(time.time())), partition=1).get(
        60
    )
    producer.close()
    assert adopted_plan(domain, group, from_topic=theirs).is_source_active
