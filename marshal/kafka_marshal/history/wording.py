"""Sentences that explain a key's state, its events, and the actions of admins.

Pure functions. Texts from the log, such as reasons, are quoted as they are; the code
that shows them escapes them (PROTOCOL 12).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kafka_marshal.clock import instant
from kafka_marshal.counting import counted
from kafka_marshal.history.actions import (
    ENDED,
    ENDED_BY_RESET,
    EXPIRED,
    PARTIAL,
    RECREATED,
    RESUMED,
    WITHDRAWN,
    Action,
    ActionRecord,
    ActionStep,
    Ended,
)
from kafka_marshal.history.admin_records import DIRECTIVES, GROW, PAUSE
from kafka_marshal.history.chain import (
    DROPPED,
    PAUSE_EXPIRED,
    RENEWED_LATE,
    TAKEN,
    UNSCHEDULED,
    KeyEvent,
    KeyPath,
)
from kafka_marshal.history.rows import RESTORED, PauseRow
from kafka_marshal.protocol.judging import is_fenced, is_paused
from kafka_marshal.protocol.layout import is_final, is_importing
from kafka_marshal.protocol.lease import Freshness, freshness
from kafka_marshal.protocol.losses import STALE
from kafka_marshal.protocol.placement import place_under, target_of
from kafka_marshal.protocol.state import ACCEPTED, KeyState, WorldState
from kafka_marshal.protocol.types import Key

REFUSALS = {
    "busy": "a change of the number of coordinating partitions was open",
    "cas": "the record named another claim, or another topic, than the partition's",
    "duplicate": "the sender's process owns the partition already",
    "handoff": "the partition was reserved for another client",
    "done": "the imports from that coordinating partition had ended",
    "held": "the partition had an owner",
    "importing": (
        "the coordinating partition that the partition moves from may still have it: "
        "members claim it here once it is imported, or nothing is left to import"
    ),
    "known": "the partition had been imported already, and the first import counts",
    "layout": (
        "no change of the number of coordinating partitions by this operation was open"
    ),
    "late": "the offer had ended",
    "level": "the record is above the feature level in force",
    "limits": "a limit of the Config was reached",
    "locked": "an operation that sets positions had locked the partition",
    "moving": (
        "the partition moves to another coordinating partition: its owner releases it, "
        "and members claim it there"
    ),
    "no_config": "the coordinating partition has no Config",
    "no_offer": "the partition was not offered",
    "not_owner": "the sender's process does not own the partition",
    "not_paused": "the pause of the record's operation was not in force",
    "not_successor": "the partition was offered to another client",
    "nothing_left": "all of the requested offsets were granted before",
    "old_epoch": "the record named another claim than the partition's",
    "old_topic": "the record named an earlier topic of this name",
    "op_over": "the record's operation had ended",
    "paused": "the group was paused",
    "plan_mismatch": "the record's operation had locked other partitions or positions",
    "quiet": "a Reset was less than two heartbeat intervals ago",
    "resume_mismatch": "the claim that the record resumes is not the partition's",
    "resume_not_fresh": "the claim that the record resumes was too old",
    "retired": (
        "this coordinating partition is not in use any more: members claim the "
        "partition where the present number of coordinating partitions places it"
    ),
    "sender_fenced": "the sender's process is fenced",
    "span": "the record requested more offsets than the limit",
    "unknown_key": "the log had no state of the partition",
    "wrong_generation": "the record named another Config than the one in force",
    "wrong_partition": (
        "the partition belongs to another coordinating partition, where members claim "
        "it from now on"
    ),
}
"""Why a record about a key was refused or ignored, by its reason."""

OWNED, STALE_OWNER, FREE, LOCKED, UNCLAIMED, HALTED = (
    *("owned", "stale", "free"),
    *("locked", "unclaimed", "halted"),
)
T = TypeVar("T")
_BEGINNINGS = frozenset({"claimed", TAKEN, "resumed"})
_ENDINGS = frozenset({"staged", "reset"})
_GONE = frozenset({"forgotten", DROPPED})


def _seconds(value_ms: int) -> str:
    return f"{value_ms / 1000:.1f} s"


def state_of(chain: KeyPath, world: WorldState, *, elapsed_ms: int = 0) -> str:
    """Return the key's state in one word.

    Args:
        chain: The chain.
        world: The state at its end.
        elapsed_ms: Time since the last entry of the coordinating partition.
    """
    if world.halted is not None:
        return HALTED
    known = world.keys.get(chain.key)
    if known is None:
        return UNCLAIMED
    if known.lock is not None:
        return LOCKED
    if known.owner is None:
        return FREE
    age_ms = known.age_ms(world.now_ms) + elapsed_ms
    is_stale = freshness(age_ms, known.heartbeat_interval_ms) is Freshness.STALE
    return STALE_OWNER if is_stale else OWNED


def why(chain: KeyPath, world: WorldState, *, elapsed_ms: int = 0) -> str:
    """Return why the key's state is what it is, in one sentence.

    Args:
        chain: The chain.
        world: The state at its end.
        elapsed_ms: Time since the last entry of the coordinating partition.
    """
    state, known = (
        state_of(chain, world, elapsed_ms=elapsed_ms),
        world.keys.get(chain.key),
    )
    if world.halted is not None:
        return (
            f"unknown from offset {world.halted.offset} on: a Config there needs "
            f"feature level {world.halted.feature_level}, which this release does not "
            "know"
        )
    if known is None:
        text = _unclaimed(chain)
    elif state == LOCKED:
        text = _locked(chain, known)
    elif state == FREE:
        text = _free(chain)
    else:
        text = _owned(chain, world, elapsed_ms=elapsed_ms)
    barriers = _barriers(chain, world, known)
    return "; ".join([text, *barriers])


def _place(event: KeyEvent) -> str:
    where = "" if event.offset is None else f" (offset {event.offset})"
    return f"{instant(event.at_ms)}{where}"


def _last(chain: KeyPath, kinds: Iterable[str]) -> KeyEvent | None:
    wanted = frozenset(kinds)
    found = (event for event in reversed(chain.events) if event.what in wanted)
    return next(found, None)


def _beginning(chain: KeyPath) -> str:
    return f"checkpoint at offset {(chain.began_at or 0) - 1}"


def _unclaimed(chain: KeyPath) -> str:
    gone = _last(chain, _GONE)
    since = "the log began"
    if chain.began_at is not None:
        since = f"the {_beginning(chain)}"
    if gone is None:
        text = f"unclaimed: no claim has been accepted since {since}"
    else:
        text = f"unclaimed since {_place(gone)}: {text_of(gone)}"
    refused = chain.events[-1] if chain.events else None
    if refused is None or refused.record != "ClaimingPartition":
        return text
    return f"{text}; the last attempt: {text_of(refused)}"


def _locked(chain: KeyPath, known: KeyState) -> str:
    assert known.lock is not None
    op_id = known.lock.op_id.hex()
    staged = _last(chain, ["staged"])
    since = "" if staged is None else f" since {_place(staged)}, by {_who(staged)}"
    return (
        f"locked{since}: operation {op_id} sets the position to "
        f"{known.lock.position}, and is neither committed nor aborted here yet; until "
        "then no member can claim the partition"
    )


def _free(chain: KeyPath) -> str:
    """Return what ended the last claim, and how the position was set since."""
    ended = next(filter(_ends_claim, reversed(chain.events)), None)
    if ended is None:
        ended = _last(chain, ["reset", RESTORED])
    if ended is None or ended.what == RESTORED:
        return f"free: {_restored_free(chain)}"
    text = f"free since {_place(ended)}: {text_of(ended)}"
    # Offsets of two coordinating partitions do not compare; the order of events does.
    since = list(chain.events)
    since = since[since.index(ended) :]
    for kind in ("position_set", "imported"):
        last = next((each for each in reversed(since) if each.what == kind), None)
        if last is not None:
            text = f"{text}; {text_of(last)} at {_place(last)}"
    return text


def _ends_claim(event: KeyEvent) -> bool:
    has_owner = event.owner is not None
    return event.what == "released" or (event.what in _ENDINGS and has_owner)


def _restored_free(chain: KeyPath) -> str:
    return (
        f"the partition had no owner at the {_beginning(chain)}, and earlier records "
        "were not read"
    )


def _owned(chain: KeyPath, world: WorldState, *, elapsed_ms: int) -> str:
    known = world.keys[chain.key]
    assert known.owner is not None
    token, begun = world.token(chain.key), _last(chain, _BEGINNINGS)
    named = f"owned by {known.owner.client_id}"
    if begun is None:
        text = (
            f"{named} since offset {known.epoch} (token {token}), before the "
            f"{_beginning(chain)}, where this reading begins"
        )
    else:
        text = f"{named} since {_place(begun)}, token {token}: {text_of(begun)}"
    age_ms = known.age_ms(world.now_ms) + elapsed_ms
    is_stale = freshness(age_ms, known.heartbeat_interval_ms) is Freshness.STALE
    if is_fenced(world, known.owner, group_id=chain.key.group_id):
        text = f"{text}; the owner's process is fenced, and cannot renew the claim"
    if not is_stale:
        return f"{text}; renewed {_seconds(age_ms)} ago"
    return (
        f"{text}; stale: not renewed for {_seconds(age_ms)}, which is more than two "
        f"intervals of {_seconds(known.heartbeat_interval_ms)}, so any member may "
        "take over the partition"
    )


def _barriers(chain: KeyPath, world: WorldState, known: KeyState | None) -> list[str]:
    """Return what else keeps clients from claiming the key now."""
    found = []
    if chain.pause is not None and is_paused(world, chain.key):
        by = chain.pause.renewed_by
        renewed = "" if by is None else f"; renewed by {by}"
        text = (
            f"no member can claim the partition: {_pause(chain, chain.pause)}{renewed}"
        )
        found.append(text)
    if world.quiet_until_ms is not None:
        left_ms = world.quiet_until_ms - world.now_ms
        found.append(
            "no member can claim a partition in this coordinating partition for "
            f"another {_seconds(left_ms)} after the Reset"
        )
    found += _moving(world, chain.key)
    handoff = None if known is None or known.owner is not None else known.handoff
    if handoff is not None and world.now_ms < handoff[1]:
        left_ms = handoff[1] - world.now_ms
        found.append(f"reserved for {handoff[0]} for another {_seconds(left_ms)}")
    return found


def _moving(world: WorldState, key: Key) -> Iterable[str]:
    """Yield why the key cannot be claimed here while the partition count changes."""
    target = target_of(world, key)
    if target is not None and is_final(world, key):
        yield (
            f"the partition moves to coordinating partition {target}: nothing changes "
            "it here any more, and members claim it there once it is imported"
        )
    elif target is not None:
        yield (
            f"the partition moves to coordinating partition {target}: no member can "
            "claim it here; it is imported there once its owner has released it, or "
            "has gone stale"
        )
    elif key not in world.keys and is_importing(world, key):
        assert world.layout is not None  # else nothing is imported
        source = place_under(key, world.layout.from_count)
        yield (
            f"the partition may exist in coordinating partition {source}, which it "
            "moves from: members claim it here once it is imported, or nothing is left "
            "to import"
        )


def _pause(chain: KeyPath, pause: PauseRow) -> str:
    begun = _last(chain, ["paused"])
    is_shown = begun is not None and begun.op_id == pause.op_id
    who = pause.client_id if begun is None or not is_shown else _who(begun)
    reason = "" if pause.reason is None else f": {pause.reason}"
    what = "the group is" if pause.scope is None else "the partition is"
    return f"{what} paused until {instant(pause.until_ms)} by {who}{reason}"


# --- an admin's action


def outcome_of(action: Action) -> str:
    """Return the outcome of an action, and how a pause ended."""
    refusals = ", ".join(f"{name} {n}x" for name, n in action.refusals.items())
    text = action.outcome
    if action.outcome == PARTIAL:
        text = "accepted in some coordinating partitions only"
    if refusals and action.outcome != ACCEPTED:
        text = f"{text} (refused: {refusals})"
    if action.text is not None:
        text = f"{text}: {action.text}"
    if action.kind in DIRECTIVES and action.until_ms is not None:
        early = "" if action.ended is None else f"; {_ending(action)}"
        return f"{text} until {instant(action.until_ms)}{early}"
    if action.steps:
        text = f"{text}; {_steps(action.steps)}"
    if action.kind == GROW and action.ended is not None:
        return f"{text}; {_ending(action)}"
    if action.text is not None:
        return text
    if action.keys:
        text = f"{text}: {_keys(action)}"
    if action.undoes is not None:
        text = f"{text}, as before operation {action.undoes.hex()}"
    if action.until_ms is None or action.kind != PAUSE:
        return text
    renewed = _renewed(action.renewals_count, action.renewed_by)
    since = "" if action.begin_ms is None else f" from {instant(action.begin_ms)}"
    of = f" of {', '.join(action.topics)}" if action.topics else ""
    until = f"{of}{since} until {instant(action.until_ms)}"
    return f"{text}{until}{renewed}; {_ending(action)}"


def _steps(steps: Sequence[ActionStep]) -> str:
    """Return how far a change of a partition count is, and how long each step took.

    Times count from the first record of the change.
    """
    begin_ms = min(each.first_ms for each in steps)
    return ", ".join(
        f"{each.count} {_COUNTED[each.name]} within "
        f"{_seconds(max(0, each.last_ms - begin_ms))}"
        for each in steps
    )


_COUNTED = {
    "fenced": "partitions fenced",
    "imported": "keys imported",
    "groups": "settings and directives imported",
    "done": "source and target pairs done",
    "ended": "partitions completed",
    "announced": "partitions announced",
    "grown": "partition ends recorded",
}


def _keys(action: Action) -> str:
    outcomes = Counter(each.outcome for each in action.keys)
    return ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))


_HOW = {
    RESUMED: "resumed",
    ENDED: "ended",
    ENDED_BY_RESET: "ended by a Reset",
    WITHDRAWN: "withdrawn",
    RECREATED: "dropped for a later topic of that name",
}


def _ending(action: Action) -> str:
    if action.ended is None and action.scheduled and not action.lasting:
        return "not begun yet"
    if action.ended is None:
        return "still in force" if action.lasting else "the end is not in the log"
    ended, at = action.ended, instant(action.ended.at_ms)
    if ended.how == EXPIRED:
        # The record that shows the expiry may come later, if few are written.
        at_ms = min(ended.at_ms, action.until_ms or ended.at_ms)
        return f"ended by expiry at {instant(at_ms)}"
    person = "" if ended.person is None else f" ({ended.person})"
    how = _HOW[ended.how]
    return f"{how} by {ended.client_id}{person} at {at}"


# --- one event


def text_of(event: KeyEvent) -> str:
    """Return the text of an event, without its place and time."""
    text = _TEXTS[event.what]
    return text.format_map(_words(event)) if isinstance(text, str) else text(event)


def _words(event: KeyEvent) -> dict[str, Any]:
    """Return the values for the placeholders in the texts of events."""
    op_id, before, source = event.op_id, event.before, event.move
    return {
        "who": _who(event),
        "owner": event.owner,
        "partition": event.partition,
        "position": event.position,
        "at": _at(event.position),
        "was": "unknown" if before is None else before,
        "of": ", ".join(event.topics) or "the group",
        "from": _maybe(" from {}", event.begin_ms, instant),
        "until": _maybe(" until {}", event.until_ms, instant),
        "renewed": _renewed(event.count - 1, event.renewed_by),
        "operation": _maybe(" by operation {}", op_id, bytes.hex),
        "reserved": _maybe(", reserved for {}", event.successor),
        "to": _maybe(" to {}", event.successor),
        "source": "" if source is None else f" {source.source}",
        "because": _because(event),
    }


def _maybe(
    text: str, value: T | None, shown: Callable[[T], object] = lambda value: value
) -> str:
    """Return a text with a value, an empty text without one."""
    return "" if value is None else text.format(shown(value))


def _who(event: KeyEvent) -> str:
    person = "" if event.person is None else f" ({event.person})"
    return f"{event.client_id}{person}"


def _at(position: int | None) -> str:
    return _maybe(" at position {}", position)


_IMPLIED = {
    "claimed": "free",
    TAKEN: "{owner} is stale",
    "resumed": "held by an earlier process of this client",
}
"""The part of a reason that the text of an event already states, by kind of event."""


def _because(event: KeyEvent) -> str:
    """Return the reason that the client stated, without the part that is implied."""
    implied = _IMPLIED.get(event.what, "").format(owner=event.owner)
    parts = (event.reason or "").split("; ")
    reason = "; ".join(part for part in parts if part != implied)
    return f": {reason}" if reason else ""


def _renewed(count: int, by: str | None) -> str:
    last = "" if by is None else f", last by {by}"
    return f", renewed {counted(count, 'time')}{last}" if count else ""


def _unsuccessful(event: KeyEvent) -> str:
    if event.record == "ClaimingPartition":
        asked = f"a claim by {_who(event)} was {event.what}"
    else:
        asked = f"a {event.record} of {_who(event)} was {event.what}"
    reason = event.reason or ""
    text = REFUSALS.get(reason, "see the table of reasons in the protocol")
    if reason == "held" and event.owner is not None:
        text = f"{event.owner} owned the partition"
    elif reason == "not_owner" and event.owner is not None:
        text = f"{event.owner} owns the partition now"
    times = "" if event.count == 1 else f" {event.count} times"
    return f"{asked}{times} as {reason}: {text}"


def _layout_fenced(event: KeyEvent) -> str:
    text = (
        f"{_who(event)} began to change the number of coordinating partitions"
        f"{' ' + event.reason if event.reason else ''}"
    )
    move = event.move
    if move is None or move.op_id != event.op_id:
        return text
    if move.target == event.partition:
        source = move.source
        return f"{text}: the partition moves here from coordinating partition {source}"
    return (
        f"{text}: the partition moves to coordinating partition {move.target}; members "
        "cannot claim it here any more"
    )


def _layout_final(event: KeyEvent) -> str:
    move = event.move
    text = f"{_who(event)} ended the change of the number of coordinating partitions"
    if move is None or move.target == event.partition:
        return text
    return (
        f"{text}: the partition had moved to coordinating partition {move.target}, and "
        "is dropped here"
    )


def _restored(event: KeyEvent) -> str:
    text = "earlier records were not read; at this checkpoint "
    if event.op_id is not None:
        return f"{text}operation {event.op_id.hex()} had locked the partition"
    if event.client_id is None:
        return f"{text}the partition had no owner"
    return f"{text}{_who(event)} owned the partition{_at(event.position)}"


_TEXTS: dict[str, str | Callable[[KeyEvent], str]] = {
    "claimed": "{who} claimed the free partition{at}{because}",
    TAKEN: "{who} took over the partition{at} from {owner}, which had gone stale"
    "{because}",
    "resumed": "{who} restarted and resumed its claim{at}{because}",
    "released": "{who} released the partition{at}{reserved}{because}",
    STALE: "{who} had not renewed the claim for two heartbeat intervals; any member "
    "may take over the partition",
    RENEWED_LATE: "{who} renewed the claim again, before another member claimed the "
    "partition",
    "refused": _unsuccessful,
    "ignored": _unsuccessful,
    "scheduled": "{who} scheduled a pause of {of}{from}{until}{because}",
    UNSCHEDULED: "{who} cancelled a scheduled pause of {of}{because}",
    "paused": "{who} paused {of}{until}{renewed}{because}",
    "unpaused": "{who} ended the pause of {of}{because}",
    PAUSE_EXPIRED: "the pause of {of} reached its end",
    "staged": "{who} locked the partition, to set its position to "
    "{position}{operation}",
    "decided": "{who} committed the set position{operation}, in coordinating partition "
    "{partition}",
    "position_set": "{who} set the position to {position} (before: "
    "{was}){operation}{because}",
    "unlocked": "{who} unlocked the partition, its position unchanged: the set "
    "position was aborted{operation}{because}",
    "forgotten": "{who} forgot the partition, with its position {was} and granted "
    "offsets; the next claim begins as a first claim does",
    DROPPED: "the state of the partition was dropped, because it had had no owner and "
    "no change for long",
    "offered": "{who} offered the partition{to}; the successor warms up before the "
    "release",
    "offer_withdrawn": "{who} withdrew its offer of the partition",
    "ready": "{who} has warmed up, and is ready to own the partition",
    "fenced": "{who} fenced the process of {owner}, which owned the partition and "
    "cannot renew its claim{because}",
    "reset": "{who} reset the state of coordinating partition {partition}{operation}: "
    "none of its partitions has an owner any more",
    "configured": "a Config came into force{because}",
    "layout_fenced": _layout_fenced,
    "imported": "{who} imported the partition{at} from coordinating partition{source}, "
    "without an owner{reserved}; its earlier claims are in the log of that "
    "coordinating partition",
    "layout_done": "{who} ended the imports from coordinating partition{source}: the "
    "partition was not among them, so the next claim is the first one",
    "layout_final": _layout_final,
    RESTORED: _restored,
}
"""The text of each kind of event, with ``_words`` in braces."""


# --- actions as documents


def action_to_object(action: Action) -> dict[str, Any]:
    """Return one action of an admin as a JSON object."""
    first, ended = action.first, action.ended
    return {
        "kind": action.kind,
        "group_id": action.group_id,
        "op_id": None if action.op_id is None else action.op_id.hex(),
        "at_ms": first.at_ms,
        "coordinating_partition": first.partition,
        "offset": first.offset,
        "client_id": first.client_id,
        "person": first.person,
        "reason": action.reason,
        "outcome": action.outcome,
        "refusals": action.refusals,
        "topics": list(action.topics),
        "begin_ms": action.begin_ms,
        "until_ms": action.until_ms,
        "renewals_count": action.renewals_count,
        "renewed_by": action.renewed_by,
        "ended": None if ended is None else _ended(ended),
        "lasting_partitions": list(action.lasting),
        "scheduled_partitions": list(action.scheduled),
        "undoes": None if action.undoes is None else action.undoes.hex(),
        "keys": [
            {
                "topic": each.key.topic,
                "partition": each.key.partition,
                "position": each.position,
                "position_before": each.before,
                "outcome": each.outcome,
            }
            for each in action.keys
        ],
        "steps": [
            {
                "step": each.name,
                "count": each.count,
                "first_ms": each.first_ms,
                "last_ms": each.last_ms,
            }
            for each in action.steps
        ],
        "last_ms": action.last_ms,
        "records_count": action.records_count,
        "records": [_record(record) for record in action.records],
        "text": outcome_of(action),
    }


def _ended(ended: Ended) -> dict[str, Any]:
    return {
        "how": ended.how,
        "coordinating_partition": ended.partition,
        "offset": ended.offset,
        "at_ms": ended.at_ms,
        "client_id": ended.client_id,
        "person": ended.person,
    }


def _record(record: ActionRecord) -> dict[str, Any]:
    return {
        "coordinating_partition": record.partition,
        "offset": record.offset,
        "at_ms": record.at_ms,
        "record": record.record,
        "client_id": record.client_id,
        "outcome": record.outcome,
        "effect": record.effect,
    }
