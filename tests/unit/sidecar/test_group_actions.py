"""Actions on groups: one at a time, each by an admin client of its own."""

import json
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from kafka_marshal.admin.finishing import ResetResult
from kafka_marshal.admin.group_reset import (
    PartitionReset,
    PositionSpec,
    ResetPlan,
    write_plan,
)
from kafka_marshal.admin.pausing import PauseResult
from kafka_marshal.admin.set_position import PositionPlan, Target
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.remote import api
from kafka_marshal.sidecar import group_actions
from kafka_marshal.sidecar.group_actions import (
    TIMEOUT_MS,
    ActionRunner,
    GroupActions,
    spec_of,
    topics_of,
)
from kafka_marshal.sidecar.http_errors import HttpError

OP_ID = "0a" * 16
WALL_MS = 1_700_000_000_000
PLACE = TopicPartition("orders", 0)


def plan_of(group="billing", *, undoes=None, is_clamped=False, repeats=False):
    target = Target(topic="orders", topic_id=None, partition=0, position=5)
    positions = PositionPlan(
        op_id=OP_ID,
        group_id=group,
        targets=(target,),
        undoes=undoes,
        left_out=(("orders", 1),),
    )
    row = PartitionReset(
        partition=PLACE,
        before=8,
        after=5,
        log_range=LogRange(0, 20),
        repeats=repeats,
        is_clamped=is_clamped,
    )
    return ResetPlan(positions=positions, partitions=(row,))


class FakeAdmin:
    """Records its calls, and the arguments with which each request opens it."""

    def __init__(self):
        self.calls = []
        self.given = []
        self.closed_count = 0
        self.held = ()
        self.plan = plan_of()
        self.outcome = "committed"
        self.fault = None
        self.stored = None

    def __call__(self, **given):
        self.given.append(given)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed_count += 1

    def pause_group(self, group, **given):
        self.calls.append(("pause", group, given))
        topics = tuple(given["topics"] or ())
        return PauseResult(OP_ID, 9, self.held, given["begin_ms"], topics)

    def resume_group(self, group, **given):
        self.calls.append(("resume", group, given))
        return 2

    def plan_reset(self, group, spec, **given):
        self.calls.append(("plan_reset", group, spec, given))
        return self.plan

    def plan_undo(self, op_id, **given):
        self.calls.append(("plan_undo", op_id, given))
        return self.plan

    def execute(self, plan, *, plan_file, reason, drain_ms):
        self.calls.append(("execute", plan.op_id, reason, drain_ms))
        if plan_file is not None:
            write_plan(plan_file, plan.positions)
            self.stored = json.loads(plan_file.read_text())
        if self.fault is not None:
            raise self.fault
        return ResetResult(
            op_id=plan.op_id,
            group_id=plan.group_id,
            outcome=self.outcome,
            moved={PLACE: (7, 5)},
        )

    def finish(self, group, **given):
        self.calls.append(("finish", group, given))
        return (ResetResult(op_id=OP_ID, group_id=group, outcome="aborted", moved={}),)


@pytest.fixture
def admin():
    return FakeAdmin()


@pytest.fixture
def actions(admin, tmp_path):
    return GroupActions(
        ConnectionConfig("broker:9092"),
        client_id="host-1",
        state_dir=tmp_path,
        admin=admin,
    )


# --- one at a time


def test_a_second_action_is_refused_until_the_first_ends():
    runner = ActionRunner()
    hold = threading.Event()
    first = runner.start("a reset", lambda: hold.wait(30))
    with pytest.raises(HttpError) as refused:
        runner.start("another", int)
    assert refused.value.status == 409
    assert "busy, try again" in str(refused.value)
    assert "a reset has not ended" in str(refused.value)
    assert runner.is_busy
    # The HTTP application cancels the future when it stops waiting.
    assert not first.cancel()
    hold.set()
    assert first.result(30) is True
    assert not runner.is_busy
    assert runner.start("another", threading.current_thread).result(30).daemon


