"""Changes the settings of a group, on its home partition (PROTOCOL 9.1)."""

from collections.abc import Mapping
from typing import Any

import attrs

from kafka_marshal.admin.pausing import Sender
from kafka_marshal.engine.config_check import require_level
from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import ClaimRejected, ConfigurationError
from kafka_marshal.protocol.records import GroupSettings
from kafka_marshal.protocol.settings import POLICIES, TUNABLES, Settings
from kafka_marshal.protocol.state import WorldState


@attrs.frozen(kw_only=True)
class SettingsChange:
    """Settings of a group before and after a change.

    Attributes:
        group_id: The group.
        before: Those in force before; their generation is 0 where there were none.
        after: Those in force then, of the next generation.
    """

    group_id: str
    before: Settings
    after: Settings

    @property
    def is_changed(self) -> bool:
        """Whether any setting differs; if not, nothing is written."""
        return self.before[1:] != self.after[1:]


def plan_settings(
    home: WorldState, group_id: str, *, changes: Mapping[str, int | str | None]
) -> SettingsChange:
    """Return what a change of some settings does; the others stay.

    Args:
        home: The group's home partition, folded to its end.
        group_id: The group.
        changes: New values by the names in ``TUNABLES``, and one of ``POLICIES`` as
            ``policy``; None for the default.

    Raises:
        ConfigurationError: A name or value is invalid, or the topic has a feature level
            without settings.
    """
    for name, value in changes.items():
        _check(name, value)
    require_level(home.config, "a setting of a group")
    before = home.settings_of(group_id)
    named: dict[str, Any] = {**changes, "generation": before.generation + 1}
    after = before._replace(**named)
    return SettingsChange(group_id=group_id, before=before, after=after)


def _check(name: str, value: int | str | None) -> None:
    if name == "policy":
        if value is not None and value not in POLICIES:
            raise ConfigurationError(
                f"policy is {value!r}; it must be {' or '.join(POLICIES)}", setting=name
            )
        return
    tunable = TUNABLES.get(name)
    if tunable is None:
        known = ", ".join(("policy", *TUNABLES))
        raise ConfigurationError(
            f"unknown setting {name!r}; known are: {known}", setting=name
        )
    if isinstance(value, str):
        raise ConfigurationError(f"{name} is {value!r}, no number", setting=name)
    if value is not None and not tunable.least <= value <= tunable.most:
        raise ConfigurationError(
            f"{name} is {value}; it must be {tunable.least} to {tunable.most}, and is "
            f"{tunable.default} by default",
            setting=name,
        )


def write_settings(
    follower: Follower,
    change: SettingsChange,
    *,
    sender: Sender,
    home: int,
    reason: str | None,
    timeout_ms: int,
) -> None:
    """Write the settings of a change.

    Args:
        follower: Follows the log.
        change: The change.
        sender: Sender of the record.
        home: The group's home partition.
        reason: Stored in the log, for people.
        timeout_ms: Longest time of the call.

    Raises:
        ClaimRejected: Somebody else changed the settings meanwhile, or they are being
            moved to another coordinating partition.
        LogUnwritable: The log has no room for another group.
        DeadlineExceeded: No verdict in time; the record may still be appended.
    """
    group_id = change.group_id
    record = GroupSettings(
        **sender.fields(group_id), **change.after._asdict(), reason=reason
    )
    sent = follower.append(home, record)
    follower.await_all([sent], timeout_ms)
    verdict = sent.transition
    if verdict is not None and verdict.reason == "settings_overtaken":
        raise ClaimRejected(
            f"the settings of group {group_id!r} were changed by somebody else "
            f"meanwhile; see: marshal groups describe {group_id}",
            reason="settings_overtaken",
        )
    if verdict is not None and verdict.reason == "importing":
        raise ClaimRejected(
            f"the settings of group {group_id!r} are being moved to another "
            "coordinating partition; see: marshal topic info, then repeat the change",
            reason="importing",
        )
    if not sent.is_accepted:
        raise sent.unwritable(f"the settings of group {group_id!r}")
