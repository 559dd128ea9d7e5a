import msgspec
import pytest
from logkit import (
    INC,
    KEY,
    SECRET,
    H,
    Log,
    beat,
    claim,
    hashed,
    messages,
    release,
    resume,
)

from kafka_marshal.protocol.notes import (
    WHY_CHARS_MAX,
    stuck_count,
    why_of,
    why_to_tags,
)
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import KeyNote


@pytest.fixture
def log():
    return Log()


def note(log, key=KEY) -> KeyNote | None:
    return log.state.soft.notes.get(key)


def why(text, **claiming):
    return msgspec.structs.replace(claim(**claiming), tags=why_to_tags(text))


def gone(epoch, reason, position=None, client="c1"):
    record = release(epoch, position, client=client)
    return msgspec.structs.replace(record, reason=reason)


def test_a_claim_tells_why(log):
    log.append(why("fair: share 3 of 12"))
    assert note(log) == KeyNote("c1", 1, "fair: share 3 of 12", None, None)
    log.append(why("I want it", client="c2"))
    assert note(log).client_id == "c1", "a claim that was refused tells nothing"


def test_a_claim_tells_which_one_it_follows_whoever_made_that(log):
    log.append(claim())
    assert note(log).follows is None
    log.append(gone(1, "closed"))
    log.append(claim(client="c2"))
    assert note(log).follows == 1
    log.append(claim(client="c3"), after=2 * H + 1)
    assert note(log).follows == 3


@pytest.mark.parametrize(
    "tags",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="no-messagepack"),
        pytest.param(b"\x91\x01", id="no-map"),
        pytest.param(b"\x81\xa3why\x07", id="no-text"),
        pytest.param(b"\x80", id="no-why"),
        pytest.param(b"\x81\xa3why\xa2\xff\xff", id="no-utf-8"),
    ],
)
def test_tags_that_tell_nothing_are_absent(log, tags):
    record = msgspec.structs.replace(claim(), tags=tags)
    assert why_of(record) is None
    assert log.one(record).effect == "claimed"
    assert note(log).reason is None


def test_a_claim_without_tags_tells_nothing(log):
    log.claimed()
    assert note(log).reason is None


def test_why_is_bounded_at_both_ends():
    assert len(why_to_tags("ä" * 9_999)) <= 1024
    tags = msgspec.msgpack.encode({"why": "x" * 1_000})
    record = msgspec.structs.replace(claim(), tags=tags)
    assert why_of(record) == "x" * WHY_CHARS_MAX


def test_a_release_tells_why(log):
    epoch = log.claimed()
    assert log.say(gone(epoch, "behind: lag 12")) == "released"
    assert note(log) == KeyNote("c1", 2, "behind: lag 12", None, None)
    assert log.say(gone(epoch, "twice")) == "not_owner"
    assert note(log).reason == "behind: lag 12"


def test_the_owner_before_is_known(log):
    epoch = log.claimed("c1")
    log.append(release(epoch))
    epoch = log.claimed("c2")
    assert note(log).before == "c1"
    log.append(release(epoch, client="c2"))
    assert (note(log).client_id, note(log).before) == ("c2", "c1")
    log.claimed("c2")
    assert note(log).before == "c1", "what comes back to c2 was c1's before"
    log.one(claim("c3"), after=2 * H + 1)
    assert (note(log).client_id, note(log).before) == ("c3", "c2")


def test_a_resume_keeps_the_owner_before(log):
    epoch = log.claimed("c0")
    log.append(release(epoch, client="c0"))
    epoch = log.claimed("c1", resume_hash=hashed(SECRET))
    assert log.say(resume(epoch, before=INC)) == "resumed"
    assert (note(log).client_id, note(log).before) == ("c1", "c0")


def test_a_release_of_what_no_note_tells_of(log):
    epoch = log.claimed()
    log.state.soft.notes.clear()
    log.append(gone(epoch, "closed"))
    assert note(log) == KeyNote("c1", 2, "closed", None, None)
    log.state.soft.notes.clear()
    log.one(claim("c2"), after=2 * H + 1)
    assert note(log).before is None


def wedge(log, position, client):
    epoch = log.claimed(client)
    log.append(gone(epoch, "wedged: 1 in hand", position, client))
    return stuck_count(note(log), log.key())


def test_who_was_wedged_at_the_same_position_is_counted(log):
    assert [wedge(log, 7, "c1"), wedge(log, 7, "c2"), wedge(log, 7, "c3")] == [1, 2, 3]
    epoch = log.claimed("c4")
    assert stuck_count(note(log), log.key()) == 3
    log.append(beat(epoch, 8, client="c4"))
    assert stuck_count(note(log), log.key()) == 0, "it got on"
    log.append(gone(epoch, "closed", None, "c4"))
    assert wedge(log, 8, "c5") == 1


def test_what_never_began_is_stuck_at_its_start(log):
    assert [wedge(log, None, "c1"), wedge(log, None, "c2")] == [1, 2]


def test_at_most_once_what_was_granted_is_no_longer_in_the_way(log):
    assert wedge(log, 3, "c1") == 1
    epoch = log.claimed("c2")
    log.append(messages(epoch, 3, 3, client="c2"))
    assert stuck_count(note(log), log.key()) == 0


def test_nothing_known_is_not_stuck(log):
    log.claimed()
    assert stuck_count(None, log.key()) == 0
    assert stuck_count(note(log), log.key()) == 0


def test_notes_change_neither_bytes_nor_digest(log):
    twin = Log()
    epoch = log.claimed()
    twin.append(why("for the twin"))
    log.append(gone(epoch, "one"))
    twin.append(gone(epoch, "another"))
    assert note(log) != note(twin)
    assert to_bytes(log.state) == to_bytes(twin.state)
    assert digest(log.state) == digest(twin.state)


def test_what_is_forgotten_has_no_note():
    log = Log(forget_ms=5)
    epoch = log.claimed()
    log.append(release(epoch))
    assert note(log) is not None
    log.append(b"", after=10)
    assert KEY not in log.state.keys
    assert note(log) is None
