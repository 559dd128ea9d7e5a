"""Every state of small worlds in which a key moves (PROTOCOL 10).

The fold is the product's. ``make model`` searches the larger worlds.
"""

import layoutvariants as planted
import pytest
import variants
from layoutmodel import (
    DONE_EARLY,
    DONE_UNCHECKED,
    END_BEFORE_DONE,
    END_EARLY,
    FORGET_THE_END,
    IMPORT_BEFORE_FINAL,
    IMPORT_THOUGH_LOCKED,
    IMPORT_THOUGH_QUIET,
    KEEP_THE_ERA,
    KEEP_THE_LEASE,
    USE_WHAT_IS_IMPORTED,
    LayoutModel,
    uncovered,
)
from search import assert_found, reachable, search
from slices import slice_of
from stayingmodel import StayingModel

pytestmark = [pytest.mark.model, pytest.mark.slow]

CUTS = {"cuts": (0, 1), "grants": 1}
WORLDS = {
    "more": {},
    "more-after-a-reset": {"resets": True},
    "more-again": {"counts": (2, 1, 2), "begin": 1},
    "more-with-handoffs": {"handoffs": True},
    "more-and-fewer": {"counts": (2, 4, 2)},
    "fewer": {"counts": (2, 1)},
    "fewer-with-a-lock": {"counts": (2, 1), "stages": True},
    "fewer-with-handoffs": {"counts": (2, 1), "handoffs": True},
    "fewer-and-more": {"counts": (2, 1, 2)},
}
TRUNCATED = {
    "more-truncated": CUTS,
    "more-and-fewer-partition-0-truncated": {
        "counts": (2, 4, 2),
        "cuts": (0,),
        "grants": 1,
    },
    "more-truncated-two-operations": CUTS | {"cuts": (0,), "others": True},
    "fewer-truncated": CUTS | {"counts": (2, 1)},
}
LARGER_WORLDS = {
    "fewer-after-a-reset": {"counts": (2, 1), "resets": True},
    "more-again-after-a-reset": {"counts": (2, 1, 2), "begin": 1, "resets": True},
    "more-again-with-handoffs": {"counts": (2, 1, 2), "begin": 1, "handoffs": True},
    "more-and-more": {"counts": (2, 4, 8)},
    "more-and-fewer-with-handoffs": {"counts": (2, 4, 2), "handoffs": True},
    "more-truncated-two-grants": {"cuts": (0, 1)},
    "more-truncated-after-a-reset": CUTS | {"resets": True},
    "more-again-truncated": CUTS | {"counts": (2, 1, 2), "begin": 1},
    "more-apart-from-0-truncated": CUTS | {"counts": (2, 4), "cuts": (0, 1, 2)},
    "more-and-more-truncated": CUTS | {"counts": (2, 4, 8), "cuts": (0, 1, 2)},
    "more-truncated-with-handoffs": CUTS | {"handoffs": True},
    "fewer-truncated-two-operations": CUTS | {"counts": (2, 1), "others": True},
    "fewer-truncated-two-grants": {"counts": (2, 1), "cuts": (0, 1)},
    "fewer-truncated-with-a-lock": CUTS | {"counts": (2, 1), "stages": True},
}
ALL = WORLDS | TRUNCATED
SEARCHED = slice_of(quick=ALL, full=ALL | LARGER_WORLDS)


@pytest.mark.parametrize("world", SEARCHED)
def test_a_moving_key_has_one_owner_and_can_always_get_one(world, record_property):
    """S3, S4 and S7 over all partitions; a final key never changes."""
    model = LayoutModel(**SEARCHED[world])
    found = search(model, goal=model.is_there)
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 500


IN_FLIGHT = {
    "more-1": {"in_flight": 1},
    "fewer-1": {"in_flight": 1, "counts": (2, 1), "stages": True},
}
MORE_IN_FLIGHT = {
    "more-2": {"in_flight": 2},
    "again-2": {"in_flight": 2, "counts": (2, 1, 2), "begin": 1, "grants": 1},
}
SENT = slice_of(quick=IN_FLIGHT, full=IN_FLIGHT | MORE_IN_FLIGHT)


