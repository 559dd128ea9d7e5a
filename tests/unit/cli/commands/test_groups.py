"""`marshal groups`, over a world of our own: golden tables and JSON."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from logkit import OP, H, Log, beat, ident, member, pause
from typer.testing import CliRunner

from kafka_marshal import Key, TopicPartition, World
from kafka_marshal.admin import PauseResult
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.shared import Call

UNTIL = 1_600_000
LOG_ENDS = {TopicPartition("t", 0): 10}
HOSTILE = "[red]\x1b[31m\nmarshal: fine"
SHOWN = r"[red]\x1b[31m\nmarshal: fine"


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def world(monkeypatch):
    log = Log(cluster_id="cluster")
    log.append(member("c1"))
    epoch = log.claimed("c1")
    log.append(beat(epoch, 7))
    log.claimed("c2", key=Key("h", "t", 1))
    log.append(pause(UNTIL), after=10)
    made = World(
        [log.state],
        {0: H},
        cluster_id="cluster",
        read_at_ms=5,
        reasons={("g", OP): HOSTILE},
    )
    monkeypatch.setattr(Call, "world", lambda self, **_: made)
    admin = nullcontext(SimpleNamespace(log_ends=lambda wanted: LOG_ENDS))
    monkeypatch.setattr(Call, "admin", lambda self: admin)
    return made


def test_list(world):
    assert invoke("groups", "list").stdout.splitlines() == [
        "GROUP  MEMBERS  OWNED  CLAIMS              PAUSED UNTIL  BY     REASON",
        f"g            1      1       1  1970-01-01T00:26:40.000Z  admin  {SHOWN}",
        "h            0      1       1                         -  -      -",
    ]


def test_list_as_json(world):
    found = json.loads(invoke("groups", "list", "-o", "json").stdout)
    assert found["schema"] == 1
    assert found["as_of"] == {"time_ms": 5, "offsets": {"0": 6}}
    assert found["groups"][0]["pause_reason"] == HOSTILE


def test_describe(world):
    assert invoke("groups", "describe", "g").stdout.splitlines() == [
        "group id: g",
        "",
        "PAUSES",
        f"{'UNTIL':>24}  BY     REASON                        OPERATION",
        r"1970-01-01T00:26:40.000Z  admin  [red]\x1b[31m\nmarshal: fine  " + OP.hex(),
        "",
        "MEMBERS",
        "CLIENT  STATE   HOST  CLAIMS  SILENT  INCARNATION  TOPICS",
        f"c1      active  host       1     ~1s  {ident('c1').hex()[:8]}     t",
        "",
        "CLAIMS",
        (
            "TOPIC  PARTITION  OWNER  STATE     AGE  AGE NOW  CURRENT-OFFSET  "
            "LOG-END-OFFSET  LAG  GRANTED  TOKEN"
        ),
        (
            "t              0  c1     unknown  10ms      ~1s               7  "
            "            10    3        -  1.0.2"
        ),
    ]


def test_describe_a_group_that_is_not_there(world):
    outcome = invoke("groups", "describe", "nope")
    assert (outcome.exit_code, outcome.stdout) == (3, "")
    assert outcome.stderr == (
        "marshal: group 'nope' is not in the log; see: marshal groups list\n"
    )


class FakeAdmin:
    def __init__(self, held):
        self.asked = []
        self._held = held

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def pause_group(self, group, **wanted):
        self.asked.append((group, wanted))
        return PauseResult("ab", UNTIL, self._held)

    def resume_group(self, group, *, reason):
        self.asked.append((group, reason))
        return 4


@pytest.mark.parametrize("verb", ["pause", "release"])
@pytest.mark.parametrize(
    ("held", "arguments", "code", "wait_ms", "message"),
    [
        ((), [], 0, 0, ""),
        ((Key("g", "t", 1),), [], 0, 0, "1 claims are not released yet"),
        ((), ["--wait"], 0, 600_000, ""),
        ((Key("g", "t", 1),), ["--wait", "--timeout", "5s"], 5, 5_000, "t-1"),
    ],
)
def test_pause(world, monkeypatch, *, verb, held, arguments, code, wait_ms, message):
    admin = FakeAdmin(held)
    monkeypatch.setattr(Call, "admin", lambda self: admin)
    outcome = invoke(
        *("groups", verb, "g", "--for", "10m", "--reason", "why"), *arguments
    )
    assert outcome.exit_code == code
    assert message in outcome.stderr
    wanted = {"for_ms": 600_000, "reason": "why", "wait_ms": wait_ms}
    assert admin.asked == [("g", wanted)]
    assert "until ms: 1970-01-01T00:26:40.000Z" in outcome.stdout


def test_resume(world, monkeypatch):
    admin = FakeAdmin(())
    monkeypatch.setattr(Call, "admin", lambda self: admin)
    outcome = invoke("groups", "resume", "g", "--reason", "done")
    assert admin.asked == [("g", "done")]
    assert "partitions count: 4" in outcome.stdout
