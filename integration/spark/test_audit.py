"""The audit on a real log: its tables, its digests, its runs, what it finds."""

import json
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from domain import opened
from logkit import batch, beat, claim, hashed, ident, member, messages, pause, release
from typer.testing import CliRunner
from waiting import eventually, wall_ms

from kafka_marshal import ConfigurationError, Key, LogTruncated, World
from kafka_marshal.clock import SystemClock
from kafka_marshal.engine.follower import Follower
from kafka_marshal.history.historian import Historian
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.protocol.hashing import (
    CHECKPOINT_GROUP,
    CHECKPOINT_TOPIC,
    home_partition,
    key_partition,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState, why_to_tags
from kafka_marshal.spark.audit import (
    INVARIANTS,
    Audit,
    Bounds,
    Source,
    audit,
    check,
    data_ends,
    job,
)
from kafka_marshal.spark.audit import schema as tables_of
from kafka_marshal.spark.audit.rows import staged
from kafka_marshal.spark.audit.store import Store
from kafka_marshal.views.log_scan import LogScan
from kafka_marshal_cli.assembly import app

# Several audits are made before the first test.
pytestmark = pytest.mark.slow

K = 3
# For half of it only a named successor may claim: long enough for a busy machine.
H_MS = 2_000
ROOT = Path(__file__).resolve().parent.parent.parent
HOSTILE = "<script>alert('\x1b[31m')</script>"


class Story:
    """Writes to a real log by hand, and knows the verdicts."""

    def __init__(self, domain, topic):
        self.domain = domain
        self.topic = topic
        settings = ConnectionConfig(
            domain.servers, coordination_topic=domain.topic, transport="fast"
        )
        self.log = open_coordination_log(settings)
        self.follower = Follower(self.log, SystemClock())
        self.epochs = {}

    def key(self, number, group="g"):
        return Key(group, self.topic, number)

    def append(self, *records):
        """Append records at once; return the transition of each."""
        waiting = [self.follower.append(self.place(each), each) for each in records]
        self.follower.await_all(waiting, 20_000)
        return [each.transition for each in waiting]

    def place(self, record):
        if hasattr(record, "topic"):
            name, partition = record.topic, record.partition
            return key_partition(name, partition, partition_count=K)
        if hasattr(record, "beats"):
            return self.follower_of(record.beats[0][0])
        return home_partition(record.group_id, partition_count=K)

    def follower_of(self, epoch):
        return next(w.partition for w in self.follower.worlds if epoch in w.epochs)

    def claimed(self, client, number, *, group="g", **more):
        record = claim(client, key=self.key(number, group), **more)
        record = msgspec.structs.replace(record, tags=why_to_tags(HOSTILE))
        (transition,) = self.append(record)
        assert transition.outcome == "accepted", runs
        return transition.epoch

    def pause(self, until_ms, seq):
        record = msgspec.structs.replace(pause(until_ms, seq=seq), reason=HOSTILE)
        worlds = range(K)
        self.follower.await_all(
            [self.follower.append(t, record) for t in worlds], 20_000
        )

    def first_half(self):
        """Append claims, progress, grants, refused claims and undecodable bytes."""
        c1 = [self.claimed("c1", n) for n in range(4)]
        amo = self.claimed("a1", 0, group="amo", resume_hash=hashed(ident("s")))
        self.append(*[beat(e, 5, key=self.key(n)) for n, e in enumerate(c1)])
        key = self.key(0, "amo")
        self.append(messages(amo, 0, 9, client="a1", key=key))
        self.append(
            beat(c1[0], 20, key=self.key(0)),
            claim("c2", key=self.key(0)),
            beat(c1[1], 20, key=self.key(1)),
            claim("c2", key=self.key(1), generation=9),
            beat(c1[1] + 10_000, key=self.key(1)),
        )
        self.append(member("c2", seq=3), member("c2", seq=2))
        append = self.log.append(1, b"\xff" * 80)
        eventually(append.is_done, "an append")
        self.epochs = {"c1": c1, "amo": amo}

    def checkpoints(self):
        """Let two members claim and release the reserved key for checkpoints."""
        duty = Key(CHECKPOINT_GROUP, CHECKPOINT_TOPIC, 0)
        for client in ("d1", "d2"):
            (won,) = self.append(claim(client, key=duty))
            self.append(release(won.epoch, client=client, key=duty))

    def second_half(self):
        """End what the first half left open: by releases, a takeover and pauses."""
        self.checkpoints()
        c1, amo = self.epochs["c1"], self.epochs["amo"]
        (transition,) = self.append(beat(c1[2], 30, key=self.key(2)))
        leaving = release(c1[2], 31, key=self.key(2), successor="c3")
        leaving = msgspec.structs.replace(leaving, reason=HOSTILE)
        self.append(leaving, claim("c2", key=self.key(2)), claim("c3", key=self.key(2)))

        def takes_over():
            again = claim("c2", key=self.key(0), inc=ident("c2 again"))
            _, transition = self.append(beat(c1[3], 40, key=self.key(3)), again)
            return transition.outcome == "accepted"

        self.append(beat(c1[0], 25, key=self.key(0)))
        eventually(takes_over, "c2 takes over")
        (transition,) = self.append(beat(c1[3], 2, key=self.key(3), rewind=True))
        assert transition.effect == "renewed"
        self.append(batch((c1[3], 6)))
        key = self.key(0, "amo")
        self.append(
            beat(amo, client="a1", key=key),
            messages(amo, 0, 19, client="a1", key=key),
            messages(amo, 0, 3, client="a1", key=key),
            member("c2", seq=2),
            member("c2", seq=4),
        )
        until_ms = wall_ms() + 60_000
        self.pause(until_ms, 1)
        self.append(beat(c1[3], 8, key=self.key(3)))
        self.pause(until_ms + 1_000, 2)
        self.pause(0, 3)


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS, partitions=K, transport="fast") as domain:
        yield domain


