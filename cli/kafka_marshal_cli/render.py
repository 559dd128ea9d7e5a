"""Renders answers as tables and JSON. Pure functions: no input, no output.

Every string may come from the log, where any writer can put control characters, so
each is escaped when it is shown (PROTOCOL 12).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

import attrs

SCHEMA = 1
NOTHING = "-"
JSON_TOKENS_MAX = 10_000
# Items of a list in one cell or fact: people cannot use a line of thousands of names.
ITEMS_MAX = 10
# A narrower column of text would have a word or two in each line.
TEXT_WIDTH_MIN = 16
GAP = "  "
BOLD, RESET = "\x1b[1m", "\x1b[0m"
_JSON_STRING_UNSAFE = re.compile(r"[^\x20-\x7e]")

Row = Mapping[str, Any]


def escape(text: str) -> str:
    r"""Return text without control characters: ``\x1b`` for ESC.

    A backslash is doubled, so that no text can look like an escape.
    """
    shown = text.replace("\\", "\\\\")
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else _escaped(c) for c in shown)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def escape_lines(text: str) -> str:
    """Escape text line by line; lines after the first are indented.

    A newline from the log then cannot begin a line that looks like our own.
    """
    first, *rest = text.split("\n")
    return "\n".join([escape(first), *(f"  {escape(line)}" for line in rest)])


def to_json(value: object, *, is_pretty: bool = False) -> str:
    """Return JSON in which every character is printable."""
    if is_pretty:
        return "".join(json_parts(value))
    return _printable(json.dumps(value, ensure_ascii=False))


def json_parts(value: object) -> Iterator[str]:
    """Yield pretty JSON in parts: the whole would be in memory several times."""
    tokens = json.JSONEncoder(ensure_ascii=False, indent=2).iterencode(value)
    while part := "".join(islice(tokens, JSON_TOKENS_MAX)):
        yield _printable(part)


def _printable(text: str) -> str:
    # Outside its strings JSON is plain ASCII; indentation adds newlines.
    return _JSON_STRING_UNSAFE.sub(_escaped_in_json, text)


def _escaped_in_json(found: re.Match[str]) -> str:
    character = found[0]
    if character == "\n" or character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    pairs = (units[i : i + 2].hex() for i in range(0, len(units), 2))
    return "".join(f"\\u{pair}" for pair in pairs)


@attrs.frozen
class Column:
    """One column of a table.

    Attributes:
        header: Its title.
        cell: Returns the text of a row's cell, not escaped.
        is_number: Whether it is aligned to the right.
    """

    header: str
    cell: Callable[[Row], str]
    is_number: bool = False


@attrs.frozen
class Section:
    """Rows of one kind.

    Attributes:
        name: Name of the list in JSON, such as ``claims``.
        rows: One JSON object each.
        columns: Columns of the table.
        less: Titles of the columns to omit first where a terminal is too narrow.
    """

    name: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    less: Sequence[str] = ()


@attrs.frozen
class Answer:
    """The result of a command.

    Attributes:
        as_of: Offsets and time of the state that it describes; for a view of the past
            also the moment (``at``).
        facts: Single values, in order.
        sections: Lists of rows.
        shown: Texts for people, for facts that differ from the plain value.
    """

    as_of: Mapping[str, Any]
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    sections: Sequence[Section] = ()
    shown: Mapping[str, str] = attrs.field(factory=dict)


_NUMBERS = ("_ms", "_count", "offset", "position", "granted", "generation", "lag")


def column(
    header: str, key: str, *, as_text: Callable[[Any], str] | None = None
) -> Column:
    """Return a column of one field, ``-`` if it is null."""
    shown = as_text or plain
    return Column(
        header,
        lambda row: NOTHING if row[key] is None else shown(row[key]),
        is_number=key.endswith(_NUMBERS),
    )


def plain(value: object) -> str:
    """Return a value as text for people."""
    match value:
        case None:
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return _listed(value)
        case dict():
            return ", ".join(f"{k}={plain(v)}" for k, v in value.items()) or NOTHING
        case _:
            return str(value)


def _listed(items: Sequence[object]) -> str:
    """Return items as text: the first ``ITEMS_MAX``, as JSON has all of them."""
    shown = ", ".join(plain(item) for item in items[:ITEMS_MAX]) or NOTHING
    left_out = len(items) - ITEMS_MAX
    return f"{shown} and {left_out} more" if left_out > 0 else shown


def document(answer: Answer) -> dict[str, Any]:
    """Return an answer as one JSON object."""
    lists = {section.name: list(section.rows) for section in answer.sections}
    return {"schema": SCHEMA, "as_of": dict(answer.as_of), **answer.facts, **lists}


def lines(answer: Answer) -> list[dict[str, Any]]:
    """Return an answer as JSON objects, one for each line."""
    head = {"schema": SCHEMA, "as_of": dict(answer.as_of)}
    found = []
    if answer.facts or not answer.sections:
        found.append({**head, "section": "facts", **answer.facts})
    for section in answer.sections:
        found += [{**head, "section": section.name, **row} for row in section.rows]
    return found


def _cells(section: Section) -> list[list[str]]:
    return [
        [escape(each.cell(row)) for each in section.columns] for row in section.rows
    ]


def _layout(
    titles: Sequence[str], cells: Sequence[Sequence[str]], width: int
) -> tuple[list[str], list[int]] | None:
    """Return the titles and widths of columns; None if the columns do not fit."""
    length = _length_of(cells)
    columns = list(zip(*cells, strict=True)) or [()] * len(titles)
    content = [max(map(length, column_), default=0) for column_ in columns]
    room = width - len(GAP) * (len(titles) - 1)
    widths = [max(len(t), n) for t, n in zip(titles, content, strict=True)]
    if sum(widths) <= room:
        return list(titles), widths
    folded = [title.replace(" ", "\n").replace("-", "-\n") for title in titles]
    heads = [max(map(len, title.split("\n"))) for title in folded]
    is_text = [any(" " in cell for cell in column_) for column_ in columns]
    widths = [max(h, n) for h, n in zip(heads, content, strict=True)]
    least = [
        max(h, min(n, TEXT_WIDTH_MIN)) if is_text_ else max(h, n)
        for h, n, is_text_ in zip(heads, content, is_text, strict=True)
    ]
    if sum(least) > room:
        return None
    # Narrow the widest columns to the same width; the other columns keep theirs.
    widest = room
    while sum(fit := _capped(widths, least, widest)) > room:
        widest -= 1
    return folded, fit


def _capped(widths: list[int], least: list[int], widest: int) -> list[int]:
    return [min(w, max(low, widest)) for w, low in zip(widths, least, strict=True)]


def fitting(
    section: Section, width: int, *, keeps_others: bool = False
) -> tuple[Section, list[str]]:
    """Return a section without the columns that do not fit, and their titles.

    Args:
        section: The section.
        width: Columns of the terminal.
        keeps_others: Omit only columns of ``less``. Otherwise then columns are omitted
            from the right: a table that is redrawn in place must fit the terminal.
    """
    cells = _cells(section)
    titles = [each.header for each in section.columns]
    shown, left_out = list(range(len(titles))), []
    first = [titles.index(title) for title in section.less if title in titles]
    others = [] if keeps_others else [i for i in reversed(shown) if i not in first]
    for index in [*first, *others]:
        chosen = [[row[i] for i in shown] for row in cells]
        if len(shown) == 1 or _layout([titles[i] for i in shown], chosen, width):
            break
        shown.remove(index)
        left_out.append(titles[index])
    columns = [section.columns[i] for i in shown]
    return attrs.evolve(section, columns=columns), left_out


def table(section: Section, *, width: int | None = None, is_color: bool = False) -> str:
    """Return a section as text in columns, folded to fit into a width if possible.

    Titles and text fold at spaces; names, times and numbers stay whole, so that they
    can be read and copied. If the table still does not fit, it gets its full width.

    rich takes half a millisecond for each row, so it only folds cells of excess width.

    Args:
        section: The section.
        width: Columns of the terminal; None for no limit.
        is_color: Whether headers may be bold.
    """
    cells = _cells(section)
    titles = [each.header for each in section.columns]
    length = _length_of(cells)
    widths = [max(map(length, column_)) for column_ in zip(titles, *cells, strict=True)]
    if width is not None and (found := _layout(titles, cells, width)) is not None:
        titles, widths = found
    folding = _Folding(length)
    numbers = [each.is_number for each in section.columns]
    sides = list(zip(widths, numbers, strict=True))
    # Combine the lines of titles from the last one: titles are aligned at the bottom.
    heads = zip_longest(*(title.split("\n")[::-1] for title in titles), fillvalue="")
    shown = [_line(head, sides, length) for head in heads][::-1]
    if is_color:
        shown = [f"{BOLD}{line}{RESET}" for line in shown]
    for row in cells:
        folded = [folding.lines(*each) for each in zip(row, widths, strict=True)]
        parts = zip_longest(*folded, fillvalue="")
        shown += [_line(part, sides, length) for part in parts]
    return "\n".join(shown)


def _line(
    cells: Sequence[str],
    sides: Sequence[tuple[int, bool]],
    length: Callable[[str], int],
) -> str:
    """Return a line of a table; its cells are at most as wide as their columns."""
    shown = []
    for cell, (wide, is_number) in zip(cells, sides, strict=True):
        text = cell.rstrip() if is_number else cell
        blank = " " * (wide - length(text))
        shown.append(blank + text if is_number else text + blank)
    return GAP.join(shown).rstrip()


def _length_of(cells: Sequence[Sequence[str]]) -> Callable[[str], int]:
    """Return the function that gives the width of these cells on a terminal."""
    if all(map(str.isascii, chain.from_iterable(cells))):
        return len
    from rich.cells import cell_len

    return cell_len


class _Folding:
    """Folds cells at spaces, with rich; folds equal cells only once.

    Args:
        length: Returns the width of a text on a terminal.
    """

    def __init__(self, length: Callable[[str], int]) -> None:
        self._length = length
        self._found: dict[tuple[str, int], list[str]] = {}

    def lines(self, cell: str, width: int) -> list[str]:
        """Return the lines of a cell, each at most ``width`` wide."""
        if self._length(cell) <= width:
            return [cell]
        found = self._found.get((cell, width))
        if found is None:
            found = self._found[cell, width] = self._folded(cell, width)
        return found

    def _folded(self, cell: str, width: int) -> list[str]:
        from rich.console import Console
        from rich.text import Text

        lines_ = Text(cell).wrap(Console(width=width), width, overflow="fold")
        return [line.plain for line in lines_]


def facts(answer: Answer) -> str:
    """Return the facts of an answer, one line each."""
    texts = {
        name: answer.shown.get(name, plain(value))
        for name, value in answer.facts.items()
    }
    titles = [_fact_title(name, text) for name, text in texts.items()]
    wide = max(map(len, titles), default=0)
    return "\n".join(
        f"{title + ':':<{wide + 1}} {escape(text)}"
        for title, text in zip(titles, texts.values(), strict=True)
    )


def _fact_title(name: str, text: str) -> str:
    """Return the title of a fact, with the unit only if its text is a bare number."""
    is_bare = text.partition(" ")[0].isdigit()
    return (name if is_bare else name.removesuffix("_ms")).replace("_", " ")


def people(answer: Answer, *, width: int | None = None, is_color: bool = False) -> str:
    """Return an answer as text for people."""
    parts = [f"as of: {escape(answer.as_of['at'])}"] if "at" in answer.as_of else []
    if answer.facts:
        parts.append(facts(answer))
    has_titles = len(answer.sections) > 1
    for section in answer.sections:
        if not section.rows:
            body = f"no {_title(section)}"
        else:
            body = _body(section, width=width, is_color=is_color)
            if has_titles:
                body = f"{_title(section).upper()}\n{body}"
        parts.append(body)
    return "\n\n".join(parts)


def _body(section: Section, *, width: int | None, is_color: bool) -> str:
    """Return a table, without columns of ``less`` where these have no room."""
    left_out: list[str] = []
    if width is not None:
        section, left_out = fitting(section, width, keeps_others=True)
    body = table(section, width=width, is_color=is_color)
    if left_out:
        body += f"\nno room for {', '.join(left_out)}; -o json shows all"
    return body


def _title(section: Section) -> str:
    return section.name.replace("_", " ")


def log_place(partition: int, offset: int | None) -> str:
    """Return partition and offset in the log, as ``--at`` takes them: ``3:100``."""
    return f"{partition}:{NOTHING if offset is None else offset}"
