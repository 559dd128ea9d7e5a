"""At most once, pipelined: nothing twice, and every loss in the list.

Processed records are taken from the journals of workers, lost ones from the
coordination log; the two must agree.
"""

import json
import subprocess
import sys

import pytest
from domain import Recorder, opened
from fleet import Fleet
from slices import HANG_S
from waiting import eventually

from kafka_marshal import Delivery, Losses, TopicPartition

BATCH = 25
DEPTH = 4
PARTITIONS = 2


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique) as domain:
        yield domain


def listed(found) -> dict[TopicPartition, set[int]]:
    """Return the offsets of some losses, by partition."""
    offsets: dict[TopicPartition, set[int]] = {}
    for loss in found:
        for each in loss.ranges:
            place = loss.key.topic_partition
            offsets.setdefault(place, set()).update(range(each.first, each.end))
    return offsets


def losses_of(domain, group, topic):
    return Losses.open(
        domain.servers, group_id=group, topic=topic, coordination_topic=domain.topic
    )


@pytest.fixture(scope="module")
def killed(domain, tmp_path_factory):
    """A worker is killed in the middle of its batches; another one does the rest."""
    topic = domain.data_topic(PARTITIONS, records_each=1_200)
    group = domain.unique("killed")
    home = tmp_path_factory.mktemp("killed")
    with Fleet(
        domain,
        home,
        group_id=group,
        topics=[topic],
        delivery="amo",
        reads="batches",
        max_poll_records=BATCH,
        max_granted_batches=DEPTH,
    ) as fleet:
        victim = fleet.start("w1", handle_ms=2)
        eventually(
            lambda: len(victim.journal.handled) > 12 * BATCH, "the victim is busy"
        )
        victim.kill()
        fleet.start("w2", handle_ms=1)
        produced = domain.of(topic)

        def is_done():
            states = domain.states(group)
            ends = {k.topic_partition: s.next_unclaimed() for k, s in states.items()}
            return ends == produced

        eventually(is_done, "the second worker reaches the end", 120_000)
        fleet.workers[1].ask_to_end()
        yield group, topic, fleet.journal, losses_of(domain, group, topic)


def test_no_record_is_processed_twice_after_a_kill(killed):
    _, _, journal, _ = killed
    assert journal.duplicated() == {}


def test_every_unprocessed_offset_is_listed_as_lost(
    killed, domain, record_testsuite_property
):
    """All losses are those of the dead worker, and bounded for each partition."""
    group, topic, journal, found = killed
    missing = journal.lost(domain.of(topic))
    record_testsuite_property("amo.missing", sum(map(len, missing.values())))
    reported = listed(found.lost)
    for place, offsets in missing.items():
        assert set(offsets) <= reported[place]
    assert found.at_risk == ()
    for loss in found.lost:
        record_testsuite_property(f"amo.listed.{loss.key.partition}", loss.count)
        assert (loss.key.group_id, loss.owner.client_id) == (group, "w1")
        assert (loss.ending, loss.winner) == ("taken_over", "w2")
        assert loss.count <= DEPTH * BATCH


def test_offsets_below_the_mark_were_processed_by_the_dead_worker(killed):
    """The list omits what the worker itself reported as processed."""
    _, _, journal, found = killed
    for loss in found.lost:
        done = {
            each.offset
            for each in journal.handled
            if each.client_id == "w1" and each.place == loss.key.topic_partition
        }
        assert set(range(loss.mark)) <= done


def test_the_command_lists_the_same_losses(killed, domain):
    group, topic, _, found = killed
    command = [sys.executable, "-m", "kafka_marshal_cli", "grants", "losses"]
    where = ["-b", domain.servers, "--coordination-topic", domain.topic]
    named = ["--group", group, "--topic", topic, "-o", "json"]
    ran = subprocess.run(
        [*command, *where, *named],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    output = json.loads(ran.stdout)
    assert output["lost_count"] == sum(loss.count for loss in found.lost)
    assert [(row["partition"], row["mark"]) for row in output["lost"]] == [
        (loss.key.partition, loss.mark) for loss in found.lost
    ]


def test_after_an_orderly_end_the_list_of_losses_is_exact(domain, unique):
    """It has what the consumer reports: offsets granted and never handed out."""
    topic = domain.data_topic(1, records_each=2_000)
    place = TopicPartition(topic, 0)
    group = unique("closed")
    recorder = Recorder()
    done: set[int] = set()
    with domain.marshal(group, "w1", observer=recorder) as marshal:
        consumer = marshal.consumer(
            topic,
            delivery=Delivery.AT_MOST_ONCE,
            max_poll_records=BATCH,
            max_granted_batches=DEPTH,
        )
        for batch in consumer.batches():
            done |= {record.offset for record in batch.records}
            if len(done) >= 20 * BATCH:
                break
    granted = domain.states(group)[(group, topic, 0)].granted
    report = losses_of(domain, group, topic)
    unused = set(range(granted)) - done
    assert listed(report.lost).get(place, set()) == unused
    assert report.at_risk == ()
    assert len(unused) <= DEPTH * BATCH
    reported = set()
    for event in recorder.named("grant_lost"):
        for first, last in event.fields["ranges"]:
            reported |= set(range(first, last + 1))
    assert reported == unused


def test_the_list_shows_offsets_at_risk_while_a_consumer_runs(domain, unique):
    topic = domain.data_topic(1, records_each=10 * BATCH)
    group = unique("living")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(
            topic, delivery=Delivery.AT_MOST_ONCE, max_poll_records=BATCH
        )
        batches = consumer.batches()
        first = next(batches)
        (risk,) = losses_of(domain, group, topic).at_risk
        assert risk.ending == "live"
        assert risk.ranges[0].first == first.first_offset
        second = next(batches)
        # The next heartbeat carries the mark, if no grant is requested.
        eventually(
            lambda: (
                losses_of(domain, group, topic).at_risk[0].ranges[0].first
                == second.first_offset
            ),
            "the log says that the first batch is done with",
        )
