import msgspec
import pytest
from logkit import (
    INC,
    all_records,
    batch,
    beat,
    claim,
    config,
    direct,
    growth,
    ident,
    imported_directive,
    imported_settings,
    layout_groups,
    member,
    release,
    schedule,
    stage,
)
from msgspec.structs import astuple, replace

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol import codec
from kafka_marshal.protocol.codec import (
    FRAME_BYTES_MAX,
    Undecodable,
    decode,
    decode_tags,
    encode,
    encode_fields,
    header_of,
    is_identifier,
    is_topic,
    kind_of,
    parser_of,
    person_of,
    person_to_tags,
    undone_of,
    uvarint,
)
from kafka_marshal.protocol.records import (
    Config,
    Heartbeat,
    Limits,
    ScopedTopic,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.types import OFFSET_MAX, PARTITION_MAX

pack = msgspec.msgpack.encode
BEAT = bytes([1, 1, 0])


def heartbeat_fields(**changes):
    record = beat(7, 8)
    names = record.__struct_fields__[:-1]
    return [changes.get(name, getattr(record, name)) for name in names]


def decode_beat(**changes):
    return decode(BEAT + pack(heartbeat_fields(**changes)))


def reason(value):
    found = decode(value)
    assert isinstance(found, Undecodable), found
    return found.reason


# --- Round trips ---


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
def test_each_record_decodes_to_itself(record):
    assert decode(encode(record)) == record


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
def test_tags_are_an_optional_last_field(record):
    tagged = replace(record, tags=pack({"a": 1}))
    assert decode(encode(tagged)) == tagged
    assert len(encode(tagged)) > len(encode(record))


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
def test_every_prefix_and_every_longer_frame_is_undecodable(record):
    value = encode(record)
    for size in range(len(value)):
        assert isinstance(decode(value[:size]), Undecodable), size
    assert isinstance(decode(value + b"\xc0"), Undecodable)


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
def test_a_record_with_a_missing_or_extra_element_is_undecodable(record):
    kind = kind_of(record)
    fields = list(astuple(record)[:-1])
    assert decode(encode_fields(kind, fields)) == record
    assert isinstance(decode(encode_fields(kind, fields[:-1])), Undecodable)
    # The next element would be tags; one more is too many whatever it holds.
    assert isinstance(decode(encode_fields(kind, [*fields, b"", 0])), Undecodable)


# --- Headers ---


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        pytest.param(0, "00", id="zero"),
        pytest.param(127, "7f", id="one byte"),
        pytest.param(128, "8001", id="two bytes"),
        pytest.param(300, "ac02", id="two bytes, mixed"),
        pytest.param(2**21, "80808001", id="four bytes"),
    ],
)
def test_uvarint_is_leb128_in_its_shortest_form(number, encoded):
    assert uvarint(number).hex() == encoded


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, "no value", id="tombstone"),
        pytest.param(b"", "bad frame header", id="empty"),
        pytest.param(b"\x01", "bad frame header", id="one byte"),
        pytest.param(b"\x01\x01", "bad frame header", id="two bytes"),
        pytest.param(b"\x01\x80\x00\x00", "bad frame header", id="longer than needed"),
        pytest.param(b"\x80" * 9, "bad frame header", id="endless number"),
        pytest.param(b"\x02\x01\x00\x90", "unknown frame version 2", id="frame"),
        pytest.param(b"\x00\x01\x00\x90", "unknown frame version 0", id="frame 0"),
        pytest.param(
            b"\x01\x63\x00\x90", "unknown record type 99 version 0", id="type"
        ),
        pytest.param(
            b"\x01\x01\x01\x90", "unknown record type 1 version 1", id="version"
        ),
        pytest.param(
            b"\x01\x85\x01\x00\x90", "unknown record type 133 version 0", id="long type"
        ),
        pytest.param(
            b"\x01\xff\xff\xff\xff\x7f\x00",
            f"unknown record type {2**35 - 1} version 0",
            id="longest number",
        ),
    ],
)
def test_an_invalid_or_unknown_header_is_undecodable(value, expected):
    assert reason(value) == expected


