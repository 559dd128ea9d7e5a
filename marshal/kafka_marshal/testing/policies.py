"""Checks for any policy, built in or from another package.

All members of a simulated group ask the policy at once, on the same view, in rounds.
Its plans must converge, with every key held::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_policy(check):
        check(Subject(my_policy))
"""

# ruff: noqa: PLR2004 - the numbers of a check are its point
# ruff: noqa: S311 - repeatable on purpose

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import attrs
import msgspec

from kafka_marshal.policies import KeyView, MemberView, Plan, Policy, View
from kafka_marshal.protocol.types import Key

__all__ = ["CHECKS", "Check", "Counts", "SimulatedGroup", "Subject", "check_policy"]

GROUP = "g"
ROUNDS_MAX = 60
ORPHAN_ROUNDS = 2
WORLDS = 40


class Counts(Enum):
    """What the limit of a member counts under a policy."""

    PARTITIONS = "partitions"
    TOPICS = "topics"


@attrs.frozen
class Subject:
    """A policy to be checked.

    Attributes:
        policy: The policy. For a policy with state pass the class: each member gets
            its own object.
        counts: What ``claims_max`` counts under it.
        keeps: Whether it moves nothing while nothing changes. Usable policies do;
            False is for experiments.
    """

    policy: Policy
    counts: Counts = Counts.PARTITIONS
    keeps: bool = True


Check = Callable[[Subject], None]


def _key(topic: str, number: int) -> Key:
    return Key(GROUP, topic, number)


class SimulatedGroup:
    """Members that follow a policy, all at once, until nothing moves.

    A key that was released to a successor waits a round for it, as in the log; a key
    that was free for some rounds is an orphan.

    Attributes:
        owners: Owner of each key, or None.
        members: Present members; replace it to let members join and leave.
        moves: Number of keys released so far.
    """

    def __init__(
        self,
        topics: Mapping[str, int],
        members: Sequence[MemberView],
        owners: Mapping[Key, str | None] | None = None,
        *,
        subject: Subject,
    ) -> None:
        """Set the initial state.

        Args:
            topics: Number of partitions of each topic.
            members: Present members.
            owners: Initial owners; other keys are free.
            subject: The policy of all members.
        """
        self.owners: dict[Key, str | None] = {
            _key(topic, n): None for topic in topics for n in range(topics[topic])
        }
        self.owners.update(owners or {})
        self.members = list(members)
        self.moves = 0
        self._policy = subject.policy
        self._counts = subject.counts
        self._made: dict[str, Policy] = {}
        self._meant_for: dict[Key, str | None] = {}
        self._free_for: Counter[Key] = Counter()
        self._last: dict[Key, str] = {}

    def held(self, client_id: str) -> list[Key]:
        """Return the keys that a member holds."""
        return [key for key, owner in self.owners.items() if owner == client_id]

    def load(self, client_id: str) -> int:
        """Return how much of its limit a member has used."""
        held = self.held(client_id)
        topics = {key.topic for key in held}
        return len(topics) if self._counts is Counts.TOPICS else len(held)

    def view(self, me: MemberView) -> View:
        """Return the view of a member."""
        keys = tuple(
            KeyView(
                key=key,
                owner=owner,
                is_mine=owner == me.client_id,
                is_claimable=self._is_claimable(key, me.client_id),
                is_orphan=owner is None and self._free_for[key] > ORPHAN_ROUNDS,
                last_owner=self._last.get(key),
            )
            for key, owner in self.owners.items()
            if key.topic in me.topics
        )
        members = tuple(
            msgspec.structs.replace(other, held=self.load(other.client_id))
            for other in self.members
        )
        return View(
            me=me.client_id, keys=keys, members=members, claims_max=me.claims_max
        )

    def _is_claimable(self, key: Key, client_id: str) -> bool:
        meant_for = self._meant_for.get(key) or client_id
        return self.owners[key] is None and meant_for == client_id

    def plan(self, me: MemberView) -> Plan:
        """Return the plan of a member's policy now."""
        policy = self._policy
        if isinstance(policy, type):
            policy = self._made.setdefault(me.client_id, policy())
        return policy(self.view(me))

    def round(self) -> bool:
        """Let all members plan on the same view, then act; return whether any acted."""
        plans = [(m, self.plan(m)) for m in self.members if not m.is_draining]
        for member, plan in plans:
            self._check_plan(member, plan)
        self._meant_for = {}
        acted = False
        for member, plan in plans:
            for key in plan.claim:
                acted = True
                if self.owners[key] is None:
                    self.owners[key] = member.client_id
            for release in plan.release:
                acted = True
                self.moves += 1
                self._give_up(release.key)
                self._meant_for[release.key] = release.successor
        for key, owner in self.owners.items():
            self._free_for[key] = 0 if owner else self._free_for[key] + 1
        return acted

    def _check_plan(self, me: MemberView, plan: Plan) -> None:
        seen = {key.key: key for key in self.view(me).keys}
        live = {m.client_id for m in self.members if not m.is_draining}
        assert isinstance(plan, Plan), f"the policy returned {plan!r}, not a Plan"
        for key in plan.claim:
            assert key in seen, f"{me.client_id} claims {key}, which it does not see"
            assert seen[key].is_claimable, (
                f"{me.client_id} claims {key}, which is held, or released to another"
            )
        for release in plan.release:
            what = f"{me.client_id} releases {release.key}"
            assert release.key in seen, f"{what}, which it does not see"
            assert seen[release.key].is_mine, f"{what}, which it does not hold"
            names = {None, *live} - {me.client_id}
            assert release.successor in names, (
                f"{what} to {release.successor!r}, which is no other live member"
            )

    def _give_up(self, key: Key) -> None:
        owner = self.owners[key]
        if owner is not None:
            self._last[key] = owner
        self.owners[key] = None

    def leave(self, client_id: str) -> None:
        """Remove a member; its keys become free."""
        self.members = [m for m in self.members if m.client_id != client_id]
        for key in self.held(client_id):
            self._give_up(key)

    def settle(self, rounds_max: int = ROUNDS_MAX) -> int:
        """Run rounds until nothing moves; return their number.

        Raises:
            AssertionError: The group does not converge.
        """
        for count in range(rounds_max):
            acted = self.round()
            waiting = any(
                owner is None and self._free_for[key] <= ORPHAN_ROUNDS + 1
                for key, owner in self.owners.items()
            )
            if not acted and not waiting:
                return count
        raise AssertionError(
            f"the group did not converge within {rounds_max} rounds: the owners are "
            f"{self.owners}, the members {self.members}"
        )


