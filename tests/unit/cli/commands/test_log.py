"""`marshal log dump` and `verify`, over a log of our own."""

import json

import pytest
from enginekit import checkpointed
from logkit import Log, claim, config
from pastkit import past
from scankit import FakeScan
from typer.testing import CliRunner

from kafka_marshal.admin_reset import KeyChange, ResetPlan
from kafka_marshal.protocol.types import Key
from kafka_marshal_cli import verify
from kafka_marshal_cli.assembly import app
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


def test_dump(logs):
    assert places() == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert places("--partition", "0", "--from", "1", "--to", "1") == [(0, 1)]
    kinds = [line["type"] for line in dumped("--skip-record-metadata")]
    assert kinds == ["Config", "ClaimingPartition", "Config"]


def test_dump_of_a_partition_that_is_not_there(logs):
    outcome = invoke("log", "dump", "--partition", "2")
    assert outcome.exit_code == 2
    assert "has 2 partitions" in outcome.stderr


def test_dump_and_replay_agree(logs):
    text = invoke("log", "dump").stdout
    world = json.loads(invoke("log", "replay", "-", source=text).stdout)
    (zero, one) = json.loads(invoke("log", "verify", "-o", "json").stdout)["partitions"]
    assert world["partitions"]["0"]["digest"] == zero["digest"]
    assert world["partitions"]["1"]["digest"] == one["digest"]


def test_replay_of_a_file(tmp_path, logs):
    path = tmp_path / "dump"
    path.write_text(invoke("log", "dump").stdout)
    lines = invoke("log", "replay", str(path), "--transitions").stdout.splitlines()
    assert json.loads(lines[0])["effect"] == "configured"
    assert json.loads(lines[-1])["schema"] == 1


def test_replay_of_garbage_is_1():
    outcome = invoke("log", "replay", "-", source="garbage\x1b\n")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "line 1" in outcome.stderr


def test_verify(logs):
    outcome = invoke("log", "verify")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("result: ok\n")


def test_verify_of_a_halted_log_is_3(logs):
    logs[0].append(config(2, k=2, era=2, level=9))
    outcome = invoke("log", "verify")
    assert outcome.exit_code == 3
    assert "upgrade" in outcome.stderr


def test_verify_of_a_broken_fold_is_70(logs, monkeypatch):
    monkeypatch.setattr(verify, "replay", lambda state, entries: None)
    outcome = invoke("log", "verify", "-o", "json")
    assert outcome.exit_code == 70
    assert json.loads(outcome.stdout)["result"] == "broken"
    assert "partition 0: S2: " in outcome.stderr


class FakeResetter:
    """An admin that plans a reset, and remembers what it was asked for."""

    def __init__(self):
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

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
        return ResetPlan(
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


def test_verify_without_any_state_is_unknown(past):
    past.delete(past.begins[1] + 1)
    outcome = invoke("log", "verify", "-o", "json")
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout)["result"] == "unknown"
    assert "no checkpoint" in outcome.stderr


def test_a_snapshot_from_before_the_checkpoint_cannot_be_compared(past, tmp_path):
    file = tmp_path / "kept"
    assert invoke("log", "snapshot", str(file)).exit_code == 0
    past.cluster.run(5_000)
    checkpointed(past.cluster, past.node)
    past.delete(past.end + 1)
    outcome = invoke("log", "verify", "--snapshot", str(file))
    assert outcome.exit_code == 1
    assert "cannot be compared" in outcome.stderr


def test_a_snapshot_and_a_difference_begin_there_too(past, tmp_path):
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    assert invoke("log", "snapshot", before).exit_code == 0
    past.delete(past.begins[0])
    assert invoke("log", "snapshot", after).exit_code == 0
    assert invoke("log", "diff", before, after).exit_code == 0
    past.delete(past.begins[1] + 1)
    assert invoke("log", "diff", before, "live").exit_code == 1


def test_who_owned_a_key_in_the_past(past):
    who = ("claims", "who", "g", "t", "0", "-o", "json", "--at")
    past.delete(past.begins[0])
    output = json.loads(invoke(*who, str(past.ends[0])).stdout)
    assert output["owner"]["client_id"] == "a"
    outcome = invoke(*who, str(past.ends[0] - 1))
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "owners of its keys are unknown" in outcome.stderr
