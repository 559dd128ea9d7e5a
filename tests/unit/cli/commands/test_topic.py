"""`marshal topic`: exit codes, problems and changes."""

import json
from types import SimpleNamespace

import attrs
import pytest
from logkit import (
    CREATE_TIME,
    OP,
    Log,
    claim,
    config,
    growth,
    ident,
    layout_import,
    release,
    source_log,
    target_log,
)
from opening import Opened
from typer.testing import CliRunner

from kafka_marshal import World
from kafka_marshal.admin.altering import UpgradePlan, plan_alter
from kafka_marshal.admin.formatting import TopicReport
from kafka_marshal.admin.resizing import Move, Obstacle, ResizePlan
from kafka_marshal.kafka_io.topic_rules import ClusterInfo, Problem, TopicDescription
from kafka_marshal.protocol.layout_reading import LayoutProgress
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands.topic import (
    _sections,
    change_facts,
    judge,
    layout_rows,
    topic_answer,
)
from kafka_marshal_cli.shared import Call

CLUSTER = ClusterInfo("cluster", 1, ())


def report(*problems, exists=True, note=None):
    topic = TopicDescription(
        name="__marshal", exists=exists, partition_count=1, replication=1
    )
    return TopicReport(
        cluster=CLUSTER, topic=topic, found=tuple(map(Problem, problems)), note=note
    )


def world(*logs, cluster_id="cluster"):
    return World([log.state for log in logs], {}, cluster_id=cluster_id)


def dated_by_a_client():
    log = Log()
    log.append(claim(), kind=CREATE_TIME)
    return log


def halted():
    log = Log()
    log.append(config(2, era=2, level=9))
    return log


@pytest.mark.parametrize(
    ("expected", "found", "code", "problem"),
    [
        pytest.param(report(), world(Log()), 0, None, id="sound"),
        pytest.param(report("a is 1"), world(Log()), 3, "a is 1", id="setting"),
        pytest.param(
            report(), world(Log(configured=False)), 3, "not formatted", id="bare"
        ),
        pytest.param(
            report(),
            world(Log(k=2), Log(1, configured=False)),
            3,
            "torn_format: partition 1",
            id="torn",
        ),
        pytest.param(report(), world(Log(k=2)), 3, "lost partitions", id="cut"),
        pytest.param(
            report("a"), world(Log(), cluster_id="x"), 6, "cluster_id is x", id="other"
        ),
        pytest.param(report(), world(halted()), 3, "feature level 9", id="halted"),
        pytest.param(
            report(), world(dated_by_a_client()), 3, "CreateTime", id="create-time"
        ),
    ],
)
def test_problems_of_the_topic_decide_the_exit_code(expected, found, code, problem):
    assert judge(expected, found)[0] == code
    problems = judge(expected, found)[1]
    assert bool(problems) == (problem is not None)
    assert problem is None or any(problem in each for each in problems)


def run(monkeypatch, admin, *words, found=None):
    """Run a command of ``marshal topic`` with this admin and world."""
    shown = world(Log()) if found is None else found
    monkeypatch.setattr(Call, "admin", lambda self: admin)
    monkeypatch.setattr(Call, "world", lambda self, **_: shown)
    return CliRunner().invoke(app, ["topic", *words])


def info(monkeypatch, written, found, *arguments):
    class FakeAdmin(Opened):
        def report_topic(self):
            return written

    return run(monkeypatch, FakeAdmin(), "info", *arguments, found=found)


def test_info_names_every_problem(monkeypatch):
    outcome = info(monkeypatch, report("a is 1", "b is 2"), world(Log()))
    assert outcome.exit_code == 3
    assert "marshal: __marshal: a is 1\nmarshal: __marshal: b is 2\n" in outcome.stderr
    assert "problems:              a is 1; b is 2" in outcome.stdout


