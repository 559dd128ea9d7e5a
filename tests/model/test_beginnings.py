"""Every small log of a partition that comes into use, read from each place (10.2)."""

import beginvariants as planted
import pytest
import variants
from beginmodel import PROBE_LATE, BeginModel
from search import search
from slices import slice_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

WORLDS = {
    "new": {},
    "new-goes-back": {"length": 5, "cuts": True},
    "lived": {"length": 5, "lived": True},
    "lived-goes-back": {"length": 4, "lived": True, "cuts": True},
}
LARGER_WORLDS = {
    "new-longer": {"length": 7},
    "lived-longer-goes-back": {"length": 5, "lived": True, "cuts": True},
}
SEARCHED = slice_of(quick=WORLDS, full=WORLDS | LARGER_WORLDS)


@pytest.mark.parametrize("world", SEARCHED)
def test_who_knows_the_state_has_that_of_the_whole_log(world, record_property):
    found = search(BeginModel(**SEARCHED[world]))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


PLANTED = [
    (planted.keep_the_clocks, "new"),
    (planted.keep_the_reserved_keys, "lived"),
    (planted.keep_the_eras, "lived"),
    (planted.take_any_fence, "new"),
    (planted.take_any_probe, "new"),
]
BROKEN = variants.listed("broken beginnings of a partition")


def test_the_table_lists_every_variant():
    found = {plant.__name__: world for plant, world in PLANTED} | {PROBE_LATE: "new"}
    assert {name: row[0] for name, row in BROKEN.items()} == found


@pytest.mark.parametrize(
    ("plant", "world"), PLANTED, ids=[each[0].__name__ for each in PLANTED]
)
def test_a_broken_rule_is_found(monkeypatch, plant, world):
    plant(monkeypatch)
    _assert_found(plant.__name__, BeginModel(**WORLDS[world]))


def test_a_broken_writer_is_found():
    _assert_found(PROBE_LATE, BeginModel(mistake=PROBE_LATE))


def _assert_found(name, model):
    found = search(model)
    print(found)  # noqa: T201 - the way there, shown with -s
    assert found.broken is not None
    assert found.broken.partition(":")[0] == BROKEN[name][1]
    assert found.trace
