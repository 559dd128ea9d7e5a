"""Answers of a sidecar that describe its state."""

import msgspec

from kafka_marshal.remote.answers import AsOf, OwnersNow


def test_partitions_as_json_keys_are_decoded_as_numbers():
    answer = OwnersNow(
        as_of=AsOf(time_ms=1, offsets={"0": 7}), owners={10: None, 2: "a"}
    )
    wire = msgspec.json.encode(answer)
    assert b'"10":null' in wire
    assert msgspec.json.decode(wire, type=OwnersNow) == answer
