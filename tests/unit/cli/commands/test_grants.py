"""`marshal grants losses`, with a log in memory."""

import json

import msgspec
import pytest
from logkit import KEY, Log, beat, claim, ident, messages, release
from scankit import FakeScan
from typer.testing import CliRunner

from kafka_marshal import Key
from kafka_marshal.protocol.losses import mark_to_tags
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.shared import Call

# Far in the future, so that claims are not stale by the wall clock.
LATER_MS = 4_102_444_800_000
OTHER = Key("g", "u", 0)


def invoke(*arguments):
    return CliRunner().invoke(app, ["grants", "losses", *arguments])


def granted(log, epoch, first, last, *, mark, key=KEY, client="c1"):
    record = messages(epoch, first, last, key=key, client=client)
    record = msgspec.structs.replace(
        record, grantee=ident(client), tags=mark_to_tags(mark)
    )
    assert log.one(record).effect == "granted"


@pytest.fixture
def log(monkeypatch):
    """c1 dies with 4..19 uncommitted, c2 takes over; c1 released u-0 with 0..1 lost."""
    log = Log(cluster_id="cluster")
    epoch = log.claimed("c1")
    log.append(beat(epoch, 0))
    granted(log, epoch, 0, 9, mark=0)
    granted(log, epoch, 10, 19, mark=4)
    other = log.claimed("c1", key=OTHER)
    granted(log, other, 0, 1, mark=0, key=OTHER)
    log.append(msgspec.structs.replace(release(other, key=OTHER), reason="closed"))
    taken = log.one(claim("c2"), at=LATER_MS)
    granted(log, taken.epoch, 20, 24, mark=20, client="c2")
    monkeypatch.setattr(Call, "scan", lambda self: FakeScan(log))
    return log


def test_losses_are_shown_as_tables_of_lost_and_at_risk(log):
    output = invoke("--group", "g").stdout.splitlines()
    assert output[:4] == [
        "group id:      g",
        "lost count:    18",
        "at risk count: 5",
        "",
    ]
    assert [" ".join(line.split()) for line in output[4:]] == [
        "LOST",
        "TOPIC PARTITION OFFSETS COUNT OWNER EPOCH MARK ENDING LOG AT",
        "u 0 0..1 2 c1 5 0 released (closed) 0:7 1970-01-01T00:16:40.000Z",
        "t 0 4..19 16 c1 1 4 taken_over (by c2) 0:8 2100-01-01T00:00:00.000Z",
        "",
        "AT RISK",
        "TOPIC PARTITION OFFSETS COUNT OWNER EPOCH MARK ENDING LOG AT",
        "t 0 20..24 5 c2 8 20 live 0:9 2100-01-01T00:00:00.000Z",
    ]


def test_losses_as_json_have_ranges_and_owners(log):
    found = json.loads(invoke("--group", "g", "--topic", "t", "-o", "json").stdout)
    assert (found["lost_count"], found["at_risk_count"]) == (16, 5)
    assert found["as_of"]["offsets"] == {"0": 10}
    (lost,) = found["lost"]
    assert lost == {
        "group_id": "g",
        "topic": "t",
        "partition": 0,
        "owner": {"client_id": "c1", "incarnation": ident("c1").hex()},
        "epoch": 1,
        "ranges": [{"first": 4, "last": 19}],
        "offsets_count": 16,
        "mark": 4,
        "ending": "taken_over",
        "reason": None,
        "winner": "c2",
        "coordinating_partition": 0,
        "at_offset": 8,
        "at_ms": LATER_MS,
    }


def test_losses_are_shown_as_of_a_past_time(log):
    at = "1970-01-01T00:20:00Z"
    found = json.loads(invoke("--group", "g", "--at", at, "-o", "json").stdout)
    assert [row["topic"] for row in found["lost"]] == ["u"]
    assert [row["ranges"] for row in found["at_risk"]] == [[{"first": 4, "last": 19}]]


def test_an_offset_is_refused_where_a_time_is_needed(log):
    outcome = invoke("--group", "g", "--at", "5")
    assert outcome.exit_code == 2
    assert "write a time" in outcome.stderr


def test_an_unknown_group_is_an_error(log):
    outcome = invoke("--group", "x")
    assert outcome.exit_code == 3
    assert "marshal groups list" in outcome.stderr


def test_a_group_without_losses_has_empty_lists(log):
    log.append(claim("c1", key=Key("h", "t", 0)))
    outcome = invoke("--group", "h")
    assert outcome.exit_code == 0
    assert "no lost" in outcome.stdout
    assert "no at risk" in outcome.stdout
