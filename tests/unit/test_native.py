"""The compiled part is used if it is there and of these sources."""

import sys
from types import ModuleType

from kafka_marshal import native


def test_what_is_missing_is_none():
    assert native.load("kafka_marshal._no_such_module") is None


def test_another_revision_is_not_used(monkeypatch):
    """An editable install keeps what earlier sources compiled to."""
    made = ModuleType("made_of_earlier_sources")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    assert native.load(made.__name__) is None
    monkeypatch.setattr(made, "REVISION", native.REVISION, raising=False)
    assert native.load(made.__name__) is made
    monkeypatch.setattr(made, "REVISION", native.REVISION + 1)
    assert native.load(made.__name__) is None
