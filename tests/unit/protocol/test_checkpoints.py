import pytest
from logkit import Log, beat, begin, chunk, claim, finish, ident, release
from msgspec.structs import replace

from kafka_marshal.protocol.checkpoints import (
    OPEN_MAX,
    Assembly,
    Watch,
    checkpoint_key,
    is_writer,
    parts_of,
    split,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import CHUNK_BYTES_MAX
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState

PLACE = checkpoint_key(0)


class Watched(Log):
    """A log whose reader watches checkpoints."""

    def __init__(self, **settings):
        self.watch = Watch()
        self.seen = []
        super().__init__(level=2, **settings)

    def append(self, what, **where):
        transitions = super().append(what, **where)
        seen = self.watch.on_entry(self.state, transitions)
        self.seen += [] if seen is None else [seen]
        return transitions


def written(log=None, *, parts=3, between=lambda log: None, **wrong):
    """Write a checkpoint, with other records between; return log and End."""
    log = Watched() if log is None else log
    log.claimed()
    epoch = log.claimed("c9", key=PLACE)
    log.append(begin(epoch, client="c9"))
    at, value, expected_digest = (
        log.entries[-1].offset,
        to_bytes(log.state),
        digest(log.state),
    )
    size = -(-len(value) // parts)
    for number in range(parts):
        between(log)
        data = value[number * size : (number + 1) * size]
        log.append(chunk(data, number, epoch=epoch, client="c9"))
    fields = {
        "epoch": epoch,
        "parts": parts,
        "size": len(value),
        "digest": bytes.fromhex(expected_digest),
        "client": "c9",
    }
    end = finish(at, **(fields | wrong))
    log.append(end)
    return log, end


def put_together(log, end, entries=None):
    assembly = Assembly(end)
    for entry in log.entries if entries is None else entries:
        assembly.take(entry)
    return assembly.state(0)


def test_a_checkpoint_is_the_state_right_after_its_begin():
    beats = lambda log: log.append(beat(1, 5), after=3)  # noqa: E731
    log, end = written(between=beats)
    state = from_bytes(put_together(log, end))
    assert state.next_offset == end.begin_offset + 1
    for entry in log.entries[state.next_offset :]:
        apply(state, entry)
    assert to_bytes(state) == to_bytes(log.state)
    (seen,) = log.seen
    assert seen.is_equal
    assert (seen.begin_offset, seen.client_id) == (end.begin_offset, "c9")
    assert log.watch.last_offset == end.begin_offset


def test_a_checkpoint_with_a_missing_record_gives_no_state():
    log, end = written()
    for count in range(len(log.entries)):
        whole = put_together(log, end, log.entries[:count])
        is_whole = count >= len(log.entries) - 1
        assert isinstance(whole, bytes) == is_whole, count
    for left_out in range(end.begin_offset, len(log.entries) - 1):
        rest = [e for e in log.entries if e.offset != left_out]
        assert isinstance(put_together(log, end, rest), str)


def test_chunks_that_were_written_twice_count_once():
    log, end = written()
    twice = [entry for entry in log.entries for _ in range(2)]
    assert put_together(log, end, twice) == put_together(log, end)


def test_records_of_other_checkpoints_between_chunks_are_skipped():
    def others(log):
        log.append(chunk(b"?", 0, epoch=1, client="c9"))
        log.append(chunk(b"?", 0, epoch=2, client="c8"))
        log.append(chunk(b"?", 0, client="c9", checkpoint=ident("else")))
        log.append(begin(2, client="c9"))

    log, end = written(between=others)
    assert isinstance(put_together(log, end), bytes)
    dumped = [replace(entry, undecodable="it was so") for entry in log.entries]
    assert isinstance(put_together(log, end, dumped), str)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        pytest.param({"leader_epoch": 3}, "Begin", id="leader epoch"),
        pytest.param({"parts": 4}, "chunks", id="count"),
        pytest.param({"size": 7}, "chunks", id="size"),
        pytest.param({"digest": ident("else")}, "digest", id="digest"),
    ],
)
def test_an_end_that_does_not_match_its_begin_or_chunks_is_rejected(wrong, why):
    parts = {} if "parts" not in wrong else {"parts": 3}
    log, end = written(**(wrong | parts))
    end = replace(end, part_count=wrong.get("parts", end.part_count))
    assert why in put_together(log, end)


