"""Settings of a group, as an admin writes them to its home partition."""

import pytest
from enginekit import fold, world
from logkit import H, Log
from positionkit import Stepping

from kafka_marshal.admin.group_settings import plan_settings, write_settings
from kafka_marshal.admin.pausing import Sender
from kafka_marshal.errors import ClaimRejected, ConfigurationError, LogUnwritable
from kafka_marshal.protocol.codec import decode, person_of
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.settings import NO_SETTINGS

K = 4
HOME = home_partition("g", partition_count=K)
TIMEOUT_MS = 10 * H


@pytest.fixture(name="cluster")
def _cluster():
    return world(partitions=K, groups=1)


class Admin:
    """An admin that changes the settings of groups."""

    def __init__(self, cluster, name="admin"):
        self.follower = Stepping(cluster, name)
        self.sender = Sender(name, "ada")

    def plan(self, group="g", **changes):
        self.follower.catch_up(TIMEOUT_MS)
        home = home_partition(group, partition_count=K)
        return plan_settings(self.follower.replicas[home].world, group, changes=changes)

    def write(self, change):
        home = home_partition(change.group_id, partition_count=K)
        write_settings(
            self.follower,
            change,
            sender=self.sender,
            home=home,
            reason="slow",
            timeout_ms=TIMEOUT_MS,
        )


def test_a_change_keeps_what_it_does_not_name(cluster):
    admin = Admin(cluster)
    admin.write(admin.plan(handoff_ms=5_000, debounce_ms=0))
    second = admin.plan(handoff_ms=None, handoffs_max=2)
    assert second.before.generation == 1
    admin.write(second)
    found = fold(cluster, HOME).settings_of("g")
    assert found == (2, None, None, 0, None, 2, None) == second.after
    stored = cluster.kafka.log(cluster.place(HOME)).records[-1]
    record = decode(stored.entry().value)
    assert (person_of(record), record.reason, record.client_id) == (
        *("ada", "slow"),
        "admin",
    )


def test_a_change_of_nothing_is_none(cluster):
    admin = Admin(cluster)
    change = admin.plan(handoff_ms=None)
    assert (change.is_changed, change.before) == (False, NO_SETTINGS)
    assert admin.plan(handoff_ms=1).is_changed


def test_of_two_admins_the_first_wins(cluster):
    one, two = Admin(cluster), Admin(cluster, "admin-2")
    mine, other = one.plan(handoff_ms=1_000), two.plan(handoff_ms=2_000)
    one.write(mine)
    with pytest.raises(ClaimRejected, match="changed by somebody else") as caught:
        two.write(other)
    assert caught.value.reason == "settings_overtaken"
    assert fold(cluster, HOME).settings_of("g").handoff_ms == 1_000
    two.write(two.plan(handoff_ms=2_000))
    assert fold(cluster, HOME).settings_of("g").handoff_ms == 2_000


def test_a_group_too_many_is_refused(cluster):
    admin = Admin(cluster)
    admin.write(admin.plan(handoff_ms=1_000))
    names = "abcdefhijklmnop"
    other = next(n for n in names if home_partition(n, partition_count=K) == HOME)
    with pytest.raises(LogUnwritable, match="limits"):
        admin.write(admin.plan(other, handoff_ms=1_000))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param({"handoff": 1}, "unknown setting 'handoff'", id="unknown"),
        pytest.param({"handoff_ms": 0}, "must be 1 to 3600000", id="too small"),
        pytest.param({"handoffs_max": 1_001}, "must be 1 to 1000", id="too large"),
        pytest.param({"policy": "greedy"}, "must be fair or planner", id="policy"),
        pytest.param({"grace_ms": "5m"}, "no number", id="text"),
    ],
)
def test_a_bad_value_names_the_setting(changes, text):
    with pytest.raises(ConfigurationError, match=text) as caught:
        plan_settings(Log(level=2).state, "g", changes=changes)
    assert caught.value.setting in changes


@pytest.mark.parametrize("configured", [True, False])
def test_settings_need_level_2(configured):
    log = Log(level=1, configured=configured)
    with pytest.raises(ConfigurationError, match="topic upgrade"):
        plan_settings(log.state, "g", changes={"handoff_ms": 1})
