"""`marshal log snapshot`, `diff`, and `verify --snapshot`."""

import copy
import io
import json

import attrs
import pytest
from logkit import (
    KEY,
    OP,
    START_MS,
    H,
    Log,
    batch,
    beat,
    claim,
    config,
    decide,
    growth,
    messages,
    pause,
    release,
)
from scankit import FakeScan
from typer.testing import CliRunner

from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import entry_to_object, to_line, world_to_object
from kafka_marshal.snapshots import read_file
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands import log_states
from kafka_marshal_cli.commands.log_states import difference, replay_lines, run_replay
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


def test_the_written_states_are_listed(tmp_path, logs):
    path = tmp_path / "it"
    output = json.loads(invoke("snapshot", str(path), "-o", "json").stdout)
    assert [row["digest"] for row in output["partitions"]] == [
        digest(log.state) for log in logs
    ]
    assert [row["claims_count"] for row in output["partitions"]] == [0, 1]


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


def test_equal_states_do_not_differ(file, logs):
    outcome = invoke("diff", str(file), "live")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("result: equal\n")


def test_growths_of_data_topics_differ():
    log = Log(level=2)
    before = from_bytes(to_bytes(log.state))
    offset = log.append(growth(8, 4, topic_id=OP))[0].offset
    rows = {r["field"]: r for r in difference({0: before}, {0: log.state})}
    row = rows["growths"]
    assert (row["one"], row["what"]) == ([], "header")
    assert row["other"] == [["t", 4, 8, OP.hex(), offset, None]]


def test_changed_states_differ_by_key(file, logs):
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


def test_the_dump_of_a_snapshot_is_what_a_replay_of_the_log_prints(file, logs):
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


def test_a_partition_that_a_snapshot_lacks_is_usage(file):
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


# --- replay


def lines(log):
    return [
        to_line(entry_to_object(log.state.partition, entry)) for entry in log.entries
    ]


def run(source, *, transitions=False):
    if not isinstance(source, io.TextIOBase):
        source = io.StringIO("".join(f"{line}\n" for line in source))
    out, err = io.StringIO(), io.StringIO()
    code = run_replay(source, out, err=err, transitions=transitions)
    return code, out.getvalue(), err.getvalue()


def story():
    log = Log()
    epoch = log.claimed()
    log.append(beat(epoch, 5), after=H)
    log.append(batch((epoch, 6), (99, 1)))
    log.append(messages(epoch, 0, 9))
    log.append(claim("c2"))
    log.append(b"\xff")
    log.append(pause(START_MS + 5 * H))
    log.append(release(epoch, 12), after=1)
    return log


def test_the_world_is_printed_as_one_document():
    log = story()
    code, out, err = run(lines(log))
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert json.loads(out) == world_to_object([log.state])


GOLDEN = """\
accepted configured - - -
accepted claimed - t-0 1
accepted renewed - t-0 1
accepted renewed - t-0 1
ignored - not_owner - -
accepted granted - t-0 1 {"first": 6, "last": 9}
refused - held t-0 1 {"remaining_ms": 2001}
undecodable - undecodable - -
accepted paused - - -
accepted released - t-0 1
"""


def test_transitions_go_before_it():
    log = story()
    code, out, err = run(lines(log), transitions=True)
    assert (code, err) == (0, "")
    *told, world = map(json.loads, out.splitlines())
    assert world == world_to_object([log.state])
    assert list(told[0]) == [
        *("partition", "offset", "transition", "effect", "reason", "key", "epoch"),
        "detail",
    ]
    assert [one["offset"] for one in told] == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]
    brief = ""
    for one in told:
        key = one["key"] and f"{one['key']['topic']}-{one['key']['partition']}"
        words = [one["transition"], one["effect"], one["reason"], key, one["epoch"]]
        detail = f" {json.dumps(one['detail'])}" if one["detail"] else ""
        brief += " ".join("-" if w is None else str(w) for w in words) + detail + "\n"
    assert brief == GOLDEN


def test_golden_output():
    given = (
        '{"partition":3,"offset":4,"leader_epoch":2,"timestamp_ms":50,'
        '"timestamp_type":"LogAppendTime","undecodable":{"reason":"x","value":null}}'
    )
    code, out, _ = run([given], transitions=True)
    assert code == 0
    assert out == (
        '{"partition": 3, "offset": 4, "transition": "undecodable", "effect": null, '
        '"reason": "undecodable", "key": null, "epoch": null, "detail": null}\n'
        '{"schema": 1, "partitions": {"3": {"next_offset": 5, "leader_epoch": 2, '
        '"log_time_ms": 50, "digest": "4e32409fc3245a6111a7bf5dc4d99cbd", '
        '"config": null, "claims": [], "pauses": [], "scheduled": [], "fences": [], '
        '"directives": [], '
        '"settings": [], "plans": [], "counters": {"undecodable": 1}}}}\n'
    )