def test_info_works_without_the_right_to_read_settings(monkeypatch):
    outcome = info(monkeypatch, report(note="refused"), world(Log()))
    assert outcome.exit_code == 0
    assert "DESCRIBE_CONFIGS): refused" in outcome.stderr


def test_info_of_a_missing_topic_suggests_to_format_it(monkeypatch):
    outcome = info(monkeypatch, report("missing", exists=False), None)
    assert (outcome.exit_code, outcome.stdout) == (3, "")
    assert "run: marshal topic format" in outcome.stderr


def test_info_of_an_unformatted_topic_suggests_to_format_it(monkeypatch):
    outcome = info(monkeypatch, report(), world(Log(configured=False)))
    assert outcome.exit_code == 3
    assert "marshal topic format" in outcome.stderr
    assert "check --coordination-topic" in outcome.stderr
    assert "is formatted:     no" in outcome.stdout


def test_random_ids_differ():
    one, other = (
        CliRunner().invoke(app, ["topic", "random-id"]).stdout for _ in range(2)
    )
    assert one != other
    assert len(bytes.fromhex(one.strip())) == 16


@pytest.mark.parametrize(
    ("partitions", "words", "expected"),
    [
        ((0, 1), [], "nothing was written"),
        ((0, 1), ["--execute"], None),
        ((), [], "already has that level"),
    ],
    ids=str,
)
def test_an_upgrade_is_written_only_with_execute(
    monkeypatch, partitions, words, expected
):
    class FakeAdmin(Opened):
        def upgrade_topic(self, *, execute, ignore_members):
            assert (execute, ignore_members) == (bool(words), False)
            return UpgradePlan(
                config=config(2, level=2),
                level=1,
                level_then=2,
                partitions=partitions,
                too_old=(),
            )

    outcome = run(monkeypatch, FakeAdmin(), "upgrade", *words, "-o", "json")
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert (found["feature_level"], found["feature_level_then"]) == (1, 2)
    assert found["partitions"] == list(partitions)
    assert expected is None or expected in outcome.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--heartbeat", "2s"], "nothing was written"),
        (["--heartbeat", "2s", "--execute"], "does not start any more"),
        (["--limit", "keys=5", "--execute"], None),
        ([], "already has these values"),
    ],
    ids=str,
)
def test_a_topic_is_altered_only_with_execute(monkeypatch, words, expected):
    log, calls = Log(k=1, h=1_000), []

    class FakeAdmin(Opened):
        def alter_topic(self, *, heartbeat_interval_ms, limits, execute):
            calls.append(execute)
            return plan_alter(
                [log.state],
                heartbeat_interval_ms=heartbeat_interval_ms,
                limits=limits,
                era=2,
            )

    log.append(config(2, era=2, level=2))
    outcome = run(monkeypatch, FakeAdmin(), "alter", *words, "-o", "json")
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert calls == [found["is_executed"]] == ["--execute" in words]
    assert found["partitions"] == ([0] if words else [])
    if "--heartbeat" in words:
        change = {"before": 1_000, "then": 2_000}
        assert found["changes"] == {"heartbeat_interval_ms": change}
    if expected is None:
        assert outcome.stderr == ""
    else:
        assert expected in outcome.stderr
    shown = CliRunner().invoke(app, ["topic", "alter", *words])
    assert shown.exit_code == 0, shown.output


def progress(**changes):
    zero = dict.fromkeys(attrs.fields_dict(LayoutProgress), 0)
    return LayoutProgress(**(zero | {"floor": None, "lagging": ()} | changes))


