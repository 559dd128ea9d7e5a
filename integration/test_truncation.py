"""The coordination log loses its end while no process runs; snapshots reveal it.

At most once: a process that starts on a host reports every offset whose grant the log
has lost, as far as a snapshot of the host has the grant (PROTOCOL 7.5). The log is cut
on the disk of a real broker.
"""

from typing import NamedTuple

import pytest
from cutting import cut_log, kept_files
from domain import opened
from fleet import Fleet
from waiting import WAIT_MS, eventually

from kafka_marshal.protocol.records import ClaimingMessages, ClaimingPartition
from kafka_marshal.protocol.snapshot import from_bytes
from kafka_marshal.protocol.types import Key
from kafka_marshal.snapshots import read_file
from kafka_marshal.testing.broker import EmbeddedBroker

BATCH = 20
RECORDS = 20_000
KEEP_MS = 500
PYTHON = "kafka-python"


class Case(NamedTuple):
    """How a process ends, where the log is cut, and which process starts next."""

    transport: str
    is_killed: bool
    lost: type
    name: str


@pytest.fixture(scope="module")
def own_broker():
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
def domain(own_broker, unique):
    with opened(own_broker, unique, partitions=1) as domain:
        yield domain


def fleet_of(domain, home, group, topic):
    return Fleet(
        domain,
        home,
        group_id=group,
        topics=[topic],
        delivery="amo",
        reads="batches",
        max_poll_records=BATCH,
        handle_ms=20,
        release=False,
        keep_ms=KEEP_MS,
        # Otherwise the next process begins at the offsets that Kafka has of the group.
        mirror_offsets=False,
    )


def kept_granted(home, key):
    """Return the granted offset of a key by the host's snapshots, None without one."""
    for path in kept_files(home):
        for section in read_file(path):
            known = from_bytes(section.state.state).keys.get(key)
            if known is not None:
                return known.granted
    return None


def first_offset(domain, kind):
    """Return the offset of the first accepted record of a kind."""
    return next(
        step.offset
        for step in domain.history().steps
        if isinstance(step.record, kind) and step.transition.outcome == "accepted"
    )


def exposed(worker, key, *, timeout_ms=WAIT_MS):
    """Return the offsets of a key that a worker reports, once it reports some."""

    def look():
        found = set()
        for line in worker.journal.of("observed", name="grant_exposed"):
            fields = line["fields"]
            assert fields["key"] == list(key)
            found |= set(range(fields["first"], fields["last"] + 1))
        return found

    return eventually(look, f"{worker.client_id} reports what is exposed", timeout_ms)


def offsets_of(worker):
    return [each.offset for each in worker.journal.handled]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case("fast", True, ClaimingMessages, "w1"), id="killed-grants-same"
        ),
        pytest.param(
            Case("fast", False, ClaimingPartition, "w1"),
            id="stopped-claim-same",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            Case(PYTHON, True, ClaimingPartition, "w2"), id="killed-claim-other"
        ),
        pytest.param(
            Case(PYTHON, False, ClaimingMessages, "w2"),
            id="stopped-grants-other",
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_start_reports_grants_of_the_snapshot_that_the_log_has_lost(
    own_broker, domain, unique, tmp_path, case
):
    domain.transport = case.transport
    topic, group = domain.data_topic(1, records_each=RECORDS), unique("cut")
    key = Key(group, topic, 0)
    with fleet_of(domain, tmp_path, group, topic) as fleet:
        first = fleet.start("w1")
        eventually(lambda: len(offsets_of(first)) > 3 * BATCH, "it works")
        if case.is_killed:
            eventually(lambda: kept_granted(tmp_path, key), "its host keeps a state")
            first.kill()
        else:
            first.ask_to_end()
        known = kept_granted(tmp_path, key)
        at = first_offset(domain, case.lost)
        domain.forget_history()
        assert cut_log(own_broker, domain.topic, 0, at=at) <= at
        before = domain.states(group).get(key)
        assert before is None or not before.granted, "the log knows of grants"

        if case.lost is ClaimingMessages:
            # It is killed before it knows whether the owner sends its records again.
            early = fleet.start("early")
            early.wait_for("observed", name="state_unfit")
            early.kill()
        second = fleet.start(case.name)
        reported = exposed(second, key, timeout_ms=WAIT_MS + 4 * domain.h_ms)
        assert reported == set(range(known))
        # The report is true: processed records are handed out again.
        eventually(lambda: known - 1 in offsets_of(second), "it is processed again")
        twice = set(offsets_of(first)) & set(offsets_of(second))
        assert twice
        # A snapshot of an orderly end has all grants; after a kill some may be missing.
        assert {
            each for each in twice if not case.is_killed or each < known
        } <= reported


def test_a_start_reports_no_exposed_grant_if_the_log_is_complete(
    domain, unique, tmp_path
):
    topic, group = domain.data_topic(1, records_each=RECORDS), unique("whole")
    key = Key(group, topic, 0)
    with fleet_of(domain, tmp_path, group, topic) as fleet:
        first = fleet.start("w1")
        eventually(lambda: kept_granted(tmp_path, key), "its host keeps a state")
        first.kill()
        second = fleet.start("w2")
        eventually(lambda: offsets_of(second), "it works")
        assert second.journal.of("observed", name="grant_exposed") == []
        assert fleet.journal.duplicated() == {}
