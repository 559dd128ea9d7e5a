from enginekit import KEY, owning, world

from kafka_marshal.engine import acquirer
from kafka_marshal.protocol.types import Key

OTHER = Key("g", "t", 9)
NEWER = b"n" * 16


def may_be_earlier(contender, *, seen_ms):
    return contender._may_be_earlier(KEY, NEWER, seen_ms=seen_ms)


def test_a_dropped_claim_time_counts_as_the_time_of_the_drop(monkeypatch):
    """Claim times are bounded; dropping them costs a look-up of each topic."""
    monkeypatch.setattr(acquirer, "CLAIMS_NOTED_MAX", 1)
    node = owning(world())
    contender, now_ms = node.session._acquirer, node.clock.now_ms()
    contender.note_claim(KEY, now_ms)
    assert not may_be_earlier(contender, seen_ms=now_ms)
    contender.note_claim(OTHER, now_ms + 5)
    assert len(contender._claimed_ms) == 1
    assert may_be_earlier(contender, seen_ms=now_ms + 4)
    assert not may_be_earlier(contender, seen_ms=now_ms + 5)
