"""A live group is set to new positions: all or none of them, and it goes on."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clikit import Cli
from domain import opened
from fleet import Fleet
from recreating import recreate_topic
from slices import slice_of
from waiting import eventually, poll_all

from kafka_marshal import (
    ClaimRejected,
    Delivery,
    GroupPaused,
    PositionSpec,
)
from kafka_marshal.admin import resetting, set_position
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


def test_a_live_group_goes_on_from_the_new_positions_and_back(domain, unique, admin):
    """Consumers of the library and one over a sidecar; none is restarted."""
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


def test_an_undo_restores_the_exact_vector_and_can_be_undone(domain, unique, admin):
    topic, before = set_up(domain, admin, group := unique("undo"))
    reset = admin.execute(admin.plan_reset(group, PositionSpec.earliest()))
    assert positions(domain, group) == dict.fromkeys(before, 0)
    assert domain.committed(group, topic) == dict.fromkeys(before, 0)
    undone = admin.undo(reset.op_id)
    assert positions(domain, group) == before
    assert domain.committed(group, topic) == before
    admin.undo(undone.op_id)
    assert positions(domain, group) == dict.fromkeys(before, 0)


@pytest.mark.parametrize("delivery", list(Delivery), ids=lambda d: d.value)
def test_a_reset_to_0_starts_at_the_first_record(domain, unique, admin, delivery):
    """0 is a position; a group at most once needs leave to go back."""
    topic = domain.data_topic(2, records_each=EACH)
    group = unique("zero")

    def read(count):
        with domain.marshal(group, "w1") as marshal:
            consumer = marshal.consumer(topic, delivery=delivery)
            found = poll_all(consumer, count)
            consumer.commit(found)
            return sorted((r.partition, r.offset) for r in found)

    every = [(p, o) for p in range(2) for o in range(EACH)]
    assert read(2 * EACH) == every
    if delivery is Delivery.AT_MOST_ONCE:
        refused = admin.plan_reset(group, PositionSpec.to_offset(0))
        assert refused.repeats_count == 2
        with pytest.raises(ClaimRejected, match="allow_reprocess=True"):
            admin.execute(refused)
        assert not open_in(domain, group)
    plan = admin.plan_reset(group, PositionSpec.to_offset(0), allow_reprocess=True)
    assert admin.execute(plan).outcome == "committed"
    assert set(positions(domain, group).values()) == {0}
    assert read(2 * EACH) == every


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
    """End a reset, again if its admin's last records came later; return its outcome."""
    outcome = None
    while True:
        for result in admin.finish(group):
            outcome = result.outcome
        if not open_in(domain, group):
            return outcome


@pytest.mark.parametrize("ends", ["continued", "finished"])
def test_an_admin_killed_at_any_step_leaves_all_or_nothing(
    domain, admin, killer, stored, ends
):
    """28 kills; the larger number with PROOF=1."""
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


def test_members_finish_what_a_dead_admin_has_committed(
    domain, unique, admin, killer, stored
):
    topic = domain.data_topic(2, records_each=EACH)
    group = unique("members")
    with domain.marshal(group, "w1") as marshal:
        pump = Pump(marshal.consumer(topic))
        ends = dict.fromkeys(domain.of(topic), EACH)
        eventually(lambda: positions(domain, group) == ends, "all is committed")
        file = stored(group)
        # The next record is a Resolve.
        assert killer(file, K + len(places_of(topic, 2)) + 1)
        wanted = 2 * EACH + 2 * (EACH - 1)
        eventually(lambda: len(pump.handed) >= wanted, "it goes on by itself")
        pump.stop()
    assert admin.execute(read_plan(file)).outcome == "committed"


# --- others meanwhile


def test_of_two_admins_one_sets_the_positions(domain, unique, admin):
    group = unique("rivals")
    _, before = set_up(domain, admin, group)
    with domain.admin(client_id="rival") as rival, ThreadPoolExecutor(2) as pool:
        wanted = {1: admin, 2: rival}
        futures = {
            position: pool.submit(
                one.execute, one.plan_reset(group, PositionSpec.to_offset(position))
            )
            for position, one in wanted.items()
        }
        errors = {p: future.exception(timeout=120) for p, future in futures.items()}
    for error in errors.values():
        assert error is None or isinstance(error, GroupPaused | ClaimRejected)
    # Both may succeed, one after the other; of a refused one nothing is set.
    done = [dict.fromkeys(before, p) for p, error in errors.items() if error is None]
    assert positions(domain, group) in (done or [before])
    assert not open_in(domain, group)


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


def hold_before_stage(monkeypatch, meanwhile):
    """Let something happen between the drain and the first Stage."""
    plain, calls = set_position.require_allowed, []

    def require_allowed(plan, known):
        calls.append(plan)
        if len(calls) == 2:
            meanwhile()
        plain(plan, known)

    monkeypatch.setattr(set_position, "require_allowed", require_allowed)


def test_a_pause_that_runs_out_in_the_middle_sets_nothing(
    domain, unique, admin, monkeypatch
):
    group = unique("expired")
    _, before = set_up(domain, admin, group)
    monkeypatch.setattr(resetting, "PAUSE_MS_MIN", 1)

    def wait():
        def is_over():
            for t in range(K):
                domain.append(b"time passes", t=t)
            worlds = domain.world().partitions
            return not any(world.active_pause(group) for world in worlds)

        eventually(is_over, "the pause is over")

    hold_before_stage(monkeypatch, wait)
    with pytest.raises(ClaimRejected) as raised:
        admin.execute(admin.plan_reset(group, PositionSpec.to_offset(1)))
    assert raised.value.reason == "op_over"
    assert positions(domain, group) == before
    assert not open_in(domain, group)


def test_a_topic_that_is_created_again_in_the_middle_starts_at_its_beginning(
    domain, unique, admin, monkeypatch
):
    group = unique("recreated")
    topic = domain.data_topic(2, records_each=EACH)
    set_up(domain, admin, group, topic=topic)

    def recreate():
        recreate_topic(domain.topics, domain.kafka, topic, 2)
        for place in domain.of(topic):
            domain.produced[place] = 0
        domain.produce(topic, 4)

    hold_before_stage(monkeypatch, recreate)
    result = admin.execute(admin.plan_reset(group, PositionSpec.to_offset(2)))
    assert result.outcome == "committed"
    with domain.marshal(group, "w1") as marshal:
        found = poll_all(marshal.consumer(topic), 8)
    assert sorted((r.partition, r.offset) for r in found) == [
        (p, o) for p in range(2) for o in range(4)
    ]


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
