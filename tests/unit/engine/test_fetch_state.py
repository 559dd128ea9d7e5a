import pytest

from kafka_marshal.engine.fetch_state import CALM_READS, FAIR_READ_MS, SLOW_MS, Prefetch


def waited(ahead, waited_ms, *, times=1, is_found=True):
    may_have_more = None
    for _ in range(times):
        may_have_more = ahead.note(1_000, waited_ms=waited_ms, is_found=is_found)
    return may_have_more


def test_the_first_read_has_the_size_of_a_poll():
    assert Prefetch(500, 5_000).most(0) == 500
    assert Prefetch(500, 100).most(0) == 100


def test_waiting_increases_reads_up_to_the_bound():
    ahead = Prefetch(500, 3_000)
    sizes = []
    for _ in range(4):
        assert waited(ahead, SLOW_MS)
        sizes.append(ahead.most(0))
    assert sizes == [1_000, 2_000, 3_000, 3_000]
    assert ahead.most(2_900) == 100
    assert ahead.most(3_200) < 0


@pytest.mark.parametrize("waited_ms", [0, SLOW_MS - 1])
def test_reads_shrink_without_waiting(waited_ms):
    ahead = Prefetch(500, 5_000)
    waited(ahead, SLOW_MS, times=2)
    waited(ahead, waited_ms, times=CALM_READS - 1)
    assert ahead.most(0) == 2_000
    waited(ahead, waited_ms)
    assert ahead.most(0) == 1_000
    waited(ahead, waited_ms, times=5 * CALM_READS)
    assert ahead.most(0) == 500


def test_a_wait_without_a_record_changes_nothing():
    """An idle topic is not a slow link."""
    ahead = Prefetch(500, 5_000)
    assert not waited(ahead, 10 * SLOW_MS, times=10, is_found=False)
    assert ahead.most(0) == 500


def test_a_fetch_that_takes_longer_than_a_read_counts_as_a_wait():
    """At 110 ms, reads of 100 ms find nothing and a short wait in turn."""
    ahead = Prefetch(500, 5_000)
    for expected in (1_000, 2_000, 4_000):
        assert not waited(ahead, 100, is_found=False)
        assert waited(ahead, 10)
        assert ahead.most(0) == expected
    assert not waited(ahead, 100, is_found=False)
    assert waited(ahead, 0), "it arrived between two reads"
    assert ahead.most(0) == 5_000


def test_a_wait_counts_once():
    ahead = Prefetch(500, 5_000)
    waited(ahead, 100, is_found=False)
    waited(ahead, 10)
    waited(ahead, 10, times=CALM_READS)
    assert ahead.most(0) == 500


def test_the_rest_is_read_at_once_only_if_there_may_be_one():
    ahead = Prefetch(500, 5_000)
    assert not waited(ahead, SLOW_MS - 1)
    assert waited(ahead, SLOW_MS)
    assert waited(ahead, 1)
    assert not waited(ahead, 0)


def test_a_read_is_due_again_after_a_while():
    ahead = Prefetch(500, 5_000)
    ahead.note(7_000, waited_ms=0, is_found=False)
    assert ahead.due_ms == 7_000 + FAIR_READ_MS


def test_reads_never_grow_for_a_reader_that_fetches_ahead():
    ahead = Prefetch(500, 5_000, is_needed=False)
    assert not waited(ahead, SLOW_MS, times=3)
    assert ahead.most(0) == 500
    # The due time is the same: a partition without records does not wait for others.
    assert ahead.most(400) == 500
