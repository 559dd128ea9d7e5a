"""A job that is switched from Spark's own Kafka source, with its options as they are.

The cluster requires a login over TLS. The job is a program with a temporary folder of
its own, which may contain no key and no secret after its end.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from domain import opened
from kafka.admin import KafkaAdminClient, ScramMechanism, UserScramCredentialUpsertion
from sparkkit import RUN_S, environment, every
from tls import STORE_PASSWORD, keystore, truststore
from waiting import eventually

from kafka_marshal.testing.broker import EmbeddedBroker, free_ports

H_MS = 3_000
PARTITIONS, EACH = 2, 30
USER, SECRET, WRONG = "job", "wonder-land", "loo-king-glass"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


# Runs one query after the other, and prints its rows or its error. A query whose Python
# process did not start in time, on a busy machine, has read nothing and runs again.
PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from kafka_marshal.spark import register

queries, home = json.loads(sys.argv[1]), sys.argv[2]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.driver.memory", "500m").config("spark.local.dir", home)
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
register(spark)

def read(name, options):
    found = []
    if "group" not in options:
        frame = spark.read.format("marshal").options(**options).load()
        return [[row.partition, row.offset] for row in frame.collect()]
    frame = spark.readStream.format("marshal").options(**options).load()
    writer = frame.writeStream.trigger(availableNow=True).foreachBatch(
        lambda rows, _: found.extend([r.partition, r.offset] for r in rows.collect())
    )
    writer.option("checkpointLocation", f"{home}/{name}").start().awaitTermination()
    return found

def run(name, options):
    try:
        return {"rows": read(name, options)}
    except Exception as error:
        return {"error": str(error)}

for name, options in queries.items():
    told = run(name, options)
    while "failed to connect back" in told.get("error", ""):
        told = run(name, options)
    print(json.dumps([name, told]), flush=True)
spark.stop()
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, unique):
    """A domain on a broker with two listeners that require a login over TLS.

    The second asks for a certificate of the client as well.
    """
    home = tmp_path_factory.mktemp("tls")
    store, certificate = keystore(home / "broker", "dns:localhost,ip:127.0.0.1")
    own, own_certificate = keystore(home / "client", "dns:client")
    plain, sasl, mutual, controller = free_ports(4)
    addresses = (
        f"PLAINTEXT://127.0.0.1:{plain},SASL_SSL://localhost:{sasl},"
        f"MUTUAL://localhost:{mutual}"
    )
    logins = {
        "plain": f'{PLAIN} required user_{USER}="{SECRET}";',
        "scram-sha-512": f"{SCRAM} required;",
    }
    properties = {
        "listeners": f"{addresses},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": addresses,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
        "SASL_SSL:SASL_SSL,MUTUAL:SASL_SSL",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": str(store),
        "ssl.keystore.password": STORE_PASSWORD,
        "ssl.key.password": STORE_PASSWORD,
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.truststore.location": str(
            truststore(home / "clients.p12", own_certificate)
        ),
        "listener.name.mutual.ssl.truststore.password": STORE_PASSWORD,
        **{
            f"listener.name.{listener}.{mechanism}.sasl.jaas.config": login
            for listener in ("sasl_ssl", "mutual")
            for mechanism, login in logins.items()
        },
    }
    with (
        EmbeddedBroker(port=plain, properties=properties) as broker,
        opened(broker, unique, h_ms=H_MS) as domain,
    ):
        add_scram_user(domain.kafka)
        yield SimpleNamespace(
            domain=domain,
            sasl=f"localhost:{sasl}",
            mutual=f"localhost:{mutual}",
            certificate=certificate,
            trusted=truststore(home / "trusted.p12", certificate),
            jks=truststore(home / "trusted.jks", certificate, kind="JKS"),
            own=own,
        )


def add_scram_user(kafka: KafkaAdminClient) -> None:
    mechanism = ScramMechanism.SCRAM_SHA_512
    wanted = UserScramCredentialUpsertion(USER, mechanism, SECRET)
    assert kafka.alter_user_scram_credentials([wanted]) == {USER: None}
    eventually(
        lambda: kafka.describe_user_scram_credentials([USER])[USER],
        "the broker knows the user",
    )


def login(module: str, mechanism: str, *, secret: str = SECRET) -> dict[str, str]:
    """The options of a login, as Spark's own source takes them."""
    return {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": mechanism,
        "kafka.sasl.jaas.config": f'{module} required username="{USER}" '
        f'password="{secret}";',
    }


