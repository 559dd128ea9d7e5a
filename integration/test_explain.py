"""The history of a partition on a real broker, as the command shows it."""

import pytest
from clikit import Cli
from domain import opened
from fleet import Fleet
from waiting import eventually

from kafka_marshal import KeyHistory, TopicPartition
from kafka_marshal.protocol.types import Key


@pytest.fixture(scope="module")
def domain(broker, unique, transport):
    with opened(broker, unique, transport=transport) as domain:
        yield domain


def in_order(rows, wanted):
    """Return the first rows that have these contents in this order."""
    found, rest = [], iter(rows)
    for what, fields in wanted:
        row = next(
            (
                row
                for row in rest
                if row["what"] == what
                and all(row[name] == value for name, value in fields.items())
            ),
            None,
        )
        assert row is not None, (what, fields, [(r["what"], r["text"]) for r in rows])
        found.append(row)
    return found


def live_through(domain, cli, tmp_path, *, topic, group):
    """Kill an owner, pause and resume the group, and forget its claim by force."""
    place = f"{topic}:0"
    (tmp_path / "fleet").mkdir()

    def owner():
        return domain.owners(group).get(TopicPartition(topic, 0))

    def position():
        return domain.states(group)[Key(group, topic, 0)].position

    with Fleet(domain, tmp_path / "fleet", group_id=group, topics=[topic]) as fleet:
        first = fleet.start("w1")
        eventually(lambda: len(first.journal.handled) == 20, "w1 works")
        second = fleet.start("w2")
        second.wait_for("ready")
        eventually(lambda: position() == 20, "w1 has reported its position")
        first.kill()
        eventually(lambda: owner() == "w2", "w2 takes over")
        cli.run(
            *("groups", "pause", group, "--for", "10m", "--reason", "deploy"),
            *("--as", "alice", "--wait"),
        )
        paused = cli.json("claims", "explain", group, place)
        assert paused["state"] == "free"
        assert "the group is paused until " in paused["why"]
        assert "(alice): deploy" in paused["why"]
        cli.run("groups", "resume", group, "--reason", "done", "--as", "bob")
        eventually(lambda: owner() == "w2", "w2 claims it again")
        # Otherwise w2 may end before it has read back its own claim.
        eventually(lambda: len(second.journal.of("claimed")) == 2, "w2 knows that")
        assert cli.json("claims", "explain", group, place)["state"] == "owned"
        second.ask_to_end()
    forget = ("claims", "forget", group, "--topic", topic, "--force", "--yes")
    assert cli.json(*forget, "--execute")["forgotten"]


def test_the_events_of_a_partition_are_shown_in_order(domain, unique, tmp_path):
    topic, group = domain.data_topic(1, records_each=20), unique("story")
    place = f"{topic}:0"
    cli = Cli(domain, tmp_path / "cli")
    (tmp_path / "cli").mkdir()
    live_through(domain, cli, tmp_path, topic=topic, group=group)
    found = cli.json("claims", "explain", group, place, "--limit", "0")
    assert found["state"] == "unclaimed"
    assert found["why"].startswith("unclaimed since ")
    assert " forgot the partition, with its position 20 " in found["why"]
    rows = in_order(
        found["events"],
        [
            ("claimed", {"client_id": "w1", "owner_before": None}),
            ("stale", {"client_id": "w1"}),
            ("taken_over", {"client_id": "w2", "owner_before": "w1", "position": 20}),
            ("paused", {"person": "alice", "reason": "deploy"}),
            ("released", {"client_id": "w2", "position": 20}),
            ("unpaused", {"person": "bob", "reason": "done"}),
            ("claimed", {"client_id": "w2"}),
            ("released", {"client_id": "w2", "position": 20}),
            ("forgotten", {"position_before": 20}),
        ],
    )
    offsets = [row["offset"] for row in rows if row["offset"] is not None]
    assert offsets == sorted(offsets)

    claims = cli.json("claims", "history", group, place)["claims"]
    assert [(c["owner"]["client_id"], c["ending"]) for c in claims] == [
        ("w1", "taken_over"),
        ("w2", "released"),
        ("w2", "released"),
    ]
    assert [c["reason"] for c in claims[1:]] == ["paused", "closed"]
    key = KeyHistory.open(
        domain.servers,
        key=Key(group, topic, 0),
        coordination_topic=domain.topic,
        transport=domain.transport,
    )
    assert [str(c.token) for c in key.claims] == [c["token"] for c in claims]

    then = str(rows[2]["offset"])
    assert cli.json("claims", "explain", group, place, "--at", then)["why"].startswith(
        "owned by w2 since "
    )
    actions = cli.json("groups", "history", group)["actions"]
    assert [(a["kind"], a["person"], a["outcome"]) for a in actions if a["group_id"]][
        :2
    ] == [("pause", "alice", "accepted"), ("resume", "bob", "accepted")]
    assert actions[-1]["kind"] == "forget"
    ended = next(a["ended"] for a in actions if a["kind"] == "pause")
    assert (ended["how"], ended["person"]) == ("resumed", "bob")
