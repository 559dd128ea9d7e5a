"""An archive of the classes of a Kafka broker, from which Java starts it sooner.

A broker loads and verifies 9,000 classes each time, which is half of what its start
costs, and the tests start dozens. Java writes the archive when it ends in order, and
ignores one that another class path or another Java has written.
"""

import fcntl
import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

from kafka_marshal.errors import MarshalError
from kafka_marshal.testing.broker import EmbeddedBroker
from kafka_marshal.testing.jars import kafka_jars
from kafka_marshal.testing.java import find_java

FOLDER = Path(__file__).resolve().parents[2] / "build" / "java"
# Java's other programs, such as Spark, would print that the archive is not theirs.
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
WRITTEN_MS_MAX = 120_000


def options(java_options: str) -> str:
    """Return Java's options with those that use the archive, which is made if needed.

    While another process makes it, or where brokers cannot start, they stay as they
    are.
    """
    try:
        archive = _archive()
    except MarshalError:
        return java_options
    if archive is None:
        return java_options
    return f"{java_options} -XX:SharedArchiveFile={archive} {QUIET}"


def _archive() -> Path | None:
    java = find_java()
    made_of = repr((java, kafka_jars(java)))
    name = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    archive = FOLDER / f"kafka-{name}.jsa"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not archive.exists():
            _make(archive)
        return archive if archive.exists() else None


def _make(archive: Path) -> None:
    making = archive.with_suffix(".new")
    java_options = (f"-XX:ArchiveClassesAtExit={making}", *QUIET.split())
    with TemporaryDirectory() as folder:
        broker = EmbeddedBroker(data_dir=Path(folder), java_options=java_options)
        broker.start().stop(timeout_ms=WRITTEN_MS_MAX)
    if making.exists():
        making.replace(archive)
