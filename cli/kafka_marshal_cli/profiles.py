"""Profiles: named settings in a TOML file."""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from kafka_marshal import ConfigurationError
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS

FILE_BYTES_MAX = 1_000_000
SAFE_NAME = re.compile(r"[A-Za-z0-9._:-]{1,249}", re.ASCII)
"""A name that may be handed to a shell."""
_TOP = ("profile", "default", "profiles")
_SECRET_WORDS = (
    *("password", "secret", "passphrase", "jaas", "key.pem", "key_pem"),
    "keystore.key",
    # A URL may contain a user and a password.
    *("proxy_url", "proxy.url"),
)


@attrs.frozen
class Setting:
    """One setting and its names.

    Attributes:
        key: Name in the file, and of the option without ``--``.
        envvar: Name of the environment variable.
        default: Built-in default as shown to people; empty if there is none.
    """

    key: str
    envvar: str
    default: str = ""


SETTINGS = (
    Setting("bootstrap-server", "MARSHAL_BOOTSTRAP_SERVER", SERVERS),
    Setting("coordination-topic", "MARSHAL_COORDINATION_TOPIC", COORDINATION_TOPIC),
    Setting("transport", "MARSHAL_TRANSPORT", "auto"),
    Setting("command-config", "MARSHAL_COMMAND_CONFIG"),
    Setting("timeout", "MARSHAL_TIMEOUT", "30s"),
    Setting("output", "MARSHAL_OUTPUT", "table"),
    Setting("group", "MARSHAL_GROUP"),
    Setting("client-id", "MARSHAL_CLIENT_ID"),
    Setting("state-dir", "MARSHAL_STATE_DIR"),
    Setting("sidecar", "MARSHAL_SIDECAR"),
    Setting("labels", "MARSHAL_LABELS"),
    Setting("no-plan", "MARSHAL_NO_PLAN", "false"),
    Setting("restarts", "MARSHAL_RESTARTS", "false"),
    # Settings of `marshal sidecar`.
    Setting("socket", "MARSHAL_SIDECAR_SOCKET"),
    Setting("socket-group", "MARSHAL_SIDECAR_SOCKET_GROUP"),
    Setting("tcp", "MARSHAL_SIDECAR_TCP"),
    Setting("token-file", "MARSHAL_SIDECAR_TOKEN_FILE"),
    Setting("drain-timeout", "MARSHAL_SIDECAR_DRAIN_TIMEOUT", "20s"),
    Setting("handoff-timeout", "MARSHAL_SIDECAR_HANDOFF_TIMEOUT", "10s"),
    Setting("checkpoint-interval", "MARSHAL_SIDECAR_CHECKPOINT_INTERVAL", "5m"),
    Setting("log-format", "MARSHAL_SIDECAR_LOG_FORMAT", "text"),
    Setting("allow-admin", "MARSHAL_SIDECAR_ALLOW_ADMIN", "false"),
)
KEYS = tuple(setting.key for setting in SETTINGS)
KEY_BY_ENVVAR = {setting.envvar: setting.key for setting in SETTINGS}


@attrs.frozen
class Value:
    """A value and where it was set.

    Attributes:
        text: The value itself, or the variable or file that a reference names.
        origin: Where it was set, as text for people.
        kind: ``env`` or ``file`` for a reference, empty for a plain value.
    """

    text: str
    origin: str
    kind: str = ""

    def resolved(self, name: str) -> str:
        """Return the value, following a reference.

        Raises:
            ConfigurationError: The variable is not set, or the file cannot be read.
        """
        if self.kind == "env":
            found = os.environ.get(self.text)
            if found is None:
                raise ConfigurationError(
                    f"{name} refers to the environment variable {self.text}, "
                    f"which is not set ({self.origin})",
                    setting=name,
                )
            return found
        if self.kind == "file":
            try:
                return Path(self.text).read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"{name} refers to the file {self.text!r}, which cannot be "
                    f"read: {error} ({self.origin})",
                    setting=name,
                ) from error
        return self.text


