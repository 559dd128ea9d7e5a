"""Delivery guarantees, checked by the journals of workers and by the log.

Each scenario runs once for both deliveries side by side; the tests check it.
"""

import signal
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import attrs
import pytest
from domain import Recorder, opened
from fleet import Fleet
from history import History, Tenure
from journal import Journal, judge_duplicates, judge_grants
from slowness import Slowness
from waiting import eventually, read_out, subscribed, wall_ms

from kafka_marshal import Delivery, TopicPartition
from kafka_marshal.protocol.records import BatchHeartbeat, ClaimingMessages, Heartbeat
from kafka_marshal.protocol.types import Key

BATCH, GRANTED = 40, 4
# What a crash may lose of a partition at most once.
AT_RISK = GRANTED * BATCH
KINDS = pytest.mark.parametrize("delivery", ["alo", "amo"])
# Jitter and a few round trips, on a machine that is not busy.
SLACK_MS = 1_500
WORK_MS = 120_000
# What a worker that is alive appends again and again.
BEATING = (Heartbeat, BatchHeartbeat, ClaimingMessages)


@attrs.frozen
class Outcome:
    """One finished scenario of one guarantee."""

    group_id: str
    produced: dict
    journal: Journal
    history: History
    at_ms: dict[str, int]
    h_ms: int
    slowness: float

    def crash_losses(self) -> int:
        return sum(map(len, self.journal.lost(self.produced).values()))

    def largest_loss(self) -> int:
        lost = self.journal.lost(self.produced).values()
        return max(map(len, lost), default=0)

    def silence_ms(self, tenure: Tenure) -> int:
        """Return the longest time without records of an owner before its claim ended.

        A healthy one appends each third of an interval.
        """
        since_ms, until_ms = tenure.renewed_ms, tenure.ended_ms
        name = self.group_id, tenure.client_id
        own = {
            step.timestamp_ms
            for step in self.history.steps
            if since_ms <= step.timestamp_ms <= until_ms
            and isinstance(step.record, BEATING)
            and (step.record.group_id, step.record.client_id) == name
        }
        moments = sorted({since_ms, *own, until_ms})
        return max(after - before for before, after in pairwise(moments))

    def has_dropped_rest(self, tenure: Tenure) -> bool:
        """Return whether an owner that released a claim may have lost granted records.

        Its application was stuck (PROTOCOL 13), or it had to end or to hand over and no
        granted record arrived for an interval (6.2, 13): only on a busy machine.
        """
        worked = (
            line["at_ms"]
            for line in self.journal.of("handled", client_id=tenure.client_id)
            if line["at_ms"] <= tenure.ended_ms
        )
        silence_ms = tenure.ended_ms - max(worked, default=tenure.begun_ms)
        return tenure.reason.startswith("stuck") or silence_ms >= self.h_ms

    def reported(self, tenure: Tenure) -> set[int]:
        """Return the offsets that an owner reported as granted and not processed."""
        return {
            offset
            for line in self.journal.of("observed", name="grant_lost")
            if line["client_id"] == tenure.client_id
            and Key(*line["fields"]["key"]) == tenure.key
            for first, last in line["fields"]["ranges"]
            for offset in range(first, last + 1)
        }


@pytest.fixture(scope="module")
def domain(broker, unique, transport, via):
    with opened(broker, unique, transport=transport, via=via) as domain:
        yield domain


class Team:
    """Workers of one group on one topic."""

    def __init__(self, domain, home: Path, delivery: str, **settings):
        self.domain = domain
        self.group_id = domain.unique(f"team-{delivery}")
        self.topic = settings.pop("topic")
        self.fleet = Fleet(
            domain,
            home / delivery,
            group_id=self.group_id,
            topics=[self.topic],
            delivery=delivery,
            max_poll_records=BATCH,
            max_granted_batches=GRANTED,
            **settings,
        )
        (home / delivery).mkdir()
        self.at_ms: dict[str, int] = {}

    def await_busy(self, worker) -> None:
        """Wait until a worker has handled a batch from now on, and has more to do.

        On a busy machine all records may be handled before this is called, so more are
        produced.
        """
        before = len(worker.journal.handled)

        def is_busy():
            handled = len(self.fleet.journal.handled)
            produced = self.domain.of(self.topic)
            if sum(produced.values()) - handled < BATCH * len(produced):
                self.domain.produce(self.topic, 2 * BATCH)
                return False
            return len(worker.journal.handled) > before + BATCH

        eventually(is_busy, f"{worker.client_id} is busy")

    def await_end(self) -> None:
        produced = self.domain.of(self.topic)

        def is_done():
            states = self.domain.states(self.group_id)
            ends = {k.topic_partition: s.next_unclaimed() for k, s in states.items()}
            return ends == produced

        eventually(is_done, f"{self.group_id} reaches the end", WORK_MS)

    def outcome(self, slowness: float = 1.0) -> Outcome:
        return Outcome(
            group_id=self.group_id,
            produced=self.domain.of(self.topic),
            journal=self.fleet.journal,
            history=self.domain.history(),
            at_ms=self.at_ms,
            h_ms=self.domain.h_ms,
            slowness=slowness,
        )


