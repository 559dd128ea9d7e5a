"""The eras of earlier Configs, which tokens of standing claims have (PROTOCOL 4.10).

Each is an offset and an era: that of the Config that ended it, and its own; the oldest
comes first.
"""

from bisect import bisect_right
from collections.abc import Iterable

Eras = tuple[tuple[int, int], ...]

ERAS_MAX = 64
"""Most eras that a coordinating partition keeps."""


def era_at(eras: Eras, offset: int) -> int | None:
    """Return the era in force at an offset, None if it is that of the present Config.

    For offsets whose era is no longer kept, it is the next one that is.
    """
    at = _index(eras, offset)
    return eras[at][1] if at < len(eras) else None


def end_era(eras: Eras, ended: tuple[int, int], *, epochs: Iterable[int]) -> Eras:
    """Return the eras to keep when a Config has ended one.

    Beyond `ERAS_MAX` the oldest is dropped that has none of the epochs; the oldest of
    all where each has one.

    Args:
        eras: Those kept so far.
        ended: The offset of the new Config, and the era that it ends.
        epochs: Epochs of standing claims; read only where one has to be dropped.
    """
    found = (*eras, ended)
    if len(found) <= ERAS_MAX:
        return found
    used = {_index(found, epoch) for epoch in epochs}
    at = next((at for at in range(len(found)) if at not in used), 0)
    return found[:at] + found[at + 1 :]


def _index(eras: Eras, offset: int) -> int:
    """Return the place of an offset's era, the number of eras for the present one."""
    return bisect_right(eras, offset, key=lambda each: each[0])