@pytest.mark.parametrize("world", SENT)
def test_delayed_records_reach_no_additional_states(world, record_property):
    """So the worlds above, in which records land at once, cover delayed records."""
    options = dict(SENT[world])
    few = reachable(LayoutModel(**options | {"in_flight": 0}))
    many = reachable(LayoutModel(**options))
    record_property("states", len(many))
    assert len(many) > 10 * len(few)
    assert uncovered(few, many) == []


STAYING = {"stays-in-a-source": (1, 2), "stays-in-a-target": (2, 1)}


@pytest.mark.parametrize(
    "world", slice_of(quick=["stays-in-a-source"], full=[*STAYING])
)
def test_a_change_does_not_affect_a_key_that_stays(world, record_property):
    """Each verdict about the key is that of a partition without the change."""
    found = search(StayingModel(STAYING[world]))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


NOTICED = [
    (planted.move_every_key, "stays-in-a-source"),
    (planted.refuse_every_late_beat, "stays-in-a-source"),
    (planted.import_every_key, "stays-in-a-target"),
    (planted.drop_every_key, "stays-in-a-source"),
    (planted.forget_the_eras, "stays-in-a-source"),
]
PLANTED = [
    (planted.obey_a_late_beat, None, "more"),
    (planted.obey_a_late_release, None, "more-with-handoffs"),
    (planted.claim_an_unknown_key_before_done, None, "more"),
    (planted.obey_a_second_import, None, "more"),
    (planted.keep_an_earlier_life, None, "more-again"),
    (planted.keep_what_a_missed_final_left, None, "more-and-fewer"),
    (planted.claim_a_moving_key, None, "more"),
    (planted.count_no_imports, DONE_EARLY, "more"),
    (planted.end_with_an_open_source, END_EARLY, "more"),
    (planted.fence_over_an_open_change, None, "more-and-fewer"),
    (planted.keep_the_era, KEEP_THE_ERA, "more"),
    (planted.forget_the_leader_epoch, None, "more-truncated"),
]
MISTAKES = [
    (IMPORT_BEFORE_FINAL, "more"),
    (IMPORT_THOUGH_QUIET, "more-after-a-reset"),
    (IMPORT_THOUGH_LOCKED, "fewer-with-a-lock"),
    (DONE_UNCHECKED, "more"),
    (END_BEFORE_DONE, "more"),
    (KEEP_THE_LEASE, "more-truncated"),
    (USE_WHAT_IS_IMPORTED, "more-truncated"),
    (FORGET_THE_END, "more-and-fewer-partition-0-truncated"),
]
BROKEN = variants.listed("broken changes of the count")


def test_the_table_lists_every_variant():
    found = {plant.__name__: world for plant, _, world in PLANTED}
    found |= {plant.__name__: world for plant, world in NOTICED}
    assert {name: row[0] for name, row in BROKEN.items()} == found | dict(MISTAKES)


@pytest.mark.parametrize(
    ("plant", "mistake", "world"), PLANTED, ids=[each[0].__name__ for each in PLANTED]
)
def test_a_broken_fold_breaks_the_listed_rule(monkeypatch, plant, mistake, world):
    plant(monkeypatch)
    model = LayoutModel(**ALL[world], mistake=mistake)
    assert_found(model, BROKEN[plant.__name__][1], goal=model.is_there)


@pytest.mark.parametrize(("mistake", "world"), MISTAKES)
def test_a_broken_writer_breaks_the_listed_rule(mistake, world):
    model = LayoutModel(**ALL[world], mistake=mistake)
    assert_found(model, BROKEN[mistake][1], goal=model.is_there)


@pytest.mark.parametrize(
    ("plant", "world"), NOTICED, ids=[each[0].__name__ for each in NOTICED]
)
def test_a_fold_that_affects_a_staying_key_breaks_the_listed_rule(
    monkeypatch, plant, world
):
    plant(monkeypatch)
    assert_found(StayingModel(STAYING[world]), BROKEN[plant.__name__][1])


@pytest.mark.parametrize("mistake", [DONE_EARLY, END_EARLY, KEEP_THE_ERA])
def test_the_fold_refuses_the_records_of_a_broken_writer(mistake):
    """So some variants above need a broken fold and a broken writer."""
    assert search(LayoutModel(mistake=mistake)).broken is None
