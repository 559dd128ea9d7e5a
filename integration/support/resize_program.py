"""An admin that changes the number of coordinating partitions at a given moment.

Run as ``python resize_program.py SERVERS TOPIC COUNT``; it begins at a line on stdin.
"""

import sys

from kafka_marshal import Admin


def main() -> int:
    """Plan the change, wait for a line on stdin, then make it."""
    servers, topic, count = sys.argv[1:]
    with Admin(servers, coordination_topic=topic) as admin:
        admin.resize_topic(int(count))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        admin.resize_topic(int(count), execute=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
