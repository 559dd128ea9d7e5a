import msgspec
import pytest
from logkit import all_records, config

from kafka_marshal.protocol.records import (
    KINDS,
    LIMIT_DEFAULTS,
    SUPPORTED_LEVEL,
    Limits,
)

FIELDS = {
    "Heartbeat": "client_id group_id incarnation seq topic partition epoch position "
    "rewind tags",
    "ClaimingPartition": "client_id group_id incarnation seq generation topic "
    "partition topic_id resume_hash expected_epoch resume tags",
    "ReleasingPartition": "client_id group_id incarnation seq topic partition epoch "
    "position successor reason tags",
    "ClaimingMessages": "client_id group_id incarnation seq topic partition epoch "
    "grantee first proposed_last_offset tags",
    "ReleaseGroup": "client_id group_id incarnation seq op_id msg_expire_time reason "
    "tags",
    "BatchHeartbeat": "client_id group_id incarnation seq beats tags",
    "StagePosition": "client_id group_id incarnation seq op_id plan_digest topics tags",
    "DecidePosition": "client_id group_id incarnation seq op_id plan_digest "
    "key_count tags",
    "ResolvePosition": "client_id group_id incarnation seq op_id commit decided "
    "reason tags",
    "PauseGroup": "client_id group_id incarnation seq op_id begin_time "
    "msg_expire_time scope reason tags",
    "HandoffOffer": "client_id group_id incarnation seq topic partition epoch "
    "successor within_ms tags",
    "HandoffReady": "client_id group_id incarnation seq topic partition epoch tags",
    "Config": "generation format_id era cluster_id heartbeat_interval_ms "
    "partition_count feature_level limits tags",
    "Reset": "client_id group_id incarnation seq op_id number part_count size_bytes "
    "digest data tags",
    "LayoutFence": "client_id group_id incarnation seq op_id from_count config tags",
    "LayoutImport": "client_id group_id incarnation seq op_id source source_offset "
    "items tags",
    "LayoutDone": "client_id group_id incarnation seq op_id source source_offset "
    "key_count digest tags",
    "LayoutFinal": "client_id group_id incarnation seq op_id tags",
    "DataGrowth": "client_id group_id incarnation seq topic topic_id old_count "
    "new_count ends reason tags",
    "LayoutGroups": "client_id group_id incarnation seq op_id source source_offset "
    "settings directives tags",
    "ForgettingPartition": "client_id group_id incarnation seq topic partition epoch "
    "tags",
    "FencingClient": "client_id group_id incarnation seq fenced fenced_incarnation "
    "reason tags",
    "Directive": "client_id group_id incarnation seq op_id client host action "
    "msg_expire_time reason tags",
    "GroupSettings": "client_id group_id incarnation seq generation policy "
    "planner_version_max debounce_ms handoff_ms handoffs_max grace_ms reason tags",
    "Member": "client_id group_id incarnation seq topics host capacity load labels "
    "draining feature_level_max plan_generation tags",
    "Plan": "client_id group_id incarnation seq follows number slice_count "
    "planner_version vector input_digest topics moves tags",
    "CheckpointBegin": "client_id group_id incarnation seq epoch checkpoint_id tags",
    "CheckpointChunk": "client_id group_id incarnation seq epoch checkpoint_id "
    "number data tags",
    "CheckpointEnd": "client_id group_id incarnation seq epoch checkpoint_id "
    "begin_offset begin_leader_epoch part_count size_bytes digest tags",
}
NUMBERS = {
    "Heartbeat": 1,
    "ClaimingPartition": 2,
    "ReleasingPartition": 3,
    "ClaimingMessages": 4,
    "ReleaseGroup": 5,
    "BatchHeartbeat": 6,
    "StagePosition": 7,
    "DecidePosition": 8,
    "ResolvePosition": 9,
    "PauseGroup": 10,
    "HandoffOffer": 11,
    "HandoffReady": 12,
    "Config": 13,
    "Reset": 14,
    "LayoutFence": 15,
    "LayoutImport": 16,
    "LayoutDone": 17,
    "ForgettingPartition": 18,
    "FencingClient": 19,
    "LayoutFinal": 20,
    "DataGrowth": 21,
    "Directive": 22,
    "GroupSettings": 23,
    "LayoutGroups": 24,
    "Member": 128,
    "Plan": 129,
    "CheckpointBegin": 130,
    "CheckpointChunk": 131,
    "CheckpointEnd": 132,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_has_its_number_version_and_fields(kind):
    assert (kind.number, kind.version) == (NUMBERS[kind.name], 0)
    assert " ".join(kind.record.__struct_fields__) == FIELDS[kind.name]
    assert kind.record.__name__ == kind.name


def test_kinds_list_every_record_type_once():
    assert [kind.name for kind in KINDS] == list(NUMBERS)
    assert [type(record).__name__ for record in all_records()] == list(NUMBERS)


def test_the_highest_level_of_a_kind_is_the_supported_level():
    assert max(kind.level for kind in KINDS) == SUPPORTED_LEVEL == 2


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
def test_records_are_immutable_and_equal_by_their_fields(record):
    assert record == msgspec.structs.replace(record)
    with pytest.raises(AttributeError):
        record.tags = b""


@pytest.mark.parametrize(
    ("name", "default"),
    [
        pytest.param("span", 16_777_216, id="span"),
        pytest.param("max_pause_ms", 86_400_000, id="a day"),
        pytest.param("keys", 100_000, id="keys"),
        pytest.param("groups", 10_000, id="groups"),
        pytest.param("beats", 4_096, id="beats"),
        pytest.param("forget_ms", 2_592_000_000, id="thirty days"),
        pytest.param("locks", 10_000, id="locks"),
        pytest.param("operations", 1_000, id="operations"),
    ],
)
def test_a_limit_is_its_default_unless_given(name, default):
    assert config().limit(name) == default
    assert config(**{name: 3}).limit(name) == 3


def test_a_limit_of_zero_is_not_replaced_by_its_default():
    assert config(forget_ms=0).limit("forget_ms") == 0


def test_every_limit_has_a_default():
    assert tuple(LIMIT_DEFAULTS) == Limits.__struct_fields__
