"""`marshal claims watch`, with a log in memory: lines, JSON and the table."""

import json
from contextlib import nullcontext
from io import StringIO
from types import SimpleNamespace

import pytest
from logkit import OP, H, beat, claim, pause, release
from rich.console import Console
from rich.live import Live
from typer.testing import CliRunner
from watchkit import Story

from kafka_marshal import CoordinationError, Key, TopicPartition
from kafka_marshal.protocol.records import ReleaseGroup
from kafka_marshal.views.watch import Change
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands.claims_watch import (
    CHANGES_SHOWN,
    DRAWN_EVERY_S_MAX,
    DRAWN_EVERY_S_MIN,
    LOG_ENDS_EVERY_S,
    REST_S_MAX,
    Selection,
    TableView,
    change_row,
    change_text,
)
from kafka_marshal_cli.shared import Call

OTHER = Key("h", "u", 1)
T0 = TopicPartition("t", 0)


@pytest.fixture
def story():
    return Story()


@pytest.fixture
def watching(story, monkeypatch):
    """Run the command; call a function of ``then`` before each reading of changes."""

    def run(*arguments, then=()):
        watch = story.watch()
        planned = list(then)
        changes = watch.changes

        def next_changes(timeout_ms):
            if planned:
                planned.pop(0)()
            return changes(timeout_ms)

        monkeypatch.setattr(watch, "changes", next_changes)
        monkeypatch.setattr(Call, "watch", lambda call, **_: watch)
        admin = nullcontext(SimpleNamespace(log_ends=lambda _: {T0: 9}))
        monkeypatch.setattr(Call, "admin", lambda call: admin)
        return CliRunner().invoke(app, ["claims", "watch", *arguments])

    return run


def words(outcome):
    """Return the lines without their times."""
    return [line.partition("Z ")[2] for line in outcome.stdout.splitlines()]


def test_lines_show_present_claims_and_then_changes(story, watching):
    epoch = story.write(claim("c1"))
    story.write(beat(epoch, 7))

    def let_go():
        story.write(release(epoch, 9))
        story.write(claim("c2"))

    outcome = watching("--count", "2", then=[let_go])
    assert outcome.exit_code == 0, outcome.stderr
    era = story.watch().world().config().era
    assert words(outcome) == [
        f"held     g t-0 by c1, token {era}.0.1, position 7, lag 2",
        "released g t-0 by c1, position 9, at 0:3",
        f"claimed  g t-0 by c2, token {era}.0.4, position 9, at 0:4",
    ]


def test_a_takeover_names_both_owners(story, watching):
    story.write(claim("c1"))
    outcome = watching(
        "--only-changes",
        "--count",
        "1",
        then=[lambda: story.write(claim("c2"), after=2 * H + 1)],
    )
    assert words(outcome) == ["lost     g t-0 of c1, to c2, at 0:2"]


def test_json_lines_have_claims_and_then_changes(story, watching):
    epoch = story.write(claim("c1"))
    outcome = watching(
        "-o", "jsonl", "--count", "1", then=[lambda: story.write(release(epoch, 9))]
    )
    held, released = map(json.loads, outcome.stdout.splitlines())
    assert (held["section"], held["owner"]["client_id"]) == ("claims", "c1")
    assert (held["log_end_offset"], held["lag"]) == (9, None)
    assert released["section"] == "changes"
    assert released["schema"] == held["schema"] == 1
    assert released["as_of"]["offsets"] == {"0": 3}
    assert released["as_of"]["time_ms"]
    assert {n: released[n] for n in ("change", "client_id", "position", "offset")} == {
        "change": "released",
        "client_id": "c1",
        "position": 9,
        "offset": 2,
    }


def test_log_ends_are_requested_at_intervals(story):
    story.write(claim("c1"))
    world, now_s, asked = story.watch().world(), [0.0], []

    def ask(wanted):
        asked.append(wanted)
        return {T0: len(asked)}

    wanted = Selection(None, None, log_ends=ask, now_s=lambda: now_s[0])

    def end(**away):
        return wanted.rows(world, **away)[0]["log_end_offset"]

    assert [end(), end()] == [1, 1]
    now_s[0] = LOG_ENDS_EVERY_S
    assert [end(is_away=True), end()] == [1, 2], "nobody is asked during an outage"
    assert asked == [{T0}, {T0}]


def test_only_claims_of_the_given_group_or_topic_are_shown(story, watching):
    def both():
        story.write(claim("c1"))
        story.write(claim("c1", key=OTHER))

    outcome = watching("--group", "h", "--count", "1", then=[both])
    assert "h u-1 by c1" in outcome.stdout
    assert "t-0" not in outcome.stdout
    outcome = watching("--topic", "t", "--timeout", "1ms")
    assert "t-0 by c1" in outcome.stdout
    assert "u-1" not in outcome.stdout


