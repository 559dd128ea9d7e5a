"""Default values that signatures and options show.

Apart from the code that they configure, so that they can be shown without importing it.
"""

SERVERS = "localhost:9092"
COORDINATION_TOPIC = "__marshal"
CHECKPOINT_INTERVAL_MS = 300_000
