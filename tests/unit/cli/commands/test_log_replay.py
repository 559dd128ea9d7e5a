"""`marshal log replay`: the world of a dump."""

import io
import json
from errno import EIO, ENOSPC

import pytest
from logkit import (
    KEY,
    START_MS,
    H,
    Log,
    batch,
    beat,
    claim,
    config,
    messages,
    pause,
    release,
)
from typer.testing import CliRunner

from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import entry_to_object, to_line, world_to_object
from kafka_marshal.snapshots import snapshot_of, to_file_bytes
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands import log_replay
from kafka_marshal_cli.commands.log_replay import replay_lines, run_replay


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


def test_transitions_are_printed_before_the_world():
    log = story()
    code, out, err = run(lines(log), transitions=True)
    assert (code, err) == (0, "")
    *entries, world = map(json.loads, out.splitlines())
    assert world == world_to_object([log.state])
    assert list(entries[0]) == [
        *("partition", "offset", "transition", "effect", "reason", "key", "epoch"),
        "detail",
    ]
    assert [one["offset"] for one in entries] == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]
    brief = ""
    for one in entries:
        key = one["key"] and f"{one['key']['topic']}-{one['key']['partition']}"
        words = [one["transition"], one["effect"], one["reason"], key, one["epoch"]]
        detail = f" {json.dumps(one['detail'])}" if one["detail"] else ""
        brief += " ".join("-" if w is None else str(w) for w in words) + detail + "\n"
    assert brief == GOLDEN


def test_the_output_for_one_entry_equals_the_golden_text():
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


def test_lines_of_partitions_can_be_mixed():
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


def test_blank_lines_are_ignored():
    log = story()
    spread = [part for line in lines(log) for part in ("", line)]
    assert run(spread) == run(lines(log))


def test_a_halted_partition_exits_with_code_3_and_prints_the_world():
    log = Log()
    log.append(config(2, era=2, level=3))
    given = lines(log)
    # Entries after the halt are not folded, so their order is not checked.
    code, out, err = run([*given, given[0], *lines(Log(1, k=2))], transitions=True)
    assert (code, err) == (3, "")
    *entries, world = map(json.loads, out.splitlines())
    assert [one["transition"] for one in entries] == ["accepted", "halted", "accepted"]
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
def test_a_bad_line_is_reported_and_no_world_is_printed(bad, message, transitions):
    code, out, err = run([FIRST, "", bad, FIRST], transitions=transitions)
    assert code == 1
    assert len(out.splitlines()) == transitions
    assert "schema" not in out
    assert err.startswith("marshal: line 3: ")
    assert message in err
    assert err.count("\n") == 1
    assert err.rstrip("\n").isascii()
    assert err.rstrip("\n").isprintable()


def test_invalid_utf_8_is_an_error():
    raw = f"{FIRST}\n".encode() + b'{"a":"\xff"}\n'
    code, out, err = run(io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    assert (code, out) == (1, "")
    # The decoder reads ahead, so the number of the line is not known.
    assert "is not UTF-8" in err


def test_invalid_utf_8_in_standard_input_is_reported_by_line():
    raw = f"{FIRST}\n".encode() + b'{"a":"\xff"}\n'
    source = io.TextIOWrapper(
        io.BytesIO(raw), encoding="utf-8", errors="surrogateescape"
    )
    code, out, err = run(source)
    assert (code, out) == (1, "")
    assert err.startswith("marshal: line 2: not a JSON object")


def test_a_line_has_a_maximum_length(monkeypatch):
    monkeypatch.setattr(log_replay, "LINE_CHARACTERS_MAX", 500)
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


def test_replay_prints_transitions_while_it_reads():
    out = io.StringIO()
    seen = []

    class Source:
        """Notes at each read how many lines have been printed."""

        def __init__(self):
            self.given = iter(lines(story()))

        def readline(self, _size):
            seen.append(out.getvalue().count("\n"))
            return next(self.given, "")

    assert run_replay(Source(), out, err=io.StringIO(), transitions=True) == 0
    assert seen == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_worlds_have_the_entries_before_a_bad_line():
    worlds = {}
    log = story()
    reported = []
    with pytest.raises(Exception, match="line 10"):
        reported.extend(replay_lines([*lines(log), "?"], worlds))
    assert worlds == {0: log.state}
    assert len(reported) == 9


def test_the_digest_equals_that_of_the_live_log():
    log = story()
    live = WorldState(0)
    for one in log.entries:
        apply(live, one)
    _, out, _ = run(lines(log))
    output = json.loads(out)["partitions"]["0"]
    assert output["digest"] == world_to_object([live])["partitions"]["0"]["digest"]
    assert output["claims"][0]["topic"] == KEY.topic


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(ENOSPC, "full")])
def test_an_output_that_cannot_be_written_is_no_fault_of_the_log(error):
    class Out(io.StringIO):
        def write(self, _text):
            raise error

    source, err = io.StringIO("\n".join(lines(story()))), io.StringIO()
    with pytest.raises(type(error)):  # the command handles it, see run_guarded
        run_replay(source, Out(), err=err, transitions=True)
    assert err.getvalue() == ""


def test_a_log_that_cannot_be_read_on_is_reported_by_line():
    class Source(io.StringIO):
        def readline(self, size):
            return super().readline(size) or self.fail()

        def fail(self):
            raise OSError(EIO, "Input/output error")

    code, out, err = run(Source(f"{lines(story())[0]}\n"))
    assert (code, out) == (1, "")
    assert err == "marshal: line 2 cannot be read: [Errno 5] Input/output error\n"


# --- Files that are no dump ---


def replayed(path):
    outcome = CliRunner().invoke(app, ["log", "replay", str(path)])
    assert outcome.stdout == ""
    assert outcome.stderr.count("\n") == 1
    return outcome.exit_code, outcome.stderr


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (bytes(range(256)) * 9, "not UTF-8"),
        (b"\x1f\x8b\x08\x00 compressed", "not UTF-8"),
        (b"group,topic\ng,t\n", "line 1: not a JSON object"),
        (b'{"claims": []}\n', "line 1: partition must"),
        (b"[\n", "line 1: not a JSON object"),
    ],
)
def test_a_file_of_another_format_is_refused_with_advice(tmp_path, content, why):
    path = tmp_path / "other"
    path.write_bytes(content)
    code, err = replayed(path)
    assert code == 1
    assert err.startswith(f"marshal: '{path}': ")
    assert why in err
    assert err.endswith("; name an output of marshal log dump\n")


def test_a_bad_line_after_good_lines_gets_no_advice(tmp_path):
    path = tmp_path / "dump"
    path.write_text(f"{FIRST}\n{{\n")
    code, err = replayed(path)
    assert code == 1
    assert err.startswith(f"marshal: '{path}': line 2: not a JSON object")
    assert "log dump" not in err


def test_a_snapshot_is_refused_with_the_command_to_show_it(tmp_path):
    path = tmp_path / "state"
    section = snapshot_of(story().state, cluster_id="c", topic_id=b"i" * 16)
    path.write_bytes(to_file_bytes(section))
    code, err = replayed(path)
    assert code == 1
    assert err.endswith(f"; it is a snapshot; show it with: marshal log dump {path}\n")


@pytest.mark.parametrize("name", [".", "missing"])
def test_a_directory_or_a_missing_file_is_wrong_usage(tmp_path, name):
    code, err = replayed(tmp_path / name)
    assert code == 2
    assert "cannot be read" in err
    assert "name an output of marshal log dump" in err
