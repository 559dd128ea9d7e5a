import msgspec
import pytest
from logkit import (
    KEY,
    START_MS,
    STAYS,
    H,
    Log,
    batch,
    beat,
    claim,
    forgetting,
    hashed,
    ident,
    layout_fence,
    layout_final,
    messages,
    pause,
    release,
    resets,
    stage,
)
from logkit import resume as resume_record
from msgspec import UNSET

from kafka_marshal.protocol.codec import decode_tags, encode
from kafka_marshal.protocol.losses import (
    DELEGATED_MARKS_MAX,
    MARKS_PER_BATCH_MAX,
    LossBook,
    above,
    fitting,
    grantees_of,
    mark_to_tags,
    marks_of,
    marks_to_tags,
)
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.types import OFFSET_MAX, Key, OffsetRange, Owner

ME = ident("c1")
U = Key("g", "u", 0)
H_GROUP = Key("h", "t", 0)


class Bench:
    """A log, a LossBook that reads it, and the losses that it found."""

    def __init__(self, *, level=1, **wanted):
        self.log = Log(level=level)
        self.book = LossBook(3, **wanted)
        self.found = []
        self.epochs = {}

    def send(self, record, **where):
        transitions = self.log.append(record, **where)
        self.found += self.book.take(
            self.log.entries[-1], transitions, keys=self.log.state.keys
        )
        return transitions[0]

    def claim(self, client="c1", *, key=KEY, **rest):
        self.epochs[key] = self.send(claim(client, key=key), after=3 * H, **rest).epoch

    def grant(self, first, last, *, mark=None, key=KEY, client="c1", grantee=None):
        record = messages(self.epochs[key], first, last, key=key, client=client)
        record = marked(record, mark)
        who = ident(client) if grantee is None else ident(grantee)
        return self.send(msgspec.structs.replace(record, grantee=who))

    def beat(self, mark, *, key=KEY):
        return self.send(marked(beat(self.epochs[key], key=key), mark))

    def release(self, mark, *, key=KEY):
        record = marked(release(self.epochs[key], key=key), mark)
        return self.send(msgspec.structs.replace(record, reason="closed"))

    def open_ones(self, **at):
        return self.book.open_ones(self.log.state, **at)


def marked(record, mark):
    return msgspec.structs.replace(record, tags=mark_to_tags(mark))


def batch_tags(*marks):
    return marks_to_tags(fitting([(*pair, None) for pair in marks]))


def ranges(losses):
    return [pairs(loss.ranges) for loss in losses]


def pairs(found):
    """Return the first and the last offset of each range."""
    return tuple((each.first, each.last) for each in found)


@pytest.fixture
def bench():
    return Bench()


# --- marks


@pytest.mark.parametrize("mark", [0, 5, OFFSET_MAX + 1])
def test_a_mark_is_read_back(mark):
    assert marks_of(marked(beat(1), mark)) == {0: mark}
    assert marks_of(marked(messages(1, 0, 9), mark)) == {0: mark}
    assert marks_of(marked(release(1), mark)) == {0: mark}


def test_without_a_mark_there_are_no_tags():
    assert mark_to_tags(None) is UNSET
    assert marks_to_tags([]) is UNSET
    assert marks_of(beat(1)) == {}
    assert marks_of(batch((1, None))) == {}


def test_a_batch_has_the_marks_of_some_of_its_heartbeats():
    record = batch((1, None), (2, None), (3, None))
    record = msgspec.structs.replace(record, tags=batch_tags((2, 7), (0, 9)))
    assert marks_of(record) == {2: 7, 0: 9}


def test_a_batch_has_as_many_marks_as_fit():
    marks = [(index + 900, OFFSET_MAX) for index in range(200)]
    tags = batch_tags(*marks)
    assert len(tags) <= 1024
    beats = tuple((epoch, None) for epoch in range(1_000))
    record = msgspec.structs.replace(batch(*beats), tags=tags)
    assert encode(record)
    assert marks_of(record) == dict(marks[:MARKS_PER_BATCH_MAX])


def test_a_batch_has_as_many_marks_with_grantees_as_fit():
    marks = [(index + 900, OFFSET_MAX, ME) for index in range(200)]
    tags = marks_to_tags(fitting(marks))
    assert len(tags) <= 1024
    beats = tuple((epoch, None) for epoch in range(1_000))
    record = msgspec.structs.replace(batch(*beats), tags=tags)
    assert encode(record)
    sent = marks[:DELEGATED_MARKS_MAX]
    assert marks_of(record) == {index: mark for index, mark, _ in sent}
    assert grantees_of(record) == {index: ME for index, _, _ in sent}


