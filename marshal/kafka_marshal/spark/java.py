"""Translates security settings of Java's Kafka clients for Python's clients.

Users know these settings from Spark's own Kafka source and from properties files of
Kafka's tools. Python's clients support neither JAAS nor keystores. A JAAS login becomes
equivalent options. PKCS12 keystores, and PEM text in options, become PEM files on each
host that connects. Only this user can read them, and they exist until the process ends.
Spark kills its workers, so the files are kept in memory if the system supports it. When
a keystore was renewed, its files are written again once a connection fails.
"""

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.settings import (
    DOTTED_OPTIONS,
    ConnectionConfig,
    fields_of,
)
from kafka_marshal.kafka_io.tls_files import stores, version_of
from kafka_marshal.system_calls import create_memory_file

JAAS = "sasl.jaas.config"
STORES = (
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.keystore.type",
    "ssl.truststore.certificates",
    "ssl.truststore.location",
    "ssl.truststore.password",
    "ssl.truststore.type",
)
NAMES = (JAAS, *STORES)
RENAMED = {
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    # Options since Kafka 4.1; before that, part of the JAAS login.
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": (
        "sasl.oauthbearer.client.secret"
    ),
}
_LOGIN = re.compile(
    r"\s*([\w.$]+)\s+(?:required|requisite|sufficient|optional)\b(.*)", re.DOTALL
)
_PAIR = re.compile(
    r"""\s*([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^\s;"']+))"""
)
_STORE_BYTES_MAX = 10_000_000
# Files of one process: certificate, key and truststore of a few clusters.
FILES_MAX = 64
_JKS = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")


def python_options(connection: Mapping[str, str]) -> dict[str, str]:
    """Return connection options by the names of Python's clients.

    Files are read on this host.

    Raises:
        ConfigurationError: A login or a keystore cannot be used; no secret is shown.
    """
    found = {
        RENAMED.get(name, name): value
        for name, value in connection.items()
        if name not in NAMES
    }
    given = {name: connection[name] for name in NAMES if name in connection}
    if not given:
        return found
    more: dict[str, str] = {}
    if JAAS in given:
        more |= _login(given[JAAS], found.get("sasl.mechanism", "GSSAPI"))
    more |= _trusted(given) | _key_and_certificate(given, found.get("ssl.key.password"))
    for name in more.keys() & found.keys():
        if name != "ssl.key.password":
            raise _wrong(
                name,
                "kafka.sasl.jaas.config, or an option of a keystore or truststore, "
                "sets this, too; keep one",
            )
    return found | more


def shared_name(name: str) -> str:
    """Return the one name for all options of the same meaning, of any client."""
    name = RENAMED.get(name, name)
    return DOTTED_OPTIONS.get(name, name)


def settings_of(connection: Mapping[str, str]) -> ConnectionConfig:
    """Return settings for this host; unpickling makes them again, for the new host.

    Raises:
        ConfigurationError: An option is wrong.
    """
    fields = fields_of(python_options(connection))
    return _HostConfig(**fields, given=dict(connection))


@attrs.frozen
class _HostConfig(ConnectionConfig):
    """Settings that name files of this host.

    Attributes:
        given: Options from which the settings were made.
    """

    given: Mapping[str, str] = attrs.field(kw_only=True, repr=False, eq=False)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return settings_of, (dict(self.given),)


def _wrong(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"option kafka.{name}: {why}", setting=f"kafka.{name}")


# --- logins


def _login(text: str, mechanism: str) -> dict[str, str]:
    """Return the options equivalent to a JAAS login."""
    found = _LOGIN.fullmatch(text)
    if found is None:
        raise _wrong(
            JAAS,
            "it cannot be parsed; write for example "
            "org.apache.kafka.common.security.plain."
            'PlainLoginModule required username="NAME" password="SECRET";',
        )
    module = found[1].rpartition(".")[2]
    pairs = {}
    for name, quoted, single, bare in _PAIR.findall(found[2]):
        pairs[name] = re.sub(r"\\(.)", r"\1", quoted) or single or bare
    if module in {"PlainLoginModule", "ScramLoginModule"}:
        return _by_password(module, mechanism, pairs)
    if module == "Krb5LoginModule":
        return _by_ticket(pairs)
    if module == "IAMLoginModule":
        return {}  # the mechanism AWS_MSK_IAM is enough
    if module == "OAuthBearerLoginModule":
        return _by_credentials(pairs)
    raise _wrong(
        JAAS,
        f"{module} is not supported; use PlainLoginModule, ScramLoginModule, "
        "OAuthBearerLoginModule, Krb5LoginModule or IAMLoginModule, or mutual TLS "
        "(kafka.ssl.keystore.location)",
    )


