"""`marshal doctor`: its checks, their results and advice."""

import json
from types import SimpleNamespace

import attrs
import pytest
from logkit import Log, member
from opening import Opened
from typer.testing import CliRunner

from kafka_marshal import CoordinationError, World, deadline, native
from kafka_marshal.admin.formatting import TopicReport
from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.kafka_io import record_batches, throttling, tls_files
from kafka_marshal.kafka_io.topic_rules import (
    REPLICATION,
    ClusterInfo,
    Problem,
    TopicDescription,
)
from kafka_marshal.kafka_io.transport import Choice
from kafka_marshal.protocol.types import Key
from kafka_marshal.testing import java
from kafka_marshal.views.log_scan import Arrival
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.checks import ClockReading
from kafka_marshal_cli.commands import doctor
from kafka_marshal_cli.shared import Call


class Cluster(Opened):
    """A cluster with the answers that a test sets."""

    transport = Choice("fast", "why not")

    def __init__(self):
        self.report = self.reported()
        self.error = None
        self.starts = {0: 0}
        self.log_start_missing = ()
        self.risks = {}
        self.hidden = ()
        self.questions = 0
        self.waits_ms = []
        self.arrival = None
        self.log = Log(cluster_id="cluster")
        self.read_at_ms = self.log.now_ms + 1_500

    @staticmethod
    def reported(*problems, exists=True, note=None):
        info = ClusterInfo("cluster", 1, ())
        topic = TopicDescription(
            name="__marshal",
            exists=exists,
            partition_count=1,
            replication=1,
            in_sync=1,
            leaders={0: 7},
        )
        return TopicReport(
            cluster=info, topic=topic, found=tuple(map(Problem, problems)), note=note
        )

    def cluster(self):
        if self.error is not None:
            raise self.error
        return self.report.cluster

    def report_topic(self):
        if "__marshal" in self.hidden:
            raise LogUnreadable("DESCRIBE on topic __marshal is missing")
        return self.report

    def risk_of(self, topic):
        if topic.startswith("/"):  # like a broker: the name is invalid
            raise CoordinationError(f"{topic} is no valid topic name")
        if topic in self.hidden:
            raise LogUnreadable(f"DESCRIBE on topic {topic} is missing")
        return self.risks.get(topic)

    def next_append(self, timeout_ms):
        self.waits_ms.append(timeout_ms)
        return self.arrival

    def latest_ends(self):
        self.questions += 1
        return self.ends

    @property
    def ends(self):
        return {0: len(self.log.entries)}

    def world(self):
        return World(
            [self.log.state],
            {},
            cluster_id="cluster",
            read_at_ms=self.read_at_ms,
            log_start_missing=self.log_start_missing,
        )


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(Call, "admin", lambda self: cluster)
    monkeypatch.setattr(Call, "scan", lambda self: cluster)
    monkeypatch.setattr(Call, "world", lambda self, **_: cluster.world())
    return cluster


def examined(code=0, *given):
    outcome = CliRunner().invoke(app, ["doctor", "-o", "json", *given])
    assert outcome.exit_code == code, outcome.output
    checks = json.loads(outcome.stdout)["checks"]
    assert all(check["run"] for check in checks if check["result"] == "failed")
    return {check["check"]: check for check in checks}


def results(checks, *names):
    return [checks[name]["result"] for name in names]


def test_a_healthy_cluster_has_no_failed_check(cluster):
    checks = examined()
    assert {check["result"] for check in checks.values()} <= {"ok", "note"}
    assert checks["transport"]["found"] == "fast: why not"
    assert "1 record read to the end" in checks["log"]["found"]
    assert "1.5s old" in checks["clock"]["found"]


def test_a_missing_record_parser_is_a_note(cluster, monkeypatch):
    assert examined()["record parser"]["found"].startswith("aiokafka ")
    monkeypatch.setattr(record_batches, "compiled_parser", lambda: None)
    check = examined()["record parser"]
    assert check["result"] == "note"
    assert "parses records in Python" in check["found"]
    assert check["run"] == "pip install aiokafka cramjam"


def test_a_broker_older_than_kafka_3_1_fails(cluster):
    cluster.report = attrs.evolve(
        cluster.report, cluster=ClusterInfo("cluster", 1, (), has_fetch_by_id=False)
    )
    checks = examined(1)
    assert results(checks, "broker", "kafka", "topic") == ["ok", "failed", "ok"]
    assert "older than Kafka 3.1" in checks["kafka"]["found"]