def is_given_up(tenure: Tenure) -> bool:
    """Return whether by the log the lease of a claim ended before its release.

    Its owner was stale and another one claimed the key, or it noticed the end itself.
    Then it has dropped granted records (PROTOCOL 5.2).
    """
    reason = (tenure.reason or "").partition(":")[0]
    return tenure.ended_by not in {"released", None} or reason == "lease_expired"


def teams_of(domain, home, *, partitions, records_each, handle_ms):
    return {
        delivery: Team(
            domain,
            home,
            delivery,
            topic=domain.data_topic(partitions, records_each),
            handle_ms=handle_ms,
        )
        for delivery in ("alo", "amo")
    }


@pytest.fixture(scope="module")
def crash(domain, tmp_path_factory):
    """Three workers share six partitions; one is killed in the middle of a batch."""
    home = tmp_path_factory.mktemp("crash")
    teams = teams_of(domain, home, partitions=6, records_each=450, handle_ms=3)
    with teams["alo"].fleet as alo, teams["amo"].fleet as amo, Slowness() as machine:
        for name in ("w1", "w2", "w3"):
            alo.start(name)
            amo.start(name)
        for team in teams.values():
            by = {"w1", "w2", "w3"}
            domain.wait_owned(team.group_id, team.topic, by=by)
        for team in teams.values():
            victim = team.fleet.workers[1]
            team.await_busy(victim)
            team.at_ms["killed"] = wall_ms()
            victim.kill()
        for team in teams.values():
            # Partitions that the victim had read to their end are taken over, too.
            domain.wait_owned(team.group_id, team.topic, by={"w1", "w3"})
            team.await_end()
        for worker in (*alo.workers, *amo.workers):
            worker.ask_to_end()
        yield {
            delivery: team.outcome(machine.factor) for delivery, team in teams.items()
        }


@pytest.mark.direct(reason="a sidecar sees the process die")
@KINDS
def test_a_takeover_follows_soon_after_the_owner_is_stale(
    crash, delivery, record_testsuite_property
):
    """Measured in log time: from the last renewal to the winning record."""
    outcome = crash[delivery]
    delays = [
        after.begun_ms - before.renewed_ms
        for tenures in outcome.history.tenures(outcome.group_id).values()
        for before, after in pairwise(tenures)
        if before.client_id == "w2" and before.ended_by == "claimed"
    ]
    assert delays, "the victim held something"
    record_testsuite_property(f"takeover_ms.{delivery}", sorted(delays))
    assert min(delays) > 2 * outcome.h_ms
    assert max(delays) <= 2 * outcome.h_ms + SLACK_MS * outcome.slowness


@pytest.mark.direct(reason="judged by clients that the log names")
@KINDS
def test_a_healthy_worker_keeps_its_claims(crash, delivery):
    """L2: w1 and w3 keep their claims, unless a busy machine delays heartbeats."""
    outcome = crash[delivery]
    for tenures in outcome.history.tenures(outcome.group_id).values():
        for tenure in tenures:
            if tenure.client_id != "w2" and is_given_up(tenure):
                assert outcome.silence_ms(tenure) > outcome.h_ms, tenure


def test_at_least_once_every_record_is_processed_after_a_kill(crash):
    outcome = crash["alo"]
    assert outcome.journal.lost(outcome.produced) == {}


def test_at_least_once_a_kill_repeats_only_uncommitted_records(
    crash, record_testsuite_property
):
    """Only records handled after the last accepted position."""
    outcome = crash["alo"]
    repeats = judge_duplicates(outcome.journal, outcome.history, outcome.group_id)
    record_testsuite_property("repeated.kill", repeats)
    victim = [
        each
        for each in outcome.journal.handled
        if each.client_id == "w2" and each.at_ms >= outcome.at_ms["killed"] - 1_000
    ]
    assert repeats <= len(victim)


def test_at_most_once_no_record_is_processed_twice(crash):
    outcome = crash["amo"]
    assert outcome.journal.duplicated() == {}


