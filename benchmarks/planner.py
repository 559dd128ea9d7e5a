"""How long a plan of a whole group takes, on one core.

Groups of 1,000 members and 10,000 keys are planned: with all keys free; with nothing to
do; after ten members have left; and after the number of members has doubled. The case
with free keys is repeated with members on three racks, and with topics that only some
members read. Finally the time is measured in which a planner reads its input from the
state of the log. All times are CPU times.
"""

import time
from collections.abc import Callable, Sequence

from support import alternate, arguments, at_most, document, figure, write_document

from kafka_marshal.protocol.group_plan import PlanInput, PlanKey, PlanMember, plan
from kafka_marshal.protocol.plans import Reading, situation_of
from kafka_marshal.protocol.records import SUPPORTED_LEVEL, Config, Limits, Member
from kafka_marshal.protocol.state import KeyState, MemberState, WorldState
from kafka_marshal.protocol.types import Key, Owner, TopicPartition

ID = bytes(16)
READING = "reading the group"
TOPICS = 100
RACKS = 3
GONE = 10
KINDS = 4


def members(
    count: int, *, racks: int = 0, kinds: int = 1, topics: Sequence[str]
) -> tuple[PlanMember, ...]:
    """Return members that read all topics, or with several kinds half of them."""
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
    """Return the keys of a group after its plan is fulfilled."""
    owners = plan(given).owners
    return tuple(PlanKey(each.key, owners.get(each.key)) for each in given.keys)


def cases(keys: int, size: int) -> dict[str, PlanInput]:
    """Return the inputs of the cases, by name."""
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


def reading(keys: int, size: int) -> Reading:
    """Return the state that a planner of a balanced group reads."""
    topics = tuple(f"topic-{number:03}" for number in range(TOPICS))
    state = WorldState(0)
    state.config = Config(
        generation=1,
        format_id=ID,
        era=1,
        cluster_id="cluster",
        heartbeat_interval_ms=60_000,
        partition_count=1,
        feature_level=SUPPORTED_LEVEL,
        limits=Limits(**dict.fromkeys(Limits.__struct_fields__)),
    )
    for number in range(size):
        record = Member(
            client_id=f"member-{number:05}",
            group_id="g",
            incarnation=ID,
            seq=0,
            topics=topics,
            host="",
            capacity=0,
            load=0,
            labels={},
            draining=False,
            feature_level_max=SUPPORTED_LEVEL,
            plan_generation=None,
        )
        state.soft.members["g", record.client_id, ID] = MemberState(
            record=record, since_offset=number, offset=number, seen_ms=0
        )
    places = [(topic, n) for topic in topics for n in range(keys // TOPICS)]
    for offset, place in enumerate(places):
        state.keys[Key("g", *place)] = KeyState(
            owner=Owner(f"member-{offset % size:05}", ID),
            epoch=offset,
            epoch_leader_epoch=0,
            renewed_ms=0,
            heartbeat_interval_ms=60_000,
            active_ms=0,
        )
    return Reading(
        group_id="g",
        worlds=(state,),
        elapsed_ms=(0,),
        counts=dict.fromkeys(topics, keys // TOPICS),
        partition_of=lambda _: 0,
    )


def timed_reading(found: Reading) -> Callable[[], float]:
    """Return a side that measures the reading of a planner's input, in ms."""

    def side() -> float:
        start = time.process_time()
        situation_of(found, found.members())
        return (time.process_time() - start) * 1_000

    return side


def timed(given: PlanInput) -> Callable[[], float]:
    """Return a side that measures planning, in ms."""

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
    sides = {name: timed(each) for name, each in found.items()}
    sides[READING] = timed_reading(reading(keys, size))
    took = alternate(sides, rounds)
    figures = [
        figure(
            name,
            "ms",
            took[name],
            target=None if name == "all keys free, different topics" else at_most(100),
        )
        for name in sides
    ]
    settings = {"keys": keys, "members": size, "topics": TOPICS, "rounds": rounds}
    write_document(
        document("planner", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