def _topics(rng: random.Random) -> dict[str, int]:
    return {f"t{n}": rng.randint(1, 9) for n in range(rng.randint(1, 4))}


def random_group(
    rng: random.Random, subject: Subject, *, is_used: bool = True
) -> SimulatedGroup:
    """Return a random group, with keys held by random members that may hold them."""
    topics = _topics(rng)
    members = [
        MemberView(
            client_id=f"m{n}",
            topics=frozenset(rng.sample(sorted(topics), rng.randint(1, len(topics)))),
            claims_max=rng.choice([0, 0, 0, 1, 2, 5]),
        )
        for n in range(rng.randint(1, 6))
    ]
    group = SimulatedGroup(topics, members, subject=subject)
    owners: dict[str, str] = {}
    for key in group.owners:
        able = [m for m in members if _is_able(m, key, group)]
        owner = rng.choice(able).client_id if able and rng.random() < 0.7 else None
        if subject.counts is Counts.TOPICS and owner is not None:
            owner = owners.setdefault(key.topic, owner)
        if is_used:
            group.owners[key] = owner
    return group


def _is_able(member: MemberView, key: Key, group: SimulatedGroup) -> bool:
    load = group.load(member.client_id)
    has_room = not member.claims_max or load < member.claims_max
    return key.topic in member.topics and has_room


def _check_covered(group: SimulatedGroup) -> None:
    """Require that all limits are kept, and all keys held that members may hold."""
    for key, owner in group.owners.items():
        able = [
            m for m in group.members if not m.is_draining and _is_able(m, key, group)
        ]
        assert owner is not None or not able, (
            f"{key} is held by nobody, although a member may hold it"
        )
    for member in group.members:
        load = group.load(member.client_id)
        within = not member.claims_max or load <= member.claims_max
        assert within, f"{member.client_id} holds {load} of at most {member.claims_max}"


def _peers(count: int, topics: Mapping[str, int]) -> list[MemberView]:
    return [
        MemberView(client_id=f"c{n:02}", topics=frozenset(topics)) for n in range(count)
    ]


# --- The checks ----------------------------------------------------------------------


def one_member_takes_everything(subject: Subject) -> None:
    """Alone, without a limit, a member holds every key."""
    topics = {"t": 8, "u": 1}
    group = SimulatedGroup(topics, _peers(1, topics), subject=subject)
    group.settle()
    assert set(group.owners.values()) == {"c00"}


