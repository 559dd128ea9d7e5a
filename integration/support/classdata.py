"""Archives of the classes of Kafka brokers and of Spark: Java starts sooner from them.

A broker loads and verifies 9,000 classes each time, and Spark 15,000, which is half of
what their starts cost; the tests start dozens. Java writes an archive when it ends in
order, and ignores one that another class path or another Java has written.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from slices import HANG_S

from kafka_marshal.errors import MarshalError
from kafka_marshal.testing.broker import EmbeddedBroker
from kafka_marshal.testing.jars import kafka_jars
from kafka_marshal.testing.java import find_java

FOLDER = Path(__file__).resolve().parents[2] / "build" / "java"
SPARK_PROGRAM = Path(__file__).with_name("classdata_program.py")
# Java's other programs, such as Spark, would print that the archive is not theirs.
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
# Variable with options of Java for the drivers of Spark alone.
SPARK_OPTIONS = "SPARK_SUBMIT_OPTS"


def options(java_options: str) -> str:
    """Return Java's options with those that use the archive of Kafka's classes.

    It is made if needed. While another process makes it, or where brokers cannot start,
    the options stay as they are.
    """
    try:
        java = find_java()
        made_of = (java, kafka_jars(java))
        archive = _archive("kafka", made_of, _run_broker)
    except MarshalError:
        return java_options
    return f"{java_options} {_using(archive)}" if archive else java_options


def spark_options() -> str:
    """Return Java's options for Spark that use the archive of its classes, if any.

    It is made if needed, and not while another process makes it.
    """
    import pyspark

    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else None)
    # Java compares when each archive of its class path was changed.
    jars = sorted(Path(pyspark.__file__).with_name("jars").glob("*.jar"))
    changed_ns = [each.stat().st_mtime_ns for each in jars]
    made_of = (java and os.path.realpath(java), pyspark.__file__, changed_ns)
    archive = _archive("spark", made_of, _run_spark)
    return _using(archive) if archive else ""


def _using(archive: Path) -> str:
    return f"-XX:SharedArchiveFile={archive} {QUIET}"


def _archive(kind: str, made_of: object, run: Callable[[str], None]) -> Path | None:
    """Return an archive of the classes that ``run`` loads with given options."""
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    archive = FOLDER / f"{kind}-{name}.jsa"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{kind}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not archive.exists():
            making = archive.with_suffix(".new")
            run(f"-XX:ArchiveClassesAtExit={making} {QUIET}")
            if making.exists():
                making.replace(archive)
        return archive if archive.exists() else None


def _run_broker(java_options: str) -> None:
    with TemporaryDirectory() as folder:
        broker = EmbeddedBroker(
            data_dir=Path(folder), java_options=java_options.split()
        )
        broker.start().stop(timeout_ms=HANG_S * 1000)


def _run_spark(java_options: str) -> None:
    with TemporaryDirectory() as folder:
        program = subprocess.Popen(
            [sys.executable, SPARK_PROGRAM, folder],
            env=os.environ
            | {
                SPARK_OPTIONS: java_options,
                "PYSPARK_PYTHON": sys.executable,
                # Not the archive of Kafka's classes: Java would write none beside it.
                "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            # If it fails or hangs there is no archive, and tests are slower.
            program.wait(HANG_S)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
