"""Pauses begin and end in every coordinating partition."""

from simulator.checkers import LogWatcher
from simulator.node import Cluster
from simulator.pauses import Pauses


def test_every_partition_is_paused_until_all_pauses_have_ended():
    cluster = Cluster(partitions=2)
    watcher = LogWatcher(cluster.kafka, 2)
    pauses = Pauses(cluster, watcher, group_id="g")

    def paused():
        watcher.catch_up()
        return [world.active_pause("g") is not None for world in watcher.worlds]

    assert paused() == [False, False]
    pauses.begin(60_000)
    assert paused() == [True, True]
    pauses.end()
    assert paused() == [False, False]
    pauses.begin(1_000)
    assert paused() == [True, True]
    pauses.end()
    assert paused() == [False, False]
