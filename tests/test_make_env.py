"""Locked packages are installed from uv's cache, and downloaded only if missing."""

import make_env
import pytest

UV = """#!/bin/sh
echo "$*" >> "$0.calls"
case "$*" in *--offline*) exit {offline};; *) exit {online};; esac
"""


@pytest.fixture
def install(tmp_path):
    """Return a function that installs by a uv that exits with given codes."""

    def install(**codes):
        uv = tmp_path / "uv"
        uv.write_text(UV.format(**codes))
        uv.chmod(0o700)
        make_env.install_locked(str(uv), tmp_path / "dev.txt", remedy="Do this.")

    return install


@pytest.fixture
def calls(tmp_path):
    """Return a function that lists for each call of uv whether it was offline."""

    def calls():
        lines = (tmp_path / "uv.calls").read_text().splitlines()
        assert all("--require-hashes" in each for each in lines)
        return ["--offline" in each for each in lines]

    return calls


def test_cached_packages_are_installed_offline(install, calls):
    install(offline=0, online=1)
    assert calls() == [True]


def test_packages_missing_in_the_cache_are_downloaded(install, calls):
    install(offline=1, online=0)
    assert calls() == [True, False]


def test_a_failed_download_names_the_lock_file_and_a_remedy(install, calls):
    with pytest.raises(SystemExit, match=r"requirements/dev\.txt(.|\n)*Do this\."):
        install(offline=1, online=2)
    assert calls() == [True, False]
