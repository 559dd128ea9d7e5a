"""The coordination topic itself is abused, on a cluster of three.

Foreign programs write garbage into it, its settings change, a leader is elected that
lacks acknowledged records. Judged from the log and journals.
"""

from contextlib import suppress

import pytest
from hostile import Flood, hostile_values
from kafka import TopicPartition as Place
from kafka.errors import KafkaError
from ordeal import Ordeal
from waiting import eventually, wall_ms

PARTITIONS = 4
ROOMY_MS = 10_000


def wait_for(span_ms):
    since_ms = wall_ms()
    eventually(lambda: wall_ms() > since_ms + span_ms, "some time", span_ms + 20_000)


@pytest.mark.proof
def test_hostile_flood(cluster, unique, tmp_path, record):
    """A flood of garbage, cut frames and an impostor's records."""
    title = "1,500 hostile records a second in __marshal, for 2 H"
    found = record("hostile_flood", title, ROOMY_MS)
    servers = cluster.bootstrap_servers
    with Ordeal(found, servers, unique, tmp_path) as it:
        it.start()
        before = it.claims()
        values = hostile_values(before, seed=1)
        since_ms = wall_ms()
        with Flood(
            servers,
            it.domain.topic,
            partitions=PARTITIONS,
            values=values,
            each_second=1_500,
        ) as flood:
            wait_for(2 * found.h_ms)
            it.wait_flowing()
        it.note_gaps(since_ms)
        it.note_kept(before)
        it.settle()
        it.judge()
        counters = it.domain.history().counters()
        assert counters["undecodable"] > flood.sent // 10
        assert counters["held"] > 0
        assert counters["not_owner"] > 0
        found.notes.append(f"{flood.sent} records; refused and ignored: {counters}")


@pytest.mark.proof
def test_settings_flipped(cluster, unique, tmp_path, record):
    """Time of creation, short retention, compaction, each for two intervals."""
    title = "__marshal: CreateTime, retention of a second, compaction; 2 H each"
    found = record("settings_flipped", title)
    with Ordeal(found, cluster.bootstrap_servers, unique, tmp_path) as it:
        it.start()
        since_ms = wall_ms()
        flips = {
            "message.timestamp.type": ("CreateTime", "LogAppendTime"),
            "retention.ms": ("1000", "-1"),
            "cleanup.policy": ("compact", "delete"),
        }
        for name, (bad, good) in flips.items():
            it.domain.alter_coordination_topic(name, bad)
            # The history is read before retention deletes records.
            until_ms = wall_ms() + 2 * found.h_ms
            while wall_ms() < until_ms:
                it.domain.history()
                wait_for(100)
            it.domain.alter_coordination_topic(name, good)
            it.wait_flowing(is_replacing=True)
        # A writer to a compacted log ends (2.1), and names the command to run.
        ended = [line for f in it.fleets.values() for line in f.journal.of("failed")]
        assert {line["kind"] for line in ended} <= {"LogUnwritable"}
        assert all("cleanup.policy" in line["says"] for line in ended)
        it.note_gaps(since_ms)
        it.settle()
        it.judge()


@pytest.mark.proof
def test_unclean_election(cluster, unique, tmp_path, record):
    """A leader is elected that lacks acknowledged records: readers must notice."""
    title = "unclean election of a leader of T0 that lacks the last records"
    found = record("unclean_election", title)
    settings = {"partitions": 1}
    servers = cluster.bootstrap_servers
    with Ordeal(found, servers, unique, tmp_path, domain_settings=settings) as it:
        it.start()
        topic = it.domain.topic
        leader = cluster.leader(topic, 0)
        lagging = leader % 3 + 1
        it.domain.kafka.alter_partition_reassignments(
            {Place(topic, 0): [leader, lagging]}
        )
        it.domain.alter_coordination_topic("min.insync.replicas", "1")
        it.domain.alter_coordination_topic("unclean.leader.election.enable", "true")
        cluster.wait_in_sync(topic, nodes=[leader, lagging])
        cluster.kill(lagging)
        cluster.wait_in_sync(topic, nodes=[leader])
        # What is acknowledged from here on is lost: beats, grants, positions.
        it.wait_all_work({"w1", "w2"})
        wait_for(found.h_ms)
        team = {(each, name) for each in it.fleets for name in ("w1", "w2")}
        since_ms = wall_ms()
        cluster.kill(leader)
        cluster.restart(lagging)
        elect_unclean(cluster, it, topic, lagging)
        cluster.restart(leader)
        wait_for(4 * found.h_ms)
        assert it.noticed("log_truncated") == team, "a reader did not notice"
        found.notes.append("every reader noticed that the log went back")
        it.wait_flowing(is_replacing=True)
        it.note_gaps(since_ms)
        it.settle_truncated()


def elect_unclean(cluster, it, topic, node):
    """Ask for the election until the node leads; the controller may do it itself."""

    def is_led():
        if cluster.leaders(topic)[0] == node:
            return True
        # A request to a node that is not up yet fails; the next one is tried.
        with suppress(KafkaError):
            it.domain.kafka.elect_leaders(1, {topic: [0]}, raise_errors=False)
        return False

    eventually(is_led, f"node {node} leads", 60_000)
