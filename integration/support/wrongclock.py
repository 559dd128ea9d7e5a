"""Wrong clocks of brokers: replaces Kafka's own class for time.

To compile the class takes a JDK. libfaketime would not need one, but hangs the JVM.
"""

import os
import shutil
import subprocess
from pathlib import Path

from slices import HANG_S

from kafka_marshal.testing.jars import kafka_jars
from kafka_marshal.testing.java import find_java

SOURCE = Path(__file__).parent / "java/org/apache/kafka/common/utils/SystemTime.java"


def compiler() -> str | None:
    """Return the Java compiler beside the runtime, or the one on the path."""
    beside = find_java().home / "bin" / "javac"
    return str(beside) if beside.exists() else shutil.which("javac")


class Clocks:
    """The clocks of the nodes.

    Attributes:
        class_path: What a cluster must have ahead of Kafka's jars.
        java_options: Options that its nodes need.
    """

    def __init__(self, home: Path, nodes: int) -> None:
        self.class_path = [home / "classes"]
        self._files = {node: home / f"clock-{node}" for node in range(1, nodes + 1)}
        for node in self._files:
            self.set(node, 0)
        self.java_options = {
            node: (f"-Dmarshal.clock.file={path}",)
            for node, path in self._files.items()
        }
        jars = os.pathsep.join(map(str, kafka_jars(find_java())))
        subprocess.run(
            [compiler(), "-cp", jars, "-d", str(home / "classes"), str(SOURCE)],
            check=True,
            capture_output=True,
            timeout=HANG_S,
        )

    def set(self, node: int, ahead_ms: int) -> None:
        """Set a node's clock ahead, or behind with a negative number, at once."""
        path = self._files[node]
        partial = path.with_suffix(".new")
        partial.write_text(f"{ahead_ms}\n")
        partial.replace(path)

    def set_right(self) -> None:
        for node in self._files:
            self.set(node, 0)
