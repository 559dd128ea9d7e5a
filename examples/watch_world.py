"""Print owners and pauses from the log, without joining a group.

    export MARSHAL_BOOTSTRAP_SERVER=localhost:9092
    python examples/watch_world.py            # everything
    python examples/watch_world.py billing    # one group

Reads ``__marshal`` to its end and writes nothing: permission to read is enough.
"""

import argparse
import os

from kafka_marshal import World


def main() -> None:
    """Print one line for each claim, and one for each pause."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", nargs="?")
    given = parser.parse_args()
    server = os.environ.get("MARSHAL_BOOTSTRAP_SERVER", "localhost:9092")
    world = World.open(server)
    for key, known in world.claims(given.group):
        who = "nobody" if known.owner is None else known.owner.client_id
        print(f"{key.group_id} {key.topic_partition} {who} at {known.position}")
    for partition in world.partitions:
        for group_id in partition.groups:
            pause = partition.active_pause(group_id)
            if pause is not None and given.group in {None, group_id}:
                print(
                    f"{group_id} is paused by {pause.client_id} until "
                    f"{pause.until_ms} (coordinating partition {partition.partition})"
                )


if __name__ == "__main__":
    main()
