"""`marshal log snapshot`, `diff`, and `verify --snapshot`."""

import copy
import json
from pathlib import Path

import attrs
import pytest
from logkit import (
    OP,
    H,
    Log,
    beat,
    claim,
    config,
    decide,
    growth,
    pause,
)
from scankit import FakeScan
from typer.testing import CliRunner

from kafka_marshal.protocol.items import Layout
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import Staging
from kafka_marshal.snapshots import read_file
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands.log_states import difference
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


def test_snapshot_writes_the_state_of_each_partition(file, logs):
    sections = read_file(file)
    assert [each.state.partition for each in sections] == [0, 1]
    assert [each.state.digest for each in sections] == [
        digest(log.state) for log in logs
    ]
    assert {(each.cluster_id, each.topic_id) for each in sections} == {
        ("cluster", bytes(range(16)))
    }
    assert sections[1].world() == logs[1].state


def test_snapshot_lists_the_written_states(tmp_path, logs):
    path = tmp_path / "it"
    output = json.loads(invoke("snapshot", str(path), "-o", "json").stdout)
    assert [row["digest"] for row in output["partitions"]] == [
        digest(log.state) for log in logs
    ]
    assert [row["claims_count"] for row in output["partitions"]] == [0, 1]


def test_a_snapshot_of_a_dump_equals_that_of_the_log(tmp_path, logs, file):
    text = invoke("dump").stdout
    dump, path = tmp_path / "dump.jsonl", tmp_path / "of-dump.snapshot"
    dump.write_text(text)
    for name, source in ((str(dump), None), ("-", text)):
        outcome = invoke("snapshot", str(path), "--dump", name, source=source)
        assert outcome.exit_code == 0, outcome.stderr
        states = [each.state.state for each in read_file(path)]
        assert states == [each.state.state for each in read_file(file)]
    assert invoke("diff", str(dump), str(file)).exit_code == 0


def test_a_halted_partition_is_omitted_from_a_snapshot(tmp_path, logs):
    logs[0].append(config(2, k=2, era=2, level=99))
    path = tmp_path / "it"
    outcome = invoke("snapshot", str(path))
    assert outcome.exit_code == 0
    assert [each.state.partition for each in read_file(path)] == [1]
    assert "partition 0 needs a newer release" in outcome.stderr


def test_a_file_that_cannot_be_written_is_wrong_usage(tmp_path, logs):
    outcome = invoke("snapshot", str(tmp_path / "none" / "it"))
    assert outcome.exit_code == 2
    assert "cannot be written" in outcome.stderr


def test_diff_of_equal_states_exits_with_code_0(file, logs):
    outcome = invoke("diff", str(file), "live")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("result: equal\n")


def test_a_growth_of_a_data_topic_is_a_difference():
    log = Log(level=2)
    before = from_bytes(to_bytes(log.state))
    offset = log.append(growth(8, 4, topic_id=OP))[0].offset
    rows = {r["field"]: r for r in difference({0: before}, {0: log.state})}
    row = rows["growths"]
    assert (row["one"], row["what"]) == ([], "header")
    assert row["other"] == [
        {
            "topic": "t",
            "old_count": 4,
            "new_count": 8,
            "topic_id": OP.hex(),
            "offset": offset,
            "ends": None,
        }
    ]


def test_diff_lists_the_changed_fields_of_a_key(file, logs):
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


# --- dump of a snapshot


def test_the_dump_of_a_snapshot_equals_the_replay_of_the_log(file, logs):
    logs[1].append(b"later")
    outcome = invoke("dump", str(file))
    assert outcome.exit_code == 0, outcome.stderr
    logs[1].entries.pop()
    log = invoke("dump").stdout
    assert outcome.stdout == invoke("replay", "-", source=log).stdout


def test_one_partition_of_a_snapshot_is_dumped(file):
    outcome = invoke("dump", str(file), "--partition", "1")
    assert list(json.loads(outcome.stdout)["partitions"]) == ["1"]


def test_the_dump_of_a_snapshot_needs_no_broker(file, monkeypatch):
    monkeypatch.setattr(Call, "scan", lambda self: pytest.fail("read the log"))
    assert invoke("dump", str(file)).exit_code == 0


def test_a_partition_that_a_snapshot_lacks_is_wrong_usage(file):
    outcome = invoke("dump", str(file), "--partition", "7")
    assert outcome.exit_code == 2
    assert "has the partitions [0, 1]" in outcome.stderr