@pytest.mark.parametrize("value", [None, 1, "text", [[1], ME], [0, 7, 1]])
def test_an_unreadable_grantee_counts_as_absent(value):
    tags = msgspec.msgpack.encode({"done": 7, "of": value})
    assert grantees_of(msgspec.structs.replace(beat(1), tags=tags)) == {}
    assert grantees_of(msgspec.structs.replace(batch((1, None)), tags=tags)) == {}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"\xff", id="no-msgpack"),
        pytest.param(b"", id="empty"),
        pytest.param(msgspec.msgpack.encode([1]), id="no-map"),
        pytest.param(msgspec.msgpack.encode({"other": 1}), id="other"),
        pytest.param(msgspec.msgpack.encode({"done": None}), id="nil"),
        pytest.param(msgspec.msgpack.encode({"done": -1}), id="negative"),
        pytest.param(msgspec.msgpack.encode({"done": True}), id="bool"),
        pytest.param(msgspec.msgpack.encode({"done": 1.5}), id="float"),
        pytest.param(msgspec.msgpack.encode({"done": OFFSET_MAX + 2}), id="large"),
        pytest.param(msgspec.msgpack.encode({"done": "7"}), id="text"),
        pytest.param(msgspec.msgpack.encode({"done": [[1], 7, True, 7]}), id="index"),
        pytest.param(msgspec.msgpack.encode({"done": [0, None, 1]}), id="odd"),
    ],
)
def test_an_unreadable_mark_counts_as_absent(value):
    assert marks_of(msgspec.structs.replace(beat(1), tags=value)) == {}
    assert marks_of(msgspec.structs.replace(batch((1, None)), tags=value)) == {}


def test_marks_are_the_done_entry_of_the_tags():
    assert decode_tags(mark_to_tags(7)) == {"done": 7}
    assert decode_tags(batch_tags((0, 7))) == {"done": [0, 7]}


@pytest.mark.parametrize(
    ("mark", "left"),
    [
        (0, [(2, 4), (7, 9)]),
        (2, [(2, 4), (7, 9)]),
        (4, [(4, 4), (7, 9)]),
        (5, [(7, 9)]),
        (8, [(8, 9)]),
        (10, []),
    ],
)
def test_above_leaves_the_offsets_from_the_mark_on(mark, left):
    assert pairs(above([OffsetRange(2, 5), OffsetRange(7, 10)], mark)) == tuple(left)


# --- losses


def test_unprocessed_grants_of_a_dead_owner_are_lost_at_the_takeover(bench):
    bench.claim()
    epoch = bench.epochs[KEY]
    bench.grant(0, 9, mark=0)
    bench.grant(10, 19, mark=4)
    assert bench.found == []
    bench.claim("c2")
    (loss,) = bench.found
    assert (loss.key, loss.owner, loss.epoch) == (KEY, Owner("c1", ME), epoch)
    assert (pairs(loss.ranges), loss.count, loss.mark) == (((4, 19),), 16, 4)
    assert (loss.ending, loss.winner, loss.reason) == ("taken_over", "c2", None)
    entry = bench.log.entries[-1]
    assert (loss.partition, loss.at_offset) == (3, entry.offset)
    assert loss.at_ms == entry.timestamp_ms


def test_a_release_with_a_complete_mark_loses_nothing(bench):
    bench.claim()
    bench.grant(0, 9)
    bench.release(10)
    assert bench.found == []
    bench.claim("c2")
    assert bench.found == bench.open_ones() == []


def test_a_release_with_a_lower_mark_loses_the_grants_above_it(bench):
    bench.claim()
    bench.grant(0, 9)
    bench.release(7)
    (loss,) = bench.found
    assert (pairs(loss.ranges), loss.ending, loss.reason) == (
        ((7, 9),),
        "released",
        "closed",
    )
    assert loss.winner is None


def test_a_release_without_a_mark_loses_all_grants(bench):
    bench.claim()
    bench.grant(0, 9)
    bench.grant(10, 19)
    bench.release(None)
    (loss,) = bench.found
    assert (pairs(loss.ranges), loss.mark) == (((0, 19),), None)


def test_a_restart_loses_the_grants_of_the_earlier_instance(bench):
    secret = ident("secret")
    epoch = bench.send(claim(resume_hash=hashed(secret)), after=H).epoch
    bench.epochs[KEY] = epoch
    bench.grant(0, 9, mark=0)
    bench.send(resume_record(epoch, secret=secret))
    (loss,) = bench.found
    assert (loss.ending, loss.winner, pairs(loss.ranges)) == (
        "resumed",
        "c1",
        ((0, 9),),
    )


