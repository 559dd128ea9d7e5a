"""Two owners that copy a partition to Kafka in transactions: every interleaving.

Kafka behaves as documented: opening a producer with a transactional id fences earlier
ones and ends their transactions; a transaction becomes visible as a whole when it
commits. The log gives the claim to one owner; another one takes it over at any time,
which the former owner notices only at its next check. Each may crash between any two
steps, or pause for any time. An admin sets the position once, back to the start.

The model judges the output of each *era*, from one set position to the next: after a
set position, the output is wanted again.
"""

from typing import NamedTuple

NO_PROGRESS = "no_progress"  # an owner starts at the position in the log
NO_FENCE = "no_fence"  # every process has its own transactional id
PROGRESS_OUTSIDE = "progress_outside"  # progress is written before the commit
NO_CHECK = "no_check"  # an owner that opened its producer does not check its claim
NO_ERA = "no_era"  # progress from before a set position counts

TWICE, LOST = "written twice", "lost"

AWAY, CLAIMED, OPENED, READY, MARKED, WRITTEN = (
    *("away", "claimed", "opened", "ready", "marked", "written"),
)


class Owner(NamedTuple):
    """A process: its claim, its producer, and the next offset that it would write."""

    phase: str = AWAY
    claim: int = 0
    era: int = 0
    producer: int = 0
    at: int = 0


class World(NamedTuple):
    """The log, the broker, and both processes.

    Attributes:
        claim: The claim in force, 0 for none.
        position: Position in the log.
        era: Number of set positions.
        producer: The last opened producer.
        progress: Offset and era of the last progress.
        output: Era and offset of each record written, sorted.
    """

    owners: tuple = (Owner(), Owner())
    claims: int = 0
    claim: int = 0
    position: int = 0
    era: int = 0
    producer: int = 0
    progress: tuple = (0, 0)
    output: tuple = ()


class OutputModel:
    """Each record of an era is written once.

    Args:
        records: Number of records.
        claims: The largest number of claims.
        mistake: The mistake of the owners, if any.
    """

    def __init__(self, *, records=2, claims=4, mistake=None):
        self.records, self.claims, self.mistake = records, claims, mistake

    def start(self):
        return World()

    def broken(self, world):
        if len(set(world.output)) < len(world.output):
            return TWICE
        is_lost = any(
            (world.era, offset) not in world.output for offset in range(world.position)
        )
        return LOST if is_lost else None

    def steps(self, world):
        if world.era == 0:
            set_back = world._replace(era=1, position=0, claim=0)
            yield "an admin sets the position", set_back
        for number, owner in enumerate(world.owners):
            for label, changed, own in self.of(world, owner):
                owners = list(world.owners)
                owners[number] = own
                yield (number, label), changed._replace(owners=tuple(owners))
            if owner.phase != AWAY:
                owners = list(world.owners)
                owners[number] = Owner()
                yield (number, "dies"), world._replace(owners=tuple(owners))

    def of(self, world, owner):
        """Yield the steps of one process: the world and the process after each."""
        is_valid = owner.claim == world.claim
        if owner.phase == AWAY:
            if world.claims < self.claims:
                claim = world.claims + 1
                own = Owner(CLAIMED, claim, world.era, at=world.position)
                yield "claims", world._replace(claims=claim, claim=claim), own
            return
        if is_valid and owner.at > world.position:
            yield "beats", world._replace(position=owner.at), owner
        if owner.phase == CLAIMED:
            if not is_valid:
                yield "drops its batch", world, Owner()
                return
            # The owner checks its claim; it may pause before it opens its producer.
            yield "finds its claim", world, owner._replace(phase="opening")
        elif owner.phase == "opening":
            producer = world.producer + 1
            own = owner._replace(phase=OPENED, producer=producer)
            yield "opens", world._replace(producer=producer), own
        elif owner.phase == OPENED:
            if is_valid or self.mistake == NO_CHECK:
                yield "starts", world, self.started(world, owner)
            else:
                yield "drops its batch", world, Owner()
        elif owner.phase == READY:
            yield from self.writing(world, owner)
        elif owner.phase == MARKED:
            yield from self.committing(world, owner)
        elif is_valid:
            yield "commits", world, owner._replace(phase=READY, at=owner.at + 1)
        else:
            yield "drops its batch", world, Owner()

    def started(self, world, owner):
        offset, era = world.progress
        counts = era == owner.era or self.mistake == NO_ERA
        if not counts or self.mistake == NO_PROGRESS:
            offset = 0
        return owner._replace(phase=READY, at=max(owner.at, offset))

    def writing(self, world, owner):
        if owner.at == self.records:
            return
        changed = world
        if self.mistake == PROGRESS_OUTSIDE:
            changed = world._replace(progress=(owner.at + 1, owner.era))
        yield "begins", changed, owner._replace(phase=MARKED)

    def committing(self, world, owner):
        if owner.producer != world.producer and self.mistake != NO_FENCE:
            yield "is fenced", world, owner._replace(phase=CLAIMED)
            return
        written = world._replace(
            output=tuple(sorted((*world.output, (owner.era, owner.at)))),
            progress=(owner.at + 1, owner.era),
        )
        yield "writes", written, owner._replace(phase=WRITTEN)
