"""Checks the files of TLS before a client loads them, and notices renewed ones.

kafka-python loads them for each connection. It takes a file that it cannot load for a
broker that does not answer, and retries; without a password for an encrypted key,
OpenSSL requests one on the terminal of the process each time. librdkafka loads them
once. It reports OpenSSL's error, but names no file.

Neither library reads keystores of Java: PEM files are made of keystores, and made again
if a keystore was renewed and a connection fails.
"""

import datetime as dt
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.settings import BOTH_NAMES as NAMES

_FILES = ("ssl_cafile", "ssl_certfile", "ssl_crlfile", "ssl_keyfile")
_LOOK_S = 1.0
# For certificates in DER: tag of the version, index of the validity, tag of a UTCTime,
# and the mark of a long length.
_VERSION, _VALIDITY, _UTC_TIME, _LENGTH_LONG = 0xA0, 3, 0x17, 0x80


# Identifies the version of a file, behind symbolic links; empty if there is no file.
Version = tuple[int, ...]


def version_of(path: str) -> Version:
    """Return the version of a file."""
    try:
        stat = Path(path).stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class Stores:
    """Keystores that PEM files were made of. Thread-safe.

    Args:
        clock_s: Returns local time.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        # By path and use: one store may have this client's key, and trusted
        # certificates.
        self._read: dict[tuple[str, str], tuple[Version, Callable[[], object]]] = {}
        self._look_s = 0.0

    def follow(
        self, path: str, use: str, *, version: Version, make: Callable[[], object]
    ) -> None:
        """Make the PEM files again once a store has another version.

        Args:
            path: The store.
            use: What it is read for.
            version: Its version before it was read.
            make: Reads the store, writes the files and calls ``follow`` again. If it
                raises a ``ConfigurationError``, it is called again.
        """
        with self._lock:
            self._read[path, use] = version, make

    def renew(self) -> None:
        """Make the files of renewed stores again; checks at most once a second."""
        with self._lock:
            now_s = self._clock_s()
            if now_s < self._look_s:
                return
            self._look_s = now_s + _LOOK_S
            found = [
                make
                for (path, _), (version, make) in self._read.items()
                if version_of(path) not in {version, ()}
            ]
        for make in found:
            with suppress(ConfigurationError):
                make()


stores = Stores()


class TlsFiles:
    """Notices renewed files, for a client that loads them only once.

    Create it before the client. Thread-safe.

    Args:
        options: Connection options by kafka-python's names.
        clock_s: Returns local time.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._clock_s = clock_s
        self._loaded = self._versions()
        self._are_renewed = False
        self._look_s = 0.0

    def are_renewed(self) -> bool:
        """Return whether the files were renewed; checks at most once a second.

        False while they cannot be loaded, for example if only the certificate is new,
        and its key not yet.
        """
        now_s = self._clock_s()
        if self._are_renewed or now_s < self._look_s:
            return self._are_renewed
        self._look_s = now_s + _LOOK_S
        stores.renew()
        if self._versions() != self._loaded:
            with suppress(ConfigurationError):
                check_tls_files(self._options, by_librdkafka=True)
                self._are_renewed = True
        return self._are_renewed

    def _versions(self) -> Mapping[str, Version]:
        paths = {name: self._options.get(name) for name in _FILES}
        return {name: version_of(path) for name, path in paths.items() if path}