def test_beats_move_the_mark(bench):
    bench.claim()
    bench.claim(key=U)
    bench.grant(0, 9)
    bench.grant(5, 6, key=U)
    bench.beat(3)
    assert ranges(bench.open_ones()) == [((3, 9),), ((5, 6),)]
    beats = batch((bench.epochs[KEY], None), (bench.epochs[U], None))
    tags = batch_tags((1, 6))
    bench.send(msgspec.structs.replace(beats, tags=tags))
    assert ranges(bench.open_ones()) == [((3, 9),), ((6, 6),)]


def test_a_mark_never_goes_back(bench):
    bench.claim()
    bench.grant(0, 9)
    bench.beat(7)
    bench.beat(3)
    assert ranges(bench.open_ones()) == [((7, 9),)]


def test_the_mark_of_a_refused_request_counts(bench):
    bench.claim()
    bench.grant(0, 9)
    assert bench.grant(0, 9, mark=6).reason == "nothing_left"
    assert ranges(bench.open_ones()) == [((6, 9),)]


def test_marks_of_other_senders_are_ignored(bench):
    bench.claim()
    bench.grant(0, 9)
    bench.send(marked(beat(bench.epochs[KEY], client="c2"), 9))
    assert bench.send(claim("c2")).reason == "held"
    bench.send(pause(bench.log.now_ms + 5))
    assert ranges(bench.open_ones()) == [((0, 9),)]


def test_a_mark_counts_only_for_the_grants_of_its_process(bench):
    """The mark of a parent does not cover the grants of its task (PROTOCOL 6.2)."""
    bench.claim()
    bench.grant(0, 4, grantee="task")
    bench.grant(5, 9)
    bench.grant(10, 11, grantee="task")
    bench.beat(10)
    assert ranges(bench.open_ones()) == [((0, 4), (10, 11))]


def test_a_mark_of_the_owner_may_be_about_another_grantee(bench):
    """A sidecar reports the progress of its clients."""
    bench.claim()
    bench.claim(key=U)
    client = ident("client")
    bench.grant(0, 4, grantee="client")
    bench.grant(5, 9)
    bench.grant(0, 6, key=U, grantee="client")
    beats = batch((bench.epochs[KEY], None), (bench.epochs[U], None))
    tags = marks_to_tags([(1, 6, client), (0, 9, None)])
    bench.send(msgspec.structs.replace(beats, tags=tags))
    (first, second) = bench.open_ones()
    assert ranges([first, second]) == [((0, 4), (9, 9)), ((6, 6),)]
    assert (first.mark, second.mark) == (9, 6)
    done = release(bench.epochs[KEY])
    done = msgspec.structs.replace(done, tags=mark_to_tags(10, grantee=client))
    bench.send(done)
    assert ranges(bench.found) == [((9, 9),)]


def test_grants_of_a_claim_that_was_not_read_are_not_counted(bench):
    epoch = bench.log.claimed()
    bench.epochs[KEY] = epoch
    bench.grant(0, 9)
    bench.beat(5)
    assert bench.open_ones() == []


def test_open_claims_are_live_until_they_are_stale(bench):
    bench.claim()
    bench.grant(0, 9)
    at = bench.log.entries[-1]
    (risk,) = bench.open_ones(elapsed_ms=2 * H)
    assert (risk.ending, risk.at_offset, risk.at_ms) == (
        "live",
        at.offset,
        at.timestamp_ms,
    )
    assert [loss.ending for loss in bench.open_ones(elapsed_ms=2 * H + 1)] == ["stale"]


@pytest.mark.parametrize(
    ("wanted", "keys"),
    [
        ({}, [KEY, U, H_GROUP]),
        ({"group_id": "g"}, [KEY, U]),
        ({"topic": "t"}, [KEY, H_GROUP]),
        ({"group_id": "g", "topic": "t"}, [KEY]),
        ({"group_id": "x"}, []),
    ],
)
def test_only_requested_keys_are_followed(wanted, keys):
    bench = Bench(**wanted)
    for key in (KEY, U, H_GROUP):
        bench.claim(key=key)
        bench.grant(0, 1, key=key)
    assert [loss.key for loss in bench.open_ones()] == keys