def test_a_frame_of_more_than_48_kib_is_undecodable():
    room = FRAME_BYTES_MAX - len(BEAT)
    assert FRAME_BYTES_MAX == 48 * 1024
    assert reason(BEAT + b"\x90" * room).startswith("bad payload")
    assert reason(BEAT + b"\x90" * (room + 1)) == "frame too long"


def test_a_record_of_the_longest_frame_decodes():
    record = batch(*[(OFFSET_MAX, None)] * 4_400)
    room = FRAME_BYTES_MAX - len(encode(record)) - 3  # bytes of the tags' own head
    longest = replace(record, tags=bytes(room))
    assert len(encode(longest)) == FRAME_BYTES_MAX
    assert decode(encode(longest)) == longest
    with pytest.raises(MalformedRecord, match="frame too long"):
        encode(replace(record, tags=bytes(room + 1)))


# --- Types ---


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("client_id", b"c1", id="bytes for text"),
        pytest.param("client_id", None, id="nil for text"),
        pytest.param("incarnation", "x" * 16, id="text for bytes"),
        pytest.param("incarnation", b"x" * 15, id="15 bytes"),
        pytest.param("incarnation", b"x" * 17, id="17 bytes"),
        pytest.param("seq", -1, id="negative counter"),
        pytest.param("seq", 1.0, id="float"),
        pytest.param("seq", True, id="boolean for integer"),
        pytest.param("partition", -1, id="negative partition"),
        pytest.param("partition", PARTITION_MAX + 1, id="partition too high"),
        pytest.param("epoch", None, id="no epoch"),
        pytest.param("epoch", OFFSET_MAX + 1, id="epoch too high"),
        pytest.param("position", -1, id="negative position"),
        pytest.param("position", OFFSET_MAX + 1, id="position too high"),
        pytest.param("position", 8.0, id="float position"),
        pytest.param("rewind", None, id="rewind is not optional"),
        pytest.param("rewind", 1, id="integer for boolean"),
    ],
)
def test_wrong_types_and_ranges_are_undecodable(field, value):
    assert isinstance(decode_beat(**{field: value}), Undecodable)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("seq", 0, id="seq 0"),
        pytest.param("seq", OFFSET_MAX, id="highest seq"),
        pytest.param("partition", 0, id="partition 0"),
        pytest.param("partition", PARTITION_MAX, id="highest partition"),
        pytest.param("epoch", 0, id="epoch 0"),
        pytest.param("epoch", OFFSET_MAX, id="highest epoch"),
        pytest.param("position", None, id="position unknown"),
        pytest.param("position", 0, id="position 0"),
        pytest.param("position", OFFSET_MAX, id="highest position"),
    ],
)
def test_the_ends_of_each_range_decode(field, value):
    assert getattr(decode_beat(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        pytest.param({"generation": 0}, False, id="generation 0"),
        pytest.param({"era": 0}, True, id="era 0"),
        pytest.param({"era": 2**32 - 1}, True, id="highest era"),
        pytest.param({"era": 2**32}, False, id="era too high"),
        pytest.param({"h": 0}, False, id="no interval"),
        pytest.param({"k": 0}, False, id="no partitions"),
        pytest.param({"level": 0}, False, id="level 0"),
        pytest.param({"keys": 0}, False, id="limit of nothing"),
        pytest.param({"max_pause_ms": 0, "forget_ms": 0}, True, id="no time"),
        pytest.param({"format_id": b"short"}, False, id="format_id"),
        pytest.param({"cluster_id": ""}, True, id="empty cluster_id"),
        pytest.param({"cluster_id": "c" * 256}, False, id="long cluster_id"),
    ],
)
def test_a_config_is_encoded_only_within_its_ranges(change, is_valid):
    record = config(**change)
    if is_valid:
        assert decode(encode(record)) == record
    else:
        with pytest.raises(MalformedRecord, match="Config is invalid"):
            encode(record)


