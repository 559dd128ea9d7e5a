"""Certificates and keystores, as Java's keytool makes them."""

import datetime as dt
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from slices import HANG_S

from kafka_marshal.testing.java import find_java

STORE_PASSWORD = "changeit"


def keytool(*arguments: str | Path) -> None:
    """Run keytool; the test fails if it is missing."""
    program = find_java().home / "bin" / "keytool"
    if not program.exists():
        # A skip would look like a pass.
        pytest.fail(f"{program} is missing; install a JDK with keytool")
    subprocess.run(
        [program, *arguments], check=True, capture_output=True, timeout=HANG_S
    )


def keystore(home: Path, names: str) -> tuple[Path, Path]:
    """Make a self-signed certificate; return its keystore, and the PEM to trust.

    Args:
        home: Where both files go.
        names: Subject alternative names, such as ``dns:localhost,ip:127.0.0.1``.
    """
    home.mkdir()
    store, certificate = home / "own.p12", home / "ca.pem"
    common = ("-keystore", store, "-storepass", STORE_PASSWORD, "-alias", "own")
    make = ("-genkeypair", "-keyalg", "RSA", "-storetype", "PKCS12", "-validity", "2")
    keytool(*make, *common, "-dname", "CN=own", "-ext", f"SAN={names}")
    keytool("-exportcert", "-rfc", *common, "-file", certificate)
    return store, certificate


def truststore(path: Path, certificate: Path, *, kind: str = "PKCS12") -> Path:
    """A store that trusts one certificate."""
    common = ("-keystore", path, "-storepass", STORE_PASSWORD, "-storetype", kind)
    trust = ("-importcert", "-noprompt", "-alias", "ca", "-file", certificate)
    keytool(*trust, *common)
    return path


def private_key(store: Path, path: Path) -> Path:
    """Write the key of a store as PEM, without a password; return its path."""
    key, *_ = pkcs12.load_key_and_certificates(
        store.read_bytes(), STORE_PASSWORD.encode()
    )
    assert key is not None
    path.write_bytes(_pem(key))
    return path


def client_certificate() -> tuple[bytes, bytes]:
    """A self-made certificate of ``CN=own`` and its key, both PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "own")])
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number()
    )
    day = dt.timedelta(days=1)
    valid = builder.not_valid_before(now - day).not_valid_after(now + day)
    made = valid.sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM), _pem(key)


def _pem(key: pkcs12.PKCS12PrivateKeyTypes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
