"""A client of a sidecar with a child that works for it, in plain HTTP.

Run as ``python family_program.py SOCKET BASE TOPIC``. It registers itself and
its child, consumes a topic, prints the child's id, and sends heartbeats until it is
killed. The child outlives it.
"""

import secrets
import subprocess
import sys
import time

import httpx


def main() -> None:
    """Live until killed."""
    path, base, topic = sys.argv[1:4]
    instance = secrets.token_hex(16)
    child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    transport = httpx.HTTPTransport(uds=path, verify=False)
    headers = {"Marshal-Instance": instance}
    with httpx.Client(
        transport=transport, base_url="http://sidecar", headers=headers, timeout=30
    ) as client:
        registration = {"instance": instance, "beat_ms": 500}
        client.put(base, json=registration).raise_for_status()
        client.put(f"{base}/children", json={"pids": [child.pid]}).raise_for_status()
        wants = {"topics": [topic]}
        client.put(f"{base}/subscriptions/1", json=wants).raise_for_status()
        sys.stdout.write(f"{child.pid}\n")
        sys.stdout.flush()
        while True:
            client.post(f"{base}/beat", json={}).raise_for_status()
            time.sleep(0.2)


if __name__ == "__main__":
    main()