def twenty_members_share_twenty_keys(subject: Subject) -> None:
    """The group converges within ten rounds, with one topic or with twenty."""
    for topics in ({"t": 20}, {f"t{n:02}": 1 for n in range(20)}):
        group = SimulatedGroup(topics, _peers(20, topics), subject=subject)
        assert group.settle() <= 10
        assert None not in group.owners.values()


def any_group_comes_to_rest(subject: Subject) -> None:
    """From any distribution, with limits and different topics, a group converges.

    Then every key that a member may hold is held.
    """
    for seed in range(WORLDS):
        group = random_group(random.Random(seed), subject)
        group.settle()
        _check_covered(group)


def limits_are_never_exceeded(subject: Subject) -> None:
    """No member exceeds its limit, even before the group converges; 0 is no limit."""
    for seed in range(WORLDS):
        group = random_group(random.Random(seed), subject, is_used=False)
        for _ in range(10):
            group.round()
            for member in group.members:
                load = group.load(member.client_id)
                assert not member.claims_max or load <= member.claims_max
    topics = {f"t{n}": 2 for n in range(5)}
    capped = [MemberView(client_id="a", topics=frozenset(topics), claims_max=2)]
    group = SimulatedGroup(topics, capped, subject=subject)
    group.settle()
    assert group.load("a") == 2


def nothing_moves_where_nothing_changes(subject: Subject) -> None:
    """Once converged, nothing moves any more."""
    if not subject.keeps:
        return
    for seed in range(WORLDS):
        group = random_group(random.Random(seed), subject)
        group.settle()
        owners, moves = dict(group.owners), group.moves
        for _ in range(5):
            assert not group.round()
        assert (group.owners, group.moves) == (owners, moves)


def keys_of_a_leaving_member_are_claimed(subject: Subject) -> None:
    """After a member leaves, every key is held again."""
    topics = {"t": 7, "u": 3, "v": 1}
    group = SimulatedGroup(topics, _peers(4, topics), subject=subject)
    group.settle()
    for name in ("c02", "c00", "c03"):
        group.leave(name)
        group.settle()
        assert None not in group.owners.values()
    assert set(group.owners.values()) == {"c01"}


def newcomers_do_no_harm(subject: Subject) -> None:
    """After members join one after the other, every key is held."""
    topics = {f"t{n}": 3 for n in range(6)}
    group = SimulatedGroup(topics, _peers(1, topics), subject=subject)
    for count in range(2, 7):
        group.settle()
        group.members = _peers(count, topics)
    group.settle()
    assert None not in group.owners.values()


def draining_members_get_nothing(subject: Subject) -> None:
    """Draining members keep their keys, and get no others."""
    topics = {"t": 6, "u": 2}
    stay = MemberView(client_id="a", topics=frozenset(topics))
    gone = MemberView(client_id="b", topics=frozenset(topics), is_draining=True)
    owners = {_key("u", n): "b" for n in range(2)}
    group = SimulatedGroup(topics, [stay, gone], owners, subject=subject)
    group.settle()
    assert {group.owners[_key("t", n)] for n in range(6)} == {"a"}
    assert {group.owners[_key("u", n)] for n in range(2)} == {"b"}


def fresh_claims_are_left_alone(subject: Subject) -> None:
    """No member claims a key that another holds."""
    topics = {"t": 4, "u": 4}
    members = _peers(3, topics)
    owners = {_key(topic, n): "c00" for topic in topics for n in range(4)}
    group = SimulatedGroup(topics, members, owners, subject=subject)
    for member in members[1:]:
        assert group.plan(member).claim == ()


def the_same_view_gives_the_same_plan(subject: Subject) -> None:
    """Only the view decides: no random numbers, no clock, no order of calls."""
    for seed in range(WORLDS):
        group = random_group(random.Random(seed), subject)
        twin = random_group(random.Random(seed), subject)
        for member in group.members:
            first = group.plan(member)
            assert first == group.plan(member)
            assert first == twin.plan(member)


CHECKS: tuple[Check, ...] = (
    one_member_takes_everything,
    twenty_members_share_twenty_keys,
    any_group_comes_to_rest,
    limits_are_never_exceeded,
    nothing_moves_where_nothing_changes,
    keys_of_a_leaving_member_are_claimed,
    newcomers_do_no_harm,
    draining_members_get_nothing,
    fresh_claims_are_left_alone,
    the_same_view_gives_the_same_plan,
)
"""All checks."""


def check_policy(policy: Policy, *, counts: Counts = Counts.PARTITIONS) -> None:
    """Run every check; for use without a test framework.

    Raises:
        AssertionError: A check failed; the message states which.
    """
    for check in CHECKS:
        check(Subject(policy, counts))
