"""After a kill the owners are those that a simulation of the plan predicts."""

import pytest
from domain import opened
from fleet import Fleet
from slices import slice_of
from waiting import eventually

from kafka_marshal.views.plan_simulation import Changes, simulate

KILLS = slice_of(quick=2, full=100)
PARTITIONS = 13
MEMBERS = 4


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique) as domain:
        yield domain


def balanced(domain, group, topic):
    """Return the world once all partitions are owned, equally, by live members."""

    def look():
        world = domain.world()
        found = simulate(
            world, group, changes=Changes(), partition_counts={topic: PARTITIONS}
        )
        holders = set(found.before.values())
        is_whole = len(holders) == MEMBERS and holders == set(found.members)
        return world if is_whole and not found.moves else None

    return eventually(look, "the group is balanced")


def test_owners_after_a_kill_are_those_of_the_simulation(domain, unique, tmp_path):
    topic = domain.data_topic(PARTITIONS)
    group = unique("kills")
    with Fleet(domain, tmp_path, group_id=group, topics=[topic]) as fleet:
        workers = [fleet.start(f"w{number}") for number in range(MEMBERS)]
        for number in range(KILLS):
            world = balanced(domain, group, topic)
            victim = workers.pop(number % MEMBERS)
            predicted = simulate(
                world,
                group,
                changes=Changes(kill=(victim.client_id,)),
                partition_counts={topic: PARTITIONS},
            )
            assert {move.source for move in predicted.moves} == {victim.client_id}
            assert not predicted.uncovered
            victim.kill()

            def owners(gone=victim.client_id):
                found = {
                    key.topic_partition: known.owner and known.owner.client_id
                    for key, known in domain.world().claims(group)
                }
                return found if not {gone, None} & set(found.values()) else None

            reached = eventually(owners, "the others took over")
            assert reached == predicted.owners, f"kill {number}, {victim.client_id}"
            workers.append(fleet.start(f"w{MEMBERS + number}"))
