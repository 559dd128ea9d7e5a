"""Pauses of the garbage collector."""

import gc

from kafka_marshal.gc_pause import uncollected


def test_the_collector_is_disabled_in_the_block_and_enabled_after_it():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_remaining_garbage_is_collected_once():
    gc.collect()
    before_count = gc.get_stats()[0]["collections"]
    with uncollected(leaves_garbage=True):
        pass
    assert gc.get_stats()[0]["collections"] == before_count + 1
