"""Output of the demo: lines without a terminal, tables with one."""

from io import StringIO

import pytest
from rich.console import Console

from kafka_marshal_cli.demo.show import (
    Board,
    PartitionRow,
    Show,
    WorkerRow,
    changes,
    verdict_lines,
)
from kafka_marshal_cli.demo.verdict import Check, Verdict


def board(*holders):
    rows = tuple(
        PartitionRow(
            name=f"t-{number}", holder=holder, token="1.0.2", processed=5, produced=9
        )
        for number, holder in enumerate(holders)
    )
    return Board(
        "Work",
        rows,
        (WorkerRow(name="w1", pid=77, state="killed", held=1, processed=1_234),),
    )


def shown(*, is_terminal):
    text = StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100)
    return text, Show(console)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        pytest.param({}, {"t-0": None}, [], id="nothing-yet"),
        pytest.param(
            {},
            {"t-0": "a", "t-1": "a", "t-2": "b"},
            ["t-0, t-1: no owner -> a", "t-2: no owner -> b"],
            id="first",
        ),
        pytest.param({"t-0": "a"}, {"t-0": "b"}, ["t-0: a -> b"], id="taken"),
        pytest.param(
            {"t-0": "a"}, {"t-0": None}, ["t-0: a -> no owner"], id="released"
        ),
    ],
)
def test_changes_of_owners_are_grouped_into_lines(before, after, lines):
    assert changes(before, after) == lines


def test_without_a_terminal_only_changes_are_printed():
    text, show = shown(is_terminal=False)
    with show:
        show.step("Begin.")
        for holders in (["a", None], ["a", None], ["a", "b"]):
            show.update(board(*holders))
    lines = [line.strip() for line in text.getvalue().splitlines()]
    assert lines[0].endswith("s  Begin.")
    assert lines[1:] == ["t-0: no owner -> a", "t-1: no owner -> b"]
    assert "\x1b" not in text.getvalue()


def test_a_terminal_shows_the_table_of_partitions():
    text, show = shown(is_terminal=True)
    with show:
        show.update(board("a", None))
    for part in ("t-0", "no owner", "killed", "process 77", "1,234 records"):
        assert part in text.getvalue()


@pytest.mark.parametrize("held", [True, False])
def test_the_verdict_shows_which_checks_held(held):
    checks = (
        Check(
            name="Good", held=True, measured=0, bound=0, unit="", text="All is well."
        ),
        Check(name="Bad", held=held, measured=1, bound=0, unit="", text="See here."),
    )
    verdict = Verdict(
        delivery="amo",
        produced=10,
        processed=9,
        lost=((0, 1),),
        duplicated=0,
        checks=checks,
    )
    headline, figures, good, bad = verdict_lines(verdict)
    end = "every guarantee held." if held else "1 of 2 checks FAILED."
    assert headline == f"Verdict, at most once: {end}"
    assert figures == "  10 records produced, 9 processed, 1 lost, 0 duplicated"
    assert good == "  held: Good. All is well."
    assert bad == f"  {'held' if held else 'FAILED'}: Bad. See here."
    for is_terminal in (True, False):
        text, show = shown(is_terminal=is_terminal)
        show.verdict(verdict)
        assert "See here." in text.getvalue()
