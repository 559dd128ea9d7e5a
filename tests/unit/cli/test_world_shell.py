"""The commands of `marshal shell`, with a world in memory."""

import copy
import json
import re
from itertools import chain
from pathlib import Path

import pytest
from logkit import (
    OP,
    START_MS,
    H,
    Log,
    beat,
    claim,
    config,
    decide,
    growth,
    ident,
    member,
    messages,
    pause,
    schedule,
    stage,
)
from msgspec.structs import replace

from kafka_marshal import World
from kafka_marshal.engine.pause_notes import PauseNote
from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.types import Key
from kafka_marshal_cli.commands.log_states import difference
from kafka_marshal_cli.terminal import WIDTH_DEFAULT
from kafka_marshal_cli.world_shell import COMMANDS, Session, Source
from kafka_marshal_cli.world_tree import tree_of

GOLDEN = Path(__file__).with_name("world_shell.txt")
HOSTILE = "\x1b[31mred\u202e"


def a_log():
    """Return a log with owned keys, also /checkpoint, a member and garbage."""
    log = Log(level=2)
    payments = [Key("billing", "payments", number) for number in (2, 10)]
    for key in payments:
        log.claimed("w1", key=key)
    log.append(beat(1, 40, client="w1", key=payments[0]))
    log.append(messages(2, 7, 9, client="w1", key=payments[1]))
    log.claimed("c1", key=Key("marshal", "/checkpoint", 0))
    log.append(replace(member("w1", group="billing"), host=HOSTILE))
    log.append(b"\x1b garbage")
    log.claimed("c1")
    return log


def set_positions(log):
    """Commit a set position of the group ``g``."""
    log.append(pause(START_MS + 90 * H), after=3 * H)
    assert log.outcome_of(stage((0, 4))) == "staged"
    assert log.outcome_of(decide()) == "decided"


class Bench:
    """A session with collected output, and the log that it reads."""

    def __init__(self, log=None, **settings):
        self.log = log or a_log()
        self.before = copy.deepcopy(self.log.state)
        self.failure = None
        self.lines = []
        self.session = Session(
            Source(self._read, self._differences),
            emit=self.lines.append,
            notify=lambda text: self.lines.append(f"! {text}"),
            **settings,
        )

    def _read(self):
        if self.failure is not None:
            raise self.failure
        notes = {("g", OP): PauseNote(HOSTILE)}
        world = World([self.log.state], {}, cluster_id="c", notes=notes)
        return tree_of(world, topic="__marshal")

    def _differences(self, other):
        assert other == "before"
        return difference({0: self.log.state}, {0: self.before})

    def __call__(self, line):
        del self.lines[:]
        self.session.run(line)
        return list(self.lines)


@pytest.fixture
def bench():
    return Bench()


SCRIPT = """
pwd
ls
ls /groups /groups/billing
cd groups/billing/keys/payments
ls
cat 2/position 10/granted
cat 2/owner
cat */token
cd ../../members/w1
cat *
cd /groups/marshal/keys
tree .
cd
cat topic config
find partitions -name *time_ms
cat partitions/0/counters partitions/0/undecodable
cat /groups/g/pause /groups/g/verdict
refresh
# a comment
cat /groups/g/verdict
cat /groups/g/keys/t/0/lock
diff before /groups/g/keys
diff before /partitions/0/digest
tree -L 1 /partitions
help
man diff
history 3
exit
"""


def test_the_output_of_a_session_equals_the_golden_file(request, bench):
    written = []
    for line in SCRIPT.strip().splitlines():
        if line == "refresh":
            set_positions(bench.log)
        written += [f"$ {line}", *bench(line)]
    found = "\n".join(written) + "\n"
    if request.config.getoption("--rewrite"):
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8"), "run pytest --rewrite"
    assert all(line.isprintable() for line in found.splitlines())
    assert bench.session.is_over


def test_a_pause_has_its_reason_and_its_end(bench):
    set_positions(bench.log)
    bench("refresh")
    shown = json.loads("\n".join(bench("cat /groups/g/pause")))
    assert (shown["reason"], shown["until_ms"]) == (HOSTILE, START_MS + 90 * H)
    bench("cd /groups/billing")
    (pause_there,) = bench("diff before ../g/./partitions/0/pause")
    assert pause_there.endswith("-> null")


def test_pauses_of_some_topics_can_be_read_and_compared(bench):
    later = START_MS + 90 * H
    bench.log.append(schedule(0, later, scope={"t": (1, 2)}), after=3 * H)
    bench.log.append(schedule(later, later + H, op=ident("2"), scope={"u": ()}))
    bench("refresh")
    found = json.loads("\n".join(bench("cat /groups/g/partitions/0")))
    assert found["scoped"][0]["scope"] == [{"topic": "t", "partitions": [1, 2]}]
    assert found["scheduled"][0]["scope"] == [{"topic": "u", "partitions": []}]
    assert any('"partitions": [1, 2]' in line for line in bench("diff before /groups"))


def test_every_file_can_be_read(bench):
    set_positions(bench.log)
    bench("refresh")
    files = bench("find /")
    shown = bench("tree /")
    assert len(shown) == len(files) > 100
    assert not any(line.startswith("!") for line in shown)
    assert all(line.isprintable() for line in shown)


