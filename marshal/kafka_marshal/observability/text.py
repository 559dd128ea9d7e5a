"""Strings from the log, made fit to be shown (PROTOCOL 12)."""

TEXT_CHARS_MAX = 500


def escaped(text: str) -> str:
    """Return a text without control characters, and not longer than is sensible.

    What a terminal or a log reader would act on (control characters, line
    breaks, direction marks) is written as an escape sequence; letters of any
    language stay as they are.
    """
    text = text[:TEXT_CHARS_MAX]
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )
