"""Checks Spark, Python and Java on this host; opens a session for the commands."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_marshal.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PYSPARK_MIN = (4, 2)
PACKAGES = ("kafka_marshal", "pyarrow", "pandas")
ASK_S = 60
_ASK = f"""
import sys
from importlib.util import find_spec
missing = [name for name in {PACKAGES!r} if find_spec(name) is None]
print("%d.%d" % sys.version_info[:2], ",".join(missing) or "-")
"""
INSTALL = "pip install 'kafka-marshal[spark]'"
APP_NAME = "marshal spark audit"
MASTER_DEFAULT = "local[*]"


def require_spark() -> None:
    """Require the extra ``spark`` with a supported release of PySpark.

    Raises:
        ConfigurationError: PySpark is missing or too old, or a package is missing.
    """
    for name in ("pyspark", "pyarrow", "pandas"):
        try:
            _require(name)
        except ImportError as error:
            raise ConfigurationError(
                f"{name} cannot be imported ({error}); install the extra: {INSTALL}",
                setting="spark",
            ) from error
    try:
        found = version("pyspark")
    except PackageNotFoundError:  # part of a Spark distribution
        found = str(import_module("pyspark").__version__)
    if tuple(int(part) for part in found.split(".")[:2]) < PYSPARK_MIN:
        wanted = ".".join(map(str, PYSPARK_MIN))
        raise ConfigurationError(
            f"PySpark {found} is too old: Python data sources with admission control "
            f"came with {wanted}; upgrade: {INSTALL}",
            setting="spark",
        )


def _require(name: str) -> None:
    """Import a package; pandas is only searched for.

    Each Spark process that creates the data source calls this. It does not need pandas,
    whose import takes half a second of processor time.

    Raises:
        ImportError: The package is missing, or cannot be imported.
    """
    if name != "pandas":
        import_module(name)
    elif find_spec(name) is None:
        raise ImportError(f"No module named {name!r}")


def require_worker_python(python: str) -> None:
    """Require that Spark's workers on this host can load the data source.

    Spark starts workers on the driver too, for planning. Other hosts are not checked.

    Args:
        python: Name or path of the workers' Python, as in ``PYSPARK_PYTHON``.

    Raises:
        ConfigurationError: There is no such Python, its minor version differs from this
            one, or it lacks a package.
    """
    found = shutil.which(python)
    # Compare paths, not files: environments with different packages link to one file.
    if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
        return
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    remedy = (
        f"set PYSPARK_PYTHON to a Python {here} that has the package, such as "
        f"{sys.executable}, before the session is created"
    )
    if found is None:
        raise _wrong_python(f"there is no program {python} on this host; {remedy}")
    try:
        output = subprocess.run(
            [found, "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise _wrong_python(f"{found} cannot be run ({error}); {remedy}") from error
    there, missing = output
    if there != here:
        raise _wrong_python(
            f"{found} is Python {there}, and the driver's is {here}; {remedy}"
        )
    if missing != "-":
        raise _wrong_python(
            f"{found} has no package {missing}; run there: {INSTALL}, or {remedy}"
        )


def _wrong_python(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the Python of Spark's workers (PYSPARK_PYTHON): {why}",
        setting="PYSPARK_PYTHON",
    )


def require_java() -> Path:
    """Return the ``java`` command that Spark will start.

    Raises:
        ConfigurationError: There is no such command.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if java.exists():
            return java
        raise ConfigurationError(
            f"JAVA_HOME is {home!r}, and has no bin/java; Spark needs Java 17 or "
            "newer: correct JAVA_HOME, or unset it",
            setting="JAVA_HOME",
        )
    found = shutil.which("java")
    if found is None:
        raise ConfigurationError(
            "no java command was found; Spark needs Java 17 or newer: install one "
            "(Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME",
            setting="JAVA_HOME",
        )
    return Path(found)


@contextmanager
def spark_session(master: str | None = None) -> Iterator["SparkSession"]:
    """Yield the active session, else a new one, and stop a new one at the end.

    Args:
        master: Master of a new session; by default that of ``spark-submit``, else all
            cores of this machine.

    Raises:
        ConfigurationError: Spark cannot start.
    """
    require_spark()
    require_java()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    builder = SparkSession.builder.appName(APP_NAME)
    if master is not None or "PYSPARK_GATEWAY_PORT" not in os.environ:
        builder = builder.master(master or MASTER_DEFAULT)
    builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if master is None or master.startswith("local"):
        builder = builder.config("spark.driver.host", "localhost")
        builder = builder.config("spark.sql.shuffle.partitions", "8")
        # Workers use this Python, not the first python3 on the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        spark = builder.getOrCreate()
    except (PySparkException, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(
            f"Spark did not start with master {master or MASTER_DEFAULT!r}: "
            f"{lines[0]}; see its messages on standard error",
            setting="master",
        ) from error
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
