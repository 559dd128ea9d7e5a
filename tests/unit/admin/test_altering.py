import msgspec
import pytest
from adminkit import InMemory
from enginekit import KEY, H, follower, lowered, owning, world, write
from logkit import claim, limits, member, release

from kafka_marshal.admin.altering import (
    Altering,
    plan_alter,
    plan_upgrade,
    require_members,
)
from kafka_marshal.engine.config_check import require_newest
from kafka_marshal.errors import ClaimRejected, ConfigurationError, LogUnwritable
from kafka_marshal.protocol.codec import person_of, person_to_tags
from kafka_marshal.protocol.records import SUPPORTED_LEVEL
from kafka_marshal.protocol.state import WorldState


class AlteringAdmin(InMemory, Altering):
    """An admin that changes Configs."""


def altering(cluster):
    """Return an admin that has read the log."""
    admin = AlteringAdmin(cluster, person="ada")
    admin._read()
    return admin


def plan_of(found, h=None, **bounds):
    return plan_alter(
        found.worlds,
        heartbeat_interval_ms=h,
        limits=bounds,
        era=found.wall_s,
        tags=person_to_tags("ada"),
    )


def test_alter_changes_only_the_interval_and_the_given_limits():
    cluster = world(2, keys=50)
    node = owning(cluster)
    admin = altering(cluster)
    found = admin.follower
    plan = plan_of(found, 2 * H, beats=7)
    assert plan.partitions == (0, 1)
    assert plan.changes == {
        "heartbeat_interval_ms": (H, 2 * H),
        "beats": (4_096, 7),
    }
    config = plan.config
    assert (config.generation, person_of(config)) == (2, "ada")
    assert config.limits == limits(keys=50, beats=7)
    same = {"generation": 1, "era": cluster.config.era, "tags": msgspec.UNSET}
    same |= {"heartbeat_interval_ms": H, "limits": cluster.config.limits}
    assert msgspec.structs.replace(config, **same) == cluster.config
    admin._write_config(config, plan.partitions)
    cluster.run(2 * H)
    assert node.engine.context.config == config
    assert node.held
    again = plan_of(found, 2 * H, beats=7)
    assert (again.partitions, again.changes, again.config) == ((), {}, config)


def test_an_interrupted_change_is_completed_or_replaced_by_the_next():
    cluster = world(2)
    half = msgspec.structs.replace(
        cluster.config, generation=2, era=77, heartbeat_interval_ms=2 * H
    )
    write(cluster, half)
    admin = altering(cluster)
    found = admin.follower
    assert plan_of(found).partitions == (1,)
    assert plan_of(found, 2 * H).config == half
    plan = plan_of(found, 3 * H)
    assert (plan.config.generation, plan.partitions) == (3, (0, 1))
    admin._write_config(plan.config, plan.partitions)
    assert {each.config for each in found.worlds} == {plan.config}


def test_a_change_is_refused_if_partition_0_has_lost_the_newest_config():
    """The next Config would have the generation of the lost one."""
    cluster = world(2)
    require_newest(follower(cluster).by_partition, "own")
    newest = msgspec.structs.replace(cluster.config, generation=2, era=77)
    write(cluster, newest, 1)
    run = "marshal topic format --coordination-topic own"
    with pytest.raises(ClaimRejected, match=f"run: {run}$"):
        require_newest(follower(cluster).by_partition, "own")
    write(cluster, newest, 0)
    require_newest(follower(cluster).by_partition, "own")
    require_newest({0: WorldState(0)}, "own")


def test_a_config_from_a_clock_days_ahead_is_an_error_that_names_the_clock():
    cluster = world(2)
    admin = altering(cluster)
    admin.follower._clock = cluster.clock.view(wall_offset_ms=2 * 86_400_000)
    plan = plan_of(admin.follower, 2 * H)
    with pytest.raises(LogUnwritable, match="clock of this machine is more than a day"):
        admin._write_config(plan.config, plan.partitions)


def test_a_config_that_another_admin_wrote_first_is_an_error():
    cluster = world(2)
    admin = altering(cluster)
    found = admin.follower
    plan = plan_of(found, 2 * H)
    write(cluster, msgspec.structs.replace(cluster.config, generation=2, era=2))
    with pytest.raises(LogUnwritable, match="partition 0 does not have this"):
        admin._write_config(plan.config, plan.partitions)