def trusting(
    path: Path, *, kind: str = "PKCS12", secret: str = STORE_PASSWORD
) -> dict[str, str]:
    """The options of a truststore, as Spark's own source takes them."""
    return {
        "kafka.ssl.truststore.location": str(path),
        "kafka.ssl.truststore.password": secret,
        "kafka.ssl.truststore.type": kind,
    }


def queries_of(guarded, topic: str) -> dict[str, dict[str, str]]:
    domain = guarded.domain
    common = {
        "subscribe": topic,
        "coordinationTopic": domain.topic,
        "startingOffsets": "earliest",
    }
    scram = login(SCRAM, "SCRAM-SHA-512")
    plain = login(PLAIN, "PLAIN")
    own = {
        "kafka.ssl.keystore.location": str(guarded.own),
        "kafka.ssl.keystore.password": STORE_PASSWORD,
        "kafka.ssl.keystore.type": "PKCS12",
    }
    inline = {
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": guarded.certificate.read_text(),
    }
    first = {"kafka.bootstrap.servers": guarded.sasl, "transport": "kafka-python"}
    second = {"kafka.bootstrap.servers": guarded.mutual, "transport": "fast"}
    found = {
        "scram": first | scram | trusting(guarded.trusted) | {"delivery": "alo"},
        "mutual": second | plain | own | inline | {"delivery": "amo"},
        "wrong-store": first | scram | trusting(guarded.trusted, secret=WRONG),
        "wrong-login": first
        | login(SCRAM, "SCRAM-SHA-512", secret=WRONG)
        | trusting(guarded.trusted),
        "jks": first | scram | trusting(guarded.jks, kind="JKS"),
    }
    streams = {
        name: {**common, **options, "group": domain.unique(name), "stateDir": ""}
        for name, options in found.items()
    }
    del common["startingOffsets"]
    return streams | {"batch": common | second | plain | own | inline}


@pytest.fixture(scope="module")
def job(guarded, tmp_path_factory):
    """The output of a job that runs all queries, and the folder that it wrote."""
    topic = guarded.domain.data_topic(PARTITIONS, records_each=EACH)
    home = tmp_path_factory.mktemp("job")
    queries = queries_of(guarded, topic)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(queries), str(home)],
        env=environment() | {"TMPDIR": str(home)},
        capture_output=True,
        text=True,
        timeout=2 * RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = dict(json.loads(line) for line in done.stdout.splitlines())
    assert set(output) == set(queries)
    return SimpleNamespace(results=output, log=done.stderr, home=home, queries=queries)


@pytest.mark.parametrize("name", ["scram", "mutual", "batch"])
def test_a_query_with_options_of_sparks_own_source_reads_all_records(job, name):
    reported = job.results[name]
    assert "error" not in reported, reported["error"]
    assert sorted(map(tuple, reported["rows"])) == every(*[EACH] * PARTITIONS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wrong-store",
            "truststore.location: the store cannot be opened; check its password",
        ),
        ("wrong-login", "the broker refused the login"),
        ("jks", "keytool -importkeystore -srckeystore"),
    ],
)
def test_an_unsupported_combination_is_an_error(job, name, message):
    assert message in job.results[name].get("error", job.results[name])


def test_no_secret_is_shown_or_left_behind(job):
    """In the output of the job, its checkpoints and its temporary files."""
    secrets = (SECRET, WRONG, STORE_PASSWORD, "PRIVATE KEY", "BEGIN CERTIFICATE")
    written = {
        str(path.relative_to(job.home)): path.read_bytes()
        for path in job.home.rglob("*")
        if path.is_file()
    }
    assert any(name.startswith("scram/") for name in written), "there is a checkpoint"
    written |= {"log": job.log.encode(), "told": json.dumps(job.results).encode()}
    shown = {
        (name, each)
        for name, content in written.items()
        for each in secrets
        if each.encode() in content
    }
    assert shown == set()
