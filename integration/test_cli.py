"""The command `marshal` on a real broker; as a process where signals matter."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from clikit import MARSHAL, RUN_S, Cli
from domain import HEARTBEAT_MS, opened
from waiting import eventually

from kafka_marshal.errors import TopicMisconfigured
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import Config, Limits

NO_LIMITS = Limits(**dict.fromkeys(Limits.__struct_fields__))
HOSTILE = "[red]\x1b[31m\u202e\x9b\nmarshal: fine"
SHOWN = r"[red]\x1b[31m\u202e\x9b\nmarshal: fine"


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique) as domain:
        yield domain


@pytest.fixture
def cli(domain, tmp_path):
    return Cli(domain, tmp_path)


@pytest.fixture
def bare(broker, unique, tmp_path):
    """A domain whose coordination topic nobody has formatted or made."""
    with opened(broker, unique, is_formatted=False) as domain:
        yield Cli(domain, tmp_path)


def make_topic(domain, **configs):
    settings = ConnectionConfig(domain.servers, coordination_topic=domain.topic)
    with KafkaTopicAdmin(settings) as topics:
        if configs:
            named = {name.replace("_", "."): value for name, value in configs.items()}
            topics.create(domain.topic, partitions=3, replication=1, configs=named)
        else:
            topics.create_coordination_topic(partitions=3)
        return topics.cluster_id()


def config(cluster_id, *, k=3):
    return encode(
        Config(
            generation=1,
            format_id=bytes(16),
            era=1,
            cluster_id=cluster_id,
            heartbeat_interval_ms=HEARTBEAT_MS,
            partition_count=k,
            feature_level=1,
            limits=NO_LIMITS,
        ),
    )


def consuming(topic, group, client="c1"):
    return ("consume", topic, "--group", group, "--client-id", client)


# --- the coordination topic


def test_a_second_format_is_refused_without_ignore_formatted(bare):
    wanted = ("topic", "format", "--partitions", "3", "--heartbeat-interval", "1s")
    made = bare.json(*wanted, "--limit", "span=100")
    assert (made["partition_count"], made["heartbeat_interval_ms"]) == (3, 1_000)
    assert made["limits"]["span"] == 100
    refused = bare.run("topic", "format", code=3)
    assert "--ignore-formatted" in refused.stderr
    again = bare.run("topic", "format", "--partitions", "5", "--ignore-formatted")
    assert "partition_count 3, not 5" in again.stderr
    info = bare.json("topic", "info")
    assert (info["problems"], info["format_id"]) == ([], made["format_id"])
    assert [row["next_offset"] for row in info["partitions"]] == [1, 1, 1]
    assert info["as_of"]["offsets"] == {"0": 1, "1": 1, "2": 1}


def test_a_missing_topic_is_reported_with_the_format_command(bare):
    for arguments in (
        ("topic", "info"),
        ("groups", "list"),
        ("claims", "who", "g", "t", "0"),
        ("log", "dump"),
        ("log", "verify"),
        ("groups", "pause", "g", "--for", "1m"),
        consuming("t", "g"),
    ):
        done = bare.run(*arguments, code=3)
        assert "marshal topic format" in done.stderr
        assert done.stdout == ""


def test_an_unformatted_topic_is_reported_with_the_format_command(bare):
    make_topic(bare.domain)
    for arguments in (
        ("topic", "info"),
        ("groups", "list"),
        ("clients", "list"),
        ("groups", "resume", "g"),
        ("log", "verify"),
        consuming("t", "g"),
    ):
        assert "marshal topic format" in bare.run(*arguments, code=3).stderr
    checks = {c["check"]: c["result"] for c in bare.json("doctor", code=1)["checks"]}
    assert (checks["format"], checks["clock"]) == ("failed", "skipped")


def test_a_torn_format_is_reported_and_completed(bare):
    bare.domain.append(config(make_topic(bare.domain)))
    for arguments in (("topic", "info"), ("claims", "list"), consuming("t", "g")):
        assert "torn_format" in bare.run(*arguments, code=3).stderr
    bare.run("topic", "format")
    assert bare.json("topic", "info")["problems"] == []


def test_a_log_of_another_cluster_ends_commands_with_6(bare):
    make_topic(bare.domain)
    for t in range(3):
        bare.domain.append(config("another"), t=t)
    for arguments in (
        ("topic", "info"),
        ("topic", "format", "--ignore-formatted"),
        ("groups", "list"),
        ("groups", "pause", "g", "--for", "1m"),
        consuming("t", "g"),
    ):
        assert "another" in bare.run(*arguments, code=6).stderr


def test_every_bad_setting_is_named(bare):
    """A CreateTime topic is never formatted."""
    make_topic(
        bare.domain,
        message_timestamp_type="CreateTime",
        retention_ms="1000",
        cleanup_policy="compact",
    )
    output = bare.run("topic", "info", code=3).stderr
    for setting in ("message.timestamp.type", "retention.ms", "cleanup.policy"):
        assert f"{bare.domain.topic}: {setting} is " in output
    refused = bare.run("topic", "format", code=3)
    assert "message.timestamp.type is CreateTime" in refused.stderr
    with pytest.raises(TopicMisconfigured) as caught, bare.domain.admin() as admin:
        admin.format_topic()
    assert len(caught.value.problems) >= 3


# --- reaching the cluster


def test_an_unreachable_broker_ends_commands_with_5(cli):
    for arguments in (
        ("topic", "info", "--timeout", "1500"),
        ("groups", "list", "--timeout", "1500"),
        (*consuming("t", "g"), "--open-timeout", "1500"),
    ):
        done = cli.run(*arguments, "-b", "127.0.0.1:1", code=5)
        assert "127.0.0.1:1" in done.stderr
        assert "next: marshal -b 127.0.0.1:1 doctor" in done.stderr
    checks = cli.json("doctor", "-b", "127.0.0.1:1", "--timeout", "1500", code=1)
    assert {c["check"]: c["result"] for c in checks["checks"]}["broker"] == "failed"


def test_one_reachable_bootstrap_address_is_enough(cli):
    servers = f"127.0.0.1:1,{cli.domain.servers}"
    found = cli.json("cluster", "id", "-b", servers)
    assert found["cluster_id"]
    assert cli.run("groups", "list", "-b", servers).stdout


def test_doctor_finds_a_healthy_cluster_healthy(cli):
    checks = cli.json("doctor")["checks"]
    assert {check["result"] for check in checks} <= {"ok", "note"}
    names = [check["check"] for check in checks]
    assert names[-1] == "local clock"
    assert {"copies", "round trip", "identities", "data topics"} <= set(names)


def test_consuming_an_unknown_topic_is_refused(cli):
    done = cli.run(*consuming("no-such-topic", "g"), code=1)
    assert "'no-such-topic' does not exist" in done.stderr


def test_another_heartbeat_interval_is_refused_with_both_values(cli, unique):
    wanted = consuming("t", unique("group"))
    done = cli.run(*wanted, "--heartbeat-interval", "7s", code=2)
    assert (
        f"--heartbeat-interval is 7000 here and {HEARTBEAT_MS} in the log"
        in done.stderr
    )


# --- consuming


def test_consume_prints_records_and_commits_them(cli, unique):
    topic = cli.domain.data_topic(2, records_each=20)
    group = unique("group")
    wanted = (*consuming(topic, group), "--timeout", "2s", "-v")
    records, reported = [], []

    def look():
        done = cli.run(*wanted)
        records.extend(json.loads(line) for line in done.stdout.splitlines())
        reported.append(done.stderr)
        return len(records) >= 40

    eventually(look, "40 records")
    found = sorted((r["partition"], r["offset"], r["value"]) for r in records)
    assert found == [(p, n, str(n)) for p in range(2) for n in range(20)]
    assert all(r["handed_out_ms"] >= r["timestamp"] > 0 for r in records)
    assert all(r["token"].count(".") == 2 for r in records)
    assert f"claimed: {topic}-0 token " in reported[-1]
    assert f"released {topic}-0, {topic}-1\n" in reported[-1]
    claims = cli.json("claims", "list", "--group", group)["claims"]
    assert [(c["position"], c["owner"]) for c in claims] == [(20, None), (20, None)]
    assert [(c["log_end_offset"], c["lag"]) for c in claims] == [(20, 0), (20, 0)]
    assert cli.run(*wanted).stdout == ""


def test_consume_ends_after_max_records(cli, unique):
    topic = cli.domain.data_topic(1, records_each=20)
    group = unique("group")
    for first in (0, 7):
        done = cli.run(*consuming(topic, group), "--max-records", "7")
        offsets = [json.loads(line)["offset"] for line in done.stdout.splitlines()]
        assert offsets == list(range(first, first + 7))


@pytest.mark.parametrize(
    ("signum", "delivery"), [(signal.SIGTERM, "alo"), (signal.SIGINT, "amo")]
)
def test_a_signal_ends_consume_in_order(cli, unique, signum, delivery):
    """Every record that was committed or granted is printed, and all is released."""
    topic = cli.domain.data_topic(2, records_each=3_000)
    group = unique("group")
    wanted = (*consuming(topic, group), "--delivery", delivery)
    with cli.started(*wanted, "--max-poll-records", "50") as consumer:
        consumer.wait_lines(100)
        assert consumer.end(signum) == 0, consumer.stderr
        records = consumer.records()
    claims = cli.json("claims", "list", "--group", group)["claims"]
    for claim in claims:
        printed = [r for r in records if r["partition"] == claim["partition"]]
        assert [r["offset"] for r in printed] == list(range(claim["position"] or 0))
        assert claim["owner"] is None
    states = {c["state"] for c in cli.json("clients", "list")["clients"]}
    assert states <= {"leaving", "left", "silent"}


def test_a_second_process_with_one_client_id_is_refused(cli, unique, tmp_path):
    """Refused at once on one machine, and by the log across machines."""
    topic = cli.domain.data_topic(1, records_each=1)
    group = unique("group")
    with cli.started(*consuming(topic, group)) as first:
        first.wait_lines(1)
        second = cli.run(*consuming(topic, group), code=4)
        assert f"in use by process {first.process.pid}" in second.stderr
        elsewhere = {"MARSHAL_STATE_DIR": str(tmp_path / "elsewhere")}
        with cli.started(*consuming(topic, group), env=elsewhere) as third:
            assert third.end() == 4, third.stderr
            assert "is in use by another live process on host" in third.stderr
        assert first.process.poll() is None, first.stderr
        assert first.end(signal.SIGTERM) == 0


def test_a_closed_pipe_commits_no_record_that_was_not_read(cli, unique):
    topic = cli.domain.data_topic(1, records_each=5)
    group = unique("group")
    read, write = os.pipe()
    process = subprocess.Popen(
        [MARSHAL, *consuming(topic, group)],
        env=os.environ | cli.env,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    os.close(read)
    _, output = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    (claim,) = cli.json("claims", "list", "--group", group)["claims"]
    assert (claim["owner"], claim["position"]) == (None, 0)
    done = cli.run(*consuming(topic, group), "--max-records", "5")
    assert json.loads(done.stdout.splitlines()[0])["offset"] == 0


def test_values_that_are_not_text_are_printed_as_base64(cli, unique):
    topic = cli.domain.data_topic(1)
    for value in (b"\xff\x00", b"\x1b[31m", "日本".encode()):
        cli.domain._producer.send(topic, value, key=b"k", partition=0).get(timeout=60)
    done = cli.run(*consuming(topic, unique("group")), "--max-records", "3")
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert (first["value_base64"], first["key"]) == ("/wA=", "k")
    assert (second["value"], third["value"]) == ("\x1b[31m", "日本")


# --- groups


def test_a_pause_is_visible_and_ends(cli, unique):
    """PROTOCOL 8.1: who paused it, why, until when; no record is handed out then."""
    topic = cli.domain.data_topic(2, records_each=5)
    group = unique("group")
    with cli.started(*consuming(topic, group)) as consumer:
        consumer.wait_lines(10)
        paused = cli.json(
            *("groups", "pause", group, "--for", "10m", "--reason", HOSTILE, "--wait")
        )
        assert (paused["held"], paused["reason"]) == ([], HOSTILE)
        (row,) = (
            g for g in cli.json("groups", "list")["groups"] if g["group_id"] == group
        )
        assert (row["owned_count"], row["claims_count"]) == (0, 2)
        assert row["pause_reason"] == HOSTILE
        assert row["paused_until_ms"] == paused["until_ms"]
        assert row["paused_by"].startswith("admin-")
        assert (
            r"[red]\x1b[31m\u202e\x9b\nmarshal: fine"
            in cli.run("groups", "list").stdout
        )
        described = cli.json("groups", "describe", group)
        assert described["pauses"][0]["partitions_count"] == 4
        assert [m["state"] for m in described["members"]] == ["active"]
        busy = cli.run("groups", "pause", group, "--for", "1m", code=3)
        assert f"marshal groups resume {group}" in busy.stderr
        cli.domain.produce(topic, 1)
        cli.run("groups", "resume", group, "--reason", "done")
        consumer.wait_lines(12)
        assert len({(r["partition"], r["offset"]) for r in consumer.records()}) == 12
        assert consumer.end(signal.SIGTERM) == 0
    assert "is not paused" in cli.run("groups", "resume", group, code=3).stderr


def test_a_pause_ends_with_5_if_claims_are_not_released_in_time(
    broker, unique, tmp_path
):
    with opened(broker, unique, h_ms=60_000) as domain:
        cli, group = Cli(domain, tmp_path), unique("group")
        topic = domain.data_topic(1, records_each=1)
        with cli.started(*consuming(topic, group)) as consumer:
            consumer.wait_lines(1)
            consumer.process.send_signal(signal.SIGSTOP)
            wanted = ("groups", "pause", group, "--for", "10m", "--wait")
            done = cli.run(*wanted, "--timeout", "6s", code=5)
            assert f"{topic}-0 was not released" in done.stderr


def test_clients_list_shows_the_log_lag_of_a_stopped_member(broker, unique, tmp_path):
    """How far each has applied the log, as of its last announcement."""
    with opened(broker, unique, h_ms=10_000) as domain:
        cli, group, missed = Cli(domain, tmp_path), unique("group"), 50
        topic = domain.data_topic(2, records_each=1)

        def row(client_id):
            rows = cli.json("clients", "list", "--group", group)["clients"]
            return next((each for each in rows if each["client_id"] == client_id), {})

        def lag(client_id):
            found = row(client_id).get("log_lag")
            return -1 if found is None else found

        with (
            cli.started(*consuming(topic, group, "c1")),
            cli.started(*consuming(topic, group, "c2")) as second,
        ):
            for name in ("c1", "c2"):
                eventually(lambda name=name: lag(name) >= 0, f"{name} announces itself")
            before = row("c2")
            partitions = [str(t) for t in range(4)]
            assert sorted(before["applied_offsets"]) == partitions
            assert sorted(before["began_offsets"]) == partitions
            assert before["log_read_count"] > 0
            second.process.send_signal(signal.SIGSTOP)
            for _ in range(missed):
                domain.append(b"of another program")
            eventually(lambda: 0 <= lag("c1") < missed, "one applies it")
            assert lag("c2") >= missed
            shown = cli.run("clients", "list", "--group", group).stdout
            assert "LOG LAG" in shown.splitlines()[0]
            second.process.send_signal(signal.SIGCONT)
            eventually(lambda: 0 <= lag("c2") < missed, "the other one, too")


# --- the log


def test_hostile_bytes_are_shown_escaped_and_change_nothing(cli):
    before = cli.json("topic", "info")["partitions"][0]["claims_count"]
    cli.domain.append(HOSTILE.encode())
    cli.domain.append(b"\x01\x05\x00" + HOSTILE.encode())
    assert cli.json("topic", "info")["partitions"][0]["claims_count"] == before
    lines = cli.run("log", "dump", "--partition", "0").stdout.splitlines()
    bad = [json.loads(line) for line in lines[-2:]]
    assert all("undecodable" in entry for entry in bad)
    assert cli.json("log", "verify")["partitions"][0]["undecodable_count"] >= 2
    assert cli.run("groups", "list").stdout
    checks = cli.json("doctor")["checks"]
    assert {c["check"]: c["result"] for c in checks}["records"] == "note"


def test_dump_then_replay_gives_the_digests_of_the_live_log(cli, tmp_path):
    cli.domain.append(b"\x00garbage")
    path = tmp_path / "dump.jsonl"
    path.write_text(cli.run("log", "dump").stdout)
    replayed = json.loads(cli.run("log", "replay", str(path)).stdout)["partitions"]
    live = cli.json("topic", "info")["partitions"]
    verified = cli.json("log", "verify")["partitions"]
    for row, checked in zip(live, verified, strict=True):
        digest_replayed = replayed[str(row["partition"])]
        assert row["digest"] == digest_replayed["digest"] == checked["digest"]
        assert (
            row["next_offset"]
            == digest_replayed["next_offset"]
            == checked["next_offset"]
        )
        assert checked["result"] == "ok"


REPORTING = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from kafka_marshal_cli.main import main
main()
"""
# Modules that `list` does not need over librdkafka; each loads for 10 ms or more.
UNUSED = {
    *("kafka", "aiokafka", "rich", "pydantic", "httpx", "tomllib", "re2"),
    *("kafka_marshal.admin.client", "kafka_marshal.consumer", "kafka_marshal.config"),
    *("kafka_marshal.engine.session", "kafka_marshal.protocol.planner"),
}


