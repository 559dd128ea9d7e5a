"""Policies that give nonsensical advice: it may cost only balance and time."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kafka_marshal.policies import BUILT_IN, Plan, Release, View
from kafka_marshal.protocol.types import Key
from simulator.base import GROUP, TOPIC

NAME = "garbage"
FOREVER = 0.25
GARBAGE_HS = 3
"""Intervals that garbage may cost: the wait of PROTOCOL 9.6, and that of a release."""
MOODS = ("nothing", "raise", "type", "stranger", "claim", "release")
STRANGERS = (Key(GROUP, "unknown", 0), Key(GROUP, TOPIC, -1), Key("other", TOPIC, 0))


class GarbagePolicy:
    """A policy that advises some kinds of nonsense, another one at each call."""

    def __init__(self, rng: random.Random) -> None:
        """Draw the kinds of nonsense."""
        self._rng = rng
        self._moods = rng.sample(MOODS, rng.randint(1, 3))

    def __call__(self, view: View) -> Plan:
        """Return nonsense, or raise."""
        rng = self._rng
        mood = rng.choice(self._moods)
        if mood == "raise":
            raise RuntimeError("garbage")
        if mood == "type":
            return "garbage"  # type: ignore[return-value]
        if mood == "stranger":
            return Plan((rng.choice(STRANGERS),))
        if mood == "claim":
            return Plan(tuple(k.key for k in view.keys if rng.randrange(2)))
        if mood == "release":
            return Plan(release=self._releases(view))
        return Plan()

    def _releases(self, view: View) -> tuple[Release, ...]:
        names: Sequence[str | None] = [
            *(None, "nobody", view.me),
            *(member.client_id for member in view.members),
        ]
        mine = [key.key for key in view.keys if key.is_mine]
        return tuple(Release(key, self._rng.choice(names)) for key in mine)


def never_returns(rng: random.Random) -> bool:
    """Draw whether the policy of a process never returns."""
    return rng.random() < FOREVER


@contextmanager
def installed(rng: random.Random) -> Iterator[None]:
    """Let clients of sidecars name this policy, as if a package had installed it."""
    BUILT_IN[NAME] = GarbagePolicy(rng)
    try:
        yield
    finally:
        del BUILT_IN[NAME]
