"""The read-only view: now, and as of a time."""

import json
import subprocess
import sys

import pytest
from domain import opened
from waiting import WAIT_MS, eventually, read_out, wall_ms

from kafka_marshal import World


@pytest.fixture(scope="module")
def domain(broker, unique, transport):
    with opened(broker, unique, h_ms=5_000, transport=transport) as domain:
        yield domain


@pytest.fixture(scope="module")
def story(domain, unique):
    """A claim, some progress, a release; with wall times in between."""
    group = unique("story")
    topic = domain.data_topic(1, records_each=5)
    moments = {"before": wall_ms()}
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=700)
        consumer.commit(read_out(consumer, 5))
        consumer.flush()
        moments["held"] = wall_ms()
    moments["after"] = wall_ms()
    return group, moments


def owners(world, group):
    found = []
    for _, state in world.claims(group):
        found.append((state.owner and state.owner.client_id, state.position))
    return found


def test_the_world_at_a_time_has_the_owners_of_that_time(domain, story):
    group, moments = story
    assert owners(domain.world(time_ms=moments["before"]), group) == []
    assert owners(domain.world(time_ms=moments["held"]), group) == [("w1", 5)]
    assert owners(domain.world(time_ms=moments["after"]), group) == [(None, 5)]
    assert owners(domain.world(), group) == [(None, 5)]


def test_all_views_and_a_plain_fold_have_the_same_state(domain, unique):
    """Two readers and a plain fold of the whole log give the same object."""
    group = unique("agree")
    topic = domain.data_topic(3)
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic)
        eventually(lambda: len(consumer.assignment()) == 3, "all are held")
        marshal.close(release=False)
    views = [domain.world().to_object() for _ in range(2)]
    plain = World(list(domain.history().worlds.values()), {}).to_object()
    assert views[0] == views[1] == plain
    assert json.loads(json.dumps(plain)) == plain


def test_the_world_includes_all_records_acknowledged_before_its_query(domain, unique):
    topic = domain.data_topic(1)
    for _ in range(3):
        group = unique("now")
        with domain.marshal(group, "w1") as marshal:
            claim = marshal.claim(topic, 0)
            assert owners(domain.world(), group) == [("w1", None)]
            (row,) = [
                row
                for part in marshal.world()["partitions"].values()
                for row in part["claims"]
                if row["group_id"] == group
            ]
            assert row["token"] == str(claim.token)


OPENING = """
import sys
from kafka_marshal import TopicPartition, World
from kafka_marshal.views.log_ends import LogEnds
servers, topic, transport = sys.argv[1:]
World.open(servers, coordination_topic=topic, transport=transport, state_dir="")
missing = TopicPartition(topic, 1_000)
with LogEnds(servers, transport=transport) as ends:
    found = ends.of([TopicPartition(topic, 0), missing, TopicPartition("no-such", 0)])
print(len(found), "kafka" in sys.modules)
"""


def test_a_view_loads_one_client_library(domain, transport):
    """kafka-python takes longer to load than a small log to read."""
    command = (sys.executable, "-c", OPENING, domain.servers, domain.topic, transport)
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=WAIT_MS / 1000
    )
    assert done.stdout.split() == ["1", str(transport == "kafka-python")]
