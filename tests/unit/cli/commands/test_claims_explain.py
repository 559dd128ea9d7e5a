"""`marshal claims explain` and `claims history`, with a log in memory."""

import json

import msgspec
import pytest
from logkit import START_MS, Log, beat, claim, growth, pause, release
from pastkit import past
from scankit import FakeScan
from typer.testing import CliRunner

from kafka_marshal import Admin, World
from kafka_marshal.history import reading
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.shared import Call

__all__ = ["past"]
LATER_MS = 4_102_444_800_000
UNTIL = START_MS + 50_000


def invoke(*arguments):
    return CliRunner().invoke(app, ["claims", *arguments])


def read(*arguments):
    return json.loads(invoke(*arguments, "-o", "json").stdout)


@pytest.fixture
def log(monkeypatch):
    """c1 releases for a pause; c2 is refused during it and claims after it."""
    log = Log(cluster_id="cluster")
    log.append(beat(log.claimed(), 5), after=10)
    tags = person_to_tags("alice")
    log.append(msgspec.structs.replace(pause(UNTIL), reason="deploy", tags=tags))
    log.append(msgspec.structs.replace(release(1, 7), reason="paused"))
    log.append(claim("c2"), after=5)
    log.append(claim("c2"), after=5)
    log.append(pause(0, seq=1))
    log.append(claim("c2"), at=LATER_MS)
    monkeypatch.setattr(reading, "LogScan", lambda *_, **__: FakeScan(log))
    return log


def test_explain_shows_the_reason_and_a_table_of_events(log):
    output = invoke("explain", "g", "t", "0").stdout.splitlines()
    name, _, text = output[0].partition(":")
    assert name == "why"
    assert text.strip() == (
        "owned by c2 since 2100-01-01T00:00:00.000Z (offset 8), token 1.0.8: c2 "
        "claimed the free partition at position 7; renewed 0.0 s ago"
    )
    assert "state:                  owned" in output
    assert "began at:               the log's start" in output
    table = [" ".join(line.split()) for line in output[output.index("") + 1 :]]
    assert table[0] == "LOG AT WHAT TEXT"
    assert [line.split()[2] for line in table[1:]] == [
        *("configured", "claimed", "paused", "released"),
        *("refused", "unpaused", "claimed"),
    ]
    assert table[3] == (
        "0:3 1970-01-01T00:16:40.010Z paused admin (alice) paused the group until "
        "1970-01-01T00:17:30.000Z: deploy"
    )
    assert table[5].endswith(
        "a claim by c2 was refused 2 times as paused: the group was paused"
    )


def test_explain_as_json_has_the_state_and_the_events(log):
    found = read("explain", "g", "t:0")
    assert (found["state"], found["owner"]["client_id"]) == ("owned", "c2")
    assert (found["token"], found["position"]) == ("1.0.8", 7)
    assert found["as_of"]["offsets"] == {"0": 9}
    refused = found["events"][4]
    assert (refused["what"], refused["reason"]) == ("refused", "paused")
    assert (refused["offset"], refused["last_offset"]) == (5, 6)
    assert refused["records_count"] == 2
    paused = found["events"][2]
    assert (paused["person"], paused["until_ms"]) == ("alice", UNTIL)


def test_explain_shows_the_state_at_a_past_moment(log):
    found = read("explain", "g", "t:0", "--at", "4")
    assert found["state"] == "free"
    assert found["why"].endswith("by admin (alice): deploy")
    assert read("explain", "g", "t:0", "--at", "0:2")["state"] == "owned"
    outcome = invoke("explain", "g", "t:0", "--at", "3:2")
    assert outcome.exit_code == 2
    assert "there is no coordinating partition 3" in outcome.stderr


def test_events_are_selected_by_limit_and_since(log):
    outcome = invoke("explain", "g", "t:0", "--limit", "2", "-o", "json")
    events = json.loads(outcome.stdout)["events"]
    assert [event["what"] for event in events] == ["unpaused", "claimed"]
    assert "2 of 7 events are shown; see --limit and --since" in outcome.stderr
    events = read("explain", "g", "t:0", "--since", "6")["events"]
    assert [event["what"] for event in events] == ["refused", "unpaused", "claimed"]
    since = ("--since", "1970-01-01T00:16:40.012Z", "--limit", "0")
    assert read("explain", "g", "t:0", *since)["events"] == events


@pytest.mark.parametrize("what", ["explain", "history"])
@pytest.mark.parametrize(("since", "at"), [("6", "5"), ("-1m", "-5m")])
def test_a_since_that_is_after_at_is_wrong_usage(log, what, since, at):
    range_ = (f"--since={since}", f"--at={at}")
    outcome = invoke(what, "g", "t:0", *range_)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "which is after --at" in outcome.stderr


