"""`marshal spark audit`: options and output, with a fake job."""

import json
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from kafka_marshal import ConfigurationError, LogTruncated
from kafka_marshal.spark import requirements
from kafka_marshal.spark.audit import (
    INVARIANTS,
    Bounds,
    Finding,
    following,
    job,
    plots,
    report,
)
from kafka_marshal.spark.audit.store import Run
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands import spark as command

NOW_MS = 1_800_000_000_000
BROKEN = Finding(INVARIANTS[0], 3, ({"client_id": "c1\x1b", "start_offset": 5},))


class FakeAudit:
    out = "file:/tables"
    runs = (1,)
    first_offset = 0
    facts = {"as_of": {"time_ms": NOW_MS, "offsets": {"0": 9}}}  # noqa: RUF012

    def __init__(self):
        self.findings = []
        self.asked = {}

    def partitions(self):
        row = {"coordinating_partition": 0, "entries_count": 9, "next_offset": 9}
        row |= {"keys_count": 1, "owned_count": 1, "halted_level": None}
        row |= {"first_offset": self.first_offset}
        return [row | {"digest": "ab" * 16}]

    def takeovers(self):
        row = {"ending": "taken_over", "handoffs_count": 2, "p50_ms": 2_000.5}
        return [row | {"p99_ms": 3_000.0, "max_ms": 3_000, "late_ms_max": None}]

    def counts(self):
        return {"intervals": 4, "grants": 0}

    def check(self, *, tolerance_ms):
        self.asked["tolerance_ms"] = tolerance_ms
        return self.findings


@pytest.fixture
def fake(monkeypatch):
    made = FakeAudit()

    @contextmanager
    def opened(master):
        made.asked["master"] = master
        yield "a session"

    def run(spark, out, **options):
        made.asked |= {"spark": spark, "out": out, **options}
        return made

    monkeypatch.setattr(requirements, "spark_session", opened)
    monkeypatch.setattr(job, "audit", run)
    monkeypatch.setattr(command, "wall_ms", lambda: NOW_MS)
    return made


def invoke(*words):
    return CliRunner().invoke(app, ["spark", "audit", "--out", "tables", *words])


def test_all_options_reach_the_job(fake):
    done = invoke(
        *("-b", "b:1", "--coordination-topic", "m", "--transport", "fast"),
        *("--timeout", "7s", "--master", "local[3]", "--sample", "5s"),
        *("--from", "12", "--to=-1h", "-o", "json"),
    )
    assert done.exit_code == 0, done.output
    asked = fake.asked
    assert (asked["master"], asked["out"], asked["spark"]) == (
        "local[3]",
        "tables",
        "a session",
    )
    assert asked["bounds"] == Bounds(from_offset=12, to_ms=NOW_MS - 3_600_000)
    assert (asked["sample_ms"], asked["incremental"]) == (5_000, False)
    source = asked["source"]
    assert (source.addresses, source.coordination_topic) == ("b:1", "m")
    assert (source.transport, source.timeout_ms) == ("fast", 7_000)
    found = json.loads(done.stdout)
    assert found["as_of"] == fake.facts["as_of"]
    assert (found["intervals_count"], found["out"]) == (4, "file:/tables")
    assert found["partitions"][0]["digest"] == "ab" * 16
    assert "is_sound" not in found
    assert "tolerance_ms" not in asked, "nothing is checked that was not asked for"


def test_a_fold_after_the_log_start_is_reported(fake):
    fake.first_offset = 7
    done = invoke()
    assert done.exit_code == 0, done.output
    assert "partition 0 is covered from offset 7 on" in done.stderr


def test_text_output_has_tables(fake):
    done = invoke("--check", "--incremental", "--tolerance", "2s")
    assert done.exit_code == 0, done.output
    assert "is sound:" in done.stdout
    assert "ab" * 16 in done.stdout
    assert "taken_over" in done.stdout
    assert (fake.asked["incremental"], fake.asked["tolerance_ms"]) == (True, 2_000)


def test_a_violated_invariant_exits_with_code_70_and_its_rows(fake):
    fake.findings = [BROKEN]
    done = invoke("--check")
    assert done.exit_code == 70
    assert "client_id=c1\\x1b, start_offset=5" in done.stdout
    assert "overlap" in done.stderr
    assert invoke("--check", "-o", "json").exit_code == 70


class FakeQuery:
    """A query that ends during the third wait."""

    def __init__(self):
        self.looks = 0
        self.is_stopped = False

    def awaitTermination(self, timeout_s):  # noqa: N802 - Spark's name
        self.looks += 1
        return self.looks > 2

    def stop(self):
        self.is_stopped = True


