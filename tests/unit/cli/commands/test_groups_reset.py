"""`marshal groups reset`, `undo` and `finish`: options, tables and advice."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import attrs
import pytest
from logkit import Log, config, pause
from opening import Opened
from typer.testing import CliRunner

from kafka_marshal import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    PositionError,
    PositionSpec,
    TopicPartition,
    World,
)
from kafka_marshal.admin.finishing import ResetProgress, ResetResult
from kafka_marshal.admin.group_reset import (
    PartitionReset,
    ResetPlan,
    read_plan,
    write_plan,
)
from kafka_marshal.admin.set_position import NotDrained, PositionPlan, Target
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.state import WorldState
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands import groups_reset
from kafka_marshal_cli.commands.groups_reset import Printer, Rules
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.shared import Call

OP, OTHER = "0f" * 16, "1f" * 16
PLACE = TopicPartition("t", 0)
WHERE = ["--topic", "t", "--to-offset", "2"]


def plan(*, repeats=False, left_out=()):
    positions = PositionPlan(
        op_id=OP,
        group_id="g",
        targets=(Target(topic="t", topic_id=None, partition=0, position=2),),
        left_out=left_out,
    )
    row = PartitionReset(
        partition=PLACE,
        before=9,
        after=2,
        log_range=LogRange(0, 20),
        repeats=repeats,
        is_clamped=not repeats,
    )
    return ResetPlan(positions=positions, partitions=(row,))


class FakeAdmin(Opened):
    def __init__(self):
        self.asked = []
        self.plan = plan()
        self.error = None
        self.outcome = "committed"
        self.mirror_error = None
        self.finished = ()
        self.stored = None
        self.before = 8

    def plan_reset(self, group, spec, **options):
        self.asked.append((group, spec, options))
        return self.plan

    def plan_undo(self, op_id, **options):
        self.asked.append((op_id, options))
        return self.plan

    def describe_plan(self, positions):
        assert positions == self.plan.positions
        return self.plan

    def execute(self, planned, *, plan_file, on_progress, **options):
        write_plan(plan_file, planned.positions)
        self.stored = plan_file
        self.asked.append(options)
        on_progress(ResetProgress(step="drain", left_count=3))
        if self.error is not None:
            raise self.error
        return ResetResult(
            op_id=OP,
            group_id="g",
            outcome=self.outcome,
            moved={PLACE: (self.before, 2)},
            mirror_error=self.mirror_error,
        )

    def finish(self, group, *, reason, on_progress):
        self.asked.append((group, reason))
        return self.finished


@pytest.fixture(name="admin")
def _admin(monkeypatch, tmp_path):
    admin = FakeAdmin()
    monkeypatch.setattr(Call, "admin", lambda self: admin)
    monkeypatch.setattr(Call, "world", lambda self, **_: World([], {}, read_at_ms=5))
    monkeypatch.setenv("MARSHAL_STATE_DIR", str(tmp_path / "state"))
    return admin


def invoke(*arguments):
    return CliRunner().invoke(app, ["groups", *arguments])


# --- options


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ({}, None),
        ({"to_earliest": True}, PositionSpec.earliest()),
        ({"to_latest": True}, PositionSpec.latest()),
        ({"to_current": True}, PositionSpec.current()),
        ({"to_offset": 0}, PositionSpec.to_offset(0)),
        ({"shift_by": -5}, PositionSpec.shift_by(-5)),
        ({"to_datetime": "1970-01-01T00:00:01"}, PositionSpec.to_time(1_000)),
    ],
)
def test_each_option_gives_its_position_spec(given, spec):
    assert Rules(**given).spec() == spec


def test_by_duration_gives_a_time_before_now(monkeypatch):
    monkeypatch.setattr(groups_reset, "wall_ms", lambda: 700_000)
    assert Rules(by_duration="PT10M").spec() == PositionSpec.to_time(100_000)
    assert Rules(by_duration="10m").spec() == PositionSpec.to_time(100_000)
    assert Rules(by_duration="P1D").spec() == PositionSpec.to_time(0)


def test_from_file_gives_the_positions_in_the_file(tmp_path):
    path = tmp_path / "positions.csv"
    path.write_text("t,0,4\n", encoding="utf-8")
    assert Rules(from_file=path).spec() == PositionSpec.from_offsets({PLACE: 4})


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("-10m", Moment(text="1970-01-01T00:01:40.000Z", time_ms=100_000)),
        ("3:100,5:80", Moment(text="3:100,5:80", offsets={3: 100, 5: 80})),
    ],
)
def test_to_fence_gives_the_positions_at_a_past_moment(
    monkeypatch, admin, text, moment
):
    monkeypatch.setattr(groups_reset, "wall_ms", lambda: 700_000)
    assert Rules(to_fence=text).spec() == moment
    state, asked = WorldState(3), []
    world = World([state], {}, is_past=True)
    monkeypatch.setattr(
        Call, "formatted_world", lambda _, at: (asked.append(at), world)[1]
    )
    done = invoke("reset", "g", "--all-topics", "--to-fence", text)
    assert done.exit_code == 0, done.output
    assert asked == [moment]
    assert admin.asked[0][1] == PositionSpec.to_fence([state], "g")


def test_to_fence_needs_an_offset_of_each_coordinating_partition(monkeypatch, admin):
    state = WorldState(1)
    state.config = config(k=2)  # t-0 is in coordinating partition 1, t-1 in 0
    world = World([state], {}, is_past=True, is_partial=True)
    monkeypatch.setattr(Call, "formatted_world", lambda *_: world)
    fence = ["reset", "g", "--all-topics", "--to-fence", "1:100", "--execute"]
    admin.plan = plan(left_out=(("t", 1),))
    refused = invoke(*fence)
    assert (refused.exit_code, admin.stored) == (2, None)
    assert "--to-fence names no offset of coordinating partition 0" in refused.stderr
    admin.plan = plan(left_out=(("t", 0),))
    done = invoke(*fence)
    assert (
        "t-0 had no position at that moment; its position is not changed" in done.stderr
    )


def test_two_position_options_are_refused():
    with pytest.raises(ConfigurationError, match="--to-earliest, --to-offset"):
        Rules(to_earliest=True, to_offset=0).spec()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topic", "t"], "name the new positions"),
        (["--to-latest"], "--all-topics"),
        (["--to-latest", "--topic", "t", "--all-topics"], "--all-topics"),
        (["--from-file", "FILE", "--all-topics"], "--from-file names"),
        (["--continue", "FILE", "--to-latest"], "--continue executes a stored plan"),
        (["--continue", "FILE", "--clamp"], "--continue executes a stored plan"),
        (["--continue", "FILE", "--allow-reprocess"], "omit --continue and plan again"),
        (
            ["--continue", "FILE", "--plan-file", "OTHER"],
            "--continue executes a stored plan",
        ),
    ],
)
def test_missing_or_conflicting_options_are_refused(
    admin, tmp_path, arguments, message
):
    file = tmp_path / "file"
    file.write_text("t,0,4\n", encoding="utf-8")
    given = [str(file) if each == "FILE" else each for each in arguments]
    outcome = invoke("reset", "g", *given)
    assert (outcome.exit_code, admin.stored) == (2, None)
    assert message in outcome.stderr


def test_positions_topics_and_flags_are_passed_to_the_admin(admin):
    invoke("reset", "g", *WHERE, "--topic", "u:1", "--clamp", "--allow-reprocess")
    invoke("reset", "g", "--all-topics", "--to-latest")
    options = {"clamp": False, "allow_reprocess": False}
    assert admin.asked == [
        (
            "g",
            PositionSpec.to_offset(2),
            {"topics": ["t", "u:1"], "clamp": True, "allow_reprocess": True},
        ),
        ("g", PositionSpec.latest(), {"topics": None, **options}),
    ]


# --- the plan


def test_a_position_outside_of_the_log_is_wrong_usage(admin):
    outside = PositionError(
        "position 21 of t-0 lies outside of its log; nothing was written; choose one "
        "of these, or the nearest one with clamp=True",
        requested=21,
        log_start=0,
        log_end=20,
    )
    admin.plan_reset = Mock(side_effect=outside)
    outcome = invoke("reset", "g", "--topic", "t", "--to-offset", "21")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.endswith(
        "nearest one with --clamp; see the positions: marshal groups describe g\n"
    )


def test_a_dry_run_shows_the_plan(admin):
    outcome = invoke("reset", "g", *WHERE)
    assert (outcome.exit_code, admin.stored) == (0, None)
    assert outcome.stdout.splitlines()[-2:] == [
        "TOPIC  PARTITION  BEFORE  AFTER  LAG BEFORE  LAG AFTER  NOTE",
        "t              0       9      2          11         18  clamped",
    ]
    assert f"op id:        {OP}" in outcome.stdout
    assert "--execute sets the positions" in outcome.stderr


def test_a_dry_run_names_the_option_that_execute_needs(admin):
    admin.plan = plan(repeats=True)
    outcome = invoke("reset", "g", *WHERE)
    assert "--execute needs --allow-reprocess" in outcome.stderr
    assert "handed out again" in outcome.stdout


def test_a_dry_run_can_store_a_plan_for_continue(admin, tmp_path):
    file = tmp_path / "plan.json"
    invoke("reset", "g", *WHERE, "--plan-file", str(file))
    assert read_plan(file) == admin.plan.positions
    outcome = invoke("reset", "g", "--continue", str(file), "--execute")
    assert (outcome.exit_code, admin.stored) == (0, file)
    assert file.exists()
    other = invoke("reset", "h", "--continue", str(file), "--execute")
    assert (other.exit_code, "is for group 'g'" in other.stderr) == (2, True)


def test_partitions_without_a_new_position_are_listed(admin):
    admin.plan = plan(left_out=(("t", 3), ("u", 0)))
    outcome = invoke("reset", "g", *WHERE)
    assert "left out:     t-3, u-0\n" in outcome.stdout
    found = json.loads(invoke("reset", "g", *WHERE, "-o", "json").stdout)
    assert found["left_out"] == [["t", 3], ["u", 0]]


def test_from_file_can_read_standard_input(monkeypatch, tmp_path):
    path = tmp_path / "stdin"
    path.write_text("t,0,4\n")
    monkeypatch.setattr(groups_reset, "STDIN", path)
    assert Rules(from_file=Path("-")).spec() == PositionSpec.from_offsets({PLACE: 4})


def test_export_writes_lines_for_another_group(admin):
    assert invoke("reset", "g", *WHERE, "--export").stdout == "t,0,2\n"
    found = json.loads(invoke("reset", "g", *WHERE, "--export", "-o", "json").stdout)
    assert found["partitions"][0]["after"] == 2


# --- executed


def test_execute_shows_progress_and_the_undo_command(admin, tmp_path):
    outcome = invoke("reset", "g", *WHERE, "--execute", "--reason", "why")
    assert outcome.exit_code == 0
    assert admin.asked[1:] == [{"reason": "why", "drain_ms": None}]
    assert outcome.stderr.splitlines() == [
        "waiting until 3 partitions are released",
        f"undo it with: marshal groups undo {OP} --execute",
    ]
    # The position that was replaced, not the one in the plan.
    assert outcome.stdout.splitlines()[-1].split()[2:6] == ["8", "2", "12", "18"]
    assert admin.stored == tmp_path / "state" / "plans" / f"{OP}.json"
    assert not admin.stored.exists()


def test_a_timeout_limits_the_wait_for_owners(admin):
    invoke("reset", "g", *WHERE, "--execute", "--timeout", "5s")
    assert admin.asked[1]["drain_ms"] == 5_000


def test_execute_as_json_has_the_outcome_and_the_mirror_error(admin):
    admin.mirror_error = "no right"
    outcome = invoke("reset", "g", *WHERE, "--execute", "-o", "json")
    found = json.loads(outcome.stdout)
    assert (found["op_id"], found["outcome"], found["is_executed"]) == (
        OP,
        "committed",
        True,
    )
    assert (found["mirror_error"], found["schema"]) == ("no right", 1)
    assert found["partitions"][0]["lag_before"] == 12
    assert "were not written: no right" in outcome.stderr


@pytest.mark.parametrize(
    ("error", "code", "is_open"),
    [
        (ClaimRejected("busy", reason="busy"), 3, False),
        (DeadlineExceeded("no answer"), 5, True),
        (NotDrained("still owned"), 5, False),
        (KeyboardInterrupt(), 130, True),
    ],
)
def test_after_an_error_the_plan_of_an_open_reset_is_kept(admin, error, code, is_open):
    admin.error = error
    outcome = invoke("reset", "g", *WHERE, "--execute")
    assert outcome.exit_code == code
    assert admin.stored.exists() == is_open
    hint = f"marshal groups reset g --continue {admin.stored} --execute"
    assert (hint in outcome.stderr.replace("\n", "")) == is_open


def test_a_reset_without_earlier_positions_suggests_no_undo(admin):
    admin.before = None
    outcome = invoke("reset", "g", *WHERE, "--execute")
    assert (outcome.exit_code, "undo" in outcome.stderr) == (0, False)


def test_keys_that_lose_their_order_are_noted(admin):
    (row,) = admin.plan.partitions
    row = attrs.evolve(row, loses_order=True)
    admin.plan = attrs.evolve(admin.plan, partitions=(row,))
    outcome = invoke("reset", "g", *WHERE)
    assert "order of keys lost" in outcome.stdout
    assert "keys lose their order in t-0: " in outcome.stderr
    assert "see: marshal groups grow --topic t\n" in outcome.stderr


def test_an_aborted_plan_exits_as_refused(admin):
    admin.outcome = "aborted"
    outcome = invoke("reset", "g", *WHERE, "--execute")
    assert (outcome.exit_code, "it set nothing" in outcome.stderr) == (3, True)


def test_undo_plans_and_executes_an_operation(admin):
    admin.plan = plan(left_out=(("t", 3),))
    outcome = invoke("undo", OTHER, "--partial", "--execute", "--reason", "oops")
    assert outcome.exit_code == 0
    assert admin.asked == [
        (OTHER, {"partial": True, "allow_reprocess": False}),
        {"reason": "oops", "drain_ms": None},
    ]
    assert "t-3 had no position at that moment" in outcome.stderr


def test_finish_without_a_reset_names_a_remaining_pause(admin, monkeypatch):
    log = Log(cluster_id="cluster")
    until_ms = log.state.append_time_ms + 50_000
    log.append(pause(until_ms))
    world = World([log.state], {}, read_at_ms=5)
    monkeypatch.setattr(Call, "world", lambda self: world)
    monkeypatch.setattr(groups_reset, "wall_ms", lambda: until_ms - 1)
    text = invoke("finish", "g").stderr
    assert text == (
        "group 'g' has no reset to finish, and is paused; to end the pause, run: "
        "marshal groups resume g\n"
    )
    assert invoke("finish", "h").stderr == "group 'h' has no reset to finish\n"
    monkeypatch.setattr(groups_reset, "wall_ms", lambda: until_ms)
    assert invoke("finish", "g").stderr == "group 'g' has no reset to finish\n"


def test_finish_lists_the_resets_that_it_ends(admin):
    outcome = invoke("finish", "g", "--reason", "its host is gone")
    assert "no reset to finish" in outcome.stderr
    admin.finished = (SimpleNamespace(op_id=OP, outcome="aborted", moved={}),)
    outcome = invoke("finish", "g")
    assert outcome.stdout.splitlines()[-1].split() == [OP, "aborted", "0"]
    assert admin.asked == [("g", "its host is gone"), ("g", None)]


def test_progress_is_shown_once_a_second_and_at_new_steps(capsys, monkeypatch):
    now = SimpleNamespace(monotonic=lambda: 1.0)
    monkeypatch.setattr(groups_reset, "time", now)
    show = Printer()
    for count in (9, 8):
        show(ResetProgress(step="drain", left_count=count))
    now.monotonic = lambda: 3.0
    for step, count in (("drain", 7), ("drain", 0), ("lock", 2)):
        show(ResetProgress(step=step, left_count=count))
    assert capsys.readouterr().err.splitlines() == [
        "waiting until 9 partitions are released",
        "waiting until 7 partitions are released",
        "locking the partitions, 2 records",
    ]
