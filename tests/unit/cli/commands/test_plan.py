"""`marshal plan`, with a world in memory."""

import json
from typing import ClassVar

import msgspec
import pytest
from logkit import H, Log, beat, direct, member, planned, settings
from opening import Opened
from typer.testing import CliRunner

from kafka_marshal import ConfigurationError, Key, World
from kafka_marshal.admin.rebalancing import Rebalance
from kafka_marshal.engine.kept_states import Restored
from kafka_marshal.protocol.group_plan import Move
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.views.plan import Verification
from kafka_marshal.views.plan_simulation import NewMember
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands.plan import new_member
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.shared import Call


def invoke(*arguments, what="simulate"):
    return CliRunner().invoke(app, ["plan", what, *arguments])


class Cluster(Opened):
    """An admin of a cluster with one topic."""

    COUNTS: ClassVar = {"t": 4}

    def partition_count(self, topic):
        return self.COUNTS.get(topic)


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """Members a and b hold two partitions each; topic u does not exist."""
    log = Log(cluster_id="cluster")
    for name in "ab":
        record = member(name)
        record = msgspec.structs.replace(record, capacity=0, topics=("t", "u"))
        log.append(record)
    for number, owner in enumerate("aabb"):
        log.claimed(owner, key=Key("g", "t", number))
    world = World([log.state], {0: 0}, cluster_id="cluster", read_at_ms=5)
    monkeypatch.setattr(Call, "world", lambda self, *at, **which: world)
    monkeypatch.setattr(Call, "admin", lambda self: Cluster())
    return world


def test_simulate_predicts_the_moves_after_a_kill():
    found = json.loads(invoke("g", "--kill", "b", "-o", "json").stdout)
    assert found["moves"] == [
        {
            "topic": "t",
            "partition": number,
            "source": "b",
            "to": "a",
            "wave": 1,
            "gap_ms": 2 * H,
        }
        for number in (2, 3)
    ]
    assert [row["owner"] for row in found["owners"]] == ["a"] * 4
    assert found["members"][1] == {
        "client_id": "b",
        "host": "host",
        "limit": None,
        "weight": None,
        "topics_count": None,
        "target": None,
        "directive": None,
        "held_count": 2,
        "predicted_count": 0,
    }
    assert (found["policy"], found["waves"], found["is_settled"]) == ("fair", 1, True)
    assert found["uncovered"] == []


def test_simulate_combines_all_changes():
    outcome = invoke(
        *("g", "--drain", "a", "--add", "c@h2:1", "--limit", "b=2"),
        *("--partitions", "t=5", "-o", "json"),
    )
    found = json.loads(outcome.stdout)
    owners = [row["owner"] for row in found["owners"]]
    assert sorted(owners) == ["b", "b", "c"]
    assert {row["reason"] for row in found["uncovered"]} == {"limits"}
    assert found["uncovered_count"] == 2


def test_the_table_of_simulate_has_moves_and_gaps():
    lines = invoke("g", "--host", "host").stdout
    assert "no members" in lines
    lines = invoke("g", "--kill", "b").stdout.splitlines()
    assert ["t", "2", "b", "a", "1", "2s"] in [line.split() for line in lines]
    lines = invoke("g", "--drain", "b").stdout
    assert "unknown" in lines


def test_the_table_shows_limits_weights_targets_and_directives(monkeypatch):
    found = invoke("g").stdout
    assert "HOST  HELD" in found
    log = Log(cluster_id="cluster", level=2)
    log.append(member("a", capacity=3, labels={"weight": "2", "target": "4"}))
    log.append(member("b", topics=(), capacity=0))
    log.append(direct(client="b", action="cordon"))
    for number, owner in enumerate("aabb"):
        log.claimed(owner, key=Key("g", "t", number))
    world = World([log.state], {0: 0}, cluster_id="cluster", read_at_ms=5)
    monkeypatch.setattr(Call, "world", lambda self, *at, **which: world)
    lines = [line.split() for line in invoke("g").stdout.splitlines()]
    names = ["CLIENT", "HOST", "LIMIT", "WEIGHT", "TOPICS", "TARGET", "DIRECTIVE"]
    assert [*names, "HELD", "PREDICTED"] in lines
    assert ["a", "host", "3", "2", "1", "4", "-", "2", "2"] in lines
    assert ["b", "host", "-", "1", "0", "-", "cordon", "2", "2"] in lines


