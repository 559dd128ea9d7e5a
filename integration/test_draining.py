"""A drained client on a real broker hands off all partitions, and gets some back."""

import json

import pytest
from clikit import Cli
from domain import opened
from waiting import eventually

H_MS = 1_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    # One transport is enough: the tests do not depend on it.
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain


def test_a_drained_client_gets_partitions_again_after_uncordon(
    domain, unique, tmp_path
):
    cli = Cli(domain, tmp_path)
    topic = domain.data_topic(4, records_each=5)
    group = unique("drained")
    words = ("consume", topic, "--group", group, "--client-id")

    def counts():
        owners = list(domain.owners(group).values())
        return owners.count("w1"), owners.count("w2")

    with cli.started(*words, "w1") as one, cli.started(*words, "w2") as two:
        eventually(lambda: counts() == (2, 2), "w1 and w2 share the partitions")
        drain = ("clients", "drain", "w1", "--wait", "--timeout", "5m")
        why = ("--reason", "reboot", "--as", "ada")
        done = cli.run(*drain, *why, "-o", "json")
        found = json.loads(done.stdout)
        assert (found["held"], found["action"]) == ([], "drain")
        assert found["members"] == [{"group_id": group, "client_id": "w1"}]
        assert "0 partitions are still held" in done.stderr
        eventually(lambda: counts() == (0, 4), "w2 has all of them")

        shown = cli.json("groups", "describe", group)
        (row,) = shown["directives"]
        assert (row["client"], row["person"], row["reason"]) == ("w1", "ada", "reboot")
        assert (row["op_id"], row["group_id"]) == (found["op_id"], None)
        listed = cli.json("clients", "list", "--group", group)["clients"]
        assert {c["client_id"]: c["directive"] for c in listed} == {
            "w1": "drain",
            "w2": None,
        }
        ending = ("clients", "uncordon", "--operation", found["op_id"])
        ended = cli.json(*ending, "--as", "bob")
        assert ended["partitions_count"] == row["partitions_count"]
        eventually(lambda: counts() == (2, 2), "the shares are even again")
        cli.run(*ending, code=3)
        assert (one.process.poll(), two.process.poll()) == (None, None)
    assert cli.json("groups", "describe", group)["directives"] == []
    (action,) = [
        each
        for each in cli.json("groups", "history", group)["actions"]
        if each["kind"] == "drain"
    ]
    assert (action["person"], action["ended"]["person"]) == ("ada", "bob")