@pytest.mark.direct(reason="judged by clients that the log names")
def test_at_most_once_losses_are_bounded_by_the_records_at_risk(
    crash, record_testsuite_property
):
    """Only granted, unprocessed records of claims that ended early are lost.

    These are the victim's; on a busy machine perhaps another one's. Each may lose as
    much as a crash does, and a process that lives reports it.
    """
    outcome = crash["amo"]
    granted = judge_grants(outcome.journal, outcome.history, outcome.group_id)
    lost = outcome.journal.lost(outcome.produced)
    record_testsuite_property("lost.kill", outcome.crash_losses())
    assert {k.topic_partition: sorted(v) for k, v in granted.items()} == lost
    tenures = {
        (tenure.key, tenure.token): tenure
        for tenures in outcome.history.tenures(outcome.group_id).values()
        for tenure in tenures
    }
    for key, grants in outcome.history.grants(outcome.group_id).items():
        losses = defaultdict(set)
        for grant in grants:
            offsets = range(grant.first, grant.last + 1)
            losses[grant.token] |= granted.get(key, set()).intersection(offsets)
        for token, missing in losses.items():
            tenure = tenures[key, token]
            may_lose = is_given_up(tenure) or outcome.has_dropped_rest(tenure)
            assert len(missing) <= AT_RISK * may_lose, tenure
            if tenure.client_id != "w2":
                assert missing <= outcome.reported(tenure), tenure


@KINDS
def test_sigterm_releases_all_claims_at_their_end_positions(crash, delivery):
    """The survivors got SIGTERM, and released their claims at the ends of the logs."""
    outcome = crash[delivery]
    for client_id in ("w1", "w3"):
        assert outcome.journal.of("ended", client_id=client_id)
        assert not outcome.journal.of("failed", client_id=client_id)
    for tenures in outcome.history.tenures(outcome.group_id).values():
        assert tenures[-1].ended_by == "released"
    for world in outcome.history.worlds.values():
        for key, known in world.keys.items():
            if key.group_id == outcome.group_id:
                end = outcome.produced[key.topic_partition]
                assert known.next_unclaimed() == end


# --- a worker that is stopped for longer than its claims last


@pytest.fixture(scope="module")
def frozen(domain, tmp_path_factory):
    """A worker is stopped in a batch until its claim is stale, then resumes."""
    home = tmp_path_factory.mktemp("frozen")
    teams = teams_of(domain, home, partitions=2, records_each=400, handle_ms=20)
    with teams["alo"].fleet as alo, teams["amo"].fleet as amo:
        for team in teams.values():
            team.fleet.start("w1", policy="greedy")
        for team in teams.values():
            w1 = team.fleet.workers[0]
            eventually(
                lambda w=w1: len(w.journal.handled) > BATCH + 5, "w1 is in a batch"
            )
            w1.signal(signal.SIGSTOP)
            team.at_ms["stopped"] = wall_ms()
            team.fleet.start("w2", policy="greedy", handle_ms=1)
        for team in teams.values():
            domain.wait_owned(team.group_id, team.topic, by={"w2"})
            eventually(
                lambda t=team: t.fleet.workers[1].journal.handled, "w2 goes to work"
            )
            team.at_ms["continued"] = wall_ms()
            team.fleet.workers[0].signal(signal.SIGCONT)
        for team in teams.values():
            team.fleet.workers[0].wait_for("lost")
            team.await_end()
        for worker in (*alo.workers, *amo.workers):
            worker.ask_to_end()
        yield {delivery: team.outcome() for delivery, team in teams.items()}


@pytest.mark.direct(reason="who is back at the same sidecar gets its share again")
@KINDS
def test_a_resumed_worker_handles_at_most_one_record_of_a_lost_claim(frozen, delivery):
    """The one record is that in which it was stopped."""
    outcome = frozen[delivery]
    woken = [
        each
        for each in outcome.journal.handled
        if each.client_id == "w1" and each.at_ms >= outcome.at_ms["continued"]
    ]
    assert len(woken) <= 1


@KINDS
def test_the_commit_of_a_resumed_worker_raises_claim_lost(frozen, delivery):
    (line,) = frozen[delivery].journal.of("claim_lost", client_id="w1")
    assert "stop processing" in line["says"] or "do not count" in line["says"]
    reasons = {each["reason"] for each in frozen[delivery].journal.of("lost")}
    assert "closed" not in reasons or len(reasons) > 1


def test_at_least_once_a_resumed_worker_repeats_only_uncommitted_records(frozen):
    outcome = frozen["alo"]
    assert outcome.journal.lost(outcome.produced) == {}
    judge_duplicates(outcome.journal, outcome.history, outcome.group_id)


