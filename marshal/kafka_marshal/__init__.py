"""Share Kafka topics among processes by claims kept in a topic."""

__version__ = "0.1.0"
