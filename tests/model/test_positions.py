"""Every state of small worlds in which admins set positions (PROTOCOL 8.1 to 8.5).

The fold is the product's. ``make model`` searches the larger worlds.
"""

import pytest
import variants
from positionsmodel import (
    ASK_BEFORE_THE_PAUSE,
    COMMIT_PER_PARTITION,
    DECIDE_EARLY,
    FIRST_TOPIC,
    HOME,
    OTHER,
    PAUSE_THE_OTHER_FIRST,
    RESOLVE_BY_AN_OLD_HOME,
    RESOLVE_HOME_FIRST,
    RESOLVE_WITHOUT_HOME,
    Operation,
    PositionsModel,
)
from search import assert_found, search
from slices import slice_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

BACK, FORWARD = Operation(position=0), Operation(position=7)
AGAIN = Operation(position=3)
AT_HOME = Operation(position=7, stages=(((0,),), ()))
ELSEWHERE = Operation(position=7, stages=((), ((0,),)))
UNDO = Operation(undoes=1)
KEPT = Operation(position=6, may_go_back=False)
ALL_KEYS = Operation(stages=(((0,), (1,)), ((0, 1),)))
LAST_KEYS = Operation(position=7, stages=(((1,),), ((1,),)))
TOGETHER = Operation(stages=(((0, 1),), ((0,),)))
APART = Operation(stages=(((0,), (1,)), ((0,),)))

OWNED = {"owned": True, "claims": 1}
GRANTED = {"granted": ((5,), (None,)), "grants_from": (0, 5, 6, 7)}
RECREATED = {"recreated": True, "topics": ((FIRST_TOPIC,), (None,))}
TWO_KEYS = {"operations": [ALL_KEYS, LAST_KEYS], "key_counts": (2, 2)}
WORLDS = {
    "owners": {"operations": [BACK], "in_flight": 2} | OWNED,
    "two-operations": {"operations": [BACK, FORWARD], "in_flight": 2},
    "then-home-alone": {"operations": [BACK, AT_HOME], "in_flight": 2},
    "then-the-other-alone": {"operations": [BACK, ELSEWHERE], "in_flight": 2},
    "at-most-once": {"operations": [BACK]} | OWNED | GRANTED,
    "forward-only": {"operations": [KEPT]}
    | OWNED
    | GRANTED
    | {"granted": ((5,), (5,))},
    "undo": {"operations": [BACK, UNDO], "claims": 1, "recreated": True} | GRANTED,
    "recreated-topic": {"operations": [BACK]} | OWNED | RECREATED,
    "two-keys": {"in_flight": 2} | TWO_KEYS,
    "two-owned-keys": {"operations": [TOGETHER], "key_counts": (2, 1), "owned": True},
}
LARGER_WORLDS = {
    "three-operations": {"operations": [BACK, FORWARD, AGAIN], "in_flight": 2},
    "three-in-flight": WORLDS["owners"] | {"in_flight": 3},
    "owners-and-two-operations": {"operations": [BACK, FORWARD]} | OWNED,
    "two-claims": {"operations": [BACK]} | OWNED | {"claims": 2},
    "at-most-once-and-two-operations": {"operations": [BACK, FORWARD], "claims": 1}
    | GRANTED
    | {"grants_from": (0, 5), "in_flight": 2},
    "forward-only-two-in-flight": WORLDS["forward-only"] | {"in_flight": 2},
    "undo-two-in-flight": WORLDS["undo"] | {"in_flight": 2},
    "recreated-topic-two-in-flight": WORLDS["recreated-topic"] | {"in_flight": 2},
    "two-owned-keys-apart": {"operations": [APART], "key_counts": (2, 1)} | OWNED,
}


