"""How Java's security settings are translated, without showing a secret."""

import datetime as dt
import errno
import itertools
import os
import pickle
import signal
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID
from slices import HANG_S

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io import tls_files
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.tls_files import TlsFiles
from kafka_marshal.spark import java
from kafka_marshal.spark.java import python_options, settings_of, shared_name
from kafka_marshal.spark.options import parse

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
KERBEROS = "com.sun.security.auth.module.Krb5LoginModule"
HUSH = "hush-hush"
DAY = dt.timedelta(days=1)


def login(text, mechanism="PLAIN"):
    return python_options({"sasl.jaas.config": text, "sasl.mechanism": mechanism})


@pytest.mark.parametrize(
    ("module", "mechanism"), [(PLAIN, "PLAIN"), (SCRAM, "SCRAM-SHA-512")]
)
def test_a_password_login_becomes_username_and_password(module, mechanism):
    text = f'{module} required\n  username="al ice" password="a\\"b;=c";'
    assert login(text, mechanism) == {
        "sasl.mechanism": mechanism,
        "sasl.username": "al ice",
        "sasl.password": 'a"b;=c',
    }
    shaded = f"kafkashaded.{module} required username='u' password=p;"
    assert login(shaded, mechanism)["sasl.password"] == "p"


def test_a_kerberos_login_requires_a_ticket_cache():
    text = f'{KERBEROS} required useTicketCache=true serviceName="kafka";'
    assert login(text, "GSSAPI")["sasl.kerberos.service.name"] == "kafka"
    keytab = f'{KERBEROS} required useKeyTab=true keyTab="/k" principal="p@R";'
    with pytest.raises(ConfigurationError, match="kinit -kt /k p@R"):
        login(keytab, "GSSAPI")


def test_an_iam_login_needs_only_its_mechanism():
    text = "software.amazon.msk.auth.iam.IAMLoginModule required;"
    assert login(text, "AWS_MSK_IAM") == {"sasl.mechanism": "AWS_MSK_IAM"}


def test_a_login_by_client_credentials_becomes_oauthbearer_options():
    text = f'{OAUTH} required clientId="me" clientSecret="{HUSH}" scope="s";'
    assert login(text, "OAUTHBEARER") == {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": HUSH,
        "sasl.oauthbearer.scope": "s",
    }
    assert login(f"{OAUTH} required;", "OAUTHBEARER") == {
        "sasl.mechanism": "OAUTHBEARER"
    }


@pytest.mark.parametrize(
    ("text", "mechanism", "expected"),
    [
        ("nonsense", "PLAIN", "it cannot be parsed; write"),
        (
            f'{PLAIN} required username="u" password="{HUSH}";',
            "GSSAPI",
            "set it to PLAIN",
        ),
        (f'{SCRAM} required username="u" password="{HUSH}";', "PLAIN", "SCRAM-SHA-256"),
        (f'{PLAIN} required password="{HUSH}";', "PLAIN", "has no username"),
        (
            f'{SCRAM} required username="u" password="{HUSH}" tokenauth="true";',
            "SCRAM-SHA-256",
            "delegation tokens are not supported",
        ),
        ("a.OtherLoginModule required;", "OAUTHBEARER", "is not supported; use"),
        (
            f'{OAUTH} required unsecuredLoginStringClaim_sub="{HUSH}";',
            "OAUTHBEARER",
            "unsecured tokens are for tests",
        ),
    ],
)
def test_an_unsupported_login_raises_without_showing_its_secret(
    text, mechanism, expected
):
    with pytest.raises(ConfigurationError, match=expected) as caught:
        login(text, mechanism)
    assert HUSH not in str(caught.value)
    assert caught.value.setting == "kafka.sasl.jaas.config"


def test_an_option_given_twice_raises():
    text = f'{PLAIN} required username="u" password="{HUSH}";'
    given = {"sasl.jaas.config": text, "sasl.mechanism": "PLAIN", "sasl.username": "v"}
    with pytest.raises(ConfigurationError, match="keep one"):
        python_options(given)


# --- keystores


@pytest.fixture(scope="module")
def own():
    return self_signed()


