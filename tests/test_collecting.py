"""The garbage collector is set so that it does not slow the tests down."""

import gc

from collecting import NEWEST_MAX


def test_the_garbage_collector_ignores_objects_from_before_the_tests():
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] == NEWEST_MAX
