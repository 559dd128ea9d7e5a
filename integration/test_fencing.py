"""Fencing the process of a client: it stops, or its claims run out."""

import os
import signal
import subprocess

import pytest
from clikit import MARSHAL, RUN_S, Cli
from domain import opened
from fleet import Fleet
from waiting import eventually

# Longer than the start of a process: a takeover before that waited for no lease.
LONG_H_MS = 60_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    # One transport is enough: the tests do not depend on it.
    with opened(broker, unique) as domain:
        yield domain


@pytest.fixture(scope="module")
def slow(broker, unique):
    with opened(broker, unique, h_ms=LONG_H_MS) as domain:
        yield domain


def test_a_fenced_healthy_client_stops_and_another_takes_over_at_once(
    slow, unique, tmp_path
):
    topic = slow.data_topic(3, records_each=20_000)
    group = unique("healthy")
    with Fleet(slow, tmp_path, group_id=group, topics=[topic]) as fleet:
        first = fleet.start("w1", handle_ms=1)
        eventually(lambda: len(first.journal.handled) > 100, "w1 works")
        second = fleet.start("w2", policy="greedy", handle_ms=0)
        second.wait_for("ready")
        with slow.admin(client_id="operator", person="alice") as admin:
            result = admin.fence_client(group, "w1", reason="wrong", wait_ms=30_000)
        assert (result.is_changed, result.held) == (True, ())
        failed = first.wait_for("failed")
        assert failed["kind"] == "ClientFenced"
        assert "'alice'" in failed["says"]
        assert "wrong" in failed["says"]
        assert first.wait() != 0
        eventually(lambda: len(second.journal.of("claimed")) == 3, "w2 takes over")
        second.ask_to_end()
    for key, tenures in slow.history().tenures(group).items():
        one, two = tenures[-2:]
        assert one.ended_by == "released"
        assert two.begun_ms - one.ended_ms < LONG_H_MS
        mine = [
            h.offset for h in first.journal.handled if h.place == key.topic_partition
        ]
        assert two.start == one.position <= (max(mine) + 1 if mine else 0)


def test_a_fenced_stopped_client_loses_its_claims_and_ends_when_resumed(
    domain, unique, tmp_path
):
    topic = domain.data_topic(2, records_each=5_000)
    group = unique("stopped")
    with Fleet(domain, tmp_path, group_id=group, topics=[topic]) as fleet:
        first = fleet.start("w1", handle_ms=1)
        eventually(lambda: len(first.journal.handled) > 10, "w1 works")
        second = fleet.start("w2", policy="greedy", handle_ms=0)
        second.wait_for("ready")
        first.signal(signal.SIGSTOP)
        handled = len(first.journal.handled)
        with domain.admin(client_id="operator") as admin:
            result = admin.fence_client(group, "w1", wait_ms=60_000)
            assert result.held == ()
            assert {each.is_fenced for each in result.processes} == {True}
            eventually(
                lambda: set(domain.owners(group).values()) == {"w2"}, "w2 takes over"
            )
            first.signal(signal.SIGCONT)
            assert first.wait_for("failed")["kind"] == "ClientFenced"
            # The record that it was handling when it was stopped, and no other.
            assert len(first.journal.handled) <= handled + 1
            assert first.wait() != 0
            again = fleet.start("w1")
            again.wait_for("ready")
            second.ask_to_end()
            eventually(
                lambda: set(domain.owners(group).values()) == {"w1"},
                "a new process of w1 takes over",
            )
            # A second fence of the first process does not reach the new one.
            gone = [p.incarnation for p in admin.client_processes(group, "w1")]
            fenced = {p.incarnation for p in result.processes}
            named = [each for each in gone if each in fenced]
            assert not admin.fence_client(group, "w1", incarnations=named).is_changed
            assert again.is_running
        again.ask_to_end()
    for tenures in domain.history().tenures(group).values():
        first_taken = next(each for each in tenures if each.ended_by == "claimed")
        taken_at = tenures[tenures.index(first_taken) + 1].begun_ms
        assert taken_at - first_taken.renewed_ms > 2 * domain.h_ms


def test_the_fence_command_asks_for_confirmation_and_can_be_repeated(
    domain, unique, tmp_path
):
    cli = Cli(domain, tmp_path)
    topic = domain.data_topic(1, records_each=3)
    group = unique("asked")
    consuming = ("consume", topic, "--group", group, "--client-id", "w1")
    words = ("clients", "fence", group, "w1", "--reason", "hung")
    with cli.started(*consuming) as consumer:
        consumer.wait_lines(3)
        shown = cli.json(*words, "--dry-run")
        assert (shown["is_executed"], shown["held_count"]) == (False, 1)
        assert [row["is_fenced"] for row in shown["fenced"]] == [False]
        refused = cli.run(*words, code=2)
        assert "is alive on host" in refused.stderr
        assert "Add --yes" in refused.stderr
        code, shown = at_a_terminal(cli, words, answer="yes")
        assert (code, "not confirmed" in shown) == (3, True), shown
        assert consumer.process.poll() is None
        code, shown = at_a_terminal(cli, (*words, "--as", "alice"), answer="w1")
        assert (code, "Type w1 to confirm" in shown) == (0, True), shown
        assert consumer.end() == 4, consumer.stderr
        assert "was fenced by 'alice'" in consumer.stderr
        assert "hung" in consumer.stderr
    again = cli.json(*words)
    assert (again["is_changed"], again["held_count"]) == (False, 0)
    assert [
        c["owner"] for c in cli.json("claims", "list", "--group", group)["claims"]
    ] == [None]


def at_a_terminal(cli, words, *, answer):
    """Run a command whose standard input is a terminal; return exit code and stderr."""
    keyboard, end = os.openpty()
    try:
        process = subprocess.Popen(
            [MARSHAL, *words],
            env=os.environ | cli.env,
            stdin=end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.write(keyboard, f"{answer}\n".encode())
        _, shown = process.communicate(timeout=RUN_S)
    finally:
        os.close(keyboard)
        os.close(end)
    return process.returncode, shown