def self_signed():
    """Return a key and a certificate that it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "me")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def as_pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def keystore(own, tmp_path):
    path = tmp_path / "own.p12"
    path.write_bytes(keystore_of(own))
    return str(path)


@pytest.fixture(params=["memory", "folder", "no /proc"])
def kept(request, monkeypatch):
    """Each place that PEM is written to; some systems have no files in memory."""
    java._in_memory.cache_clear()
    java._files.clear()
    if request.param == "folder":

        def refuse(_name):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(java, "create_memory_file", refuse)
    elif request.param == "no /proc":
        monkeypatch.setattr(os, "access", lambda *_: False)
    yield
    java._in_memory.cache_clear()
    java._files.clear()


def is_private(path):
    modes = (Path(path).stat().st_mode, Path(path).parent.stat().st_mode)
    return not any(mode & (stat.S_IRWXG | stat.S_IRWXO) for mode in modes)


@pytest.mark.usefixtures("kept")
def test_a_pkcs12_keystore_becomes_private_pem_files(keystore):
    found = python_options(
        {
            "ssl.keystore.location": keystore,
            "ssl.keystore.password": HUSH,
            "ssl.keystore.type": "PKCS12",
        }
    )
    chain, key = found["ssl.certificate.location"], found["ssl.key.location"]
    assert is_private(chain)
    assert is_private(key)
    assert b"ENCRYPTED" in Path(key).read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(chain, key, found["ssl.key.password"])


@pytest.fixture
def each_call(monkeypatch):
    """Check at each call whether stores were renewed."""
    found = tls_files.Stores(itertools.count().__next__)
    monkeypatch.setattr(tls_files, "stores", found)
    monkeypatch.setattr(java, "stores", found)


def keystore_of(pair, secret=HUSH):
    hidden = serialization.BestAvailableEncryption(secret.encode())
    key, certificate = pair
    return pkcs12.serialize_key_and_certificates(b"me", key, certificate, None, hidden)


@pytest.mark.usefixtures("kept", "each_call")
def test_a_renewed_keystore_is_written_to_the_same_pem_files(keystore):
    given = {"ssl.keystore.location": keystore, "ssl.keystore.password": HUSH}
    found = python_options(given)
    options = ConnectionConfig(options={"security.protocol": "SSL", **found}).options
    now_s = itertools.count()
    files = TlsFiles(options, clock_s=now_s.__next__)
    assert not files.are_renewed()
    before = Path(found["ssl.certificate.location"]).read_bytes()
    Path(keystore).write_bytes(b"\x30 is written")
    assert not files.are_renewed()
    Path(keystore).write_bytes(keystore_of(self_signed()))
    assert files.are_renewed()
    assert Path(found["ssl.certificate.location"]).read_bytes() != before
    assert python_options(given) == found
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    key = found["ssl.key.location"]
    context.load_cert_chain(found["ssl.certificate.location"], key, HUSH)


def test_two_stores_with_one_content_have_files_of_their_own(keystore, tmp_path):
    other = tmp_path / "other.p12"
    other.write_bytes(Path(keystore).read_bytes())
    paths = [
        python_options({"ssl.keystore.location": each, "ssl.keystore.password": HUSH})
        for each in (keystore, str(other))
    ]
    names = ("ssl.certificate.location", "ssl.key.location")
    assert len({found[name] for found in paths for name in names}) == 4


def test_a_truststore_made_by_keytool_becomes_ca_certificates(own, tmp_path):
    """Java also opens a PKCS12 store whose type is given as JKS."""
    (tmp_path / "ca.pem").write_bytes(as_pem(own[1]))
    store = tmp_path / "trust.p12"
    subprocess.run(
        [
            *("keytool", "-importcert", "-noprompt", "-alias", "ca"),
            *("-file", tmp_path / "ca.pem", "-keystore", store),
            *("-storetype", "PKCS12", "-storepass", HUSH),
        ],
        check=True,
        capture_output=True,
        timeout=HANG_S,
    )
    given = {"ssl.truststore.location": str(store), "ssl.truststore.type": "JKS"}
    found = python_options(given | {"ssl.truststore.password": HUSH})
    context = ssl.create_default_context(cafile=found["ssl.ca.location"])
    assert context.cert_store_stats()["x509_ca"] == 1
    with pytest.raises(ConfigurationError, match="check its password") as caught:
        python_options(given | {"ssl.truststore.password": "other-secret"})
    assert "other-secret" not in str(caught.value)


def test_pem_files_are_used_directly(own, tmp_path):
    path = tmp_path / "all.pem"
    path.write_bytes(as_pem(own[1]))
    place = str(path)
    given = {"ssl.truststore.location": place, "ssl.keystore.location": place}
    assert python_options(given | {"ssl.key.password": "k"}) == {
        "ssl.ca.location": place,
        "ssl.certificate.location": place,
        "ssl.key.location": place,
        "ssl.key.password": "k",
    }


@pytest.mark.usefixtures("kept")
def test_pem_in_options_becomes_private_files():
    given = {
        "ssl.truststore.certificates": "CA",
        "ssl.keystore.certificate.chain": "CHAIN",
        "ssl.keystore.key": "KEY",
    }
    found = python_options(given)
    assert [Path(path).read_text() for path in found.values()] == ["CA", "CHAIN", "KEY"]
    assert all(is_private(path) for path in found.values())
    assert python_options(given) == found, "and the same file the next time"


# Spark kills its workers like this; a forked worker reads its parent's file.
ENDING = """
import os, signal
from pathlib import Path
from kafka_marshal.spark import java
from kafka_marshal.spark.java import python_options

