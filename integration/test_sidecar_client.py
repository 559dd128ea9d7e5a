"""Clients of a sidecar when the sidecar or the client dies or hangs."""

import json
import signal
import socket
from contextlib import ExitStack

import pytest
from clikit import Cli
from domain import Recorder, opened
from fleet import Fleet
from journal import judge_duplicates, judge_grants
from sidecars import start_sidecar
from waiting import eventually, poll_all, wall_ms

from kafka_marshal import (
    ConfigurationError,
    Delivery,
    Losses,
    TopicPartition,
)
from kafka_marshal.closing import in_background

BATCH = 20
KINDS = pytest.mark.parametrize("delivery", ["alo", "amo"])


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, via="sidecar", transport="fast") as domain:
        yield domain


@pytest.fixture
def sidecar(domain):
    """A sidecar that a test may kill or stop."""
    with start_sidecar(domain, client_id=domain.unique("host")) as sidecar:
        yield sidecar


def team_of(domain, home, sidecar, **settings):
    """Return a fleet of workers of one group on a topic of its own."""
    topic = domain.data_topic(2, records_each=settings.pop("records_each", 300))
    home.mkdir(exist_ok=True)
    usual = {"max_poll_records": BATCH, "handle_ms": 5, "sidecar": sidecar.address}
    group = domain.unique("team")
    return Fleet(domain, home, group_id=group, topics=[topic], **(usual | settings))


def await_end(domain, fleet):
    group, (topic,) = fleet.settings["group_id"], fleet.settings["topics"]
    produced = domain.of(topic)

    def is_done():
        states = domain.states(group)
        ends = {k.topic_partition: s.next_unclaimed() for k, s in states.items()}
        return ends == produced

    eventually(is_done, f"{group} reaches the end", 120_000)
    for worker in fleet.workers:
        worker.ask_to_end()
    return fleet.journal.lost(produced)


def await_busy(worker):
    before = len(worker.journal.handled)
    eventually(
        lambda: len(worker.journal.handled) > before + BATCH // 2, "it is in a batch"
    )


def handled_after(worker, at_ms):
    return [each for each in worker.journal.handled if each.at_ms > at_ms]


# --- the sidecar dies


@KINDS
def test_a_killed_sidecar_continues_its_claims_after_a_restart(
    domain, sidecar, tmp_path, delivery
):
    """At least once loses no record; at most once processes none twice."""
    with team_of(domain, tmp_path, sidecar, delivery=delivery) as fleet:
        worker = fleet.start("w1")
        await_busy(worker)
        before = {each.place for each in worker.journal.handled}
        sidecar.kill()
        sidecar.start()
        lost = await_end(domain, fleet)
        journal = fleet.journal
    if delivery == "alo":
        assert lost == {}
    else:
        assert journal.duplicated() == {}
    assert before <= {each.place for each in journal.handled}
    owners = {
        tenure.client_id
        for tenures in domain.history().tenures(fleet.settings["group_id"]).values()
        for tenure in tenures
    }
    assert owners == {sidecar.client_id}


@pytest.mark.parametrize(
    ("how", "delivery"),
    [
        pytest.param(signal.SIGKILL, "amo", id="dead"),
        pytest.param(signal.SIGSTOP, "alo", id="hung"),
    ],
)
def test_clients_of_a_dead_or_hung_sidecar_stop_at_their_deadlines(
    domain, sidecar, tmp_path, delivery, how
):
    with team_of(
        domain, tmp_path, sidecar, delivery=delivery, records_each=3_000
    ) as fleet:
        worker = fleet.start("w1")
        await_busy(worker)
        sidecar.signal(how)
        gone_ms = wall_ms()
        worker.wait_for("lost", reason="lease_expired")
        # Only the record that it was processing.
        assert len(handled_after(worker, gone_ms + 2 * domain.h_ms)) <= 1
        if how is signal.SIGSTOP:
            sidecar.signal(signal.SIGCONT)
        else:
            sidecar.process.wait(60)
            sidecar.start()
        back = len(worker.journal.handled)
        eventually(
            lambda: len(worker.journal.handled) > back + BATCH, "it goes on as before"
        )
        worker.ask_to_end()
        journal = fleet.journal
    if delivery == "amo":
        assert journal.duplicated() == {}


