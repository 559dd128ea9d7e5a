"""An archive of the classes of Kafka brokers: Java starts sooner from it.

A broker loads and verifies 9,000 classes each time, which is half of what its start
costs; the tests start dozens. Java writes an archive when it ends in order, and ignores
one that another class path or another Java has written. An archive for Spark would cost
as much as it saves: the tests start a dozen drivers.
"""

import fcntl
import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

from slices import HANG_S

from kafka_marshal.errors import MarshalError
from kafka_marshal.testing.broker import EmbeddedBroker
from kafka_marshal.testing.jars import kafka_jars
from kafka_marshal.testing.java import find_java

FOLDER = Path(__file__).resolve().parents[2] / "build" / "java"
# Java's other programs, such as Spark, would print that the archive is not theirs.
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def options(java_options: str) -> str:
    """Return Java's options with those that use the archive of Kafka's classes.

    It is made if needed. While another process makes it, or where brokers cannot start,
    the options stay as they are.
    """
    try:
        java = find_java()
        archive = _archive((java, kafka_jars(java)))
    except MarshalError:
        return java_options
    if archive is None:
        return java_options
    return f"{java_options} -XX:SharedArchiveFile={archive} {QUIET}"


def _archive(made_of: object) -> Path | None:
    """Return an archive of the classes that a broker loads."""
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    archive = FOLDER / f"kafka-{name}.jsa"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "kafka.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not archive.exists():
            making = archive.with_suffix(".new")
            _run_broker(f"-XX:ArchiveClassesAtExit={making} {QUIET}")
            if making.exists():
                making.replace(archive)
        return archive if archive.exists() else None


def _run_broker(java_options: str) -> None:
    with TemporaryDirectory() as folder:
        broker = EmbeddedBroker(
            data_dir=Path(folder), java_options=java_options.split()
        )
        broker.start().stop(timeout_ms=HANG_S * 1000)
