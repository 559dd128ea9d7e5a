"""Every small log of a partition that comes into use, read from each offset (10.2)."""

import beginvariants as planted
import pytest
import variants
from beginmodel import PROBE_LATE, BeginModel
from search import assert_found, search
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
def test_a_reader_that_knows_the_state_agrees_with_the_whole_log(
    world, record_property
):
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
def test_a_broken_fence_or_reader_breaks_the_listed_rule(monkeypatch, plant, world):
    plant(monkeypatch)
    assert_found(BeginModel(**WORLDS[world]), BROKEN[plant.__name__][1])


def test_a_broken_writer_breaks_the_listed_rule():
    assert_found(BeginModel(mistake=PROBE_LATE), BROKEN[PROBE_LATE][1])