def test_an_error_of_an_action_is_raised_and_ends_it():
    runner = ActionRunner()
    with pytest.raises(ZeroDivisionError):
        runner.start("a reset", lambda: 1 // 0).result(30)
    assert not runner.is_busy


def test_an_action_without_a_thread_is_refused_and_blocks_no_other(monkeypatch):
    def no_thread(call, *, name):
        raise RuntimeError("can't start new thread")

    runner = ActionRunner()
    with monkeypatch.context() as patched:
        patched.setattr(group_actions, "begin", no_thread)
        with pytest.raises(HttpError, match="can't start new thread") as refused:
            runner.start("a reset", int)
    assert refused.value.status == 503
    assert not runner.is_busy
    assert runner.start("another", int).result(30) == 0


def test_a_closed_runner_starts_no_action():
    runner = ActionRunner()
    runner.close()
    with pytest.raises(HttpError) as refused:
        runner.start("a reset", int)
    assert refused.value.status == 503


# --- pauses


def test_each_action_opens_and_closes_its_own_admin_client(actions, admin):
    request = api.ResumeRequest(operation=OP_ID, reason="done", person="ann")
    assert actions.resume("billing", request, timeout_ms=7).partitions_count == 2
    assert admin.calls == [
        ("resume", "billing", {"operation": OP_ID, "reason": "done", "dry_run": False})
    ]
    (given,) = admin.given
    assert given["bootstrap_servers"] == ("broker:9092",)
    assert (given["client_id"], given["person"]) == ("host-1", "ann")
    assert given["timeout_ms"] == 7
    assert admin.closed_count == 1
    actions.resume("billing", api.ResumeRequest(), timeout_ms=None)
    # A request without a person names none, not even the user of the sidecar.
    assert admin.given[1]["person"] == ""
    assert admin.given[1]["timeout_ms"] == TIMEOUT_MS
    assert given["state_dir"] == (actions.plans.parent if actions.plans else "")


@pytest.mark.parametrize(
    "case",
    [
        (api.PauseRequest(for_ms=60_000), 5, 0),
        (api.PauseRequest(for_ms=60_000, wait=True), 5, 5),
        (api.PauseRequest(for_ms=9, wait=True), None, 9),
        (api.PauseRequest(for_ms=900_000, wait=True), None, api.WAIT_MS_MAX),
        (api.PauseRequest(until_ms=WALL_MS + 8, wait=True), None, 8),
        (api.PauseRequest(until_ms=WALL_MS - 8, wait=True), None, 1),
    ],
)
def test_a_pause_waits_for_releases_only_if_requested(
    actions, admin, monkeypatch, case
):
    request, timeout_ms, wait_ms = case
    monkeypatch.setattr(group_actions, "_wall_ms", lambda: WALL_MS)
    found = actions.pause("billing", request, timeout_ms=timeout_ms)
    assert admin.calls[0][2]["wait_ms"] == wait_ms
    assert (found.op_id, found.until_ms, found.held) == (OP_ID, 9, ())


@pytest.mark.parametrize(
    ("topics", "wanted"),
    [
        pytest.param(None, None, id="whole group"),
        pytest.param((), (), id="none, which an admin refuses"),
        pytest.param(
            ("orders", "invoices:0,3"), ("orders", "invoices:0,3"), id="some topics"
        ),
    ],
)
def test_a_pause_is_limited_to_the_topics_of_the_request(
    actions, admin, topics, wanted
):
    request = api.PauseRequest(for_ms=9, topics=topics)
    found = actions.pause("billing", request, timeout_ms=None)
    assert admin.calls[0][2]["topics"] == wanted
    assert found.topics == (topics or ())


def test_a_pause_that_waits_fails_while_claims_are_held(actions, admin):
    admin.held = (Key("billing", "orders", 0),)
    found = actions.pause("billing", api.PauseRequest(for_ms=9), timeout_ms=None)
    assert found.held == ("orders-0",)
    waiting = api.PauseRequest(for_ms=9, wait=True)
    with pytest.raises(DeadlineExceeded, match=r"orders-0 was not released within 9"):
        actions.pause("billing", waiting, timeout_ms=None)


def test_a_dry_run_of_pause_or_resume_neither_executes_nor_waits(actions, admin):
    admin.held = (Key("billing", "orders", 0),)
    request = api.PauseRequest(for_ms=9, wait=True, dry_run=True)
    found = actions.pause("billing", request, timeout_ms=None)
    assert (found.is_executed, found.held) == (False, ("orders-0",))
    ended = actions.resume("billing", api.ResumeRequest(dry_run=True), timeout_ms=None)
    assert (ended.is_executed, ended.partitions_count) == (False, 2)
    assert [given["dry_run"] for *_, given in admin.calls] == [True, True]
    assert admin.calls[0][2]["wait_ms"] == 0


# --- resets


def test_a_reset_without_execute_only_returns_its_plan(actions, admin, tmp_path):
    request = api.ResetRequest(all_topics=True, to_earliest=True, clamp=True)
    found = actions.reset("billing", request, timeout_ms=None)
    spec = PositionSpec.earliest()
    given = {"topics": None, "clamp": True, "allow_reprocess": False}
    assert admin.calls == [("plan_reset", "billing", spec, given)]
    assert (found.is_executed, found.outcome, found.undo_id) == (False, None, None)
    (row,) = found.rows
    assert (row.before, row.after, row.lag_before, row.lag_after) == (8, 5, 12, 15)
    assert found.left_out == ("orders-1",)
    assert list(tmp_path.iterdir()) == []


def test_an_executed_reset_returns_outcome_and_replaced_positions(
    actions, admin, tmp_path
):
    request = api.ResetRequest(
        topics=("orders",), to_offset=5, execute=True, reason="bad deploy"
    )
    found = actions.reset("billing", request, timeout_ms=700)
    assert admin.calls[1] == ("execute", OP_ID, "bad deploy", 700)
    assert (found.outcome, found.undo_id, found.op_id) == ("committed", OP_ID, OP_ID)
    # The position when the reset took effect, not that of the plan.
    assert (found.rows[0].before, found.rows[0].lag_before) == (7, 13)
    assert admin.stored["op_id"] == OP_ID
    assert list((tmp_path / "plans").iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "is_kept"),
    [
        (ClaimRejected("no", reason="op_open"), False),
        (DeadlineExceeded("the log did not answer"), True),
        (CoordinationError("no broker"), True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_plan_file_stays_while_its_operation_may_be_open(
    actions, admin, caplog, fault, is_kept
):
    admin.fault = fault
    request = api.ResetRequest(all_topics=True, to_latest=True, execute=True)
    with pytest.raises(type(fault)):
        actions.reset("billing", request, timeout_ms=None)
    file = actions.plans / f"{OP_ID}.json"
    assert file.exists() == is_kept
    assert (f"--continue {file} --execute" in caplog.text) == is_kept
    assert admin.closed_count == 1


def test_without_a_state_directory_no_plan_is_stored(admin):
    connection = ConnectionConfig("broker:9092")
    actions = GroupActions(connection, client_id="h", state_dir=None, admin=admin)
    request = api.ResetRequest(all_topics=True, to_latest=True, execute=True)
    assert actions.reset("billing", request, timeout_ms=None).is_executed
    assert admin.stored is None


def test_an_aborted_reset_raises_claim_rejected(actions, admin):
    admin.outcome = "aborted"
    request = api.ResetRequest(all_topics=True, to_latest=True, execute=True)
    with pytest.raises(ClaimRejected, match="set nothing") as refused:
        actions.reset("billing", request, timeout_ms=None)
    assert refused.value.reason == "aborted"


@pytest.mark.parametrize(
    ("marks", "note"),
    [
        ({}, None),
        ({"is_clamped": True}, "clamped"),
        ({"is_clamped": True, "repeats": True}, "handed out again"),
    ],
)
def test_rows_note_clamped_and_repeated_positions(actions, admin, marks, note):
    admin.plan = plan_of(**marks)
    request = api.ResetRequest(all_topics=True, to_earliest=True)
    (row,) = actions.reset("billing", request, timeout_ms=None).rows
    assert (row.note, row.repeats) == (note, "repeats" in marks)


def test_an_undo_is_refused_for_another_group_than_that_of_the_reset(actions, admin):
    admin.plan = plan_of(undoes="0b" * 16)
    request = api.UndoRequest(op_id="0b" * 16, partial=True)
    found = actions.undo("billing", request, timeout_ms=None)
    assert admin.calls == [
        ("plan_undo", "0b" * 16, {"partial": True, "allow_reprocess": False})
    ]
    assert (found.undoes, found.is_executed) == ("0b" * 16, False)
    request = api.UndoRequest(op_id="0b" * 16, execute=True)
    with pytest.raises(ConfigurationError, match="is of group 'billing'"):
        actions.undo("other", request, timeout_ms=None)
    assert [call[0] for call in admin.calls] == ["plan_undo", "plan_undo"]
    assert actions.undo("billing", request, timeout_ms=None).undo_id == OP_ID


def test_finish_lists_the_operations_that_it_ended(actions, admin):
    found = actions.finish("billing", api.FinishRequest(reason="x"), timeout_ms=None)
    assert admin.calls == [("finish", "billing", {"reason": "x"})]
    (done,) = found.operations
    assert (done.op_id, done.outcome, done.moved_count) == (OP_ID, "aborted", 0)


# --- rules and topics


TIME = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ({"to_earliest": True}, PositionSpec.earliest()),
        ({"to_latest": True}, PositionSpec.latest()),
        ({"to_current": True}, PositionSpec.current()),
        ({"to_offset": 0}, PositionSpec.to_offset(0)),
        ({"shift_by": -3}, PositionSpec.shift_by(-3)),
        ({"to_datetime": TIME}, PositionSpec.to_time(1_769_860_800_000)),
        (
            {"to_datetime": TIME.replace(tzinfo=None)},
            PositionSpec.to_time(1_769_860_800_000),
        ),
        (
            {"by_duration": timedelta(minutes=1)},
            PositionSpec.to_time(WALL_MS - 60_000),
        ),
        (
            {"offsets": (api.PartitionOffset(topic="orders", partition=0, offset=4),)},
            PositionSpec.from_offsets({PLACE: 4}),
        ),
    ],
)
def test_each_reset_rule_maps_to_a_position_spec(monkeypatch, given, spec):
    monkeypatch.setattr(group_actions, "_wall_ms", lambda: WALL_MS)
    assert spec_of(api.ResetRequest(**given)) == spec


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "nothing is given; give one of to_earliest"),
        ({"to_earliest": True, "to_offset": 0}, "to_earliest, to_offset is given"),
        (
            {"offsets": (api.PartitionOffset(topic="a", partition=0, offset=4),) * 2},
            "more than once",
        ),
        ({"by_duration": timedelta(minutes=-1)}, "not below 0"),
    ],
)
def test_a_reset_without_exactly_one_valid_rule_is_refused(given, match):
    with pytest.raises(ConfigurationError, match=match):
        spec_of(api.ResetRequest(**given))