def test_without_a_broker_the_later_checks_are_skipped(cluster):
    cluster.error = CoordinationError("nobody there")
    checks = examined(1)
    assert results(checks, "broker", "log", "format", "clock") == [
        *("failed", "skipped", "skipped", "skipped")
    ]


@pytest.mark.parametrize(
    ("error", "run"),
    [
        (LogUnreadable("a wrong password"), "correct the login, or grant the right"),
        (ConfigurationError("no such file"), "correct the option"),
    ],
)
def test_a_login_or_option_error_has_its_own_advice(cluster, error, run):
    cluster.error = error
    assert examined(1)["broker"]["run"] == run


def test_advice_connects_to_the_same_cluster(cluster):
    cluster.error = CoordinationError("nobody there")
    assert examined(1, "-b", "h:1")["broker"]["run"].endswith(
        "show the settings with: marshal -b h:1 config show --origin"
    )


def test_a_missing_right_on_the_topic_does_not_fail_the_broker(cluster):
    cluster.hidden = ("__marshal",)
    checks = examined(1)
    assert results(checks, "broker", "topic", "log") == ["ok", "failed", "skipped"]
    assert checks["topic"]["run"] == "correct the login, or grant the right"


@pytest.mark.parametrize(
    ("left_s", "result", "found"),
    [
        (-3_600, "failed", "/own.pem expired 1h ago: brokers refuse new connections"),
        (3_600, "note", "/own.pem expires in 1h"),
        (172_800, "ok", "/own.pem expires in 2d"),
    ],
)
def test_an_expiring_certificate_is_a_note_and_an_expired_one_fails(
    cluster, monkeypatch, left_s, result, found
):
    assert "certificate" not in examined()
    monkeypatch.setattr(tls_files, "expires_at_s", lambda path: 1_000_000 + left_s)
    monkeypatch.setattr(doctor.time, "time", lambda: 1_000_000)
    given = ("-C", "security.protocol=SSL", "-C", "ssl.certificate.location=/own.pem")
    check = examined(int(result == "failed"), *given)["certificate"]
    assert (check["result"], check["found"]) == (result, found)


def test_an_unreadable_certificate_has_no_check(cluster):
    given = ("-C", "security.protocol=SSL", "-C", "ssl.certificate.location=/none.pem")
    assert "certificate" not in examined(0, *given)


def test_a_principal_without_the_right_to_write_is_a_note(cluster):
    """Commands that only read do not need it."""
    assert "rights" not in examined()
    topic = attrs.evolve(cluster.report.topic, can_write=False)
    cluster.report = attrs.evolve(cluster.report, topic=topic)
    check = examined()["rights"]
    assert (check["result"], check["run"]) == (
        "note",
        "to run members or such commands, grant WRITE on topic __marshal",
    )


@pytest.mark.parametrize(
    ("advice", "found"),
    [
        ("; check the brokers with: marshal doctor", "no answer"),
        (". Check the brokers with: marshal doctor", "no answer"),
        (
            "; see: marshal doctor, or allow more with --timeout",
            "no answer; allow more with --timeout",
        ),
    ],
)
def test_the_doctor_does_not_suggest_marshal_doctor(cluster, advice, found):
    cluster.error = CoordinationError(f"no answer{advice}")
    assert examined(1)["broker"]["found"] == found


def test_a_missing_topic_fails_and_the_log_is_skipped(cluster):
    cluster.report = cluster.reported("gone", exists=False)
    checks = examined(1)
    assert results(checks, "topic", "log") == ["failed", "skipped"]
    assert "check --coordination-topic" in checks["topic"]["run"]
    assert "marshal topic format" in checks["topic"]["run"]


