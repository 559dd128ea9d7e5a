"""Brokers of another version than the locked one, for ``--kafka=VERSION``.

Their jars are not locked by hash, so no other run starts them.
"""

import os
import subprocess
import sys
from pathlib import Path

from kafka_marshal.testing import broker
from kafka_marshal.testing.jars import RESOLVE_TIMEOUT_S, cache_dir, file_lock
from kafka_marshal.testing.java import Java

ENDPOINT = "org.apache.kafka:kafka_2.13:{}+org.slf4j:slf4j-simple:1.7.36"
RESOLVE = (
    "import pathlib, sys, jgo; "
    "print(jgo.build(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2])).path)"
)


def use_version(version: str) -> None:
    """Let each ``EmbeddedBroker`` of this process run another version of Kafka."""

    def jars_of_version(java: Java) -> list[Path]:
        root = cache_dir()
        root.mkdir(parents=True, exist_ok=True)
        with file_lock(root / "lock", timeout_s=RESOLVE_TIMEOUT_S):
            done = subprocess.run(
                [sys.executable, "-c", RESOLVE, ENDPOINT.format(version), root / "jgo"],
                env=os.environ
                | {"JAVA_HOME": str(java.home), "M2_REPO": str(root / "m2")},
                stdout=subprocess.PIPE,
                text=True,
                timeout=RESOLVE_TIMEOUT_S,
                check=True,
            )
        place = Path(done.stdout.strip().splitlines()[-1])
        return sorted([*place.glob("jars/*.jar"), *place.glob("modules/*.jar")])

    broker.kafka_jars = jars_of_version
