"""`marshal log`, mainly `dump` and `verify`, with a log in memory."""

import json

import pytest
from changekit import Change
from enginekit import checkpointed
from logkit import Log, claim, config, layout_import
from msgspec.structs import replace
from opening import Opened
from pastkit import past
from scankit import FakeScan
from typer.testing import CliRunner

from kafka_marshal import World
from kafka_marshal.admin.state_reset import KeyChange, StateResetPlan
from kafka_marshal.clock import instant
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.types import Key
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands import log_verify
from kafka_marshal_cli.shared import Call

__all__ = ["past"]


def invoke(*arguments, source=None):
    return CliRunner().invoke(app, list(arguments), input=source)


@pytest.fixture
def logs(monkeypatch):
    logs = Log(k=2), Log(1, k=2)
    logs[0].append(b"\x1b[31m")
    logs[0].append(claim())
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(*logs))
    return logs


def dumped(*arguments):
    outcome = invoke("log", "dump", *arguments)
    assert outcome.exit_code == 0, outcome.stderr
    assert all(line.isprintable() for line in outcome.stdout.splitlines())
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def places(*arguments):
    return [(line["partition"], line["offset"]) for line in dumped(*arguments)]


def test_dump_prints_the_entries_of_a_range(logs):
    assert places() == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert places("--partition", "0", "--from", "1", "--to", "1") == [(0, 1)]
    kinds = [line["type"] for line in dumped("--skip-record-metadata")]
    assert kinds == ["Config", "ClaimingPartition", "Config"]


def test_a_dump_that_ends_before_its_start_is_wrong_usage(logs):
    outcome = invoke("log", "dump", "--from", "5", "--to", "3")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "give a larger --to" in outcome.stderr


def test_dump_of_a_missing_partition_is_wrong_usage(logs):
    outcome = invoke("log", "dump", "--partition", "2")
    assert outcome.exit_code == 2
    assert "has 2 partitions" in outcome.stderr


def test_replay_of_a_dump_has_the_digests_of_verify(logs):
    text = invoke("log", "dump").stdout
    world = json.loads(invoke("log", "replay", "-", source=text).stdout)
    (zero, one) = json.loads(invoke("log", "verify", "-o", "json").stdout)["partitions"]
    assert world["partitions"]["0"]["digest"] == zero["digest"]
    assert world["partitions"]["1"]["digest"] == one["digest"]


def test_replay_of_a_file_prints_transitions(tmp_path, logs):
    path = tmp_path / "dump"
    path.write_text(invoke("log", "dump").stdout)
    lines = invoke("log", "replay", str(path), "--transitions").stdout.splitlines()
    assert json.loads(lines[0])["effect"] == "configured"
    assert json.loads(lines[-1])["schema"] == 1


def test_replay_of_invalid_text_exits_with_code_1():
    outcome = invoke("log", "replay", "-", source="garbage\x1b\n")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "line 1" in outcome.stderr


def test_verify_of_a_sound_log_is_ok(logs):
    outcome = invoke("log", "verify")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("result: ok\n")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([], "is not formatted"),
        ([b"1", b"2"], "is not a coordination topic"),
        ([claim()], "do not format it"),
    ],
)
def test_verify_of_an_unformatted_topic_exits_with_code_3(monkeypatch, values, why):
    empty = Log(configured=False), Log(1, configured=False)
    for value in values:
        empty[1].append(value)
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(*empty))
    outcome = invoke("log", "verify")
    assert (outcome.exit_code, outcome.stdout) == (3, "")
    assert why in outcome.stderr


def test_verify_of_a_halted_log_exits_with_code_3(logs):
    logs[0].append(config(2, k=2, era=2, level=9))
    outcome = invoke("log", "verify")
    assert outcome.exit_code == 3
    assert "upgrade" in outcome.stderr


def test_verify_of_a_broken_fold_exits_with_code_70(logs, monkeypatch):
    monkeypatch.setattr(log_verify, "replay", lambda state, entries: None)
    outcome = invoke("log", "verify", "-o", "json")
    assert outcome.exit_code == 70
    assert json.loads(outcome.stdout)["result"] == "broken"
    assert "partition 0: S2: " in outcome.stderr


