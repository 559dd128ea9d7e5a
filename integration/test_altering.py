"""The heartbeat interval changes under running members, on a real broker."""

from functools import partial

import pytest
from clikit import Cli
from domain import opened
from members import Member
from waiting import eventually

from kafka_marshal import TopicPartition

RECORDS = 300
TS = range(2)


@pytest.mark.parametrize("delivery", ["alo", "amo"])
def test_the_heartbeat_interval_changes_under_load_without_lost_claims(
    broker, unique, delivery, tmp_path
):
    with opened(broker, unique, partitions=len(TS), h_ms=10_000) as domain:
        topic, group, handled = domain.data_topic(4), unique("altered"), []
        members = [
            Member(domain, group, name, topic=topic, handled=handled, delivery=delivery)
            for name in ("a", "b")
        ]
        try:
            domain.wait_owned(group, topic, by={"a", "b"})
            _alter_twice(Cli(domain, tmp_path), topic, members, handled)
        finally:
            for member in members:
                member.close()
    assert len(handled) == len(set(handled))


def _alter_twice(cli, topic, members, handled):
    sent = 0
    for h_ms, limit in ((3_000, "beats=1000"), (20_000, "beats=2000")):
        for number in range(RECORDS):
            cli.domain.produce_to(TopicPartition(topic, number % 4), 1)
            sent += 1
            if number == RECORDS // 2:
                dry = _altered(cli, h_ms, limit)
                assert (dry["is_executed"], dry["partitions"]) == (False, [0, 1])
                done = _altered(cli, h_ms, limit, "--execute")
                assert done["changes"]["heartbeat_interval_ms"]["then"] == h_ms
                assert _altered(cli, h_ms, limit)["partitions"] == []
        eventually(partial(_has, handled, sent), "all records")
        for member in members:
            eventually(partial(_follows, member, h_ms), "the interval")
    for member in members:
        ended = member.seen.named("claim_ended")
        assert not any(event.fields["ending"].was_lost for event in ended)
        assert len(member.seen.named("interval_changed")) == 2
    info = cli.json("topic", "info")
    assert info["heartbeat_interval_ms"] == 20_000
    assert info["limits"]["beats"] == 2_000


def _has(handled, count):
    return len(handled) >= count


def _follows(member, h_ms):
    return member.marshal.engine.context.heartbeat_interval_ms == h_ms


def _altered(cli, h_ms, limit, *words):
    arguments = ("topic", "alter", "--heartbeat", str(h_ms), "--limit", limit)
    return cli.json(*arguments, *words)