def test_limits_are_an_array_of_exactly_eight():
    fields = list(astuple(config())[:-1])
    for count in (7, 9):
        value = encode_fields(kind_of(config()), [*fields[:-1], [None] * count])
        assert isinstance(decode(value), Undecodable)
    nothing = encode_fields(kind_of(config()), [*fields[:-1], None])
    assert isinstance(decode(nothing), Undecodable)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("resume_hash", 31, id="31 bytes of hash"),
        pytest.param("resume_hash", 33, id="33 bytes of hash"),
        pytest.param("topic_id", 15, id="15 bytes of id"),
        pytest.param("topic_id", 17, id="17 bytes of id"),
    ],
)
def test_bytes_of_another_size_are_not_encoded(name, size):
    with pytest.raises(MalformedRecord):
        encode(replace(claim(), **{name: bytes(size)}))


@pytest.mark.parametrize(
    ("beats", "is_valid"),
    [
        pytest.param([], False, id="none"),
        pytest.param([[0, None]], True, id="one"),
        pytest.param([[0]], False, id="a beat too short"),
        pytest.param([[0, 1, 2]], False, id="a beat too long"),
        pytest.param([[None, 1]], False, id="a beat without epoch"),
        pytest.param([[0, -1]], False, id="a negative position"),
        pytest.param([0], False, id="no pair"),
    ],
)
def test_a_batch_has_at_least_one_beat_of_epoch_and_position(beats, is_valid):
    value = b"\x01\x06\x00" + pack(["c1", "g", INC, 0, beats])
    assert isinstance(decode(value), Undecodable) != is_valid


@pytest.mark.parametrize(
    ("scope", "is_valid"),
    [
        pytest.param(None, True, id="whole group"),
        pytest.param([], False, id="no topic"),
        pytest.param([("t", ())], True, id="whole topic"),
        pytest.param([("s", ()), ("t", (0, 3))], True, id="ascending"),
        pytest.param([("t", ()), ("s", ())], False, id="topics descend"),
        pytest.param([("t", (0,)), ("t", (1,))], False, id="a topic twice"),
        pytest.param([("t", (3, 0))], False, id="partitions descend"),
        pytest.param([("t", (0, 0))], False, id="a partition twice"),
        pytest.param([("/planner", ())], False, id="reserved topic"),
        pytest.param([("s", range(128)), ("t", range(128))], True, id="256 in all"),
        pytest.param([("s", range(128)), ("t", range(129))], False, id="257 in all"),
    ],
)
def test_a_scope_has_ascending_topics_and_at_most_256_partitions(scope, is_valid):
    topics = scope and tuple(ScopedTopic(name, tuple(each)) for name, each in scope)
    record = replace(schedule(1, 2), scope=topics)
    found = decode(_encode_unjudged(record))
    assert (found == record) == is_valid
    assert isinstance(found, Undecodable) != is_valid


def test_a_payload_that_is_no_array_is_undecodable():
    for payload in (b"", b"\x80", b"\xc0", b"\xc1", b"\x01", b"\xd4\x01\x01"):
        assert reason(BEAT + payload).startswith("bad payload"), payload


