"""A group with policy ``planner`` on a real broker (PROTOCOL 9.2)."""

import signal
from collections import Counter

import pytest
from clikit import Cli
from domain import opened
from fleet import Fleet
from waiting import eventually

PARTITIONS = 12


@pytest.fixture(scope="module")
def domain(broker, unique):
    # One transport is enough: the tests do not depend on it.
    with opened(broker, unique) as domain:
        yield domain


def counts(domain, group):
    return Counter(domain.owners(group).values())


def entries_of(domain):
    return sum(state.next_offset for state in domain.world().partitions)


def test_the_next_member_plans_and_only_keys_of_dead_members_move(
    domain, unique, tmp_path
):
    """One planner after the other is killed."""
    cli = Cli(domain, tmp_path)
    topic = domain.data_topic(PARTITIONS)
    group = unique("planned")
    with domain.admin() as admin:
        admin.set_group(group, {"policy": "planner"}, execute=True)
    with Fleet(domain, tmp_path, group_id=group, topics=[topic]) as fleet:
        workers = [fleet.start(f"w{number}") for number in range(4)]
        even = dict.fromkeys(["w0", "w1", "w2", "w3"], 3)
        eventually(lambda: counts(domain, group) == even, "all have three")
        shown = cli.json("plan", "show", group)
        assert shown["policy"] == "planner"
        assert shown["author"] == "w0"
        first = shown["generation"]
        for left in (3, 2):
            before = domain.owners(group)
            victim = workers.pop(0)
            victim.kill()
            share = PARTITIONS // left
            names = [worker.client_id for worker in workers]
            goal = dict.fromkeys(names, share)
            eventually(
                lambda goal=goal: counts(domain, group) == goal, f"all have {share}"
            )
            after = domain.owners(group)
            moved = [key for key in before if before[key] != after[key]]
            assert {before[key] for key in moved} == {victim.client_id}
            shown = cli.json("plan", "show", group)
            assert shown["author"] in names
        found = cli.json("plan", "verify", group)
        assert found["outcome"] in {"same", "unknown"}
        generation = shown["generation"]
        assert shown["lag_unknown_count"] == 0
        assert shown["lag"] == 0
        diff = cli.json("plan", "show", group, "--diff", str(first))
        assert {row["to"] for row in diff["changes"]} <= {"w2", "w3"}
        gone = [row for row in diff["changes"] if row["source"] in {"w0", "w1"}]
        assert gone
        assert {row["state"] for row in gone} <= {"overtaken", None}
        then = cli.json("plan", "show", group, "--diff", str(first), "--at=-1ms")
        assert then["changes"] == diff["changes"]
        owners, entries = domain.owners(group), entries_of(domain)
        eventually(lambda: entries_of(domain) > entries + 50, "members go on beating")
        assert cli.json("plan", "show", group)["generation"] == generation
        assert domain.owners(group) == owners


def test_a_new_member_gets_its_share_with_the_fewest_moves(domain, unique, tmp_path):
    topic = domain.data_topic(PARTITIONS)
    group = unique("joined")
    with domain.admin() as admin:
        admin.set_group(group, {"policy": "planner"}, execute=True)
    with Fleet(domain, tmp_path, group_id=group, topics=[topic]) as fleet:
        for name in ("a", "b"):
            fleet.start(name)
        eventually(lambda: counts(domain, group) == {"a": 6, "b": 6}, "two share")
        # One of the two may have had all partitions at first.
        before = tenures_count(domain, group)
        fleet.start("c")
        goal = {"a": 4, "b": 4, "c": 4}
        eventually(lambda: counts(domain, group) == goal, "three share")
        assert tenures_count(domain, group) - before == 4


def tenures_count(domain, group):
    return sum(map(len, domain.history().tenures(group).values()))


def test_rebalance_with_spread_divides_each_topic_among_racks(domain, unique, tmp_path):
    """A group that is spread already is not changed."""
    cli, group = Cli(domain, tmp_path), unique("spread")
    topics = [domain.data_topic(4), domain.data_topic(4)]
    words = ("consume", *topics, "--group", group, "--labels")

    def even():
        owners = domain.owners(group)
        found = Counter((key.topic, name) for key, name in owners.items())
        return set(found.values()) == {2} and len(found) == 4

    with (
        cli.started(*words, "rack=r1", "--client-id", "a") as _,
        cli.started(*words, "rack=r2", "--client-id", "b") as _,
    ):
        eventually(lambda: counts(domain, group) == {"a": 4, "b": 4}, "they share")
        refused = cli.run("plan", "rebalance", group, "--spread", code=3)
        assert "--policy planner" in refused.stderr
        with domain.admin() as admin:
            admin.set_group(group, {"policy": "planner"}, execute=True)
        found = cli.json("plan", "rebalance", group, "--spread", "--execute")
        assert found["is_executed"] == (found["moves_count"] > 0)
        eventually(even, "each topic is spread")
        history = cli.json("groups", "history", group)["actions"]
        kinds = [each["kind"] for each in history if each["outcome"] == "accepted"]
        assert kinds.count("rebalance") == found["is_executed"]
        again = cli.json("plan", "rebalance", group, "--spread", "--execute")
        assert (again["moves"], again["is_executed"]) == ([], False)


def test_a_consumer_restarted_under_another_name_gets_the_same_share(
    domain, unique, tmp_path
):
    """With `marshal consume --restarts`, and the label `replaces=*`."""
    cli, topic, group = Cli(domain, tmp_path), domain.data_topic(4), unique("renamed")
    words = ("consume", topic, "--group", group, "--restarts", "--client-id")
    with domain.admin() as admin:
        admin.set_group(group, {"policy": "planner"}, execute=True)
    with cli.started(*words, "a1") as old, cli.started(*words, "b1") as other:
        eventually(lambda: counts(domain, group) == {"a1": 2, "b1": 2}, "they share")
        before = domain.owners(group)
        begun = len(domain.history().of("claimed", group_id=group))
        assert old.end(signal.SIGTERM) == 0, old.stderr
        new = ("a2", "--labels", "replaces=*,rack=r1", "--no-plan")
        with cli.started(*words, *new):
            goal = {"a2": 2, "b1": 2}
            eventually(lambda: counts(domain, group) == goal, "it has the place")
            after = domain.owners(group)
            kept = {key for key, name in before.items() if name == "b1"}
            assert {key for key, name in after.items() if name == "b1"} == kept
            shown = cli.json("plan", "show", group)
            racks = {row["client_id"]: row["rack"] for row in shown["members"]}
            assert racks == {"a2": "r1", "b1": ""}
            assert shown["author"] == "b1"
        assert other.process.poll() is None, other.stderr
        assert len(domain.history().of("claimed", group_id=group)) == begun + 2