def test_unknown_groups_and_invalid_changes_are_refused():
    assert invoke("nobody").exit_code == ExitCode.REFUSED
    for option, text in (
        ("--kill", "x"),
        ("--limit", "a=many"),
        ("--partitions", "t=-1"),
        ("--partitions", "t=999999999"),  # would take hours
        ("--add", ":3"),
    ):
        outcome = invoke("g", option, text)
        assert outcome.exit_code == ExitCode.USAGE
        assert "marshal: " in outcome.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("c", NewMember(name="c")),
        ("c@h", NewMember(name="c", host="h")),
        ("c@h:3", NewMember(name="c", host="h", limit=3)),
        ("c:3", NewMember(name="c", limit=3)),
    ],
)
def test_a_new_member_is_parsed_from_name_host_and_limit(text, expected):
    assert new_member(text) == expected
    with pytest.raises(ConfigurationError, match="NAME@HOST"):
        new_member("c:x")


@pytest.fixture
def log():
    """A group with policy planner; its plan gives one partition of a to b."""
    log = Log(cluster_id="cluster", level=2)
    log.append(settings(policy="planner"))
    for name in "ab":
        log.append(member(name, capacity=0))
    for number in range(4):
        log.claimed("a", key=Key("g", "t", number))
    for number in range(4):
        epoch = log.state.keys[Key("g", "t", number)].epoch
        log.append(beat(epoch, 0, key=Key("g", "t", number), client="a"))
    log.append(planned(0, ("b", 0, (3,)), client="a", vector=((2**62, 0),)))
    return log


@pytest.fixture
def planned_world(log, monkeypatch):
    monkeypatch.setattr(Call, "log_ends", lambda call, partitions: {})
    world = World([log.state], {0: 0}, cluster_id="cluster", read_at_ms=5)
    monkeypatch.setattr(Call, "world", lambda self, *at, **which: world)
    return world


def test_show_lists_the_plan_of_a_group(planned_world):
    found = json.loads(invoke("g", "-o", "json", what="show").stdout)
    assert (found["policy"], found["generation"]) == ("planner", 1)
    assert (found["author"], found["open_count"], found["is_known"]) == ("a", 1, True)
    names = ("client_id", "planned_count", "gains_count", "losses_count")
    rows = [tuple(row[name] for name in names) for row in found["members"]]
    assert rows == [("a", 3, 0, 1), ("b", 1, 1, 0)]
    (row,) = found["keys"]
    assert (row["partition"], row["holder"], row["planned"]) == (3, "a", "b")
    assert row["state"] == "open"
    assert "HOLDER  PLANNED  STATE" in invoke("g", what="show").stdout


def test_show_computes_lag_from_log_ends(planned_world, monkeypatch):
    asked = []

    def ends(call, partitions):
        asked.append(sorted(partitions))
        return {TopicPartition("t", 0): 7}

    monkeypatch.setattr(Call, "log_ends", ends)
    found = json.loads(invoke("g", "-o", "json", what="show").stdout)
    assert asked == [[TopicPartition("t", number) for number in range(4)]]
    assert (found["lag"], found["lag_unknown_count"]) == (7, 3)
    lines = invoke("g", what="show").stdout.splitlines()
    assert any(line.endswith("7 + 3 unknown") for line in lines)
    monkeypatch.setattr(Call, "log_ends", lambda call, partitions: {})
    lines = invoke("g", what="show").stdout.splitlines()
    assert any(line.startswith("a ") and line.endswith(" -") for line in lines)
    lines = invoke("g", "--at", "0:3", what="show").stdout
    assert "LAG" not in lines


def test_a_column_of_targets_or_directives_appears_only_if_there_are_any(
    log, planned_world
):
    lines = invoke("g", what="show").stdout
    assert "TARGET" not in lines
    assert "DIRECTIVE" not in lines
    log.append(member("b", seq=1, capacity=0, labels={"target": "2"}))
    lines = invoke("g", what="show").stdout
    assert "TARGET" in lines
    assert "DIRECTIVE" not in lines
    log.append(direct(client="b", action="cordon"))
    lines = invoke("g", what="show").stdout.splitlines()
    (head,) = [line for line in lines if "DIRECTIVE" in line]
    (row,) = [line for line in lines if line.startswith("b ")]
    assert row[head.index("DIRECTIVE") :].split()[0] == "cordon"


def test_show_explains_a_partition_of_a_plan(planned_world):
    result = invoke("g", "--why", "t:3", "-o", "json", what="show")
    assert json.loads(result.stdout)["why"].startswith("t-3 is to go from a to b")
    assert invoke("g", "--why", "t", what="show").exit_code == ExitCode.USAGE
    assert invoke("g", "--why", "t:9", what="show").exit_code == ExitCode.REFUSED


