#!/bin/sh
# Find a Python that is new enough, then let it make the environment.
set -eu
cd "$(dirname "$0")/.."

# A name on PATH may be a shim that only says "not installed", so each is run.
for python in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then
        exec "$python" tools/make_env.py "$@"
    fi
done

cat >&2 <<'MESSAGE'
make env: no Python 3.11 or newer found on PATH.
  Debian, Ubuntu:  sudo apt install python3 python3-venv
  macOS:           brew install python@3.12
  anywhere:        uv python install 3.12, or https://www.python.org/downloads/
An interpreter that is not on PATH can be named: make env PYTHON=/path/to/python3
MESSAGE
exit 1