@pytest.mark.parametrize(
    "option", [("--from", "0"), ("--to", "9"), ("--skip-record-metadata",)]
)
def test_options_that_select_entries_do_not_apply_to_a_snapshot(file, option):
    outcome = invoke("dump", str(file), *option)
    assert outcome.exit_code == 2
    assert "a snapshot has none" in outcome.stderr


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        pytest.param(lambda value: value[:-20], "truncated", id="cut off"),
        pytest.param(lambda value: value[:-1] + b"?", "checksum", id="changed"),
        pytest.param(lambda value: b"{}\n", "does not begin as one", id="a dump"),
        pytest.param(lambda value: value + b"more", "does not begin", id="more"),
    ],
)
def test_a_damaged_snapshot_is_not_dumped(file, damage, why):
    file.write_bytes(damage(file.read_bytes()))
    outcome = invoke("dump", str(file))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert why in outcome.stderr


@pytest.mark.parametrize(
    ("value", "why"),
    [
        pytest.param(b"garbage\n", "line 1", id="no text of a log"),
        pytest.param(b"\xff\xfe", "UTF-8", id="no text"),
        pytest.param(b"kafka-marshal snapshot 1\nxxxx", "not a snapshot", id="cut off"),
    ],
)
def test_an_invalid_file_is_wrong_usage(tmp_path, logs, value, why):
    path = tmp_path / "it"
    path.write_bytes(value)
    outcome = invoke("diff", str(path), "live")
    assert outcome.exit_code == 2
    assert why in outcome.stderr


def test_a_dump_whose_offsets_go_back_is_wrong_usage(tmp_path, logs):
    path = tmp_path / "twice.jsonl"
    path.write_text(invoke("dump").stdout * 2)
    for arguments in (("diff", str(path), "live"), ("snapshot", "x", "--dump", path)):
        outcome = invoke(*map(str, arguments))
        assert outcome.exit_code == 2
        assert f"{str(path)!r} cannot be used: line 4: " in outcome.stderr
        assert "name an output of marshal log" in outcome.stderr


def test_a_file_in_a_forbidden_directory_is_not_called_missing(monkeypatch, logs):
    for name in ("stat", "open"):
        real = getattr(Path, name)

        def forbid(path, *how, real=real, **more):
            if str(path) == "secret/it":
                raise PermissionError(13, "Permission denied")
            return real(path, *how, **more)

        monkeypatch.setattr(Path, name, forbid)
    outcome = invoke("diff", "secret/it", "live")
    assert outcome.exit_code == 2
    assert "'secret/it' cannot be used: [Errno 13] Permission denied" in outcome.stderr


def test_a_missing_file_is_wrong_usage(tmp_path, logs):
    for arguments in (
        ("diff", "live"),
        ("verify", "--snapshot"),
        ("snapshot", "x", "--dump"),
    ):
        outcome = invoke(*arguments, str(tmp_path / "none"))
        assert outcome.exit_code == 2, arguments
        assert "cannot be used" in outcome.stderr


def test_a_snapshot_with_a_wrong_checksum_is_refused(file, logs):
    value = bytearray(file.read_bytes())
    value[-1] ^= 1
    file.write_bytes(bytes(value))
    for arguments in (("diff", str(file), "live"), ("verify", "--snapshot", str(file))):
        outcome = invoke(*arguments)
        assert outcome.exit_code == 2
        assert "checksum" in outcome.stderr


def test_verify_accepts_a_snapshot_of_an_earlier_state(file, logs):
    logs[1].append(beat(1, 7))
    logs[0].append(b"more")
    outcome = invoke("verify", "--snapshot", str(file), "-o", "json")
    assert outcome.exit_code == 0, outcome.stderr
    rows = json.loads(outcome.stdout)["partitions"]
    assert [row["kept"] for row in rows] == ["ok", "ok"]
    plain = json.loads(invoke("verify", "-o", "json").stdout)["partitions"]
    assert [row["kept"] for row in plain] == [None, None]


def test_verify_reports_a_snapshot_that_differs(file, logs, monkeypatch):
    other = Log(k=2), Log(1, k=2)
    other[1].append(claim("c2"))
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(*other))
    outcome = invoke("verify", "--snapshot", str(file), "-o", "json")
    assert outcome.exit_code == 1
    kept = [row["kept"] for row in json.loads(outcome.stdout)["partitions"]]
    assert kept == ["ok", "differs"]
    assert "log diff" in outcome.stderr


