"""The one name for objects of kafka-python, which has no types."""

from typing import Any, TypeAlias

Untyped: TypeAlias = Any
