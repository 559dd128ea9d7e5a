"""Partitions of sidecars are handed off while workers use them, on a real broker.

Sidecars, and the workers behind them, are processes of their own.
"""

import contextlib
import json
import signal
import socket
import threading
from collections import Counter

import pytest
from clikit import Cli
from domain import opened
from fleet import Fleet
from sidecars import END_S, start_sidecar
from waiting import eventually

from kafka_marshal.protocol.types import TopicPartition

H_MS = 2_000
KEYS = 6
WARM_MS = 300
FAR = "far-away"


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS, transport="fast") as found:
        yield found


class Traffic:
    """Produces records to every partition of a topic until it is stopped."""

    def __init__(self, domain, topic):
        self._domain, self._topic = domain, topic
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._ends.wait(0.05):
            for number in range(KEYS):
                self._domain.produce_to(TopicPartition(self._topic, number), 1)

    def stop(self):
        self._ends.set()
        self._thread.join(60)


@pytest.fixture
def topic(domain):
    return domain.data_topic(KEYS)


@pytest.fixture
def traffic(domain, topic):
    found = Traffic(domain, topic)
    yield found
    found.stop()


@pytest.fixture
def fleet(domain, unique, topic, tmp_path):
    """Workers of one group, which load state before they get a partition."""
    usual = {"max_poll_records": 1, "handle_ms": 0, "warm_ms": WARM_MS}
    group = unique("handoff")
    with Fleet(domain, tmp_path, group_id=group, topics=[topic], **usual) as found:
        yield found


class Group:
    """The state and history of a group by the log."""

    def __init__(self, domain, fleet):
        self.domain = domain
        self.name = fleet.settings["group_id"]
        (self.topic,) = fleet.settings["topics"]

    def counts(self):
        """Return how many partitions each owner has; None for those without one."""
        return Counter(self.domain.owners(self.name).values())

    def await_counts(self, **expected):
        expected = {name.replace("_", "-"): count for name, count in expected.items()}
        eventually(
            lambda: self.counts() == expected,
            f"owners are {expected}",
            90_000,
        )

    def await_shared(self, *names):
        """Wait until each of them has a partition, and no offer is open."""

        def is_shared():
            found = self.counts()
            offers = len(self.steps("offered"))
            is_open = offers > len(self.steps("ready", "offer_withdrawn"))
            return set(found) == set(names) and not is_open

        eventually(is_shared, f"{names} share", 90_000)

    def steps(self, *effects):
        return self.domain.history().of(*effects, group_id=self.name)

    def await_handled(self, fleet):
        """Wait until all records are processed, and check that none was twice."""
        produced = self.domain.of(self.topic)
        eventually(lambda: not fleet.journal.lost(produced), "all is handled", 90_000)
        assert fleet.journal.duplicated() == {}


def partitions_of(fleet, client_id):
    return {
        line["partition"] for line in fleet.journal.of("claimed", client_id=client_id)
    }


def test_clients_of_one_sidecar_hand_off_without_records_in_the_log(
    domain, fleet, traffic
):
    group = Group(domain, fleet)
    with start_sidecar(domain, client_id="one") as sidecar:
        fleet.start("w1", sidecar=sidecar.address)
        group.await_counts(one=KEYS)
        second = fleet.start("w2", sidecar=sidecar.address, warm_ms=1_000)
        has = lambda: Counter(sidecar.assigned(group.name).values())  # noqa: E731
        eventually(lambda: has() == {"w1": 3, "w2": 3}, "they share", 90_000)
        traffic.stop()
        group.await_handled(fleet)
        warmed = second.journal.of("warmed")
        assert {line["owner"] for line in warmed} == {"w1"}
        for line in warmed:
            # The first worker handled records while the second one loaded its state.
            while_warming = [
                each
                for each in fleet.journal.handled
                if each.place.partition == line["partition"]
                and line["at_ms"] - 1_000 < each.at_ms < line["at_ms"]
            ]
            assert {each.client_id for each in while_warming} == {"w1"}
        assert not group.steps("offered", "ready")
        for worker in fleet.workers:
            worker.ask_to_end()


def test_a_drained_host_hands_off_all_that_its_sidecar_holds(
    domain, fleet, traffic, tmp_path, monkeypatch
):
    """No record is lost or repeated; the drain is ended early by its op_id."""
    group, cli = Group(domain, fleet), Cli(domain, tmp_path)
    host = socket.gethostname()
    with start_sidecar(domain, client_id="one") as sidecar:
        for name in ("w1", "w2", "w3"):
            fleet.start(name, sidecar=sidecar.address)
        group.await_counts(one=KEYS)
        # The other host: a process with another host name.
        fleet.start("far", hostname=FAR)
        group.await_shared("one", "far")
        words = ("clients", "drain", "--host", host, "--wait", "--timeout", "90s")
        done = cli.run(*words, "--reason", "reboot", "-o", "json")
        found = json.loads(done.stdout)
        assert found["held"] == []
        assert {"group_id": group.name, "client_id": "one"} in found["members"]
        group.await_counts(far=KEYS)
        assert sidecar.assigned(group.name) == {}
        ending = ("clients", "uncordon", "--operation", found["op_id"])
        cli.json(*ending)
        group.await_shared("one", "far")
        traffic.stop()
        group.await_handled(fleet)
        effects = Counter(step.effect for step in group.steps("offered", "ready"))
        assert effects["ready"] >= KEYS - 1
        for worker in fleet.workers:
            worker.ask_to_end()


