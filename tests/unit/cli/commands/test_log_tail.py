"""`marshal log tail`, with a log in memory."""

import json
import re

import pytest
from keptkit import Shelf, kept
from logkit import (
    H,
    Log,
    all_records,
    batch,
    beat,
    claim,
    fold,
    member,
    pause,
    release,
)
from msgspec.structs import replace
from typer.testing import CliRunner
from watchkit import Story

from kafka_marshal import Key
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.text import object_to_entry
from kafka_marshal.views.watch import EarlyStates, Folded, WorldWatch
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands.log_tail import TYPES, text_line, verdict
from kafka_marshal_cli.shared import Call

OTHER = Key("h", "u", 1)


@pytest.fixture
def story():
    return Story()


@pytest.fixture
def tail(story, monkeypatch):
    """Run the command; once it caught up, call a function of ``then`` at each read."""

    def run(*arguments, then=(), source=None):
        story.log = story.kafka.coordination_log()
        planned, run.read_count = list(then), 0  # type: ignore[attr-defined]

        def open_watch(call, *, timeout_ms, first):
            sources = [] if source is None else [EarlyStates(source, first)]
            watch = WorldWatch(story.log, story.clock, sources=sources)
            read = watch.read

            def next_read(timeout_ms):
                if watch.is_caught_up and planned:
                    planned.pop(0)()
                found = read(timeout_ms)
                run.read_count += len(found)  # type: ignore[attr-defined]
                return found

            monkeypatch.setattr(watch, "read", next_read)
            return watch

        monkeypatch.setattr(Call, "watch", open_watch)
        return CliRunner().invoke(app, ["log", "tail", *arguments])

    return run


def places(outcome):
    return [line.split()[0] for line in outcome.stdout.splitlines()]


def records_of(outcome):
    """Return each line from the record's type on."""
    return [line.partition("Z ")[2] for line in outcome.stdout.splitlines()]


def test_each_record_is_shown_with_its_transitions(story, tail):
    epoch = story.write(claim("c1"))
    story.write(claim("c2"))
    story.write(beat(epoch, 7))
    story.write(batch((epoch, 8), (epoch, 9), (99, None)))
    story.write(b"garb\x1b")
    story.write(release(epoch, 9))
    outcome = tail()
    assert outcome.exit_code == 0, outcome.stderr
    reported = records_of(outcome)
    assert reported[0].startswith("Config ")
    assert reported[0].endswith("-> configured")
    assert reported[1].startswith("ClaimingPartition g/c1 t-0 incarnation=63312e2e ")
    assert reported[1].endswith("-> claimed")
    assert reported[2].endswith(f"-> refused: held (remaining_ms={2 * H + 1})")
    assert reported[3].endswith("epoch=1 position=7 -> renewed")
    assert reported[4].endswith("beats=3 -> renewed x2, ignored: not_owner")
    assert reported[5].startswith("undecodable (")
    assert reported[5].endswith("676172621b -> undecodable")
    assert reported[6].endswith("position=9 -> released")


def test_the_last_entries_are_selected_by_number_and_offset(monkeypatch, tail, story):
    for number in range(15):
        story.write(member(seq=number), after=1)
    assert len(places(tail())) == 10
    assert places(tail("-n", "3")) == ["0:13", "0:14", "0:15"]
    assert places(tail("-n", "0")) == []
    assert places(tail("--from", "13")) == ["0:13", "0:14", "0:15"]
    assert places(tail("--from", "13", "-n", "1")) == ["0:15"]
    assert len(places(tail("--from", "start"))) == 16
    assert places(tail("--from", "end")) == []


def test_two_partitions_are_merged_by_time(monkeypatch):
    story = Story(partitions=2)
    for number in range(6):
        story.write(member(seq=number), to=number % 2, after=1)
    watch = WorldWatch(story.kafka.coordination_log(), story.clock)
    monkeypatch.setattr(Call, "watch", lambda call, timeout_ms, first: watch)
    outcome = CliRunner().invoke(app, ["log", "tail", "-n", "3"])
    assert places(outcome) == ["1:2", "0:3", "1:3"]


