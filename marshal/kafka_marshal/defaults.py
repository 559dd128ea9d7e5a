"""Default values that signatures, options and messages show.

They are separate from the code that they configure, to be shown without importing it.
"""

SERVERS = "localhost:9092"
COORDINATION_TOPIC = "__marshal"
CHECKPOINT_INTERVAL_MS = 300_000


def format_command(topic: str) -> str:
    """Return the command that formats a coordination topic, for messages."""
    option = "" if topic == COORDINATION_TOPIC else f" --coordination-topic {topic}"
    return f"marshal topic format{option}"
