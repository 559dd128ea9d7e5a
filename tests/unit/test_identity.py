import errno
import os
import stat
from pathlib import Path

import pytest

from kafka_marshal.errors import ConfigurationError, IdentityConflict
from kafka_marshal.identity import (
    FILE_NAME,
    LIVES_MAX,
    LOCK_NAME,
    Identity,
    home_of,
    state_home,
)

MASTER = b"m" * 32


def take(home, **names):
    names = {"domain": "d", "group_id": "g", "client_id": "c"} | names
    return Identity.take(home, **names)


def incarnation(number):
    return b"%016d" % number


def test_a_restart_finds_its_earlier_incarnations_newest_first(tmp_path):
    for number in range(3):
        identity = take(tmp_path)
        identity.remember(incarnation(number), master=MASTER)
        identity.close()
    lives = take(tmp_path).lives
    assert [life.incarnation for life in lives] == [incarnation(n) for n in (2, 1, 0)]
    assert {life.master for life in lives} == {MASTER}


@pytest.mark.parametrize("given", [5, b"/tmp", ["/tmp"]])
def test_a_state_directory_must_be_a_path(given):
    with pytest.raises(ConfigurationError, match="must be the path") as raised:
        home_of(given)
    assert raised.value.setting == "state_dir"


def test_the_number_of_kept_incarnations_is_limited(tmp_path):
    for number in range(LIVES_MAX + 3):
        identity = take(tmp_path)
        identity.remember(incarnation(number), master=MASTER)
        identity.close()
    assert len(take(tmp_path).lives) == LIVES_MAX


def test_two_processes_cannot_have_one_identity(tmp_path):
    first = take(tmp_path)
    (first.folder / LOCK_NAME).write_text("1")
    with pytest.raises(IdentityConflict, match="process 1 on this machine") as caught:
        take(tmp_path)
    assert caught.value.holder == "c"
    first.close()


def test_the_error_names_a_conflict_within_this_process(tmp_path):
    """As when a notebook cell runs a second time."""
    first = take(tmp_path)
    with pytest.raises(IdentityConflict, match="of this process; close that one"):
        take(tmp_path)
    first.close()
    first.close()
    take(tmp_path).close()


@pytest.mark.parametrize(
    "other", [{"domain": "e"}, {"group_id": "h"}, {"client_id": "d"}]
)
def test_each_domain_group_and_client_has_its_own_identity(tmp_path, other):
    first = take(tmp_path)
    first.remember(incarnation(1), master=MASTER)
    assert take(tmp_path, **other).lives == ()


def test_created_directories_are_accessible_only_to_their_owner(tmp_path):
    before = os.umask(0)
    try:
        take(tmp_path / "parent" / "home").close()
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


@pytest.mark.parametrize("part", ["", "d/g=g/c=c"])
def test_a_directory_that_others_can_change_is_refused(tmp_path, part):
    home = tmp_path / "home"
    take(home).close()
    (home / part).chmod(0o770)
    with pytest.raises(PermissionError, match="chmod 700"):
        take(home)
    (home / part).chmod(0o755)
    take(home).close()


@pytest.mark.parametrize("part", ["", "d/g=g/c=c", "d/g=g/c=c/lock"])
def test_a_symbolic_link_is_refused(tmp_path, part):
    home = tmp_path / "home"
    take(home).close()
    (home / part).rename(tmp_path / "elsewhere")
    (home / part).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=str(home / part)):
        take(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
@pytest.mark.parametrize("part", ["", "d/g=g/c=c"])
def test_a_directory_of_another_user_is_refused(tmp_path, part):
    home = tmp_path / "home"
    take(home).close()
    os.chown(home / part, 65_534, 65_534)
    with pytest.raises(PermissionError, match="another user"):
        take(home)


@pytest.mark.parametrize("name", ["..", ".", "a:b"])
def test_no_name_escapes_the_state_directory(tmp_path, name):
    home = tmp_path / "home"
    take(home, group_id=name, client_id=name).remember(incarnation(1), master=MASTER)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"lives":[{"incarnation":"zz","master":"00"}]}']
)
def test_a_damaged_file_resumes_nothing(tmp_path, text):
    identity = take(tmp_path)
    identity.remember(incarnation(1), master=MASTER)
    identity.close()
    (path,) = tmp_path.rglob(FILE_NAME)
    path.write_bytes(text)
    assert take(tmp_path).lives == ()


def test_a_full_disk_leaves_the_earlier_identity_and_no_temporary_file(
    monkeypatch, tmp_path
):
    """The lock works without the process id in its file, which only messages need."""

    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = take(tmp_path)
    first.remember(incarnation(1), master=MASTER)
    first.close()
    monkeypatch.setattr(os, "pwrite", refuse)
    second = take(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        second.remember(incarnation(2), master=MASTER)
    names = {each.name for each in second.folder.iterdir()}
    assert names == {"lock", "identity.json"}
    second.close()
    assert len(take(tmp_path).lives) == 1


def test_an_erased_identity_resumes_nothing(tmp_path):
    first = take(tmp_path)
    first.remember(incarnation(1), master=MASTER)
    first.erase()
    first.erase()
    first.close()
    assert take(tmp_path).lives == ()


def test_the_file_with_secrets_is_readable_only_by_its_owner(tmp_path):
    identity = take(tmp_path / "home")
    identity.remember(incarnation(1), master=MASTER)
    (path,) = tmp_path.rglob(FILE_NAME)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_environment_variables_choose_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("MARSHAL_STATE_DIR", str(tmp_path / "chosen"))
    assert state_home() == tmp_path / "chosen"
    monkeypatch.delenv("MARSHAL_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_home() == tmp_path / "xdg" / "kafka-marshal"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_home() == tmp_path / ".local" / "state" / "kafka-marshal"


def test_a_user_without_a_home_directory_has_no_state_directory(monkeypatch):
    """As in a container that runs with a user id unknown to its image."""
    for name in ("MARSHAL_STATE_DIR", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigurationError, match="set MARSHAL_STATE_DIR"):
        state_home()
    assert home_of(None) is None


def no_home():
    raise RuntimeError("Could not determine home directory.")