@pytest.mark.parametrize(
    ("arguments", "spared"),
    [
        ([], True),
        (["-n", "4"], True),
        (["-n", "5"], False),
        (["--from", "6"], True),
        (["--from", "5"], False),
        (["--from", "end"], True),
        (["--from", "end", "--group", "g"], True),
        (["--group", "g"], False),
        (["--type", "Heartbeat"], False),
        (["--from", "6", "--type", "Heartbeat"], True),
        (["--from", "start"], False),
    ],
)
def test_a_kept_state_does_not_change_the_output(story, tail, arguments, spared):
    epoch = story.write(claim("c1"))
    for number in range(4):
        story.write(beat(epoch, number), after=1)
    source = Shelf(kept(story.watch().world().partitions[0]))
    for number in range(14 if not arguments else 4):
        story.write(beat(epoch, 4 + number), after=1)
    whole, read_whole = tail(*arguments), tail.read_count
    outcome = tail(*arguments, source=source)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout == whole.stdout
    assert tail.read_count == (read_whole - 6 if spared else read_whole)


def test_entries_are_filtered_by_group_and_type(story, tail):
    story.write(claim("c1"))
    story.write(claim("c1", key=OTHER))
    story.write(b"garbage")
    assert [line.split()[1] for line in records_of(tail("--group", "h"))] == ["h/c1"]
    found = records_of(tail("--type", "config,Undecodable"))
    assert [line.split()[0] for line in found] == ["Config", "undecodable"]


def test_an_unknown_type_is_refused_with_the_nearest_one(tail):
    outcome = tail("--type", "Heartbeet")
    assert outcome.exit_code == 2
    assert "did you mean Heartbeat?" in outcome.stderr
    for name in TYPES:
        assert name in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--from", "-1"], "--from"),
        (["--from", "\u0663"], "--from"),
        (["--partition", "7"], "has 1 partition;"),
        (["--timeout", "1s"], "--follow, which was not given"),
    ],
)
def test_a_bad_offset_partition_or_timeout_is_wrong_usage(tail, arguments, word):
    outcome = tail(*arguments)
    assert outcome.exit_code == 2
    assert word in outcome.stderr


def test_json_lines_fold_to_the_same_world(story, tail):
    story.write(claim("c1"))
    story.write(b"garbage")
    lines = [json.loads(line) for line in tail("-o", "jsonl").stdout.splitlines()]
    assert all("transitions" not in line for line in lines)
    again = fold(object_to_entry(line)[1] for line in lines)
    assert digest(again) == digest(story.watch().world().partitions[0])
    output = tail("-o", "jsonl", "--transitions", "-n", "1").stdout
    (transition,) = json.loads(output)["transitions"]
    assert transition["transition"] == "undecodable"


def test_following_ends_if_nothing_arrives_within_the_timeout(story, tail):
    later = [lambda: story.write(claim("c1")), lambda: story.write(b"x", after=1)]
    outcome = tail("-f", "--from", "end", "--timeout", "300ms", then=later)
    assert outcome.exit_code == 0
    assert places(outcome) == ["0:1", "0:2"]


def test_without_follow_tail_ends_at_the_log_end(story, tail):
    outcome = tail(then=[lambda: story.write(claim("c1"))])
    assert places(outcome) == ["0:0"]


def test_a_selection_of_no_entries_is_noted(story, tail):
    story.write(claim("c1"))
    for arguments in (("--from", "999"), ("--group", "misspelt")):
        outcome = tail(*arguments)
        assert (outcome.exit_code, outcome.stdout) == (0, "")
        assert "no such entries; see: marshal topic info" in outcome.stderr
    for arguments in ((), ("-n", "0"), ("--from", "end")):
        assert tail(*arguments).stderr == ""


def test_an_outage_is_reported_and_survived(story, tail):
    def cut():
        story.log.cut = True
        story.clock.advance(10_000)

    def mend():
        story.log.cut = False
        story.write(claim("c1"))

    outcome = tail("-f", "--from", "end", "--timeout", "300ms", then=[cut, mend])
    assert (outcome.exit_code, places(outcome)) == (0, ["0:1"])
    away, back = outcome.stderr.splitlines()
    assert "do not answer" in away
    assert "answer again" in back


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
def test_every_record_type_has_a_printable_line(record):
    log = Log()
    transitions = log.append(record)
    line = text_line(Folded(0, log.entries[-1], transitions))
    assert type(record).__name__ in line
    assert line.isprintable()
    assert re.search(r" -> \w+", line)


def test_an_entry_without_transitions_is_shown_as_not_folded():
    assert verdict(()) == "not folded"


def test_the_person_of_an_admin_is_shown_escaped(story, tail):
    rest = pause(story.clock.wall_ms() + 1_000)
    story.write(replace(rest, tags=person_to_tags("ada\x1b")))
    story.write(replace(pause(0, seq=1), tags=b"\xc1"))
    outcome = tail("--type", "ReleaseGroup")
    assert [" by=ada\\x1b -> paused" in line for line in records_of(outcome)] == [
        True,
        False,
    ]
