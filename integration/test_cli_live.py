"""Commands that run until they are ended: watch, tail, `consume --exec`."""

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from clikit import MARSHAL, RUN_S, Cli
from domain import opened
from waiting import eventually

from kafka_marshal.testing.broker import EmbeddedBroker

AWAY_MS = 60_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique) as domain:
        yield domain


@pytest.fixture
def cli(domain, tmp_path):
    return Cli(domain, tmp_path)


def consuming(topic, group, client="c1"):
    return ("consume", topic, "--group", group, "--client-id", client)


def position(cli, group):
    """Return the positions of a group's claims, and their owners."""
    claims = cli.json("claims", "list", "--group", group)["claims"]
    return [claim["position"] for claim in claims], {
        claim["owner"] and claim["owner"]["client_id"] for claim in claims
    }


# --- claims watch


@contextmanager
def read_to_the_end(cli, group, *arguments):
    """Run a command, and wait until it has read the present log."""
    with cli.domain.marshal(group, "anchor") as marshal:
        marshal.claim(cli.domain.data_topic(1), 0)
        with cli.started(*arguments) as started:
            started.wait_lines(1)
            marshal.close()
            started.wait_lines(2)
            yield started


def test_claims_watch_prints_a_line_for_each_change(cli, unique):
    topic, group = cli.domain.data_topic(1, records_each=3), unique("group")
    watching = ("claims", "watch", "--group", group, "-o", "jsonl")
    with read_to_the_end(cli, group, *watching) as watch:
        cli.run(*consuming(topic, group), "--max-records", "3")
        cli.run("groups", "pause", group, "--for", "1m", "--reason", "deploy")
        cli.run("groups", "resume", group)
        watch.wait_lines(6)
        assert watch.end(signal.SIGINT) == 130, watch.stderr
        held, *lines = watch.records()
    assert (held["section"], held["owner"]["client_id"]) == ("claims", "anchor")
    assert lines.pop(0)["change"] == "released"
    assert [line["change"] for line in lines] == [
        "claimed",
        "released",
        "paused",
        "unpaused",
    ]
    assert [line["client_id"] for line in lines[:2]] == ["c1", "c1"]
    assert (lines[1]["position"], lines[2]["reason"]) == (3, "deploy")
    assert all(line["schema"] == 1 and line["as_of"]["time_ms"] for line in lines)
    claim = cli.domain.history().of("claimed", group_id=group)[-1]
    assert (lines[0]["coordinating_partition"], lines[0]["offset"]) == (
        claim.t,
        claim.offset,
    )


