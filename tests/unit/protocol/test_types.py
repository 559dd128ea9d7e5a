import pickle

import pytest

from kafka_marshal.protocol import types
from kafka_marshal.protocol.types import (
    OFFSET_MAX,
    PARTITION_MAX,
    Key,
    LogEntry,
    OffsetRange,
    Owner,
    TimestampType,
    Token,
    TokenAfterSeek,
    TopicPartition,
    encodable,
    lag_of,
    may_be_same_topic,
    seek_count_of,
    shared,
    whole_number,
)


def test_an_unknown_id_may_be_that_of_any_topic():
    assert may_be_same_topic(b"a", b"a")
    assert may_be_same_topic(b"a", None)
    assert may_be_same_topic(None, b"a")
    assert may_be_same_topic(None, None)
    assert not may_be_same_topic(b"a", b"b")


def test_limits_are_those_of_kafka():
    assert OFFSET_MAX == 9_223_372_036_854_775_807
    assert PARTITION_MAX == 2_147_483_647


@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param("0", 0, id="zero"),
        pytest.param("007", 7, id="leading zeros"),
        pytest.param(str(OFFSET_MAX), OFFSET_MAX, id="the largest offset"),
        pytest.param(str(OFFSET_MAX + 1), None, id="one more"),
        pytest.param("", None, id="nothing"),
        pytest.param("-1", None, id="sign"),
        pytest.param(" 1", None, id="space"),
        pytest.param("1\n", None, id="newline"),
        pytest.param("1_000", None, id="underscore"),
        pytest.param("1.0", None, id="fraction"),
        pytest.param("\u0661", None, id="digit of Unicode"),
        pytest.param("\u00b2", None, id="superscript"),
        pytest.param("1" * 5_000, None, id="more digits than int takes"),
    ],
)
def test_whole_numbers_are_ascii_digits(text, number):
    assert whole_number(text) == number


def test_a_whole_number_above_the_given_maximum_is_refused():
    assert whole_number("10", most=10) == 10
    assert whole_number("11", most=10) is None


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(-1, "NONE", id="none"),
        pytest.param(0, "CREATE_TIME", id="create"),
        # As in Kafka's protocol and in kafka-python; in confluent-kafka it is 2.
        pytest.param(1, "LOG_APPEND_TIME", id="log append"),
    ],
)
def test_timestamp_types_have_the_numbers_of_kafkas_protocol(number, name):
    assert TimestampType(number).name == name


def test_a_topic_partition_prints_as_in_kafka():
    assert str(TopicPartition("orders", 7)) == "orders-7"


def test_a_key_has_its_data_partition():
    assert Key("g", "orders", 7).topic_partition == TopicPartition("orders", 7)


def test_keys_sort_by_group_topic_and_then_number():
    keys = [Key("g", "t", 10), Key("g", "t", 9), Key("g", "s", 11), Key("f", "z", 0)]
    assert sorted(keys) == [keys[3], keys[2], keys[1], keys[0]]


def test_a_token_after_a_seek_equals_its_token_and_counts_seeks():
    token = Token(1, 2, 3)
    after = TokenAfterSeek.of(token, 2)
    assert (after, str(after), bytes(after)) == (token, str(token), bytes(token))
    assert hash(after) == hash(token)
    again = pickle.loads(pickle.dumps(after))
    assert [seek_count_of(each) for each in (None, token, after, again)] == [0, 0, 2, 2]


def test_owners_with_different_incarnations_differ():
    assert Owner("c1", b"a" * 16) != Owner("c1", b"b" * 16)


TOKENS = [
    pytest.param(Token(0, 0, 0), "0.0.0", "00" * 16, id="least"),
    pytest.param(
        Token(1, 2, 3), "1.2.3", "00000001000000020000000000000003", id="fields"
    ),
    pytest.param(
        Token(2**32 - 1, 2**32 - 1, 2**64 - 1),
        f"{2**32 - 1}.{2**32 - 1}.{2**64 - 1}",
        "ff" * 16,
        id="greatest",
    ),
]


