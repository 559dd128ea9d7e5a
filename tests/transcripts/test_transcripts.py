"""Transcripts: text files with commands on a log, and their output.

A changed output is a change of the protocol. Blank lines separate blocks::

    command words
    lines of input
    ----
    lines of output

``pytest tests/transcripts --rewrite`` writes the output again. The commands:

- ``format h=1000 keys=5``: a new log with a Config; settings and limits by name.
- ``empty partition=1``: a new log without one.
- ``append at=+5 epoch=1 type=CreateTime``: append the lines of input at a time in
  ms, with ``+`` or ``-`` relative to the last. A line is a record as
  ``Kind field=value``, with defaults for absent fields, or a payload in JSON as in
  the text form, or ``bytes`` in hex, or ``tombstone``. Prints the transitions.
- ``world``: prints the state, a line for each key, pause, lock and fence.
- ``counters``: prints all counters.
- ``replay``: folds the log again from its text form, and from a snapshot at each
  offset on; prints the digest that all of them have.
"""

import json
from pathlib import Path

import pytest
from logkit import CREATE_TIME, LOG_APPEND_TIME, NO_LIMITS, Log, hashed, ident

from kafka_marshal.errors import MarshalError
from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import (
    entry_to_object,
    object_to_entry,
    object_to_record,
    state_to_object,
    to_line,
)

FILES = sorted(Path(__file__).parent.glob("*.txt"))
LIMITS = NO_LIMITS.__struct_fields__
TYPES = {"LogAppendTime": LOG_APPEND_TIME, "CreateTime": CREATE_TIME}
IDS = {
    *("incarnation", "fenced_incarnation", "topic_id", "op_id", "plan_digest"),
    *("grantee", "format_id"),
}
SENDER = {"client_id": "c1", "group_id": "g", "seq": 0}
PLACE = {"topic": "t", "partition": 0}
NOBODY = {"epoch": 0, "position": None}
OPERATION = {**SENDER, "client_id": "admin", "op_id": "op"}
DEFAULTS = {
    "Heartbeat": {**SENDER, **PLACE, **NOBODY, "rewind": False},
    "ClaimingPartition": {**SENDER, **PLACE, "generation": 1},
    "ReleasingPartition": {**SENDER, **PLACE, **NOBODY},
    "ClaimingMessages": {**SENDER, **PLACE, "epoch": 0, "grantee": "job", "first": 0},
    "ReleaseGroup": OPERATION,
    "StagePosition": {**OPERATION, "plan_digest": "plan"},
    "DecidePosition": {**OPERATION, "plan_digest": "plan", "key_count": 1},
    "ResolvePosition": OPERATION,
    "FencingClient": {**SENDER, "client_id": "admin"},
    "BatchHeartbeat": SENDER,
    "Config": {
        "generation": 1,
        "format_id": "format",
        "era": 1,
        "cluster_id": "cluster",
        "heartbeat_interval_ms": 1_000,
        "K": 1,
        "feature_level": 1,
    },
}