# --- a client hangs


@KINDS
def test_another_host_takes_over_from_a_client_that_hangs(
    domain, sidecar, tmp_path, delivery
):
    """The resumed client stops by its own deadlines."""
    with (
        start_sidecar(domain, client_id=domain.unique("host")) as other,
        team_of(domain, tmp_path, sidecar, delivery=delivery, policy="greedy") as fleet,
    ):
        w1 = fleet.start("w1")
        await_busy(w1)
        w1.signal(signal.SIGSTOP)
        w2 = fleet.start("w2", sidecar=other.address, handle_ms=1)
        eventually(lambda: w2.journal.handled, "w2 goes to work")
        group = fleet.settings["group_id"]
        eventually(
            lambda: set(domain.owners(group).values()) == {other.client_id},
            "the other host has everything",
        )
        woken_ms = wall_ms()
        w1.signal(signal.SIGCONT)
        w1.wait_for("lost")
        lost = await_end(domain, fleet)
        journal = fleet.journal
        assert len(handled_after(w1, woken_ms)) <= 1
    if delivery == "alo":
        assert lost == {}
        judge_duplicates(journal, domain.history(), group)
    else:
        judge_grants(journal, domain.history(), group)


# --- the connection is lost, and found again


def test_a_client_that_reconnects_in_time_keeps_its_claims(domain, sidecar, unique):
    """No claim ends in the log, and the session does not fail."""
    topic, group = domain.data_topic(3, records_each=5), unique("back")
    recorder = Recorder()
    with domain.marshal(
        group, "w1", sidecar=sidecar.address, observer=recorder
    ) as marshal:
        consumer = marshal.consumer(topic)
        poll_all(consumer, 15)
        consumer.commit()
        tokens = consumer.tokens()
        link = marshal._backend
        for _ in range(3):
            stream = eventually(lambda: link._stream, "it follows the events")
            stream.end()
            eventually(
                lambda old=stream: link._stream not in {None, old}, "it follows again"
            )
        domain.produce(topic, 1)
        poll_all(consumer, 3)
        assert consumer.tokens() == tokens
    assert [len(t) for t in domain.history().tenures(group).values()] == [1, 1, 1]
    assert not recorder.named("session_failed")


# --- what is reported


def test_a_flush_returns_when_the_position_is_in_the_log(domain, unique):
    topic, group = domain.data_topic(1, records_each=9), unique("flush")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic)
        consumer.commit(poll_all(consumer, 9)[:4])
        consumer.flush()
        (known,) = domain.states(group).values()
        assert known.position == 4


@pytest.mark.parametrize("delivery", list(Delivery), ids=lambda each: each.value)
def test_a_client_closes_although_its_sidecar_is_dead(broker, unique, delivery):
    """It waits neither for a verdict nor for the time-out of the close."""
    with ExitStack() as stack:
        opening = opened(broker, unique, h_ms=60_000, via="sidecar", transport="fast")
        domain = stack.enter_context(opening)
        sidecar = stack.enter_context(start_sidecar(domain, client_id=unique("host")))
        topic = domain.data_topic(1, records_each=100)
        recorder = Recorder()
        marshal = domain.marshal(
            unique("gone"), "w1", sidecar=sidecar.address, observer=recorder
        )
        consumer = marshal.consumer(topic, delivery=delivery, max_poll_records=10)
        poll_all(consumer, 10)
        sidecar.signal(signal.SIGSTOP)
        while consumer.poll(timeout_ms=1_000):
            pass
        sidecar.kill()

        def end():
            consumer.stop()
            for _ in consumer:
                pass
            marshal.close(timeout_ms=600_000)

        thread = in_background(end)
        eventually(lambda: not thread.is_alive(), "it has ended")
        assert recorder.named("close_unconfirmed")


