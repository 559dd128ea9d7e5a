"""The number of coordinating partitions changes on a real broker, and goes back.

Most without members: what they do meanwhile has tests of its own.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from clikit import Cli
from domain import opened
from kafka import TopicPartition as Place
from waiting import eventually, poll_all

from kafka_marshal.errors import ClaimRejected
from kafka_marshal.protocol import layout_steps
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.snapshot import to_bytes
from kafka_marshal_cli.exits import ExitCode

PARTITIONS, EACH = 12, 6
ADOPTION_MS = 500


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Nobody reports a generation: the end of each change would take half a minute."""
    monkeypatch.setattr(layout_steps, "FINAL_AFTER_MS", ADOPTION_MS)


@pytest.fixture
def domain(broker, unique):
    with opened(broker, unique, h_ms=1_000, partitions=4) as domain:
        yield domain


def consumed(domain, group, topic, count, *, delivery):
    """Return what a client gets that works until it has so many records."""
    with domain.marshal(group, f"{group}-{count}") as marshal:
        consumer = marshal.consumer(topic, delivery=delivery)
        found = poll_all(consumer, count)
        if delivery == "alo":
            consumer.commit()
        consumer.close()
    return [(record.partition, record.offset) for record in found]


def places(domain, group, count):
    """Return the keys of a group by partition; each is where it belongs."""
    found = {}
    for t, world in domain.history().worlds.items():
        assert world.layout is None
        for key, known in world.keys.items():
            if key.group_id == group:
                assert key not in found
                assert t == place_of(key, partition_count=count)
                found[key] = (known.position, known.granted)
    return found


def with_settings(domain, unique):
    """Return groups that have settings."""
    names = [unique("set") for _ in range(6)]
    with domain.admin() as admin:
        for number, group in enumerate(names):
            admin.set_group(group, {"grace_ms": number}, execute=True)
    return names


def require_settings(domain, names):
    world = domain.world()
    for number, group in enumerate(names):
        assert world.settings(group).grace_ms == number


def resize(cli, count):
    """Change the number by the command; a pause keeps it from beginning."""
    arguments = ("topic", "resize", "--partitions", str(count))
    cli.run("groups", "pause", "paused", "--for", "60s")
    assert list(cli.json(*arguments)["obstacles"]) == ["paused"]
    cli.run(*arguments, "--execute", code=ExitCode.REFUSED)
    cli.run("groups", "resume", "paused")
    dry = cli.json(*arguments)
    assert (dry["is_executed"], dry["obstacles"]) == (False, {})
    assert cli.json(*arguments, "--execute")["to_count"] == count


def test_an_admin_that_was_open_before_follows(domain):
    with domain.admin() as early, domain.admin() as admin:
        early.set_group("g", {"grace_ms": 1}, execute=True)
        admin.resize_topic(8, execute=True)
        assert early.set_group("g", {"grace_ms": 2}, execute=True).is_changed
        assert early.alter_topic(limits={"beats": 100}, execute=True).changes
        assert early.resize_topic(16, execute=True).from_count == 8
        assert admin.held("g") == ()
        assert admin.set_group("g", {"grace_ms": 3}, execute=True).is_changed
    assert domain.world().settings("g").grace_ms == 3


def test_it_grows_and_shrinks_between_runs(domain, unique, tmp_path):
    cli, topic = Cli(domain, tmp_path), domain.data_topic(PARTITIONS, EACH)
    groups = {unique("alo"): "alo", unique("amo"): "amo"}
    named = with_settings(domain, unique)
    done = {group: [] for group in groups}
    total = EACH * PARTITIONS
    for count in (4, 8, 16, 8):
        if count != 4:
            resize(cli, count)
        require_settings(domain, named)
        info = cli.json("topic", "info")
        assert (info["partition_count"], info["change"], info["problems"]) == (
            count,
            None,
            [],
        )
        domain.forget_history()
        for group, delivery in groups.items():
            before = places(domain, group, count)
            assert len(before) == (0 if count == 4 else PARTITIONS)
            done[group] += consumed(domain, group, topic, total, delivery=delivery)
        domain.produce(topic, EACH)
    for found in done.values():
        assert len(found) == len(set(found)) == 4 * total
        assert max(offset for _, offset in found) == 4 * EACH - 1


class Killed(Exception):
    """The admin was killed."""


def resized(domain, count, *, records=None):
    """Change the number; die before that record, if it is given."""
    with domain.admin() as admin:
        if records is not None:
            _limit(admin, records)
        return admin.resize_topic(count, execute=True)