class FakeResetter(Opened):
    """An admin that plans a reset and records the calls."""

    def __init__(self):
        self.asked = []

    def reset_state(self, partition, **asked):
        self.asked.append((partition, asked))
        change = KeyChange(
            key=Key("g", "t", 1),
            change="moved",
            position=9,
            granted=None,
            position_then=4,
            granted_then=None,
        )
        return StateResetPlan(
            partition=partition,
            checkpoint_id="ab" * 16,
            offset=7,
            next_offset=12,
            held=(Key("g", "t", 0),),
            changes=(change,),
        )


@pytest.mark.parametrize("is_executed", [False, True])
def test_a_reset_lists_changes_and_writes_only_with_execute(monkeypatch, is_executed):
    admin = FakeResetter()
    monkeypatch.setattr(Call, "admin", lambda self: admin)
    words = ["--execute", "--force", "--allow-reprocess"] if is_executed else []
    ask = ["log", "reset", "--partition", "3", "--checkpoint", "ab" * 16, "-o", "json"]
    outcome = invoke(*ask, *words)
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert (found["partition"], found["is_executed"]) == (3, is_executed)
    assert (found["repeats_count"], found["held"]) == (1, ["t-0"])
    (row,) = found["changes"]
    assert (row["change"], row["position"], row["position_then"]) == ("moved", 9, 4)
    assert ("nothing was written" in outcome.stderr) is not is_executed
    asked = {
        "checkpoint_id": "ab" * 16,
        "execute": is_executed,
        "allow_held": is_executed,
        "allow_reprocess": is_executed,
    }
    assert admin.asked == [(3, asked)]


# --- where retention has deleted the start of the log


def test_verify_begins_at_the_first_checkpoint_that_remains(past):
    whole = json.loads(invoke("log", "verify", "-o", "json").stdout)
    past.delete(past.begins[0])
    outcome = invoke("log", "verify", "-o", "json")
    assert outcome.exit_code == 0, outcome.stderr
    assert f"verified from offset {past.begins[0] + 1} on" in outcome.stderr
    (row,) = json.loads(outcome.stdout)["partitions"]
    assert row["digest"] == whole["partitions"][0]["digest"]
    assert row["begin_offset"] == past.begins[0] + 1
    assert row["checkpoints_count"] == 1


def test_verify_since_a_moment_begins_at_the_newest_checkpoint_before_it(past):
    whole = json.loads(invoke("log", "verify", "-o", "json").stdout)["partitions"][0]
    command = ("log", "verify", "-o", "json", "--since")
    (row,) = json.loads(invoke(*command, f"0:{past.end}").stdout)["partitions"]
    assert row["begin_offset"] == past.begins[1] + 1
    assert row["entries_count"] == past.end - past.begins[1] - 1
    names = ("result", "digest", "next_offset")
    assert [row[name] for name in names] == [whole[name] for name in names]
    outcome = invoke(*command, "1970-01-01T00:00:00Z")
    assert "no checkpoint before --since: verified from its start" in outcome.stderr
    assert json.loads(outcome.stdout)["partitions"][0]["begin_offset"] == 0
    outcome = invoke(*command, "5")
    assert outcome.exit_code == 2
    assert "--since is 5, and each coordinating partition" in outcome.stderr
    outcome = invoke(*command, "0:99999999")
    assert outcome.exit_code == 2
    assert "offset 99999999 is not written yet" in outcome.stderr


def test_verify_without_log_start_and_checkpoint_is_unknown(past):
    past.delete(past.begins[1] + 1)
    outcome = invoke("log", "verify", "-o", "json")
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout)["result"] == "unknown"
    assert "no checkpoint" in outcome.stderr


def test_a_snapshot_before_the_first_checkpoint_cannot_be_compared(past, tmp_path):
    file = tmp_path / "kept"
    assert invoke("log", "snapshot", str(file)).exit_code == 0
    past.cluster.run(5_000)
    checkpointed(past.cluster, past.node)
    past.delete(past.end + 1)
    outcome = invoke("log", "verify", "--snapshot", str(file))
    assert outcome.exit_code == 1
    assert "cannot be compared" in outcome.stderr


