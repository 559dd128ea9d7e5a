"""What members read from the Plan of their group."""

from logkit import KEY, Log, claim, planned, settings

from kafka_marshal.engine.plan_following import PlanFollower
from kafka_marshal.protocol.settings import Settings

FAR = 2**62


def read(follower, log, *, coordinators=1, settings=None):
    settings = settings or log.state.settings_of("g")
    follower.read(log.state, "g", settings=settings, coordinators=coordinators)


def followed(log, *, coordinators=1):
    follower = PlanFollower()
    read(follower, log, coordinators=coordinators)
    return follower


def planned_log(**rest):
    log = Log(level=2)
    log.append(settings(policy="planner"))
    log.append(planned(0, ("c2", 0, (0,)), vector=((FAR, 0),), **rest))
    return log


def test_a_plan_counts_where_the_settings_ask_for_it():
    log = planned_log()
    follower = followed(log)
    assert (follower.is_in_force, follower.named(KEY, log.state)) == (True, "c2")
    log.append(settings(2, policy="fair"))
    read(follower, log, coordinators=1)
    assert (follower.is_in_force, follower.named(KEY, log.state)) == (False, None)


def test_a_later_plan_takes_the_place_of_the_last_one():
    log = planned_log()
    follower = followed(log)
    log.append(planned(1, ("c3", 0, (0,)), vector=((FAR, 0),)))
    read(follower, log, coordinators=1)
    assert follower.named(KEY, log.state) == "c3"


def test_a_plan_without_all_slices_is_none():
    log = planned_log(count=2)
    assert followed(log).named(KEY, log.state) is None


def test_a_claim_makes_an_entry_void():
    log = Log(level=2)
    log.append(settings(policy="planner"))
    log.append(planned(0, ("c2", 0, (0,)), vector=((log.state.next_offset, 0),)))
    follower = followed(log)
    assert follower.named(KEY, log.state) == "c2"
    log.append(claim("c1"))
    assert follower.named(KEY, log.state) is None


def test_a_vector_of_other_coordinating_partitions_is_void():
    log = planned_log()
    assert followed(log, coordinators=2).named(KEY, log.state) is None


def test_a_plan_is_void_once_the_number_of_coordinating_partitions_has_changed():
    log = planned_log()
    follower = followed(log)
    assert follower.named(KEY, log.state) == "c2"
    read(follower, log, coordinators=2)
    assert follower.named(KEY, log.state) is None
    read(follower, log, coordinators=1)
    assert follower.named(KEY, log.state) == "c2"


def test_settings_of_another_home_count():
    log = Log(level=2)
    log.append(planned(0, ("c2", 0, (0,)), vector=((FAR, 0),)))
    follower = followed(log)
    assert not follower.is_in_force
    read(follower, log, settings=Settings(1, policy="planner"))
    assert follower.named(KEY, log.state) == "c2"
