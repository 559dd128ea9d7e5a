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
    IMPORT_BEFORE_FINAL,
    IMPORT_THOUGH_LOCKED,
    IMPORT_THOUGH_QUIET,
    KEEP_THE_ERA,
    LayoutModel,
    stuck_states,
)
from search import search
from slices import slice_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

WORLDS = {
    "more": {},
    "more-after-a-reset": {"resets": True},
    "more-again": {"again": True},
    "fewer-with-a-lock": {"shrinks": True, "stages": True},
}
LARGER_WORLDS = WORLDS | {
    "fewer": {"shrinks": True},
    "fewer-after-a-reset": {"shrinks": True, "resets": True},
    "more-again-after-a-reset": {"again": True, "resets": True},
}
SEARCHED = slice_of(quick=WORLDS, full=LARGER_WORLDS)


@pytest.mark.parametrize("world", SEARCHED)
def test_a_key_that_moves_has_one_owner(world, record_property):
    """S3, S4 and S7 over both partitions; what is final never changes."""
    found = search(LayoutModel(**SEARCHED[world]))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


@pytest.mark.parametrize("world", slice_of(quick=["more-again"], full=LARGER_WORLDS))
def test_a_key_that_moves_always_finds_an_owner(world, record_property):
    count, stuck = stuck_states(LayoutModel(**LARGER_WORLDS[world]))
    record_property("states", count)
    assert stuck == []


PLANTED = [
    (planted.obey_a_late_beat, None, "more"),
    (planted.claim_an_unknown_key_before_done, None, "more"),
    (planted.obey_a_second_import, None, "more"),
    (planted.keep_an_earlier_life, None, "more-again"),
    (planted.claim_a_moving_key, None, "more"),
    (planted.count_no_imports, DONE_EARLY, "more"),
    (planted.end_with_an_open_source, END_EARLY, "more"),
    (planted.keep_the_era, KEEP_THE_ERA, "more"),
]
MISTAKES = [
    (IMPORT_BEFORE_FINAL, "more"),
    (IMPORT_THOUGH_QUIET, "more-after-a-reset"),
    (IMPORT_THOUGH_LOCKED, "fewer-with-a-lock"),
    (DONE_UNCHECKED, "more"),
    (END_BEFORE_DONE, "more"),
]
BROKEN = variants.listed("broken changes of the count")


def test_the_table_lists_every_variant():
    found = {plant.__name__: world for plant, _, world in PLANTED}
    assert {name: row[1] for name, row in BROKEN.items()} == found | dict(MISTAKES)


@pytest.mark.parametrize(
    ("plant", "mistake", "world"), PLANTED, ids=[each[0].__name__ for each in PLANTED]
)
def test_a_broken_fold_is_found(monkeypatch, plant, mistake, world):
    plant(monkeypatch)
    _assert_found(plant.__name__, LayoutModel(**WORLDS[world], mistake=mistake))


@pytest.mark.parametrize(("mistake", "world"), MISTAKES)
def test_a_broken_writer_is_found(mistake, world):
    _assert_found(mistake, LayoutModel(**WORLDS[world], mistake=mistake))


def _assert_found(name, model):
    found = search(model)
    print(found)  # noqa: T201 - the way there, shown with -s
    assert found.broken is not None
    assert found.broken.partition(":")[0] == BROKEN[name][2]
    assert found.trace


@pytest.mark.parametrize(
    "mistake",
    slice_of(quick=[END_EARLY], full=[DONE_EARLY, END_EARLY, KEEP_THE_ERA]),
)
def test_the_fold_refuses_what_would_break_it(mistake):
    """The variants above need a writer that tries."""
    assert search(LayoutModel(mistake=mistake)).broken is None