def test_snapshot_and_diff_begin_at_the_first_checkpoint(past, tmp_path):
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    assert invoke("log", "snapshot", before).exit_code == 0
    past.delete(past.begins[0])
    assert invoke("log", "snapshot", after).exit_code == 0
    assert invoke("log", "diff", before, after).exit_code == 0
    past.delete(past.begins[1] + 1)
    assert invoke("log", "diff", before, "live").exit_code == 1


def test_who_shows_a_past_owner_after_the_log_start_is_deleted(past):
    who = ("claims", "who", "g", "t", "0", "-o", "json", "--at")
    past.delete(past.begins[0])
    output = json.loads(invoke(*who, str(past.ends[0])).stdout)
    assert output["owner"]["client_id"] == "a"
    outcome = invoke(*who, str(past.ends[0] - 1))
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "owners of its keys are unknown" in outcome.stderr


# --- up to a moment


def test_a_dump_ends_at_the_moment(past):
    entries = past.entries()
    offsets = [entry.offset for entry in entries]
    at = past.ends[0]
    assert places("--at", f"0:{at}") == [(0, o) for o in offsets if o <= at]
    assert places("--partition", "0", "--at", str(at))[-1] == (0, at)
    time_ms = entries[at].timestamp_ms
    found = places("--at", instant(time_ms))
    assert found[-1] == (0, past.at_time(time_ms).next_offset - 1)
    outcome = invoke("log", "dump", "--at", str(at))
    assert outcome.exit_code == 2
    assert f"write 0:{at}" in outcome.stderr
    outcome = invoke("log", "dump", "--at", "0:9999")
    assert outcome.exit_code == 2
    assert "is not written yet" in outcome.stderr


def test_a_dump_of_a_range_has_no_other_entries(past):
    command = ("log", "dump", "--partition", "0", "--from", "3", "--to", "5")
    lines = invoke(*command).stdout.splitlines()
    assert [json.loads(line)["offset"] for line in lines] == [3, 4, 5]
    at = ("--at", "0:4")
    lines = invoke(*command, *at).stdout.splitlines()
    assert [json.loads(line)["offset"] for line in lines] == [3, 4]


def test_verify_ends_at_the_moment(past):
    at = past.ends[0]
    command = ("log", "verify", "--at", f"0:{at}", "-o", "json")
    found = json.loads(invoke(*command).stdout)
    assert found["as_of"]["at"] == f"0:{at}"
    (row,) = found["partitions"]
    assert (row["next_offset"], row["digest"]) == (at + 1, digest(past.whole(at)))
    past.delete(past.begins[0])
    (row,) = json.loads(invoke(*command).stdout)["partitions"]
    assert row["digest"] == digest(world_at(past, at))


def world_at(past, at):
    return World.at(offset={0: at}).partitions[0]


def test_a_snapshot_has_the_state_of_the_moment(past, tmp_path):
    at, file = past.ends[0], str(tmp_path / "then")
    outcome = invoke("log", "snapshot", file, "--at", f"0:{at}", "-o", "json")
    (row,) = json.loads(outcome.stdout)["partitions"]
    assert row["digest"] == digest(past.whole(at))
    assert invoke("log", "diff", file, f"0:{at}").exit_code == 0
    assert invoke("log", "diff", file, "live").exit_code == 1
    both = invoke("log", "snapshot", file, "--dump", file, "--at", "-5m")
    assert both.exit_code == 2
    assert "marshal log dump --at" in both.stderr


def test_diff_compares_two_moments(past):
    at = past.ends[0]
    outcome = invoke("log", "diff", f"0:{at}", "live", "-o", "json")
    assert outcome.exit_code == 1
    found = json.loads(outcome.stdout)
    assert (found["one"], found["other"]) == (f"0:{at}", "live")
    (row,) = [row for row in found["differences"] if row["field"] == "next_offset"]
    assert (row["one"], row["other"]) == (at + 1, past.end)
    assert invoke("log", "diff", "-0s", "live").exit_code == 0
    assert json.loads(invoke("log", "diff", "-1h30m", "live", "-o", "json").stdout)
    for word in ("nothing", "5"):
        assert invoke("log", "diff", word, "live").exit_code == 2


