import pytest

from kafka_marshal.adoption.plan import Action, AdoptionPlan, Finding, steps_of
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.types import TopicPartition

PLACE = TopicPartition("orders", 0)
ALL = LogRange(0, 100)


def found(offset=50, log_range=ALL, position=None, owner=None):
    return Finding(PLACE, offset, "committed", log_range, position, owner)


@pytest.mark.parametrize(
    ("finding", "action", "position", "lag"),
    [
        pytest.param(found(50), Action.SET, 50, 50, id="ordinary"),
        pytest.param(found(0), Action.SET, 0, 100, id="offset-0-is-an-offset"),
        pytest.param(found(100), Action.SET, 100, 0, id="at-the-end"),
        pytest.param(found(101), Action.BEYOND, None, None, id="beyond-the-end"),
        pytest.param(
            found(5, LogRange(20, 100)), Action.SET, 20, 80, id="below-the-start"
        ),
        pytest.param(
            found(20, LogRange(20, 100)), Action.SET, 20, 80, id="at-the-start"
        ),
        pytest.param(found(position=50), Action.DONE, 50, 50, id="done"),
        pytest.param(found(position=60), Action.KEEP, 60, 40, id="log-is-ahead"),
        pytest.param(found(position=10), Action.KEEP, 10, 90, id="log-is-behind"),
        pytest.param(
            found(101, position=60), Action.KEEP, 60, 40, id="log-wins-beyond-too"
        ),
        pytest.param(found(owner="w1"), Action.HELD, None, None, id="held"),
        pytest.param(
            found(position=50, owner="w1"), Action.HELD, 50, 50, id="held-and-done"
        ),
        pytest.param(found(log_range=None), Action.GONE, None, None, id="gone"),
    ],
)
def test_each_partition_gets_one_action(finding, action, position, lag):
    (step,) = steps_of([finding])
    assert (step.action, step.position, step.lag) == (action, position, lag)
    assert step.before == finding.position
    assert step.offset == finding.offset


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        pytest.param(found(5, LogRange(20, 100)), "took 15 unproc", id="below"),
        pytest.param(found(101), "ends at 100", id="beyond"),
        pytest.param(found(owner="w1"), "'w1'", id="held"),
        pytest.param(found(position=60), "stands", id="keep"),
    ],
)
def test_what_is_out_of_the_ordinary_has_a_note(finding, words):
    (step,) = steps_of([finding])
    assert words in step.note


def test_what_is_ordinary_has_none():
    assert [step.note for step in steps_of([found(), found(position=50)])] == [None] * 2


def test_steps_come_in_order_and_blocked_ones_are_told_apart():
    others = [
        Finding(TopicPartition("orders", number), 1, "committed", LogRange(0, 9))
        for number in (11, 2)
    ]
    plan = AdoptionPlan("g", "old", None, False, steps_of([*others, found(owner="w")]))
    assert [step.partition.partition for step in plan.steps] == [0, 2, 11]
    assert [step.partition for step in plan.blocked] == [PLACE]
    assert [step.partition.partition for step in plan.of(Action.SET)] == [2, 11]
