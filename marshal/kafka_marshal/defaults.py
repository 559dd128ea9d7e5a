"""Default values that signatures and options show, and messages name.

Apart from the code that they configure, so that they can be shown without importing it.
"""

SERVERS = "localhost:9092"
COORDINATION_TOPIC = "__marshal"
CHECKPOINT_INTERVAL_MS = 300_000


def format_command(topic: str) -> str:
    """Return the command that formats a coordination topic, for messages."""
    option = "" if topic == COORDINATION_TOPIC else f" --coordination-topic {topic}"
    return f"marshal topic format{option}"
