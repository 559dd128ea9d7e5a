"""TLS files are checked before a connection, and renewed ones are detected."""

import datetime as dt

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.clients import AdminClient
from kafka_marshal.kafka_io.faults import Access
from kafka_marshal.kafka_io.settings import DOTTED_OPTIONS, ConnectionConfig
from kafka_marshal.kafka_io.tls_files import (
    Stores,
    TlsFiles,
    check_tls_files,
    expires_at_s,
    version_of,
)
from kafka_marshal.kafka_io.transport import (
    open_coordination_log,
    open_data_log,
    open_offsets,
)

PASSWORD = "key-password"
BEGIN = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


def key_pem(key, password=None):
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password.encode())
        if password
        else serialization.NoEncryption(),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an expired certificate, its key, and a key that does not match."""
    home = tmp_path_factory.mktemp("tls")
    own, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "own")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(own.public_key())
        .serial_number(1)
        .not_valid_before(BEGIN)
        .not_valid_after(BEGIN + dt.timedelta(days=1))
        .sign(own, hashes.SHA256())
    ).public_bytes(serialization.Encoding.PEM)
    files = {
        "own.pem": certificate,
        "own.key": key_pem(own),
        "encrypted.key": key_pem(own, PASSWORD),
        "other.key": key_pem(other),
        "both.pem": certificate + key_pem(own),
        "text": b"nothing",
    }
    for path, data in files.items():
        (home / path).write_bytes(data)
    return home


def options_of(folder, cafile="own.pem", certfile=None, keyfile=None, password=None):
    given = {"ssl_cafile": cafile, "ssl_certfile": certfile, "ssl_keyfile": keyfile}
    found = {name: str(folder / path) for name, path in given.items() if path}
    return found | ({} if password is None else {"ssl_password": password})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"certfile": "own.pem", "keyfile": "own.key"},
        {"certfile": "both.pem"},
        {"certfile": "own.pem", "keyfile": "encrypted.key", "password": PASSWORD},
        {"certfile": "own.pem", "keyfile": "own.key", "password": "not needed"},
        {"cafile": ""},
    ],
)
def test_loadable_files_are_accepted(folder, options):
    check_tls_files(options_of(folder, **options))


@pytest.mark.parametrize("place", ["directory", "probe"])
def test_ca_locations_of_librdkafka_are_for_librdkafka_alone(folder, place):
    """kafka-python would retry until its deadline, and then blame the network."""
    options = {"ssl_cafile": str(folder) if place == "directory" else place}
    check_tls_files(options, by_librdkafka=True)
    with pytest.raises(ConfigurationError, match="Name a PEM file") as caught:
        check_tls_files(options)
    assert caught.value.setting == "ssl_cafile"


@pytest.mark.parametrize(
    ("options", "setting", "words"),
    [
        ({"cafile": "none.pem"}, "ssl_cafile", "cannot be read: No such file"),
        ({"cafile": "own.key"}, "ssl_cafile", "has no certificate"),
        ({"cafile": "text"}, "ssl_cafile", "has no certificate"),
        ({"certfile": "none.pem"}, "ssl_certfile", "cannot be read: No such file"),
        ({"certfile": "text"}, "ssl_certfile", "has no certificate"),
        ({"certfile": "own.pem"}, "ssl_keyfile", "has no key of the certificate"),
        (
            {"certfile": "own.pem", "keyfile": "none.key"},
            "ssl_keyfile",
            "cannot be read: No such file",
        ),
        (
            {"certfile": "own.pem", "keyfile": "other.key"},
            "ssl_keyfile",
            "has no key of the certificate",
        ),
        (
            {"certfile": "own.pem", "keyfile": "encrypted.key"},
            "ssl_password",
            "is encrypted",
        ),
        (
            {"certfile": "own.pem", "keyfile": "encrypted.key", "password": "wrong-1"},
            "ssl_password",
            "cannot be decrypted",
        ),
    ],
)
def test_an_unloadable_file_is_refused_by_setting_and_reason(
    folder, options, setting, words
):
    with pytest.raises(ConfigurationError, match=words) as caught:
        check_tls_files(options_of(folder, **options))
    assert caught.value.setting == setting
    dotted = {ours: name for name, ours in DOTTED_OPTIONS.items()}
    assert f"{setting} ({dotted[setting]})" in str(caught.value)
    assert "wrong-1" not in str(caught.value)


@pytest.fixture(params=["fast", "kafka-python"])
def wrong(request, folder):
    """Settings with a key that needs a password."""
    options = options_of(folder, certfile="own.pem", keyfile="encrypted.key")
    return ConnectionConfig(
        "127.0.0.1:1",
        options={"security_protocol": "SSL", **options},
        transport=request.param,
    )


@pytest.mark.parametrize(
    "open_it", [open_coordination_log, open_data_log, open_offsets]
)
def test_a_log_is_not_opened_with_an_encrypted_key(wrong, open_it):
    with pytest.raises(ConfigurationError, match="is encrypted"):
        open_it(wrong)


def test_an_admin_call_raises_for_an_encrypted_key(wrong):
    admin = AdminClient(wrong)
    with pytest.raises(ConfigurationError, match="is encrypted"):
        admin.call(
            lambda client: client.describe_cluster(),
            doing="Describing the cluster",
            access=Access.READ,
            timeout_ms=600_000,
        )


def made(until):
    key = ec.generate_private_key(ec.SECP256R1())
    # Long names, so that lengths in the encoding take several bytes.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "n" * 60)] * 3)
    return (
        x509.CertificateBuilder(name, name, key.public_key(), 7)
        .not_valid_before(BEGIN)
        .not_valid_after(until)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


@pytest.mark.parametrize("year", [2021, 2049, 2050, 9999])
def test_the_expiry_of_the_first_certificate_is_read(tmp_path, year):
    """The client certificate comes first; from 2050 on, dates have another format."""
    until = dt.datetime(year, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
    later = made(until + dt.timedelta(days=-30))
    (tmp_path / "own.pem").write_bytes(b"# own\n" + made(until) + later)
    assert expires_at_s(str(tmp_path / "own.pem")) == until.timestamp()


@pytest.mark.parametrize("name", ["none", "text", "own.key"])
def test_a_file_without_a_certificate_has_no_expiry(folder, name):
    assert expires_at_s(str(folder / name)) is None


def test_a_broken_certificate_has_no_expiry(folder, tmp_path):
    whole = (folder / "own.pem").read_text().splitlines()
    (tmp_path / "own.pem").write_text("\n".join([whole[0], "MIIB", whole[-1]]))
    assert expires_at_s(str(tmp_path / "own.pem")) is None


@pytest.fixture
def renewed(folder, tmp_path):
    """The folder of a client, and its TlsFiles; each check is a second later."""
    for name in ("own.pem", "own.key"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    now_s = iter(range(100))
    options = options_of(tmp_path, certfile="own.pem", keyfile="own.key")
    return tmp_path, TlsFiles(options, clock_s=lambda: next(now_s))


def replace(home, name, data):
    (home / "new").write_bytes(data)
    (home / "new").rename(home / name)


def test_replaced_files_are_reported_as_renewed(renewed):
    home, files = renewed
    assert not files.are_renewed()
    replace(home, "own.pem", (home / "own.pem").read_bytes())
    assert files.are_renewed()
    assert files.are_renewed(), "at each further call"


def test_files_are_renewed_only_once_key_and_certificate_match(folder, renewed):
    home, files = renewed
    key = (home / "own.key").read_bytes()
    replace(home, "own.key", (folder / "other.key").read_bytes())
    assert not files.are_renewed()
    (home / "own.key").unlink()
    assert not files.are_renewed()
    replace(home, "own.key", key)
    assert files.are_renewed()


def test_a_replaced_directory_link_renews_its_files(folder, tmp_path):
    """Kubernetes replaces all files of a secret by such a link."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.pem").write_bytes((folder / "own.pem").read_bytes())
    replace = tmp_path / "next"
    replace.symlink_to("old")
    replace.rename(tmp_path / "data")
    files = TlsFiles(options_of(tmp_path / "data"), clock_s=lambda: 0)
    replace.symlink_to("new")
    replace.rename(tmp_path / "data")
    assert files.are_renewed()


