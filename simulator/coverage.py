"""Counts how often each situation that matters was reached in a run.

A simulation that never reaches a situation proves nothing about it: the suite fails if
one of these is never reached.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kafka_marshal.engine.resolver import REASON as MEMBERS_REASON
from kafka_marshal.ports import Event
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    ClaimingPartition,
    DecidePosition,
    HandoffOffer,
    HandoffReady,
    Heartbeat,
    ReleaseGroup,
    ReleasingPartition,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import ACCEPTED, IGNORED
from simulator.checkers import Folded
from simulator.plan import RESIZE_STEPS

SITUATIONS: Mapping[str, str] = {
    "claimed": "a claim was accepted",
    "taken_over": "a stale owner lost its key to a claim",
    "takeover_at_2h_1": "a key was taken 1 ms after its owner became stale",
    "refused_at_2h": "a claim was refused at the last ms of the owner",
    "resumed": "a restarted process went on with its claim",
    "resume_refused": "a resume came too late, or with the wrong secret",
    "duplicate_claim": "a claiming record came twice",
    "ghost_claim_won": "a claim was won by a record that was given up on",
    "ghost_released": "its sender released a claim that it no longer wanted",
    "landed_after_failure": "a record landed after it was reported as failed",
    "landed_after_failover": "a record landed in a later leader epoch than it was sent",
    "tail_lost": "a failover lost a record that was not committed yet",
    "late_beat_ignored": "a beat came after its claim was gone",
    "beat_after_2h": "a beat renewed a stale claim that nobody else had taken",
    "pause_during_grant": "offsets were asked for while the group was paused",
    "moved_while_paused": "a beat moved a position during a pause",
    "claim_during_pause": "a claim was refused because of a pause",
    "grant_ignored": "offsets were asked for under a claim that was gone",
    "clock_went_back": "a leader's clock went back within its epoch",
    "clock_step_detected": "an owner shortened its lease because a clock stepped",
    "leader_behind": "a new leader's clock was behind that of the last",
    "undecodable": "somebody wrote what is no record",
    "identity_conflict": "two processes had one client_id",
    "lease_expired": "an owner stopped because its own lease had run out",
    "stopped_with_records": "a process with records was stopped for over two intervals",
    "crashed_with_records": "a process died with uncommitted records",
    "handled_beyond_2h": "records were handled for longer than two intervals",
    "duplicates": "a record was handed out again, at least once",
    "granted": "offsets were granted",
    "granted_to_another": "a process without a claim was granted offsets under one",
    "left_in_order": "a process gave up everything and ended",
    "checkpoint_written": "a checkpoint was completed",
    "checkpoint_torn": "a process died while it wrote a checkpoint",
    "began_from_checkpoint": "a process began from a checkpoint in the log",
    "began_from_kept": "a process began from what its host had kept",
    "kept_damaged": "a file that a host kept was damaged, or one of another log",
    "began_despite_damage": "a process began beside such a file, and not from it",
    "reset": "an admin replaced a state by that of a checkpoint",
    "above_ignored": "a record of a later level came, and changed nothing",
    "above_of_owner": "one of them was in the name of an owner",
    "above_behind_claim": "one of them came right behind a claim that was accepted",
    "above_behind_grant": "one of them came right behind a grant",
    "above_in_pause": "one of them came while the group was paused",
    "known_above_level": "a known record came while a level below its own was in force",
    "level_changed": "a Config of another level was accepted, that all can follow",
    "interval_changed": "a Config of another interval was accepted",
    "config_refused": "a Config above everybody's level was refused: nobody halted",
    "halted": "a reader halted at a Config above its level",
    "behind_a_halt": "a record came behind such a Config, and changed nothing",
    "started_beside_halt": "a process started behind such a Config, and refused",
    "checkpoint_above": "it did not begin from a newer program's checkpoint, either",
}
SELDOM: Mapping[str, str] = {
    "halted_with_records": "a reader halted with uncommitted records",
    "refused_torn": "a process started before a Config had reached all, and refused",
    "old_topic": "a claim for an earlier topic of the name was refused",
    "ready_refused": "a Ready came for what was not offered any more",
    "topic_missing": "a process started while its topic was deleted, and refused",
    "schedule_ended_by_resize": "a scheduled pause ended as the count changed",
    "change_restored": "a partition had lost a change that had ended, and got it again",
    "growth_released": "a new partition was won, and released as it has to wait",
    "seek_overtaken": "a key that its owner had sought in was set by an admin",
}
"""Counted, but not demanded of a suite: a few hundred seeds may not reach them."""
TRUNCATED: Mapping[str, str] = {
    "truncated": "records that were read by somebody were lost",
    "truncated_grant": "among them a grant",
    "truncated_claim": "among them a claim",
    "exposed": "an engine reported that offsets may be handed out twice",
    "exposed_untold": "an owner of lost offsets ended before it could report them",
}
RECREATED: Mapping[str, str] = {
    "recreated": "the data topic was deleted, to be created again",
    "recreated_with_records": "a client had uncommitted records of it then",
    "topic_ended": "a claim ended because its topic was gone",
    "topic_changed": "a key was claimed for a topic of another id",
}
SET: Mapping[str, str] = {
    "set_committed": "an operation that sets positions was committed",
    "set_back": "a key was set to an earlier position",
    "set_forward": "a key was set to a later position",
    "set_to_zero": "a key was set to 0",
    "set_aborted": "a key was unlocked at the position that it had",
    "set_undone": "an operation was undone, with the exact positions",
    "commit_by_member": "a member finished what an admin had committed",
    "abort_by_member": "a member unlocked what an admin had left undecided",
    "admin_died_pausing": "an admin died before a record of its pause",
    "admin_died_staging": "an admin died before it had locked all keys",
    "admin_died_deciding": "an admin died before its commit",
    "admin_died_resolving": "an admin died before it had resolved all",
    "admin_gave_up": "an admin ended without a commit, and knew it",
    "stage_held": "a Stage came before the owner of a key was stale",
    "stage_too_late": "a Stage came after the operation, or its pause, was over",
    "decide_refused": "a Decide came after the operation was over, or during another",
    "pause_busy": "an admin was refused its pause because of another",
    "resolved_twice": "a Resolve came that had nothing left to do",
    "late_beat_after_set": "a heartbeat of an old owner came after a position was set",
}
"""Demanded of suites in which admins set positions."""
FENCED: Mapping[str, str] = {
    "fenced_live": "a process that works was fenced",
    "fenced_hung": "a process that hangs was fenced",
    "fenced_gone": "a process that has ended was fenced, and still owned keys",
    "fenced_replaced": "another process of its client lived then",
    "fence_repeated": "a process was fenced again",
    "fence_torn": "an admin died between two coordinating partitions",
    "fence_late": "a fence reached some partitions later than others",
    "fence_noticed": "a process read its own fence, and ended",
    "refused_as_fenced": "a record of a fenced process was refused",
    "beat_of_fenced": "a heartbeat of a fenced process did not renew",
    "taken_from_fenced": "a fenced process lost its key to a claim",
    "resumed_from_fenced": "the next process of its client resumed its claim",
}
"""Demanded of suites in which admins fence processes."""
SCHEDULED: Mapping[str, str] = {
    "scheduled": "a pause was scheduled",
    "schedule_begun": "a scheduled pause began, with its admin gone",
    "schedule_waited": "it was due while another pause lasted, and began then",
    "schedule_missed": "it never began: another pause lasted until its end",
    "schedule_cancelled": "it was cancelled before it began",
    "schedule_repeated": "the same pause was scheduled again",
    "schedule_refused": "a pause was not scheduled: too many, or over",
}
"""Demanded of suites in which admins schedule pauses."""
GREW: Mapping[str, str] = {
    "growth_announced": "a growth of the data topic was announced",
    "growth_ended": "the ends of its old partitions were written",
    "growth_left": "an admin died before its growth had ended",
    "growth_continued": "another admin continued that growth",
    "growth_withdrawn": "another admin withdrew it",
    "grown_begun": "a new partition was begun",
    "grown_waited": "a new partition had records, and waited for the old one",
}
"""Demanded of suites in which the data topic grows."""
SOUGHT: Mapping[str, str] = {
    "sought_back": "an owner sought back",
    "sought_forward": "an owner sought forward",
    "sought_while_paused": "an owner sought while its group was paused",
    "seek_confirmed": "the log confirmed a seek",
    "seek_ended_claim": "a seek ended the claim: an earlier record may still land",
    "seek_refused": "a seek was refused, at most once",
    "taken_after_seek": "another had a key that its owner had just sought in",
}
"""Demanded of suites in which members seek."""
PLANNED: Mapping[str, str] = {
    "planned": "a member wrote a plan that was the next one",
    "plan_overtaken": "a member wrote a plan, and another one was earlier",
    "plan_garbage": "a plan named any members for any keys",
    "plan_old": "a plan followed an earlier one than the last",
    "plan_cut": "a plan had no last slice",
    "planning_off": "the policy of the group was changed back",
}
"""Demanded of suites in which the group follows Plans."""
RESIZED: Mapping[str, str] = {
    "grown": "an admin began a change to more coordinating partitions",
    "shrunk": "an admin began a change to less",
    "resize_completed": "an admin began a change and saw its end",
    "resize_continued": "an admin saw the end of a change that was open",
    "resize_given_up": "an admin died before the commit point of its change",
    "resize_left": "an admin died later, before it saw the end",
    "resize_refused": "a change was refused: another one, or a pause, was open",
    "probes_lost": "retention deleted what a change that was given up has left",
    "began_with_fence": "a reader without these records knew the state from a fence on",
    **{
        f"died_{when}_{step}": f"an admin died {when} that step of a change"
        for step in RESIZE_STEPS
        for when in ("before", "after")
    },
    "moved": "a key without owner was imported",
    "moving_released": "an owner released a key that moves",
    "moved_stale": "a key of an owner that was stale was imported",
    "grant_refused_moving": "a request of an owner was refused as the key moves",
}
"""Demanded of suites in which the number of coordinating partitions changes."""
HANDED: Mapping[str, str] = {
    "handoff_offered": "a key was offered to a successor that warms up",
    "handoff_ready": "a successor reported ready",
    "handed_over_warm": "it claimed the key that was released to it then",
    "handoff_withdrawn": "an offer was withdrawn",
    "handoff_lapsed": "an offer ended without a Ready in time",
    "warm_failed": "an application failed to warm up",
    "successor_died_warming": "a process died while it warmed up",
    "owner_died_warming": "an owner died while its successor warmed up",
}
"""Demanded of suites in which members warm up."""
STOOD_BY: Mapping[str, str] = {
    "standby_begun": "a member began to stand by for a key",
    "standby_took_over": "a key went to a member that stood by for it",
    "standby_ended": "a member stood by for a key no longer",
    "standby_failed": "an application failed to load the state of a key",
}
"""Demanded of suites in which members stand by."""
GRANTS = {
    "granted": "granted",
    "paused": "pause_during_grant",
    "not_owner": "grant_ignored",
    "old_epoch": "grant_ignored",
}
ENDINGS = {"lease_expired": "lease_expired", "topic_gone": "topic_ended"}
HANDOFFS = {
    "offered": "handoff_offered",
    "offer_withdrawn": "handoff_withdrawn",
    "ready": "handoff_ready",
}
BEATS = (Heartbeat, BatchHeartbeat)
OF_POSITIONS = (StagePosition, DecidePosition, ResolvePosition, ReleaseGroup)


class Coverage:
    """Counts situations of one run.

    Attributes:
        counts: How often each was reached, by name.
    """

    def __init__(self, h_ms: int) -> None:
        """Start with none."""
        self.counts: Counter[str] = Counter()
        self._h_ms = h_ms
        self._stamps: dict[int, tuple[int, int]] = {}
        self._seen: set[bytes] = set()
        self._set: set[object] = set()
        # The process that was ready for a key, and whether the key was released since.
        self._ready: dict[object, tuple[bytes, bool]] = {}

    def note(self, name: str) -> None:
        """Count a situation."""
        asked = (SET, FENCED, SCHEDULED, GREW, SOUGHT, HANDED, STOOD_BY, RESIZED)
        known = (SITUATIONS, TRUNCATED, RECREATED, SELDOM, *asked, PLANNED)
        assert any(name in each for each in known), name
        self.counts[name] += 1

    def observe(self, event: Event) -> None:
        """Count an event of an engine; an ``Observer``."""
        if event.name == "clock_step":
            self.note("clock_step_detected")
        elif event.name == "handoff_withdrawn" and event.fields["reason"] == "late":
            self.note("handoff_lapsed")
        elif event.name == "standby_ended" and event.fields["is_owner"]:
            self.note("standby_took_over")
        elif event.name in {"checkpoint_written", "warm_failed", *STOOD_BY}:
            self.note(event.name)
        elif event.name == "restored":
            self.note(_begun(event.fields["source"]))
        elif event.name == "state_unfit" and "feature level" in event.fields["why"]:
            self.note("checkpoint_above")
        elif event.name == "grant_exposed":
            self.note("exposed")
        elif event.name == "claim_ended":
            self._on_ended(event.fields)

    def _on_ended(self, fields: Mapping[str, Any]) -> None:
        name = ENDINGS.get(fields["ending"].reason)
        if name is not None:
            self.note(name)

    def on_fold(self, folded: Folded) -> None:
        """Count the situations that a transition shows."""
        transition = folded.transition
        record, effect = transition.record, transition.effect
        self._on_stored(folded)
        self._on_handoff(folded)
        if transition.key is not None and transition.key.group_id == CHECKPOINT_GROUP:
            return
        if record is None:
            self.note("undecodable")
        elif isinstance(record, ClaimingPartition):
            self._on_claim(folded, record)
        elif isinstance(record, BEATS):
            self._on_beat(folded)
        elif isinstance(record, ClaimingMessages):
            name = GRANTS.get(str(effect or transition.reason))
            if name is not None:
                self.note(name)
        elif effect == "reset":
            self.note(effect)
        elif isinstance(record, OF_POSITIONS):
            self._on_set(folded)
        elif isinstance(record, ReleasingPartition) and record.reason == "ghost":
            self.note("ghost_released")

    def _on_handoff(self, folded: Folded) -> None:
        """Follow keys from an offer to the claim of its successor."""
        transition, record = folded.transition, folded.transition.record
        key, is_accepted = transition.key, transition.outcome == ACCEPTED
        if isinstance(record, HandoffOffer | HandoffReady) and is_accepted:
            self.note(HANDOFFS[str(transition.effect)])
            self._ready.pop(key, None)
            if isinstance(record, HandoffReady):
                self._ready[key] = record.incarnation, False
        elif isinstance(record, HandoffReady):
            self.note("ready_refused")
        elif isinstance(record, ReleasingPartition) and is_accepted:
            if key in self._ready:
                self._ready[key] = self._ready[key][0], True
        elif isinstance(record, ClaimingPartition) and is_accepted:
            is_warm = self._ready.pop(key, None) == (record.incarnation, True)
            if is_warm:
                self.note("handed_over_warm")

    def _on_stored(self, folded: Folded) -> None:
        stored = folded.stored
        if stored.is_ghost:
            self.note("landed_after_failure")
        if stored.sent_epoch is not None and stored.sent_epoch < stored.leader_epoch:
            self.note("landed_after_failover")
        epoch, at_ms = self._stamps.get(folded.partition, (0, 0))
        if stored.timestamp_ms < at_ms:
            is_same = stored.leader_epoch == epoch
            self.note("clock_went_back" if is_same else "leader_behind")
        self._stamps[folded.partition] = (stored.leader_epoch, stored.timestamp_ms)

    def _on_claim(self, folded: Folded, record: ClaimingPartition) -> None:
        transition, age_ms = folded.transition, folded.age_ms
        value = folded.stored.value or b""
        if value in self._seen:
            self.note("duplicate_claim")
        self._seen.add(value)
        if transition.outcome == ACCEPTED:
            self.note(str(transition.effect))
            if folded.stored.is_ghost:
                self.note("ghost_claim_won")
            if transition.effect == "claimed" and record.expected_epoch is not None:
                self.note("topic_changed")
            if transition.effect == "claimed" and folded.owner is not None:
                self.note("taken_over")
                if age_ms == 2 * self._h_ms + 1:
                    self.note("takeover_at_2h_1")
        elif record.resume is not None:
            self.note("resume_refused")
        elif transition.reason == "paused":
            self.note("claim_during_pause")
        elif transition.reason == "old_topic":
            self.note("old_topic")
        elif transition.reason == "held" and age_ms == 2 * self._h_ms:
            self.note("refused_at_2h")

    def _on_set(self, folded: Folded) -> None:
        """Count effects of records of set positions; other operations pause, too."""
        transition, record = folded.transition, folded.transition.record
        effect, reason = transition.effect, transition.reason
        if isinstance(record, ResolvePosition):
            self._on_resolve(folded, record)
        elif effect == "decided":
            self.note("set_committed")
        elif isinstance(record, DecidePosition):
            self.note("decide_refused")
        elif isinstance(record, StagePosition) and reason == "held":
            self.note("stage_held")
        elif isinstance(record, StagePosition) and reason in {"op_over", "not_paused"}:
            self.note("stage_too_late")
        elif isinstance(record, ReleaseGroup) and reason == "busy":
            self.note("pause_busy")

    def _on_resolve(self, folded: Folded, record: ResolvePosition) -> None:
        effect, detail = folded.transition.effect, folded.transition.detail or {}
        by_member = record.reason == MEMBERS_REASON
        if folded.transition.outcome == IGNORED:
            self.note("resolved_twice")
        elif effect == "unlocked":
            self.note("set_aborted")
            if by_member:
                self.note("abort_by_member")
        elif effect == "position_set":
            self._set.add(folded.transition.key)
            position, head = detail["position"], folded.head or 0
            if position != head:
                self.note("set_back" if position < head else "set_forward")
            if not position:
                self.note("set_to_zero")
            if by_member:
                self.note("commit_by_member")

    def _on_beat(self, folded: Folded) -> None:
        transition = folded.transition
        if transition.outcome == IGNORED:
            self.note("late_beat_ignored")
            if transition.key in self._set:
                self.note("late_beat_after_set")
        elif transition.effect == "renewed" and folded.age_ms > 2 * self._h_ms:
            self.note("beat_after_2h")
        elif transition.effect == "position_only" and folded.moved:
            self.note("moved_while_paused")


def _begun(source: str) -> str:
    """Return the situation of a reader that begins, by the source of its state."""
    if source.startswith("checkpoint"):
        return "began_from_checkpoint"
    return "began_with_fence" if "fence" in source else "began_from_kept"
