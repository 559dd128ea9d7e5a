"""The count of coordinating partitions changes while members and admins are killed."""

import signal
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import forked
import journal
import pytest
from clikit import Cli
from cluster_history import Sender
from journal import judge_moves
from ordeal import Finding, Ordeal
from slices import slice_of
from slowness import factor_now
from waiting import WAIT_MS, eventually

from kafka_marshal.protocol.layout import place_of

COUNTS = slice_of(quick=(4, 8), full=(4, 8, 16, 8))
DATA_PARTITIONS = 12
H_MS = 2_000
TEAM = {"a": "fast", "b": "kafka-python", "c": "fast"}
# Interval of snapshots: a restarted member finds one of an earlier count.
KEEP_MS = 500
PROGRAM = Path(journal.__file__).with_name("resize_program.py")


def is_fenced(worlds):
    return worlds[0].layout is not None


def has_import(worlds):
    return any(source.imported_count for source in sources(worlds))


def has_done(worlds):
    return any(source.done_ms is not None for source in sources(worlds))


def sources(worlds):
    layouts = (world.layout for world in worlds.values())
    return [source for layout in layouts if layout for source in layout.sources]


# When a change is interrupted, and whether another admin continues it; if not, members
# complete it alone.
MOMENTS = slice_of(
    quick=((has_import, False),),
    full=((is_fenced, True), (has_import, False), (has_done, True)),
)


@contextmanager
def ready_admin(domain, count):
    """The process of an admin that begins the change at a line on its stdin."""
    arguments = [PROGRAM, domain.servers, domain.topic, str(count)]
    process = forked.start_piped(arguments)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "delivery", [pytest.param("alo", marks=pytest.mark.proof), "amo"]
)
def test_a_count_change_completes_though_members_and_admins_are_killed(
    broker, unique, tmp_path, delivery
):
    found = Finding("layout_kills", __doc__, round(H_MS * factor_now()))
    with Ordeal(
        found,
        broker.bootstrap_servers,
        unique,
        tmp_path,
        partitions=DATA_PARTITIONS,
        replication=1,
        team=TEAM,
        deliveries=[delivery],
        has_gaps=False,
        domain_settings={"partitions": COUNTS[0]},
        keep_ms=KEEP_MS,
    ) as it:
        it.start()
        it.wait_flowing()
        cli, names, killed = Cli(it.domain, tmp_path), [*TEAM], []
        for (before, after), (moment, is_continued) in zip(
            pairwise(COUNTS), MOMENTS, strict=True
        ):
            killed += interrupt(it, after, moment, names=names[:2])
            if is_continued:
                # Members may have completed it first.
                arguments = ("topic", "resize", "--partitions", str(after))
                cli.run(*arguments, "--execute")
            for name in names[:2]:
                it.restart(name)
            wait_changed(it, before, after)
            it.wait_all_work(set(names))
            it.wait_flowing()
            names.append(names.pop(0))
        it.settle()
        it.domain.forget_history()
        it.judge()
        history = it.domain.history()
        assert judge_moves(history) > 0
        require_lost_by(killed, it)
        assert cli.json("log", "verify")["result"] == "ok"


def interrupt(it, after, moment, *, names):
    """Begin a change, kill its admin and members; return the members.

    One member hangs from before the change, which keeps the change open until it is
    killed; the other one dies at work.
    """
    hangs, works = names
    with ready_admin(it.domain, after) as admin:
        for worker in it.workers(hangs):
            worker.signal(signal.SIGSTOP)
        admin.stdin.write("\n")
        admin.stdin.flush()
        eventually(lambda: is_fenced(it.domain.history().worlds), "it begins")
        it.domain.forget_history()  # its log may have more partitions now
        eventually(
            lambda: moment(it.domain.history().worlds), f"{moment.__name__}, {after}"
        )
        assert admin.poll() is None, "it was killed in the middle"
        admin.kill()
        return it.kill(works) + it.kill(hangs)


def wait_changed(it, before, after):
    """Wait until all partitions changed, and each key is owned in its partition."""
    (fleet,) = it.fleets.values()
    group = fleet.settings["group_id"]
    missing = []

    def look():
        it.require_running({*TEAM})
        worlds = it.domain.history().worlds
        missing[:] = [(t, worlds[t].layout) for t in range(max(before, after))]
        if any(layout for _, layout in missing):
            return False
        assert worlds[0].config.partition_count == after
        owned = [
            (key, t)
            for t, world in worlds.items()
            for key, known in world.keys.items()
            if key.group_id == group and known.owner is not None
        ]
        assert all(t == place_of(key, partition_count=after) for key, t in owned)
        missing[:] = owned
        return len(owned) == DATA_PARTITIONS

    try:
        # Twice as long: claims of dead members must expire first.
        what = f"{after} coordinating partitions are in use"
        eventually(look, what, timeout_ms=2 * WAIT_MS)
    except AssertionError as error:
        error.add_note(f"what there is: {missing}")
        raise


def require_lost_by(killed, it):
    """Check that each lost record was granted to a process that was killed."""
    (fleet,) = it.fleets.values()
    (topic,) = it.topics(fleet)
    group = fleet.settings["group_id"]
    dead = {Sender.of(worker.notes_path, group).incarnation for worker in killed}
    lost = fleet.journal.lost(it.domain.of(topic))
    for step in it.domain.history().of("granted", group_id=group):
        detail = step.transition.detail
        given = range(detail["first"], detail["last"] + 1)
        is_lost = any(n in given for n in lost.get(step.key.topic_partition, ()))
        assert not is_lost or step.record.incarnation in dead, step
