"""Broken rules of changes of the partition count, planted in the fold (PROTOCOL 10)."""

import msgspec

from kafka_marshal.protocol import (
    fold_groups,
    fold_layouts,
    fold_plans,
    judging,
    layout,
    rationalizer,
)


def obey_a_late_beat(patch):
    """Heartbeats and releases of a stale owner change a final key."""
    patch.setattr(layout, "is_final", lambda state, key: False)


def claim_an_unknown_key_before_done(patch):
    """A target takes a key for new that its source may know."""
    patch.setattr(layout, "is_importing", lambda state, key: False)


def obey_a_second_import(patch):
    """Each import makes the key what it carries."""
    plain = fold_layouts._import_key

    def import_key(step, named, item, *, h_ms):
        if named in step.state.keys:
            fold_layouts._drop_key(step.state, named)
            step.state.rebuild_derived()
        return plain(step, named, item, h_ms=h_ms)

    patch.setattr(fold_layouts, "_import_key", import_key)


def keep_an_earlier_life(patch):
    """A fence leaves the keys that a missed Final would have dropped."""

    def keep(state):
        state.layout = None

    patch.setattr(fold_layouts, "_drop_moved", keep)
    patch.setattr(fold_layouts, "_drop_earlier_life", lambda state: None)


def claim_a_moving_key(patch):
    """A source takes claims of keys that move."""
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
    patch.setattr(fold_layouts, "_may_follow", lambda *_: True)


def fence_over_an_open_change(patch):
    """Partition 0 takes a fence whatever is in progress."""
    patch.setattr(fold_layouts, "_is_busy", lambda state: False)


def pause_while_open(patch):
    """Partition 0 takes pauses during a change."""
    patch.setattr(judging, "_refuses_pauses", lambda state, *, ends: None)


def obey_second_settings(patch):
    """Each import puts the settings that it carries in force."""
    plain = fold_layouts._import_settings

    def import_settings(step, item):
        group = step.state.groups.get(item.group_id)
        if group is not None:
            group.settings = None
        return plain(step, item)

    patch.setattr(fold_layouts, "_import_settings", import_settings)


def configure_before_done(patch):
    """A new home takes settings, Plans and directives that an import may overtake."""
    for module in (fold_groups, fold_plans, layout):
        patch.setattr(module, "is_importing_group", lambda state, group_id: False)


def keep_settings_at_an_earlier_home(patch):
    """A Final leaves the settings of groups whose home has moved away."""
    patch.setattr(fold_layouts, "is_home_moving", lambda state, group_id: False)


def _replace(patch, record, fold):
    _, level = rationalizer._HANDLERS[record]
    patch.setitem(rationalizer._HANDLERS, record, (fold, level))
