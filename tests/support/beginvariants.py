"""Broken rules of how a partition comes into use, planted in the product."""

from kafka_marshal.protocol import fold_layouts, layout
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.records import LayoutFence
from kafka_marshal.protocol.state import ACCEPTED, GroupState

CLOCKS = ("log_time_ms", "epoch_time_ms", "append_time_ms")


def keep_the_clocks(patch):
    """The fence keeps the clocks that earlier entries have set."""
    plain = fold_layouts._begin

    def begin(state, begun):
        kept = {name: getattr(state, name) for name in CLOCKS}
        plain(state, begun)
        for name, value in kept.items():
            setattr(state, name, value)

    patch.setattr(fold_layouts, "_begin", begin)


def keep_the_reserved_keys(patch):
    """The fence keeps the keys that never move."""
    plain = fold_layouts._begin

    def begin(state, begun):
        kept = {k: one for k, one in state.keys.items() if k.topic in RESERVED_TOPICS}
        plain(state, begun)
        state.keys = kept
        state.groups = {key.group_id: GroupState() for key in kept}

    patch.setattr(fold_layouts, "_begin", begin)


def keep_the_eras(patch):
    """The fence keeps the eras of an earlier use of the partition."""
    plain = fold_layouts._begin

    def begin(state, begun):
        now, eras = state.config, state.eras
        plain(state, begun)
        if now is not None:
            state.eras = (*eras, (state.next_offset, now.era))

    patch.setattr(fold_layouts, "_begin", begin)


def take_any_fence(patch):
    """A reader treats each accepted fence as the first one."""

    def take(self, transition):
        del self
        is_fence = isinstance(transition.record, LayoutFence)
        return is_fence and transition.outcome == ACCEPTED

    patch.setattr(layout.Probes, "take", take)


def take_any_probe(patch):
    """A reader accepts the probe of another change."""
    plain = layout.Probes.take

    def take(self, transition):
        if isinstance(transition.record, LayoutFence) and self._seen:
            self._seen.append(transition.record.op_id)
        return plain(self, transition)

    patch.setattr(layout.Probes, "take", take)