def test_a_reset_names_its_topics_in_exactly_one_way():
    offset = api.PartitionOffset(topic="orders", partition=0, offset=4)
    assert topics_of(api.ResetRequest(all_topics=True)) is None
    assert topics_of(api.ResetRequest(topics=("a:1",))) == ("a:1",)
    assert topics_of(api.ResetRequest(offsets=(offset,))) is None
    for wrong in (
        api.ResetRequest(),
        api.ResetRequest(topics=("a",), all_topics=True),
        api.ResetRequest(topics=("a",), offsets=(offset,)),
        api.ResetRequest(all_topics=True, offsets=(offset,)),
    ):
        with pytest.raises(ConfigurationError):
            topics_of(wrong)


# --- history


def history_of(group_id, *, actions=(), groups=()):
    state = SimpleNamespace(partition=0, next_offset=12, groups=dict.fromkeys(groups))
    return SimpleNamespace(
        group_id=group_id,
        actions=actions,
        records_count=3,
        dropped_count=1,
        world=SimpleNamespace(partitions=(state,), read_at_ms=WALL_MS),
        began_at={0: 4},
    )


def test_the_history_returns_the_last_actions_up_to_the_limit(monkeypatch):
    given = []

    def read(**more):
        given.append(more)
        named = [SimpleNamespace(group_id="billing", number=n) for n in range(3)]
        return history_of("billing", actions=tuple(named))

    monkeypatch.setattr(
        group_actions, "action_to_object", lambda action: {"number": action.number}
    )
    connection = ConnectionConfig("broker:9092", coordination_topic="own")
    actions = GroupActions(connection, client_id="h", state_dir=None, history=read)
    found = actions.history("billing", limit=2, timeout_ms=7)
    (more,) = given
    assert more["bootstrap_servers"] == ("broker:9092",)
    assert (more["group_id"], more["timeout_ms"]) == ("billing", 7)
    assert more["coordination_topic"] == "own"
    assert found.actions == ({"number": 1}, {"number": 2})
    assert (found.actions_count, found.records_count) == (4, 3)
    assert found.began_at == {"0": 4}
    assert found.as_of.offsets == {"0": 12}
    assert len(actions.history("billing", limit=0, timeout_ms=None).actions) == 3


def test_the_history_of_an_unknown_group_is_refused():
    found = history_of("billing", groups=("billing",))
    connection = ConnectionConfig("broker:9092")
    actions = GroupActions(
        connection, client_id="h", state_dir=None, history=lambda *_, **__: found
    )
    assert actions.history("billing", timeout_ms=None).actions == ()
    with pytest.raises(ClaimRejected, match="is not in the log"):
        actions.history("other", timeout_ms=None)
