import pytest

from kafka_marshal.engine.fetch_state import (
    CALM_READS,
    FAIR_READ_MS,
    SLOW_MS,
    FetchState,
    Prefetch,
)
from kafka_marshal.ports import (
    MADE_AT_ONCE,
    PlainRecord,
    Records,
    SourceKind,
    column_of,
    offset_at,
)
from kafka_marshal.protocol.types import Token, TopicPartition


def waited(ahead, waited_ms, *, times=1, is_found=True):
    may_have_more = None
    for _ in range(times):
        may_have_more = ahead.note(1_000, waited_ms=waited_ms, is_found=is_found)
    return may_have_more


def test_the_first_read_has_the_size_of_a_poll():
    assert Prefetch(500, 5_000).most(0) == 500
    assert Prefetch(500, 100).most(0) == 100


def test_waits_for_records_increase_reads_up_to_the_bound():
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


def test_a_wait_without_a_record_does_not_change_the_read_size():
    """An idle topic is not a slow link."""
    ahead = Prefetch(500, 5_000)
    assert not waited(ahead, 10 * SLOW_MS, times=10, is_found=False)
    assert ahead.most(0) == 500


def test_a_fetch_that_takes_longer_than_a_read_counts_as_a_wait():
    """If a fetch takes 110 ms, reads in turn wait 100 ms in vain, then 10 ms."""
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


def test_another_read_follows_at_once_only_if_records_may_remain():
    ahead = Prefetch(500, 5_000)
    assert not waited(ahead, SLOW_MS - 1)
    assert waited(ahead, SLOW_MS)
    assert waited(ahead, 1)
    assert not waited(ahead, 0)


def test_a_read_is_due_again_after_fair_read_ms():
    ahead = Prefetch(500, 5_000)
    ahead.note(7_000, waited_ms=0, is_found=False)
    assert ahead.due_ms == 7_000 + FAIR_READ_MS


def test_reads_never_grow_for_a_reader_that_fetches_ahead():
    ahead = Prefetch(500, 5_000, is_needed=False)
    assert not waited(ahead, SLOW_MS, times=3)
    assert ahead.most(0) == 500
    # Records that are fetched do not reduce the next read while there is room.
    assert ahead.most(400) == 500


# --- fetched records, created at once or on access

NOW = Token(1, 0, 7)
# The kind of records of each reader, by the id of its list of created ones.
KINDS: dict[int, SourceKind] = {}


def record(offset, token=NOW):
    return PlainRecord("t", 0, offset, 1, 0, None, b"v", token=token)


def unmade(*offsets, token=NOW, made=None):
    """Return records that are created on access, as those of some readers are."""

    def make(sources, with_token):
        for each in sources:
            if made is not None:
                made.append(each)
            yield record(each, with_token)

    def same(source):
        return source

    kind = KINDS.get(id(made)) or SourceKind(
        make=make, offset=same, timestamp_ms=same, key=same, value=same
    )
    KINDS[id(made)] = kind
    return Records.of_sources(list(offsets), token=token, kind=kind)


def ready_made(*offsets, token=NOW, made=None):
    return [record(each, token) for each in offsets]


@pytest.fixture
def place():
    return FetchState(TopicPartition("t", 0), holding=None, start=0)


@pytest.mark.parametrize("kind", [ready_made, unmade])
def test_records_are_taken_in_order(place, kind):
    place.add(kind(1, 2, 4))
    assert [each.offset for each in place.take(2)] == [1, 2]
    place.add(kind(6, 7))
    assert place.buffered_count == 3
    assert [place.find(each) for each in (0, 4, 5, 6, 7, 8)] == [0, 0, 1, 1, 2, 3]
    assert [each.offset for each in place.take(1)] == [4]
    assert place.find(0) == place.at
    assert [each.offset for each in place.take(9)] == [6, 7]
    assert (place.buffered_count, list(place.take(1))) == (0, [])


def test_fetched_records_are_not_created_before_an_access(place):
    made = []
    place.add(unmade(1, 2, made=made))
    place.take(1)
    place.add(unmade(3, 4, made=made))
    place.find(3)
    found = place.take(2)
    assert offset_at(found, -1) == 3
    assert column_of(found, "offset") == [2, 3]
    assert made == []
    assert [each.offset for each in found] == [2, 3]


def test_successive_accesses_create_records_in_portions(place):
    made = []
    count = MADE_AT_ONCE + 5
    place.add(unmade(*range(count), made=made))
    assert [place.fetched[at].offset for at in range(3)] == [0, 1, 2]
    assert made == list(range(MADE_AT_ONCE))
    place.take(2)
    assert place.fetched[count - 1].offset == count - 1
    assert made[-1] == count - 1
    assert len(made) == MADE_AT_ONCE + 1
    place.add(unmade(200, made=made))
    assert [place.fetched[at].offset for at in (0, 1, -1)] == [2, 3, 200]


def test_records_keep_their_tokens(place):
    place.add(unmade(1, 2))
    place.add(unmade(3, token=Token(1, 0, 9)))
    assert [each.token for each in place.take(3)] == [NOW, NOW, Token(1, 0, 9)]
    place.add(unmade(4))
    place.add(ready_made(5))
    assert [each.offset for each in place.take(3)] == [4, 5]