@pytest.mark.parametrize("command", [("claims", "list"), ("groups", "list")])
def test_a_list_loads_only_what_it_uses(cli, unique, command):
    topic, group = cli.domain.data_topic(1, records_each=1), unique("group")
    cli.run(*consuming(topic, group), "--max-records", "1")
    done = subprocess.run(
        [sys.executable, "-c", REPORTING, *command],
        env=os.environ | cli.env | {"MARSHAL_TRANSPORT": "fast"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=True,
    )
    assert group in done.stdout
    assert UNUSED.isdisjoint(done.stderr.split())


def test_log_dump_ends_when_its_reader_closes_the_pipe(cli):
    read, write = os.pipe()
    process = subprocess.Popen(
        [MARSHAL, "log", "dump"],
        env=os.environ | cli.env,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    os.close(read)
    _, output = process.communicate(timeout=RUN_S)
    assert (process.returncode, output) == (0, "")


# --- a broker of one's own


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_broker_run_starts_a_formatted_broker_and_ends_on_a_signal(cli, signum):
    env = {"MARSHAL_COORDINATION_TOPIC": "__marshal"}
    with cli.started("broker", "run", env=env) as broker:
        # A broker starts in seconds, on a machine that does nothing else.
        broker.wait_lines(1, 1_000 * RUN_S)
        address = broker.lines()[0]
        info = cli.json(
            *("topic", "info", "-b", address, "--coordination-topic", "__marshal")
        )
        assert (info["heartbeat_interval_ms"], info["partition_count"]) == (2_000, 8)
        assert broker.end(signum) == 0, broker.stderr
        host, _, port = address.partition(":")
        with pytest.raises(OSError, match=r"."):
            socket.create_connection((host, int(port)), timeout=1).close()