@pytest.mark.parametrize("world", slice_of(quick=WORLDS, full=LARGER_WORLDS))
def test_an_operation_sets_all_its_keys_or_none(world, record_property):
    """S8, S4, S3 above the set position, 8.3, 8.5, and that all keys are unlocked."""
    options = slice_of(quick=WORLDS, full=LARGER_WORLDS)[world]
    model = PositionsModel(**options)
    found = search(model)
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000
    assert model.moved() == set(model.operations)


def test_a_model_state_survives_conversion_to_product_state():
    """So the details that the model drops decide nothing."""
    model = PositionsModel(**WORLDS["recreated-topic"])
    assert search(model).broken is None
    for at in (HOME, OTHER):
        # A part does not record its partition, and fits either one.
        for part in model.parts()[:: slice_of(quick=10, full=1)]:
            state = model.state(at, part.fold)
            assert model.view(at, state) == part.fold


PLANTED = [
    (variants.pause_again, "two-operations"),
    (variants.forget_operations_at_home, "two-operations"),
    (variants.stage_a_held_key, "owners"),
    (variants.stage_for_another_topic, "recreated-topic"),
    (variants.stage_over_a_lock, "two-operations"),
    (variants.stage_what_is_free, "two-owned-keys"),
    (variants.stage_after_the_end, "owners"),
    (variants.decide_after_the_pause, "two-operations"),
    (variants.decide_over_a_verdict, "then-the-other-alone"),
    (variants.drop_the_verdict_with_the_pause, "two-operations"),
    (variants.keep_the_owner_of_a_staged_key, "at-most-once"),
    (variants.keep_granted, "at-most-once"),
    (variants.keep_an_earlier_previous, "two-operations"),
    (variants.claim_a_locked_key, "owners"),
    (variants.forget_a_locked_key, "owners"),
    (variants.forget_a_silent_key_that_is_locked, "owners"),
    (variants.grant_while_paused, "forward-only"),
    (variants.obey_old_owners, "owners"),
    (variants.resolve_any_lock, "two-operations"),
    (variants.resolve_one_key, "two-keys"),
    (variants.ignore_a_resolve_after_the_pause, "owners"),
    (variants.abort_what_is_decided, "two-operations"),
]
MISTAKES = [
    (COMMIT_PER_PARTITION, "owners"),
    (RESOLVE_WITHOUT_HOME, "two-operations"),
    (RESOLVE_HOME_FIRST, "then-home-alone"),
    (RESOLVE_BY_AN_OLD_HOME, "owners"),
    (PAUSE_THE_OTHER_FIRST, "two-operations"),
    (ASK_BEFORE_THE_PAUSE, "forward-only"),
    (DECIDE_EARLY, "two-keys"),
]
BROKEN = variants.listed("broken set positions")


def test_the_table_lists_every_variant():
    planted = {plant.__name__: world for plant, world in PLANTED}
    assert {name: row[0] for name, row in BROKEN.items()} == planted | dict(MISTAKES)


@pytest.mark.parametrize(
    ("plant", "world"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED]
)
def test_a_broken_fold_breaks_the_listed_rule(monkeypatch, plant, world):
    plant(monkeypatch)
    assert_found(PositionsModel(**WORLDS[world]), BROKEN[plant.__name__][1])


@pytest.mark.parametrize(("mistake", "world"), MISTAKES)
def test_a_broken_tool_breaks_the_listed_rule(monkeypatch, mistake, world):
    if mistake == COMMIT_PER_PARTITION:
        variants.commit_per_partition(monkeypatch)
    assert_found(PositionsModel(**WORLDS[world], mistake=mistake), BROKEN[mistake][1])


@pytest.mark.parametrize(
    ("plant", "mistake"),
    [(None, RESOLVE_HOME_FIRST), (variants.decide_over_a_verdict, None)],
)
def test_two_operations_of_the_same_keys_do_not_show_the_mistake(
    monkeypatch, plant, mistake
):
    """So worlds whose second operation has other keys are needed."""
    if plant is not None:
        plant(monkeypatch)
    world = WORLDS["two-operations"]
    assert search(PositionsModel(**world, mistake=mistake)).broken is None
