"""`marshal groups`, with a world in memory: tables and JSON."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
from logkit import (
    OP,
    START_MS,
    H,
    Log,
    beat,
    claim,
    direct,
    growth,
    ident,
    member,
    pause,
    release,
    settings,
)
from opening import Opened
from typer.testing import CliRunner

from kafka_marshal import CoordinationError, Key, TopicPartition, World
from kafka_marshal.admin.group_settings import plan_settings
from kafka_marshal.admin.growing import waiting
from kafka_marshal.admin.pausing import PauseResult
from kafka_marshal.engine.pause_notes import PauseNote
from kafka_marshal.protocol.placement import by_partition
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.shared import Call

UNTIL = 1_600_000
BEGIN_AT = "1970-01-01T00:16:40.010Z"
UNTIL_AT = "1970-01-01T00:26:40.000Z"
LOG_ENDS = {TopicPartition("t", 0): 10}
HOSTILE = "[red]\x1b[31m\nmarshal: fine"
PERSON = "ada\x1b"
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
        notes={("g", OP): PauseNote(HOSTILE, PERSON, START_MS + 10)},
    )
    monkeypatch.setattr(Call, "world", lambda self, **_: made)
    monkeypatch.setattr(Call, "log_ends", lambda _, wanted: LOG_ENDS)
    return made


def test_list_shows_groups_with_their_pauses(world):
    assert invoke("groups", "list").stdout.splitlines() == [
        (
            "GROUP  MEMBERS  OWNED  CLAIMS               PAUSED FROM              "
            "PAUSED UNTIL  BY       REASON                        NEXT PAUSE"
        ),
        (
            rf"g            1      1       1  {BEGIN_AT}  {UNTIL_AT}  ada\x1b  "
            rf"{SHOWN}  -"
        ),
        (
            "h            0      1       1                         -                 "
            "        -  -        -                             -"
        ),
    ]


def test_list_as_json_has_the_reason_and_person_of_a_pause(world):
    found = json.loads(invoke("groups", "list", "-o", "json").stdout)
    assert found["schema"] == 1
    assert found["as_of"] == {"time_ms": 5, "offsets": {"0": 6}}
    assert found["groups"][0]["pause_reason"] == HOSTILE
    assert found["groups"][0]["pause_person"] == PERSON
    assert found["groups"][0]["paused_by"] == "admin"


def test_describe_shows_all_sections_of_a_group(world):
    assert invoke("groups", "describe", "g").stdout.splitlines() == [
        "group id: g",
        "",
        "no settings",
        "",
        "PAUSES",
        (
            f"STATE   {'FROM':>24}  {'UNTIL':>24}  BY       CLIENT  {'REASON':<28}  "
            "OPERATION"
        ),
        (rf"paused  {BEGIN_AT}  {UNTIL_AT}  ada\x1b  admin   {SHOWN}  {OP.hex()}"),
        "",
        "no directives",
        "",
        "no operations",
        "",
        "MEMBERS",
        "CLIENT  STATE   HOST  CLAIMS  SILENT  INCARNATION  TOPICS",
        f"c1      active  host       1     ~1s  {ident('c1').hex()[:8]}     t",
        "",
        "no handoffs",
        "",
        "no standbys",
        "",
        "no uncovered",
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


def test_describe_shows_partitions_that_wait_in_a_grown_topic(monkeypatch):
    log = Log(cluster_id="cluster", level=2)
    log.append(beat(log.claimed("c1"), 7))
    log.append(growth(4, 2))
    log.append(growth(4, 2, ends=(9, 0)))
    made = World([log.state], {0: H}, cluster_id="cluster")
    monkeypatch.setattr(Call, "world", lambda self, **_: made)
    monkeypatch.setattr(Call, "log_ends", lambda _, wanted: LOG_ENDS)
    monkeypatch.setattr(Call, "partition_counts", lambda *_: {"t": 4})
    lines = invoke("groups", "describe", "g").stdout.splitlines()
    at = lines.index("WAITING")
    table = [" ".join(line.split()) for line in lines[at + 1 : at + 4]]
    assert table == [
        "TOPIC PARTITION POSITION END LAG WAITING",
        "t 0 7 9 2 2",
        "t 1 - 0 - 3",
    ]
    made = World([], {}, cluster_id="cluster", is_partial=True, is_past=True)
    assert waiting(by_partition(made.partitions), "g") == ()


def test_describe_shows_standbys(monkeypatch):
    log = Log(cluster_id="cluster")
    log.append(member("c1"))
    log.claimed("c1")
    log.append(member("c2", labels={"standbys": "1"}))
    for is_partial in (False, True):
        made = World([log.state], {}, cluster_id="cluster", is_partial=is_partial)
        monkeypatch.setattr(Call, "world", lambda self, made=made, **_: made)
        monkeypatch.setattr(Call, "log_ends", lambda _, wanted: LOG_ENDS)
        found = json.loads(invoke("groups", "describe", "g", "-o", "json").stdout)
        row = {"topic": "t", "partition": 0, "standbys": ["c2"]}
        assert found["standbys"] == ([] if is_partial else [row])


def test_describe_shows_drains_and_cordons_with_their_reasons(monkeypatch):
    log = Log(level=SECOND_LEVEL, cluster_id="cluster")
    log.append(member("c1"))
    log.append(direct(host="host", until=UNTIL, group="marshal"))
    log.append(direct("c9", until=UNTIL, action="cordon", op=ident("own")))
    log.append(direct("c1", until=UNTIL, group="h", op=ident("other")))
    notes = {("marshal", OP): PauseNote(HOSTILE, PERSON, START_MS)}
    made = World([log.state], {0: 0}, cluster_id="cluster", notes=notes)
    monkeypatch.setattr(Call, "world", lambda self, **_: made)
    admin = nullcontext(SimpleNamespace(partition_count={}.get))
    monkeypatch.setattr(Call, "admin", lambda self: admin)
    monkeypatch.setattr(Call, "log_ends", lambda _, wanted: {})
    lines = invoke("groups", "describe", "g").stdout.splitlines()
    first = lines.index("DIRECTIVES")
    assert [line.split() for line in lines[first + 1 : first + 4]] == [
        ["ACTION", "CLIENT", "HOST", "GROUP", "UNTIL", "BY", "REASON", "OPERATION"],
        f"cordon c9 - g {UNTIL_AT} admin - {ident('own').hex()}".split(),
        rf"drain - host all {UNTIL_AT} ada\x1b {SHOWN} {OP.hex()}".split(),
    ]
    assert lines[lines.index("MEMBERS") + 1].endswith("DIRECTIVE")
    found = json.loads(invoke("groups", "describe", "g", "-o", "json").stdout)
    assert [row["group_id"] for row in found["directives"]] == ["g", None]
    assert found["directives"][1]["reason"] == HOSTILE
    (row,) = found["members"]
    assert row["directive"] == "drain"


@pytest.mark.parametrize(
    ("members", "uncovered"),
    [
        pytest.param(
            {}, {0: "no members", 1: "no members", 2: "no members"}, id="none"
        ),
        pytest.param({"a": {"topics": ("u",)}}, dict.fromkeys(range(3), "topics")),
        pytest.param(
            {"a": {"capacity": 1, "load": 1}}, dict.fromkeys(range(3), "limits")
        ),
        pytest.param({"a": {"capacity": 2, "load": 1}}, {}, id="room"),
        pytest.param(
            {"a": {"capacity": 1, "load": 1}, "b": {"draining": True}},
            dict.fromkeys(range(3), "limits"),
            id="the-other-leaves",
        ),
    ],
)
def test_describe_lists_partitions_that_no_member_can_take(
    monkeypatch, members, uncovered
):
    """Free, stale and unclaimed partitions; not that of a fresh owner."""
    log = Log(cluster_id="cluster")
    epoch = log.claimed("z", key=Key("g", "t", 0))
    log.append(release(epoch, client="z", key=Key("g", "t", 0)))
    log.claimed("z", key=Key("g", "t", 1))
    log.append(claim(client="y", key=Key("g", "t", 3)), after=3 * H)
    for name, fields in members.items():
        log.append(msgspec.structs.replace(member(name), **fields))
    counts = {"t": 4, "u": 0}
    made = World([log.state], {0: 0}, cluster_id="cluster", read_at_ms=5)
    monkeypatch.setattr(Call, "world", lambda self, **_: made)
    admin = SimpleNamespace(partition_count=counts.get)
    monkeypatch.setattr(Call, "admin", lambda self: nullcontext(admin))
    monkeypatch.setattr(Call, "log_ends", lambda _, wanted: {})
    found = json.loads(invoke("groups", "describe", "g", "-o", "json").stdout)
    rows = {row["partition"]: row["reason"] for row in found["uncovered"]}
    assert rows == uncovered
    if members:
        return
    counts.clear()
    table = invoke("groups", "describe", "g").stdout
    assert "no uncovered" in table, "the topic was deleted"


def test_describe_refuses_an_unknown_group(world):
    outcome = invoke("groups", "describe", "nope")
    assert (outcome.exit_code, outcome.stdout) == (3, "")
    assert outcome.stderr == (
        "marshal: group 'nope' is not in the log; see: marshal groups list\n"
    )


class FakeAdmin(Opened):
    def __init__(self):
        self.asked = []
        self.begin_ms = None
        self.until_ms = UNTIL
        self.held = ()

    def pause_group(self, group, **wanted):
        self.asked.append((group, wanted))
        topics = tuple(wanted["topics"] or ())
        op_id = "" if wanted["dry_run"] else "ab"
        return PauseResult(op_id, self.until_ms, self.held, self.begin_ms, topics)

    def partition_count(self, topic):
        if topic == "hidden":
            raise CoordinationError("not authorized")
        return {"orders": 6, "invoices": 4}.get(topic)

    def resume_group(self, group, *, operation, reason, dry_run):
        self.asked.append((group, operation, reason, dry_run))
        return 4


@pytest.fixture
def admin(world, monkeypatch):
    made = FakeAdmin()
    monkeypatch.setattr(Call, "admin", lambda self: made)
    return made


@pytest.mark.parametrize("verb", ["pause", "release"])
@pytest.mark.parametrize(
    ("held", "arguments", "code", "wait_ms", "message"),
    [
        ((), [], 0, 0, None),
        ((Key("g", "t", 1),), [], 0, 0, "1 claim is not released yet"),
        ((), ["--wait"], 0, 600_000, None),
        ((Key("g", "t", 1),), ["--wait", "--timeout", "5s"], 5, 5_000, "t-1"),
    ],
)
def test_a_pause_reports_claims_that_are_still_held(
    admin, *, verb, held, arguments, code, wait_ms, message
):
    admin.held = held
    outcome = invoke(
        *("groups", verb, "g", "--for", "10m", "--reason", "why"), *arguments
    )
    assert outcome.exit_code == code
    if message is None:
        assert outcome.stderr == ""
    else:
        assert message in outcome.stderr
    wanted = {"for_ms": 600_000, "until_ms": None, "begin_ms": None}
    wanted |= {"topics": None, "reason": "why", "wait_ms": wait_ms}
    wanted |= {"dry_run": False}
    assert admin.asked == [("g", wanted)]
    assert "until:       1970-01-01T00:26:40.000Z" in outcome.stdout


@pytest.mark.parametrize(
    ("ahead_ms", "note"), [(59_000, ""), (7_200_000, "is 2h ahead of the brokers")]
)
def test_a_pause_set_with_a_clock_that_is_ahead_is_noted(world, admin, ahead_ms, note):
    (state,) = world.partitions
    admin.until_ms = state.append_time_ms + ahead_ms + 600_000
    outcome = invoke("groups", "pause", "g", "--for", "10m")
    assert outcome.exit_code == 0, outcome.output
    assert note in outcome.stderr
    assert bool(note) == ("set the clock" in outcome.stderr)


def test_a_dry_run_of_a_pause_lists_the_claims_to_release(admin):
    admin.held = (Key("g", "t", 1),)
    outcome = invoke(
        *("groups", "pause", "g", "--for", "10m", "--dry-run", "--wait", "-o", "json")
    )
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stderr == "nothing was written; 1 claim would be released\n"
    found = json.loads(outcome.stdout)
    assert (found["op_id"], found["is_executed"], found["held"]) == (
        None,
        False,
        ["t-1"],
    )
    ((_, wanted),) = admin.asked
    assert wanted["dry_run"]


def test_a_pause_can_be_limited_to_topics_and_partitions(admin):
    topics = ["orders", "invoices:0,3"]
    chosen = ["--topic", topics[0], "--topic", topics[1]]
    outcome = invoke("groups", "pause", "g", "--for", "10m", *chosen, "-o", "json")
    assert outcome.exit_code == 0
    ((_, wanted),) = admin.asked
    assert wanted["topics"] == topics
    assert json.loads(outcome.stdout)["topics"] == topics
    assert "topic" not in outcome.stderr


@pytest.mark.parametrize(
    ("scope", "note"),
    [
        ("order", "topic 'order' does not exist"),
        ("orders:0,6", "topic 'orders' has the partitions 0 to 5"),
        ("hidden", ""),
    ],
)
@pytest.mark.usefixtures("admin")
def test_a_pause_of_a_missing_topic_or_partition_is_noted(scope, note):
    outcome = invoke("groups", "pause", "g", "--for", "10m", "--topic", scope)
    assert outcome.exit_code == 0
    assert note in outcome.stderr
    assert bool(note) == ("has no effect" in outcome.stderr)


def test_a_pause_can_have_a_begin_and_an_end(admin):
    admin.begin_ms = UNTIL - 1_000
    outcome = invoke(
        *("groups", "pause", "g", "--until", "2026-01-31T12:00:00Z"),
        *("--begin", "2026-01-31T10:00:00+01:00"),
    )
    assert outcome.exit_code == 0, outcome.output
    ((_, wanted),) = admin.asked
    assert wanted["for_ms"] is None
    assert (wanted["until_ms"], wanted["begin_ms"]) == (1769860800_000, 1769850000_000)
    assert "begin:       1970-01-01T00:26:39.000Z" in outcome.stdout


@pytest.mark.parametrize(
    "arguments", [[], ["--for", "1h", "--until", "2h"], ["--until", "soon"]]
)
def test_a_pause_needs_either_a_length_or_an_end(world, arguments):
    outcome = invoke("groups", "pause", "g", *arguments)
    assert outcome.exit_code == 2
    assert "--until" in outcome.stderr


def test_resume_ends_the_pause_of_an_operation(admin):
    outcome = invoke("groups", "resume", "g", "--reason", "done", "--operation", "ab")
    assert admin.asked == [("g", "ab", "done", False)]
    assert "partitions count: 4" in outcome.stdout
    assert "is executed:      yes" in outcome.stdout


def test_a_dry_run_of_a_resume_counts_the_partitions(admin):
    outcome = invoke("groups", "resume", "g", "--dry-run", "-o", "json")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stderr == (
        "nothing was written; pauses would end in 4 coordinating partitions\n"
    )
    found = json.loads(outcome.stdout)
    assert (found["is_executed"], found["partitions_count"]) == (False, 4)
    assert admin.asked == [("g", None, None, True)]


@pytest.mark.parametrize("action", [["pause", "--for", "10m"], ["resume"]])
@pytest.mark.usefixtures("admin")
def test_a_pause_or_resume_of_an_unknown_group_is_noted(action):
    note = "the log knows no members and no claims of group"
    verb, *options = action
    outcome = invoke("groups", verb, "misspelt", *options)
    assert outcome.exit_code == 0
    assert f"{note} 'misspelt'" in outcome.stderr
    assert "marshal groups list" in outcome.stderr
    assert note not in invoke("groups", verb, "g", *options).stderr


def test_an_open_reset_is_listed_with_the_command_that_ends_it(world):
    state = world.partitions[0]
    key = next(each for each in state.keys if each.group_id == "g")
    state.locked["g", OP] = {key: None}
    lines = invoke("groups", "list").stdout.splitlines()
    assert lines[0].split()[-3:] == ["LOCKED", "BY", "OPERATION"]
    assert lines[1].split()[-2:] == ["1", OP.hex()]
    found = json.loads(invoke("groups", "describe", "g", "-o", "json").stdout)
    assert found["operations"] == [
        {
            "group_id": "g",
            "op_id": OP.hex(),
            "state": "undecided",
            "locked_count": 1,
            "client_id": "admin",
            "person": PERSON,
            "command": "marshal groups finish g",
        }
    ]


class SettingsAdmin:
    """An admin that plans changes of settings and records the calls."""

    def __init__(self, log):
        self.log = log
        self.calls = []

    def set_group(self, group_id, changes, *, reason, execute):
        self.calls.append((group_id, changes, reason, execute))
        return plan_settings(self.log.state, group_id, changes=changes)


@pytest.fixture
def setting(monkeypatch):
    log = Log(cluster_id="cluster", level=2)
    log.append(settings(handoff_ms=5_000, handoffs_max=3))
    made = World([log.state], {}, cluster_id="cluster", read_at_ms=5)
    monkeypatch.setattr(Call, "world", lambda self, **_: made)
    admin = SettingsAdmin(log)
    monkeypatch.setattr(Call, "admin", lambda self: nullcontext(admin))
    return admin


def test_set_without_execute_shows_the_changes(setting):
    words = ["--handoff-ms", "10m", "--handoffs-max", "default", "--debounce-ms", "9"]
    result = invoke("groups", "set", "g", *words)
    changes = {"debounce_ms": 9, "handoff_ms": 600_000, "handoffs_max": None}
    assert setting.calls == [("g", changes, None, False)]
    assert result.stdout.splitlines()[-6:] == [
        "SETTING       VALUE   DEFAULT  BEFORE",
        "policy        fair    fair     fair",
        "debounce_ms   9       1000     1000",
        "handoff_ms    600000  300000   5000",
        "handoffs_max  8       8        3",
        "grace_ms      60000   60000    60000",
    ]
    assert "--execute writes it" in result.stderr


def test_set_with_execute_writes_the_settings(setting):
    words = ["--handoff-ms", "default", "--reason", "done", "--execute", "-o", "json"]
    result = invoke("groups", "set", "g", *words)
    assert setting.calls == [("g", {"handoff_ms": None}, "done", True)]
    found = json.loads(result.stdout)
    assert (found["generation"], found["generation_then"]) == (1, 2)
    assert (found["is_changed"], found["is_executed"]) == (True, True)
    assert "nothing was written" not in result.stderr


def test_set_changes_the_policy(setting):
    words = ["--policy", "planner", "--grace-ms", "5m", "--execute", "-o", "json"]
    found = json.loads(invoke("groups", "set", "g", *words).stdout)
    changes = {"policy": "planner", "grace_ms": 300_000}
    assert setting.calls == [("g", changes, None, True)]
    row = {"name": "policy", "value": "planner", "default": "fair", "before": "fair"}
    assert found["settings"][0] == row
    invoke("groups", "set", "g", "--policy", "default")
    assert setting.calls[-1][1] == {"policy": None}


def test_set_for_an_unknown_group_is_noted(setting):
    setting.log.append(member("c1"))
    words = ("--policy", "planner", "--execute")
    note = "the log knows no members and no claims of group 'misspelt'"
    assert note in invoke("groups", "set", "misspelt", *words).stderr
    assert invoke("groups", "set", "g", *words).stderr == ""


def test_set_of_unchanged_settings_writes_nothing(setting):
    result = invoke("groups", "set", "g", "--handoff-ms", "5000", "--execute")
    assert "has these settings already" in result.stderr
    assert "is executed:     no" in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="nothing"),
        pytest.param(["--handoff-ms", "soon"], id="no duration"),
        pytest.param(["--debounce-ms", "1h"], id="too long"),
        pytest.param(["--handoffs-max", "1.5"], id="no whole number"),
        pytest.param(["--handoffs-max", "0"], id="none"),
        pytest.param(["--policy", "greedy"], id="no policy of groups"),
    ],
)
def test_set_refuses_missing_or_invalid_settings(setting, words):
    assert invoke("groups", "set", "g", *words, "--execute").exit_code == 2


def test_describe_shows_the_settings_of_a_group_without_members(setting, monkeypatch):
    monkeypatch.setattr(Call, "with_lag", lambda self, rows: rows)
    found = json.loads(invoke("groups", "describe", "g", "-o", "json").stdout)
    assert found["settings"] == [
        {"name": "policy", "value": "fair", "default": "fair"},
        {"name": "debounce_ms", "value": 1_000, "default": 1_000},
        {"name": "handoff_ms", "value": 5_000, "default": 300_000},
        {"name": "handoffs_max", "value": 3, "default": 8},
        {"name": "grace_ms", "value": 60_000, "default": 60_000},
    ]
    assert invoke("groups", "describe", "h").exit_code == 3