def test_show_lists_changes_since_an_earlier_plan(log, planned_world, monkeypatch):
    opened = []

    class Scan(Opened):
        def restore(self):
            return {0: Restored(WorldState(0), None, 0)}

        def __iter__(self):
            return iter([(0, entry) for entry in log.entries])

    def scan(call, at=None, *, partition=None):
        opened.append((at, partition))
        return Scan()

    monkeypatch.setattr(Call, "scan", scan)
    found = json.loads(invoke("g", "--diff", "1", "-o", "json", what="show").stdout)
    assert opened == [(None, 0)]
    names = ("since_generation", "since_author", "generation", "open_count")
    assert [found[name] for name in names] == [1, "a", 1, 1]
    (row,) = [row for row in found["changes"] if row["state"]]
    assert (row["partition"], row["source"], row["to"]) == (3, "b", "b")
    assert (row["holder"], row["state"]) == ("a", "open")
    assert "FROM  TO  HOLDER  STATE" in invoke("g", "--diff", "1", what="show").stdout
    result = invoke("g", "--diff", "2", what="show")
    assert result.exit_code == ExitCode.REFUSED
    assert "no plan of generation 2 yet" in result.stderr
    never = invoke("g", "--diff", "0", what="show")
    assert never.exit_code == ExitCode.USAGE
    both = invoke("g", "--diff", "1", "--why", "t:3", what="show")
    assert both.exit_code == ExitCode.USAGE


def test_a_plan_needs_a_moment_of_all_coordinating_partitions(monkeypatch):
    world = World([Log(k=2).state], {}, is_past=True, is_partial=True)
    monkeypatch.setattr(Call, "world", lambda self, *at, **which: world)
    result = invoke("g", "--at", "0:3", what="show")
    assert result.exit_code == ExitCode.USAGE
    assert "an offset of each" in result.stderr


def test_the_plan_of_an_unknown_group_is_refused(planned_world):
    assert invoke("nobody", what="show").exit_code == ExitCode.REFUSED
    assert invoke("nobody", what="verify").exit_code == ExitCode.REFUSED


MOVE = Move(TopicPartition("t", 1), "a", "b")


@pytest.mark.parametrize(
    ("options", "found", "message"),
    [
        ((), {"moves": (MOVE,), "is_needed": True}, "--execute writes it"),
        (("--dry-run",), {"moves": (), "is_needed": False}, "no move would improve"),
        (("--execute",), {"moves": (MOVE,), "is_needed": False}, "names these moves"),
        (
            ("--execute",),
            {"moves": (MOVE,), "is_needed": True, "is_written": True},
            None,
        ),
    ],
)
def test_rebalance_writes_a_plan_only_with_execute(
    planned_world, monkeypatch, options, found, message
):
    class Spreading(Cluster):
        def spread_group(self, group_id, *, execute):
            assert execute == ("--execute" in options)
            given = {"follows": 1, "uncovered": (), **found}
            return Rebalance(group_id=group_id, **given)

    monkeypatch.setattr(Call, "admin", lambda self: Spreading())
    result = invoke("g", "--spread", *options, "-o", "json", what="rebalance")
    assert result.exit_code == ExitCode.OK, result.stderr
    answer = json.loads(result.stdout)
    assert answer["is_executed"] == found.get("is_written", False)
    assert len(answer["moves"]) == answer["moves_count"] == len(found["moves"])
    assert (message is None and not result.stderr) or message in result.stderr


def test_rebalance_without_spread_is_wrong_usage():
    result = invoke("g", "--execute", what="rebalance")
    assert result.exit_code == ExitCode.USAGE
    assert "--spread" in result.stderr


@pytest.mark.parametrize("outcome", ["same", "unknown", "plan_diverged"])
def test_the_outcome_of_verify_decides_the_exit_code(
    planned_world, monkeypatch, outcome
):
    is_other = outcome == "plan_diverged"
    differences = {TopicPartition("t", 3): ("b", None)} if is_other else {}

    def verify(world, group, *, past):
        assert past({0: 7}) is planned_world
        return Verification(
            outcome=outcome, generation=1, author="a", differences=differences
        )

    monkeypatch.setattr("kafka_marshal_cli.commands.plan.verify_plan", verify)
    result = invoke("g", "-o", "json", what="verify")
    assert result.exit_code == (ExitCode.REFUSED if is_other else ExitCode.OK)
    found = json.loads(result.stdout)
    assert (found["outcome"], found["author"]) == (outcome, "a")
    assert len(found["differences"]) == len(differences)