@pytest.mark.parametrize(
    ("problem", "run"),
    [
        (
            Problem("retention.ms is 5", "retention.ms", "-1"),
            (
                "kafka-configs --bootstrap-server localhost:9092 --alter --entity-type "
                "topics --entity-name __marshal --add-config retention.ms=-1"
            ),
        ),
        (
            Problem("partition 3 has no leader"),
            (
                "kafka-topics --bootstrap-server localhost:9092 --describe --topic "
                "__marshal, then bring its brokers back"
            ),
        ),
        (
            Problem("replication factor is 2", REPLICATION, "3"),
            (
                "kafka-reassign-partitions --bootstrap-server localhost:9092, with 3 "
                "brokers for each partition of __marshal"
            ),
        ),
    ],
)
def test_a_wrong_topic_setting_fails_with_a_command_to_correct_it(
    cluster, problem, run
):
    cluster.report = attrs.evolve(cluster.report, found=(problem,))
    checks = examined(1)
    check = checks["settings"]
    assert (check["found"], check["run"]) == (problem.text, run)
    assert results(checks, "log", "format") == ["ok", "ok"]


def test_requests_that_a_quota_delays_are_noted(cluster, monkeypatch):
    assert "quota" not in examined()
    monkeypatch.setattr(
        throttling, "throttling", throttling.Throttling(longest_ms=1_500)
    )
    check = examined()["quota"]
    assert check["result"] == "note"
    assert "delayed requests by 1.5s" in check["found"]


def test_settings_that_may_not_be_read_are_a_note(cluster):
    cluster.report = cluster.reported(note="refused")
    assert examined()["settings"]["result"] == "note"


def test_a_log_without_its_start_fails(cluster):
    cluster.starts, cluster.log_start_missing = {0: 3}, (0,)
    checks = examined(1)
    assert results(checks, "log", "format") == ["failed", "skipped"]


def test_unused_partitions_without_their_log_start_are_a_note(cluster):
    cluster.starts, cluster.log_start_missing = {0: 0, 3: 1}, (3,)
    checks = examined()
    assert results(checks, "unused", "log", "format") == ["note", "ok", "ok"]
    assert "[3]" in checks["unused"]["found"]
    assert "retention" not in checks


def test_a_log_that_starts_with_a_checkpoint_passes(cluster):
    cluster.starts = {0: 3}
    checks = examined()
    assert results(checks, "retention", "log", "format") == ["ok", "ok", "ok"]


def test_an_unformatted_topic_fails(cluster):
    cluster.log = Log(configured=False)
    checks = examined(1)
    assert results(checks, "format", "clock") == ["failed", "skipped"]


def test_undecodable_records_are_a_note(cluster):
    cluster.log.append(b"\xff")
    assert examined()["records"]["result"] == "note"


def test_a_machine_clock_behind_a_broker_is_a_note(cluster):
    cluster.read_at_ms = cluster.log.now_ms - 2_000
    check = examined()["clock"]
    assert check["result"] == "note"
    assert "broker 7 is 2s ahead" in check["found"]


@pytest.mark.parametrize(
    ("by_ms", "result", "found"),
    [
        (0, "ok", "within 2s of broker 7"),
        (1_999, "ok", "within 2s of broker 7"),
        (90_000, "note", "this machine is 1m30s ahead of broker 7"),
        (-90_000, "note", "this machine is 1m30s behind broker 7"),
    ],
)
def test_a_new_record_shows_how_far_the_machine_clock_is_off(
    cluster, by_ms, result, found
):
    cluster.log.append(member())
    cluster.read_at_ms = cluster.log.now_ms + 90_000
    cluster.arrival = Arrival(0, 1_000_000, 1_000_000 + by_ms)
    check = examined()["clock"]
    assert check["result"] == result
    assert found in check["found"]
    assert (check["run"] is None) == (result == "ok")


def test_without_live_members_the_doctor_waits_for_no_record(cluster):
    cluster.read_at_ms = cluster.log.now_ms + 90_000
    check = examined()["clock"]
    assert check["result"] == "ok"
    assert "at most that far ahead" in check["found"]
    assert cluster.waits_ms == []


def test_the_doctor_waits_longer_if_live_members_seem_silent(cluster):
    """Live members write every third of a heartbeat interval."""
    cluster.log.append(member())
    for age_ms in (1_000, 2_000, 90_000):
        cluster.read_at_ms = cluster.log.now_ms + age_ms
        assert examined()["clock"]["result"] == "ok"
    longest_ms = cluster.log.state.config.heartbeat_interval_ms // 3 + 2_000
    assert cluster.waits_ms == [min(longest_ms, 5_000), longest_ms]


