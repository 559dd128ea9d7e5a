"""How long a plan of a whole group takes, on one core.

Groups of 1,000 members and 10,000 keys are planned: all keys free; nothing to do; ten
members gone; and twice as many members as before. Then the first with members on three
racks, and again with topics that only some members read. Time is the CPU time.
"""

import time
from collections.abc import Callable, Sequence

from support import alternate, arguments, at_most, document, figure, write_document

from kafka_marshal.protocol.group_plan import PlanInput, PlanKey, PlanMember, plan
from kafka_marshal.protocol.types import TopicPartition

TOPICS = 100
RACKS = 3
GONE = 10
KINDS = 4


def members(
    count: int, *, racks: int = 0, kinds: int = 1, topics: Sequence[str]
) -> tuple[PlanMember, ...]:
    """Return members that read all topics, or, by kind, half of them."""
    read = [
        tuple(
            topic
            for number, topic in enumerate(topics)
            if kinds == 1 or number % kinds in {kind, (kind + 1) % kinds}
        )
        for kind in range(kinds)
    ]
    return tuple(
        PlanMember(
            name=f"member-{number:05}",
            topics=read[number % kinds],
            host=f"host-{number}" if racks else "",
            rack=f"rack-{number % racks}" if racks else "",
        )
        for number in range(count)
    )


def held(given: PlanInput) -> tuple[PlanKey, ...]:
    """Return the keys of a group after its plan was carried out."""
    owners = plan(given).owners
    return tuple(PlanKey(each.key, owners.get(each.key)) for each in given.keys)


def cases(keys: int, size: int) -> dict[str, PlanInput]:
    """Return what is planned, by name."""
    topics = [f"topic-{number:03}" for number in range(TOPICS)]
    free = tuple(
        PlanKey(TopicPartition(topic, number), is_free=True)
        for topic in topics
        for number in range(keys // TOPICS)
    )
    every = members(size, topics=topics)
    half = held(PlanInput(keys=free, members=every[::2]))
    quiet = held(PlanInput(keys=free, members=every))
    racks = members(size, racks=RACKS, topics=topics)
    kinds = members(size, kinds=KINDS, topics=topics)
    some = held(PlanInput(keys=free, members=kinds))
    return {
        "all keys free": PlanInput(keys=free, members=every),
        "nothing to do": PlanInput(keys=quiet, members=every),
        "ten members gone": PlanInput(keys=quiet, members=every[GONE:]),
        "twice the members": PlanInput(keys=half, members=every),
        "all keys free, three racks": PlanInput(keys=free, members=racks),
        "ten members gone, different topics": PlanInput(
            keys=some, members=kinds[GONE:]
        ),
        "all keys free, different topics": PlanInput(keys=free, members=kinds),
    }


def timed(given: PlanInput) -> Callable[[], float]:
    """Return a side: the milliseconds that a plan takes."""

    def side() -> float:
        start = time.process_time()
        plan(given)
        return (time.process_time() - start) * 1_000

    return side


def main() -> None:
    """Run the benchmark and print its document."""
    options = arguments(__doc__ or "").parse_args()
    keys, size = (1_000, 100) if options.quick else (10_000, 1_000)
    rounds = options.rounds or (2 if options.quick else 9)
    found = cases(keys, size)
    took = alternate({name: timed(each) for name, each in found.items()}, rounds)
    figures = [
        figure(
            name,
            "ms",
            took[name],
            target=None if name == "all keys free, different topics" else at_most(100),
        )
        for name in found
    ]
    settings = {"keys": keys, "members": size, "topics": TOPICS, "rounds": rounds}
    write_document(
        document("planner", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