def _by_password(
    module: str, mechanism: str, pairs: Mapping[str, str]
) -> dict[str, str]:
    prefix = "PLAIN" if module.startswith("Plain") else "SCRAM"
    if not mechanism.upper().startswith(prefix):
        raise _wrong(
            JAAS,
            f"{module} is for kafka.sasl.mechanism {prefix}, which is {mechanism}; set "
            + ("it to PLAIN" if prefix == "PLAIN" else "it to SCRAM-SHA-256 or -512"),
        )
    if pairs.get("tokenauth", "false").lower() == "true":
        raise _wrong(JAAS, "delegation tokens are not supported; use a password")
    for name in ("username", "password"):
        if not pairs.get(name):
            raise _wrong(JAAS, f"{module} has no {name}")
    return {"sasl.username": pairs["username"], "sasl.password": pairs["password"]}


def _by_credentials(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the client credentials in the login; they may be given as options."""
    if any(name.startswith("unsecured") for name in pairs):
        raise _wrong(
            JAAS,
            "unsecured tokens are for tests of Java's clients; give the client "
            "credentials and kafka.sasl.oauthbearer.token.endpoint.url",
        )
    names = {"clientId": "client.id", "clientSecret": "client.secret", "scope": "scope"}
    return {
        f"sasl.oauthbearer.{names[name]}": value
        for name, value in pairs.items()
        if name in names
    }


def _by_ticket(pairs: Mapping[str, str]) -> dict[str, str]:
    if "keyTab" in pairs or pairs.get("useKeyTab", "false").lower() == "true":
        raise _wrong(
            JAAS,
            "a login cannot name a keytab, only kinit reads it: run "
            f"kinit -kt {pairs.get('keyTab', 'KEYTAB')} "
            f"{pairs.get('principal', 'PRINCIPAL')} on the driver and on each executor "
            "before the job (and again before the ticket ends), and set "
            "kafka.sasl.kerberos.service.name",
        )
    name = pairs.get("serviceName")
    return {"sasl.kerberos.service.name": name} if name else {}


# --- keystores


def _trusted(given: Mapping[str, str]) -> dict[str, str]:
    """Return the option for trusted certificates."""
    text = given.get("ssl.truststore.certificates")
    name = "ssl.truststore.location"
    path = given.get(name)
    if text is not None and path is not None:
        raise _wrong(name, "kafka.ssl.truststore.certificates is given, too; keep one")
    if text is not None:
        return {"ssl.ca.location": _private_file(text.encode())}
    if path is None:
        return {}
    version, data = version_of(path), _read(name, path)
    if not _is_pkcs12(name, path, data=data):
        return {"ssl.ca.location": path}
    _, _, chain = _read_pkcs12(name, data, given.get("ssl.truststore.password"))
    if not chain:
        raise _wrong(name, f"{path} has no certificate")
    stores.follow(path, name, version=version, make=partial(_trusted, given))
    return {"ssl.ca.location": _file_of(path, "certificates", b"".join(chain))}


def _key_and_certificate(
    given: Mapping[str, str], key_password: str | None
) -> dict[str, str]:
    """Return the options for the client's certificate and key."""
    chain, key = (
        given.get(f"ssl.keystore.{part}") for part in ("certificate.chain", "key")
    )
    name = "ssl.keystore.location"
    path = given.get(name)
    if (chain is None) != (key is None):
        raise _wrong(
            "ssl.keystore.key",
            "set kafka.ssl.keystore.key and kafka.ssl.keystore.certificate.chain "
            "together",
        )
    if chain is not None and key is not None:
        if path is not None:
            raise _wrong(name, "kafka.ssl.keystore.key is given, too; keep one")
        return {
            "ssl.certificate.location": _private_file(chain.encode()),
            "ssl.key.location": _private_file(key.encode()),
        }
    if path is None:
        return {}
    version, data = version_of(path), _read(name, path)
    if not _is_pkcs12(name, path, data=data):
        return {"ssl.certificate.location": path, "ssl.key.location": path}
    password = given.get("ssl.keystore.password")
    own_key, own, others = _read_pkcs12(name, data, password)
    if own_key is None or own is None:
        raise _wrong(name, f"{path} has no key with its certificate")
    make = partial(_key_and_certificate, given, key_password)
    stores.follow(path, name, version=version, make=make)
    found = {
        "ssl.certificate.location": _file_of(path, "chain", own + b"".join(others)),
        "ssl.key.location": _file_of(path, "key", own_key),
    }
    # The key is encrypted with the password of its store.
    secret = password or key_password
    return found | ({"ssl.key.password": secret} if secret else {})


def _read(name: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_STORE_BYTES_MAX)
    except OSError as error:
        raise _wrong(
            name,
            f"{path} cannot be read on this host ({error.strerror}); it must be there "
            "on every host that connects",
        ) from error
    return data


def _is_pkcs12(name: str, path: str, *, data: bytes) -> bool:
    """Return whether a store is PKCS12 and not PEM, by its content.

    Java reads PKCS12 also as its default type, JKS.
    """
    if data.startswith(_JKS):
        raise _wrong(
            name,
            f"{path} is a keystore of type JKS, which only Java can read; convert it: "
            f"keytool -importkeystore -srckeystore {path} -destkeystore "
            f"{Path(path).with_suffix('.p12')} -deststoretype PKCS12, and name the new "
            "file",
        )
    if b"-----BEGIN " in data:
        return False
    if data[:1] == b"\x30":
        return True
    raise _wrong(name, f"{path} is neither PEM nor PKCS12")


# Cached, because encrypting the key again for each task would change the settings.
@lru_cache(maxsize=8)
def _read_pkcs12(
    name: str, data: bytes, password: str | None
) -> tuple[bytes | None, bytes | None, tuple[bytes, ...]]:
    """Return key, certificate and further certificates of a PKCS12 store, as PEM."""
    try:
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.serialization import pkcs12
    except ImportError as error:
        raise _wrong(
            name,
            "PKCS12 needs the package cryptography; run: pip install "
            "'kafka-marshal[spark]', on the executors as well, or convert the store: "
            "openssl pkcs12 -in STORE -out STORE.pem",
        ) from error
    secret = password.encode() if password else None
    try:
        store = pkcs12.load_pkcs12(data, secret)
    except ValueError as error:
        raise _wrong(name, "the store cannot be opened; check its password") from error
    pem = form.Encoding.PEM
    key = None
    if store.key is not None:
        hidden = form.BestAvailableEncryption(secret) if secret else form.NoEncryption()
        key = store.key.private_bytes(pem, form.PrivateFormat.PKCS8, hidden)
    others = tuple(
        each.certificate.public_bytes(pem) for each in store.additional_certs
    )
    own = None if store.cert is None else store.cert.certificate.public_bytes(pem)
    return key, own, others


# Path by process id, store and part: a forked child has files of its own.
_files: dict[tuple[int, str, str], str] = {}


def _file_of(store: str, part: str, data: bytes) -> str:
    """Return the path of a private file for a part of a store, with these bytes.

    The path stays the same when the store is renewed.
    """
    place = os.getpid(), store, part
    found = _files.get(place)
    # PEM readers ignore this first line; stores with equal content get separate files.
    data = f"{part} of {store!a}\n".encode() + data
    if found is None:
        found = _files[place] = _private_file(data)
    elif Path(found).read_bytes() != data:
        Path(found).write_bytes(data)
    return found


def _private_file(data: bytes) -> str:
    """Return the path of a private file of this process with these bytes."""
    return _in_memory(data) or _in_folder(data)


@lru_cache(maxsize=FILES_MAX)
def _in_memory(data: bytes) -> str | None:
    """Return the path of an anonymous file in memory, None if not supported.

    The file disappears with this process and its forked children, however they end.
    """
    try:
        number = create_memory_file("kafka-marshal-tls")
    except OSError:
        return None
    os.fchmod(number, 0o600)
    with os.fdopen(number, "wb", closefd=False) as file:
        file.write(data)
    path = f"/proc/self/fd/{number}"
    if os.access(path, os.R_OK):
        return path
    os.close(number)
    return None


def _in_folder(data: bytes) -> str:
    """Return the path of a temporary file, removed at a normal exit."""
    path = Path(_folder(os.getpid())) / f"{hashlib.sha256(data).hexdigest()}.pem"
    if not path.exists():
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(data)
    return str(path)


@lru_cache(maxsize=1)
def _folder(pid: int) -> str:
    folder = tempfile.mkdtemp(prefix="kafka-marshal-tls-")
    atexit.register(_remove, folder, pid)
    return folder


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
