"""Settings of a group, as an admin writes them to its home partition."""

import pytest
from adminkit import TuningAdmin
from enginekit import fold, world
from logkit import Log

from kafka_marshal.admin.group_settings import plan_settings
from kafka_marshal.errors import ClaimRejected, ConfigurationError, LogUnwritable
from kafka_marshal.protocol.codec import decode, person_of
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.settings import NO_SETTINGS

K = 4
HOME = home_partition("g", partition_count=K)


@pytest.fixture(name="cluster")
def _cluster():
    return world(partitions=K, groups=1)


def test_a_change_keeps_the_settings_that_it_does_not_name(cluster):
    admin = TuningAdmin(cluster, person="ada")
    admin.set(handoff_ms=5_000, debounce_ms=0)
    second = admin.set(handoff_ms=None, handoffs_max=2)
    assert second.before.generation == 1
    found = fold(cluster, HOME).settings_of("g")
    assert found == (2, None, None, 0, None, 2, None) == second.after
    stored = cluster.kafka.log(cluster.place(HOME)).records[-1]
    record = decode(stored.entry().value)
    assert (person_of(record), record.reason, record.client_id) == (
        *("ada", "slow"),
        "admin",
    )


def test_changes_that_have_no_names_are_refused(cluster):
    with pytest.raises(ConfigurationError, match="changes must be a Mapping"):
        TuningAdmin(cluster).set_group("g", None)


def test_an_equal_setting_or_a_dry_run_writes_nothing(cluster):
    admin = TuningAdmin(cluster)
    change = admin.set(handoff_ms=None)
    assert (change.is_changed, change.before) == (False, NO_SETTINGS)
    assert admin.set_group("g", {"handoff_ms": 1}).is_changed
    assert fold(cluster, HOME).settings_of("g") == NO_SETTINGS


def test_a_change_that_another_admin_overtook_is_refused(cluster):
    one, two = TuningAdmin(cluster), TuningAdmin(cluster, "admin-2")
    other = two.set_group("g", {"handoff_ms": 2_000})
    one.set(handoff_ms=1_000)
    with pytest.raises(ClaimRejected, match="changed by somebody else") as caught:
        two._write_settings(HOME, other, None)
    assert caught.value.reason == "settings_overtaken"
    assert fold(cluster, HOME).settings_of("g").handoff_ms == 1_000
    two.set(handoff_ms=2_000)
    assert fold(cluster, HOME).settings_of("g").handoff_ms == 2_000


def test_settings_beyond_the_limit_of_groups_are_refused(cluster):
    admin = TuningAdmin(cluster)
    admin.set(handoff_ms=1_000)
    names = "abcdefhijklmnop"
    other = next(n for n in names if home_partition(n, partition_count=K) == HOME)
    with pytest.raises(LogUnwritable, match="limits"):
        admin.set(other, handoff_ms=1_000)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param({"handoff": 1}, "unknown setting 'handoff'", id="unknown"),
        pytest.param({"handoff_ms": 0}, "must be 1 to 3600000", id="too small"),
        pytest.param({"handoffs_max": 1_001}, "must be 1 to 1000", id="too large"),
        pytest.param({"policy": "greedy"}, "must be fair or planner", id="policy"),
        pytest.param({"grace_ms": "5m"}, "must be a number", id="text"),
    ],
)
def test_the_error_of_a_bad_value_names_the_setting(changes, text):
    with pytest.raises(ConfigurationError, match=text) as caught:
        plan_settings(Log(level=2).state, "g", changes=changes)
    assert caught.value.setting in changes


@pytest.mark.parametrize("configured", [True, False])
def test_settings_need_level_2(configured):
    log = Log(level=1, configured=configured)
    with pytest.raises(ConfigurationError, match="topic upgrade"):
        plan_settings(log.state, "g", changes={"handoff_ms": 1})
