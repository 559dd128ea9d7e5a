"""Tests are not slowed down by collections of garbage."""

import gc

from collecting import NEWEST_MAX


def test_what_was_collected_before_tests_is_left_alone():
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] == NEWEST_MAX