def test_since_reads_from_the_newest_checkpoint_before_it(past):
    whole = read("explain", "g", "t:0")
    assert whole["began_at"] is None
    for what in ("explain", "history"):
        found = read(what, "g", "t:0", "--since", str(past.end))
        assert found["began_at"] == past.begins[1] + 1
        same = ("state", "owner", "token", "position")
        assert [found[name] for name in same] == [whole[name] for name in same]
        text = f"before the checkpoint at offset {past.begins[1]}, where this reading"
        assert text in found["why"]
    (claim,) = read("history", "g", "t:0", "--since", str(past.end))["claims"]
    assert (claim["effect"], claim["token"]) == ("restored", whole["token"])
    since = ("--since", "1970-01-01T00:00:00Z")
    assert read("explain", "g", "t:0", *since)["events"] == whole["events"]


def test_history_shows_a_table_of_past_claims(log):
    output = invoke("history", "g", "t", "0").stdout.splitlines()
    table = [" ".join(line.split()) for line in output[output.index("") + 1 :]]
    assert table == [
        "OWNER TOKEN FROM AT POSITION WHY UNTIL AT POSITION ENDING REASON",
        (
            "c1 1.0.1 1970-01-01T00:16:40.000Z 1 - - 1970-01-01T00:16:40.010Z 4 7 "
            "released paused"
        ),
        "c2 1.0.8 2100-01-01T00:00:00.000Z 8 7 - - - 7 open -",
    ]


def test_history_as_json_has_begin_and_end_of_each_claim(log):
    found = read("history", "g", "t:0")
    first, second = found["claims"]
    assert (first["owner"]["client_id"], first["ending"]) == ("c1", "released")
    assert (first["from_offset"], first["until_offset"]) == (1, 4)
    assert (first["from_position"], first["until_position"]) == (None, 7)
    assert (second["until_offset"], second["ended_by"]) == (None, None)
    assert read("history", "g", "t:0", "--limit", "1")["claims"] == [second]
    # An open claim belongs to every range.
    assert read("history", "g", "t:0", "--since", "5")["claims"] == [second]


def test_a_claim_that_was_taken_over_names_the_next_owner(log):
    log.append(claim("c3"), after=10_000)
    output = invoke("history", "g", "t:0", "-o", "table").stdout
    assert "taken_over (by c3)" in output


def test_lines_of_json_name_the_section_of_each_row(log):
    lines = invoke("history", "g", "t:0", "-o", "jsonl").stdout.splitlines()
    found = [json.loads(line)["section"] for line in lines]
    assert found == ["facts", "claims", "claims"]


@pytest.mark.parametrize(
    "arguments",
    [("g", "t"), ("g", "t:0", "1"), ("g", "t:x"), ("g", "t:")],
    ids=" ".join,
)
def test_a_partition_given_twice_or_not_at_all_is_refused(log, arguments):
    outcome = invoke("explain", *arguments)
    assert outcome.exit_code == 2
    assert "write it like payments 3, or payments:3" in outcome.stderr


def test_a_partition_that_does_not_exist_is_refused(log, monkeypatch):
    monkeypatch.setattr(Call, "world", lambda _: World([log.state], {}))
    monkeypatch.setattr(Admin, "partition_count", lambda *_: 2)
    outcome = invoke("explain", "g", "u:6")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "has 2 partitions, 0 to 1" in outcome.stderr
    outcome = invoke("explain", "g", "u:1")
    assert "unclaimed: no claim has been accepted since the log began" in outcome.stdout


@pytest.mark.parametrize("command", ["explain", "history"])
def test_an_unknown_group_is_noted(log, monkeypatch, command):
    """The group's name may be misspelt."""
    monkeypatch.setattr(Call, "world", lambda _: World([log.state], {}))
    monkeypatch.setattr(Admin, "partition_count", lambda *_: 2)
    note = "the log knows no members and no claims of group"
    assert f"{note} 'gg'" in invoke(command, "gg", "t:1").stderr
    assert note not in invoke(command, "g", "t:1").stderr


def test_text_from_the_log_is_escaped(log):
    record = msgspec.structs.replace(release(8, client="c2"), reason="\x1b[2J")
    log.append(record)
    shown = invoke("explain", "g", "t:0").stdout
    assert r"\x1b[2J" in shown
    assert "\x1b" not in shown


def test_explain_names_the_partition_for_which_a_new_one_waits(monkeypatch):
    log = Log(cluster_id="cluster", level=2)
    log.append(release(log.claimed(), 7))
    monkeypatch.setattr(reading, "LogScan", lambda *_, **__: FakeScan(log))
    monkeypatch.setattr(Call, "world", lambda _: World([log.state], {}))
    monkeypatch.setattr(Admin, "partition_count", lambda *_: 8)
    assert invoke("explain", "g", "t:4").stderr == ""
    log.append(growth(8, 4))
    waits = (
        "this partition waits until partition 0, which had its keys, is processed to "
    )
    note = invoke("explain", "g", "t:4").stderr
    assert note.startswith(f"{waits}its end, which is not known yet; see: marshal")
    assert invoke("explain", "g", "t:0").stderr == ""
    log.append(growth(8, 4, ends=(9, 0, 0, 0)))
    note = invoke("explain", "g", "t:4").stderr
    assert note == f"{waits}offset 9; see: marshal groups grow --topic t\n"
    assert waits not in invoke("explain", "h", "t:4").stderr
    log.append(release(log.claimed(), 9))
    assert invoke("explain", "g", "t:4").stderr == ""
