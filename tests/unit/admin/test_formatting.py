import attrs
import msgspec
import numpy as np
import pytest
from enginekit import world, write

from kafka_marshal.admin.formatting import Format, format_log
from kafka_marshal.engine.checkpoint_reader import kept_in
from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import ConfigurationError, LogUnreadable, TopicMisconfigured
from kafka_marshal.protocol.codec import person_of, person_to_tags
from kafka_marshal.protocol.records import SUPPORTED_LEVEL

WANTED = Format(partition_count=2, heartbeat_interval_ms=500, limits={"keys": 7})


def blank(partitions=2):
    """Return a cluster whose coordination topic holds nothing."""
    cluster = world(partitions)
    for t in range(partitions):
        log = cluster.kafka.log(cluster.place(t))
        log.records.clear()
        log.end = 0
    return cluster


def formatted(cluster, wanted=WANTED, **rest):
    log = cluster.kafka.coordination_log()
    follower = Follower(log, cluster.clock.view(), sources=kept_in(None))
    settings = {"cluster_id": "c", "ignore_formatted": False, "timeout_ms": 100}
    return format_log(follower, wanted, **(settings | rest)), follower


def test_every_partition_gets_the_same_config():
    config, follower = formatted(blank())
    assert {each.config for each in follower.worlds} == {config}
    assert (config.feature_level, config.generation) == (SUPPORTED_LEVEL, 1)
    assert (config.heartbeat_interval_ms, config.limit("keys")) == (500, 7)


def test_a_torn_format_is_completed_as_the_person_who_began_it_wanted():
    cluster = blank()
    config, _ = formatted(cluster, tags=person_to_tags("ada"))
    assert person_of(config) == "ada"
    torn = blank()
    write(torn, config)
    other = attrs.evolve(WANTED, heartbeat_interval_ms=700, limits={})
    completed, follower = formatted(torn, other, tags=person_to_tags("bob"))
    assert {each.config for each in follower.worlds} == {completed} == {config}


def test_a_formatted_topic_is_refused_unless_ignore_formatted_is_set():
    cluster = blank()
    config, _ = formatted(cluster)
    with pytest.raises(TopicMisconfigured, match="already formatted"):
        formatted(cluster)
    again, _ = formatted(cluster, ignore_formatted=True)
    assert again == config


def test_an_unused_partition_without_its_first_records_is_ignored():
    cluster = blank()
    config, _ = formatted(cluster)
    cluster.kafka.add_partitions("__marshal", 2)
    write(cluster, b"x", 3)
    cluster.kafka.delete_records(cluster.place(3), before=1)
    again, follower = formatted(cluster, ignore_formatted=True)
    assert (again, follower.log_start_missing) == (config, [3])


@pytest.mark.parametrize("gap", [1, 2])
def test_a_config_that_partition_0_has_lost_is_written_again(gap):
    cluster = blank()
    config, _ = formatted(cluster)
    newest = msgspec.structs.replace(
        config, generation=1 + gap, era=config.era + 5, heartbeat_interval_ms=700
    )
    for t in range(1, config.partition_count):
        write(cluster, newest, t)
    restored, follower = formatted(cluster)
    assert {each.config for each in follower.worlds} == {restored} == {newest}


def test_an_empty_partition_0_gets_the_config_of_the_others():
    cluster = blank()
    config, _ = formatted(cluster)
    cluster.kafka.truncate(cluster.place(0), end=0, leader=1)
    restored, follower = formatted(cluster)
    assert {each.config for each in follower.worlds} == {restored} == {config}


def test_a_config_that_partition_0_refuses_is_not_retried_forever():
    cluster = blank()
    config, _ = formatted(cluster)
    newest = msgspec.structs.replace(config, generation=2, era=config.era + 5)
    for t in range(1, config.partition_count):
        write(cluster, newest, t)
    log = cluster.kafka.coordination_log()
    found = Follower(log, cluster.clock.view(), sources=kept_in(None))
    found.append = lambda t, record: Follower.append(found, t, config)
    with pytest.raises(TopicMisconfigured, match="torn_format"):
        format_log(
            found,
            WANTED,
            cluster_id=config.cluster_id,
            ignore_formatted=False,
            timeout_ms=100,
        )


def test_partitions_with_different_formats_are_an_error():
    cluster = blank()
    for t in range(2):
        name = bytes([t]) * 16
        config = msgspec.structs.replace(cluster.config, cluster_id="c", format_id=name)
        write(cluster, config, t)
    with pytest.raises(TopicMisconfigured, match="torn_format"):
        formatted(cluster, ignore_formatted=True)


def test_a_topic_with_fewer_partitions_than_wanted_is_refused():
    with pytest.raises(TopicMisconfigured, match="1 partition and 2"):
        formatted(blank(1))


def test_a_log_that_begins_above_offset_0_is_refused():
    cluster = world(2)
    cluster.kafka.delete_records(cluster.place(0), before=1)
    with pytest.raises(LogUnreadable, match=r"\[0\] begins above"):
        formatted(cluster)


def test_a_config_of_an_unknown_feature_level_is_unreadable():
    cluster = blank()
    write(cluster, msgspec.structs.replace(cluster.config, feature_level=99))
    with pytest.raises(LogUnreadable):
        formatted(cluster)


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_count": 0},
        {"heartbeat_interval_ms": 1},
        {"limits": {"keyes": 1}},
        {"limits": {"keys": "many"}},
        {"limits": {"keys": 0}},
        {"limits": {"keys": 2**31}},
        {"limits": {"forget_ms": -1}},
        {"partition_count": "8"},
        {"heartbeat_interval_ms": 1_000.5},
    ],
    ids=str,
)
def test_an_invalid_format_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        attrs.evolve(WANTED, **wrong)


def test_numpy_values_of_a_format_become_python_values():
    found = Format(np.int64(4), np.int32(2_000), {np.str_("keys"): np.int64(9)})
    assert found == Format(4, 2_000, {"keys": 9})
    numbers = (found.partition_count, found.heartbeat_interval_ms)
    assert {*map(type, (*numbers, *found.limits.values()))} == {int}
    assert type(next(iter(found.limits))) is str