def test_partitions_may_be_mixed():
    logs = [Log(number, k=4) for number in (3, 0)]
    for log in logs:
        log.append(b"", after=5)
    mixed = [line for pair in zip(*map(lines, logs), strict=True) for line in pair]
    code, out, _ = run(mixed)
    assert code == 0
    assert json.loads(out) == world_to_object([log.state for log in logs])
    assert list(json.loads(out)["partitions"]) == ["0", "3"]


@pytest.mark.parametrize("given", [[], ["", "  ", "\t"]])
def test_an_empty_log_is_an_empty_world(given):
    assert run(given) == (0, '{"schema": 1, "partitions": {}}\n', "")


def test_blank_lines_are_passed_over():
    log = story()
    spread = [part for line in lines(log) for part in ("", line)]
    assert run(spread) == run(lines(log))


def test_a_halt_ends_with_three_and_prints_the_world():
    log = Log()
    log.append(config(2, era=2, level=3))
    given = lines(log)
    # Behind the halt nothing is folded, so nothing there can go back.
    code, out, err = run([*given, given[0], *lines(Log(1, k=2))], transitions=True)
    assert (code, err) == (3, "")
    *told, world = map(json.loads, out.splitlines())
    assert [one["transition"] for one in told] == ["accepted", "halted", "accepted"]
    halted = world["partitions"]["0"]
    assert halted["halted"] == {"offset": 1, "feature_level": 3}
    assert set(world["partitions"]) == {"0", "1"}


# --- What cannot be read ---


def entry(**changes):
    head = {"partition": 0, "offset": 1, "leader_epoch": 0, "timestamp_ms": 5}
    return to_line(head | {"undecodable": {}} | changes)