path = python_options({"ssl.truststore.certificates": "CA"})["ssl.ca.location"]
if os.fork() == 0:
    print(Path(path).read_text(), flush=True)
else:
    os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDING],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("CA\n", "")
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xfe\xed\xfe\xed rest", "keytool -importkeystore -srckeystore .*own.jks"),
        (b"nothing", "neither PEM nor PKCS12"),
        (None, "cannot be read on this host"),
    ],
)
def test_an_unusable_store_raises(tmp_path, content, expected):
    path = tmp_path / "own.jks"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=expected):
        python_options({"ssl.truststore.location": str(path)})
    with pytest.raises(ConfigurationError, match=expected):
        python_options({"ssl.keystore.location": str(path)})


@pytest.mark.parametrize(
    "given",
    [
        {"ssl.truststore.location": "x", "ssl.truststore.certificates": "y"},
        {"ssl.keystore.key": "x"},
        {
            "ssl.keystore.key": "x",
            "ssl.keystore.certificate.chain": "y",
            "ssl.keystore.location": "z",
        },
    ],
)
def test_contradictory_stores_raise(given):
    with pytest.raises(ConfigurationError, match=r"keep one|set .* together"):
        python_options(given)


def test_each_host_reads_its_own_files(own, tmp_path, keystore):
    """Settings are serialized, and rebuilt on each host."""
    options = {
        "kafka.bootstrap.servers": "b:1",
        "subscribe": "t",
        "kafka.security.protocol": "SSL",
        "kafka.ssl.keystore.location": keystore,
        "kafka.ssl.keystore.password": HUSH,
        "kafka.receive.buffer.bytes": "70000",
    }
    found = parse(options)
    assert found.settings.options["receive_buffer_bytes"] == 70_000
    assert HUSH not in repr(found)
    sent = pickle.dumps(found)
    assert found.settings.options["ssl_keyfile"].encode() not in sent
    assert pickle.loads(sent) == found
    Path(keystore).unlink()
    with pytest.raises(ConfigurationError, match="on every host that connects"):
        pickle.loads(sent)
    assert settings_of(parse(BARE).connection).options == {}


BARE = {"kafka.bootstrap.servers": "b:1", "subscribe": "t"}


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("sasl.mechanisms", "sasl_mechanism"),
        ("sasl_mechanism", "sasl_mechanism"),
        ("send.buffer.bytes", "send_buffer_bytes"),
        ("sasl.jaas.config", "sasl.jaas.config"),
    ],
)
def test_options_of_one_meaning_share_a_name(name, shared):
    assert shared_name(name) == shared