def test_claims_watch_ends_when_its_reader_closes_the_pipe(cli):
    watch = subprocess.Popen(
        [MARSHAL, "claims", "watch", "--only-changes"],
        env=os.environ | cli.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        watch.stdout.close()
        assert watch.wait(timeout=RUN_S) == 0
        assert watch.stderr.read() == b""
    finally:
        watch.kill()
        watch.wait(timeout=RUN_S)
        watch.stderr.close()


class Terminal:
    """A process on a terminal, and all that it has drawn."""

    def __init__(self, process, number):
        self.process = process
        self._number = number
        self._drawn = b""

    def drawn(self):
        os.set_blocking(self._number, False)
        try:
            while part := os.read(self._number, 65_536):
                self._drawn += part
        except (BlockingIOError, OSError):
            pass
        return self._drawn.decode(errors="replace")

    def wait_drawn(self, text):
        eventually(lambda: text in self.drawn(), f"{text!r} is drawn")


@contextmanager
def on_a_terminal(cli, *arguments, **env):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [MARSHAL, *arguments],
        env=os.environ | cli.env | {"TERM": "xterm", "COLUMNS": "150", **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait(timeout=RUN_S)
        os.close(ours)


SHOW_CURSOR = "\x1b[?25h"


def test_on_a_terminal_the_table_is_redrawn(cli, unique):
    topic, group = cli.domain.data_topic(1), unique("group")
    watching = ("claims", "watch", "--group", group)
    with on_a_terminal(cli, *watching, NO_COLOR="1") as terminal:
        terminal.wait_drawn("no claims")
        with cli.domain.marshal(group, "holder") as marshal:
            marshal.claim(topic, 0)
            terminal.wait_drawn("holder")
        terminal.wait_drawn("released")
        terminal.process.terminate()
        assert terminal.process.wait(timeout=RUN_S) == 0
        assert "\x1b[3" not in terminal.drawn()
        assert terminal.drawn().rstrip().endswith(SHOW_CURSOR)


def test_claims_watch_continues_after_an_outage(unique, tmp_path):
    with EmbeddedBroker() as broker, opened(broker, unique) as domain:
        cli = Cli(domain, tmp_path)
        topic = domain.data_topic(1)
        watching = ("claims", "watch", "-o", "jsonl")
        with read_to_the_end(cli, "g", *watching) as watch:
            broker.pause()
            eventually(lambda: "do not answer" in watch.stderr, "it is told", AWAY_MS)
            broker.resume()
            eventually(lambda: "answer again" in watch.stderr, "it is back", AWAY_MS)
            with domain.marshal("g", "after") as marshal:
                marshal.claim(topic, 0)
                watch.wait_lines(3)
            assert watch.end(signal.SIGTERM) == 0
    assert watch.records()[2]["client_id"] == "after"


# --- log tail


def test_log_tail_prints_new_records(cli, unique):
    topic, group = cli.domain.data_topic(1, records_each=3), unique("group")
    tailing = ("log", "tail", "-f", "--group", group, "-n", "1")
    kinds = ("--type", "ClaimingPartition,ReleasingPartition")
    with read_to_the_end(cli, group, *tailing, *kinds) as tail:
        with cli.domain.marshal(group, "holder") as marshal:
            marshal.claim(topic, 0)
        tail.wait_lines(4)
        assert tail.end(signal.SIGTERM) == 0, tail.stderr
    claimed, released = tail.lines()[2:]
    assert f"ClaimingPartition {group}/holder {topic}-0 " in claimed
    assert claimed.endswith("-> claimed")
    assert released.endswith("-> released")


# --- consume --exec

HANDLER = """
import os, sys, time
with open({notes!r}, "a") as notes:
    notes.write(os.environ["MARSHAL_OFFSET"] + " " + sys.stdin.read() + chr(10))
{then}
"""


def run_out(cli, group, *arguments, positions):
    """Consume until these are the positions; a busy machine may need several runs."""

    def look():
        cli.run(*arguments, "--timeout", "1500ms")
        return position(cli, group) == (positions, {None})

    eventually(look, f"the positions are {positions}")


@pytest.fixture
def handler(tmp_path):
    """A program that notes what it is given; returns its command line."""
    notes = tmp_path / "notes"

    def make(then=""):
        program = tmp_path / "handler.py"
        program.write_text(HANDLER.format(notes=str(notes), then=then))
        return f"{sys.executable} {program}"

    def noted():
        return notes.read_text().splitlines() if notes.exists() else []

    make.noted = noted  # type: ignore[attr-defined]
    return make


@pytest.mark.parametrize("delivery", ["alo", "amo"])
def test_exec_runs_one_process_for_each_record(cli, unique, handler, delivery):
    topic, group = cli.domain.data_topic(1, records_each=8), unique("group")
    wanted = (*consuming(topic, group), "--delivery", delivery, "--exec", handler())
    done = cli.run(*wanted, "--max-records", "5")
    assert done.stdout == ""
    assert handler.noted() == [f"{n} {n}" for n in range(5)]
    run_out(cli, group, *wanted, positions=[8])
    # What was granted beyond --max-records is lost at most once, never repeated.
    offsets = [int(line.split()[0]) for line in handler.noted()]
    assert offsets == sorted(set(offsets))
    assert delivery == "amo" or offsets == list(range(8))


def test_a_signal_ends_the_exec_process_and_its_record_is_not_committed(
    cli, unique, handler
):
    topic, group = cli.domain.data_topic(1, records_each=3), unique("group")
    command = handler("time.sleep(600)")
    with cli.started(*consuming(topic, group), "--exec", command) as consumer:
        eventually(handler.noted, "the process runs")
        assert consumer.end(signal.SIGTERM) == 0, consumer.stderr
    assert "the command was stopped" in consumer.stderr
    assert position(cli, group)[0] in ([0], [None])
    wanted = (*consuming(topic, group), "--exec", handler())
    run_out(cli, group, *wanted, positions=[3])
    assert handler.noted() == ["0 0", "0 0", "1 1", "2 2"]


def test_a_lost_claim_ends_the_exec_process(cli, unique, handler):
    """It is stopped until its claim is stale; another client has the record by then."""
    topic, group = cli.domain.data_topic(1, records_each=2), unique("group")
    command = handler("time.sleep(600)")
    with cli.started(*consuming(topic, group, "slow"), "--exec", command) as slow:
        eventually(handler.noted, "the process runs")
        slow.process.send_signal(signal.SIGSTOP)
        cli.run(*consuming(topic, group, "successor"), "--max-records", "2")
        slow.process.send_signal(signal.SIGCONT)
        eventually(lambda: "its next owner continues" in slow.stderr, "it is told")
        assert "(its claim was lost)" in slow.stderr
        assert slow.end(signal.SIGTERM) == 0, slow.stderr
    assert position(cli, group)[0] == [2]


# --- profiles


def test_a_profile_sets_the_cluster_and_the_topic(cli, tmp_path):
    path = tmp_path / "profiles.toml"
    path.write_text(
        f'[profiles.here]\nbootstrap-server = "{cli.domain.servers}"\n'
        f'coordination-topic = "{cli.domain.topic}"\noutput = "json"\n'
    )
    for name in ("MARSHAL_BOOTSTRAP_SERVER", "MARSHAL_COORDINATION_TOPIC"):
        del cli.env[name]
    cli.env["MARSHAL_CONFIG"] = str(path)
    found = json.loads(cli.run("--profile", "here", "topic", "info").stdout)
    assert found["topic"] == cli.domain.topic
    assert cli.run("topic", "info", "--profile", "her", code=2).stdout == ""
