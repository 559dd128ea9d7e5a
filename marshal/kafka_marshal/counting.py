"""Counts in messages: ``1 partition``, ``2 partitions``."""


def counted(count: int, one: str, *, many: str | None = None) -> str:
    """Return a count with its noun, and with what depends on the number.

    Args:
        count: The count.
        one: What follows the number 1.
        many: What follows any other number; by default ``one`` with an s.
    """
    if many is None:
        many = f"{one}s"
    return f"{count} {one if count == 1 else many}"