def test_verify_reports_a_snapshot_beyond_the_log(file, logs, monkeypatch):
    short = Log(k=2)
    short.entries.clear()
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(short))
    outcome = invoke("verify", "--snapshot", str(file))
    assert outcome.exit_code == 1
    assert "partition 0: " in outcome.stderr
    assert "partition 1: " in outcome.stderr


# --- differences


def copied(state):
    return from_bytes(to_bytes(state))


def log():
    made = Log()
    made.append(claim())
    return made


def shown(one, other):
    """Return what, name and field of each row; check that the rows are JSON."""
    rows = difference(one, other)
    assert json.loads(json.dumps(rows)) == rows
    return [(row["what"], row["name"], row["field"]) for row in rows]


def test_equal_worlds_have_no_differences():
    state = log().state
    assert difference({0: state}, {0: copied(state)}) == []
    assert difference({}, {}) == []


def test_a_missing_partition_is_a_difference():
    state = log().state
    (row,) = difference({0: state}, {})
    assert (row["what"], row["field"], row["other"]) == ("partition", "digest", None)
    assert difference({}, {0: state})[0]["one"] is None


def test_each_changed_field_of_a_key_is_a_difference():
    before, after = log().state, log().state
    (key,) = after.keys
    after.keys[key] = attrs.evolve(after.keys[key], position=7, topic_id=b"\x01")
    after.rebuild_derived()
    rows = difference({0: before}, {0: after})
    name = f"{key.group_id}/{key.topic}/{key.partition}"
    assert [(r["what"], r["name"], r["field"], r["one"], r["other"]) for r in rows] == [
        ("key", name, "position", None, 7),
        ("key", name, "topic_id", None, "01"),
    ]


def test_a_key_and_a_group_of_only_one_world_are_differences():
    empty = Log().state
    found = shown({0: empty}, {0: log().state})
    assert ("header", "", "next_offset") in found
    assert {what for what, _, _ in found} == {"header", "key", "group"}
    assert ("group", "g", "known") in found
    assert {what for what, _, _ in shown({0: log().state}, {0: empty})} == {
        "header",
        "key",
        "group",
    }


def test_a_pause_is_a_difference_of_its_group():
    other = log()
    until_ms = other.state.append_time_ms + 10_000
    other.append(pause(until_ms))
    assert ("group", "g", "pause") in shown({0: log().state}, {0: other.state})
    rows = difference({0: log().state}, {0: other.state})
    (row,) = (row for row in rows if row["field"] == "pause")
    assert (row["one"], row["other"]["until_ms"]) == (None, until_ms)


def test_fields_of_an_owner_are_named():
    rows = difference({0: Log().state}, {0: log().state})
    (owner,) = (row["other"] for row in rows if row["field"] == "owner")
    assert sorted(owner) == ["client_id", "incarnation"]


def test_empty_lists_of_a_group_are_omitted():
    other = Log()
    other.append(pause(other.state.append_time_ms + 10_000))
    found = shown({0: Log().state}, {0: other.state})
    assert [field for what, _, field in found if what == "group"] == ["known", "pause"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quiet_until_ms", 5),
        ("eras", ((0, 1),)),
        ("layout", Layout(op_id=OP, from_count=1, offset=0, sources=())),
        ("reset", Staging(OP, "c", OP, 2, 9, OP, 10, (b"part",), OP)),
    ],
)
def test_each_changed_field_of_a_partition_is_a_difference(field, value):
    other = log().state
    setattr(other, {"reset": "staging"}.get(field, field), value)
    other.rebuild_derived()
    assert shown({0: log().state}, {0: other}) == [("header", "", field)]


def test_a_verdict_is_a_difference_of_its_group():
    other = log()
    other.append(config(2, era=2, level=2))
    other.append(pause(other.state.append_time_ms + 10 * H))
    before = copy.deepcopy(other.state)
    assert other.append(decide(op=OP))[0].effect == "decided"
    assert ("group", "g", "verdict") in shown({0: before}, {0: other.state})


def test_changed_fields_of_a_config_are_differences():
    other = log()
    other.append(config(2, era=2))
    found = shown({0: log().state}, {0: other.state})
    assert ("config", "", "generation") in found
    assert ("config", "", "heartbeat_interval_ms") not in found


def test_a_file_name_that_is_too_long_is_wrong_usage(logs):
    outcome = invoke("diff", "x" * 300, "live")
    assert outcome.exit_code == 2
    assert "there is no such file" in outcome.stderr
