"""Which partitions wait in a growth, and how far each group is."""

import pytest
from enginekit import fold, write
from growkit import RECORDS, Died, Tool, at, keyed
from logkit import claim, growth, ident, release
from resizekit import Tool as Resizer
from resizekit import key


def rows(sources):
    return [
        (each.partition, each.position, each.end, each.lag, each.waiting)
        for each in sources
    ]


def test_it_is_shown_how_far_each_group_is():
    cluster = keyed()
    for number, position in enumerate((5, 0, 3)):
        at(cluster, number, position)
    plan = Tool(cluster).grow_topic("t", 12)
    assert {each.group_id for each in plan.sources} == {"g"}
    # Before the ends are known everybody waits.
    assert rows(plan.sources) == [
        (0, 5, 5, 0, (4, 8)),
        (1, 0, 0, 0, (5, 9)),
        (2, 3, 7, 4, (6, 10)),
        (3, None, 9, None, (7, 11)),
    ]
    Tool(cluster).grow(12)
    at(cluster, 6, 1)
    at(cluster, 7, None)
    ((known, sources),) = [
        (each.growth, each.sources) for each in Tool(cluster).growths("t")
    ]
    assert (known.new_count, known.ends) == (12, RECORDS)
    assert rows(sources) == [
        (0, 5, 5, 0, ()),
        (1, 0, 0, 0, ()),
        # 6 has a position: it has begun.
        (2, 3, 7, 4, (10,)),
        (3, None, 9, None, (7, 11)),
    ]


def test_a_position_in_an_earlier_topic_of_the_name_is_none():
    cluster = keyed(1)
    Tool(cluster).grow()
    topic_id = cluster.kafka.topic("t").topic_id
    for number, claimed_id in ((0, ident("earlier")), (4, ident("earlier"))):
        epoch = write(cluster, claim("c1", key=key(number), topic_id=claimed_id))
        write(cluster, release(epoch, 9, key=key(number)))
    epoch = write(cluster, claim("c1", key=key(5), topic_id=topic_id))
    write(cluster, release(epoch, 0, key=key(5)))
    (report,) = Tool(cluster).growths("t")
    assert rows(report.sources)[:2] == [
        (0, None, 5, None, (4,)),
        (1, None, 0, None, ()),
    ]


def test_only_growths_of_a_topic_are_shown():
    cluster = keyed()
    assert Tool(cluster).growths() == ()
    write(cluster, growth(2, 1, topic="u"))
    cluster.kafka.create_topic("u", 1)
    (report,) = Tool(cluster).growths()
    assert (report.growth.topic, report.sources) == ("u", ())
    assert Tool(cluster).growths("t") == ()


def test_each_key_counts_once_while_the_coordination_topic_grows():
    cluster = keyed(2)
    for number, position in enumerate(RECORDS):
        at(cluster, number, position)
    Tool(cluster).grow()
    found = rows(Tool(cluster).growths()[0].sources)
    with pytest.raises(Died):
        Resizer(cluster, left=6).resize(4)
    assert fold(cluster).layout is not None
    assert rows(Tool(cluster).growths()[0].sources) == found
    assert len(found) == len(RECORDS)


def test_ends_that_are_unknown_are_shown_so():
    cluster = keyed()
    at(cluster, 0, 5)
    tool = Tool(cluster)
    tool.log_ends = lambda _: {}
    plan = tool.grow_topic("t", 8)
    assert rows(plan.sources)[0] == (0, 5, None, None, (4,))
