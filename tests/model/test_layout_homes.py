"""Every interleaving of a set position and a change of the count (PROTOCOL 8, 10)."""

import layoutvariants as planted
import pytest
import variants
from layouthomemodel import COUNT_ANY_PAUSE, ELSEWHERE, MOVES, STAYS, LayoutHomeModel
from search import assert_found, search

pytestmark = [pytest.mark.model]

KEYS = [(STAYS,), (MOVES,), (STAYS, ELSEWHERE), (MOVES, ELSEWHERE), (STAYS, MOVES)]


@pytest.mark.parametrize("keys", KEYS, ids="-".join)
@pytest.mark.parametrize("counts", [(2, 4), (4, 8)])
def test_a_set_position_is_resolved_as_its_home_decided(counts, keys, record_property):
    """S8, 8.4, and that both end, wherever the admin stops."""
    model = LayoutHomeModel(counts, keys)
    found = search(model, goal=model.is_over)
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 300


PLANTED = [
    planted.end_whatever_is_locked,
    planted.fence_beside_a_pause,
    planted.pause_while_open,
    planted.move_the_home_at_once,
]
BROKEN = variants.listed("broken homes of a changing count")


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {*(each.__name__ for each in PLANTED), COUNT_ANY_PAUSE}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_broken_fold_breaks_the_listed_rule(monkeypatch, plant):
    plant(monkeypatch)
    model = LayoutHomeModel((4, 8))
    assert_found(model, BROKEN[plant.__name__][0], goal=model.is_over)


def test_a_broken_admin_breaks_the_listed_rule():
    """The admin counts the pause of a partition that was behind the others."""
    model = LayoutHomeModel((4, 8), mistake=COUNT_ANY_PAUSE)
    assert_found(model, BROKEN[COUNT_ANY_PAUSE][0], goal=model.is_over)
