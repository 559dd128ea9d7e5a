"""`marshal log snapshot`, `diff`, and `verify --snapshot`."""

import json

import pytest
from logkit import Log, beat, claim, config
from scankit import FakeScan
from typer.testing import CliRunner

from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.snapshots import read_file
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.shared import Call


def invoke(*arguments, source=None):
    return CliRunner().invoke(app, ["log", *arguments], input=source)


@pytest.fixture
def logs(monkeypatch):
    made = Log(k=2), Log(1, k=2)
    made[1].append(claim())
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(*made))
    return made


@pytest.fixture
def file(tmp_path, logs):
    path = tmp_path / "before.snapshot"
    outcome = invoke("snapshot", str(path), "-o", "json")
    assert outcome.exit_code == 0, outcome.stderr
    return path


def test_the_state_of_the_log_is_written(file, logs):
    sections = read_file(file)
    assert [each.state.partition for each in sections] == [0, 1]
    assert [each.state.digest for each in sections] == [
        digest(log.state) for log in logs
    ]
    assert {(each.cluster_id, each.topic_id) for each in sections} == {
        ("cluster", bytes(range(16)))
    }
    assert sections[1].world() == logs[1].state


def test_what_was_written_is_told(tmp_path, logs):
    path = tmp_path / "it"
    told = json.loads(invoke("snapshot", str(path), "-o", "json").stdout)
    assert [row["digest"] for row in told["partitions"]] == [
        digest(log.state) for log in logs
    ]
    assert [row["claims_count"] for row in told["partitions"]] == [0, 1]


def test_the_state_of_a_dump_is_the_same(tmp_path, logs, file):
    text = invoke("dump").stdout
    dump, path = tmp_path / "dump.jsonl", tmp_path / "of-dump.snapshot"
    dump.write_text(text)
    for name, source in ((str(dump), None), ("-", text)):
        outcome = invoke("snapshot", str(path), "--dump", name, source=source)
        assert outcome.exit_code == 0, outcome.stderr
        states = [each.state.state for each in read_file(path)]
        assert states == [each.state.state for each in read_file(file)]
    assert invoke("diff", str(dump), str(file)).exit_code == 0


def test_a_partition_that_halted_is_left_out(tmp_path, logs):
    logs[0].append(config(2, k=2, era=2, level=99))
    path = tmp_path / "it"
    outcome = invoke("snapshot", str(path))
    assert outcome.exit_code == 0
    assert [each.state.partition for each in read_file(path)] == [1]
    assert "partition 0 needs a newer release" in outcome.stderr


def test_a_file_that_cannot_be_written_is_usage(tmp_path, logs):
    outcome = invoke("snapshot", str(tmp_path / "none" / "it"))
    assert outcome.exit_code == 2
    assert "cannot be written" in outcome.stderr


def test_what_has_not_changed_does_not_differ(file, logs):
    outcome = invoke("diff", str(file), "live")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("result: equal\n")


def test_what_has_changed_differs_key_by_key(file, logs):
    epoch = logs[1].state.next_offset - 1
    logs[1].append(beat(epoch, 7))
    outcome = invoke("diff", str(file), "live", "-o", "json")
    assert outcome.exit_code == 1
    found = json.loads(outcome.stdout)
    assert found["result"] == "differ"
    rows = {(row["what"], row["field"]): row for row in found["differences"]}
    assert rows["key", "position"]["other"] == 7
    assert rows["key", "position"]["one"] is None
    assert rows["header", "next_offset"]["other"] == epoch + 2
    assert {row["partition"] for row in found["differences"]} == {1}
    assert "position" in invoke("diff", "live", str(file)).stdout


@pytest.mark.parametrize(
    ("value", "why"),
    [
        pytest.param(b"garbage\n", "line 1", id="no text of a log"),
        pytest.param(b"\xff\xfe", "UTF-8", id="no text"),
        pytest.param(b"kafka-marshal snapshot 1\nxxxx", "no snapshot", id="cut off"),
    ],
)
def test_what_is_neither_is_usage(tmp_path, logs, value, why):
    path = tmp_path / "it"
    path.write_bytes(value)
    outcome = invoke("diff", str(path), "live")
    assert outcome.exit_code == 2
    assert why in outcome.stderr


def test_a_file_that_is_not_there_is_usage(tmp_path, logs):
    for arguments in (
        ("diff", "live"),
        ("verify", "--snapshot"),
        ("snapshot", "x", "--dump"),
    ):
        outcome = invoke(*arguments, str(tmp_path / "none"))
        assert outcome.exit_code == 2, arguments
        assert "cannot be used" in outcome.stderr


def test_a_changed_file_is_no_snapshot(file, logs):
    value = bytearray(file.read_bytes())
    value[-1] ^= 1
    file.write_bytes(bytes(value))
    for arguments in (("diff", str(file), "live"), ("verify", "--snapshot", str(file))):
        outcome = invoke(*arguments)
        assert outcome.exit_code == 2
        assert "checksum" in outcome.stderr


def test_verify_finds_what_was_kept_in_a_log_that_went_on(file, logs):
    logs[1].append(beat(1, 7))
    logs[0].append(b"more")
    outcome = invoke("verify", "--snapshot", str(file), "-o", "json")
    assert outcome.exit_code == 0, outcome.stderr
    rows = json.loads(outcome.stdout)["partitions"]
    assert [row["kept"] for row in rows] == ["ok", "ok"]
    plain = json.loads(invoke("verify", "-o", "json").stdout)["partitions"]
    assert [row["kept"] for row in plain] == [None, None]


def test_verify_says_what_the_log_does_not_fold_to(file, logs, monkeypatch):
    other = Log(k=2), Log(1, k=2)
    other[1].append(claim("c2"))
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(*other))
    outcome = invoke("verify", "--snapshot", str(file), "-o", "json")
    assert outcome.exit_code == 1
    kept = [row["kept"] for row in json.loads(outcome.stdout)["partitions"]]
    assert kept == ["ok", "differs"]
    assert "log diff" in outcome.stderr


def test_verify_says_what_lies_beyond_the_log(file, logs, monkeypatch):
    short = Log(k=2)
    short.entries.clear()
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(short))
    outcome = invoke("verify", "--snapshot", str(file))
    assert outcome.exit_code == 1
    assert "partition 0: " in outcome.stderr
    assert "partition 1: " in outcome.stderr