def test_text_that_is_no_utf8_is_undecodable():
    value = BEAT + pack(heartbeat_fields()).replace(b"\xa2c1", b"\xa2\xff\xfe")
    assert reason(value).startswith("bad payload")


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01"])
def test_a_deeply_nested_payload_is_undecodable(opening):
    deep = opening * (40_000 // len(opening))
    assert reason(BEAT + deep).startswith("bad payload")
    assert reason(BEAT + b"\x99" + deep).startswith("bad payload")


def test_the_reason_of_an_undecodable_value_has_at_most_200_characters():
    value = b"\x01\x80\x01\x00" + pack([{"x" * 900: "y"}])
    assert len(reason(value)) <= 200


def test_integers_of_a_payload_may_be_longer_than_needed():
    # Frozen: readers take every form of an integer, encoders write the shortest.
    value = BEAT + pack(heartbeat_fields(seq=5))
    longer = value.replace(INC + b"\x05", INC + b"\xcf" + (5).to_bytes(8, "big"))
    assert len(longer) == len(value) + 8
    assert decode(longer) == decode(value)


# --- Names ---

IDENTIFIERS = [
    pytest.param("", False, id="empty"),
    pytest.param("a", True, id="one letter"),
    pytest.param("Az09._:-", True, id="whole alphabet"),
    pytest.param("a" * 200, True, id="200"),
    pytest.param("a" * 201, False, id="201"),
    pytest.param("a" * 250, False, id="250"),
    pytest.param("a\n", False, id="newline at the end"),
    pytest.param("\na", False, id="newline at the start"),
    pytest.param("a/b", False, id="slash"),
    pytest.param("a b", False, id="blank"),
    pytest.param("ä", False, id="more than ASCII"),
    pytest.param("a\0", False, id="NUL"),
    pytest.param("٣", False, id="a digit of another script"),
    pytest.param(".", False, id="dot"),
    pytest.param("..", False, id="two dots"),
    pytest.param("...", True, id="three dots"),
    pytest.param("..a", True, id="dots and a letter"),
]
TOPICS = [
    pytest.param("", False, id="empty"),
    pytest.param("Az09._-", True, id="whole alphabet"),
    pytest.param("a:b", False, id="colon"),
    pytest.param("a" * 249, True, id="249"),
    pytest.param("a" * 250, False, id="250"),
    pytest.param("a\n", False, id="newline at the end"),
    pytest.param("a/b", False, id="slash"),
    pytest.param(".", False, id="dot"),
    pytest.param("..", False, id="two dots"),
    pytest.param("...", True, id="three dots"),
    pytest.param("日本", False, id="more than ASCII"),
]


@pytest.mark.parametrize(("name", "is_valid"), IDENTIFIERS)
def test_only_valid_identifiers_are_decoded(name, is_valid):
    assert is_identifier(name) == is_valid
    for field in ("client_id", "group_id"):
        found = decode_beat(**{field: name})
        assert isinstance(found, Heartbeat) == is_valid
        if not is_valid and len(name) < 250:
            assert found.reason == f"bad {field}"
    found = decode(_encode_unjudged(release(0, successor=name)))
    assert isinstance(found, Undecodable) != is_valid


@pytest.mark.parametrize(("name", "is_valid"), TOPICS)
def test_only_valid_topic_names_are_decoded(name, is_valid):
    assert is_topic(name) == is_valid
    assert isinstance(decode_beat(topic=name), Heartbeat) == is_valid
    record = replace(member(), topics=("t", name))
    assert isinstance(decode(_encode_unjudged(record)), Undecodable) != is_valid


@pytest.mark.parametrize("name", ["/checkpoint", "/planner"])
def test_a_reserved_topic_is_valid_in_a_key_but_not_in_a_member(name):
    assert not is_topic(name)
    assert isinstance(decode_beat(topic=name), Heartbeat)
    assert isinstance(decode_beat(topic=name + "\n"), Undecodable)
    found = decode(_encode_unjudged(replace(member(), topics=(name,))))
    assert found == Undecodable("bad topics")


def test_a_release_without_a_successor_is_valid():
    assert decode(encode(release(0))) == release(0)


def _encode_unjudged(record):
    return encode_fields(kind_of(record), list(astuple(record)))


# --- Tags ---


@pytest.mark.parametrize(
    ("size", "is_valid"), [pytest.param(1024, True), pytest.param(1025, False)]
)
def test_tags_of_more_than_1024_bytes_are_undecodable(size, is_valid):
    value = BEAT + pack([*heartbeat_fields(), bytes(size)])
    assert isinstance(decode(value), Heartbeat) == is_valid


def test_tags_that_are_no_bytes_are_undecodable():
    for tags in (None, "x", {}, 0):
        value = BEAT + pack([*heartbeat_fields(), tags])
        assert isinstance(decode(value), Undecodable)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        pytest.param(pack({"a": [1, None]}), {"a": [1, None]}, id="a map"),
        pytest.param(b"\x80", {}, id="empty map"),
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"\xc1", None, id="no MessagePack"),
        pytest.param(pack([1]), None, id="no map"),
        pytest.param(pack({1: 2}), None, id="keys that are no text"),
        pytest.param(b"\x81\xa1\xff\x01", None, id="no UTF-8"),
        pytest.param(b"\x81\xa1a" + b"\x91" * 1000, None, id="too deep"),
    ],
)
def test_tags_that_are_no_map_with_text_keys_count_as_absent(tags, expected):
    assert decode_tags(tags) == expected


