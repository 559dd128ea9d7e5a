"""PROTOCOL 7: snapshots."""

import pytest
from logkit import H, Log, beat, config, ident, messages, pause, release

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState


def story():
    log = Log(forget_ms=3 * H, operations=1)
    epoch = log.claimed(topic_id=ident("one"))
    log.append(beat(epoch, 5), after=H)
    log.append(messages(epoch, 0, 9))
    log.append(pause(log.now_ms + 7))
    log.append(release(epoch, 12, successor="c2"), after=3)
    log.append(b"?", after=4, epoch=1)
    log.append(pause(log.now_ms + H, op=ident("second"), group="h"))
    log.append(pause(0, op=ident("second"), group="h", seq=1))
    log.claimed("c2")
    log.append(config(2, era=2))
    log.append(b"", after=9 * H)
    return log


def test_7_4_snapshot_and_tail_are_the_whole_byte_for_byte():
    log = story()
    whole = to_bytes(log.state)
    for k in range(len(log.entries) + 1):
        head = WorldState(0)
        for entry in log.entries[:k]:
            apply(head, entry)
        state = from_bytes(to_bytes(head))
        assert digest(state) == digest(head)
        for entry in log.entries[k:]:
            apply(state, entry)
        assert to_bytes(state) == whole
        assert digest(state) == digest(log.state)


def test_7_1_a_damaged_snapshot_is_discarded():
    value = to_bytes(story().state)
    with pytest.raises(MalformedRecord):
        from_bytes(value[:-1])
