"""``python -m simulator``: simulate fleets from seeds, and judge their runs."""

import sys

from kafka_marshal_cli.main import INTERRUPTED, run

if __name__ == "__main__":
    try:
        from simulator.command import app
        from simulator.simulate import PROGRAM

        run(app, program=PROGRAM)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
