"""A live group gets new positions, all or none of them, and continues."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from clikit import Cli
from domain import opened
from fleet import Fleet
from slices import slice_of
from waiting import eventually

from kafka_marshal import (
    PositionSpec,
)
from kafka_marshal.admin.finishing import open_operations
from kafka_marshal.admin.group_reset import read_plan, write_plan
from kafka_marshal.protocol.hashing import coordinating_partition

PROGRAM = Path(__file__).parent / "support" / "reset_program.py"
PARTITIONS = 8
EACH = 20
K = 4


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=1_000, partitions=K) as domain:
        yield domain


@pytest.fixture
def admin(domain):
    with domain.admin(client_id="operator") as admin:
        yield admin


class Pump:
    """Polls a consumer on a thread of its own and commits what it was handed."""

    def __init__(self, consumer):
        self.consumer = consumer
        self.handed = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        for record in self.consumer:
            self.handed.append((record.partition, record.offset))
            self.consumer.commit(record)

    def stop(self):
        self.consumer.stop()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


def positions(domain, group):
    return {
        key.topic_partition: known.position
        for key, known in domain.states(group).items()
    }


def set_up(domain, admin, group, *, topic=None, **partitions):
    """Give a group without members a position of its own in each partition."""
    topic = topic or domain.data_topic(PARTITIONS, records_each=EACH)
    wanted = {place: 3 + place.partition for place in domain.of(topic)}
    admin.execute(admin.plan_reset(group, PositionSpec.from_offsets(wanted)))
    assert positions(domain, group) == wanted
    return topic, wanted


def places_of(topic, partitions):
    """Return the coordinating partitions that a topic has keys in."""
    every = range(partitions)
    return {coordinating_partition(topic, p, partition_count=K) for p in every}


def open_in(domain, group):
    return open_operations(domain.world().partitions, group)


# --- a live group


def test_a_reset_of_a_live_group_and_its_undo_set_all_positions(domain, unique, admin):
    """No consumer is restarted; one is over a sidecar."""
    topic = domain.data_topic(PARTITIONS, records_each=EACH)
    group, total = unique("live"), PARTITIONS * EACH
    names = {"w1": None, "w2": None, "w3": domain.sidecar.address}
    clients = [domain.marshal(group, n, sidecar=s) for n, s in names.items()]
    try:
        pumps = [Pump(each.consumer(topic)) for each in clients]

        def count():
            return sum(len(each.handed) for each in pumps)

        eventually(lambda: count() >= total, "the backlog is handled")
        ends = dict.fromkeys(domain.of(topic), EACH)
        eventually(lambda: positions(domain, group) == ends, "all is committed")
        first = count()

        plan = admin.plan_reset(group, PositionSpec.to_offset(5))
        assert {(r.before, r.after, r.lag_after) for r in plan.partitions} == {
            (EACH, 5, EACH - 5)
        }
        assert not open_in(domain, group)
        steps = []
        result = admin.execute(plan, on_progress=steps.append)
        assert (result.outcome, result.mirror_error) == ("committed", None)
        assert result.moved == dict.fromkeys(ends, (EACH, 5))
        assert steps[0].step == "pause"
        again = first + PARTITIONS * (EACH - 5)
        eventually(lambda: count() >= again, "the group goes on by itself")
        eventually(lambda: positions(domain, group) == ends, "all is committed")
        handed = sorted(place for each in pumps for place in each.handed)
        assert handed == sorted(
            (p, o) for p in range(PARTITIONS) for o in [*range(EACH), *range(5, EACH)]
        )

        undone = admin.undo(result.op_id)
        assert undone.outcome == "committed"
        domain.produce(topic, 1)
        eventually(lambda: count() >= again + PARTITIONS, "it goes on once more")
        assert count() == again + PARTITIONS
        owners = set(domain.owners(group).values())
        assert owners <= {"w1", "w2", "w3", domain.sidecar.client_id}
    finally:
        for each in pumps:
            each.stop()
        for client in clients:
            client.close()


# --- an admin that dies


@pytest.fixture(scope="module")
def killer(domain):
    """Executes plans in processes that die after some records."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def kill(plan_file, count, *, is_settled=True):
        request = {
            "servers": domain.servers,
            "topic": domain.topic,
            "plan": str(plan_file),
            "count": count,
            "is_settled": is_settled,
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())["signal"] == signal.SIGKILL

    yield kill
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture
def stored(admin, tmp_path):
    """Plans a reset of a group to offset 1, and stores it."""

    def store(group):
        plan = admin.plan_reset(group, PositionSpec.to_offset(1))
        write_plan(tmp_path / plan.op_id, plan.positions)
        return tmp_path / plan.op_id

    return store


def finished(domain, admin, group):
    """Finish a reset, again if its admin's records arrive later; return its outcome."""
    outcome = None
    while True:
        for result in admin.finish(group):
            outcome = result.outcome
        if not open_in(domain, group):
            return outcome