def test_a_pause_has_its_reason_and_end(story, watching):
    until_ms = story.clock.wall_ms() + 10_000
    why = ReleaseGroup(
        client_id="admin",
        group_id="g",
        incarnation=bytes(16),
        seq=0,
        op_id=OP,
        msg_expire_time=until_ms,
        reason="deploy\x1b[31m",
    )
    outcome = watching(
        "--count",
        "2",
        then=[lambda: story.write(why), lambda: story.write(pause(0, seq=1))],
    )
    first = words(outcome)[0]
    assert first.startswith("paused   g by admin, until ")
    assert r"reason: deploy\x1b[31m" in first
    assert "\x1b" not in outcome.stdout


def test_watching_ends_if_nothing_changes_within_the_timeout(watching):
    outcome = watching("--timeout", "1ms")
    assert (outcome.exit_code, outcome.stdout) == (0, "")


def test_a_topic_that_is_not_formatted_is_refused(monkeypatch):
    bare = Story(partitions=0)
    bare.kafka.delete_topic("__marshal")
    bare.kafka.create_topic("__marshal", 1, is_log_append_time=True)
    watch = bare.watch()
    monkeypatch.setattr(Call, "watch", lambda call, **_: watch)
    outcome = CliRunner().invoke(app, ["claims", "watch"])
    assert outcome.exit_code == 3
    assert "marshal topic format" in outcome.stderr


def test_an_outage_is_reported_on_stderr_and_survived(story, watching):
    def cut():
        story.log.cut = True
        story.clock.advance(10_000)

    def mend():
        story.log.cut = False
        story.write(claim("c1"))

    outcome = watching("--count", "1", then=[cut, mend])
    assert words(outcome)[0].startswith("claimed")
    away, back = outcome.stderr.splitlines()
    assert "do not answer" in away
    assert "answer again" in back


def test_ctrl_c_exits_with_code_130(watching):
    def interrupt():
        raise KeyboardInterrupt

    assert watching(then=[interrupt]).exit_code == 130


@pytest.fixture
def board(story):
    now_s = [0.0]
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=120, height=30)
    live = Live(console=console, auto_refresh=False, redirect_stdout=False)
    board = TableView(live, Selection(None, None), now_s=lambda: now_s[0])
    board.now_s, board.screen = now_s, screen  # type: ignore[attr-defined]
    return board


def test_the_table_is_drawn_at_changes_and_at_intervals(story, board):
    story.write(claim("c1"))
    watch = story.watch()

    def drawn(after_s):
        board.now_s[0] += after_s
        before = len(board.screen.getvalue())
        board.refresh(watch.world(), watch.outage)
        return board.screen.getvalue()[before:]

    with board._live:
        assert "c1" in drawn(0)
        assert drawn(DRAWN_EVERY_S_MIN) == ""
        assert "1 claim at" in drawn(DRAWN_EVERY_S_MAX)
        story.write(claim("c2"), after=2 * H + 1)
        for change in watch.changes(0):
            board.on_change(change, watch.world())
        view_of = drawn(DRAWN_EVERY_S_MIN)
        assert "lost     g t-0 of c1, to c2" in view_of
        watch.outage = CoordinationError("gone\x1b[31m")
        assert r"DO NOT ANSWER: gone\x1b[31m" in drawn(DRAWN_EVERY_S_MIN)


def test_a_terminal_that_is_resized_is_cleared_before_the_next_drawing(story, board):
    """It has folded the lines drawn before; erasing as many leaves some of them."""
    clear = "\x1b[2J"
    story.write(claim("c1"))
    world = story.watch().world()
    with board._live:
        board.start(world)
        assert clear not in board.screen.getvalue()
        board._live.console.size = (60, 12)
        board.now_s[0] += DRAWN_EVERY_S_MIN
        board.refresh(world, None)
        before, drawn = board.screen.getvalue().split(clear)
        assert "c1" in before
        assert "c1" in drawn
        board.now_s[0] += DRAWN_EVERY_S_MAX
        board.refresh(world, None)
        assert board.screen.getvalue().count(clear) == 1


