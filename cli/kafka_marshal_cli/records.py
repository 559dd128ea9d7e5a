"""Records of data topics as JSON objects."""

import base64
from typing import Any

from kafka_marshal import Record


def record_object(record: Record, handed_out_ms: int) -> dict[str, Any]:
    """Return the JSON object of a record."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "token": None if record.token is None else str(record.token),
        "timestamp": record.timestamp_ms,
        "handed_out_ms": handed_out_ms,
        **_text("key", record.key),
        **_text("value", record.value),
    }


def _text(name: str, value: bytes | None) -> dict[str, str | None]:
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