def test_the_assumptions_of_the_guarantees_are_checked(cluster):
    """Every line of the table of assumptions in docs/TESTING.md names its check."""
    checks = examined()
    assert {
        *("local clock", "identities", "death watch", "copies", "settings"),
        *("round trip", "format", "clock", "data topics", "open files"),
    } <= set(checks)
    assert cluster.questions == doctor.ROUND_TRIPS


def test_topics_that_may_lose_records_are_named(cluster):
    cluster.log.claimed(key=Key("g", "orders", 0))
    cluster.log.claimed(key=Key("g", "sound", 0))
    cluster.risks = {"orders": "unclean.leader.election.enable"}
    check = examined()["data topics"]
    assert check["result"] == "note"
    assert "2 checked" in check["found"]
    assert "orders (unclean.leader.election.enable)" in check["found"]
    assert "sound" not in check["found"]
    assert check["run"].endswith(
        "--entity-name orders --add-config unclean.leader.election.enable=false"
    )
    cluster.risks = {"orders": "partition 1 has no leader"}
    assert examined()["data topics"]["run"] == (
        "bring back the brokers that have copies of these topics"
    )


def test_topics_that_may_not_be_described_are_a_note(cluster):
    """The doctor checks the other topics, as SECURITY.md states."""
    for topic in ("orders", "sound"):
        cluster.log.claimed(key=Key("g", topic, 0))
    cluster.hidden = ("orders",)
    outcome = CliRunner().invoke(app, ["doctor", "-o", "json"])
    assert outcome.exit_code == 0, outcome.output
    rows = [
        check
        for check in json.loads(outcome.stdout)["checks"]
        if check["check"] == "data topics"
    ]
    assert [row["result"] for row in rows] == ["note", "ok"]
    assert "orders" in rows[0]["found"]
    assert rows[1]["found"] == "1 checked"


def test_the_checkpoint_is_not_checked_as_a_data_topic(cluster):
    cluster.log.claimed(key=Key("marshal", "/checkpoint", 0))
    cluster.log.claimed(key=Key("g", "sound", 0))
    assert examined()["data topics"]["found"] == "1 checked"


def test_a_local_clock_that_drifts_fails(cluster, monkeypatch):
    readings = iter([ClockReading(0, 0), ClockReading(10**9, 9 * 10**8)])
    monkeypatch.setattr(ClockReading, "now", lambda: next(readings))
    assert examined(1)["local clock"]["result"] == "failed"


def test_a_missing_java_is_a_note(cluster, monkeypatch):
    def find_java():
        raise ConfigurationError("No Java.")

    monkeypatch.setattr(java, "find_java", find_java)
    assert examined()["java"]["result"] == "note"


def test_a_missing_compiled_part_is_a_note(cluster, monkeypatch):
    monkeypatch.setattr(native, "compiled", None)
    found = examined()["compiled part"]
    assert (found["result"], found["run"].split()[:2]) == ("note", ["pip", "install"])
    monkeypatch.setattr(native, "compiled", json)
    found = examined()["compiled part"]
    assert (found["result"], found["found"]) == ("ok", json.__file__)


def test_a_missing_package_fails_with_the_command_to_install_it(cluster, monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    assert examined(1)["crc32c"]["run"] == "pip install crc32c"


def test_the_version_of_a_missing_package_is_none():
    assert doctor.installed("kafka-python")
    assert doctor.installed("no-such-package-anywhere") is None


def test_all_checks_share_one_deadline(cluster, monkeypatch):
    given, now_s = [], [100.0]

    def call(self):
        given.append(self.timeout_ms)
        now_s[0] += 6
        return cluster

    def machine():
        now_s[0] += 10
        return iter(())

    monkeypatch.setattr(Call, "admin", call)
    monkeypatch.setattr(doctor, "machine", machine)
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda _: None)
    for module in (doctor, deadline):
        monkeypatch.setattr(module, "time", clock)
    examined()
    # Broker, topic, data topics: each has the rest of 30 seconds.
    assert given == [20_000, 14_000, 8_000]


def test_a_check_without_a_remedy_leaves_its_column_empty(cluster):
    outcome = CliRunner().invoke(app, ["doctor"])
    assert outcome.exit_code == 0, outcome.output
    (line,) = (x for x in outcome.stdout.splitlines() if x.startswith("cluster id"))
    assert line.split() == ["cluster", "id", "ok", "cluster"]
