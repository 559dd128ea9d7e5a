"""The compiled part of the package, which is optional.

It repeats a few functions, many times as fast. Those in Python are the rule, and
run where nothing was compiled. ``hatch_build.py`` compiles ``native/``.
"""

from importlib import import_module
from types import ModuleType

REVISION = 10
"""Changes with what the compiled functions take or return."""


def load(name: str = "kafka_marshal._native") -> ModuleType | None:
    """Return the compiled module; None if it is missing, or of another revision.

    An editable install may have one that was compiled from earlier sources.
    """
    try:
        module = import_module(name)
    except ImportError:
        return None
    return module if getattr(module, "REVISION", None) == REVISION else None


compiled = load()
