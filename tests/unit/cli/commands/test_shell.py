"""`marshal shell`: states of logs, moments and files; scripts; a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from logkit import KEY, START_MS, Log, beat, claim
from scankit import FakeScan
from slowness import until
from typer.testing import CliRunner

from kafka_marshal import World
from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.text import entry_to_object, to_line
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands import shell
from kafka_marshal_cli.shared import Call

POSITION = f"/groups/{KEY.group_id}/keys/{KEY.topic}/{KEY.partition}/position"


def invoke(*arguments, source=None):
    return CliRunner().invoke(app, list(arguments), input=source)


class Live:
    """A log in memory; ``read`` has the moments that were read."""

    def __init__(self):
        self.log = Log()
        self.log.append(claim())
        self.log.append(beat(1, 4))
        self.log.append(beat(1, 9, seq=1), after=10)
        self.read = []
        self.failure = None

    def world(self, at=None, *, has_members=False):
        self.read.append(at and (at.time_ms or at.offsets))
        if self.failure is not None:
            raise self.failure
        entries = list(self.log.entries)
        if at is not None:
            at.require_partition()
            last = len(entries) if at.offsets is None else at.offsets[0]
            entries = [e for e in entries if e.offset <= last]
            entries = [e for e in entries if at.time_ms in (None, e.timestamp_ms)]
        again = Log(configured=False)
        for entry in entries:
            again.append(entry.value, at=entry.timestamp_ms)
        return World([again.state], {}, cluster_id="c")


@pytest.fixture
def live(monkeypatch):
    live = Live()
    monkeypatch.setattr(Call, "world", lambda _, *at, **how: live.world(*at, **how))
    monkeypatch.setattr(Call, "scan", lambda call: FakeScan(live.log))
    return live


@pytest.fixture
def file(tmp_path, live):
    path = tmp_path / "it.snapshot"
    assert invoke("log", "snapshot", str(path)).exit_code == 0
    return path


def test_commands_can_be_given_as_options(live):
    outcome = invoke("shell", "-c", f"cat {POSITION}", "-c", "ls /groups")
    assert (outcome.exit_code, outcome.stdout) == (0, "9\ng\n")
    assert live.read == [None]


def test_commands_are_read_from_standard_input(live):
    outcome = invoke("shell", source=f"cd /groups\npwd\n\n# it\ncat {POSITION}\n")
    assert (outcome.exit_code, outcome.stdout) == (0, "/groups\n9\n")


def test_a_script_reads_the_log_once_and_at_each_refresh(live):
    outcome = invoke("shell", source="ls\nls\nrefresh\nls\n")
    assert outcome.exit_code == 0
    assert len(live.read) == 2


def test_a_script_ends_at_exit(live):
    assert invoke("shell", source="exit\nnothing\n").exit_code == 0


def test_a_failed_command_changes_only_the_exit_code_of_a_script(live):
    outcome = invoke("shell", source=f"cat none\ncat {POSITION}\n")
    assert (outcome.exit_code, outcome.stdout) == (1, "9\n")
    assert outcome.stderr == "cat: none: no such file or directory\n"


def test_an_unreachable_broker_exits_with_code_5(live):
    live.failure = CoordinationError("no broker")
    assert invoke("shell", "-c", "ls").exit_code == 5


def test_a_snapshot_and_a_dump_are_browsed_without_a_broker(file, tmp_path, live):
    dump = tmp_path / "dump.jsonl"
    lines = [to_line(entry_to_object(0, entry)) for entry in live.log.entries]
    dump.write_text("\n".join(lines))
    live.failure = CoordinationError("no broker")
    found = [
        invoke("shell", str(path), "-c", f"tree {POSITION} /groups/g /partitions")
        for path in (file, dump)
    ]
    assert {outcome.exit_code for outcome in found} == {0}, found[0].output
    assert found[0].stdout == found[1].stdout
    assert found[0].stdout.startswith(f"{POSITION}: 9\n")


def test_a_damaged_file_is_wrong_usage(file):
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    outcome = invoke("shell", str(file), "-c", "ls")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "checksum" in outcome.stderr


def test_a_partition_of_unknown_state_is_reported(live, monkeypatch):
    states = [live.log.state]
    world = World(states, {}, log_start_missing=[0])
    monkeypatch.setattr(Call, "world", lambda *_, **how: world)
    outcome = invoke("shell", "-c", "cat /partitions/0/is_known")
    assert (outcome.exit_code, outcome.stdout) == (0, "false\n")
    assert "coordinating partitions [0] begins above" in outcome.stderr


def test_invalid_utf_8_in_standard_input_is_wrong_usage(live):
    outcome = invoke("shell", source=b"\xff\n")
    assert outcome.exit_code == 2
    assert "not UTF-8" in outcome.stderr


# --- diff


def test_diff_compares_a_file_with_the_log(live, file):
    live.log.append(beat(1, 12, seq=2))
    outcome = invoke("shell", "-c", f"diff {file} /groups")
    assert (outcome.exit_code, outcome.stdout) == (1, f"{POSITION}: 12 -> 9\n")
    back = invoke("shell", str(file), "-c", "diff live /groups")
    assert (back.exit_code, back.stdout) == (1, f"{POSITION}: 9 -> 12\n")


def test_equal_states_have_no_differences(live, file):
    outcome = invoke("shell", str(file), "-c", "diff live")
    assert (outcome.exit_code, outcome.stdout) == (0, "")


def test_diff_compares_with_an_earlier_time(live):
    moment = f"1970-01-01T00:{START_MS // 60_000:02}:{START_MS // 1000 % 60:02}Z"
    outcome = invoke("shell", "-c", f"diff {moment} {POSITION}")
    assert (outcome.exit_code, outcome.stdout) == (1, f"{POSITION}: 9 -> 4\n")
    assert live.read == [None, START_MS]


def test_diff_compares_with_an_earlier_offset(live):
    outcome = invoke("shell", "-c", f"diff 0:2 {POSITION}")
    assert (outcome.exit_code, outcome.stdout) == (1, f"{POSITION}: 9 -> 4\n")


def test_a_past_moment_is_browsed_and_not_read_again(live, prompt):
    outcome = invoke("shell", "--at", "0:2", "-c", f"cat {POSITION}")
    assert (outcome.exit_code, outcome.stdout) == (0, "4\n")
    prompt("ls")
    assert invoke("shell", "--at", "0:2", "--refresh", "0").exit_code == 0
    assert live.read == [{0: 2}] * 2, "the past is not read again"


def test_a_file_with_at_is_wrong_usage(live, file):
    outcome = invoke("shell", str(file), "--at", "0:2")
    assert outcome.exit_code == 2
    assert "leave one of them out" in outcome.stderr


def test_diff_refuses_standard_input(live):
    outcome = invoke("shell", source="diff -\n")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "diff: standard input has commands here" in outcome.stderr


@pytest.mark.parametrize("other", ["none.snapshot", "17", "-5x"])
def test_diff_refuses_an_unknown_state(live, other):
    outcome = invoke("shell", "-c", f"diff {other}")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "diff: " in outcome.stderr
    assert repr(other) in outcome.stderr or f"is {other}" in outcome.stderr


# --- a prompt


@pytest.fixture
def prompt(monkeypatch):
    """Return a function that sets the answers to prompts."""

    def answers(*lines):
        left = iter(lines)

        def answer(prompt):
            prompts.append(prompt)
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line() or "" if callable(line) else line

        monkeypatch.setattr("builtins.input", answer)
        monkeypatch.setattr(shell, "_is_terminal", lambda: True)
        return prompts

    prompts = []
    return answers


def test_a_prompt_shows_the_current_directory(live, prompt):
    prompts = prompt("cd /groups/g", "none", KeyboardInterrupt(), "exit")
    outcome = invoke("shell")
    assert outcome.exit_code == 0
    assert prompts == ["marshal:/> ", *["marshal:/groups/g> "] * 3]


def test_a_prompt_reads_the_log_again_when_the_last_reading_is_old(live, prompt):
    prompt("ls", "ls")
    assert invoke("shell", "--refresh", "0").exit_code == 0
    assert len(live.read) == 3
    prompt("ls", "ls")
    assert invoke("shell", "--refresh", "1h").exit_code == 0
    assert len(live.read) == 4


def test_a_failed_refresh_keeps_the_state_and_reports_its_time(live, prompt):
    def fail():
        live.failure = CoordinationError("no broker")

    prompt(fail, f"cat {POSITION}")
    outcome = invoke("shell", "--refresh", "0")
    assert (outcome.exit_code, outcome.stdout) == (0, "9\n\n")
    assert "this is the state of 1970-01-01T00:00:00.000Z: no broker" in outcome.stderr


def test_a_file_is_not_read_again(file, live, prompt):
    prompt(file.unlink, "ls")
    outcome = invoke("shell", str(file), "--refresh", "0")
    assert (outcome.exit_code, outcome.stderr) == (0, "")


def test_a_refresh_that_is_no_duration_is_wrong_usage(live):
    assert invoke("shell", "--refresh", "soon").exit_code == 2


class Terminal:
    """`marshal shell` in a pseudo-terminal."""

    def __init__(self, file):
        self.lead, follow = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kafka_marshal_cli", "shell", str(file)],
            stdin=follow,
            stdout=follow,
            stderr=follow,
            env={**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"},
            cwd=Path(__file__).resolve().parents[4],
        )
        os.close(follow)
        self.text = ""

    def reads(self, wanted):
        """Wait until the terminal shows this; return its output up to there."""

        def is_there():
            if select.select([self.lead], [], [], 0.05)[0]:
                self.text += os.read(self.lead, 65_536).decode()
            return re.search(wanted, self.text)

        end = until(is_there, f"{wanted!r} in {self.text!r}").end()
        shown, self.text = self.text[:end], self.text[end:]
        return shown

    def types(self, text):
        os.write(self.lead, text.encode())

    def ends(self):
        """Wait for the process, close the terminal and return the exit code."""
        until(lambda: self.process.poll() is not None, "the end of the shell")
        os.close(self.lead)
        return self.process.returncode


@pytest.fixture
def terminal(file):
    terminal = Terminal(file)
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
        terminal.process.wait()


def test_a_terminal_completes_paths_and_recalls_commands(terminal):
    terminal.reads("marshal:/> ")
    terminal.types("cat gr\tg/k\tt/0/pos\t\r")
    assert "cat groups/g/keys/t/0/position " in terminal.reads("9\r\n")
    terminal.reads("marshal:/> ")
    terminal.types("\x10\r")  # Ctrl-P: the previous command
    terminal.reads("9\r\n")
    terminal.reads("marshal:/> ")
    terminal.process.send_signal(signal.SIGINT)  # does not end the session
    terminal.reads("marshal:/> ")
    terminal.types("\x04")
    assert terminal.ends() == 0
