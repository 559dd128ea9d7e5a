"""The number of coordinating partitions changes on a real broker, and goes back.

There are no members during a change; test_layout_change.py has these.
"""

import pytest
from clikit import Cli
from domain import opened
from waiting import poll_all

from kafka_marshal.protocol import layout_steps
from kafka_marshal.protocol.layout import place_of
from kafka_marshal_cli.exits import ExitCode

PARTITIONS, EACH = 12, 6
ADOPTION_MS = 500


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """No member reports a generation, so each change would wait half a minute."""
    monkeypatch.setattr(layout_steps, "FINAL_AFTER_MS", ADOPTION_MS)


@pytest.fixture
def domain(broker, unique):
    with opened(broker, unique, h_ms=1_000, partitions=4) as domain:
        yield domain


def consumed(domain, group, topic, count, *, delivery):
    """Let a client consume so many records; return their partitions and offsets."""
    with domain.marshal(group, f"{group}-{count}") as marshal:
        consumer = marshal.consumer(topic, delivery=delivery)
        found = poll_all(consumer, count)
        if delivery == "alo":
            consumer.commit()
        consumer.close()
    return [(record.partition, record.offset) for record in found]


def places(domain, group, count):
    """Return the state of a group's keys; check that each is in its partition."""
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
    """Change the count by the command; check that a pause prevents it."""
    arguments = ("topic", "resize", "--partitions", str(count))
    cli.run("groups", "pause", "paused", "--for", "60s")
    assert list(cli.json(*arguments)["obstacles"]) == ["paused"]
    cli.run(*arguments, "--execute", code=ExitCode.REFUSED)
    cli.run("groups", "resume", "paused")
    dry = cli.json(*arguments)
    assert (dry["is_executed"], dry["obstacles"]) == (False, {})
    assert cli.json(*arguments, "--execute")["to_count"] == count


def test_the_partition_count_grows_and_shrinks_without_lost_state(
    domain, unique, tmp_path
):
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
