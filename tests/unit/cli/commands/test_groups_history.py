"""`marshal groups history`, with logs in memory."""

import json

import msgspec
import pytest
from enginekit import H, checkpointed, pause_for, write
from logkit import (
    OP,
    START_MS,
    Log,
    decide,
    forgetting,
    growth,
    pause,
    release,
    resolve,
    stage,
)
from pastkit import past
from scankit import FakeScan
from typer.testing import CliRunner

from kafka_marshal.clock import instant
from kafka_marshal.history import reading
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands import groups_history

__all__ = ["past"]
UNTIL = START_MS + 50_000


def invoke(*arguments):
    return CliRunner().invoke(app, ["groups", "history", *arguments])


def read(*arguments):
    return json.loads(invoke(*arguments, "-o", "json").stdout)


def replaced(record, **fields):
    return msgspec.structs.replace(record, **fields)


@pytest.fixture
def log(monkeypatch):
    """alice resets g; of two pauses of h one is refused; a key is forgotten."""
    log = Log(cluster_id="cluster", level=SECOND_LEVEL)
    epoch = log.claimed()
    log.append(release(epoch, 9))
    tags = person_to_tags("alice")
    log.append(replaced(pause(UNTIL), reason="deploy", tags=tags), after=1)
    log.append(pause(UNTIL + 5, seq=1), after=1)
    log.append(stage((0, 4)), after=1)
    log.append(decide(), after=1)
    log.append(resolve(commit=True), after=1)
    log.append(pause(UNTIL, group="h", op=b"h" * 16), after=1)
    log.append(pause(UNTIL, group="h", op=b"i" * 16), after=1)
    log.append(forgetting(epoch), after=1)
    monkeypatch.setattr(reading, "LogScan", lambda *_, **__: FakeScan(log))
    return log


def test_an_open_reset_is_named_with_the_command_that_ends_it(monkeypatch):
    log = Log(cluster_id="cluster", level=SECOND_LEVEL)
    epoch = log.claimed()
    log.append(release(epoch, 9))
    log.append(pause(UNTIL), after=1)
    log.append(stage((0, 4)), after=1)
    monkeypatch.setattr(reading, "LogScan", lambda *_, **__: FakeScan(log))
    hint = (
        f"operation {OP.hex()} is undecided, and has locked 1 partition; to end it, "
        "run: marshal groups finish g\n"
    )
    assert invoke("g").stderr == hint
    assert invoke("other-group").stderr.endswith("see: marshal groups list\n")
    log.append(decide(), after=1)
    assert invoke().stderr == hint.replace("undecided", "committed")
    log.append(resolve(commit=True), after=1)
    assert invoke().stderr == ""


def test_an_open_growth_is_named_with_the_command_that_continues_it(monkeypatch):
    log = Log(cluster_id="cluster", level=SECOND_LEVEL)
    log.append(growth())
    monkeypatch.setattr(reading, "LogScan", lambda *_, **__: FakeScan(log))
    assert invoke().stderr == (
        "topic 't' grows from 4 to 8 partitions; to continue the growth, run: marshal "
        "groups grow --topic t --partitions 8 --execute\n"
    )
    log.append(growth(ends=(1, 2, 3, 4)))
    assert invoke().stderr == ""


def test_history_shows_a_table_of_actions(log):
    output = invoke().stdout.splitlines()
    assert output[:3] == ["group id:      -", "actions count: 5", "records count: 9"]
    table = [" ".join(line.split()) for line in output[4:]]
    assert table == [
        "AT LOG ACTION GROUP BY REASON OUTCOME OPERATION",
        (
            "1970-01-01T00:16:40.000Z 0:0 format - - - accepted: generation 1, "
            "heartbeat interval 1000 ms, feature level 2 -"
        ),
        (
            "1970-01-01T00:16:40.001Z 0:3 reset g alice deploy committed: 1 "
            f"position_set {OP.hex()}"
        ),
        (
            "1970-01-01T00:16:40.006Z 0:8 pause h admin - accepted until "
            "1970-01-01T00:17:30.000Z; ended by expiry at 1970-01-01T00:17:30.000Z "
            f"{(b'h' * 16).hex()}"
        ),
        (
            "1970-01-01T00:16:40.007Z 0:9 pause h admin - refused (refused: busy 1x) "
            f"{(b'i' * 16).hex()}"
        ),
        "1970-01-01T00:16:40.008Z 0:10 forget g admin - accepted: 1 forgotten -",
    ]


def test_history_as_json_has_the_records_of_each_action(log):
    found = read("g")
    assert found["as_of"]["offsets"] == {"0": 11}
    assert (found["group_id"], found["records_count"]) == ("g", 7)
    kinds = [action["kind"] for action in found["actions"]]
    assert kinds == ["format", "reset", "forget"]
    action = found["actions"][1]
    assert (action["person"], action["client_id"]) == ("alice", "admin")
    assert (action["records_count"], action["renewals_count"]) == (5, 1)
    assert action["keys"] == [
        {
            "topic": "t",
            "partition": 0,
            "position": 4,
            "position_before": 9,
            "outcome": "position_set",
        }
    ]
    assert action["ended"]["how"] == "resumed"
    assert [record["offset"] for record in action["records"]] == [3, 4, 5, 6, 7]
    assert [record["effect"] for record in action["records"]] == [
        *("paused", "paused", "staged", "decided", "position_set")
    ]


