"""Long tasks that consume through the sidecar of their host."""

import os
import signal
import sys
from pathlib import Path

import pytest
from domain import opened
from sidecars import start_sidecar

from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.spark.executor import consume_in_task

RECORDS, BATCH = 40, 10
# An owner is stale after twice that: no test here waits for it.
H_MS = 30_000
# So long without records is the end of the topic, and not a busy machine.
IDLE_MS = 8_000


@pytest.fixture(scope="module")
def python():
    """Python itself, without a fork server."""
    return sys.executable


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain


@pytest.fixture(scope="module")
def sidecar(domain):
    with start_sidecar(domain) as found:
        yield found


def working(address, topic, group, *, delivery, idle_ms, mark=None):
    """Return the work of a task; with ``mark`` it dies once, after its second batch."""

    # Nested, so that it is pickled by value: workers cannot import this file.
    def work(_):
        consuming = consume_in_task(
            topic,
            sidecar=address,
            group_id=group,
            delivery=delivery,
            max_records=BATCH,
            idle_ms=idle_ms,
        )
        for number, batch in enumerate(consuming):
            yield batch.select(["partition", "offset", "token"])
            if mark is not None and number == 1 and not Path(mark).exists():
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return work


SCHEMA = "partition int, offset long, token string"


def consumed(spark, work, *, tasks=1, barrier=False):
    frame = spark.range(0, tasks, 1, tasks)
    rows = frame.mapInArrow(work, SCHEMA, barrier).collect()
    return [(row.partition, row.offset, row.token) for row in rows]


def test_claims_outlive_a_worker_that_is_killed(spark, domain, sidecar, tmp_path):
    topic = domain.data_topic(2, records_each=RECORDS)
    group = domain.unique("executor")
    mark = str(tmp_path / "killed")
    work = working(
        sidecar.address, topic, group, delivery="alo", idle_ms=IDLE_MS, mark=mark
    )
    rows = consumed(spark, work)
    assert Path(mark).exists()
    # The second worker continued at the confirmed positions, under the same claims.
    assert len(rows) == len(set(rows))
    done = {(part, offset) for part, offset, _ in rows}
    for part in range(2):
        offsets = sorted(offset for p, offset in done if p == part)
        assert offsets == list(range(offsets[0], RECORDS))
        assert offsets[0] <= 2 * BATCH
    history = domain.history()
    for part in range(2):
        key = Key(group, topic, part)
        # One claim, from before the kill to the end.
        (claimed,) = (step for step in history.of("claimed") if step.key == key)
        assert {token for p, _, token in rows if p == part} == {history._token(claimed)}
    # At its end the task released all claims.
    assert set(domain.owners(group).values()) == {None}
    assert all(known.position == RECORDS for known in domain.states(group).values())


@pytest.mark.parametrize("delivery", ["alo", "amo"])
def test_tasks_in_barrier_mode_share_a_topic(spark, domain, sidecar, delivery):
    topic = domain.data_topic(4, records_each=RECORDS)
    group = domain.unique("barrier")
    work = working(sidecar.address, topic, group, delivery=delivery, idle_ms=IDLE_MS)
    rows = consumed(spark, work, tasks=2, barrier=True)
    done = [(part, offset) for part, offset, _ in rows]
    assert sorted(done) == [(p, n) for p in range(4) for n in range(RECORDS)]
    assert set(domain.of(topic)) == {TopicPartition(topic, n) for n in range(4)}