FIRST = entry(leader_epoch=2)
BAD = [
    pytest.param(entry(offset=2), "leader epoch went back", id="leader epoch back"),
    pytest.param(entry(offset=1, leader_epoch=2), "offset went back", id="offset back"),
    pytest.param(entry(offset=2, leader_epoch=-1), "no leader epoch", id="epoch -1"),
    pytest.param(entry(offset=2, leader_epoch=None), "no leader epoch", id="no epoch"),
    pytest.param("{", "not a JSON object", id="half an object"),
    pytest.param("[]", "JSON object", id="a list"),
    pytest.param("null", "JSON object", id="null"),
    pytest.param('{"partition":NaN}', "not a JSON object", id="NaN"),
    pytest.param('{"partition":-Infinity}', "not a JSON object", id="infinity"),
    pytest.param('{"partition":1e999}', "not a JSON object", id="a huge float"),
    pytest.param('{"partition":' + "9" * 99 + "}", "partition must", id="a huge int"),
    pytest.param('{"partition":' + "9" * 9999 + "}", "not a JSON object", id="huger"),
    pytest.param("[" * 100_000, "not a JSON object", id="deep nesting"),
    pytest.param('{"offset":' + "[" * 900 + "]" * 900 + "}", "partition", id="deep"),
    pytest.param('{"a":"\ud800"}', "not a JSON object", id="a lone surrogate"),
    pytest.param('{"a":"\\ud800"}', "not a JSON object", id="one that is escaped"),
    pytest.param('{"a":"\udcff"}', "not a JSON object", id="bytes that are no UTF-8"),
    pytest.param("\x00", "not a JSON object", id="NUL"),
    pytest.param('{"payload":{}}', "partition must", id="no metadata"),
    pytest.param(
        to_line({"type": "Heartbeat", "version": 0, "data": {}}),
        "partition must",
        id="a payload alone",
    ),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
@pytest.mark.parametrize("transitions", [False, True])
def test_a_bad_line_is_named_and_there_is_no_world(bad, message, transitions):
    code, out, err = run([FIRST, "", bad, FIRST], transitions=transitions)
    assert code == 1
    assert len(out.splitlines()) == transitions
    assert "schema" not in out
    assert err.startswith("marshal: line 3: ")
    assert message in err
    assert err.count("\n") == 1
    assert err.rstrip("\n").isascii()
    assert err.rstrip("\n").isprintable()


def test_bytes_that_are_no_text():
    raw = f"{FIRST}\n".encode() + b'{"a":"\xff"}\n'
    code, out, err = run(io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    assert (code, out) == (1, "")
    # A reader decodes ahead: all that is known is that it ends somewhere here.
    assert "is not UTF-8" in err


def test_bytes_that_are_no_text_as_standard_input_brings_them():
    raw = f"{FIRST}\n".encode() + b'{"a":"\xff"}\n'
    source = io.TextIOWrapper(
        io.BytesIO(raw), encoding="utf-8", errors="surrogateescape"
    )
    code, out, err = run(source)
    assert (code, out) == (1, "")
    assert err.startswith("marshal: line 2: not a JSON object")


def test_a_line_has_a_limit(monkeypatch):
    monkeypatch.setattr(log_states, "LINE_CHARACTERS_MAX", 500)
    assert run([FIRST, " " * 499])[0] == 0
    code, out, err = run([FIRST, " " * 400, "x" * 501])
    assert (code, out) == (1, "")
    assert err == "marshal: line 3: longer than 500 characters\n"


def test_an_invalid_payload_is_an_undecodable_entry():
    given = entry(payload={"type": "Heartbeat", "data": {"client_id": 5}})
    given = given.replace('"undecodable":{},', "")
    code, out, _ = run([given], transitions=True)
    assert code == 0
    assert json.loads(out.splitlines()[0])["transition"] == "undecodable"


def test_control_characters_are_not_printed():
    log = Log(cluster_id="\x9b31m\u202e\x7f")
    _, out, _ = run(lines(log))
    assert out.rstrip("\n").isprintable()
    output = json.loads(out)["partitions"]["0"]["config"]["cluster_id"]
    assert output == "\x9b31m\u202e\x7f"


def test_it_streams():
    out = io.StringIO()
    seen = []

    class Source:
        """Gives lines for as long as what they did has been printed."""

        def __init__(self):
            self.given = iter(lines(story()))

        def readline(self, _size):
            seen.append(out.getvalue().count("\n"))
            return next(self.given, "")

    assert run_replay(Source(), out, err=io.StringIO(), transitions=True) == 0
    assert seen == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_worlds_end_where_the_dump_breaks():
    worlds = {}
    log = story()
    reported = []
    with pytest.raises(Exception, match="line 10"):
        reported.extend(replay_lines([*lines(log), "?"], worlds))
    assert worlds == {0: log.state}
    assert len(reported) == 9


def test_the_digest_is_that_of_the_live_log():
    log = story()
    live = WorldState(0)
    for one in log.entries:
        apply(live, one)
    _, out, _ = run(lines(log))
    output = json.loads(out)["partitions"]["0"]
    assert output["digest"] == world_to_object([live])["partitions"]["0"]["digest"]
    assert output["claims"][0]["topic"] == KEY.topic


# --- differences


def copied(state):
    return from_bytes(to_bytes(state))


def log():
    made = Log()
    made.append(claim())
    return made


def shown(one, other):
    """Return what, name and field of each row; it must be JSON."""
    rows = difference(one, other)
    assert json.loads(json.dumps(rows)) == rows
    return [(row["what"], row["name"], row["field"]) for row in rows]


def test_equal_worlds_do_not_differ():
    state = log().state
    assert difference({0: state}, {0: copied(state)}) == []
    assert difference({}, {}) == []


def test_a_partition_that_one_of_them_lacks():
    state = log().state
    (row,) = difference({0: state}, {})
    assert (row["what"], row["field"], row["other"]) == ("partition", "digest", None)
    assert difference({}, {0: state})[0]["one"] is None


def test_each_field_of_a_key_that_differs():
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


def test_a_key_and_a_group_that_only_one_has():
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


def test_a_pause():
    other = log()
    other.append(pause(other.state.append_time_ms + 10_000))
    assert ("group", "g", "pause") in shown({0: log().state}, {0: other.state})


def test_a_verdict():
    other = log()
    other.append(config(2, era=2, level=2))
    other.append(pause(other.state.append_time_ms + 10 * H))
    before = copy.deepcopy(other.state)
    assert other.append(decide(op=OP))[0].effect == "decided"
    assert ("group", "g", "verdict") in shown({0: before}, {0: other.state})


def test_a_config():
    other = log()
    other.append(config(2, era=2))
    found = shown({0: log().state}, {0: other.state})
    assert ("config", "", "generation") in found
    assert ("config", "", "heartbeat_interval_ms") not in found