@pytest.mark.parametrize(
    ("person", "expected"),
    [
        ("ada", "ada"),
        ("x" * 300, "x" * 200),
        ("\U0001f600" * 300, "\U0001f600" * 150),
        ("caf\udce9", "caf?"),
        ("a\x1b\nb", "a\x1b\nb"),
        ("", None),
        (None, None),
    ],
)
def test_the_name_of_a_person_is_cut_to_fit_into_tags(person, expected):
    record = replace(beat(0), tags=person_to_tags(person))
    assert person_of(decode(encode(record))) == expected


@pytest.mark.parametrize("tags", [b"\xc1", pack({"by": 7}), pack({"why": "x"})])
def test_tags_without_a_valid_name_have_no_person(tags):
    assert person_of(replace(beat(0), tags=tags)) is None


def test_tags_name_the_operation_that_is_undone():
    tags = person_to_tags("ada", undoes=bytes(16))
    record = decode(encode(replace(beat(0), tags=tags)))
    assert (person_of(record), undone_of(record)) == ("ada", bytes(16))
    assert undone_of(replace(beat(0), tags=person_to_tags("ada"))) is None


@pytest.mark.parametrize("value", [1, "00" * 16, bytes(15), None])
def test_tags_with_an_invalid_op_id_name_no_undone_operation(value):
    assert undone_of(replace(beat(0), tags=pack({"undoes": value}))) is None


def test_a_long_name_of_a_person_is_cut_when_it_is_read():
    assert person_of(replace(beat(0), tags=pack({"by": "x" * 900}))) == "x" * 200


# --- Encoding ---


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(beat(-1), id="out of range"),
        pytest.param(beat(0, client="no such name"), id="bad name"),
        pytest.param(batch(), id="no beats"),
        pytest.param(beat(2**64), id="no MessagePack integer"),
        pytest.param(beat(object()), id="no value"),
    ],
)
def test_an_invalid_record_is_not_encoded(bad):
    with pytest.raises(MalformedRecord):
        encode(bad)


def test_a_deeply_nested_record_is_not_encoded():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MalformedRecord):
        encode(beat(deep))
    while deep:
        (deep,) = deep


def test_kind_of_returns_the_type_on_the_wire():
    assert [kind_of(record).number for record in all_records()] == [
        *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20),
        *(21, 22, 23, 24),
        *(128, 129, 130, 131, 132),
    ]


def test_a_config_with_default_limits_has_46_bytes():
    assert len(encode(config())) == 46
    assert decode(encode(config())) == Config(
        generation=1,
        format_id=ident("format"),
        era=1,
        cluster_id="cluster",
        heartbeat_interval_ms=1_000,
        partition_count=1,
        feature_level=1,
        limits=Limits(**dict.fromkeys(Limits.__struct_fields__)),
    )


