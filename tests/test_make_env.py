"""What is locked is installed from the cache of uv, and fetched only if it must be."""

import make_env
import pytest

UV = """#!/bin/sh
echo "$*" >> "$0.calls"
case "$*" in *--offline*) exit {offline};; *) exit {online};; esac
"""


@pytest.fixture
def install(tmp_path):
    """Install a lock by a uv that ends with given codes."""

    def install(**codes):
        uv = tmp_path / "uv"
        uv.write_text(UV.format(**codes))
        uv.chmod(0o700)
        make_env.install_locked(str(uv), tmp_path / "dev.txt", remedy="Do this.")

    return install


@pytest.fixture
def calls(tmp_path):
    """Return for each call of that uv whether it was offline."""

    def calls():
        lines = (tmp_path / "uv.calls").read_text().splitlines()
        assert all("--require-hashes" in each for each in lines)
        return ["--offline" in each for each in lines]

    return calls


def test_what_the_cache_has_needs_no_index(install, calls):
    install(offline=0, online=1)
    assert calls() == [True]


def test_what_the_cache_lacks_is_fetched(install, calls):
    install(offline=1, online=0)
    assert calls() == [True, False]


def test_what_cannot_be_fetched_is_named_with_a_remedy(install, calls):
    with pytest.raises(SystemExit, match=r"requirements/dev\.txt(.|\n)*Do this\."):
        install(offline=1, online=2)
    assert calls() == [True, False]
