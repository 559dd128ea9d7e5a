"""A policy that misbehaves is told and survived; its last good plan stands."""

from types import SimpleNamespace

import pytest
from enginekit import H, held_by, wish, world

from kafka_marshal.engine.advice import Advice
from kafka_marshal.policies import KeyView, Plan, Release, View, greedy
from kafka_marshal.protocol.types import Key

A, B, C = (Key("g", "t", number) for number in range(3))


def view(*rows):
    keys = tuple(
        KeyView(key, "me" if mine else None, is_mine=mine, is_claimable=not mine)
        for key, mine in rows
    )
    return View("me", keys, ())


VIEW = view((A, True), (B, False))


class Context:
    def __init__(self):
        self.told = []

    def observe(self, name, fields):
        self.told.append((name, fields))


def planned(plan):
    context = Context()
    return Advice(lambda _view: plan).plan(VIEW, context), context.told


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(), id="nothing"),
        pytest.param(Plan((B,)), id="claim"),
        pytest.param(Plan((A, B), why={B: "why"}), id="mine-as-well"),
        pytest.param(Plan((), (Release(A, None),)), id="release"),
        pytest.param(Plan((), (Release(A, "b", "tired", "of it"),)), id="reason"),
    ],
)
def test_a_plan_that_makes_sense_is_followed(plan):
    assert planned(plan) == (plan, [])


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        pytest.param(None, "returned NoneType", id="none"),
        pytest.param(SimpleNamespace(claim=(), release=()), "no Plan", id="like-one"),
        pytest.param(Plan([B]), "must be tuples", id="list"),
        pytest.param(Plan((), [Release(A, None)]), "must be tuples", id="list-too"),
        pytest.param(Plan((B,), why=3), "must be a mapping", id="why"),
        pytest.param(Plan((C,)), "not in the view", id="unseen"),
        pytest.param(Plan(("t-0",)), "not in the view", id="no-key"),
        pytest.param(Plan((), (Release(B, None),)), "not held", id="not-mine"),
        pytest.param(Plan((), (Release(C, None),)), "not held", id="unseen-release"),
        pytest.param(Plan((), (A,)), "not held", id="no-release"),
        pytest.param(Plan((), (Release(A, 7),)), "successor", id="number"),
        pytest.param(Plan((), (Release(A, "b c"),)), "successor", id="bad-name"),
        pytest.param(Plan((), (Release(A, None, "x" * 65),)), "reason", id="long"),
        pytest.param(Plan((), (Release(A, None, ""),)), "reason", id="no-reason"),
        pytest.param(Plan((), (Release(A, None, "r", 5),)), "no text", id="detail"),
    ],
)
def test_what_is_no_plan_is_told(plan, problem):
    got, ((name, fields),) = planned(plan)
    assert got == Plan()
    assert name == "policy_failed"
    assert problem in fields["error"]


def test_the_last_good_plan_stands_for_what_is_still_there():
    answers = [Plan((B, A), (Release(A, None),)), ZeroDivisionError("x"), None]

    def policy(_view):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    context, advice = Context(), Advice(policy)
    advice.plan(VIEW, context)
    assert advice.plan(VIEW, context) == Plan((B, A)), "nothing is given up twice"
    assert advice.plan(view((A, True)), context) == Plan((A,))
    assert [name for name, _ in context.told] == ["policy_failed"] * 2


def test_the_same_failure_is_told_once_until_it_recovers():
    plans = [None, None, Plan(), None]
    context, advice = Context(), Advice(lambda _view: plans.pop(0))
    for _ in range(4):
        advice.plan(VIEW, context)
    assert len(context.told) == 2


def test_a_policy_that_sees_only_the_view_is_asked_once_for_each(monkeypatch):
    asked = []

    def policy(view):
        asked.append(view)
        return Plan((B,)) if len(view.keys) > 1 else Plan()

    monkeypatch.setattr("kafka_marshal.engine.advice.FORGETFUL", (policy,))
    context, advice = Context(), Advice(policy)
    again, less = view((A, True), (B, False)), view((A, True))
    plans = [advice.plan(each, context) for each in (VIEW, again, less, less, VIEW)]
    assert plans == [Plan((B,)), Plan((B,)), Plan(), Plan(), Plan((B,))]
    assert asked == [VIEW, less, VIEW]


def test_a_policy_of_others_is_asked_each_time_whatever_it_is_like():
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
    advice = Advice(policy)
    for _ in range(3):
        advice.plan(VIEW, Context())
    assert policy.count == 3


def test_a_consumer_survives_its_policy():
    """Over a whole log: the engine lives, claims are kept, and it goes on after."""
    cluster = world(records=[3, 3])
    mood = []

    def policy(view):
        if mood:
            raise RuntimeError(mood[0])
        return greedy(view)

    node = cluster.node("a", wish=wish(policy=policy))
    cluster.run_until(held_by(node, 2), H)
    mood.append("no")
    polled = {}
    for _ in range(3 * H // 20):
        cluster.run(20)
        polled |= node.consumer.poll(0)
    assert node.engine.failure is None
    assert len(node.held) == 2
    assert len(polled) == 2
    (event,) = node.observer.named("policy_failed")
    assert event.fields == {"policy": "policy", "error": "RuntimeError('no')"}
    mood.clear()
    cluster.node("b", wish=wish())
    cluster.run(2 * H)
    assert len(node.observer.named("policy_failed")) == 1
