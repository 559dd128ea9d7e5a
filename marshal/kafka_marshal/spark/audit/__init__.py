"""The audit of the coordination log: tables of what was, and what must hold of them.

``audit`` writes them, ``follow`` goes on as the log grows, ``Audit`` opens them again,
``write_report`` draws a page.
Names are looked up when they are asked for, so that importing this needs no Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafka_marshal.spark.audit.folding import Bounds, Source
    from kafka_marshal.spark.audit.following import await_end, follow
    from kafka_marshal.spark.audit.invariants import INVARIANTS, Finding, check
    from kafka_marshal.spark.audit.job import Audit, audit
    from kafka_marshal.spark.audit.plots import require_report
    from kafka_marshal.spark.audit.report import data_ends, write_report
    from kafka_marshal.spark.requirements import spark_session

_HOMES = {
    "Audit": "job",
    "Bounds": "folding",
    "Finding": "invariants",
    "INVARIANTS": "invariants",
    "Source": "folding",
    "audit": "job",
    "await_end": "following",
    "check": "invariants",
    "data_ends": "report",
    "follow": "following",
    "require_report": "plots",
    "spark_session": ".requirements",
    "write_report": "report",
}

__all__ = [
    "INVARIANTS",
    "Audit",
    "Bounds",
    "Finding",
    "Source",
    "audit",
    "await_end",
    "check",
    "data_ends",
    "follow",
    "require_report",
    "spark_session",
    "write_report",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
