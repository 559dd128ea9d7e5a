"""Positions that a client reported and awaits in the log (PROTOCOL 6.6, 12)."""

import attrs

from kafka_marshal.engine import Holding
from kafka_marshal.remote import api
from kafka_marshal.sidecar.group import LocalGroup


@attrs.frozen(eq=False)
class Flush:
    """Positions on their way to the log.

    Attributes:
        group: The group of the client.
        progress: The positions.
        seqs: Numbers of the heartbeats that carry them.
        sought: Holdings in which the client has sought.
    """

    group: LocalGroup
    progress: tuple[api.Progress, ...]
    seqs: tuple[int, ...]
    sought: tuple[Holding, ...]

    @property
    def is_over(self) -> bool:
        """Whether the log has the positions, or the group has failed."""
        if self.group.failure is not None:
            return True
        is_sought = any(each.rewind and each.claim.is_owned for each in self.sought)
        return not is_sought and not self.group.session.is_pending(self.seqs)