@pytest.fixture(scope="module")
def runs(domain, spark, tmp_path_factory):
    """The whole story, with the audits that were made on the way."""
    home = tmp_path_factory.mktemp("audits")
    story = Story(domain, domain.data_topic(4, records_each=50))
    slow = Source(
        bootstrap_servers=domain.servers,
        coordination_topic=domain.topic,
        transport="kafka-python",
    )
    story.first_half()
    middle_ms = wall_ms()
    parted = str(home / "parted [1], *")  # for Spark a pattern, unless escaped
    audit(spark, parted, source=slow, incremental=True)
    eventually(lambda: wall_ms() > middle_ms, "the clock goes on")
    story.second_half()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "publish", _dies)
        with pytest.raises(RuntimeError, match="power is gone"):
            audit(spark, parted, source=slow, incremental=True)
    pieces = audit(spark, parted, source=slow, incremental=True)
    source = Source(
        bootstrap_servers=domain.servers,
        coordination_topic=domain.topic,
        transport="fast",
    )
    counted = documented()["run"](
        spark, str(home / "whole"), servers=domain.servers, topic=domain.topic
    )
    whole = Audit(spark, str(home / "whole"))
    story.log.close(1_000)
    return {
        "whole": whole,
        "parted": pieces,
        "middle_ms": middle_ms,
        "source": source,
        "counted": counted.collect(),
    }


def documented():
    """Return what the block of Python in the document defines."""
    text = (ROOT / "docs" / "AUDIT.md").read_text()
    _, _, code = text.partition("<!-- run: audit_python -->\n```python\n")
    scope = {}
    exec(compile(code.partition("\n```")[0], "AUDIT.md", "exec"), scope)
    return scope


def _dies(*_, **__):
    raise RuntimeError("power is gone")


def contents(audit, name):
    """Return a table's rows, whatever their order."""
    rows = [tuple(row.asDict().items()) for row in audit.tables[name].collect()]
    return Counter(rows)


def by_hand(domain):
    """Return the rows that the same history gives without Spark."""
    found = {table.name: Counter() for table in tables_of.TABLES}

    def note(row):
        values = tuple((name, row.values.get(name)) for name in row.table.names)
        found[row.table.name][values] += 1

    worlds = {t: WorldState(t) for t in range(K)}
    historians = {t: Historian() for t in range(K)}
    with LogScan(domain.servers, coordination_topic=domain.topic) as scan:
        for t, entry in scan:
            transitions = apply(worlds[t], entry)
            for row in historians[t].take(worlds[t], entry, transitions=transitions):
                note(staged(t, row))
    for t, historian in historians.items():
        for row in historian.open_rows():
            note(staged(t, row))
    return found, {t: digest(world) for t, world in worlds.items()}


