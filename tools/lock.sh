#!/bin/sh
# Renew the locked versions. No address of a package index may get into them: the
# lock must serve wherever the project is built.
set -eu
cd "$(dirname "$0")/../requirements"
uv=$(command -v uv || echo ../.venv/bin/uv)
for name in dev java uv; do
    "$uv" pip compile --quiet --upgrade --universal --python-version 3.11 \
        --generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
        --output-file "$name.txt" "$name.in"
done
