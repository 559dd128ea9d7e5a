"""Grants that other processes than the owner request, over a real broker."""

import json
import pickle
import subprocess
import sys

import pytest
from domain import opened
from waiting import eventually

from kafka_marshal.errors import MarshalError, TopicMisconfigured
from kafka_marshal.grants import (
    ClaimRef,
    OffsetRange,
    close_grant_clients,
    open_grant_client,
)
from kafka_marshal.protocol.claiming import grant_secret
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.types import Key

ACQUIRE_MS = 60_000

# What a task does: it is started with a pickled claim, and requests the given ranges.
TASK = """
import json, pickle, sys
from kafka_marshal.grants import OffsetRange, open_grant_client
connection, ref = json.loads(sys.argv[1]), pickle.loads(bytes.fromhex(sys.argv[2]))
client = open_grant_client(connection)
for line in sys.stdin:
    first, last = json.loads(line)
    found = client.acquire(ref, OffsetRange.through(first, last), timeout_ms=60000)
    print(json.dumps(found and (found.first, found.last)), flush=True)
"""


@pytest.fixture(scope="module")
def domain(broker, unique, transport):
    with opened(
        broker, unique, transport=transport, partitions=4, h_ms=5_000
    ) as domain:
        yield domain


@pytest.fixture
def grants(domain):
    yield open_grant_client(connection_of(domain))
    close_grant_clients()


def acquired(grants, ref, first, last):
    """Return the first and the last offset that are granted."""
    wanted = OffsetRange.through(first, last)
    found = grants.acquire(ref, wanted, timeout_ms=ACQUIRE_MS)
    return None if found is None else (found.first, found.last)


def connection_of(domain, **rest):
    return {
        "bootstrap_servers": domain.servers,
        "coordination_topic": domain.topic,
        "transport": domain.transport,
    } | rest


@pytest.fixture
def owner(domain):
    """A process that holds a partition, and its claim as tasks know it."""
    topic = domain.data_topic(1, records_each=10)
    group = domain.unique("group")
    with domain.marshal(group, "driver") as marshal:
        claim = marshal.claim(topic, 0)
        yield claim, ref_to(domain, Key(group, topic, 0))


def ref_to(domain, key):
    worlds = domain.history().worlds.values()
    world = next(world for world in worlds if key in world.keys)
    known = world.keys[key]
    return ClaimRef(
        group_id=key.group_id,
        client_id=known.owner.client_id,
        incarnation=known.owner.incarnation,
        topic=key.topic,
        partition=key.partition,
        epoch=known.epoch,
        token=str(world.token(key)),
        secret=grant_secret(known.resume_hash, key, epoch=known.epoch).hex(),
    )


class Task:
    """Another process that requests grants under the same claim."""

    def __init__(self, domain, ref):
        connection = json.dumps(connection_of(domain))
        self._process = subprocess.Popen(
            [sys.executable, "-c", TASK, connection, pickle.dumps(ref).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, first, last):
        self._process.stdin.write(f"[{first}, {last}]\n")
        self._process.stdin.flush()

    def granted(self):
        return json.loads(self._process.stdout.readline())

    def end(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


def test_processes_that_race_for_grants_get_disjoint_offsets(domain, owner):
    _, ref = owner
    tasks = [Task(domain, ref) for _ in range(3)]
    given = []
    try:
        for last in range(9, 100, 10):
            for task in tasks:
                task.ask(last - 9, last)
            for task in tasks:
                granted = task.granted()
                if granted is not None:
                    given += range(granted[0], granted[1] + 1)
    finally:
        for task in tasks:
            task.end()
    assert sorted(given) == list(range(100))


def test_a_released_claim_grants_nothing(domain, owner, grants):
    claim, ref = owner
    assert acquired(grants, ref, 0, 4) == (0, 4)
    assert grants.is_current(ref, timeout_ms=ACQUIRE_MS)
    claim.release()
    eventually(
        lambda: not grants.is_current(ref, timeout_ms=ACQUIRE_MS), "the log shows it"
    )
    assert acquired(grants, ref, 5, 9) is None


def test_the_owner_keeps_its_claim_while_tasks_get_grants(domain, owner, grants):
    claim, ref = owner
    for last in range(50):
        assert acquired(grants, ref, last, last) == (last, last)
    assert claim.is_valid()
    history = domain.history()
    asked = [
        line
        for line in history.steps
        if isinstance(line.record, ClaimingMessages) and line.key == ref.key
    ]
    assert len(asked) == 50


def test_one_grant_client_gets_grants_of_several_partitions(domain, grants):
    topic = domain.data_topic(6, records_each=1)
    group = domain.unique("group")
    with domain.marshal(group, "driver") as marshal:
        for number in range(6):
            marshal.claim(topic, number)
        for number in range(6):
            ref = ref_to(domain, Key(group, topic, number))
            assert acquired(grants, ref, 0, 3) == (0, 3)
            assert acquired(grants, ref, 0, 4) == (4, 4)
    states = domain.states(group)
    assert {states[Key(group, topic, n)].granted for n in range(6)} == {5}


def test_a_request_to_an_unreachable_broker_raises(domain, owner):
    _, ref = owner
    nowhere = open_grant_client(connection_of(domain, bootstrap_servers="localhost:1"))
    try:
        with pytest.raises(MarshalError, match=r"localhost:1|in time"):
            nowhere.acquire(ref, OffsetRange(0, 5), timeout_ms=1_000)
    finally:
        close_grant_clients()


def test_a_missing_coordination_topic_raises_with_the_format_command(domain, owner):
    _, ref = owner
    nowhere = open_grant_client(connection_of(domain, coordination_topic="none-such"))
    try:
        with pytest.raises(TopicMisconfigured, match="marshal topic format"):
            nowhere.acquire(ref, OffsetRange(0, 5), timeout_ms=ACQUIRE_MS)
    finally:
        close_grant_clients()
