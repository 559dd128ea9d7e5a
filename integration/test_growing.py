"""A keyed data topic grows on a real broker, by the command."""

import signal

import pytest
from clikit import Cli
from domain import opened
from kafka import KafkaProducer
from waiting import eventually, poll_all

from kafka_marshal_cli.exits import ExitCode

OLD, NEW, EACH, MORE = 4, 8, 6, 3
ENDS = [EACH + MORE] * OLD


@pytest.fixture
def domain(broker, unique):
    with opened(broker, unique, h_ms=1_000) as domain:
        yield domain


@pytest.fixture
def cli(domain, tmp_path):
    return Cli(domain, tmp_path)


def consume(domain, group, topic, count):
    """Let a group process so many records, and leave."""
    with domain.marshal(group, f"{group}-1") as marshal:
        consumer = marshal.consumer(topic)
        found = poll_all(consumer, count)
        consumer.commit()
        consumer.close()
    assert len(found) == count


def partitions(domain, topic):
    return domain.topics.describe_bare(topic).partition_count


def sources(found):
    return [
        (each["partition"], each["position"], each["end_offset"], each["waiting"])
        for each in found["sources"]
    ]


def grow_actions(cli, *group):
    found = cli.json("groups", "history", *group)["actions"]
    return [each for each in found if each["kind"] == "grow"]


def test_the_command_grows_a_topic_and_records_its_ends(domain, cli, unique):
    topic, group = domain.data_topic(OLD, EACH), unique("group")
    consume(domain, group, topic, OLD * EACH)
    domain.produce(topic, MORE)
    show = ("groups", "grow", "--topic", topic)
    arguments = (*show, "--partitions", str(NEW))

    dry = cli.json(*arguments)
    assert (dry["is_executed"], dry["added_count"]) == (False, NEW - OLD)
    assert sources(dry) == [(n, EACH, ENDS[n], [n + OLD]) for n in range(OLD)]
    assert partitions(domain, topic) == OLD
    assert cli.json(*show)["growths"] == []
    assert grow_actions(cli, group) == []

    done = cli.json(*arguments, "--settle", "1s", "--execute", "--as", "ada")
    assert done["steps"] == ["announce", "add", "settle", "end"]
    assert partitions(domain, topic) == NEW
    assert sources(done) == sources(dry)
    (growth,) = cli.json("topic", "info")["growths"]
    assert (growth["state"], growth["end_offsets"]) == ("ended", ENDS)
    assert growth["topic_id"] == domain.topics.describe_bare(topic).topic_id.hex()
    (action,) = grow_actions(cli, group)
    assert (action["outcome"], action["person"]) == ("accepted", "ada")
    assert action["text"].startswith(
        f"accepted: topic {topic} from {OLD} to {NEW} partitions; {NEW - OLD} "
        f"partitions announced within 0.0 s, {OLD} partition ends recorded within "
    )
    assert cli.json(*arguments, "--execute")["is_executed"] is False

    consume(domain, group, topic, OLD * MORE)
    assert sources(cli.json(*show)) == [(n, ENDS[n], ENDS[n], []) for n in range(OLD)]
    assert cli.json("log", "verify")["result"] == "ok"


def test_a_growth_whose_command_was_killed_is_continued(domain, cli):
    topic = domain.data_topic(OLD, EACH)
    show = ("groups", "grow", "--topic", topic)
    arguments = (*show, "--partitions", str(NEW))
    with cli.started(*arguments, "--execute") as running:
        eventually(lambda: "waiting until" in running.stderr, "producers get time")
        assert running.end(signal.SIGKILL) == -signal.SIGKILL
    assert partitions(domain, topic) == NEW
    (growth,) = cli.json(*show)["growths"]
    assert (growth["state"], growth["end_offsets"]) == ("announced", None)
    refused = cli.run(*show, "--partitions", "12", "--execute", code=ExitCode.REFUSED)
    assert f"--partitions {NEW} --execute" in refused.stderr
    assert grow_actions(cli)[0]["outcome"] == "open"
    domain.produce(topic, MORE)

    done = cli.json(*arguments, "--settle", "1s", "--execute")
    assert done["steps"] == ["settle", "end"]
    (growth,) = cli.json(*show)["growths"]
    assert (growth["state"], growth["end_offsets"]) == ("ended", ENDS)

    found = cli.json(*show, "--withdraw", "--execute")
    assert found["steps"] == ["withdraw"]
    assert cli.json(*show)["growths"] == []
    (action,) = grow_actions(cli)
    assert (action["outcome"], action["ended"]["how"]) == ("accepted", "withdrawn")


def test_recorded_ends_include_records_of_open_transactions(domain, cli):
    """The open transaction may be committed later, with records at earlier offsets."""
    topic = domain.data_topic(1, EACH)
    producer = KafkaProducer(
        bootstrap_servers=domain.servers,
        transactional_id=domain.unique("transaction"),
    )
    try:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"open", partition=0)
        producer.flush(timeout=60)
        arguments = ("groups", "grow", "--topic", topic)
        cli.run(*arguments, "--partitions", "2", "--settle", "0s", "--execute")
        (growth,) = cli.json(*arguments)["growths"]
        assert growth["end_offsets"] == [EACH + 1]
        producer.abort_transaction()
    finally:
        producer.close(timeout=5)
