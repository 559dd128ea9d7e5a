"""`marshal groups grow`, with a cluster in memory."""

import json

import pytest
from enginekit import fold
from growkit import Died, Tool, at, growths, keyed, partitions, records
from typer.testing import CliRunner

from kafka_marshal import World
from kafka_marshal.admin.growing import SETTLE_MS
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.shared import Call


@pytest.fixture
def cluster(monkeypatch):
    """A group is at the end of partition 0, and in the middle of 2."""
    made = keyed(1)
    at(made, 0, 5)
    at(made, 2, 3)
    monkeypatch.setattr(Call, "admin", lambda _: Tool(made))
    monkeypatch.setattr(Call, "world", lambda *_, **__: World([fold(made)], {}))
    return made


def invoke(*words, code=0):
    done = CliRunner().invoke(app, ["groups", "grow", *words])
    assert done.exit_code == code, (done.stdout, done.stderr)
    return done


def grow(*words):
    return invoke("--topic", "t", "--partitions", "8", *words)


def test_without_execute_a_growth_is_only_shown(cluster):
    done = grow()
    assert done.stdout.splitlines()[:8] == [
        "topic:            t",
        "from count:       4",
        "to count:         8",
        "partitions count: 4",
        "added count:      4",
        "steps:            announce, add, settle, end",
        "settle:           10m",
        "is executed:      no",
    ]
    table = [" ".join(line.split()) for line in done.stdout.splitlines()[9:] if line]
    assert table == [
        "GROUP TOPIC PARTITION POSITION END LAG WAITING",
        "g t 0 5 5 0 4",
        "g t 1 - 0 - 5",
        "g t 2 3 7 4 6",
        "g t 3 - 9 - 7",
    ]
    assert done.stderr == "nothing was written; --execute writes it\n"
    assert (growths(cluster), partitions(cluster)) == ((), 4)


def test_the_reason_of_a_growth_is_in_the_log(cluster):
    grow("--reason", "more consumers", "--settle", "15s", "--execute")
    assert {each.reason for each in records(cluster)} == {"more consumers"}


def test_with_execute_a_growth_reports_its_steps_on_stderr(cluster):
    done = grow("--settle", "15s", "--execute", "-o", "json")
    found = json.loads(done.stdout)
    assert found["steps"] == ["announce", "add", "settle", "end"]
    assert (found["is_executed"], found["settle_ms"]) == (True, 15_000)
    assert [each["waiting"] for each in found["sources"]] == [[], [5], [6], [7]]
    assert found["sources"][2] == {
        "group_id": "g",
        "topic": "t",
        "partition": 2,
        "position": 3,
        "end_offset": 7,
        "lag": 4,
        "waiting": [6],
    }
    assert done.stderr.splitlines() == [
        "announcing the growth",
        "adding the partitions",
        "waiting until producers have learnt the new number: 15s left",
        "waiting until producers have learnt the new number: 5s left",
        "recording the ends of the old partitions",
        (
            "note: --settle is 15s; keys of a producer that takes longer to learn the "
            "new number may lose their order"
        ),
    ]
    assert (growths(cluster)[0].ends, partitions(cluster)) == ((5, 0, 7, 9), 8)
    again = grow("--execute", "-o", "json")
    assert (
        again.stderr == "the growth to 8 partitions has ended; nothing is left to do\n"
    )
    found = json.loads(again.stdout)
    assert (found["steps"], found["is_executed"], found["settle_ms"]) == ([], False, 0)


def test_a_growth_waits_ten_minutes_for_producers_by_default(cluster):
    before_ms = cluster.clock.now_ms()
    assert "note" not in grow("--execute").stderr
    assert cluster.clock.now_ms() - before_ms >= SETTLE_MS == 600_000


def test_without_a_partition_count_known_growths_are_shown(cluster):
    done = invoke()
    assert "no growths" in done.stdout
    with pytest.raises(Died):
        Tool(cluster, left=2).grow()
    found = json.loads(invoke("-o", "json").stdout)
    (row,) = found["growths"]
    assert (row["topic"], row["from_count"], row["to_count"]) == ("t", 4, 8)
    assert (row["state"], row["end_offsets"]) == ("announced", None)
    assert row["topic_id"] == cluster.kafka.topic("t").topic_id.hex()
    Tool(cluster).grow()
    found = json.loads(invoke("--topic", "t", "-o", "json").stdout)
    (row,) = found["growths"]
    assert (row["state"], row["end_offsets"]) == ("ended", [5, 0, 7, 9])
    assert [each["waiting"] for each in found["sources"]] == [[], [5], [6], [7]]
    other = invoke("--topic", "u", "-o", "json")
    assert json.loads(other.stdout)["growths"] == []
    assert other.stderr == "topic 'u' does not exist, and no growth of it is known\n"
    assert "ended" in invoke().stdout


def test_withdraw_ends_a_growth_only_with_execute(cluster):
    with pytest.raises(Died):
        Tool(cluster, left=1).grow()
    done = invoke("--topic", "t", "--withdraw")
    assert (
        "note: after the withdrawal members claim new partitions at once" in done.stderr
    )
    assert "nothing was written" in done.stderr
    assert growths(cluster) != ()
    done = invoke("--topic", "t", "--withdraw", "--execute", "-o", "json")
    found = json.loads(done.stdout)
    assert (found["steps"], found["sources"]) == (["withdraw"], [])
    assert done.stderr.startswith("withdrawing the growth\n")
    assert growths(cluster) == ()


def test_partitions_beyond_the_growth_are_noted(cluster):
    with pytest.raises(Died):
        Tool(cluster, left=2).grow()
    cluster.kafka.add_partitions("t", 8)
    assert "the topic has 16 partitions; those from 8 on" in grow().stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--topic", "t", "--execute"], ExitCode.USAGE, "give the number"),
        (["--partitions", "8"], ExitCode.USAGE, "name the topic"),
        (["--withdraw"], ExitCode.USAGE, "name the topic"),
        (["--topic", "t", "--partitions", "7"], ExitCode.USAGE, "cannot get 7"),
        (["--topic", "t", "--partitions", "4"], ExitCode.REFUSED, "already"),
        (["--topic", "t", "--withdraw"], ExitCode.REFUSED, "the log knows none"),
    ],
)
def test_an_invalid_growth_is_refused_with_an_exit_code(cluster, words, code, text):
    assert text in invoke(*words, code=code).stderr
    assert growths(cluster) == ()
