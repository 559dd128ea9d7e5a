"""Every state of a small world in which an owner seeks (PROTOCOL 6.6).

The fold is the product's. ``make model`` searches the larger world.
"""

import pytest
import variants
from search import assert_found, search
from seekmodel import (
    CONFIRM_WITH_RECORDS_ON_THEIR_WAY,
    CONFIRM_WITHOUT_THE_LOG,
    SeekModel,
)
from slices import slice_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

MISTAKES = [CONFIRM_WITH_RECORDS_ON_THEIR_WAY, CONFIRM_WITHOUT_THE_LOG]
BROKEN = variants.listed("broken owners that seek")


def test_a_takeover_skips_nothing_after_a_confirmed_seek(record_property):
    found = search(SeekModel(records=slice_of(quick=3, full=4)))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


def test_the_table_lists_every_variant():
    assert {name: row[0] for name, row in BROKEN.items()} == dict.fromkeys(
        MISTAKES, "6.6"
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_owner_breaks_the_listed_rule(mistake):
    assert_found(SeekModel(records=3, mistake=mistake), BROKEN[mistake][0])