# --- tables


def test_the_end_state_of_an_audit_equals_the_live_state(domain, runs):
    live = World.open(domain.servers, coordination_topic=domain.topic)
    found = runs["whole"].partitions()
    assert [row["digest"] for row in found] == [digest(w) for w in live.partitions]
    assert [row["next_offset"] for row in found] == [
        w.next_offset for w in live.partitions
    ]
    assert [row["owned_count"] for row in found] == [
        sum(known.owner is not None for known in w.keys.values())
        for w in live.partitions
    ]


def test_the_tables_equal_the_rows_of_the_fold(domain, runs):
    expected, digests = by_hand(domain)
    whole = runs["whole"]
    for table in tables_of.TABLES:
        if not table.is_final:
            assert contents(whole, table.name) == expected[table.name], table.name
            # No key moves here: see test_audit_moves.
            has_rows = table is tables_of.IMPORTS or expected[table.name]
            assert has_rows, f"the story has no {table.name}"
    assert digests == {
        row["coordinating_partition"]: row["digest"] for row in whole.partitions()
    }


def test_incremental_runs_write_the_rows_of_a_single_run(runs):
    """They use the other client library, and a run between them died."""
    assert [run.number for run in runs["parted"].runs] == [1, 2]
    for table in tables_of.TABLES:
        parted, whole = (contents(runs[name], table.name) for name in run_names())
        assert parted == whole, table.name


def run_names():
    return ("parted", "whole")


def test_one_task_folds_one_partition(spark, runs):
    log = job.LogEnds("cluster", None, dict.fromkeys(range(5), 7))
    plan = job._plan(spark, log, state=None)
    sizes = plan.rdd.glom().map(len).collect()
    assert sizes == [1] * 5
    store = Store(spark.newSession(), runs["parted"].out)
    on = job._plan(store.session, log, state=store.state(runs["parted"].runs[-1]))
    assert on.rdd.glom().map(len).collect() == [1] * 5
    rows = {row["coordinating_partition"]: row for row in on.collect()}
    assert [rows[t]["is_new"] for t in range(5)] == [False] * K + [True] * (5 - K)


def test_the_documented_example_counts_claims(runs):
    counts = {row["client_id"]: row["claims"] for row in runs["counted"]}
    assert counts == {"c1": 4, "a1": 1, "c2": 1, "c3": 1, "d1": 1, "d2": 1}


# --- invariants


def test_a_table_describes_its_columns(runs):
    for table in tables_of.TABLES:
        described = runs["whole"].spark.sql(f"DESCRIBE {table.name}").collect()
        assert [tables_of.Column(*row) for row in described] == list(table.columns)


def test_an_audit_of_a_correct_log_finds_no_broken_invariant(runs):
    assert runs["whole"].check() == []
    assert runs["parted"].check() == []