def test_a_record_of_another_kind_has_no_mark(bench):
    bench.claim()
    bench.grant(0, 9)
    strange = bench.log.one(beat(bench.epochs[KEY]))
    strange = msgspec.structs.replace(strange, record=pause(0))
    assert bench.book.take(bench.log.entries[-1], (strange,), keys={KEY}) == []
    assert ranges(bench.open_ones()) == [((0, 9),)]


def test_a_book_begun_from_a_state_lists_only_later_grants():
    first = Bench()
    first.claim()
    first.grant(0, 9)
    first.claim("c2", key=U)
    first.send(release(first.epochs[U], client="c2", key=U))
    bench = Bench()
    bench.log, bench.epochs = first.log, first.epochs
    bench.book = LossBook(3, group_id="g", begun=first.log.state)
    assert bench.open_ones() == []
    bench.grant(10, 14)
    assert ranges(bench.open_ones()) == [((10, 14),)]
    bench.release(None)
    assert ranges(bench.found) == [((10, 14),)]
    assert (
        LossBook(3, group_id="h", begun=first.log.state).open_ones(first.log.state)
        == []
    )


def test_grants_of_a_stale_owner_are_lost_with_its_key():
    bench = Bench(level=2)
    bench.claim()
    bench.grant(0, 9)
    bench.send(forgetting(bench.epochs[KEY]))  # held: not stale yet
    assert bench.found == []
    bench.send(forgetting(bench.epochs[KEY]), after=3 * H)
    (loss,) = bench.found
    assert (pairs(loss.ranges), loss.ending, loss.reason) == (
        *(((0, 9),), "released"),
        "forgotten",
    )
    assert bench.open_ones() == []


def test_grants_of_a_stale_owner_are_lost_when_its_position_is_set():
    bench = Bench(level=SECOND_LEVEL)
    bench.claim()
    bench.grant(0, 9)
    bench.send(pause(START_MS + 100 * H))
    bench.send(stage((0, 2)))  # held: not stale yet
    assert bench.found == []
    bench.send(stage((0, 2)), after=3 * H)
    (loss,) = bench.found
    assert (pairs(loss.ranges), loss.ending, loss.reason) == (
        *(((0, 9),), "released"),
        "position_set",
    )
    assert bench.open_ones() == []


@pytest.mark.parametrize("is_key_gone", [False, True])
def test_a_reset_ends_every_claim(is_key_gone):
    """The state that it carries has no owner, and may not have the key."""
    bench = Bench(level=2)
    if not is_key_gone:
        bench.claim()
    carried = bench.log.state
    value, stated_digest = to_bytes(carried), digest(carried)
    bench.claim("c2")
    bench.grant(0, 9, mark=4, client="c2")
    for record in resets(value, stated_digest, bytes_max=len(value) // 2):
        bench.send(record)
    (loss,) = bench.found
    assert (pairs(loss.ranges), loss.ending, loss.reason) == (
        *(((4, 9),), "released"),
        "reset",
    )
    assert (loss.owner, loss.winner) == (Owner("c2", ident("c2")), None)
    assert loss.at_offset == bench.log.state.next_offset - 1
    assert (KEY in bench.log.state.keys) is not is_key_gone
    assert bench.open_ones() == []
    bench.log.append(None)  # log time counts from the first entry behind the Reset
    bench.claim("c3")
    bench.grant(0, 9, client="c3")
    assert ranges(bench.found) == [((4, 9),)]
    assert ranges(bench.open_ones()) == [((0, 9),)]


def test_an_incomplete_reset_ends_no_claim():
    bench = Bench(level=2)
    bench.claim()
    bench.grant(0, 9)
    value = to_bytes(bench.log.state)
    bench.send(resets(value, digest(bench.log.state), bytes_max=len(value) // 2)[0])
    assert bench.found == []
    assert ranges(bench.open_ones()) == [((0, 9),)]


def test_grants_of_a_key_that_moved_away_are_lost():
    """Its owner died, and the change of the partition count dropped its key."""
    bench = Bench(level=2)
    bench.claim()
    bench.claim(key=STAYS)
    bench.grant(0, 9, mark=4)
    bench.grant(0, 3, key=STAYS)
    bench.send(layout_fence(2), after=3 * H)
    assert [each.ending for each in bench.open_ones()] == ["stale", "stale"]
    bench.send(layout_final())
    (lost,) = bench.found
    assert (lost.key, lost.ending, lost.reason) == (KEY, "released", "moved")
    assert [(each.first, each.last) for each in lost.ranges] == [(4, 9)]
    assert [each.key for each in bench.open_ones()] == [STAYS]