def test_names_that_are_too_long_are_not_cached():
    # Valid names are cached, so hostile ones must be short.
    codec._known_ids.clear()
    codec._known_topics.clear()
    decode_beat(client_id="a" * 250)
    decode(_encode_unjudged(replace(member(), topics=("t" * 250,))))
    assert (codec._known_ids, codec._known_topics) == (set(), set())


def test_the_name_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(codec, "NAMES_REMEMBERED_MAX", 3)
    monkeypatch.setattr(codec, "_known_ids", set())
    for number in range(10):
        assert is_identifier(f"c{number}")
        assert is_identifier(f"c{number}")
        assert len(codec._known_ids) <= 3


def test_valid_identifiers_and_topics_are_cached_separately():
    assert isinstance(decode_beat(client_id="a:b", topic="t"), Heartbeat)
    assert decode_beat(client_id="a:b", topic="a:b").reason == "bad topic"
    assert isinstance(decode_beat(client_id="c", topic="/planner"), Heartbeat)
    assert decode_beat(client_id="/planner", topic="/planner").reason == "bad client_id"


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
def test_the_header_of_a_frame_identifies_its_record_type(record):
    assert encode(record).startswith(header_of(type(record)))
    others = {header_of(type(other)) for other in all_records()}
    assert sum(encode(record).startswith(head) for head in others) == 1


@pytest.mark.parametrize("record", all_records(), ids=lambda each: type(each).__name__)
def test_a_payload_parses_to_the_record_of_its_frame(record):
    head = header_of(type(record))
    assert parser_of(type(record))(encode(record)[len(head) :]) == record


@pytest.mark.parametrize("second", ["t", "u"])
def test_a_stage_that_names_a_key_twice_is_undecodable(second):
    record = stage((0, 2))
    topics = (*record.topics, StagedTopic(second, None, ((0, 3),)))
    value = header_of(StagePosition) + pack([*astuple(record)[:6], topics])
    found = decode(value)
    is_distinct = second == "u"
    assert isinstance(found, StagePosition) == is_distinct
    if not is_distinct:
        assert found == Undecodable("a key is named twice")


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"client": "c1", "host": "m1"}, id="both"),
        pytest.param({"client": None, "host": None}, id="none"),
        pytest.param({"client": "no name"}, id="no client"),
        pytest.param({"client": None, "host": ""}, id="empty host"),
        pytest.param({"action": "stop"}, id="action"),
    ],
)
def test_a_directive_with_an_invalid_target_or_action_is_not_encoded(fields):
    record = direct()
    assert decode(encode(record)) == record
    with pytest.raises(MalformedRecord):
        encode(replace(record, **fields))


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (imported_settings("a b"), "bad settings"),
        (imported_settings(policy="a b"), "bad settings"),
        (imported_directive("a b"), "bad directives"),
        (imported_directive(client="a b"), "bad directives"),
        (imported_directive(host=None), "bad directives"),
        (imported_directive(client="c1", host="h1"), "bad directives"),
        (None, "it has neither settings nor directives"),
    ],
    ids=str,
)
def test_a_layout_groups_record_with_invalid_items_is_not_encoded(item, reason):
    record = layout_groups(*([] if item is None else [item]))
    with pytest.raises(MalformedRecord, match=reason):
        encode(record)
    assert decode(encode(layout_groups(imported_settings(), imported_directive())))


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({}, True),
        ({"new_count": 12}, True),
        ({"new_count": 4}, True),
        ({"new_count": 4, "ends": (1,) * 4}, False),
        ({"new_count": 6}, False),
        ({"ends": (1,) * 4}, True),
        ({"ends": (1,) * 3}, False),
        ({"topic": "/checkpoint"}, False),
        ({"topic": "/checkpoint", "new_count": 4}, False),
    ],
)
def test_a_growth_with_invalid_counts_ends_or_topic_is_undecodable(change, is_valid):
    record = replace(growth(8, 4), **change)
    value = encode_fields(kind_of(record), [*astuple(record)])
    assert isinstance(decode(value), Undecodable) is not is_valid
