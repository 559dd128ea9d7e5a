"""Changes the settings of a group, on its home partition (PROTOCOL 9.1)."""

from collections.abc import Mapping
from typing import Any

import attrs

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.arguments import (
    require_instance,
    require_name,
    with_plain_arguments,
)
from kafka_marshal.engine.config_check import require_level
from kafka_marshal.errors import ClaimRejected, ConfigurationError
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import GroupSettings
from kafka_marshal.protocol.settings import POLICIES, TUNABLES, Settings
from kafka_marshal.protocol.state import WorldState


@attrs.frozen(kw_only=True)
class SettingsChange:
    """Settings of a group before and after a change.

    Attributes:
        group_id: The group.
        before: Settings before the change, with generation 0 if the group had none.
        after: Settings after the change, with the next generation.
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
    """Return the effect of a change of some settings; the others stay.

    Args:
        home: The group's home partition, folded to its end.
        group_id: The group.
        changes: New values by name: a name of ``TUNABLES``, or ``policy`` with one of
            ``POLICIES``; None for the default.

    Raises:
        ConfigurationError: A name or value is invalid, or the topic's feature level has
            no settings of groups.
    """
    require_instance("changes", changes, kind=Mapping)
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
        raise ConfigurationError(
            f"{name} must be a number, not {value!r}", setting=name
        )
    if value is not None and not tunable.least <= value <= tunable.most:
        raise ConfigurationError(
            f"{name} is {value}; it must be {tunable.least} to {tunable.most}, and is "
            f"{tunable.default} by default",
            setting=name,
        )


class Tuning(AdminConnection):
    """Settings of groups, as a part of ``Admin``; for one thread."""

    @with_plain_arguments
    def set_group(
        self,
        group_id: str,
        changes: Mapping[str, int | str | None],
        *,
        reason: str | None = None,
        execute: bool = False,
    ) -> SettingsChange:
        """Change how a group's members share and hand off partitions.

        Members apply the change when they read it. Settings that are not named stay.

        Args:
            group_id: The group.
            changes: New values of some of ``policy``, ``debounce_ms``, ``handoff_ms``,
                ``handoffs_max`` and ``grace_ms``; None for the default of a setting.
            reason: Stored in the log, for people.
            execute: Whether to write the change.

        Raises:
            ConfigurationError: A value is invalid, or the feature level is below 2.
            ClaimRejected: Another admin changed the settings meanwhile, or they are
                being moved to another coordinating partition.
            LogUnwritable: The log has no room for another group.
        """
        require_name("group_id", group_id)
        config, follower = self._settled(), self._follow()
        home = home_partition(group_id, partition_count=config.partition_count)
        world = follower.replicas[home].world
        change = plan_settings(world, group_id, changes=changes)
        if execute and change.is_changed:
            self._write_settings(home, change, reason)
        return change

    def _write_settings(
        self, home: int, change: SettingsChange, reason: str | None
    ) -> None:
        group_id = change.group_id
        record = GroupSettings(
            **self._sender.fields(group_id), **change.after._asdict(), reason=reason
        )
        (sent,) = self._write((home, record))
        why = None if sent.transition is None else sent.transition.reason
        if why in _WHY:
            raise ClaimRejected(
                f"the settings of group {group_id!r} {_WHY[why].format(group_id)}",
                reason=why,
            )
        if not sent.is_accepted:
            raise sent.unwritable(f"the settings of group {group_id!r}")


_WHY = {
    "settings_overtaken": "were changed by somebody else meanwhile; see: marshal "
    "groups describe {}",
    "importing": "are being moved to another coordinating partition; see: marshal "
    "topic info, then repeat the change",
}
