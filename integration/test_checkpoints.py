"""Checkpoints on a real broker: retention takes the log, and nobody loses anything."""

import random

import msgspec
import pytest
from domain import Recorder, opened
from kafka import TopicPartition as Place
from waiting import WAIT_MS, eventually

from kafka_marshal import ClaimRejected, LogUnreadable, World
from kafka_marshal.engine import rebuilding
from kafka_marshal.engine.checkpointing import CheckpointRule
from kafka_marshal.protocol.checkpoints import checkpoint_key
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
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
    """Have a client's process write no more checkpoints, nor end one that is begun."""
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


def test_retention_takes_the_winning_claims_and_nobody_loses_one(domain):
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


def test_without_a_checkpoint_nothing_is_claimed_until_there_is_one(domain):
    topic = domain.data_topic(2)
    one = Client(domain, "one", topic, checkpoint_interval_ms=INTERVAL_MS)
    try:
        rest(one)
        eventually(lambda: len(one.consumer.assignment()) == 2, "both partitions")
        ends = {t: one.world(t).next_offset for t in TS}
        delete(domain, ends)
        other = {"transport": OTHER}
        with pytest.raises(LogUnreadable, match="no checkpoint or snapshot"):
            domain.marshal("g", "other", **other)
        one.marshal.engine.write_checkpoints("again", _due_now())
        eventually(lambda: set(one.written()) == set(TS), "checkpoints")
        with domain.marshal("g", "other", checkpoint_interval_ms=0, **other) as found:
            key = checkpoint_key(0)
            known = found.engine.context.replicas[0].world.keys[key]
            assert known.epoch >= ends[0]
            assert len(one.consumer.assignment()) == 2
    finally:
        one.close()


def test_retention_set_under_members_is_reported_and_survived(domain, monkeypatch):
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
    """See that the past is known from the checkpoints on, and not before."""
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


def test_claims_of_a_deleted_topic_are_forgotten(domain):
    topic, other = domain.data_topic(2, 3), domain.data_topic(1, 3)
    for name in (topic, other):
        with domain.marshal("forgetful", "one") as marshal:
            taken = []
            with marshal.consumer(name, delivery="amo") as consumer:

                def is_done(consumer=consumer, taken=taken, name=name):
                    for records in consumer.poll(50).values():
                        taken.extend(records)
                    return len(taken) == sum(domain.of(name).values())

                eventually(is_done, "all is processed")
    domain.kafka.delete_topics([topic])
    with domain.admin() as admin:

        def is_gone():
            return admin.forget_keys("forgetful").existing == (other,)

        eventually(is_gone, "the topic is deleted")
        plan = admin.forget_keys("forgetful", execute=True)
        assert {key.topic for key, _ in plan.keys} == {topic}
        assert len(plan.keys) == 2
        assert admin.forget_keys("forgetful").keys == ()
    world = World.open(domain.servers, coordination_topic=domain.topic)
    assert {key.topic for key, _ in world.claims("forgetful")} == {other}


def _due_now():
    from kafka_marshal.engine.checkpointing import CheckpointRule

    return CheckpointRule(interval_ms=INTERVAL_MS, entries=1)


def test_a_reset_brings_all_readers_back_to_a_checkpoint(domain):
    topic = domain.data_topic(2, 4)
    one = Client(domain, "one", topic, checkpoint_interval_ms=INTERVAL_MS)
    try:
        eventually(lambda: one.written() and set(one.written()) == set(TS), "one")
        rest(one)
        place = next(iter(one.marshal.session.holdings.values()), None)
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
            engine = fresh.engine
            with one.marshal.engine.changed:
                ours = one.world(0)
                at, expected_digest = ours.next_offset, digest(ours)
            theirs = engine.context.replicas[0].world
            if theirs.next_offset == at:
                assert digest(theirs) == expected_digest
        assert place is None or place.key.topic == topic
    finally:
        one.close()


