"""Checkpoints on a real broker: retention deletes records, and claims survive."""

import pytest
from domain import Recorder, opened
from kafka import TopicPartition as Place
from waiting import eventually

from kafka_marshal import ClaimRejected, World
from kafka_marshal.engine import rebuilding
from kafka_marshal.engine.checkpointing import CheckpointRule
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.views.log_scan import LogScan

INTERVAL_MS = 1_000
# Each test reads by both: on another transport a client has an engine of its own.
TRANSPORT, OTHER = "fast", "kafka-python"
TS = range(2)


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(
        broker, unique, transport=TRANSPORT, partitions=len(TS), h_ms=5_000
    ) as domain:
        yield domain


class Client:
    """A consumer of one process; on another transport it has its own engine."""

    def __init__(self, domain, name, topic, **options):
        self.seen = Recorder()
        self.marshal = domain.marshal("g", name, observer=self.seen, **options)
        self.consumer = self.marshal.consumer(topic)
        self.offsets = []

    def poll(self):
        for records in self.consumer.poll(50).values():
            self.offsets += [(r.partition, r.offset) for r in records]
            for record in records:
                self.consumer.commit(record)

    def world(self, t):
        return self.marshal.engine.context.replicas[t].world

    def written(self):
        """Return the Begin of the newest checkpoint that it wrote, by partition."""
        events_of = self.seen.named("checkpoint_written")
        return {
            event.fields["partition"]: event.fields["offset"] for event in events_of
        }

    def close(self):
        self.consumer.close()
        self.marshal.close()


def rest(client):
    """Stop the checkpoints of a client's process, also one in progress."""
    engine = client.marshal.engine
    with engine.changed:
        for schedule in engine.checkpointer._schedules:
            if schedule.work is not None:
                engine.checkpointer._end(schedule, schedule.work)
        engine.checkpointer.rule = CheckpointRule(interval_ms=0)


def delete(domain, befores):
    domain.kafka.delete_records(
        {Place(domain.topic, t): before for t, before in befores.items()}
    )


def test_claims_survive_retention_that_deletes_their_records(domain):
    topic = domain.data_topic(4, 5)
    one = Client(domain, "one", topic, checkpoint_interval_ms=INTERVAL_MS)
    other = None
    try:

        def both():
            for client in filter(None, (one, other)):
                client.poll()
            return True

        eventually(lambda: both() and len(one.offsets) == 20, "all is consumed")
        eventually(lambda: both() and set(one.written()) == set(TS), "checkpoints")
        epochs = {h.key: h.claim.epoch for h in one.marshal.session.holdings.values()}
        begins = one.written()
        later = {t for key, e in epochs.items() for t in TS if e < begins[t]}
        assert later, "every claim lies behind the checkpoints"
        delete(domain, begins)
        other = Client(
            domain, "other", topic, checkpoint_interval_ms=0, transport=OTHER
        )
        assert {e.fields["partition"] for e in other.seen.named("restored")} == set(TS)
        eventually(
            lambda: both() and len(other.consumer.assignment()) == 2, "a fair share"
        )
        domain.produce(topic, 3)
        eventually(
            lambda: both() and len(one.offsets + other.offsets) == 32, "the rest"
        )
        assert len(set(one.offsets + other.offsets)) == 32
        lost = [e.fields["ending"].reason for e in one.seen.named("claim_ended")]
        assert set(lost) <= {"surplus"}
        _compare(one, other, both)
    finally:
        for client in filter(None, (one, other)):
            client.close()


def _compare(one, other, both):
    """Check that replicas agree, and that one that does not is reported."""
    count = len(one.seen.named("checkpoint_written"))
    eventually(
        lambda: both() and len(one.seen.named("checkpoint_written")) >= count + 2,
        "more checkpoints",
    )
    assert other.seen.named("replica_diverged") == []
    with other.marshal.engine.changed:
        other.world(0).append_time_ms += 10**9
    eventually(
        lambda: both() and other.seen.named("replica_diverged"), "the difference"
    )
    assert {e.fields["partition"] for e in other.seen.named("replica_diverged")} == {0}
    assert one.seen.named("replica_diverged") == []
    assert other.marshal.engine.failure is None