@pytest.mark.parametrize("words", [[], ["--execute"], ["--timeout", "9s"]], ids=str)
def test_the_number_of_partitions_changes_only_with_execute(monkeypatch, words):
    calls = []

    class FakeAdmin(Opened):
        def resize_topic(self, count, *, on_progress, **given):
            calls.append(given)
            on_progress(progress(fenced_count=3, partition_count=8))
            return ResizePlan(
                before=config(k=4),
                to_count=count,
                change=None,
                moves=(Move(source=0, target=4, key_count=2, held_count=1),),
                obstacles=(Obstacle(reason="level", text="too low"),),
                lagging=(("g", "c9"),),
                partition_count=4,
            )

    line = ["resize", "--partitions", "8", *words]
    outcome = run(monkeypatch, FakeAdmin(), *line, "-o", "json")
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert calls == [
        {
            "execute": "--execute" in words,
            "ignore_members": False,
            "timeout_ms": 9_000 if "--timeout" in words else None,
        }
    ]
    assert found["is_executed"] == ("--execute" in words)
    assert (found["from_count"], found["to_count"]) == (4, 8)
    assert (found["added_count"], found["moving_count"]) == (4, 2)
    assert found["members_left_behind"] == ["g/c9"]
    assert found["moves"][0]["target"] == 4
    assert "fences 3/8" in outcome.stderr
    assert ("nothing was written" in outcome.stderr) != ("--execute" in words)
    assert run(monkeypatch, FakeAdmin(), *line).exit_code == 0


def test_a_resize_to_the_present_number_is_noted(monkeypatch):
    class FakeAdmin(Opened):
        def resize_topic(self, count, **_):
            return ResizePlan(
                before=config(k=8),
                to_count=count,
                change=None,
                moves=(),
                obstacles=(),
                lagging=(),
                partition_count=8,
            )

    outcome = run(monkeypatch, FakeAdmin(), "resize", "--partitions", "8")
    assert "has 8 coordinating partitions already" in outcome.stderr


def test_info_shows_an_open_change_of_the_partition_count():
    source, epoch, _ = source_log()
    source.append(release(epoch))
    target = target_log()
    target.append(layout_import())
    answer = topic_answer(
        SimpleNamespace(coordination_topic="__marshal"),
        report(),
        world=world(source, target),
        problems=(),
    )
    change = answer.facts["change"]
    assert (change["op_id"], change["to_count"]) == (OP.hex(), 2)
    assert (change["fenced_count"], change["imported_count"]) == (2, 1)
    assert (change["waits"], change["lagging"]) == ([], [])
    assert change_facts(world(Log())) is None
    partitions, layout = answer.sections
    assert len(partitions.rows) == 2
    shown = {
        "op_id": OP.hex(),
        "from_count": 1,
        "to_count": 2,
    }
    assert layout.rows == [
        shown
        | {"partition": 0, "moving_count": 1, "final_count": 1, "imported_count": 0}
        | {"done": [], "not_done": []},
        shown
        | {"partition": 1, "moving_count": 0, "final_count": 0, "imported_count": 1}
        | {"done": [], "not_done": [0]},
    ]
    texts = [[column.cell(row) for column in layout.columns] for row in layout.rows]
    assert texts[0] == ["0", "1", "2", "1", "1", "0", "-", "-"]
    assert texts[1][-1] == "0"
    assert layout_rows(world(Log())) == []


def test_info_lists_growths_of_data_topics_if_there_are_any():
    log = Log(level=2)
    assert [each.name for each in _sections(world(log))] == ["partitions"]
    log.append(growth(8, 4, topic_id=ident("topic")))
    log.append(growth(2, 1, topic="u"))
    log.append(growth(2, 1, topic="u", ends=(7,)))
    _, section = _sections(world(log, Log(partition=1, level=2)))
    texts = [[column.cell(row) for column in section.columns] for row in section.rows]
    assert texts == [["t", "4", "8", "announced"], ["u", "1", "2", "ended"]]
    assert section.rows[0] == {
        "topic": "t",
        "topic_id": ident("topic").hex(),
        "from_count": 4,
        "to_count": 8,
        "state": "announced",
        "announced_offset": 1,
        "end_offsets": None,
    }
    assert section.rows[1]["end_offsets"] == [7]