def test_every_path_that_find_prints_can_be_used(bench):
    for path in bench("find /"):
        assert not any(line.startswith("!") for line in bench(f"ls {path}"))
    assert "/groups/marshal/keys/%2Fcheckpoint/0/epoch" in bench("find / -name epoch")
    assert bench("cat /groups/marshal/keys/%2Fcheckpoint/0/epoch") == ["5"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("nothing", "nothing: no such command; see: help", id="command"),
        pytest.param("cat /none", "cat: /none: no such file or directory", id="path"),
        pytest.param("ls *x*z", "ls: *x*z: no such file or directory", id="glob"),
        pytest.param("cat", "cat: wrong number of arguments; see: help", id="too few"),
        pytest.param("pwd x", "pwd: wrong number of arguments; see: help", id="many"),
        pytest.param("cat /groups", "cat: /groups: is a directory", id="directory"),
        pytest.param("cd /config", "cd: /config: not a directory", id="file"),
        pytest.param("cd /groups/*", "cd: /groups/*: fits several", id="several"),
        pytest.param("cat 'x", "no closing quotation: cat 'x", id="quote"),
        pytest.param("tree -L", "tree: -L needs a value", id="option"),
        pytest.param(
            "tree -L x", "tree: -L is 'x', which is not a whole number", id="value"
        ),
        pytest.param("history -1", "history: history is '-1'", id="count"),
        pytest.param("help me", "help: me: no such command", id="help"),
        pytest.param("ls /config/x", "ls: /config/x: no such", id="below a file"),
    ],
)
def test_a_wrong_line_is_explained_and_the_session_continues(bench, line, message):
    (shown,) = bench(line)
    assert shown.startswith(f"! {message}")
    assert bench.session.is_failed
    assert bench("pwd") == ["/"]


def test_a_blank_line_and_a_comment_do_nothing(bench):
    assert [bench(line) for line in ("", "   ", "# ls")] == [[], [], []]
    assert bench("history") == ["    1  history"]


def test_dots_and_relative_paths_are_resolved(bench):
    bench("cd groups/billing")
    assert bench("cat ./keys/../keys/payments/2/position") == ["40"]
    assert bench("ls ..") == ["billing", "g", "marshal"]
    bench("cd ../../..")
    assert bench("pwd") == ["/"]


def test_partitions_are_in_numeric_order(bench):
    assert bench("ls /groups/billing/keys/payments") == ["2", "10"]


def test_a_refresh_shows_a_changed_value(bench):
    path = "/groups/billing/keys/payments/2/position"
    bench.log.append(beat(1, 50, client="w1", key=Key("billing", "payments", 2)))
    bench("refresh")
    assert bench(f"cat {path}") == ["50"]


def test_a_refresh_that_fails_keeps_the_tree(bench):
    bench.failure = CoordinationError("no broker")
    assert bench("refresh")[0].startswith("! refresh: no broker\nnext: marshal doctor")
    assert bench("ls") == ["config", "groups", "partitions", "topic"]


def test_a_current_directory_that_disappears_is_reported(bench):
    bench("cd /groups/billing")
    bench.log = Log()
    bench("refresh")
    assert bench("ls") == ["! ls: .: no such file or directory"]
    bench("cd /groups")
    assert bench("ls") == []


def test_output_is_cut_after_the_maximum_number_of_lines():
    bench = Bench(lines_max=3)
    shown = bench("find /")
    assert shown[:3] == ["/", "/config", "/groups"]
    assert shown[3].startswith("! ... cut after 3 lines")
    assert len(bench("ls /groups")) == 3


def test_growths_of_data_topics_are_listed_under_partition_0():
    log = Log(level=2)
    log.append(growth(8, 4))
    world = World([log.state], {})
    tree = tree_of(world, topic="t").child("partitions").child("0")
    (found,) = tree.child("growths").read()
    assert (found["topic"], found["old_count"], found["ends"]) == ("t", 4, None)


def test_a_config_that_some_partition_lacks_is_null(bench):
    other = Log(1)
    other.append(config(2, era=2))
    world = World([bench.log.state, other.state], {})
    assert tree_of(world, topic="t").child("config").read() is None


def test_listing_and_completing_keys_reads_no_values(monkeypatch):
    log = Log(keys=10**6)
    for number in range(3_000):
        log.append(claim(key=Key("g", "t", number), seq=number))
    bench = Bench(log)
    read = []
    monkeypatch.setattr(
        "kafka_marshal_cli.presenters.claim_row",
        lambda world, key, state: read.append(key) or {},
    )
    assert len(bench("ls /groups/g/keys/t")) == 3_000
    assert len(bench("find /groups/g/keys/t -name position")) == 3_000
    assert bench.session.candidates("cat ", "/groups/g/keys/t/299")
    assert read == []


# --- completion


@pytest.mark.parametrize(
    ("before", "word", "found"),
    [
        pytest.param("", "c", ["cat ", "cd "], id="command"),
        pytest.param("help ", "h", ["help ", "history "], id="command of help"),
        pytest.param("cat ", "/gr", ["/groups/"], id="absolute"),
        pytest.param("cat ", "c", ["config "], id="relative"),
        pytest.param("cat ", "groups/b", ["groups/billing/"], id="below"),
        pytest.param(
            "cat x ",
            "groups/g/pa",
            ["groups/g/partitions/", "groups/g/pause "],
            id="both",
        ),
        pytest.param("cd ", "groups/g/pa", ["groups/g/partitions/"], id="directories"),
        pytest.param("cat ", "none/x", [], id="none"),
        pytest.param("cat ", "config/x", [], id="below a file"),
        pytest.param("cat ", "groups/../co", ["groups/../config "], id="dots"),
    ],
)
def test_commands_and_paths_are_completed(bench, before, word, found):
    assert bench.session.candidates(before, word) == found


def test_every_command_of_the_shell_has_help(bench):
    shown = bench("help")
    assert [re.split(r"\W", line)[0] for line in shown] == sorted(COMMANDS)
    pages = [bench(f"man {name}") for name in COMMANDS]
    assert [page[0] for page in pages] == [each.usage for each in COMMANDS.values()]
    assert max(map(len, [*shown, *chain.from_iterable(pages)])) <= WIDTH_DEFAULT
