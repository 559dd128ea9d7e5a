"""What is locked is installed from the cache of uv, and fetched only if it must be."""

import make_env
import pytest

UV = """#!/bin/sh
echo "$*" >> "$0.calls"
case "$*" in *--offline*) exit {offline};; *) exit {online};; esac
"""


@pytest.fixture
def installed(tmp_path):
    """Install a lock by a uv that ends with given codes; return how it was called."""

    def install(**codes):
        uv = tmp_path / "uv"
        uv.write_text(UV.format(**codes))
        uv.chmod(0o700)
        calls = tmp_path / "uv.calls"
        try:
            make_env.install_locked(str(uv), tmp_path / "dev.txt", remedy="Do this.")
        finally:
            lines = calls.read_text().splitlines()
            assert all("--require-hashes" in each for each in lines)
            install.offline = ["--offline" in each for each in lines]
        return install.offline

    return install


def test_what_the_cache_has_needs_no_index(installed):
    assert installed(offline=0, online=1) == [True]


def test_what_the_cache_lacks_is_fetched(installed):
    assert installed(offline=1, online=0) == [True, False]


def test_what_cannot_be_fetched_is_named_with_a_remedy(installed):
    with pytest.raises(SystemExit, match=r"requirements/dev\.txt(.|\n)*Do this\."):
        installed(offline=1, online=2)
    assert installed.offline == [True, False]
