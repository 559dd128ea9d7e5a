"""The entry point: what it leaves to the interpreter at the end."""

import subprocess
import sys

import pytest
from slices import HANG_S

PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 1_000, file=sys.stderr))
from kafka_marshal_cli.main import main
main()
"""


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("nope", 2)])
def test_the_end_of_a_command_looks_for_no_garbage(argument, code):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.endswith("True\n")