def test_at_most_once_a_resumed_worker_processes_no_record_twice(frozen):
    outcome = frozen["amo"]
    granted = judge_grants(outcome.journal, outcome.history, outcome.group_id)
    lost = outcome.journal.lost(outcome.produced)
    assert {k.topic_partition: sorted(v) for k, v in granted.items()} == lost
    assert outcome.largest_loss() <= AT_RISK


def test_a_resumed_worker_reports_the_granted_ranges_that_were_lost(frozen):
    """The ranges that it reports are the ones that are lost."""
    outcome = frozen["amo"]
    reported = set()
    for line in outcome.journal.of("observed", name="grant_lost"):
        for first, last in line["fields"]["ranges"]:
            reported |= set(range(first, last + 1))
    lost = {
        n
        for offsets in outcome.journal.lost(outcome.produced).values()
        for n in offsets
    }
    assert reported == lost


# --- Kafka's committed offsets, for lag tools (PROTOCOL 5.7)


@KINDS
def test_positions_are_mirrored_to_committed_offsets_of_kafka(domain, unique, delivery):
    topic = domain.data_topic(2)
    group = unique("mirror")
    options = {"delivery": Delivery(delivery), "consumer_timeout_ms": 700}

    def is_mirrored():
        return domain.committed(group, topic) == domain.of(topic)

    def is_mirrored_once_left():
        with domain.marshal(group, "w1") as marshal:
            consumer = marshal.consumer(topic, **options)
            domain.produce(topic, 5)
            consumer.commit(read_out(consumer, 10))
        return is_mirrored()

    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, **options)
        domain.produce(topic, 20)
        consumer.commit(read_out(consumer, 40))
        eventually(is_mirrored, "it follows")
    # The last positions too, although the claims are released at once. A client waits
    # at most a second for that, so a busy machine may need another try. A sidecar's
    # mirror continues when a client has left.
    if domain.via == "direct":
        eventually(is_mirrored_once_left, "the last positions")
    else:
        assert is_mirrored_once_left() or eventually(is_mirrored, "the last positions")


@pytest.mark.direct(reason="the sidecar mirrors, and tells its own observer")
def test_a_foreign_commit_to_kafka_is_reported_and_does_not_move_the_position(
    domain, unique
):
    topic = domain.data_topic(1, records_each=20)
    place = TopicPartition(topic, 0)
    group = unique("drift")
    recorder = Recorder()
    with domain.marshal(group, "w1", observer=recorder) as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=700)
        consumer.commit(read_out(consumer, 20))
        eventually(lambda: domain.committed(group, topic) == {place: 20}, "it follows")
        domain.commit(group, place, 3)
        domain.produce(topic, 5)
        assert [r.offset for r in read_out(consumer, 5)] == [20, 21, 22, 23, 24]
        consumer.commit()
        eventually(lambda: domain.committed(group, topic) == {place: 25}, "overwritten")
        (drift,) = eventually(lambda: recorder.named("mirror_drift"), "it is told")
        assert dict(drift.fields) == {"partition": place, "expected": 20, "found": 3}
    domain.commit(group, place, 3)
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=700)
        # The log's position counts.
        eventually(lambda: consumer.position(place) == 25, "it is claimed")
        assert list(consumer) == []


@pytest.mark.direct(reason="the sidecar mirrors, and tells its own observer")
def test_a_failed_mirror_is_reported_and_consuming_continues(domain, unique):
    """Kafka refuses commits while an ordinary consumer subscribes in the group."""
    topic = domain.data_topic(1, records_each=10)
    group = unique("occupied")
    recorder = Recorder()
    subscriber = subscribed(
        topic,
        bootstrap_servers=domain.servers,
        group_id=group,
        enable_auto_commit=False,
    )
    try:
        eventually(lambda: subscriber.poll(100) or subscriber.assignment(), "it joins")
        with domain.marshal(group, "w1", observer=recorder) as marshal:
            consumer = marshal.consumer(topic, consumer_timeout_ms=700)
            consumer.commit(read_out(consumer, 10))
            eventually(lambda: recorder.named("mirror_failed"), "it is told")
            consumer.flush()
        (known,) = domain.states(group).values()
        assert known.position == 10
        assert domain.committed(group, topic) == {}
    finally:
        subscriber.close(autocommit=False)


@pytest.mark.direct(reason="the sidecar mirrors, and tells its own observer")
def test_without_mirror_offsets_kafka_gets_no_commit(domain, unique):
    topic = domain.data_topic(1, records_each=5)
    group = unique("unmirrored")
    with domain.marshal(group, "w1", mirror_offsets=False) as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=700)
        consumer.commit(read_out(consumer, 5))
    assert domain.committed(group, topic) == {}
