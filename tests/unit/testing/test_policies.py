"""Built-in policies pass the checks of policies; bad policies fail them."""

import pytest

from kafka_marshal.policies import BUILT_IN, Plan, Release, View, fair, greedy
from kafka_marshal.testing.policies import CHECKS, Counts, Subject, check_policy

SUBJECTS = {
    name: Subject(policy, Counts.TOPICS if name == "topic" else Counts.PARTITIONS)
    for name, policy in BUILT_IN.items()
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_built_in_policies_conform(name, check):
    check(SUBJECTS[name])


class Remembering:
    """A policy with state: it counts its calls."""

    def __init__(self):
        self.asked = 0

    def __call__(self, view: View) -> Plan:
        self.asked += 1
        return greedy(view)


def test_a_class_can_be_a_policy():
    check_policy(Remembering)


def does_nothing(view):
    return Plan()


def beyond_its_limit(view):
    return Plan(tuple(k.key for k in view.keys if k.is_claimable and not k.is_mine))


def grabs(view):
    return Plan(tuple(k.key for k in view.keys if not k.is_mine))


def drops_and_takes(view):
    mine = [k.key for k in view.keys if k.is_mine]
    return Plan(greedy(view).claim, tuple(Release(key, None) for key in mine[:1]))


def to_the_releasing_client(view):
    mine = [k.key for k in view.keys if k.is_mine]
    gone = [m.client_id for m in view.members if m.is_draining]
    taken = tuple(Release(key, gone[0]) for key in mine[:1]) if gone else ()
    return Plan(fair(view).claim, taken)


class Moody:
    def __init__(self):
        self.turn = 0

    def __call__(self, view):
        self.turn += 1
        return greedy(view) if self.turn % 2 else Plan()


BAD = [
    does_nothing,
    beyond_its_limit,
    grabs,
    drops_and_takes,
    to_the_releasing_client,
    Moody,
]


@pytest.mark.parametrize("policy", BAD)
def test_a_bad_policy_fails_at_least_one_check(policy):
    caught = []
    for check in CHECKS:
        try:
            check(Subject(policy))
        except AssertionError as error:
            caught.append(str(error))
    assert caught


def test_a_policy_of_partitions_fails_the_checks_of_whole_topics():
    check_policy(greedy)
    with pytest.raises(AssertionError):
        check_policy(greedy, counts=Counts.TOPICS)
