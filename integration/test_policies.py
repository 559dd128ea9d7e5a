"""Which partitions members claim and release, and why, by the log of a real broker."""

import json
import sys
import threading
from contextlib import contextmanager

import pytest
from domain import Recorder, opened
from slowness import factor_now
from typer.testing import CliRunner
from waiting import eventually

from kafka_marshal import ClaimLost, Delivery
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal_cli.assembly import app


def slack_ms():
    """Return how late a round may be on a busy machine."""
    return 10_000 * factor_now()


@pytest.fixture(scope="module")
def domain(broker, unique):
    # One transport is enough: the tests do not depend on it.
    with opened(broker, unique) as domain:
        yield domain


class Member:
    """A client whose application runs on a thread, at a speed, or hangs."""

    def __init__(self, domain, group, name, *topics, pause_s=0.0, **settings):
        self.observer = Recorder()
        self.marshal = domain.marshal(group, name, observer=self.observer)
        self.consumer = self.marshal.consumer(*topics, max_poll_records=5, **settings)
        self.pause_s = pause_s
        self.handled = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._ends.is_set():
            try:
                for records in self.consumer.poll(50).values():
                    for record in records:
                        self._ends.wait(self.pause_s)
                        self.consumer.commit(record)
                        self.handled.append((record.partition, record.offset))
            except ClaimLost:
                continue

    def close(self):
        self._ends.set()
        self._thread.join(60)
        self.marshal.close()


@contextmanager
def members(*made):
    try:
        yield made
    finally:
        for member in made:
            member.close()


