"""Broken rules of changes of the partition count, planted in the fold (PROTOCOL 10)."""

import msgspec

from kafka_marshal.protocol import (
    fold_layouts,
    fold_positions,
    judging,
    layout,
    rationalizer,
)
from kafka_marshal.protocol import state as state_of_the_log
from kafka_marshal.protocol.hashing import RESERVED_TOPICS, home_partition
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import ReleasingPartition


def obey_a_late_beat(patch):
    """Heartbeats and releases of a stale owner change a final key."""
    patch.setattr(layout, "is_final", lambda state, key: False)


def obey_a_late_release(patch):
    """The release of a stale owner frees a final key and names its successor."""
    plain = judging.mismatch

    def mismatch(state, record, *, key):
        reason, known = plain(state, record, key=key), state.keys.get(key)
        is_release = isinstance(record, ReleasingPartition)
        if reason == "not_owner" and is_release and known is not None:
            sender = (record.client_id, record.incarnation)
            return None if known.owner == sender else reason
        return reason

    patch.setattr(judging, "mismatch", mismatch)


def claim_an_unknown_key_before_done(patch):
    """A target treats a key as new although its source may know the key."""
    patch.setattr(layout, "is_importing", lambda state, key: False)


def obey_a_second_import(patch):
    """Each import overwrites the key, also if the target knows it."""
    plain = fold_layouts._import_key

    def import_key(step, named, item, *, h_ms):
        if named in step.state.keys:
            fold_layouts._drop_key(step.state, named)
            step.state.rebuild_derived()
        return plain(step, named, item, h_ms=h_ms)

    patch.setattr(fold_layouts, "_import_key", import_key)


def keep_an_earlier_life(patch):
    """A fence keeps the keys that a missing Final would have dropped."""

    def keep(state):
        state.layout = None

    patch.setattr(fold_layouts, "_drop_moved", keep)
    patch.setattr(fold_layouts, "_begin", lambda state, begun: None)


def keep_what_a_missed_final_left(patch):
    """A fence keeps the keys that moved away, which a Final would drop."""
    drop = fold_layouts._drop_moved

    def keep(state):
        state.layout = None

    def final(step, record):
        with patch.context() as during:
            during.setattr(fold_layouts, "_drop_moved", drop)
            return fold_layouts._final(step, record)

    patch.setattr(fold_layouts, "_drop_moved", keep)
    _replace(patch, fold_layouts.LayoutFinal, final)


def forget_the_leader_epoch(patch):
    """Tokens have only the era and the offset."""
    plain = state_of_the_log.WorldState.token

    def token(self, key):
        return plain(self, key)._replace(leader_epoch=0)

    patch.setattr(state_of_the_log.WorldState, "token", token)


def claim_a_moving_key(patch):
    """A source accepts claims of keys that move."""
    plain = judging.is_misplaced

    def is_misplaced(state, key, *, config):
        moves = layout.is_moving(state, key)
        return plain(state, key, config=config) and not moves

    patch.setattr(judging, "is_misplaced", is_misplaced)


def count_no_imports(patch):
    """A Done is accepted although keys are missing."""
    plain = fold_layouts._done

    def done(step, record):
        return plain(step, msgspec.structs.replace(record, key_count=0))

    _replace(patch, fold_layouts.LayoutDone, done)


def end_with_an_open_source(patch):
    """A Final ends the change in a target whose source is not done."""

    def final(step, record):
        state = step.state
        if state.layout is None or state.layout.op_id != record.op_id:
            return (step.refused("layout"),)
        fold_layouts._drop_moved(state)
        state.rebuild_derived()
        return (step.accepted("layout_final"),)

    _replace(patch, fold_layouts.LayoutFinal, final)


def keep_the_era(patch):
    """A fence may have the era of the Config before it."""
    patch.setattr(fold_layouts, "_may_follow", lambda *_, **__: True)


def move_every_key(patch):
    """A change treats all keys of its partitions as moving."""

    def is_moving(state, key):
        return state.layout is not None and key.topic not in RESERVED_TOPICS

    patch.setattr(layout, "is_moving", is_moving)


def refuse_every_late_beat(patch):
    """While a change is open, a heartbeat of any stale owner is ignored."""

    def is_final(state, key):
        known = state.keys.get(key)
        is_stale = known and known.freshness(state.now_ms) is Freshness.STALE
        return state.layout is not None and bool(is_stale)

    patch.setattr(layout, "is_final", is_final)


def import_every_key(patch):
    """A target accepts no claim of an unknown key before all its sources are done."""

    def is_importing(state, key):
        del key
        change = state.layout
        return change is not None and any(
            each.done_ms is None for each in change.sources
        )

    patch.setattr(layout, "is_importing", is_importing)


def drop_every_key(patch):
    """A Final drops all keys."""

    def drop(state):
        state.layout = None
        for key in list(state.keys):
            fold_layouts._drop_key(state, key)

    patch.setattr(fold_layouts, "_drop_moved", drop)


def forget_the_eras(patch):
    """A fence changes the tokens of claims in force."""
    plain = fold_layouts._fence

    def fence(step, record):
        transitions = plain(step, record)
        step.state.eras = ()
        return transitions

    _replace(patch, fold_layouts.LayoutFence, fence)


def fence_over_an_open_change(patch):
    """Partition 0 accepts a fence although a change or a pause is open."""
    patch.setattr(fold_layouts, "_is_busy", lambda state: False)


def pause_while_open(patch):
    """Partitions accept pauses during a change."""
    patch.setattr(judging, "_refuses_pauses", lambda state, *, ends: None)


def obey_second_settings(patch):
    """Each import puts the settings that it carries in force."""
    plain = fold_layouts._import_settings

    def import_settings(step, item, *, config):
        group = step.state.groups.get(item.group_id)
        if group is not None:
            group.settings = None
        return plain(step, item, config=config)

    patch.setattr(fold_layouts, "_import_settings", import_settings)


def configure_before_done(patch):
    """A new home accepts settings, Plans and directives before its imports are done."""
    patch.setattr(layout, "is_importing_group", lambda state, group_id: False)


def keep_settings_at_an_earlier_home(patch):
    """A Final keeps the settings of groups whose home has moved away."""
    patch.setattr(fold_layouts, "is_home_moving", lambda state, group_id: False)


def end_whatever_is_locked(patch):
    """A Final does not wait for locks and verdicts."""
    patch.setattr(fold_layouts, "_is_unresolved", lambda state: False)


def fence_beside_a_pause(patch):
    """A fence does not end the pauses of partitions other than 0."""
    patch.setattr(fold_layouts, "_end_pauses", lambda state, offset: None)


def move_the_home_at_once(patch):
    """From the fence on, the home of a set position is that under the new count."""

    def is_home(state, group_id, *, config):
        count = config.partition_count
        return home_partition(group_id, partition_count=count) == state.partition

    patch.setattr(fold_positions, "_is_home", is_home)


def _replace(patch, record, fold):
    _, level = rationalizer._HANDLERS[record]
    patch.setitem(rationalizer._HANDLERS, record, (fold, level))