def test_a_snapshot_of_an_unknown_moment_is_refused(past, tmp_path):
    past.delete(past.begins[0])
    command = ("log", "snapshot", str(tmp_path / "x"), "--at", "0:0")
    outcome = invoke(*command)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "The earliest moment that can be shown is" in outcome.stderr


LISTS = [
    ("claims", "list"),
    ("groups", "list"),
    ("groups", "describe", "g"),
    ("clients", "list"),
    ("topic", "info"),
    ("log", "verify"),
]


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_every_command_with_at_shows_its_moment(past, command):
    at = instant(past.entries()[past.ends[0]].timestamp_ms)
    output = invoke(*command, "--at", at).stdout
    assert output.startswith(f"as of: {at}\n\n")
    found = json.loads(invoke(*command, "--at", at, "-o", "json").stdout)
    assert found["as_of"]["at"] == at
    assert invoke(*command, "--at", "2200-01-01").exit_code == 2
    assert invoke(*command, "--at", "7").exit_code == 2
    if command[0] != "log":
        past.delete(past.begins[0])
        assert invoke(*command, "--at", "0:1").exit_code == 1


def test_topic_info_shows_the_config_of_the_moment(past):
    info = ("topic", "info", "-o", "json", "--at")
    found = json.loads(invoke(*info, f"0:{past.ends[0]}").stdout)
    assert (found["partition_count"], found["is_formatted"]) == (1, True)
    (row,) = found["partitions"]
    assert row["digest"] == digest(past.whole(past.ends[0]))
    bare = json.loads(invoke(*info, "1960-01-01").stdout)
    assert (bare["is_formatted"], bare["partitions"][0]["next_offset"]) == (False, 0)


def tailed(*arguments):
    outcome = invoke("log", "tail", "-o", "jsonl", "--transitions", *arguments)
    assert outcome.exit_code == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_tail_shows_the_last_entries_before_the_moment(past, is_deleted):
    whole = tailed("--at", f"0:{past.end - 1}", "-n", "1000")
    if is_deleted:
        past.delete(past.begins[0])
    at = past.ends[1]
    expected = [line for line in whole if line["offset"] <= at]
    assert tailed("--at", f"0:{at}") == expected[-10:]
    assert tailed("--at", str(at), "--partition", "0", "-n", "2") == expected[-2:]
    only = [line for line in expected if line["payload"]["type"] == "CheckpointEnd"]
    found = tailed("--at", f"0:{at}", "--type", "CheckpointEnd", "-n", "1")
    assert found == only[-1:]
    first = str(at - 1)
    assert tailed("--at", f"0:{at}", "--from", first) == expected[-2:]


def test_tail_at_a_past_moment_cannot_follow(past):
    outcome = invoke("log", "tail", "--at", "-5m", "--follow")
    assert outcome.exit_code == 2
    assert "--follow" in outcome.stderr


def test_tail_of_an_unknown_moment_is_refused(past):
    past.delete(past.begins[0])
    outcome = invoke("log", "tail", "--at", f"0:{past.begins[0] + 1}")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "marshal doctor" in outcome.stderr


@pytest.mark.parametrize("position", [None, 4])
@pytest.mark.parametrize("has_ended", [False, True])
def test_verify_compares_imports_with_their_sources(monkeypatch, position, has_ended):
    change = Change(2, 4)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.released(key, position=7)
    if position is not None:
        item = replace(change.items(key), position=position)
        source = change.place(key).state
        record = layout_import(item, source=source.partition)
        record = replace(record, source_offset=source.next_offset)
        change.target(key).append(record)
    change.imported(key)
    if has_ended:
        change.done()
        change.final()
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(*change.logs))
    outcome = invoke("log", "verify", "-o", "json")
    findings = [
        text
        for row in json.loads(outcome.stdout)["partitions"]
        for text in row["findings"]
    ]
    if position is None:
        assert findings == []
    else:
        (found,) = findings
        assert found.startswith("import_diverged: offset ")
        assert found.endswith("the source has left the key in another state")
        assert outcome.exit_code == 70