@pytest.mark.parametrize(
    ("words", "every_ms", "available_now"),
    [([], 60_000, False), (["--every", "5s", "--available-now"], 5_000, True)],
)
def test_follow_reports_each_run_and_then_the_audit(
    fake, monkeypatch, words, every_ms, available_now
):
    query = FakeQuery()

    def follow(spark, out, *, on_run, **options):
        fake.asked |= {"spark": spark, "out": out, **options}
        on_run(Run(3, "path", {"as_of": {"offsets": {"0": 9, "1": 4}}}))
        return query

    monkeypatch.setattr(following, "follow", follow)
    monkeypatch.setattr(job, "Audit", lambda spark, out: fake)
    done = invoke("-f", "--check", "--tolerance", "2s", *words)
    assert done.exit_code == 0, done.output
    assert "run 3: 13 offsets of the log are folded" in done.stderr
    assert (fake.asked["every_ms"], fake.asked["available_now"]) == (
        every_ms,
        available_now,
    )
    assert fake.asked["tolerance_ms"] == 2_000
    assert "ab" * 16 in done.stdout
    assert (query.looks, query.is_stopped) == (3, True)


@pytest.mark.parametrize("with_lag", [True, False])
def test_a_report_is_written_and_its_path_is_printed(
    fake, monkeypatch, tmp_path, with_lag
):
    written = {}
    monkeypatch.setattr(report, "data_ends", lambda *_: {"t": 5})
    monkeypatch.setattr(
        report, "write_report", lambda audit, path, **more: written.update(more)
    )
    page = tmp_path / "page.html"
    done = invoke("--report", str(page), *(["--with-lag"] if with_lag else []))
    assert done.exit_code == 0, done.output
    assert str(page) in done.stderr
    assert written == {"findings": [], "ends": {"t": 5} if with_lag else None}


def test_a_report_that_cannot_be_written_is_an_error(fake, monkeypatch):
    def refuse(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr(report, "write_report", refuse)
    done = invoke("--report", "page.html")
    assert (done.exit_code, "read-only" in done.stderr) == (2, True)


def test_an_unwritable_report_is_refused_before_the_job_runs(
    fake, monkeypatch, tmp_path
):
    monkeypatch.setattr(command.os, "access", lambda *_: False)
    done = invoke("--report", str(tmp_path / "page.html"))
    assert (done.exit_code, "may not write there" in done.stderr) == (2, True)
    assert fake.asked == {}


def test_missing_report_packages_are_refused_before_the_job_runs(fake, monkeypatch):
    def missing():
        raise ConfigurationError("a report needs jinja2; run: pip install it")

    monkeypatch.setattr(plots, "require_report", missing)
    done = invoke("--report", "page.html")
    assert done.exit_code == 2
    assert fake.asked == {}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(["--with-lag"], 2, id="lag-without-report"),
        pytest.param(["--tolerance", "5s"], 2, id="tolerance-of-nothing"),
        pytest.param(["--incremental", "--to", "5"], 2, id="incremental-to-an-end"),
        pytest.param(["--report", "/nowhere/page.html"], 2, id="no-directory"),
        pytest.param(["--report", "/"], 2, id="a-directory"),
        pytest.param(["--from", "soon"], 2, id="no-moment"),
        pytest.param(["--from", "18", "--to", "15"], 2, id="ends-before-its-start"),
        pytest.param(["--sample", "x"], 2, id="no-duration"),
        pytest.param(["--every", "5s"], 2, id="every-without-follow"),
        pytest.param(["--available-now"], 2, id="all-there-is-without-follow"),
        pytest.param(["-f", "--from", "5"], 2, id="follow-a-range"),
        pytest.param(["-f", "--to", "5"], 2, id="follow-to-an-end"),
        pytest.param(["-f", "--incremental"], 2, id="follow-twice"),
        pytest.param(["-f", "--every", "x"], 2, id="every-no-duration"),
    ],
)
def test_wrong_usage_is_refused_before_the_job_runs(fake, words, code):
    done = invoke(*words)
    assert done.exit_code == code, done.output
    assert fake.asked == {}


def test_an_error_of_the_job_has_its_exit_code(fake, monkeypatch):
    def fails(*_, **__):
        raise LogTruncated("partition 3 went back")

    monkeypatch.setattr(job, "audit", fails)
    done = invoke()
    assert (done.exit_code, "partition 3 went back" in done.stderr) == (1, True)
