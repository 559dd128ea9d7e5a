"""What commands show of a real log after the coordinating partitions were resized."""

import time
from itertools import pairwise

import pytest
from clikit import Cli
from domain import opened
from waiting import eventually, poll_all

from kafka_marshal.clock import instant
from kafka_marshal.protocol import layout_steps
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.types import Key, Token

PARTITIONS, EACH = 6, 4
ADOPTION_MS = 500


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """No member reports a generation, so each change would wait half a minute."""
    monkeypatch.setattr(layout_steps, "FINAL_AFTER_MS", ADOPTION_MS)


@pytest.fixture
def domain(broker, unique, request):
    h_ms = getattr(request, "param", 1_000)
    with opened(broker, unique, h_ms=h_ms, partitions=2) as domain:
        yield domain


def consumed(domain, group, topic):
    with domain.marshal(group, f"{group}-{time.monotonic_ns()}") as marshal:
        consumer = marshal.consumer(topic, delivery="amo")
        poll_all(consumer, EACH * PARTITIONS)
        consumer.close()


def moment():
    """Return the time for --at, some ms apart from earlier and later records."""
    time.sleep(0.05)
    now_ms = time.time_ns() // 1_000_000
    time.sleep(0.05)
    return instant(now_ms)


# At most once, records are lost with an append that has no outcome in half an interval:
# on a busy machine a short interval is not enough for a test that expects them all.
@pytest.mark.parametrize("domain", [3_000], indirect=True)
def test_claims_and_history_are_read_from_each_keys_partition_over_time(
    domain, unique, tmp_path
):
    cli, topic = Cli(domain, tmp_path), domain.data_topic(PARTITIONS, EACH)
    group, moments = unique("group"), {}
    counts = (2, 4, 8, 4)
    for count in counts:
        if count != 2:
            cli.json("topic", "resize", "--partitions", str(count), "--execute")
        consumed(domain, group, topic)
        moments[moment()] = count
        domain.produce(topic, EACH)
    for number in range(PARTITIONS):
        key = Key(group, topic, number)
        words = (group, topic, str(number))
        for index, (at, count) in enumerate(moments.items()):
            place = place_of(key, partition_count=count)
            who = cli.json("claims", "who", *words, "--at", at)
            assert who["coordinating_partition"] == place
            assert who["position"] == EACH * (index + 1)
            past = cli.json("claims", "history", *words, "--at", at)
            assert past["coordinating_partition"] == place
            assert len(past["claims"]) == index + 1
        claims = cli.json("claims", "history", *words)["claims"]
        tokens = [tuple(map(int, each["token"].split("."))) for each in claims]
        assert tokens == sorted(set(tokens))
        starts = [each["from_position"] for each in claims]
        assert starts[1:] == [EACH * n for n in range(1, len(counts))]
        events = cli.json("claims", "explain", *words)["events"]
        moves = [
            place_of(key, partition_count=before)
            != place_of(key, partition_count=after)
            for before, after in pairwise(counts)
        ]
        assert sum(each["what"] == "imported" for each in events) == sum(moves)
    listed = cli.json("claims", "list", "--group", group)["claims"]
    assert [row["partition"] for row in listed] == list(range(PARTITIONS))

    def resizes():
        actions = cli.json("groups", "history", group)["actions"]
        found = [each for each in actions if each["kind"] == "resize"]
        return [(each["outcome"], len(each["steps"])) for each in found]

    # The last partitions may be settled after the command has ended, by a member.
    wanted = [("accepted", 4)] * (len(counts) - 1)
    with domain.marshal(group, "last") as marshal:
        consumer = marshal.consumer(topic, delivery="amo")
        poll_all(consumer, EACH * PARTITIONS)
        eventually(lambda: resizes() == wanted, "every step of each change")
        consumer.close()
    verified = cli.json("log", "verify")
    assert verified["result"] == "ok"
    losses = cli.json("grants", "losses", "--group", group)
    assert losses["lost"] == []


@pytest.mark.parametrize("delivery", ["alo", "amo"])
def test_a_sidecar_client_continues_moved_keys_under_new_tokens(
    broker, unique, delivery
):
    """Each moving partition ends, and begins again under a later token."""
    with opened(broker, unique, h_ms=10_000, partitions=2, via="sidecar") as domain:
        topic, group = domain.data_topic(PARTITIONS, EACH), unique("group")
        found: list[tuple[int, int]] = []
        tokens: dict[int, set[Token]] = {}
        with domain.marshal(group, "a") as marshal:
            consumer = marshal.consumer(topic, delivery=delivery)
            for count in (2, 4, 2):
                if count != 2 or found:
                    with domain.admin() as admin:
                        admin.resize_topic(count, execute=True)
                    domain.forget_history()
                    domain.produce(topic, EACH)
                for record in poll_all(consumer, EACH * PARTITIONS):
                    found.append((record.partition, record.offset))
                    tokens.setdefault(record.partition, set()).add(record.token)
                if delivery == "alo":
                    consumer.commit()
            consumer.close()
        assert len(found) == len(set(found)) == 3 * EACH * PARTITIONS
        for number, seen in tokens.items():
            key = Key(group, topic, number)
            is_moved = place_of(key, partition_count=2) != place_of(
                key, partition_count=4
            )
            assert len(seen) == (3 if is_moved else 1), key
