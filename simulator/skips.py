"""Offsets that seeks of owners skipped, as far as the logs still show it (6.6).

For worlds whose logs may lose records (7.5); in others the operation judge does this.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from kafka_marshal.protocol.state import Transition, WorldState
from kafka_marshal.protocol.types import Key, Token
from simulator.fakestore import Stored

Place = tuple[int, Key, bytes | None]
"""Coordinating partition, key, and the id of its topic."""


class Skips:
    """Offsets that need no processing, because a seek of an owner skipped them.

    An offset is skipped if the owner of a claim has sought across it, and a record of
    that claim moved the position across it, as long as the log has that record. It must
    be processed after all if the log loses the record, or once the position goes back
    to it or before it: by another seek, a set position or a Reset.

    An imported key (10.4) keeps its skipped offsets. A key that a log has lost begins
    with the committed offset (5.6), and below it all offsets are skipped that any log
    had as skipped. The same holds for an imported key whose source is read later.
    """

    def __init__(self, worlds: Sequence[WorldState]) -> None:
        """Start without any.

        Args:
            worlds: The current fold of each coordinating partition; the caller updates
                the list.
        """
        self._worlds = worlds
        self._sought: dict[tuple[Key, Token], set[int]] = defaultdict(set)
        self._skipped: dict[Place, set[int]] = {}
        self._ever: dict[tuple[Key, bytes | None], set[int]] = defaultdict(set)
        # Offsets that a record skipped when first read; later seeks do not change them.
        self._first: dict[tuple[int, int, Place], set[int]] = {}

    def of(self, place: Place) -> set[int]:
        """Return the skipped offsets of a key, by the present log."""
        return self._skipped.get(place, set())

    def seeking(self, key: Key, token: Token, *, first: int, offset: int) -> None:
        """Record that an owner seeks: from the first offset to another one."""
        self._sought[key, token].update(range(first, offset))

    def sought(self, key: Key, token: Token, *, offset: int) -> None:
        """Record that a seek is confirmed: no record from before it counts any more."""
        skipped = self._sought[key, token]
        self._sought[key, token] = {each for each in skipped if each < offset}

    def forget(self, partition: int) -> None:
        """Forget the offsets of a partition that is folded again from its start."""
        for place in [each for each in self._skipped if each[0] == partition]:
            del self._skipped[place]

    def take(
        self, stored: Stored, transition: Transition, *, partition: int, old: int | None
    ) -> None:
        """Apply a transition that was folded.

        Args:
            stored: The record.
            transition: Its transition.
            partition: Coordinating partition.
            old: Position of its key before.
        """
        if transition.effect == "reset":
            self._on_reset(partition)
        key, world = transition.key, self._worlds[partition]
        known = None if key is None else world.keys.get(key)
        if key is None or known is None:
            return
        place, new = (partition, key, known.topic_id), known.position
        if new is None or transition.effect == "position_set":
            self._skipped.pop(place, None)
        elif transition.effect == "imported" or old is None:
            found = self._once(stored, place, partial(self._begin, place, transition))
            self._skipped[place] = {*found}
        elif new < old:
            self._keep_below(place, new)
        elif new > old:
            across = partial(self._across, place, first=old)
            self._skipped[place] = self.of(place) | self._once(stored, place, across)

    def _once(
        self, stored: Stored, place: Place, find: Callable[[], set[int]]
    ) -> set[int]:
        """Return the offsets that a record skips, as found when it was first read."""
        read = stored.leader_epoch, stored.offset, place
        if read not in self._first:
            self._first[read] = find()
            self._ever[place[1:]] |= self._first[read]
        return self._first[read]

    def _begin(self, place: Place, transition: Transition) -> set[int]:
        """Return the skipped offsets of a key that had no position, or was unknown."""
        partition, key, topic_id = place
        new = self._worlds[partition].keys[key].position
        if transition.effect == "imported":
            for other, world in enumerate(self._worlds):
                known = world.keys.get(key)
                if other != partition and known is not None and known.position == new:
                    return {*self.of((other, key, topic_id))}
        below = {each for each in self._ever[key, topic_id] if each < (new or 0)}
        return below | self._across(place, first=0)

    def _across(self, place: Place, *, first: int) -> set[int]:
        """Return the offsets that both the owner's seek and its record moved across."""
        partition, key, _ = place
        world = self._worlds[partition]
        token, end = world.token(key), world.keys[key].position
        if token is None:
            return set()
        sought = self._sought.get((key, token), ())
        return {each for each in sought if first <= each < (end or 0)}

    def _on_reset(self, partition: int) -> None:
        """Drop the skipped offsets from the positions of a Reset on."""
        for key, known in self._worlds[partition].keys.items():
            self._keep_below((partition, key, known.topic_id), known.position or 0)

    def _keep_below(self, place: Place, end: int) -> None:
        self._skipped[place] = {each for each in self.of(place) if each < end}
