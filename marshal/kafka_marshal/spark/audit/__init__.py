"""The audit of the coordination log: tables of its history, and invariants of them.

``audit`` writes the tables, ``follow`` extends them as the log grows, ``Audit`` opens
them again, ``write_report`` writes an HTML page.
Names are imported on first use, so that importing this package needs no Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafka_marshal.spark.audit.folding import Bounds as Bounds
    from kafka_marshal.spark.audit.folding import Source as Source
    from kafka_marshal.spark.audit.following import await_end as await_end
    from kafka_marshal.spark.audit.following import follow as follow
    from kafka_marshal.spark.audit.invariants import INVARIANTS as INVARIANTS
    from kafka_marshal.spark.audit.invariants import Finding as Finding
    from kafka_marshal.spark.audit.invariants import check as check
    from kafka_marshal.spark.audit.job import Audit as Audit
    from kafka_marshal.spark.audit.job import audit as audit
    from kafka_marshal.spark.audit.plots import require_report as require_report
    from kafka_marshal.spark.audit.report import data_ends as data_ends
    from kafka_marshal.spark.audit.report import write_report as write_report
    from kafka_marshal.spark.requirements import spark_session as spark_session

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


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