def test_a_renewed_keystore_is_read_until_it_can_be_used(tmp_path):
    now_s, made = [0.0], []
    stores = Stores(lambda: now_s[0])
    store = tmp_path / "own.p12"
    store.write_bytes(b"old")
    version = version_of(str(store))

    def make():
        made.append(store.read_bytes())
        if made[-1] == b"half":
            raise ConfigurationError("no store")
        stores.follow(str(store), "own", version=version_of(str(store)), make=make)

    def look(later_s=1.0):
        now_s[0] += later_s
        stores.renew()
        return made[-1:]

    stores.follow(str(store), "own", version=version, make=make)
    assert look() == []
    store.write_bytes(b"half")
    assert look(0.5) == []
    assert look(0.5) == [b"half"]
    store.unlink()
    assert (look(), len(made)) == ([b"half"], 1)
    store.write_bytes(b"another")
    assert look() == [b"another"]
    assert (look(), len(made)) == ([b"another"], 2)


def test_files_are_checked_at_most_once_a_second(renewed):
    home, files = renewed
    now_s = [0.0]
    files = TlsFiles(files._options, clock_s=lambda: now_s[0])
    assert not files.are_renewed()
    replace(home, "own.pem", (home / "own.pem").read_bytes())
    now_s[0] = 0.9
    assert not files.are_renewed()
    now_s[0] = 1.0
    assert files.are_renewed()