def test_sigterm_of_a_sidecar_hands_off_before_it_ends(domain, fleet, traffic):
    group = Group(domain, fleet)
    with start_sidecar(domain, client_id="one") as sidecar:
        workers = [fleet.start(name, sidecar=sidecar.address) for name in ("w1", "w2")]
        group.await_counts(one=KEYS)
        fleet.start("far")
        group.await_shared("one", "far")
        assert sidecar.stop() == 0, sidecar.log
        assert group.counts() == {"far": KEYS}
        # All handoffs are warm, and each partition is handed off once.
        handed = sorted(step.key.partition for step in group.steps("ready"))
        assert handed == list(range(KEYS))
        assert "other hosts did not take over" not in sidecar.log
        directives = [
            step.effect for step in group.steps("directed", "directive_ended")
        ]
        assert directives == ["directed", "directive_ended"]
        traffic.stop()
        group.await_handled(fleet)
        for worker in workers:
            worker.kill()


def test_a_second_sigterm_ends_a_handoff_at_once(domain, fleet):
    group = Group(domain, fleet)
    with start_sidecar(domain, client_id="one") as sidecar:
        worker = fleet.start("w1", sidecar=sidecar.address)
        group.await_counts(one=KEYS)
        fleet.start("far", warm_ms=600_000)
        eventually(lambda: group.steps("offered"), "partitions are offered")
        sidecar.signal(signal.SIGTERM)
        eventually(lambda: "PENDING_CONTROLLED_SHUTDOWN" in sidecar.log, "it hands off")
        sidecar.signal(signal.SIGTERM)
        assert sidecar.process.wait(END_S) == -signal.SIGTERM
        worker.kill()


def test_a_rolling_restart_moves_each_partition_at_most_twice(
    domain, fleet, traffic, record_property
):
    """With stable names each partition leaves its host once, and returns once."""
    group = Group(domain, fleet)
    names = ("one", "two", "three")
    with (
        start_sidecar(domain, client_id="one") as one,
        start_sidecar(domain, client_id="two") as two,
        start_sidecar(domain, client_id="three") as three,
    ):
        hosts = dict(zip(names, (one, two, three), strict=True))
        workers = {
            name: fleet.start(f"w-{name}", sidecar=host.address)
            for name, host in hosts.items()
        }
        even = dict.fromkeys(names, KEYS // len(names))
        group.await_counts(**even)
        begun = len(group.steps("claimed"))
        for name, host in hosts.items():
            assert host.stop() == 0, host.log
            assert group.counts()[name] == 0
            workers[name].kill()
            host.start()
            workers[name] = fleet.start(f"w-{name}", sidecar=host.address)
            group.await_counts(**even)
        traffic.stop()
        group.await_handled(fleet)
        moves = Counter(step.key.partition for step in group.steps("claimed")[begun:])
        record_property("moves", sum(moves.values()))
        # Twice for each partition: by a reservation for a host that comes back it
        # could be none.
        assert sum(moves.values()) <= 2 * KEYS
        for worker in workers.values():
            worker.ask_to_end()


def test_a_rollout_with_new_names_moves_each_partition_once(domain, fleet, traffic):
    """As with deploy/kubernetes, where each pod is a sidecar and a worker."""
    group = Group(domain, fleet)
    env = {"MARSHAL_LABELS": "replaces=*"}
    with contextlib.ExitStack() as stack, domain.admin() as admin:

        def grace(grace_ms):
            changes = {"policy": "planner", "grace_ms": grace_ms}
            admin.set_group(group.name, changes, execute=True)

        def start(name):
            sidecar = stack.enter_context(
                start_sidecar(domain, client_id=name, env=env)
            )
            return sidecar, fleet.start(f"w-{name}", sidecar=sidecar.address)

        grace(0)  # else the second has its share only after that time
        old = {name: start(name) for name in ("old-a", "old-b")}
        group.await_counts(old_a=3, old_b=3)
        grace(120_000)
        begun = len(group.steps("claimed"))
        for name, (sidecar, worker) in old.items():
            new = name.replace("old", "new")
            _, other = start(new)
            eventually(lambda w=other: w.journal.of("ready"), "it is ready", 90_000)
            assert new not in group.counts()
            done = admin.drain(name, for_ms=120_000, wait_ms=90_000)
            assert done.held == ()
            worker.ask_to_end()
            assert sidecar.stop() == 0, sidecar.log
            assert group.counts()[new] == KEYS // len(old)
        traffic.stop()
        group.await_handled(fleet)
        moves = Counter(step.key.partition for step in group.steps("claimed")[begun:])
        assert moves == dict.fromkeys(range(KEYS), 1)
        # All handoffs are warm, from a living owner.
        assert len(group.steps("ready")) >= KEYS
        for worker in fleet.workers:
            worker.ask_to_end()