def expires_at_s(path: str) -> float | None:
    """Return when the first certificate of a PEM file expires, in epoch seconds.

    None if there is no such file, or no certificate in it.
    """
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
        _, begin, rest = text.partition(ssl.PEM_HEADER)
        body, end, _ = rest.partition(ssl.PEM_FOOTER)
        der = ssl.PEM_cert_to_DER_cert(begin + body + end)
        # Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { version [0]?, serial,
        # signature, issuer, validity SEQUENCE { notBefore, notAfter }, .. }, .. }
        (_, whole), *_ = _elements(der)
        (_, signed), *_ = _elements(whole)
        fields = [value for tag, value in _elements(signed) if tag != _VERSION]
        _, (tag, end_time) = _elements(fields[_VALIDITY])
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        moment = dt.datetime.strptime(end_time.decode(), form).replace(tzinfo=dt.UTC)
    except (OSError, ValueError, IndexError):
        return None
    return moment.timestamp()


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return the tags and contents of DER values that follow each other."""
    found, at = [], 0
    while at < len(der):
        tag, size = der[at], der[at + 1]
        at += 2
        if size > _LENGTH_LONG:
            count = size - _LENGTH_LONG
            size = int.from_bytes(der[at : at + count], "big")
            at += count
        found.append((tag, der[at : at + size]))
        at += size
    return found


def check_tls_files(options: Mapping[str, Any], *, by_librdkafka: bool = False) -> None:
    """Load each file once, as the clients will.

    Whether a certificate is valid now is not checked: it may be renewed.

    Args:
        options: Connection options by kafka-python's names.
        by_librdkafka: Whether no other client loads them.

    Raises:
        ConfigurationError: A file cannot be read, is of another kind, or the key does
            not belong to the certificate.
    """
    paths = {name: str(options[name]) for name in _FILES if options.get(name)}
    trusted = paths.get("ssl_cafile")
    if trusted and _is_place_of_librdkafka(trusted):
        if not by_librdkafka:
            raise ConfigurationError(
                f"{NAMES['ssl_cafile']} is {trusted!r}. Only librdkafka reads a "
                "directory, or probe, and other requests are made over kafka-python. "
                "Name a PEM file with the certificates to trust, or leave the option "
                "out to trust those of the system.",
                setting="ssl_cafile",
            )
        del paths["ssl_cafile"]
        trusted = None
    for name, path in paths.items():
        _check_readable(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if trusted:
        try:
            context.load_verify_locations(trusted)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"{NAMES['ssl_cafile']} is {trusted!r}, which has no certificate "
                f"({error.reason}). Name a PEM file with the certificates to trust.",
                setting="ssl_cafile",
            ) from error
    if "ssl_certfile" in paths:
        _check_pair(context, paths, options.get("ssl_password"))


def _is_place_of_librdkafka(cafile: str) -> bool:
    """Return whether only librdkafka understands it: a directory, or ``probe``."""
    return cafile == "probe" or Path(cafile).is_dir()


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"{NAMES[name]} is {path!r}, which cannot be read: {error.strerror}. "
            "Correct the path, or give this user the right to read the file.",
            setting=name,
        ) from error


def _check_pair(
    context: ssl.SSLContext, paths: Mapping[str, str], password: str | None
) -> None:
    """Load certificate and key of the client; never request a password."""
    certificate = paths["ssl_certfile"]
    key = paths.get("ssl_keyfile", certificate)
    requests: list[str] = []

    def answer() -> str:
        requests.append(key)
        return str(password or "-")

    reason = None
    try:
        context.load_cert_chain(certificate, key, answer)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
    if reason is None and (password or not requests):
        return
    if requests and not password:
        raise ConfigurationError(
            f"The key in {key!r} is encrypted. Give its password as "
            f"{NAMES['ssl_password']}.",
            setting="ssl_password",
        )
    if requests:
        raise ConfigurationError(
            f"The key in {key!r} cannot be decrypted with {NAMES['ssl_password']}, or "
            f"does not belong to the certificate in {certificate!r} ({reason}). "
            "Correct the password, or name the key of this certificate.",
            setting="ssl_password",
        )
    has_certificate = False
    with suppress(ssl.SSLError):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
        has_certificate = True
    if not has_certificate:
        raise ConfigurationError(
            f"{NAMES['ssl_certfile']} is {certificate!r}, which has no certificate "
            f"({reason}). Name a PEM file with the certificate of this client.",
            setting="ssl_certfile",
        )
    raise ConfigurationError(
        f"{key!r} has no key of the certificate in {certificate!r} ({reason}). Name "
        f"a PEM file with that key as {NAMES['ssl_keyfile']}.",
        setting="ssl_keyfile",
    )