@pytest.mark.parametrize(("token", "text", "digits"), TOKENS)
def test_a_token_has_a_dotted_form_and_sixteen_bytes(token, text, digits):
    assert str(token) == text
    assert bytes(token).hex() == digits


@pytest.mark.parametrize(("token", "text", "digits"), TOKENS)
def test_a_token_is_parsed_from_its_dotted_form(token, text, digits):
    assert Token.parse(text) == token


@pytest.mark.parametrize(
    "text",
    [
        *("", "1.2", "1.2.x", "1.2.3.4", "1.2.-3", "1.2.\u00b2", "1.2.3\n", " 1.2.3"),
        pytest.param("9223372036854775807.0.0", id="era beyond all digits"),
        pytest.param("4294967296.0.0", id="era out of range"),
        pytest.param("0.4294967296.0", id="leader epoch out of range"),
        pytest.param("0.0.18446744073709551616", id="offset out of range"),
    ],
)
def test_an_invalid_token_is_refused(text):
    with pytest.raises(ValueError, match="fencing token"):
        Token.parse(text)


@pytest.mark.parametrize(
    ("smaller", "greater"),
    [
        pytest.param(Token(1, 9, 9), Token(2, 0, 0), id="era first"),
        pytest.param(Token(1, 1, 9), Token(1, 2, 0), id="then leader epoch"),
        pytest.param(Token(1, 1, 9), Token(1, 1, 10), id="then offset"),
        pytest.param(Token(1, 1, 255), Token(1, 1, 256), id="over a byte"),
    ],
)
def test_tokens_order_alike_as_tuples_and_as_bytes(smaller, greater):
    assert smaller < greater
    assert bytes(smaller) < bytes(greater)


def test_an_entry_is_decodable_unless_a_dump_marks_it():
    assert (
        LogEntry(
            offset=0, leader_epoch=0, timestamp_ms=0, timestamp_type=1, value=b""
        ).undecodable
        is None
    )


def test_an_offset_range_has_an_exclusive_end():
    found = OffsetRange.through(3, 5)
    assert found == OffsetRange(3, 6)
    assert (found.first, found.last, found.end, found.count) == (3, 5, 6, 3)


@pytest.mark.parametrize("end", [3, 2, 0])
def test_an_offset_range_may_be_empty(end):
    found = OffsetRange(3, end)
    assert found.count == 0
    assert found.last < found.first


def test_offset_ranges_sort_by_their_first_offset():
    assert sorted([OffsetRange(5, 6), OffsetRange(0, 9), OffsetRange(0, 2)]) == [
        OffsetRange(0, 2),
        OffsetRange(0, 9),
        OffsetRange(5, 6),
    ]


@pytest.mark.parametrize("is_owned", [True, False])
def test_the_lag_is_the_end_of_the_log_minus_the_position(is_owned):
    assert lag_of(3, 10, is_owned=is_owned) == 7
    assert lag_of(10, 10, is_owned=is_owned) == 0
    assert lag_of(None, 10, is_owned=is_owned) is None
    assert lag_of(3, None, is_owned=is_owned) is None


def test_a_position_beyond_the_end_has_a_lag_only_with_an_owner():
    assert lag_of(5, 3, is_owned=True) == 0, "it has advanced since the look-up"
    assert lag_of(5, 3, is_owned=False) is None, "the topic was created again"


def test_a_text_that_utf_8_cannot_encode_gets_question_marks():
    assert encodable("h\udc80\U0001f600") == "h?\U0001f600"


def test_a_shared_text_is_one_object():
    one, other = (b"long text".decode() for _ in range(2))
    assert one is not other
    assert shared(one) is shared(other)


def test_the_number_of_shared_texts_is_bounded(monkeypatch):
    monkeypatch.setattr(types, "SHARED_TEXTS_MAX", 10)
    for number in range(100):
        assert shared(f"text {number}") == f"text {number}"
        assert len(types._shared_texts) <= 10
