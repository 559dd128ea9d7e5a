"""Problems name each setting of the topic that PROTOCOL 2.1 requires."""

import attrs
import pytest

from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import (
    WEEK_MS,
    Broker,
    TopicDescription,
    coordination_configs,
    is_retention_finite,
    problems,
)

GOOD = TopicDescription(
    name="__marshal",
    exists=True,
    partition_count=8,
    replication=3,
    configs=coordination_configs(3),
)


def with_configs(**changes):
    names = {name.replace("_", "."): value for name, value in changes.items()}
    return attrs.evolve(GOOD, configs=GOOD.configs | names)


@pytest.mark.parametrize("broker_count", [1, 2, 3, 9])
def test_a_topic_with_the_recommended_settings_has_no_problems(broker_count):
    made = attrs.evolve(
        GOOD,
        replication=min(3, broker_count),
        configs=coordination_configs(broker_count),
    )
    assert problems(made, broker_count=broker_count) == ()


@pytest.mark.parametrize(
    ("description", "words"),
    [
        pytest.param(with_configs(cleanup_policy="compact"), "cleanup.policy", id="c"),
        pytest.param(
            with_configs(cleanup_policy="compact,delete"), "cleanup.policy", id="c-d"
        ),
        pytest.param(
            with_configs(message_timestamp_type="CreateTime"),
            "message.timestamp.type is CreateTime",
            id="timestamp",
        ),
        pytest.param(
            with_configs(unclean_leader_election_enable="true"), "unclean", id="unclean"
        ),
        pytest.param(with_configs(retention_ms="604800000"), "retention.ms", id="ms"),
        pytest.param(with_configs(retention_bytes="1000"), "retention.bytes", id="b"),
        pytest.param(
            with_configs(max_message_bytes="65535"), "max.message.bytes", id="size"
        ),
        pytest.param(
            with_configs(min_insync_replicas="1"), "min.insync.replicas is 1", id="isr"
        ),
        pytest.param(
            with_configs(min_insync_replicas="4"), "nothing can be written", id="isr-4"
        ),
        pytest.param(attrs.evolve(GOOD, replication=2), "replication factor", id="rf"),
        pytest.param(attrs.evolve(GOOD, leaderless=(3,)), "partition 3", id="leader"),
        pytest.param(
            TopicDescription(name="__marshal", exists=False),
            "does not exist",
            id="none",
        ),
    ],
)
def test_each_wrong_setting_is_one_problem_that_names_it(description, words):
    found = problems(description, broker_count=3)
    (problem,) = found
    assert words in problem.text
    assert problem.setting is None or problem.text.startswith(problem.setting)


def test_every_unknown_setting_and_low_replication_are_reported():
    found = problems(attrs.evolve(GOOD, configs={}, replication=1), broker_count=3)
    assert len(found) == 6
    assert sum("is not known" in problem.text for problem in found) == 5


def test_small_clusters_need_no_replicas():
    small = attrs.evolve(
        with_configs(min_insync_replicas="1"), replication=1, partition_count=1
    )
    assert problems(small, broker_count=2) == ()
    assert len(problems(small, broker_count=3)) == 2


@pytest.mark.parametrize(
    ("retention_ms", "has_checkpoints", "is_right"),
    [
        (-1, False, True),
        (-1, True, True),
        (WEEK_MS, False, False),
        (WEEK_MS, True, True),
        (WEEK_MS - 1, True, False),
    ],
)
def test_finite_retention_needs_checkpoints(retention_ms, has_checkpoints, is_right):
    description = with_configs(retention_ms=str(retention_ms))
    found = problems(description, broker_count=3, has_checkpoints=has_checkpoints)
    assert (found == ()) is is_right


@pytest.mark.parametrize(
    ("value", "is_finite"), [("-1", False), ("5", True), (None, False), ("x", False)]
)
def test_retention_is_finite_only_with_a_nonnegative_retention_time(value, is_finite):
    configs = {} if value is None else {"retention.ms": value}
    assert is_retention_finite(attrs.evolve(GOOD, configs=configs)) is is_finite


@pytest.mark.parametrize(
    ("host", "address"),
    [("broker-1", "broker-1:9092"), ("::1", "[::1]:9092")],
)
def test_the_address_of_a_broker_is_accepted_as_a_server(host, address):
    broker = Broker(node_id=1, host=host, port=9092)
    assert broker.address == address
    assert ConnectionConfig(broker.address).bootstrap_servers == (address,)