@pytest.mark.parametrize(("takes_s", "rest_s"), [(2.5, 10.0), (60.0, REST_S_MAX)])
def test_a_table_that_is_slow_to_draw_is_drawn_less_often(
    story, board, takes_s, rest_s
):
    story.write(claim("c1"))
    world, draws = story.watch().world(), []

    def update(drawn, *, refresh):
        assert refresh
        draws.append(drawn)
        board.now_s[0] += takes_s

    board._live.update = update
    board.start(world)
    for after_s, count in ((rest_s - 1, 1), (1, 2), (rest_s - 1, 2), (1, 3)):
        board.now_s[0] += after_s
        board.refresh(world, None)
        assert len(draws) == count


def test_a_tiny_terminal_shows_claims_and_not_what_has_no_room(story):
    for partition in range(20):
        story.write(claim("worker-with-name", key=Key("g", "t", partition)))
    console = Console(file=StringIO(), force_terminal=True, width=30, height=6)
    live = Live(console=console, auto_refresh=False, redirect_stdout=False)
    board = TableView(live, Selection(None, None))
    drawn = console.render_lines(board._drawn(story.watch().world(), None), pad=False)
    shown = ["".join(part.text for part in line).rstrip() for line in drawn]
    assert len(shown) <= 6
    assert "room for 9 columns" in " ".join(shown[:3])
    assert shown[-2].startswith("g ")


def test_the_table_fits_into_a_small_terminal(story):
    for partition in range(20):
        story.write(claim("worker-with-name", key=Key("g", "t", partition)))
    watch = story.watch()
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=12)
    live = Live(console=console, auto_refresh=False, redirect_stdout=False)
    board = TableView(live, Selection(None, None))
    board.start(watch.world())
    for _ in range(3):
        board.on_change(
            Change(what="unpaused", group_id="g", partition=1, offset=5, time_ms=9),
            watch.world(),
        )
    drawn = console.render_lines(board._drawn(watch.world(), None), pad=False)
    shown = ["".join(part.text for part in line).rstrip() for line in drawn]
    assert len(shown) <= 12
    assert max(map(len, shown)) <= 60
    assert "no room for" in shown[0]
    assert any(line.startswith("... and ") for line in shown)
    assert "unpaused" in " ".join(shown[-3:])
    assert any("worker-with-name" in line for line in shown)


def test_long_changes_leave_most_of_a_small_terminal_to_claims(story):
    """The newest change is shown whole, and no line is cut off."""
    for partition in range(6):
        story.write(claim("c1", key=Key("g", "t", partition)))
    watch = story.watch()
    console = Console(file=StringIO(), force_terminal=True, width=80, height=18)
    live = Live(console=console, auto_refresh=False, redirect_stdout=False)
    board = TableView(live, Selection(None, None))
    for offset in range(CHANGES_SHOWN):
        reason = f"reason {offset}, {'which is long ' * 8}its end"
        board.on_change(
            Change(
                what="unpaused",
                group_id="g",
                reason=reason,
                partition=1,
                offset=offset,
                time_ms=9,
            ),
            watch.world(),
        )
    drawn = console.render_lines(board._drawn(watch.world(), None), pad=False)
    shown = ["".join(part.text for part in line).rstrip() for line in drawn]
    assert len(shown) <= 18
    assert sum(" c1 " in line for line in shown) == 6
    assert f"at 1:{CHANGES_SHOWN - 1}" in shown[-1]


def test_claims_without_a_fresh_owner_are_first_in_a_small_terminal(story):
    """Claims that need attention are not cut off."""
    for partition in range(19):
        story.write(claim("c1", key=Key("g", "t", partition)))
    epoch = story.write(claim("c1", key=Key("g", "t", 19)))
    story.write(release(epoch, key=Key("g", "t", 19)))
    watch = story.watch()
    console = Console(file=StringIO(), force_terminal=True, width=160, height=12)
    live = Live(console=console, auto_refresh=False, redirect_stdout=False)
    board = TableView(live, Selection(None, None))

    def drawn():
        lines = console.render_lines(board._drawn(watch.world(), None), pad=False)
        return ["".join(part.text for part in line).rstrip() for line in lines]

    head, _, first, second, *_ = drawn()
    assert head.startswith("20 claims (19 fresh, 1 without owner) at ")
    assert first.split()[2] == "19"
    assert second.split()[2] == "0"
    live.console.height = 40
    assert drawn()[2].split()[2] == "0"


def test_a_change_without_a_claim_has_null_fields_in_json():
    row = change_row(
        Change(what="unpaused", group_id="g", partition=1, offset=5, time_ms=9), 77
    )
    assert (row["topic"], row["incarnation"], row["token"]) == (None, None, None)
    assert row["as_of"] == {"time_ms": 77, "offsets": {"1": 6}}
    assert change_text(
        Change(what="unpaused", group_id="g", partition=1, offset=5, time_ms=0)
    ).endswith("unpaused g, at 1:5")
