"""The jars of Apache Kafka: resolved once from Maven Central, then cached.

The file ``kafka-VERSION.sha256`` beside this module locks the jars, with the SHA-256 of
each. Hashes are compared after the download and once a boot; otherwise only sizes,
because brokers start often.

jgo resolves them (extra ``broker``). It runs in a separate process, so that its
settings, its logging and a stuck download do not affect this one, and under a file
lock, because tests start brokers from several processes at once.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
)
from kafka_marshal.testing.java import Java

KAFKA_VERSION = "4.3.0"
RESOLVE_TIMEOUT_S = 600
_LOCK_INTERVAL_S = 0.05
# Kafka logs through slf4j and has no binding: without one it logs nothing.
_ENDPOINT = "org.apache.kafka:kafka_2.13:{version}+org.slf4j:slf4j-simple:1.7.36"
_LOCKED = Path(__file__).with_name(f"kafka-{KAFKA_VERSION}.sha256")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RESOLVE = """
import pathlib, sys
import jgo
environment = jgo.build(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2]))
print(environment.path)
"""


def cache_dir() -> Path:
    """Return the directory of the jars: KAFKA_MARSHAL_CACHE, else the XDG cache."""
    if chosen := os.environ.get("KAFKA_MARSHAL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kafka-marshal"


@contextmanager
def file_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on a file, among all processes of this machine.

    Args:
        path: The file; it is created if missing and never removed.
        timeout_s: How long to wait for another holder.

    Yields:
        Nothing; the lock is held inside the block.

    Raises:
        DeadlineExceeded: Another process held the lock for too long.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"Another process has held {path} for {timeout_s:.0f} s. "
                        "Wait for it, or end it, and try again."
                    ) from None
                time.sleep(_LOCK_INTERVAL_S)
        # Closing the file releases the lock.
        yield


def _read_list(listing: Path) -> list[Path] | None:
    """Return the jars of an earlier resolution if all have their sizes."""
    if not listing.is_file():
        return None
    jars: list[Path] = []
    for line in listing.read_text().splitlines():
        size, _, name = line.partition(" ")
        jar = listing.parent / name
        if not jar.is_file() or str(jar.stat().st_size) != size:
            return None
        jars.append(jar)
    return jars or None


def _write_list(listing: Path, jars: Sequence[Path]) -> None:
    """Write the list of jars with their sizes, atomically."""
    lines = [
        f"{jar.stat().st_size} {jar.relative_to(listing.parent)}\n" for jar in jars
    ]
    partial = listing.with_suffix(".part")
    partial.write_text("".join(lines))
    partial.replace(listing)


def _locked() -> dict[str, str]:
    """Return the SHA-256 of every jar, by its name."""
    lines = _LOCKED.read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def _unlike_locked(jars: Sequence[Path]) -> list[str]:
    """Return the names of jars that are missing, not locked, or of another content."""
    locked = _locked()
    found = {}
    for jar in jars:
        with jar.open("rb") as file:
            found[jar.name] = hashlib.file_digest(file, "sha256").hexdigest()
    names = sorted(locked.keys() | found.keys())
    return [name for name in names if locked.get(name) != found.get(name)]


def _this_check(listing: Path) -> str | None:
    """Return an id of a check of these jars in this boot; None if unknown."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        return None  # no boot id here: hashes are compared at every start
    known = listing.read_bytes() + _LOCKED.read_bytes()
    return f"{boot_id} {hashlib.sha256(known).hexdigest()}"


def _kept(listing: Path) -> list[Path] | None:
    """Return the jars of an earlier resolution if they are still the locked ones."""
    jars = _read_list(listing)
    if jars is None:
        return None
    checked = listing.with_suffix(".checked")
    check = _this_check(listing)
    if check is not None and checked.is_file() and checked.read_text() == check:
        return jars
    if _unlike_locked(jars):
        return None
    _note_check(listing)
    return jars


def _note_check(listing: Path) -> None:
    """Record for this boot that the hashes were compared."""
    check = _this_check(listing)
    if check is not None:
        partial = listing.with_suffix(".checked.part")
        partial.write_text(check)
        partial.replace(listing.with_suffix(".checked"))


def _discard(root: Path) -> None:
    """Remove the output of jgo, so that no damaged file is used again."""
    for name in ("jgo", "m2"):
        shutil.rmtree(root / name, ignore_errors=True)


def _missing_jgo() -> ConfigurationError:
    return ConfigurationError(
        f"The jars of Apache Kafka {KAFKA_VERSION} are not in {cache_dir()}, and jgo, "
        "which would fetch them, is not installed. Run "
        "`pip install 'kafka-marshal[broker]'`."
    )


def _unresolved(why: str) -> CoordinationError:
    return CoordinationError(
        f"The jars of Apache Kafka {KAFKA_VERSION} (45 files, 120 MB) could not be "
        f"fetched from Maven Central: {why}. With a network, run this again; without "
        f"one, copy {cache_dir()} from a machine that has it, or point "
        "KAFKA_MARSHAL_CACHE at such a copy."
    )


def _resolve(java: Java, root: Path) -> list[Path]:
    """Fetch the jars into ``root`` with jgo; check and return them."""
    # jgo looks for Java when it builds, and would download one.
    environment = dict(os.environ, JAVA_HOME=str(java.home), M2_REPO=str(root / "m2"))
    endpoint = _ENDPOINT.format(version=KAFKA_VERSION)
    command = [sys.executable, "-c", _RESOLVE, endpoint, str(root / "jgo")]
    why = ""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RESOLVE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = f"not done after {RESOLVE_TIMEOUT_S} s"
    else:
        if done.returncode == 0:
            place = Path(done.stdout.strip().splitlines()[-1])
            jars = sorted(place.glob("jars/*.jar")) + sorted(
                place.glob("modules/*.jar")
            )
            broken = [jar.name for jar in jars if not zipfile.is_zipfile(jar)]
            if not jars or broken:
                why = f"damaged files: {', '.join(broken) or 'none arrived'}"
            elif unlike := _unlike_locked(jars):
                why = f"these files differ from the locked hashes: {', '.join(unlike)}"
            else:
                return jars
        else:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    # Otherwise the next run would use a partial download.
    _discard(root)
    raise _unresolved(why)


def fetch_note() -> str | None:
    """Return the line to show before the jars are fetched; None if they are cached."""
    if _listing().is_file():
        return None
    return (
        f"Fetching Apache Kafka {KAFKA_VERSION} (120 MB) into {cache_dir()}; this "
        "happens once and takes a while."
    )


def _listing() -> Path:
    return cache_dir() / f"kafka-{KAFKA_VERSION}.list"


def kafka_jars(java: Java) -> list[Path]:
    """Return the jars that make up the class path of a Kafka broker.

    Args:
        java: The runtime that runs them.

    Returns:
        Paths of all jars; the first call on a machine downloads them.

    Raises:
        ConfigurationError: jgo is needed and not installed.
        CoordinationError: The jars could not be fetched.
        DeadlineExceeded: Another process did not finish fetching them.
    """
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    listing = _listing()
    with file_lock(root / "lock", timeout_s=RESOLVE_TIMEOUT_S):
        jars = _kept(listing)
        if jars is None:
            if find_spec("jgo") is None:
                raise _missing_jgo()
            if listing.exists():  # what it lists is damaged
                _discard(root)
            jars = _resolve(java, root)
            _write_list(listing, jars)
            _note_check(listing)
    return jars