def seeded(runs):
    """Return the tables with one corruption for each invariant, on a topic of its own.

    The rows are those of real claims, changed in what breaks the rule and nothing else.
    """
    whole = Audit(runs["whole"].spark, runs["whole"].out)  # with views of its own
    spark, tables = whole.spark, whole.tables
    intervals = tables["intervals"].collect()
    (grant, *_) = tables["grants"].where("outcome = 'granted'").collect()
    (handoff, *_) = tables["handoffs"].where("ending = 'taken_over'").collect()
    sound = next(row for row in intervals if row["ending"] == "taken_over").asDict()
    end = sound["end_offset"]

    def later(topic, **change):
        moved = {"epoch": end, "start_offset": end, "end_offset": end + 5}
        return sound | {"topic": topic} | moved | change

    def before(topic, **change):
        return sound | {"topic": topic} | change

    state = next(row for row in tables["partitions"].collect()).asDict()
    bad = {
        "intervals": [
            before("overlap"),
            later("overlap", start_offset=end - 1, epoch=end - 1),
            before("tokens_grow"),
            later("tokens_grow", epoch=sound["epoch"]),
            before("stale_token", stray_count=1),
            before("positions_grow", position=9),
            later("positions_grow", start_position=8),
            # What a Reset took back breaks nothing.
            before("imports_agree", position=9),
            before("reset", position=9),
            later("reset", start_position=8, resets_count=1),
        ],
        "handoffs": [
            handoff.asDict()
            | {"topic": "taken_over_when_stale", "gap_ms": 2 * H_MS, "late_ms": None},
            handoff.asDict() | {"topic": "gap_bound", "late_ms": H_MS + 1},
        ],
        "grants": [
            grant.asDict() | {"topic": "grants_disjoint"},
            grant.asDict()
            | {"topic": "grants_disjoint", "offset": grant["offset"] + 1}
            | {"first_offset": grant["last_offset"], "last_offset": 1_000},
            grant.asDict()
            | {"topic": "grants_disjoint", "offset": grant["offset"] + 2}
            | {"resets_count": 1},
        ],
        "imports": [
            {name: sound[name] for name in ("group_id", "partition")}
            | {"coordinating_partition": 98, "topic": "imports_agree", "offset": 1}
            | {"source": sound["coordinating_partition"], "position": 8}
            | {"era": sound["token_era"] + 1, "append_ms": sound["end_append_ms"]}
        ],
        "partitions": [
            state | {"coordinating_partition": 99, "owned_count": 1},
        ],
    }
    # The grants of the seeded topic need a claim that is in force.
    places = ("coordinating_partition", "topic", "partition", "epoch")
    claim = next(
        row for row in intervals if all(row[name] == grant[name] for name in places)
    )
    bad["intervals"].append(claim.asDict() | {"topic": "grants_disjoint"})
    for name, rows in bad.items():
        table = next(t for t in tables_of.TABLES if t.name == name)
        values = [tuple(row.get(each) for each in table.names) for row in rows]
        tables[name] = tables[name].union(spark.createDataFrame(values, table.ddl))
    return tables


def test_each_broken_invariant_is_found_in_seeded_tables(runs):
    findings = check(seeded(runs))
    assert {f.invariant.name for f in findings} == {i.name for i in INVARIANTS}
    for finding in findings:
        name = finding.invariant.name
        if name == "end_state":
            # Open claims that were seeded count as well.
            assert 99 in {row["coordinating_partition"] for row in finding.rows}
        else:
            assert {row["topic"] for row in finding.rows} == {name}
            assert finding.count == 1, finding


# --- ranges, and the command


def invoke(*words):
    return CliRunner().invoke(app, ["spark", "audit", *words])


