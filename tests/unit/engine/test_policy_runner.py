"""A failing policy is reported; its last valid plan stays in force."""

from types import SimpleNamespace

import pytest
from enginekit import H

from kafka_marshal.engine.policy_runner import PolicyRunner
from kafka_marshal.policies import KeyView, Plan, Release, View
from kafka_marshal.protocol.types import Key
from simulator.clock import InlineBackground

A, B, C = (Key("g", "t", number) for number in range(3))


def view(*rows):
    keys = tuple(
        KeyView(
            key=key, owner="me" if mine else None, is_mine=mine, is_claimable=not mine
        )
        for key, mine in rows
    )
    return View(me="me", keys=keys, members=())


VIEW = view((A, True), (B, False))


class Context:
    now_ms = 0
    heartbeat_interval_ms = H

    def __init__(self, policies=None):
        self.reported = []
        self.ports = SimpleNamespace(policies=policies or InlineBackground())

    def observe(self, name, fields):
        self.reported.append((name, fields))


def planned(plan):
    context = Context()
    return PolicyRunner(lambda _view: plan).plan(VIEW, context), context.reported


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(), id="nothing"),
        pytest.param(Plan((B,)), id="claim"),
        pytest.param(Plan((A, B), why={B: "why"}), id="mine-as-well"),
        pytest.param(Plan((), (Release(A, None),)), id="release"),
        pytest.param(
            Plan((), (Release(key=A, successor="b", reason="tired", detail="of it"),)),
            id="reason",
        ),
    ],
)
def test_a_valid_plan_is_returned(plan):
    assert planned(plan) == (plan, [])


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        pytest.param(None, "returned NoneType", id="none"),
        pytest.param(
            SimpleNamespace(claim=(), release=()), "not a Plan", id="like-one"
        ),
        pytest.param(Plan([B]), "must be tuples", id="list"),
        pytest.param(Plan((), [Release(A, None)]), "must be tuples", id="list-too"),
        pytest.param(Plan((B,), why=3), "must be a mapping", id="why"),
        pytest.param(Plan((C,)), "not in the view", id="unseen"),
        pytest.param(Plan(("t-0",)), "not in the view", id="no-key"),
        pytest.param(Plan((tuple(B),)), "not in the view", id="tuple"),
        pytest.param(Plan(([*B],)), "not in the view", id="list-key"),
        pytest.param(Plan((Key("g", [], 0),)), "unhashable", id="unhashable"),
        pytest.param(Plan((), (Release(tuple(A), None),)), "not held", id="tuple-too"),
        pytest.param(Plan((), (Release([*A], None),)), "not held", id="no-key-either"),
        pytest.param(Plan((), (Release(B, None),)), "not held", id="not-mine"),
        pytest.param(Plan((), (Release(C, None),)), "not held", id="unseen-release"),
        pytest.param(Plan((), (A,)), "not held", id="no-release"),
        pytest.param(Plan((), (Release(A, 7),)), "successor must be", id="number"),
        pytest.param(
            Plan((), (Release(A, "b c"),)), "successor must be", id="bad-name"
        ),
        pytest.param(Plan((), (Release(A, None, "x" * 65),)), "reason", id="long"),
        pytest.param(Plan((), (Release(A, None, ""),)), "reason", id="no-reason"),
        pytest.param(
            Plan((), (Release(key=A, successor=None, reason="r", detail=5),)),
            "detail must be a string",
            id="detail",
        ),
    ],
)
def test_an_invalid_plan_is_reported(plan, problem):
    got, ((name, fields),) = planned(plan)
    assert got == Plan()
    assert name == "policy_failed"
    assert problem in fields["error"]


def test_the_last_valid_plan_stays_in_force():
    answers = [Plan((B, A), (Release(A, None),)), ZeroDivisionError("x"), None]

    def policy(_view):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    context, advice = Context(), PolicyRunner(policy)
    advice.plan(VIEW, context)
    assert advice.plan(VIEW, context) == Plan((B, A)), "nothing is given up twice"
    assert advice.plan(view((A, True)), context) == Plan((A,))
    assert [name for name, _ in context.reported] == ["policy_failed"] * 2


def test_a_repeated_failure_is_reported_once_until_the_policy_recovers():
    plans = [None, None, Plan(), None]
    context, advice = Context(), PolicyRunner(lambda _view: plans.pop(0))
    for _ in range(4):
        advice.plan(VIEW, context)
    assert len(context.reported) == 2


def test_a_pure_policy_runs_once_for_each_view(monkeypatch):
    asked = []

    def policy(view):
        asked.append(view)
        return Plan((B,)) if len(view.keys) > 1 else Plan()

    monkeypatch.setattr("kafka_marshal.engine.policy_runner.PURE_POLICIES", (policy,))
    context, advice = Context(), PolicyRunner(policy)
    again, less = view((A, True), (B, False)), view((A, True))
    plans = [advice.plan(each, context) for each in (VIEW, again, less, less, VIEW)]
    assert plans == [Plan((B,)), Plan((B,)), Plan(), Plan(), Plan((B,))]
    assert asked == [VIEW, less, VIEW]


def test_a_custom_policy_runs_each_time():
    class Counting:
        __hash__ = None

        def __init__(self):
            self.count = 0

        def __eq__(self, other):
            return True

        def __call__(self, _view):
            self.count += 1
            return Plan()

    policy = Counting()
    advice = PolicyRunner(policy)
    for _ in range(3):
        advice.plan(VIEW, Context())
    assert policy.count == 3


def test_a_policy_that_does_not_return_is_reported_once():
    """Its late answer counts for the keys that the view has by then."""
    held = InlineBackground(is_held=True)
    context, calls = Context(held), []

    def policy(asked):
        calls.append(asked)
        return Plan((B, C), (Release(A, None),))

    runner = PolicyRunner(policy)
    more = view((A, True), (B, False), (C, False))
    for now_ms in (0, 50, 100, H, H + 1, H + 2):
        context.now_ms = now_ms
        assert runner.plan(more, context) == Plan()
        assert runner.is_awaited(now_ms) == (now_ms < 100)
    ((name, fields),) = context.reported
    assert (name, fields["error"]) == ("policy_failed", f"it did not return for {H} ms")
    held.run_waiting()
    assert runner.plan(view((A, False), (B, False)), context) == Plan((B,))
    assert calls == [more]
    assert not runner.is_awaited(H + 3)
    runner.plan(VIEW, context)
    held.run_waiting()
    assert calls[1:] == [VIEW]