@pytest.mark.parametrize("ends", ["continued", "finished"])
def test_an_admin_killed_at_any_step_sets_all_positions_or_none(
    domain, admin, killer, stored, ends
):
    """A plain run kills an admin once at each step, and once after the last one."""
    topic, _ = set_up(domain, admin, domain.unique("first"))
    # Pause, Stage, Decide and Resolve.
    records = K + len(places_of(topic, PARTITIONS)) + 1 + K
    outcomes = set()
    for number in range(slice_of(quick=records + 1, full=500)):
        group = domain.unique("killed")
        _, before = set_up(domain, admin, group, topic=topic)
        file = stored(group)
        count = number % (records + 1)
        was_killed = killer(file, count, is_settled=bool(number // 2 % 2))
        assert was_killed == (count < records)
        if ends == "continued":
            outcome = admin.execute(read_plan(file)).outcome
            assert outcome == "committed"
        else:
            results = admin.finish(group)
            outcome = results[0].outcome if results else None
        found = positions(domain, group)
        assert found in (before, dict.fromkeys(before, 1)), (number, outcome)
        if outcome is not None:
            assert (found != before) == (outcome == "committed"), number
        assert not open_in(domain, group), number
        outcomes.add(outcome)
    if ends == "finished":
        assert {"committed", "aborted"} <= outcomes


# --- owners that do not release


def test_an_owner_that_never_releases_loses_its_partitions(
    domain, unique, admin, tmp_path
):
    topic = domain.data_topic(2, records_each=200)
    group = unique("stopped")
    settings = {"max_poll_records": 5, "handle_ms": 20, "delivery": "alo"}
    with Fleet(domain, tmp_path, group_id=group, topics=[topic], **settings) as fleet:
        worker = fleet.start("w1")
        eventually(lambda: len(worker.journal.handled) > 20, "it is busy")
        worker.signal(signal.SIGSTOP)
        try:
            result = admin.execute(admin.plan_reset(group, PositionSpec.to_offset(3)))
            assert result.outcome == "committed"
            assert set(positions(domain, group).values()) == {3}
        finally:
            worker.signal(signal.SIGCONT)
        ends = domain.of(topic)
        eventually(lambda: positions(domain, group) == ends, "it goes on to the end")
        worker.ask_to_end()
        handled = {(e.place, e.offset) for e in fleet.journal.handled}
    assert handled >= {(place, o) for place, end in ends.items() for o in range(3, end)}


# --- the command


def test_the_command_resets_continues_and_undoes(
    domain, unique, admin, killer, tmp_path
):
    group = unique("cli")
    topic, before = set_up(domain, admin, group)
    cli = Cli(domain, tmp_path)
    reset = ("groups", "reset", group)
    locked_after = K + len(places_of(topic, PARTITIONS))

    shown = cli.json(*reset, "--topic", f"{topic}:0,2", "--shift-by", "1")
    assert [(r["partition"], r["before"], r["after"]) for r in shown["partitions"]] == [
        (0, 3, 4),
        (2, 5, 6),
    ]
    assert (shown["is_executed"], positions(domain, group)) == (False, before)

    done = cli.run(*reset, "--all-topics", "--to-earliest", "--execute")
    assert "committed" in done.stdout
    assert positions(domain, group) == dict.fromkeys(before, 0)
    assert not list((tmp_path / "plans").iterdir())
    (op_id,) = {
        word for word in done.stderr.split() if len(word) == 32 and word.isalnum()
    }
    undone = cli.json("groups", "undo", op_id, "--execute", "--reason", "a mistake")
    assert (undone["outcome"], undone["undoes"]) == ("committed", op_id)
    assert positions(domain, group) == before
    worlds = domain.world().partitions
    fence = ",".join(f"{one.partition}:{one.next_offset - 1}" for one in worlds)

    csv = tmp_path / "positions.csv"
    csv.write_text(cli.run(*reset, "--all-topics", "--to-latest", "--export").stdout)
    assert cli.json(*reset, "--from-file", str(csv), "--execute")["is_executed"]
    assert set(positions(domain, group).values()) == {EACH}
    beyond = cli.run(*reset, "--all-topics", "--to-offset", "99", code=2)
    assert "--clamp" in beyond.stderr

    plan = tmp_path / "plan.json"
    cli.run(*reset, "--all-topics", "--to-offset", "7", "--plan-file", str(plan))
    assert killer(plan, locked_after)
    (locked,) = cli.json("groups", "describe", group)["operations"]
    assert (locked["locked_count"], locked["state"]) == (PARTITIONS, "undecided")
    assert "marshal groups finish" in cli.run("groups", "describe", group).stdout
    (row,) = [r for r in cli.json("groups", "list")["groups"] if r["group_id"] == group]
    assert row["locked_count"] == PARTITIONS
    busy = cli.run(*reset, "--all-topics", "--to-latest", "--execute", code=3)
    assert "marshal groups finish" in busy.stderr
    continued = cli.json(*reset, "--continue", str(plan), "--execute")
    assert continued["outcome"] == "committed"
    assert set(positions(domain, group).values()) == {7}

    other = tmp_path / "other.json"
    cli.run(*reset, "--all-topics", "--to-offset", "9", "--plan-file", str(other))
    assert killer(other, locked_after)
    (ended,) = cli.json("groups", "finish", group)["operations"]
    assert ended["outcome"] == "aborted"
    assert set(positions(domain, group).values()) == {7}
    back = cli.json(*reset, "--all-topics", "--to-fence", fence, "--execute")
    assert (back["outcome"], positions(domain, group)) == ("committed", before)