def test_a_checkpoint_of_another_partition_is_rejected():
    log, end = written()
    assembly = Assembly(end)
    for entry in log.entries:
        assembly.take(entry)
    assert "another coordinating partition" in assembly.state(1)


def test_a_checkpoint_of_invalid_bytes_is_rejected():
    log = Watched()
    epoch = log.claimed("c9", key=PLACE)
    log.append(begin(epoch, client="c9"))
    log.append(chunk(b"state", epoch=epoch, client="c9"))
    end = finish(2, epoch=epoch, size=5, client="c9")
    assert "not a snapshot" in put_together(log, end)


def test_only_the_owner_of_the_checkpoint_key_writes_checkpoints():
    log = Watched()
    log.append(begin(0, client="c9"))
    value, expected_digest = to_bytes(log.state), digest(log.state)
    log.append(chunk(value, client="c9"))
    end = finish(1, size=len(value), digest=bytes.fromhex(expected_digest), client="c9")
    log.append(end)
    assert "does not own" in put_together(log, end)
    assert (log.seen, log.watch.last_offset) == ([], None)
    epoch = log.claimed("c9", key=PLACE)
    assert is_writer(log.state, begin(epoch, client="c9"))
    assert not is_writer(log.state, begin(epoch - 1, client="c9"))
    assert not is_writer(log.state, begin(epoch, client="c8"))
    assert not is_writer(WorldState(1), begin(epoch, client="c9"))


def test_a_reader_with_another_state_is_reported():
    log = Watched()
    log.claimed()
    log.key().position = 77
    log.state.dirty.clear()
    twin = Watched()
    twin.claimed()
    for each in (log, twin):
        epoch = each.claimed("c9", key=PLACE)
        each.append(begin(epoch, client="c9"))
    log.key().position = 78
    theirs = bytes.fromhex(digest(twin.state))
    end = finish(3, epoch=epoch, digest=theirs, client="c9")
    log.state.dirty[next(iter(log.state.keys))] = None
    log.append(end)
    twin.append(end)
    assert [seen.is_equal for seen in (*log.seen, *twin.seen)] == [False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"begin_offset": 9},
        {"incarnation": ident("else")},
        {"epoch": 9},
        {"checkpoint_id": ident("else")},
    ],
    ids=str,
)
def test_an_end_of_another_begin_is_not_compared(change):
    log = Watched()
    epoch = log.claimed("c9", key=PLACE)
    log.append(begin(epoch, client="c9"))
    log.append(replace(finish(2, epoch=epoch, client="c9"), **change))
    assert log.seen == []


def test_the_oldest_open_checkpoint_is_dropped_at_the_limit():
    log = Watched()
    epoch = log.claimed("c9", key=PLACE)
    names = [ident(str(number)) for number in range(OPEN_MAX + 1)]
    for name in names:
        log.append(begin(epoch, client="c9", checkpoint=name))
    for at, name in enumerate(names, start=2):
        log.append(finish(at, epoch=epoch, client="c9", checkpoint=name))
    assert [seen.checkpoint_id for seen in log.seen] == names[1:]


def test_records_not_in_the_last_checkpoint_are_counted():
    log, _ = written()
    assert log.watch.news_count == 0
    log.append(release(log.key(PLACE).epoch, client="c9", key=PLACE))
    assert log.watch.news_count == 0
    log.append(claim("c2"))
    assert log.watch.news_count == 1
    log, _ = written(between=lambda log: log.append(b"?"))
    assert log.watch.news_count == 3
    assert Watch().on_entry(log.state, ()) is None


def test_beats_folded_as_a_run_are_counted_too():
    watch = Watch()
    watch.pass_beats(3)
    assert watch.news_count == 3


@pytest.mark.parametrize("size", [1, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1])
def test_split_gives_chunks_that_fit_into_records(size):
    value = bytes(size)
    parts = split(value)
    assert b"".join(parts) == value
    assert all(1 <= len(part) <= CHUNK_BYTES_MAX for part in parts)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES_MAX, 3 * CHUNK_BYTES_MAX + 1])
@pytest.mark.parametrize("piece", [10_007, CHUNK_BYTES_MAX, 2 * CHUNK_BYTES_MAX + 5])
def test_bytes_in_pieces_are_split_like_the_whole(size, piece):
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    pieces = [value[at : at + piece] for at in range(0, size, piece)]
    assert list(parts_of(pieces)) == split(value)