@attrs.frozen(kw_only=True)
class Profile:
    """The settings of one profile.

    Attributes:
        path: The file, or where it would be if it does not exist.
        name: The profile, None for the file's ``[default]`` alone.
        names: All profiles of the file.
        settings: Values of settings, by key.
        options: Security and connection options.
        warning: Why the file is unsafe, None if it is not.
    """

    path: Path
    name: str | None = None
    names: tuple[str, ...] = ()
    settings: Mapping[str, Value] = attrs.field(factory=dict)
    options: Mapping[str, Value] = attrs.field(factory=dict)
    warning: str | None = None


def is_secret(name: str) -> bool:
    """Return whether the value of an option must not be shown."""
    lower = name.lower()
    is_place = lower.endswith((".location", "_file"))
    return not is_place and any(word in lower for word in _SECRET_WORDS)


def user_path(option: str, text: str | Path) -> Path:
    """Return a path, with the home directory for ``~``.

    A shell expands it, but not in ``--option=~/x``, in a profile or in a unit file.

    Args:
        option: Name of the option, for messages.
        text: The path.

    Raises:
        ConfigurationError: There is no such user, or no home directory.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{option} {str(text)!r} begins with ~, which names no home directory; "
            "write the whole path",
            setting=option,
        ) from error


def config_path(given: str | None) -> tuple[Path, bool]:
    """Return the path of the file, and whether it was named explicitly.

    Args:
        given: Value of ``--config``.

    Raises:
        ConfigurationError: See ``user_path``.
    """
    named = given or os.environ.get("MARSHAL_CONFIG")
    if named:
        return user_path("--config", named), True
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    path = Path(base) / "kafka-marshal" / "config.toml"
    with suppress(RuntimeError):  # a user without a home directory has no file
        path = path.expanduser()
    return path, False


def exists(path: Path) -> bool:
    """Return whether a file exists; False if its directory may not be searched.

    A container may run a user whose home directory is that of root.
    """
    try:
        return path.exists()
    except OSError:
        return False


def load(file: str | None, name: str | None) -> Profile:
    """Read the requested profile, or the one that the file selects.

    Args:
        file: Value of ``--config``.
        name: Value of ``--profile``.

    Raises:
        ConfigurationError: The file cannot be read, has an unknown key, or does not
            have the profile.
    """
    path, is_explicit = config_path(file)
    name = name or os.environ.get("MARSHAL_PROFILE") or None
    if not is_explicit and not exists(path):
        if name is None:
            return Profile(path=path)
        raise ConfigurationError(
            f"there is no profile {name!r}: there is no file {str(path)!r}",
            setting="--profile",
        )
    document, about = _read(path)
    _check(document, _TOP, f"{path}")
    profiles = _table(document.get("profiles", {}), f"{path} [profiles]")
    name = name or _string(document.get("profile"), f"{path}: profile")
    sections = [("default", document.get("default", {}))]
    if name is not None:
        if name not in profiles:
            raise ConfigurationError(
                f"there is no profile {name!r} in {str(path)!r}; "
                f"{_nearest(name, profiles)}",
                setting="--profile",
            )
        sections.append((f"profiles.{name}", profiles[name]))
    settings: dict[str, Value] = {}
    options: dict[str, Value] = {}
    for title, section in sections:
        place = f"{path} [{title}]"
        values = _table(section, place)
        _check(values, (*KEYS, "options"), place)
        for key, value in values.items():
            if key == "options":
                found = _options(_table(value, f"{place} options"), place, path)
                options = overridden(options, found)
            else:
                plain = key.replace("_", "-")
                settings[plain] = Value(_scalar(value, f"{place}: {key}"), place)
    warning = None
    mode = _safe_mode(about)
    if mode is not None:
        open_ = [n for n, v in options.items() if is_secret(n) and not v.kind]
        if open_:
            warning = (
                f"{path} has {open_[0]} in plain text and others may read the file; "
                f'run: chmod {mode} {path}, or write {{ env = "NAME" }}'
            )
    return Profile(
        path=path,
        name=name,
        names=tuple(profiles),
        settings=settings,
        options=options,
        warning=warning,
    )


def overridden(*levels: Mapping[str, Value]) -> dict[str, Value]:
    """Return the options of all levels; a later level overrides an earlier one.

    An option also overrides the option with the same meaning that another Kafka client
    names differently.
    """
    found: dict[str, Value] = {}
    for level in levels:
        if found and level:
            from kafka_marshal.spark.java import shared_name

            given = set(map(shared_name, level))
            found = {
                n: each for n, each in found.items() if shared_name(n) not in given
            }
        found |= level
    return found


def _safe_mode(found: os.stat_result) -> str | None:
    """Return the mode that a file of secrets should get; None if it is safe.

    A daemon that does not own the file reads it as a member of its group, as with
    deploy/systemd.
    """
    is_own = found.st_uid == os.geteuid()
    others = stat.S_IRGRP | stat.S_IROTH if is_own else stat.S_IROTH
    if not found.st_mode & others:
        return None
    return "600" if is_own else "o-r"


def _read(path: Path) -> tuple[dict[str, Any], os.stat_result]:
    import tomllib

    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ConfigurationError(
                f"--config {str(path)!r} is longer than {FILE_BYTES_MAX} bytes",
                setting="--config",
            )
        return tomllib.loads(text.decode()), found
    except OSError as error:
        raise ConfigurationError(
            f"--config {str(path)!r} cannot be read: {error}", setting="--config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--config {str(path)!r} is not TOML: {error}", setting="--config"
        ) from error


def _check(found: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    names = tuple(known)
    for key in found:
        if key.replace("_", "-") not in names:
            raise ConfigurationError(
                f"{place}: {key!r} is unknown; {_nearest(key, names)}",
                setting=key,
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    import difflib

    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    there_are = f"there are {', '.join(names)}" if names else "there are none"
    return f"did you mean {near[0]!r}? {there_are}" if near else there_are


def _table(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{place} must be a table", setting="--config")
    return value


def _string(value: object, place: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{place} must be a string", setting="--config")
    return value


def _scalar(value: object, place: str) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value)
        case list() if all(isinstance(each, str) for each in value):
            return ",".join(value)
        case _:
            raise ConfigurationError(
                f"{place} must be a string, a number, true, false or a list of strings",
                setting="--config",
            )


def _options(
    table: Mapping[str, Any], place: str, path: Path, *, before: str = ""
) -> dict[str, Value]:
    """Return options; ``security.protocol`` may be a quoted key or a nested table."""
    found: dict[str, Value] = {}
    for key, value in table.items():
        name = before + key
        stem = name.removesuffix("_file")
        if stem != name and is_secret(stem):
            file = _scalar(value, f"{place}: {name}")
            found[stem] = Value(_beside(path, file, name=name), place, "file")
        elif isinstance(value, dict):
            found |= _reference(name, value, place, path) or _options(
                value, place, path, before=f"{name}."
            )
        else:
            found[name] = Value(_scalar(value, f"{place}: {name}"), place)
    return found


def _reference(
    name: str, value: Mapping[str, Any], place: str, path: Path
) -> dict[str, Value]:
    match value:
        case {"env": str() as variable} if len(value) == 1:
            return {name: Value(variable, place, "env")}
        case {"file": str() as file} if len(value) == 1:
            return {name: Value(_beside(path, file, name=name), place, "file")}
        case _:
            return {}


def _beside(path: Path, file: str, *, name: str) -> str:
    """Resolve the path in an option relative to the file that contains it."""
    return str(path.parent / user_path(name, file))