class Arrivals(threading.Thread):
    """Records that arrive in one partition at a steady rate."""

    def __init__(self, domain, place, per_s):
        super().__init__(daemon=True)
        self.domain, self.place, self.per_s = domain, place, per_s
        self.ends = threading.Event()

    def run(self):
        while not self.ends.wait(0.1):
            self.domain.produce_to(self.place, self.per_s // 10)


def released(domain, group, reason):
    return [
        step
        for step in domain.history().of("released", group_id=group)
        if step.record.reason.startswith(reason)
    ]


# --- too slow, stuck


def test_a_slow_owner_hands_over_its_partition_and_the_lag_falls(domain, unique):
    """It does so after three cycles; the log and the command show the reason."""
    topic = domain.data_topic(2)
    group = unique("slow")
    slow = Member(domain, group, "slow", topic, pause_s=0.2)
    fast = Member(domain, group, "fast", topic)
    with members(slow, fast):
        domain.wait_owned(group, topic, by={"slow", "fast"})
        (place,) = [p for p, c in domain.owners(group).items() if c == "slow"]
        arrivals = Arrivals(domain, place, per_s=30)
        arrivals.start()
        try:
            step = eventually(lambda: released(domain, group, "lagging"), "handed on")[
                0
            ]
            key = Key(group, *place)
            eventually(lambda: domain.owners(group)[place] == "fast", "taken over")
            caught_up = fast.marshal.session
            eventually(lambda: caught_up.lag_of(key) in range(20), "caught up")
        finally:
            arrivals.ends.set()
            arrivals.join(60)
        (event,) = slow.observer.named("lagging")
        listed = _claims_listed(domain, group)[place.partition]
        text = _cli(domain, "claims", "who", group, topic, str(place.partition))
    assert step.client_id == "slow"
    assert step.record.successor == "fast"
    assert event.fields["cycles"] == 3
    assert event.fields["produced_per_s"] > event.fields["consumed_per_s"] >= 0
    assert str(event.fields["lag"]) in step.record.reason
    assert listed["why"]["client_id"] == "fast"
    assert listed["why"]["reason"].startswith("handed over by slow; ")
    assert listed["why"]["reason"] in text
    fetched = [t for t in domain.history().tenures(group)[key] if t.client_id == "slow"]
    assert len(fetched) == 1, "it never came back"


def _claims_listed(domain, group):
    output = _cli(domain, "claims", "list", "--group", group, "-o", "json")
    return {row["partition"]: row for row in json.loads(output)["claims"]}


def _cli(domain, *arguments):
    env = {
        "MARSHAL_BOOTSTRAP_SERVER": domain.servers,
        "MARSHAL_COORDINATION_TOPIC": domain.topic,
    }
    done = CliRunner().invoke(app, list(arguments), env=env)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("delivery", list(Delivery))
def test_a_blocked_handler_loses_its_partition_to_another_member(
    domain, unique, delivery
):
    """By log time it moves within an interval and jitter."""
    topic = domain.data_topic(1, records_each=50)
    group = unique("blocked")
    place = TopicPartition(topic, 0)
    observer = Recorder()
    with domain.marshal(group, "a", observer=observer) as a:
        stuck = a.consumer(topic, delivery=delivery, max_poll_records=5)
        polled = {}
        while not polled:
            polled = stuck.poll(100, 2)
        asked_ms = max(step.timestamp_ms for step in domain.history().steps)
        with members(Member(domain, group, "b", topic, delivery=delivery)) as (b,):
            eventually(lambda: domain.owners(group)[place] == "b", "taken over")
            eventually(lambda: (0, 49) in b.handled, "b handles the rest")
        (records,) = polled.values()
        with pytest.raises(ClaimLost, match="stuck"):
            stuck.commit(records)
        handled = [offset for _, offset in b.handled]
    (step, *_) = released(domain, group, "stuck")
    assert step.timestamp_ms - asked_ms <= domain.h_ms + domain.h_ms // 10 + slack_ms()
    if delivery is Delivery.AT_LEAST_ONCE:
        assert handled[0] == 0, "what was in hand is handed out again"
    else:
        assert handled[0] >= 2, "never twice"
        lost = [e.fields["ranges"] for e in observer.named("grant_lost")]
        missing = set(range(2, 50)) - set(handled)
        assert missing == {o for rs in lost for f, t in rs for o in range(f, t + 1)}


# --- topics that come and go


def test_new_topics_of_a_pattern_and_new_partitions_are_claimed(
    domain, unique, monkeypatch
):
    prefix, names = unique("orders"), iter("ab")
    monkeypatch.setattr(domain, "unique", lambda _name: f"{prefix}-{next(names)}")
    group = unique("pattern")
    first = domain.data_topic(1, records_each=1)
    follower = Member(
        domain, group, "w1", pattern=f"{prefix}-.*", metadata_refresh_ms=300
    )
    with members(follower):
        domain.wait_owned(group, first, by={"w1"})
        second = domain.data_topic(2, records_each=1)
        domain.wait_owned(group, second, by={"w1"})
        domain.kafka.create_partitions({first: 3})
        for number in (1, 2):
            domain.produced[TopicPartition(first, number)] = 0
        domain.wait_owned(group, first, by={"w1"})
        domain.kafka.delete_topics([second])
        eventually(lambda: released(domain, group, "topic_gone"), "second leaves")
        eventually(
            lambda: {p.topic for p in follower.consumer.assignment()} == {first},
            "the consumer has only the first",
        )


# --- policies of others


def test_an_installed_policy_is_used(domain, unique, tmp_path, monkeypatch):
    """The policy is an entry point of a distribution on the path."""
    (tmp_path / "acme_policies.py").write_text(
        "from kafka_marshal.policies import Plan\n"
        "def odd(view):\n"
        "    return Plan(tuple(k.key for k in view.keys\n"
        "                      if k.key.partition % 2 and k.is_claimable))\n"
    )
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kafka_marshal.policies]\nodd = acme_policies:odd\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    topic = domain.data_topic(4)
    group = unique("acme")
    with members(Member(domain, group, "a", topic, policy="odd")):
        eventually(lambda: len(domain.owners(group)) == 2, "the odd ones are taken")
    sys.modules.pop("acme_policies", None)
    assert {p.partition for p in domain.owners(group)} == {1, 3}