def test_the_command_reports_the_end_state_of_a_range(domain, runs, tmp_path):
    """The end state is that of the log at the end of the range."""
    done = invoke(
        *("-b", domain.servers, "--coordination-topic", domain.topic),
        *("--out", str(tmp_path / "out"), "--to", _iso(runs["middle_ms"])),
        *("-o", "json"),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    then = World.at(
        domain.servers, time_ms=runs["middle_ms"], coordination_topic=domain.topic
    )
    digests = [row["digest"] for row in found["partitions"]]
    assert digests == [digest(world) for world in then.partitions]
    assert found["handoffs_count"] == 0
    assert found["intervals_count"] == 5
    assert "is_sound" not in found


def _iso(at_ms):
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


def test_takeover_times_omit_reserved_keys(runs):
    """Reserved keys have gaps of minutes by design."""
    handoffs = [row["topic"] for row in runs["whole"].tables["handoffs"].collect()]
    counted = sum(row["handoffs_count"] for row in runs["whole"].takeovers())
    assert CHECKPOINT_TOPIC in handoffs
    assert counted == len(handoffs) - handoffs.count(CHECKPOINT_TOPIC)


def test_rows_that_ended_before_a_range_are_omitted(domain, spark, runs, tmp_path):
    bounds = Bounds(from_ms=runs["middle_ms"])
    late = audit(spark, str(tmp_path / "late"), source=runs["source"], bounds=bounds)
    assert late.counts()["claims"] < runs["whole"].counts()["claims"]
    assert late.counts()["handoffs"] == runs["whole"].counts()["handoffs"]
    assert [r["digest"] for r in late.partitions()] == [
        r["digest"] for r in runs["whole"].partitions()
    ]


def test_broken_invariants_end_the_command_with_70(domain, runs, monkeypatch, tmp_path):
    """The page reports them, and escapes all that it shows."""
    page, whole = tmp_path / "page.html", runs["whole"]
    findings = check(seeded(runs))
    monkeypatch.setattr(Audit, "check", lambda *_, **__: findings)
    monkeypatch.setattr(job, "audit", lambda *_, **__: whole)
    done = invoke(
        *("-b", domain.servers, "--out", "unused", "--check"),
        *("--report", str(page), "--with-lag"),
    )
    assert done.exit_code == 70, done.output
    assert "grants_disjoint" in done.stdout
    assert "invariants are broken" in done.stderr
    assert set(data_ends(whole, runs["source"]).values()) == {50}
    text = page.read_text()
    assert "9 of 9 are broken" in text
    assert "Lag over time" in text
    assert text.count("<svg") == 4
    assert all(row["digest"] in text for row in whole.partitions())
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert "\x1b" not in text
    assert re.findall(r'(?:src|href)="(?!#)', text) == []


# --- refused audits


def test_an_existing_audit_or_file_is_not_overwritten(domain, spark, runs, tmp_path):
    with pytest.raises(ConfigurationError, match="has an audit already"):
        audit(spark, runs["whole"].out, source=runs["source"])
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"it holds mine\.txt"):
        audit(spark, str(tmp_path), source=runs["source"])
    with pytest.raises(ConfigurationError, match="is no directory"):
        audit(spark, str(tmp_path / "mine.txt"), source=runs["source"])
    with pytest.raises(ConfigurationError, match="has no audit"):
        Audit(spark, str(tmp_path / "nothing"))
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_colon_in_the_name_of_a_directory_is_no_scheme(spark):
    store = Store(spark, "audit-12:30")
    assert store.out.endswith("/audit-12:30")
    assert store.runs() == []


def test_an_incremental_audit_refuses_another_log_and_a_range(
    broker, spark, runs, unique
):
    out, go_on = runs["parted"].out, {"incremental": True}
    with opened(broker, unique, h_ms=H_MS, partitions=1) as other:
        source = Source(bootstrap_servers=other.servers, coordination_topic=other.topic)
        with pytest.raises(ConfigurationError, match="into another directory"):
            audit(spark, out, source=source, **go_on)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        audit(spark, "x", source=runs["source"], bounds=Bounds(to_ms=5), **go_on)


def test_an_error_in_a_task_is_raised_with_its_own_message(
    spark, runs, monkeypatch, tmp_path
):
    real = job.log_ends(runs["source"])
    beyond = {0: real.ends[0] + 1_000}
    monkeypatch.setattr(job, "log_ends", lambda _: job.LogEnds("c", None, beyond))
    with pytest.raises(LogTruncated, match="ends before offset"):
        audit(spark, str(tmp_path / "out"), source=runs["source"])
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--follow", "--available-now")])
def test_a_topic_with_another_use_is_refused(domain, spark, tmp_path, options):
    """Its records are not of the protocol, and are not folded."""
    topic = domain.data_topic(2, records_each=50)
    words = ("-b", domain.servers, "--coordination-topic", topic, *options)
    done = invoke(*words, "--out", str(tmp_path / "out"))
    assert done.exit_code == 3, done.output
    assert "this is not a coordination topic" in done.stderr
    assert "check the name" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_unreachable_broker_ends_the_command_with_5(spark, tmp_path):
    words = ("-b", "localhost:1", "--timeout", "1s", "--out", str(tmp_path / "out"))
    done = invoke(*words)
    assert done.exit_code == 5, done.output
    assert not (tmp_path / "out").exists()


def test_refused_records_are_reported_with_their_reasons(runs):
    found = {row["reason"] for row in runs["whole"].tables["refused"].collect()}
    assert found >= {"held", "wrong_generation", "old_epoch", "undecodable", "old_seq"}
