"""Policies: which partitions a member claims, keeps and releases (PROTOCOL 1.6).

A policy is a function from a ``View`` to a ``Plan``. A wrong plan harms no record,
because the log judges every claim. Other packages provide policies under the entry
point group ``kafka_marshal.policies``; ``kafka_marshal.testing.policies`` tests whether
a policy behaves.
"""

from collections.abc import Callable
from importlib import metadata

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.planner import (
    KeyView,
    MemberView,
    Plan,
    Policy,
    Release,
    View,
    fair,
    greedy,
    topic,
)

__all__ = [
    "BUILT_IN",
    "ENTRY_POINTS",
    "KeyView",
    "MemberView",
    "Plan",
    "Policy",
    "Release",
    "View",
    "fair",
    "find_policy",
    "greedy",
    "policy_names",
    "topic",
]

ENTRY_POINTS = "kafka_marshal.policies"
BUILT_IN: dict[str, Policy] = {"fair": fair, "greedy": greedy, "topic": topic}


def policy_names() -> tuple[str, ...]:
    """Return the names that ``policy=`` accepts: built-in and installed policies."""
    installed = {point.name for point in metadata.entry_points(group=ENTRY_POINTS)}
    return tuple(sorted(installed | set(BUILT_IN)))


def find_policy(policy: str | Policy) -> Policy:
    """Return the policy of a name, or the given policy itself.

    A name is looked up among the built-in policies, then in installed packages. If an
    entry point names a class, each consumer gets its own object, so that a policy may
    have state.

    Raises:
        ConfigurationError: There is no such policy, or it cannot be loaded.
    """
    if callable(policy):
        return _made(policy, "given")
    name: object = policy
    found = BUILT_IN.get(policy) if isinstance(name, str) else None
    if found is not None:
        return found
    points = tuple(metadata.entry_points(group=ENTRY_POINTS, name=policy))
    if not points:
        raise ConfigurationError(
            f"unknown policy {policy!r}; known are: {', '.join(policy_names())}",
            setting="policy",
        )
    if len({point.value for point in points}) > 1:
        values = ", ".join(sorted(point.value for point in points))
        raise ConfigurationError(
            f"policy {policy!r} is provided by more than one package: {values}; "
            "uninstall all but one, or pass the policy itself",
            setting="policy",
        )
    try:
        loaded = points[0].load()
    except Exception as error:  # a foreign module may raise anything
        raise ConfigurationError(
            f"policy {policy!r} cannot be loaded from {points[0].value}: {error!r}",
            setting="policy",
        ) from error
    return _made(loaded, points[0].value)


def _made(loaded: Callable[..., object], origin: str) -> Policy:
    """Return a loaded function itself, or an object of a loaded class."""
    try:
        made: object = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:  # a foreign class may raise anything
        raise ConfigurationError(
            f"the policy {origin} cannot be made without arguments: {error!r}",
            setting="policy",
        ) from error
    if not callable(made):
        raise ConfigurationError(
            f"the policy {origin} is {made!r}; it must be a function of a View that "
            "returns a Plan, or a class of such objects",
            setting="policy",
        )
    return made
