"""Records of data topics as JSON objects."""

from kafka_marshal import Token
from kafka_marshal.ports import PlainRecord
from kafka_marshal_cli.records import record_object


def record(offset=0, *, key=None, value=b"v"):
    token = Token(1, 0, 5)
    return PlainRecord("t", 3, offset, 99, 0, key, value, token=token)


def test_a_record_as_json():
    assert record_object(record(7, value="日\x1b".encode()), 1234) == {
        "topic": "t",
        "partition": 3,
        "offset": 7,
        "token": "1.0.5",
        "timestamp": 99,
        "handed_out_ms": 1234,
        "key": None,
        "value": "日\x1b",
    }


def test_bytes_that_are_no_text_are_base64():
    found = record_object(record(key=b"\xff", value=b"\xfe\x00"), 0)
    assert (found["key_base64"], found["value_base64"]) == ("/w==", "/gA=")
    assert "key" not in found
    assert "value" not in found