def test_actions_are_selected_by_limit_since_and_at(log):
    outcome = invoke("--limit", "1", "-o", "json")
    assert [a["kind"] for a in json.loads(outcome.stdout)["actions"]] == ["forget"]
    assert "1 of 5 actions are shown; see --limit and --since" in outcome.stderr
    since = "1970-01-01T00:16:40.006Z"
    kinds = [a["kind"] for a in read("--since", since, "--limit", "0")["actions"]]
    assert kinds == ["pause", "pause", "forget"]
    found = read("h", "--at", since)["actions"][-1]
    assert (found["outcome"], found["lasting_partitions"]) == ("accepted", [0])
    assert found["text"].endswith("; still in force")


def test_a_pause_in_force_is_shown_even_if_it_began_earlier(log):
    log.append(pause(4_102_444_800_000, group="x", op=b"x" * 16))
    found = read("--since", "2020-01-01T00:00:00Z", "--at", "1970-01-01T12:00:00Z")
    assert [action["group_id"] for action in found["actions"]] == ["x"]
    # A pause lasts a day at most.
    assert read("x", "--at", "1970-01-03T00:00:00Z")["actions"][-1]["ended"] == {
        "how": "expired",
        "coordinating_partition": 0,
        "offset": None,
        "at_ms": START_MS + 8 + 86_400_000,
        "client_id": None,
        "person": None,
    }


def test_an_offset_is_refused_where_a_time_is_needed(log):
    for option, what in (("--at", "admins"), ("--since", "each coordinating")):
        outcome = invoke(option, "5")
        assert outcome.exit_code == 2
        assert f"{option} is 5, and {what}" in outcome.stderr


def test_an_unknown_group_is_an_error(log):
    outcome = invoke("x")
    assert outcome.exit_code == 3
    assert "marshal groups list" in outcome.stderr


def test_a_group_with_only_a_refused_record_is_known(log):
    log.append(forgetting(1, key=("z", "t", 0)))
    assert read("z")["actions"][-1]["refusals"] == {"cas": 1}


def test_history_without_the_log_start_begins_at_a_checkpoint(past):
    past.delete(before=past.begins[0])
    outcome = invoke()
    assert outcome.exit_code == 0
    text = f"begins at the checkpoint before offset {past.begins[0] + 1}"
    assert text in outcome.stderr


def test_a_moment_before_the_first_checkpoint_is_refused(past):
    past.delete(before=past.begins[0])
    outcome = invoke("--at", "1970-01-01T00:00:00Z")
    assert outcome.exit_code != 0
    assert "no checkpoint lies between" in outcome.stderr


def test_since_reads_from_a_checkpoint_before_the_time(past):
    whole = read()
    assert {action["kind"] for action in whole["actions"]} == {"format"}
    outcome = invoke("--since", "2100-01-01T00:00:00Z", "-o", "json")
    found = json.loads(outcome.stdout)
    # The Config is before the checkpoint; no requested action is missing.
    assert (found["records_count"], outcome.stderr) == (0, "")
    assert found["as_of"]["offsets"] == whole["as_of"]["offsets"]
    past.delete(past.begins[0])
    outcome = invoke("--since", "1970-01-01T00:00:00Z")
    assert "what admins did earlier is not listed" in outcome.stderr
    outcome = invoke("x", "--since", "-1d")
    assert "group 'x' is not in the log since -1d" in outcome.stderr


def test_a_pause_in_force_at_a_checkpoint_is_read_from_before_it(past):
    until_ms = pause_for(past.cluster, 60_000)
    checkpointed(past.cluster, past.node)
    past.cluster.run(2 * H)
    now = instant(past.entries()[-1].timestamp_ms)
    found = read("g", "--since", now, "--at", now)
    (action,) = found["actions"]
    assert (action["kind"], action["until_ms"]) == ("pause", until_ms)
    assert (action["lasting_partitions"], action["records_count"]) == ([0], 1)


def test_a_growth_that_is_open_at_a_checkpoint_is_read_from_before_it(past):
    write(past.cluster, growth(8, 4))
    checkpointed(past.cluster, past.node)
    past.cluster.run(2 * H)
    now = instant(past.entries()[-1].timestamp_ms)
    (action,) = read("g", "--since", now)["actions"]
    assert (action["kind"], action["outcome"]) == ("grow", "open")
    write(past.cluster, growth(8, 4, ends=(1,) * 4))
    found = read("--since", now)["actions"]
    assert [each["outcome"] for each in found] == ["accepted"]
    checkpointed(past.cluster, past.node)
    past.cluster.run(2 * H)
    now = instant(past.entries()[-1].timestamp_ms)
    assert read("--since", now)["actions"] == []


@pytest.mark.parametrize(
    ("ended", "until_ms", "expected"),
    [(None, 500, True), (None, 400, False), (None, None, False), ({}, 500, False)],
)
def test_a_directive_is_in_force_until_its_end(ended, until_ms, expected):
    lasts = {"lasting_partitions": [], "scheduled_partitions": []}
    row = {"kind": "drain", "last_ms": 300, "ended": ended, "until_ms": until_ms}
    row["outcome"] = "accepted"
    assert groups_history._went_on({**row, **lasts}, 450) is expected


def test_an_unformatted_log_has_no_actions(monkeypatch):
    bare = Log(configured=False)
    monkeypatch.setattr(reading, "LogScan", lambda *_, **__: FakeScan(bare))
    assert "no actions" in invoke().stdout