@pytest.mark.parametrize(
    ("h", "bounds", "match"),
    [
        (100, {}, "must be 200 to"),
        (None, {"kees": 1}, "unknown limit 'kees'"),
        (None, {"keys": 0}, "limit keys cannot be 0"),
    ],
    ids=str,
)
def test_an_invalid_interval_or_limit_is_refused(h, bounds, match):
    with pytest.raises(ConfigurationError, match=match):
        plan_of(follower(world()), h, **bounds)


def test_below_level_2_the_interval_can_only_be_raised():
    found = follower(lowered())
    with pytest.raises(ConfigurationError, match="topic upgrade"):
        plan_of(found, H // 2)
    assert plan_of(found, 2 * H).changes


def test_a_plan_shows_exceeded_limits_and_keys_to_forget():
    cluster = world()
    write(cluster, claim(key=KEY))
    write(cluster, release(1, key=KEY))
    for group in ("g1", "g2"):
        write(cluster, claim(key=KEY._replace(group_id=group)))
    cluster.run(H)
    write(cluster, claim("c9", key=KEY._replace(group_id="g3")))
    plan = plan_of(follower(cluster), keys=3, groups=4, forget_ms=H // 2)
    (one,) = plan.exceeded
    assert (one.partition, one.limit, one.count) == (0, "keys", 4)
    assert plan.forgotten_count == 1
    plan = plan_of(follower(cluster), forget_ms=H * H)
    assert (plan.forgotten_count, plan.exceeded) == (0, ())


# --- upgrades


def upgrade_of(found):
    tags = person_to_tags("ada")
    return plan_upgrade(found.by_partition, era=found.wall_s, tags=tags)


def test_an_upgrade_changes_only_the_feature_level():
    cluster = lowered()
    node = owning(cluster)
    admin = altering(cluster)
    found = admin.follower
    plan = upgrade_of(found)
    assert (plan.level, plan.level_then) == (1, SUPPORTED_LEVEL)
    assert (plan.config.generation, plan.partitions) == (2, (0, 1))
    require_members(plan)
    admin._write_config(plan.config, plan.partitions)
    config = found.worlds[1].config
    assert config == plan.config
    assert person_of(config) == "ada"
    assert (config.generation, config.feature_level) == (2, SUPPORTED_LEVEL)
    assert config.era > cluster.config.era
    same = {"generation": 1, "era": cluster.config.era, "feature_level": 1}
    same["tags"] = msgspec.UNSET
    assert msgspec.structs.replace(config, **same) == cluster.config
    cluster.run(2 * H)
    assert node.engine.context.config == config
    assert node.held
    again = upgrade_of(found)
    assert (again.level, again.partitions) == (SUPPORTED_LEVEL, ())
    assert again.config == config


def test_an_upgrade_that_was_interrupted_is_completed():
    cluster = lowered()
    admin = altering(cluster)
    found = admin.follower
    plan = upgrade_of(found)
    half = msgspec.structs.replace(
        cluster.config, generation=2, era=77, feature_level=SUPPORTED_LEVEL
    )
    write(cluster, half)
    found.catch_up(100)
    plan = upgrade_of(found)
    assert (plan.level, plan.config, plan.partitions) == (1, half, (1,))
    admin._write_config(plan.config, plan.partitions)
    assert {each.config for each in found.worlds} == {half}


def test_an_upgrade_fails_if_a_partition_has_another_config():
    cluster = lowered()
    admin = altering(cluster)
    found = admin.follower
    plan = upgrade_of(found)
    era = found.wall_s + 1_000
    other = msgspec.structs.replace(cluster.config, generation=2, era=era)
    write(cluster, other, 1)
    with pytest.raises(LogUnwritable, match="partition 1 does not have this"):
        admin._write_config(plan.config, plan.partitions)


def test_an_upgrade_is_refused_while_members_are_of_an_older_release():
    cluster = lowered(1)
    write(cluster, member("old", inc=b"i" * 16))
    plan = upgrade_of(follower(cluster))
    assert plan.too_old == ("g/old",)
    with pytest.raises(ClaimRejected, match="g/old"):
        require_members(plan)


def test_an_upgrade_of_an_unformatted_partition_is_refused():
    cluster = world()
    place = cluster.place(0)
    cluster.kafka.log(place).records.clear()
    with pytest.raises(ConfigurationError, match="not formatted"):
        upgrade_of(follower(cluster))
