"""Identifies the records that admins write, and those of one operation."""

from typing import TypeGuard

from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.records import (
    CORDON,
    DRAIN,
    Config,
    DataGrowth,
    DecidePosition,
    Directive,
    FencingClient,
    ForgettingPartition,
    GroupSettings,
    LayoutDone,
    LayoutFence,
    LayoutFinal,
    LayoutGroups,
    LayoutImport,
    PauseGroup,
    Plan,
    ReleaseGroup,
    Reset,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.settings import Settings

LAYOUTS = (LayoutFence, LayoutImport, LayoutGroups, LayoutDone, LayoutFinal)
AdminRecord = (
    ReleaseGroup
    | PauseGroup
    | StagePosition
    | DecidePosition
    | ResolvePosition
    | ForgettingPartition
    | FencingClient
    | GroupSettings
    | Directive
    | Reset
    | Config
    | LayoutFence
    | LayoutImport
    | LayoutGroups
    | LayoutDone
    | LayoutFinal
    | DataGrowth
    | Plan
)
"""Every record kind that admins write. Members also write these kinds, to continue the
operations of dead admins; and they write Plans."""


# Kinds of actions.
PAUSE, RESUME = "pause", "resume"
GROUP_RESET, UNDO = "reset", "undo"
FORGET, FENCE, STATE_RESET = "forget", "fence", "state_reset"
SETTINGS = "settings"
FORMAT, UPGRADE, CONFIG = "format", "upgrade", "config"
RESIZE = "resize"
GROW = "grow"
REBALANCE = "rebalance"
DIRECTIVES = frozenset({DRAIN, CORDON})

# What the records of one operation have in common: kind, group and a name.
Name = tuple[str, str | None, bytes | str | None]


def is_of_admin(record: object) -> TypeGuard[AdminRecord]:
    """Return whether an admin wrote a record; a Plan only if it names a person."""
    if isinstance(record, Plan):
        return person_of(record) is not None
    return isinstance(record, AdminRecord)


def group_of(record: AdminRecord) -> str | None:
    """Return the group that a record is about, None if it concerns all groups."""
    if isinstance(record, (Config, Reset, DataGrowth, *LAYOUTS)):
        return None
    is_of_all = isinstance(record, Directive) and record.group_id == CHECKPOINT_GROUP
    return None if is_of_all else record.group_id


def directed(record: Directive) -> str:
    """Return the client or host that a directive drains or cordons, for people."""
    return f"host {record.host}" if record.client is None else f"client {record.client}"


def name_of(record: AdminRecord) -> Name:
    """Return what the records of one operation have in common."""
    if isinstance(record, Config):
        return (
            CONFIG,
            None,
            f"{record.format_id.hex()}/{record.generation}/{record.era}",
        )
    if isinstance(record, Reset):
        return STATE_RESET, None, record.op_id
    if isinstance(record, LAYOUTS):
        return RESIZE, None, record.op_id
    if isinstance(record, ForgettingPartition):
        return FORGET, record.group_id, record.incarnation
    if isinstance(record, FencingClient):
        fenced = record.fenced, record.fenced_incarnation
        return FENCE, record.group_id, repr((*fenced, record.incarnation))
    if isinstance(record, GroupSettings):
        name = f"{record.generation}/{record.incarnation.hex()}/{record.seq}"
        return SETTINGS, record.group_id, name
    if isinstance(record, Plan):  # its slices have consecutive sequence numbers
        first = record.seq - record.number
        return REBALANCE, record.group_id, f"{record.incarnation.hex()}/{first}"
    if isinstance(record, Directive):
        return record.action, group_of(record), record.op_id
    if isinstance(record, DataGrowth):
        return GROW, None, f"{record.incarnation.hex()}/{record.seq}"
    return PAUSE, record.group_id, record.op_id


def text_of(record: FencingClient | GroupSettings | Directive | Plan) -> str:
    """Return the subject of a record, for people; settings without defaults."""
    if isinstance(record, FencingClient):
        return f"{record.fenced}, process {record.fenced_incarnation.hex()}"
    if isinstance(record, Directive):
        return directed(record)
    if isinstance(record, Plan):
        return f"plan {record.follows - record.number + record.slice_count}"
    given = {name: getattr(record, name) for name in Settings._fields[1:]}
    shown = [f"{name} {value}" for name, value in given.items() if value is not None]
    return f"generation {record.generation}: {', '.join(shown) or 'defaults'}"
