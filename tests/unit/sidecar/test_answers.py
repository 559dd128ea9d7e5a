"""Views of the world document: what those get who only look."""

import pytest
from fakehub import INCARNATION, WORLD

from kafka_marshal.remote.looking import GroupLine
from kafka_marshal.sidecar import answers

WALL_MS = 1_700_000_000_000


def test_each_view_says_of_which_moment_it_is():
    for found in (
        answers.world_now(WORLD, WALL_MS),
        answers.groups_now(WORLD, WALL_MS),
        answers.group_now(WORLD, "billing", wall_ms=WALL_MS),
        answers.owners_now(WORLD, "billing", topic="orders", wall_ms=WALL_MS),
        answers.fence_now(
            WORLD, "billing", topic="orders", partition=0, wall_ms=WALL_MS
        ),
    ):
        assert found.as_of.time_ms == WALL_MS
        assert found.as_of.offsets == {"0": 12, "1": 5}


def test_groups_have_a_line_each_also_if_they_are_only_paused():
    assert answers.groups_now(WORLD, WALL_MS).groups == (
        GroupLine(
            group="billing",
            keys=3,
            owned=2,
            owners=("host-a", "host-b"),
            is_paused=False,
        ),
        GroupLine(group="halted", keys=0, owned=0, owners=(), is_paused=True),
    )


def test_a_group_has_its_claims_in_order_and_its_pauses_once():
    found = answers.group_now(WORLD, "billing", wall_ms=WALL_MS)
    assert [claim["partition"] for claim in found.claims] == [0, 1, 2]
    assert found.pauses == ()
    halted = answers.group_now(WORLD, "halted", wall_ms=WALL_MS)
    assert (halted.claims, len(halted.pauses)) == ((), 1)


def test_owners_of_a_topic():
    found = answers.owners_now(WORLD, "billing", topic="orders", wall_ms=WALL_MS)
    assert found.owners == {0: "host-b", 1: "host-a", 2: None}
    other = answers.owners_now(WORLD, "billing", topic="others", wall_ms=WALL_MS)
    assert other.owners == {}


@pytest.mark.parametrize(
    ("partition", "token", "owner", "incarnation", "position"),
    [
        (0, "0.2.17", "host-b", INCARNATION, 100),
        (2, "0.2.17", None, None, 102),
        (9, None, None, None, None),
    ],
)
def test_a_fence_is_the_newest_claim(partition, token, owner, incarnation, position):
    found = answers.fence_now(
        WORLD, "billing", topic="orders", partition=partition, wall_ms=WALL_MS
    )
    assert (found.token, found.client_id) == (token, owner)
    assert (found.incarnation, found.position) == (incarnation, position)
