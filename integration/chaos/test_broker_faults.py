"""The broker itself fails under working consumers; judged from the log and journals.

Scenarios share one broker of their own, which they take down in turn. Of two workers
one is on each transport.
"""

from collections import Counter

import attrs
import pytest
from domain import Domain
from fleet import Fleet
from history import History
from journal import Journal, judge_duplicates, judge_grants
from waiting import eventually, wall_ms

from kafka_marshal.protocol.lease import Lease
from kafka_marshal.testing.broker import EmbeddedBroker

BATCH = 40
# Limit of waits; only failures take as long.
END_MS = 180_000
# Few, so that granted records run out during an outage.
GRANTED = 4
AT_RISK = GRANTED * BATCH
KINDS = pytest.mark.parametrize("delivery", ["alo", "amo"])


@attrs.frozen
class Outcome:
    """Journal and log after the scenario, for one delivery."""

    group_id: str
    produced: dict
    journal: Journal
    history: History
    h_ms: int
    at_ms: dict[str, int]


@pytest.fixture(scope="module")
def outcomes(unique, tmp_path_factory):
    """Workers of both guarantees; the broker is stopped for a while, then killed."""
    home = tmp_path_factory.mktemp("broker-faults")
    fleets, topics, at_ms = {}, {}, {}
    with EmbeddedBroker() as broker:
        domain = Domain(broker.bootstrap_servers, unique)
        try:
            for delivery in ("alo", "amo"):
                (home / delivery).mkdir()
                topics[delivery] = domain.data_topic(4, records_each=450)
                fleets[delivery] = Fleet(
                    domain,
                    home / delivery,
                    group_id=unique(f"shaken-{delivery}"),
                    topics=[topics[delivery]],
                    delivery=delivery,
                    # At least once much is uncommitted: only the lease stops it.
                    max_poll_records=2_000 if delivery == "alo" else BATCH,
                    max_granted_batches=GRANTED,
                    handle_ms=5,
                )
            with fleets["alo"] as alo, fleets["amo"] as amo:
                shake(domain, broker, (alo, amo), topics=topics, at_ms=at_ms)
            yield {
                delivery: Outcome(
                    group_id=fleet.settings["group_id"],
                    produced=domain.of(topics[delivery]),
                    journal=fleet.journal,
                    history=domain.history(),
                    h_ms=domain.h_ms,
                    at_ms=at_ms,
                )
                for delivery, fleet in fleets.items()
            }
        finally:
            domain.close()


def shake(domain, broker, fleets, *, topics, at_ms):
    """Run the scenario: stopped beyond the leases' end, then killed and restarted."""
    for fleet in fleets:
        fleet.start("w1", transport="fast")
        fleet.start("w2", transport="kafka-python")
    for fleet in fleets:
        eventually(
            lambda f=fleet: {h.client_id for h in f.journal.handled} == {"w1", "w2"},
            "everybody works",
        )
    broker.pause()
    at_ms["paused"] = wall_ms()
    eventually(lambda: wall_ms() > at_ms["paused"] + 1.8 * domain.h_ms, "its end")
    broker.resume()
    at_ms["resumed"] = wall_ms()
    for fleet in fleets:
        wait_for_progress(fleet, domain, topics)
    broker.kill()
    at_ms["killed"] = wall_ms()
    broker.restart()
    at_ms["restarted"] = wall_ms()
    for fleet in fleets:
        wait_for_progress(fleet, domain, topics)
    for fleet in fleets:
        topic = topics[fleet.settings["delivery"]]
        await_end(domain, fleet.settings["group_id"], topic)
    for fleet in fleets:
        for worker in fleet.workers:
            worker.ask_to_end()


def wait_for_progress(fleet, domain, topics):
    """Wait until records are handled; on a slow machine there may be none left."""
    since = wall_ms()
    domain.produce(topics[fleet.settings["delivery"]], 5)
    eventually(
        lambda: any(h.at_ms > since for h in fleet.journal.handled),
        "somebody goes on",
        END_MS,
    )


def await_end(domain, group_id, topic):
    produced = domain.of(topic)

    def is_done():
        states = domain.states(group_id)
        ends = {k.topic_partition: s.next_unclaimed() for k, s in states.items()}
        return ends == produced

    eventually(is_done, f"{group_id} reaches the end", END_MS)


def test_at_least_once_every_record_is_processed(outcomes):
    outcome = outcomes["alo"]
    assert outcome.journal.lost(outcome.produced) == {}


def test_at_least_once_repeats_within_the_bound(outcomes, record_testsuite_property):
    outcome = outcomes["alo"]
    repeats = judge_duplicates(outcome.journal, outcome.history, outcome.group_id)
    record_testsuite_property("repeated.broker", repeats)


def test_at_most_once_nothing_is_repeated_and_losses_are_bounded(
    outcomes, record_testsuite_property
):
    """Only granted records are lost, and at most ``AT_RISK`` of one claim."""
    outcome = outcomes["amo"]
    granted = judge_grants(outcome.journal, outcome.history, outcome.group_id)
    lost = outcome.journal.lost(outcome.produced)
    assert {k.topic_partition: sorted(v) for k, v in granted.items()} == lost
    record_testsuite_property("lost.broker", sum(map(len, lost.values())))
    by_claim = Counter(
        (key, grant.token)
        for key, grants in outcome.history.grants(outcome.group_id).items()
        for grant in grants
        for offset in range(grant.first, grant.last + 1)
        if offset in granted.get(key, ())
    )
    assert max(by_claim.values(), default=0) <= AT_RISK


@KINDS
def test_no_record_is_handed_out_after_the_soft_end_of_a_lease(outcomes, delivery):
    """The lease counts from the last renewal that was appended."""
    outcome = outcomes[delivery]
    soft_ms = Lease.since(0, outcome.h_ms).soft_until_ms
    renewals = [
        step.timestamp_ms
        for step in outcome.history.of("renewed", "claimed", group_id=outcome.group_id)
    ]
    for stop, go in (("paused", "resumed"), ("killed", "restarted")):
        stopped_ms, back_ms = outcome.at_ms[stop], outcome.at_ms[go]
        last_ms = max(at for at in renewals if at <= stopped_ms)
        # The broker answers again before its return is noted in ``at_ms``.
        back_ms = min(back_ms, *(at for at in renewals if at > stopped_ms))
        late = [
            each
            for each in outcome.journal.handled
            if last_ms + soft_ms + 50 < each.at_ms < back_ms
        ]
        assert late == []


@KINDS
def test_all_workers_survive_and_end_in_order(outcomes, delivery):
    journal = outcomes[delivery].journal
    assert not journal.of("failed")
    assert len(journal.of("ended")) == 2
    assert not journal.of("observed", name="close_unconfirmed")
    # What other owners mirrored meanwhile is no drift.
    assert not journal.of("observed", name="mirror_drift")
