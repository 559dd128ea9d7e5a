#!/bin/sh
# Test the lowest versions that pyproject.toml allows, in an environment of its own: the
# unit tests, and conformance and delivery on a broker. Arguments are those of pytest.
set -eu
cd "$(dirname "$0")/.."
venv=build/lowest
uv=$(command -v uv || echo .venv/bin/uv)
"$uv" venv --quiet --allow-existing --python .venv/bin/python "$venv"
"$uv" pip compile --quiet --resolution lowest-direct --all-extras --no-header \
    --no-emit-index-url --no-emit-find-links --output-file "$venv/lowest.txt" \
    pyproject.toml
# Tools of tests are the latest: users have none of them.
"$uv" pip install --quiet --python "$venv/bin/python" --constraint "$venv/lowest.txt" \
    --requirement "$venv/lowest.txt" --group dev
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation \
    --editable .
if [ $# = 0 ]; then
    set -- tests/unit tests/spec tests/property integration/test_conformance.py \
        integration/test_delivery.py
fi
# Old releases use what later ones of others have deprecated: no fault of the project.
exec "$venv/bin/python" -m pytest -q -W default::DeprecationWarning "$@"