def _limit(admin, records):
    """Let an admin die before it appends one more record than these."""
    follow, left = admin._follow, [records]

    def limited():
        follower = follow()
        plain = type(follower).append

        def append(partition, record):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return plain(follower, partition, record)

        follower.append = append
        return follower

    admin._follow = limited


def test_another_admin_continues_after_each_record(domain, unique, tmp_path):
    topic, group = domain.data_topic(PARTITIONS, EACH), unique("group")
    consumed(domain, group, topic, EACH * PARTITIONS, delivery="amo")
    deaths = [*range(0, 26, 2)]
    before, count, ended = 4, 8, 0
    for records in deaths:
        expected = places(domain, group, before)
        try:
            resized(domain, count, records=records)
            ended += 1
        except Killed:
            with domain.admin() as admin:
                plan = admin.resize_topic(count)
            assert (plan.change is not None) == (records > max(0, count - before))
            info = Cli(domain, tmp_path).json("topic", "info")
            assert (info["change"] is not None) == (plan.change is not None)
            if domain.history().worlds[0].layout is not None:
                with (
                    domain.admin() as admin,
                    pytest.raises(ClaimRejected, match=f"--partitions {count}"),
                ):
                    admin.resize_topic(4 * count, execute=True)
            resized(domain, count)
        domain.forget_history()
        assert places(domain, group, count) == expected
        before, count = count, before
    assert ended < len(deaths)


class Member:
    """A member that reads all that it is given, and commits it."""

    def __init__(self, domain, group, topic, name):
        self.marshal = domain.marshal(group, name)
        self.consumer = self.marshal.consumer(topic)
        self.seen = []

    def work(self):
        for records in self.consumer.poll(timeout_ms=50).values():
            self.seen += [(record.partition, record.offset) for record in records]
        self.consumer.commit()

    def knows(self, partitions):
        """Return the bytes of each partition that it knows."""
        engine = self.marshal.engine
        with engine.changed:
            context = engine.context
            return {
                t: to_bytes(context.replicas[t].world)
                for t in partitions
                if t in context.replicas and t not in context.rebuilding
            }

    def close(self):
        self.consumer.close()
        self.marshal.close()


def test_a_change_after_one_whose_probes_were_deleted(domain, unique, tmp_path):
    """One member has read the probes, one starts before the change and one after."""
    topic, group = domain.data_topic(PARTITIONS, EACH), unique("group")
    cli, added = Cli(domain, tmp_path), range(4, 8)
    with pytest.raises(Killed):
        resized(domain, 8, records=len(added))
    members = [Member(domain, group, topic, "early")]
    try:
        total = EACH * PARTITIONS
        eventually(lambda: members[0].work() or len(members[0].seen) == total, "read")
        assert len(members[0].knows(added)) == len(added)
        ends = {Place(domain.topic, t): 1 for t in added}
        domain.kafka.delete_records(ends)
        members.append(Member(domain, group, topic, "middle"))
        for member in members:
            eventually(
                lambda m=member: m.work() or len(m.knows(range(4))) == 4, "ready"
            )
        unused = {each["check"]: each["found"] for each in cli.json("doctor")["checks"]}
        assert str([*added]) in unused["unused"]
        assert domain.world().unused == tuple(added)
        assert cli.json("log", "verify")["result"] == "ok"
        assert cli.json("groups", "history", group) is not None
        dry = cli.json("topic", "resize", "--partitions", "8")
        assert dry["obstacles"] == {}
        with ThreadPoolExecutor(1) as pool:
            change = pool.submit(resized, domain, 8)
            eventually(lambda: [m.work() for m in members] and change.done(), "changed")
            assert change.result().to_count == 8
        members.append(Member(domain, group, topic, "late"))
        domain.produce(topic, EACH)

        def is_done():
            for member in members:
                member.work()
            return sum(len(member.seen) for member in members) == 2 * total

        eventually(is_done, "each record was handed out once")
        assert len({one for member in members for one in member.seen}) == 2 * total

        def agree():
            for member in members:
                member.work()
            known = [member.knows(range(8)) for member in members]
            return len(known[0]) == 8 and all(one == known[0] for one in known)

        eventually(agree, "all know the same")
        assert members[-1].marshal.engine.log_start_missing == ()
    finally:
        for member in members:
            member.close()
    world = domain.world()
    assert (world.log_start_missing, world.unused) == ((), ())
