"""The garbage collector rests, and is as it was."""

import gc

from kafka_marshal.gc_pause import uncollected


def test_the_collector_rests_and_is_as_it_was():
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
