"""The audit as a stream: killed, restarted, repeated, and equal to one of the log."""

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from clikit import MARSHAL
from domain import opened
from drivers import BUSY
from sparkkit import RUN_S, environment
from typer.testing import CliRunner
from waiting import eventually as soon

from kafka_marshal import ConfigurationError, CoordinationError, World
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.spark.audit import (
    Audit,
    Source,
    audit,
    await_end,
    follow,
    schema,
)
from kafka_marshal.spark.audit.store import Store
from kafka_marshal_cli.assembly import app

pytestmark = pytest.mark.slow

K = 3
H_MS = 2_000
# A session of its own takes long to start on a busy machine.
START_MS = 150_000
TRIES_MAX = 20


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS, partitions=K, transport="fast") as domain:
        yield domain


def source_of(domain):
    return Source(
        bootstrap_servers=domain.servers,
        coordination_topic=domain.topic,
        transport="fast",
    )


@pytest.fixture
def act(domain):
    """Have clients come and go: claims, positions, releases, members."""
    topic = domain.data_topic(4, records_each=20)
    group = domain.unique("seen")

    def run(name):
        with domain.marshal(group, name) as marshal:
            consumer = marshal.consumer(topic)
            domain.produce(topic, 2)
            soon(lambda: consumer.poll(100, 20), "records")
            consumer.commit()

    return run


def contents(found, name):
    rows = [tuple(row.asDict().items()) for row in found.tables[name].collect()]
    return Counter(rows)


def judge(domain, found, whole):
    """Check that a stream wrote the rows of one run over the whole log."""
    for table in schema.TABLES:
        assert contents(found, table.name) == contents(whole, table.name), table.name
    live = World.open(domain.servers, coordination_topic=domain.topic)
    assert [row["digest"] for row in found.partitions()] == [
        digest(world) for world in live.partitions
    ]
    assert found.check() == []


def drained(spark, out, source):
    """Follow to the present end of the log; return the number of runs."""
    for _ in range(TRIES_MAX):
        query = follow(spark, out, source=source, available_now=True)
        try:
            assert await_end(query, START_MS / 1000), "the stream did not end"
            return len(Audit(spark, out).runs)
        except CoordinationError as error:
            # It has not begun: the machine was too busy to start it in time.
            if BUSY not in str(error):
                raise
        finally:
            query.stop()
    raise AssertionError("Spark never started its Python worker in time")


def test_a_killed_stream_continues_and_writes_the_rows_of_one_run(
    domain, spark, act, tmp_path
):
    source, out = source_of(domain), tmp_path / "tables"
    command = [
        *(MARSHAL, "spark", "audit", "--follow", "--every", "300ms"),
        *("-b", domain.servers, "--coordination-topic", domain.topic),
        *("--out", str(out), "--master", "local[1]"),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    acted = []

    def is_under_way():
        """Cause one run after another; return whether a later one is in progress."""
        assert process.poll() is None, (tmp_path / "log").read_text()
        if len(list((out / "runs").glob("*"))) >= len(acted):
            acted.append(act(f"client-{len(acted)}"))
        return len(acted) > 1 and list(out.glob("_staging-*/folded"))

    try:
        soon(is_under_way, "a run is under way", START_MS)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(RUN_S)
    before = len(list((out / "runs").glob("*")))
    act("after-the-kill")
    # In this process now, until it is stopped.
    seen = []
    query = follow(spark, str(out), source=source, every_ms=100, on_run=seen.append)
    try:
        soon(lambda: seen, "a run is published", START_MS)
        assert not await_end(query, 0.1)
    finally:
        query.stop()
    assert seen[0].number == before + 1
    act("at-last")
    done = CliRunner().invoke(
        app,
        [
            *("spark", "audit", "--follow", "--available-now", "--check"),
            *("-b", domain.servers, "--coordination-topic", domain.topic),
            *("--out", str(out), "-o", "json"),
        ],
    )
    assert done.exit_code == 0, done.output
    output = json.loads(done.stdout)
    found = Audit(spark, str(out))
    assert output["runs_count"] == len(found.runs) > before + 1
    judge(domain, found, audit(spark, str(tmp_path / "whole"), source=source))
    assert not [p for p in out.iterdir() if p.name.startswith("_staging-")]


def test_a_batch_that_spark_repeats_is_one_run(domain, spark, act, tmp_path):
    """Whether it died before its run was published, or right after."""
    source = source_of(domain)
    out = str(tmp_path / "tables")
    act("first")
    publish = Store.publish

    def dies_before(*_, **__):
        raise RuntimeError("power is gone before")

    def dies_after(*given, **rest):
        publish(*given, **rest)
        raise RuntimeError("power is gone after")

    for dies, expected, runs in (
        (dies_before, "gone before", 1),
        (dies_after, "gone after", 2),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "publish", dies)
            with pytest.raises(Exception, match=expected):
                drained(spark, out, source)
        assert drained(spark, out, source) == runs
        act("next")
    # A run by hand in between, and a deleted checkpoint.
    audit(spark, out, source=source, incremental=True)
    assert drained(spark, out, source) == 3
    act("last")
    assert drained(spark, out, source) == 4
    Store(spark, out).drop(f"{out}/_checkpoint")
    assert drained(spark, out, source) == 4
    judge(domain, Audit(spark, out), audit(spark, f"{out}-whole", source=source))


def test_a_stream_refuses_another_log_and_other_settings(
    broker, domain, spark, unique, tmp_path
):
    source, out = source_of(domain), str(tmp_path / "tables")
    audit(spark, out, source=source)
    with opened(broker, unique, h_ms=H_MS, partitions=1) as other:
        elsewhere = Source(
            bootstrap_servers=other.servers, coordination_topic=other.topic
        )
        with pytest.raises(ConfigurationError, match="into another directory"):
            follow(spark, out, source=elsewhere)
    with pytest.raises(ConfigurationError, match="with the same samples"):
        follow(spark, out, source=source, sample_ms=7)
    with pytest.raises(ConfigurationError, match="at least 1"):
        follow(spark, out, source=source, every_ms=0)
    (Path(out) / "mine.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"it holds mine\.txt"):
        follow(spark, out, source=source)