def test_retention_on_a_log_in_use_is_reported_and_costs_no_claim(domain, monkeypatch):
    monkeypatch.setattr(rebuilding, "TOPIC_CHECK_MS", 500)
    topic = domain.data_topic(2, 5)
    one = Client(domain, "one", topic, checkpoint_interval_ms=60_000)
    try:
        context = one.marshal.engine.context
        eventually(lambda: one.poll() or len(one.offsets) == 10, "all is consumed")
        domain.alter_coordination_topic("retention.ms", "1000")
        events_of = one.seen.named
        eventually(lambda: events_of("topic_misconfigured"), "the setting is reported")
        (event,) = events_of("topic_misconfigured")
        assert event.fields["setting"] == "retention.ms"
        assert event.fields["command"].endswith(
            f"--entity-name {domain.topic} --add-config retention.ms=-1"
        )
        domain.alter_coordination_topic("retention.ms", "-1")
        eventually(lambda: not context.wrong_settings, "it is mended")
        before = one.written()
        ends = {t: one.world(t).next_offset for t in TS}
        delete(domain, ends)

        def is_written():
            one.poll()
            return all(one.written().get(t, -1) >= ends[t] for t in TS)

        eventually(is_written, f"new checkpoints, after {before}")
        rest(one)
        keys = {h.key for h in one.marshal.session.holdings.values()}
        assert len(keys) == 2, "nothing was lost by it"
        with domain.marshal("g", "next", transport=OTHER, checkpoint_interval_ms=0):
            pass
        _look_back(domain, one, ends)
    finally:
        one.close()


def _look_back(domain, one, ends):
    """Check that past states are known from the checkpoints on, and not before."""
    where = {"coordination_topic": domain.topic}
    for transport in (TRANSPORT, OTHER):
        with LogScan(domain.servers, **where, transport=transport) as scan:
            worlds = {t: found.world for t, found in scan.restore().items()}
            begins = {t: world.next_offset for t, world in worlds.items()}
            for t, entry in scan:
                apply(worlds[t], entry)
        assert all(begins[t] > ends[t] for t in TS)
        live = World.at(
            domain.servers,
            **where,
            offset={t: world.next_offset - 1 for t, world in worlds.items()},
            transport=transport,
        )
        assert [digest(w) for w in live.partitions] == [digest(worlds[t]) for t in TS]
        early = World.at(
            domain.servers, **where, offset=dict.fromkeys(TS, 0), transport=transport
        )
        assert early.log_start_missing == tuple(TS)


def _are_alike(one, other, partition):
    """Return whether two clients have read to the same offset; compare their states."""
    found = []
    for client in (one, other):
        with client.engine.changed:
            world = client.engine.context.replicas[partition].world
            found.append((world.next_offset, digest(world)))
    (offset, state), (other_offset, other_state) = found
    if offset != other_offset:
        return False
    assert state == other_state
    return True


def test_a_reset_brings_all_readers_back_to_a_checkpoint(domain):
    topic = domain.data_topic(2, 4)
    one = Client(domain, "one", topic, checkpoint_interval_ms=INTERVAL_MS)
    try:
        eventually(lambda: one.written() and set(one.written()) == set(TS), "one")
        rest(one)
        eventually(lambda: one.poll() or len(one.offsets) == 8, "all is consumed")
        domain.history()
        with domain.admin() as admin:
            plan = admin.reset_state(0)
            assert plan.partition == 0
            if plan.held:
                with pytest.raises(ClaimRejected, match="--force"):
                    admin.reset_state(0, execute=True, allow_reprocess=True)
            done = admin.reset_state(
                0, execute=True, allow_held=True, allow_reprocess=True
            )
            assert done.checkpoint_id == plan.checkpoint_id
        eventually(lambda: one.seen.named("state_reset"), "the reset")
        assert {k.owner for k in one.world(0).keys.values()} == {None}
        eventually(
            lambda: one.poll() or len(one.consumer.assignment()) == 2, "claimed anew"
        )
        with domain.marshal("g", "z", transport=OTHER) as fresh:
            eventually(lambda: _are_alike(one.marshal, fresh, 0), "equal states")
    finally:
        one.close()