def test_at_most_once_a_small_span_limit_loses_no_record(broker, unique):
    """A fetch returns more records than one grant may cover."""
    with opened(
        broker, unique, via="sidecar", transport="fast", limits={"span": 50}
    ) as domain:
        topic = domain.data_topic(1, records_each=400)
        with domain.marshal(unique("span"), "w1") as marshal:
            consumer = marshal.consumer(topic, delivery=Delivery.AT_MOST_ONCE)
            records = poll_all(consumer, 400)
    assert [record.offset for record in records] == list(range(400))


def test_at_most_once_processed_records_are_not_listed_as_lost(domain, unique):
    topic, group = domain.data_topic(2, records_each=100), unique("marks")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, delivery=Delivery.AT_MOST_ONCE)
        poll_all(consumer, 200)
    found = Losses.open(domain.servers, group_id=group, coordination_topic=domain.topic)
    assert (found.lost, found.at_risk) == ((), ())


def test_a_pause_waits_for_uncommitted_records(domain, unique):
    topic, group = domain.data_topic(1, records_each=10), unique("pause")
    place = TopicPartition(topic, 0)
    with domain.marshal(group, "w1") as marshal, domain.admin() as admin:
        consumer = marshal.consumer(topic, max_poll_records=4)
        records = poll_all(consumer, 4)
        admin.pause_group(group, for_ms=60_000)
        eventually(
            lambda: marshal.engine.context.is_paused(group), "the pause is reported"
        )
        # The home partition is paused first; the key's own follows at once.
        (held,) = marshal.session.holdings.values()
        eventually(lambda: held.drain is not None, "the key is asked for")
        assert consumer.poll() == {}
        consumer.commit(records)
        eventually(
            lambda: consumer.poll(50) == {} and domain.owners(group) == {place: None},
            "released once its hands are empty",
        )
        (known,) = domain.states(group).values()
        assert known.position == 4
        admin.resume_group(group)
        assert poll_all(consumer, 6)[0].offset == 4


# --- TCP and profiles


def test_over_tcp_a_client_needs_the_token_of_the_sidecar(domain, unique, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    topic, group = domain.data_topic(1, records_each=5), unique("tcp")
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    wrong.write_text("w" * 32)
    listen = ("--tcp", place, "--token-file", str(token))
    where = {"sidecar": f"http://{place}"}
    with start_sidecar(domain, client_id=unique("host"), arguments=listen):
        with pytest.raises(ConfigurationError, match="token"):
            domain.marshal(group, "w1", sidecar_token_file=wrong, **where)
        with domain.marshal(group, "w1", sidecar_token_file=token, **where) as marshal:
            assert len(poll_all(marshal.consumer(topic), 5)) == 5


def test_the_command_consumes_through_the_sidecar_of_a_profile(
    domain, unique, tmp_path
):
    topic = domain.data_topic(2, records_each=5)
    file = tmp_path / "config.toml"
    file.write_text(f'[default]\nsidecar = "{domain.sidecar.address}"\n')
    cli = Cli(domain, tmp_path)
    # The sidecar has the address of the cluster.
    del cli.env["MARSHAL_BOOTSTRAP_SERVER"], cli.env["MARSHAL_COORDINATION_TOPIC"]
    group = unique("command")
    done = cli.run(
        *("consume", topic, "--group", group, "--client-id", "w1"),
        *("--max-records", "10", "--config", str(file), "--timeout", "60s"),
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((each["partition"], each["offset"]) for each in lines) == [
        (partition, offset) for partition in (0, 1) for offset in range(5)
    ]
    positions = {k.partition: s.position for k, s in domain.states(group).items()}
    assert positions == {0: 5, 1: 5}
