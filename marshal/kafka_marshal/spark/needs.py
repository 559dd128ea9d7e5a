"""What Spark needs of the machine, and one clear sentence where it is missing."""

import os
import shutil
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kafka_marshal.errors import ConfigurationError

PYSPARK_MIN = (4, 2)
INSTALL = "pip install 'kafka-marshal[spark]'"


def require_spark() -> None:
    """Raise unless the extra ``spark`` is there, and new enough.

    Raises:
        ConfigurationError: It is not.
    """
    for name in ("pyspark", "pyarrow", "pandas"):
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"{name} cannot be imported ({error}); install the extra: {INSTALL}",
                setting="spark",
            ) from error
    try:
        found = version("pyspark")
    except PackageNotFoundError:  # part of a distribution of Spark's own
        found = str(import_module("pyspark").__version__)
    if tuple(int(part) for part in found.split(".")[:2]) < PYSPARK_MIN:
        wanted = ".".join(map(str, PYSPARK_MIN))
        raise ConfigurationError(
            f"PySpark {found} is too old: Python data sources with admission control "
            f"came with {wanted}; upgrade: {INSTALL}",
            setting="spark",
        )


def require_java() -> Path:
    """Return the ``java`` command that Spark would start.

    Raises:
        ConfigurationError: There is none.
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
