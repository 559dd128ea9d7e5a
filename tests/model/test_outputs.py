"""Every state of a small world in which two owners write to Kafka in transactions."""

import pytest
from outputmodel import (
    LOST,
    NO_CHECK,
    NO_ERA,
    NO_FENCE,
    NO_PROGRESS,
    PROGRESS_OUTSIDE,
    TWICE,
    OutputModel,
)
from search import search
from slices import slice_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

MISTAKES = {
    NO_PROGRESS: TWICE,
    NO_FENCE: TWICE,
    PROGRESS_OUTSIDE: LOST,
    NO_CHECK: TWICE,
    NO_ERA: LOST,
}


def test_each_record_is_written_once(record_property):
    found = search(OutputModel(records=2, claims=slice_of(quick=3, full=4)))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_owner_loses_or_repeats_a_record(mistake):
    found = search(OutputModel(claims=4, mistake=mistake))
    assert found.broken == MISTAKES[mistake], str(found)
