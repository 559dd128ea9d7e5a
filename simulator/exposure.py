"""Judges hand-outs if a log loses records that were read (PROTOCOL 7.5).

An owner that lost a claim or a grant with the log's end cannot know it yet, so offsets
may be handed out twice, even at most once. The judge demands a report: some engine must
report the range (``grant_exposed``), unless the process that had it ended before it
could.

A set position that a log has lost no longer counts: hand-outs of its claims are
compared with those under the log as it was before. Hand-outs that a Reset has taken
back are not compared, also if the log loses the Reset.
"""

from collections import defaultdict

import attrs

from kafka_marshal.protocol.log_judge import Place
from kafka_marshal.protocol.types import Key
from simulator.checkers import Heads, Sets, Violation
from simulator.node import Node


@attrs.frozen
class _HandOut:
    """One offset that was handed out.

    Attributes:
        name: The process that got it.
        cuts: Number of cuts of its coordinating partition that the process knew of.
        sets: Set positions before its claim.
        resets: Head of the key after each Reset before its claim.
    """

    name: str
    cuts: int
    sets: Sets
    resets: Heads

    def is_set_again(self, after: "_HandOut") -> bool:
        """Return whether a set position lets a later hand-out repeat this one."""
        return bool(after.sets) and after.sets[-1] not in self.sets

    def is_taken_back(self, after: "_HandOut", offset: int) -> bool:
        """Return whether a Reset between both claims took the grant back."""
        since = after.resets[len(self.resets) :]
        return any(head <= offset for head in since)


@attrs.frozen
class _Twice:
    """One offset that was handed out twice, first under the log as it was before."""

    place: Place
    offset: int
    before: _HandOut
    after: _HandOut


class Exposures:
    """Offsets that were handed out at most once, and the reports about them.

    Attributes:
        excused_count: Number of offsets handed out twice that no process was left to
            report.
    """

    def __init__(self) -> None:
        """Start with nothing lost."""
        self.excused_count = 0
        self._handed: dict[tuple[Place, int], dict[tuple[Sets, Heads], _HandOut]] = (
            defaultdict(dict)
        )
        self._processed: dict[tuple[Place, Sets], set[int]] = defaultdict(set)
        self._twice: list[_Twice] = []
        self._reported: dict[Key, set[int]] = defaultdict(set)
        self._ended: dict[tuple[str, Key], int] = {}

    def on_handed(
        self,
        name: str,
        place: Place,
        *,
        offset: int,
        cuts: int,
        sets: Sets = (),
        resets: Heads = (),
    ) -> None:
        """Record that a process was handed a record.

        Args:
            name: The process.
            place: Key and topic of the record.
            offset: Its offset.
            cuts: Number of cuts of the key's partition that the process knows of.
            sets: Set positions before its claim.
            resets: Head of the key after each Reset before its claim.

        Raises:
            Violation: Another process had it before, under the very same log.
        """
        this, of = _HandOut(name, cuts, sets, resets), (sets, resets)
        handed = self._handed[place, offset]
        for other in handed.values():
            before, after = sorted((other, this), key=lambda each: each.cuts)
            if before.is_set_again(after) or before.is_taken_back(after, offset):
                continue
            if other.cuts == cuts:
                text = f"{place[0]}: {offset} handed out twice by one log"
                raise Violation("S3", text)
            self._twice.append(
                _Twice(place=place, offset=offset, before=before, after=after)
            )
        if of not in handed or handed[of].cuts < cuts:
            handed[of] = this

    def on_processed(self, place: Place, *, offset: int, sets: Sets) -> None:
        """Record that a process has processed a record under its claim."""
        self._processed[place, sets].add(offset)

    def processed(self, place: Place, sets: Sets) -> set[int]:
        """Return the offsets that are done, for a log with these set positions.

        All below the last set position counts as done; offsets that claims under other
        set positions have processed do not count.
        """
        skipped = range(sets[-1][1]) if sets else ()
        return {*skipped, *self._processed[place, sets]}

    def processed_by_any(self, place: Place) -> set[int]:
        """Return offsets that any claim has processed, even one that the log lost."""
        found = [done for (of, _), done in self._processed.items() if of == place]
        return set().union(*found)

    def on_reported(self, key: Key, *, first: int, last: int) -> None:
        """Record that an engine reported a range."""
        self._reported[key].update(range(first, last + 1))

    def on_ended(self, name: str, key: Key, *, cuts: int) -> None:
        """Record that a process ended after it had handled a number of cuts."""
        self._ended[name, key] = cuts

    def judge(self) -> None:
        """Judge all hand-outs, once every live process has read everything.

        Raises:
            Violation: Offsets were handed out twice, and no engine reported them.
        """
        for twice in self._twice:
            (key, _), name = twice.place, twice.before.name
            settled = self._ended.get((name, key))
            if twice.offset in self._reported[key]:
                continue
            if settled is None or settled >= twice.after.cuts:
                raise Violation(
                    "7.5",
                    f"{key}: {twice.offset} was handed out to {name} and, by a log "
                    f"that was cut back, to {twice.after.name}: nobody reported it",
                )
            self.excused_count += 1


class Cuts:
    """How often each coordinating partition was cut back, and which processes know."""

    def __init__(self) -> None:
        """Start with none."""
        self._epochs: dict[int, list[int]] = defaultdict(list)
        self._noticed: dict[tuple[bytes, int], int] = {}

    def on_cut(self, partition: int, leader_epoch: int) -> None:
        """Record that a partition lost records, and continues in a new leader epoch."""
        self._epochs[partition].append(leader_epoch)

    def count(self, partition: int) -> int:
        """Return how often a partition was cut back."""
        return len(self._epochs[partition])

    def on_noticed(self, node: Node, partition: int) -> None:
        """Record that a process begins a partition, or refolds it."""
        self._noticed[node.owner.incarnation, partition] = self.count(partition)

    def known_to(self, node: Node, partition: int) -> int:
        """Return the number of cuts that a process knows of."""
        replica = node.engine.context.replicas.get(partition)
        if replica is None:
            return self.count(partition)  # it does not read the partition yet
        epoch = replica.world.leader_epoch
        read = sum(each <= (epoch or 0) for each in self._epochs[partition])
        return max(read, self._noticed.get((node.owner.incarnation, partition), 0))

    def is_known(self, node: Node, partition: int) -> bool:
        """Return whether a process knows of all cuts."""
        return self.known_to(node, partition) == self.count(partition)
