"""A task whose driver is stopped, while another owner takes its partition over.

The driver is a process of its own with the claims; the test does what a task does. A
driver that is stopped, dead or beyond a cut network looks the same from outside: it
renews nothing, and nobody notifies its tasks.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from domain import opened
from sidecars import start_sidecar
from waiting import poll_all

from kafka_marshal import ClaimLost, Delivery, TopicPartition
from kafka_marshal.grants import ClaimRef, close_grant_clients
from kafka_marshal.kafka_io.slices import CHUNK_RECORDS
from kafka_marshal.spark import fetch
from kafka_marshal.spark.fencing import Fence
from kafka_marshal.spark.options import parse
from kafka_marshal.spark.planning import Task
from kafka_marshal.spark.rows import columns

H_MS = 2_000
RECORDS = 5 * CHUNK_RECORDS // 2

# Holds a partition as a query's driver does, and confirms its batch on request.
PROGRAM = """
import json, sys
from kafka_marshal import ClaimLost, Delivery, Marshal, TopicPartition
from kafka_marshal.config import ConsumerConfig

servers, coordination, group, topic, delivery, end = sys.argv[1:]
place = TopicPartition(topic, 0)
with Marshal(
    servers, group_id=group, client_id="driver", coordination_topic=coordination,
    state_dir="",
) as marshal, marshal.ranges(
    ConsumerConfig(topics=(topic,), delivery=Delivery(delivery), max_handling_ms=0)
) as ranges:
    while place not in ranges.held():
        ranges.wait_for_change(100)
    held = ranges.held()[place]
    ranges.begin(place, held.token, first=0, end=int(end))
    owner = held.owner
    print(json.dumps([owner.client_id, owner.incarnation.hex(), held.epoch,
                      str(held.token), held.secret]), flush=True)
    sys.stdin.readline()
    try:
        ranges.commit(place, held.token, end=int(end))
        ranges.flush()
    except ClaimLost:
        print(json.dumps("lost"), flush=True)
    else:
        print(json.dumps("confirmed"), flush=True)
"""


@pytest.fixture(scope="module")
def python():
    """Python itself, without a fork server."""
    return sys.executable


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS, transport="fast") as domain:
        yield domain


@pytest.fixture(scope="module")
def topic(domain):
    return domain.data_topic(1, records_each=RECORDS)


class Driver:
    """A process that holds the topic's partition for a batch.

    Attributes:
        claim: The claim that its tasks get.
    """

    def __init__(self, domain, group, topic, *, delivery):
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", PROGRAM, domain.servers, domain.topic),
                *(group, topic, delivery, str(RECORDS)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        client_id, incarnation, epoch, token, secret = self._line()
        self.claim = ClaimRef(
            group_id=group,
            client_id=client_id,
            incarnation=bytes.fromhex(incarnation),
            topic=topic,
            partition=0,
            epoch=epoch,
            token=token,
            secret=secret,
        )

    def _line(self):
        line = self._process.stdout.readline()
        assert line, "the driver has ended"
        return json.loads(line)

    def cut_off(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def comes_back(self):
        """Resume it and let it confirm its batch; return the result."""
        os.kill(self._process.pid, signal.SIGCONT)
        self._process.stdin.write("confirm\n")
        self._process.stdin.flush()
        return self._line()

    def close(self):
        self._process.kill()
        self._process.wait(timeout=60)
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture(params=["log", "sidecar", "dead sidecar"])
def grants(request, domain):
    """Options of a task: for the log, for a sidecar, or for one that has died."""
    if request.param == "log":
        yield {}
    else:
        with start_sidecar(domain, client_id=domain.unique("host")) as sidecar:
            if request.param == "dead sidecar":
                sidecar.kill()
            yield {"sidecar": sidecar.address}
    close_grant_clients()


def read(domain, topic, claim, *, delivery, grants):
    """Do what a task does with all of the partition."""
    options = {
        "kafka.bootstrap.servers": domain.servers,
        "coordinationTopic": domain.topic,
        "subscribe": topic,
        "group": claim.group_id,
        "delivery": delivery,
        "transport": "fast",
        **grants,
    }
    task = Task(partition=TopicPartition(topic, 0), first=0, end=RECORDS, claim=claim)
    schema = columns(has_headers=False, has_token=False)
    return fetch.read(task, parse(options), schema=schema), Fence.of(options)


def taken_over(domain, group, topic):
    """Let another client take the partition over and poll records of it."""
    marshal = domain.marshal(group, "next")
    found = poll_all(marshal.consumer(topic, max_handling_ms=0), 1)
    assert found[0].offset == 0
    return marshal


def test_at_least_once_a_task_stops_when_its_claim_is_taken_over(domain, topic, grants):
    group = domain.unique("cut")
    driver = Driver(domain, group, topic, delivery="alo")
    try:
        rows, fence = read(domain, topic, driver.claim, delivery="alo", grants=grants)
        assert next(rows).num_rows > 0
        assert fence.holds(topic, 0, token=driver.claim.token)
        driver.cut_off()
        with taken_over(domain, group, topic):
            with pytest.raises(ClaimLost, match="reads no further"):
                next(rows)
            assert not fence.holds(topic, 0, token=driver.claim.token)
            # A task that only starts now yields nothing at all.
            rows, _ = read(domain, topic, driver.claim, delivery="alo", grants=grants)
            with pytest.raises(ClaimLost):
                next(rows)
            assert driver.comes_back() == "lost"
            # Its uncommitted records are not confirmed.
            (state,) = domain.states(group).values()
            assert state.epoch > driver.claim.epoch
            assert (state.position or 0) < RECORDS
    finally:
        driver.close()


def test_at_most_once_the_next_owner_gets_no_granted_offsets(domain, topic):
    """Only the task reads the offsets that were granted to it before the cut."""
    group = domain.unique("cut")
    driver = Driver(domain, group, topic, delivery="amo")
    try:
        rows, _ = read(domain, topic, driver.claim, delivery="amo", grants={})
        done = next(rows).column("offset").to_pylist()
        driver.cut_off()
        domain.produce(topic, 10)
        with domain.marshal(group, "next") as marshal:
            consumer = marshal.consumer(topic, delivery=Delivery.AT_MOST_ONCE)
            found = poll_all(consumer, 10)
            done += [n for batch in rows for n in batch.column("offset").to_pylist()]
            late, _ = read(domain, topic, driver.claim, delivery="amo", grants={})
            assert list(late) == []
        assert done == list(range(RECORDS))
        assert [record.offset for record in found] == list(range(RECORDS, RECORDS + 10))
        assert driver.comes_back() == "lost"
    finally:
        driver.close()
        close_grant_clients()
