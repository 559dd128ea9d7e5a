"""Planners that are forked: queries start, end and restart as with Spark's own."""

import os
import re
from pathlib import Path

import pytest
from domain import opened
from sparkkit import keeping
from waiting import eventually

from kafka_marshal.spark.launcher import PLANNER

H_MS = 2_000
RECORDS = 20


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain


def processes():
    """Return all processes as id, parent and command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        found.append((int(path.name), int(parent), command))
    return found


def drivers():
    """Return the drivers of this process."""
    return {pid for pid, parent, _ in processes() if parent == os.getpid()}


def servers():
    """Return the servers of these drivers; forks of them have the same command."""
    named = re.compile(r"spark\.forkserver .* \d+ (\d+) $")
    found = [(pid, of, named.search(command)) for pid, of, command in processes()]
    mine = drivers()
    known = {pid: of for pid, of, match in found if match and int(match[1]) in mine}
    return {pid for pid, of in known.items() if of not in known}


def launchers():
    """Return the launchers of these drivers, each of which has a planner."""
    mine = drivers()
    return {
        pid for pid, of, command in processes() if of in mine and PLANNER in command
    }


def owners(domain, group):
    return {state.owner for state in domain.states(group).values()}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc here")
def test_planners_of_one_driver_are_forks_of_one_server(kit, domain, group):
    topic = domain.data_topic(2, records_each=RECORDS)
    frame = kit.stream(group, subscribe=topic)
    # Earlier sessions of this driver had folders, and so servers, of their own.
    earlier = servers()
    assert len(kit.drained(frame)) == 2 * RECORDS
    started = servers() - earlier
    assert len(started) == 1
    domain.produce(topic, 5)
    # A restart from the checkpoint reads only the later records.
    assert len(kit.drained(frame)) == 10
    assert servers() - earlier == started
    eventually(lambda: owners(domain, group) == {None}, "released claims")


def test_a_stopped_query_releases_what_it_holds(kit, domain, group):
    topic = domain.data_topic(2, records_each=RECORDS)
    found = []
    query = kit.started(kit.stream(group, subscribe=topic), keeping(found))
    eventually(lambda: len(found) == 2 * RECORDS, "all rows")
    assert launchers()
    query.stop()
    eventually(lambda: owners(domain, group) == {None}, "released claims")
    eventually(lambda: not launchers(), "the end of the planner")


def test_an_option_that_planners_refuse_ends_the_query_with_its_message(kit, group):
    query = kit.started(kit.stream(group, subscribe="nowhere"), keeping([]))
    eventually(lambda: not query.isActive, "the end of the query")
    assert "does not exist" in str(query.exception())