def parse(text):
    """Return the value of a field: decoded if it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def payload(line):
    """Return the payload of a line of input, in the text form."""
    if line.startswith("{"):
        return json.loads(line)
    kind, *words = line.split()
    data = DEFAULTS[kind] | {
        name: parse(value) for name, _, value in (word.partition("=") for word in words)
    }
    if "client_id" in data:
        data.setdefault("incarnation", data["client_id"])
    if "secret" in data:
        data["resume_hash"] = hashed(ident(data.pop("secret"))).hex()
    if kind == "StagePosition":
        staged = {"topic": "t", "topic_id": None, "positions": data.pop("positions")}
        data["topics"] = [staged]
    if "resume" in data:
        life, epoch, secret = data["resume"].split(",")
        data["resume"] = {
            "incarnation": ident(life).hex(),
            "epoch": int(epoch),
            "secret": ident(secret).hex(),
        }
    if "fenced" in data:
        data.setdefault("fenced_incarnation", data["fenced"])
    for name in IDS & set(data):
        data[name] = ident(data[name]).hex()
    if kind == "Config":
        data["limits"] = {name: data.pop(name) for name in LIMITS if name in data}
        data["heartbeat_interval_ms"] = data.pop("h", data["heartbeat_interval_ms"])
    return {"type": kind, "version": 0, "data": data}


def value_of(line):
    if line == "tombstone":
        return None
    if line.startswith("bytes"):
        return bytes.fromhex(line.removeprefix("bytes"))
    record = object_to_record(payload(line))
    return encode(record)


def line_of(one):
    """Return one line about a transition."""
    words = [str(one.offset), one.outcome]
    if one.effect or one.reason != one.outcome:
        words.append(one.effect or one.reason)
    if one.key is not None:
        words.append(f"{one.key.group_id}/{one.key.topic_partition}")
    if one.epoch is not None:
        words.append(f"epoch={one.epoch}")
    words += [f"{name}={value}" for name, value in (one.detail or {}).items()]
    return " ".join(words)


class Story:
    """Runs the commands of one file."""

    def __init__(self):
        self.log = Log(configured=False)

    def run(self, command, lines):
        name, *words = command.split()
        given = dict(word.split("=") for word in words)
        return getattr(self, f"do_{name}")(given, lines)

    def do_empty(self, given, _lines):
        self.log = Log(int(given.get("partition", 0)), configured=False)
        self.log.now_ms = 0
        return []

    def do_format(self, given, _lines):
        self.do_empty({"partition": given.pop("partition", 0)}, [])
        words = (f"{name}={value}" for name, value in given.items())
        return self.do_append({}, [" ".join(["Config", *words])])

    def do_append(self, given, lines):
        log = self.log
        at = given.get("at", "+0")
        now_ms = int(at) + (log.now_ms if at[0] in "+-" else 0)
        found = []
        for line in lines:
            try:
                transitions = log.append(
                    value_of(line),
                    at=now_ms,
                    epoch=int(given["epoch"]) if "epoch" in given else None,
                    kind=TYPES[given.get("type", "LogAppendTime")],
                    offset=int(given["offset"]) if "offset" in given else None,
                )
            except MarshalError as error:
                log.entries.pop()
                found.append(f"{type(error).__name__}: {error}")
                continue
            found += [line_of(one) for one in transitions] or ["nothing"]
        return found

    def do_world(self, _given, _lines):
        document = state_to_object(self.log.state)
        head = [f"{name}={document[name]}" for name in ("next_offset", "leader_epoch")]
        state = self.log.state
        head += [f"W={state.epoch_time_ms}", f"C={state.log_time_ms}"]
        head += [f"M={state.append_time_ms}"]
        found = [" ".join(head)]
        for one in document["claims"]:
            owner = one["owner"]
            life = owner and bytes.fromhex(owner["incarnation"]).decode().rstrip(".")
            who = f"{owner['client_id']} as {life}" if owner else "nobody"
            names = ("epoch", "token", "position", "granted", "freshness", "age_ms")
            figures = " ".join(f"{name}={one[name]}" for name in names)
            place = f"{one['group_id']}/{one['topic']}-{one['partition']}"
            found.append(f"{place} {who}: {figures}".replace("None", "-"))
        for one in document["pauses"]:
            op_id = bytes.fromhex(one["op_id"]).decode().rstrip(".")
            until_ms = one["until_ms"]
            found.append(f"{one['group_id']} paused by {op_id} until {until_ms}")
        locked = [one for one in document["claims"] if one["locked_by"] is not None]
        for one in locked:
            op_id = bytes.fromhex(one["locked_by"]).decode().rstrip(".")
            place = f"{one['group_id']}/{one['topic']}-{one['partition']}"
            found.append(f"{place} locked by {op_id}")
        for one in document["fences"]:
            life = bytes.fromhex(one["incarnation"]).decode().rstrip(".")
            found.append(f"{one['group_id']} has fenced {one['client_id']} as {life}")
        if "halted" in document:
            found.append(f"halted {to_line(document['halted'])}")
        return found

    def do_counters(self, _given, _lines):
        return [f"{n}={v}" for n, v in sorted(self.log.state.soft.counters.items())]

    def do_replay(self, _given, _lines):
        live = self.log.state
        number = live.partition
        lines = [to_line(entry_to_object(number, one)) for one in self.log.entries]
        entries = [object_to_entry(json.loads(line))[1] for line in lines]
        for before, after in zip(self.log.entries, entries, strict=True):
            assert decode(before.value) == decode(after.value) or after.undecodable
        for split in range(len(entries) + 1):
            state = WorldState(number)
            for entry in entries[:split]:
                apply(state, entry)
            if state.halted is None:
                state = from_bytes(to_bytes(state))
            for entry in entries[split:]:
                apply(state, entry)
            assert digest(state) == digest(live), split
        return [f"{len(entries)} entries, digest {digest(live)}"]


def blocks(text):
    """Yield the comment lines, command, input and output of each block."""
    for block in text.strip().split("\n\n"):
        lines = block.split("\n")
        count = next((n for n, x in enumerate(lines) if not x.startswith("#")), None)
        if count is None:
            yield lines, None, [], []
            continue
        comments, lines = lines[:count], lines[count:]
        rule = lines.index("----")
        yield comments, lines[0], lines[1:rule], lines[rule + 1 :]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_transcript_has_the_output_of_its_commands(file, request):
    text = file.read_text(encoding="utf-8")
    story = Story()
    written = []
    for comments, command, lines, _ in blocks(text):
        if command is None:
            written.append("\n".join(comments))
            continue
        found = story.run(command, lines)
        written.append("\n".join([*comments, command, *lines, "----", *found]))
    new = "\n\n".join(written) + "\n"
    if request.config.getoption("--rewrite"):
        file.write_text(new, encoding="utf-8")
    else:
        assert new == text, "run pytest --rewrite and read the diff"


def test_there_are_at_least_ten_transcripts():
    assert len(FILES) >= 10
