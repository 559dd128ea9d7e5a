"""What members announce in the labels of their Member records (PROTOCOL 9.2, 9.5).

These are labels, not fields, because they are advice: older releases ignore them, and a
member without a label has the default. All functions here accept any labels.
"""

from collections.abc import Iterable, Mapping

from kafka_marshal.protocol.types import TopicPartition, encodable, whole_number

LAGGING_LABEL = "lagging"
WARMS_LABEL = "warms"
WEIGHT_LABEL = "weight"
PLANS_LABEL = "plans"
STANDBYS_LABEL = "standbys"
LAYOUT_LABEL = "layout"
"""The Config generation that a member acts on, while the partition count changes."""
TARGET_LABEL = "target"
RACK_LABEL = "rack"
REPLACES_LABEL = "replaces"
REPLACES_ANY = "*"
"""Text of ``replaces``: the member replaces some client, not known beforehand."""
FAILS_PREFIX = "fails:"
"""Prefix of the labels that name partitions which a member cannot serve, by topic."""
STANDBYS_MAX = 100
WEIGHT_MAX = 1_000  # also for the weights that other members announce
FAILING_MAX = 64
OWN_LABELS_MAX = 16
"""Maximum number of labels from a user; the others are reserved for the engine."""
_RESERVED = frozenset(
    {
        LAGGING_LABEL,
        LAYOUT_LABEL,
        PLANS_LABEL,
        STANDBYS_LABEL,
        WARMS_LABEL,
        WEIGHT_LABEL,
    }
)
_TEXT_MAX = 255
_NUMBER_MAX = 999_999_999


def number_of(labels: Mapping[str, str], name: str) -> int | None:
    """Return the number in a label, None without one."""
    return whole_number(labels.get(name, ""), most=_NUMBER_MAX)


def weight_of(labels: Mapping[str, str]) -> int:
    """Return the weight that a member announces, 1 without a label."""
    text = labels.get(WEIGHT_LABEL, "")
    if len(text) > len(str(WEIGHT_MAX)):
        return 1
    return min(max(1, number_of(labels, WEIGHT_LABEL) or 1), WEIGHT_MAX)


def standbys_label(labels: Mapping[str, str]) -> int:
    """Return up to which rank among a key's standbys a member stands by, 0 = never."""
    return min(number_of(labels, STANDBYS_LABEL) or 0, STANDBYS_MAX)


def failing_of(labels: Mapping[str, str]) -> tuple[TopicPartition, ...]:
    """Return the partitions that a member cannot serve, at most ``FAILING_MAX``."""
    found = [
        TopicPartition(name.removeprefix(FAILS_PREFIX), number)
        for name, text in sorted(labels.items())
        if name.startswith(FAILS_PREFIX)
        for each in text.split(",")
        if (number := whole_number(each, most=_NUMBER_MAX)) is not None
    ]
    return tuple(sorted(set(found))[:FAILING_MAX])


def failing_labels(failing: Iterable[TopicPartition]) -> dict[str, str]:
    """Return the labels that name these partitions, without those beyond the bounds.

    A label holds 255 characters, a Member 64 labels.
    """
    labels: dict[str, str] = {}
    for place in sorted(failing)[:FAILING_MAX]:
        name = f"{FAILS_PREFIX}{place.topic}"
        text = f"{labels[name]},{place.partition}" if name in labels else ""
        text = text or str(place.partition)
        if len(name) <= _TEXT_MAX and len(text) <= _TEXT_MAX:
            labels[name] = text
    return dict(list(labels.items())[: FAILING_MAX // 2])


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return a member's labels, by name, without those that only the engine uses."""
    return {name: labels[name] for name in sorted(labels.keys() - _RESERVED)}


def problem_of(name: str, text: str) -> str | None:
    """Return why a user cannot give a client this label, or None."""
    if name in _RESERVED or name.startswith(FAILS_PREFIX):
        return "is announced by the engine itself; give it another name"
    if not name or len(name) > _TEXT_MAX or len(text) > _TEXT_MAX:
        return (
            f"must have a name, and both name and text {_TEXT_MAX} characters at most"
        )
    if encodable(name + text) != name + text:
        return "has characters that UTF-8 cannot encode; give another name or text"
    if name == TARGET_LABEL and number_of({name: text}, name) is None:
        return f"is {text!r}, which is no whole number"
    return None