def test_a_topic_is_upgraded_under_running_clients(broker, unique):
    with opened(
        broker, unique, transport=TRANSPORT, is_formatted=False, h_ms=5_000
    ) as old:
        old.make_coordination_topic(len(TS))
        with old.admin() as admin:
            from kafka_marshal.admin.formatting import Format

            wanted = Format(partition_count=len(TS), heartbeat_interval_ms=old.h_ms)
            config = admin.format_topic(wanted)
            assert config.feature_level == 2
        lowered = msgspec.structs.replace(
            config, generation=2, era=config.era + 1, feature_level=1
        )
        for t in TS:
            old.append(encode(lowered), t=t)
        topic = old.data_topic(2)
        one = Client(old, "one", topic, checkpoint_interval_ms=INTERVAL_MS)
        try:
            eventually(lambda: len(one.consumer.assignment()) == 2, "both partitions")
            with old.admin() as admin:
                assert admin.upgrade_topic().partitions == tuple(TS)
                assert admin.upgrade_topic(execute=True).level == 1
                assert admin.upgrade_topic().partitions == ()
            eventually(lambda: set(one.written()) == set(TS), "checkpoints", WAIT_MS)
            assert len(one.consumer.assignment()) == 2
            assert one.seen.named("claim_ended") == []
        finally:
            one.close()


def _replayed(entries, t, *, offset=None, time_ms=None):
    """Fold the whole log up to a moment."""
    state = WorldState(t)
    for entry in entries[t]:
        if offset is not None and entry.offset > offset:
            break
        if time_ms is not None and entry.timestamp_ms > time_ms:
            break
        apply(state, entry)
    return state


def _show_moments(domain, entries, rng, transport):
    """Compare random moments with a replay; return how many of them are known."""
    where = {"coordination_topic": domain.topic, "transport": transport}
    known = 0
    for _ in range(4):
        offsets = {t: rng.choice(entries[t]).offset for t in TS}
        time_ms = rng.choice(entries[rng.choice(TS)]).timestamp_ms
        for moment in ({"offset": offsets}, {"time_ms": time_ms}):
            view = World.at(domain.servers, **where, **moment)
            for t in set(TS) - set(view.log_start_missing):
                at = {"offset": offsets[t]} if "offset" in moment else moment
                expected = _replayed(entries, t, **at)
                assert digest(view.partitions[t]) == digest(expected)
                known += 1
    return known


def test_random_moments_equal_a_replay(broker, unique):
    rng = random.Random(7)
    with opened(broker, unique, partitions=len(TS), h_ms=5_000) as domain:
        topic = domain.data_topic(4, 5)
        one = Client(domain, "one", topic, checkpoint_interval_ms=INTERVAL_MS)
        try:
            for number in range(3):
                count = len(one.seen.named("checkpoint_written"))

                def is_written(count=count):
                    one.poll()
                    return len(one.seen.named("checkpoint_written")) >= count + 2

                eventually(is_written, f"checkpoints of round {number}")
                domain.produce(topic, 5)
        finally:
            one.close()
        with LogScan(domain.servers, coordination_topic=domain.topic) as scan:
            entries = {t: [] for t in TS}
            for t, entry in scan:
                entries[t].append(entry)
        for transport in (TRANSPORT, OTHER):
            assert _show_moments(domain, entries, rng, transport) == 16
        begins = [event.fields for event in one.seen.named("checkpoint_written")]
        firsts = {
            t: min(b["offset"] for b in begins if b["partition"] == t) for t in TS
        }
        delete(domain, firsts)
        for transport in (TRANSPORT, OTHER):
            assert _show_moments(domain, entries, rng, transport) > 0
            early = domain.world(offset=dict.fromkeys(TS, 0), transport=transport)
            assert early.log_start_missing == tuple(TS)
            with pytest.raises(LogUnreadable, match="earliest moment"):
                early.require_known()
