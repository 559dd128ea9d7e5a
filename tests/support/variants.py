"""Broken variants of the product's rules, which tests plant (see variants.md).

Each replaces functions of the product by ones with a plausible but wrong rule. A search
or a simulation that does not catch one of them proves nothing about that rule.
"""

import re
from pathlib import Path

import attrs
import msgspec

from kafka_marshal import snapshots
from kafka_marshal.engine import (
    coverage,
    engine,
    fetch_state,
    holdings,
    kept_states,
    outbox,
    proxy_grants,
    replica,
    resolver,
    session,
)
from kafka_marshal.engine.awaited_ends import AwaitedEnds
from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol import (
    fold_groups,
    fold_keys,
    fold_positions,
    fold_resets,
    judging,
    rationalizer,
    resolving,
)
from kafka_marshal.protocol import state as state_of_the_log
from kafka_marshal.protocol.claiming import Claim, Lease, Phase
from kafka_marshal.protocol.codec import decode, uvarint
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.records import (
    SUPPORTED_LEVEL,
    BatchHeartbeat,
    ClaimingMessages,
    Config,
    DecidePosition,
    Heartbeat,
    ReleaseGroup,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import Halt
from kafka_marshal.protocol.types import Key, Owner
from kafka_marshal.sidecar import group

TABLES = Path(__file__).with_name("variants.md")


def listed(table):
    """Return a table of variants.md: for each variant, the cells after its name."""
    _, found, rest = TABLES.read_text().partition(f"<!-- table: {table} -->\n")
    assert found, f"no table of {table}"
    lines = rest.partition("\n\n")[0].split("\n")
    rows = [line.strip("|").split("|") for line in lines]
    cells = {row[0]: [cell.strip() for cell in row[1:]] for row in rows[2:]}
    return {name: cells[row] for row in cells for name in re.findall(r"`(\w+)`", row)}


def drop_refusal(patch, module, name, *, reason):
    """Let a judge of the product accept records that it refuses for one reason."""
    plain = getattr(module, name)

    def judge(*given, **named):
        refused = plain(*given, **named)
        return None if refused == reason else refused

    patch.setattr(module, name, judge)


def any_beat_owns(patch):
    """No epoch check on heartbeats: any sender becomes the owner."""
    plain = judging.mismatch

    def mismatch(state, record, *, key):
        known = state.keys.get(key)
        if isinstance(record, Heartbeat) and known is not None:
            known.owner = Owner(record.client_id, record.incarnation)
            state.epochs.pop(known.epoch, None)
            state.epochs[record.epoch] = key
            known.epoch = record.epoch
            return None
        return plain(state, record, key=key)

    patch.setattr(judging, "mismatch", mismatch)


def renew_while_paused(patch):
    """An owner treats a heartbeat as a renewal although its group is paused."""
    plain = Claim.on_beat_verdict

    def on_beat_verdict(self, transition, **rest):
        if transition.effect == "position_only":
            transition = msgspec.structs.replace(transition, effect="renewed")
        plain(self, transition, **rest)

    patch.setattr(Claim, "on_beat_verdict", on_beat_verdict)


def renew_to_an_earlier_end(patch):
    """A renewal counts from its own time, although the lease ended later."""

    def renew(self, now_ms, heartbeat_interval_ms):
        self.renewed_ms = now_ms
        self.heartbeat_interval_ms = heartbeat_interval_ms

    patch.setattr(fold_keys.KeyState, "renew", renew)


def keep_the_last_era_alone(patch):
    """A Config drops the eras of claims before the last Config."""
    patch.setattr(state_of_the_log, "end_era", lambda _, ended, *, epochs: (ended,))


def renew_in_the_fold(patch):
    """The fold lets heartbeats renew while their group is paused."""

    def renewal(state, key):
        del key
        return state.config.heartbeat_interval_ms

    patch.setattr(fold_keys, "_renewal", renewal)


def renew_on_ack(patch):
    """The broker's acknowledgement renews a lease, without the fold's verdict."""
    plain_tick = session.Session.tick

    def send(self, partition, make, *, key=None):
        seq = self.claimant.next_seq()
        record = make(seq)
        sent_ms = self._context.now_ms
        self._pending[seq] = outbox.Sent(sent_ms, partition, key)
        append = self._context.ports.log.append(partition, outbox.encode(record))
        acks = UNSENT.setdefault(self.claimant.owner.incarnation, [])
        acks.append((append, record, sent_ms))
        return seq, sent_ms

    def tick(self, now_ms):
        acks = UNSENT.setdefault(self.claimant.owner.incarnation, [])
        for item in [item for item in acks if item[0].is_done()]:
            acks.remove(item)
            append, record, sent_ms = item
            if append.offset() is not None:
                for holding in self.holdings.values():
                    if holding.claim.epoch in _epochs(record):
                        renew_locally(holding.claim, sent_ms)
        plain_tick(self, now_ms)

    UNSENT.clear()
    patch.setattr(outbox.Outbox, "send", send)
    patch.setattr(session.Session, "tick", tick)


UNSENT: dict[bytes, list] = {}


def _epochs(record):
    if isinstance(record, BatchHeartbeat):
        return {epoch for epoch, _ in record.beats}
    return {record.epoch} if isinstance(record, Heartbeat) else set()


def renew_locally(claim: Claim, sent_ms: int):
    """Renew a claim without the verdict of the log."""
    if claim.is_owned and sent_ms > claim._base_ms:
        claim._base_ms = sent_ms
        claim.lease = Lease.since(sent_ms, claim.heartbeat_interval_ms)


def lease_from_read_back(patch):
    """The lease counts from the time when the record was read back, not sent."""
    plain = Claim.on_claim_verdict

    def on_claim_verdict(self, transition, *, seq, now_ms, **rest):
        if seq in self._sent_ms:
            self._sent_ms[seq] = now_ms
        return plain(self, transition, seq=seq, now_ms=now_ms, **rest)

    plain_read_back = outbox.Outbox.read_back

    def read_back(self, seq, **named):
        sent = plain_read_back(self, seq, **named)
        if sent is None:
            return None
        return attrs.evolve(sent, sent_ms=self._context.now_ms)

    patch.setattr(Claim, "on_claim_verdict", on_claim_verdict)
    patch.setattr(outbox.Outbox, "read_back", read_back)


def sender_judges(patch):
    """The fold relies on the claimant's judgement that the owner is stale."""
    drop_refusal(patch, judging, "_judge_known", reason="held")


def beat_restarts(patch):
    """After a restart, a heartbeat of the same client_id resumes the key."""
    plain = judging.mismatch

    def mismatch(state, record, *, key):
        known = state.keys.get(key)
        if (
            isinstance(record, Heartbeat)
            and known is not None
            and known.owner is not None
            and known.owner.client_id == record.client_id
        ):
            return None
        return plain(state, record, key=key)

    patch.setattr(judging, "mismatch", mismatch)


def grant_again(patch):
    """ClaimingMessages is accepted from the last granted offset on (h - 1)."""
    plain = fold_keys.KeyState.next_unclaimed

    def next_unclaimed(self):
        head = plain(self)
        return None if head is None or not self.granted else max(0, head - 1)

    patch.setattr(fold_keys.KeyState, "next_unclaimed", next_unclaimed)


def process_without_grant(patch):
    """Requested offsets are processed at once, before the verdict."""
    plain = AtMostOnce.request

    def request(self, seq, last, **sent):
        asked = plain(self, seq, last, **sent)
        self._grants.append(asked.offsets)
        self._requests.clear()
        return asked

    def on_verdict(self, verdict, **_request):
        return None if verdict.granted is not None else verdict.reason

    patch.setattr(AtMostOnce, "request", request)
    patch.setattr(AtMostOnce, "on_verdict", on_verdict)


def grant_by_number(patch):
    """A grant is matched by incarnation and seq, not by grantee."""

    def on_verdict(self, verdict, **_request):
        self._requests.clear()
        if verdict.granted is None:
            return verdict.reason
        self._grants.append(verdict.granted)
        self.next_first = max(self.next_first, verdict.granted.end)
        return None

    patch.setattr(AtMostOnce, "on_verdict", on_verdict)


def pipeline_without_anchor(patch):
    """Several requests are in flight although the log has no position yet."""

    def may_request(self, depth):
        return len(self._requests) < depth

    patch.setattr(AtMostOnce, "may_request", may_request)


def hand_out_after_the_soft_stop(patch):
    """An owner hands out as long as it holds the claim, past the soft stop."""

    def may_hand_out(self, now_ms):
        return self.phase is Phase.HELD

    patch.setattr(Claim, "may_hand_out", may_hand_out)


def ask_beyond_the_span(patch):
    """A request names all fetched offsets, more than the log may grant at once."""
    patch.setattr(AtMostOnce, "last_within", lambda self, last, span: last)


def match_requests_by_number(patch):
    """A request for another process is matched to any record with its number."""
    _match_requests(patch, lambda grantee, seq, record: seq == record.seq)


def match_requests_by_grantee(patch):
    """A request for another process is matched to any record with its grantee."""
    _match_requests(patch, lambda grantee, seq, record: grantee == record.grantee)


def _match_requests(patch, fits):
    plain = proxy_grants.ProxyGrants.on_record

    def on_record(self, record, transition):
        for grantee, seq in self._pending:
            if fits(grantee, seq, record):
                record = msgspec.structs.replace(record, grantee=grantee, seq=seq)
                break
        plain(self, record, transition)

    patch.setattr(proxy_grants.ProxyGrants, "on_record", on_record)


def take_any_position(patch):
    """A sidecar records a client's position under any claim of the key."""

    def record_position(self, client, record):
        lease = client.leases.get(Key(self.group_id, record.topic, record.partition))
        if lease is not None:
            lease.record_progress(record)
        return lease

    patch.setattr(group.LocalGroup, "record_position", record_position)


def mark_what_is_handed_out(patch):
    """Records that the application still processes are reported as processed."""
    plain = AtMostOnce._use_up

    def _use_up(self, offset):
        plain(self, offset)
        self.done = max(self.done, self.next_first)

    patch.setattr(AtMostOnce, "_use_up", _use_up)


def begin_as_if_now(patch):
    """A start from a kept state treats its claims as renewed just now."""
    plain = kept_states.world_of

    def world_of(kept, log_range):
        world = plain(kept, log_range)
        for known in () if isinstance(world, str) else world.keys.values():
            known.renewed_ms = world.now_ms
        return world

    patch.setattr(kept_states, "world_of", world_of)


def no_quiet_after_a_reset(patch):
    """After a Reset, keys can be claimed before the leases of their owners end."""
    plain = fold_resets._install

    def install(state, carried, *, leader_epoch):
        plain(state, carried, leader_epoch=leader_epoch)
        state.quiet_until_ms = None

    patch.setattr(fold_resets, "_install", install)


FAR_LEVEL = 2**31


def apply_later_versions(patch):
    """The fold reads records of an unknown version as the known version."""
    plain = rationalizer.decode

    def decode_any(value):
        found = plain(value)
        for kind in (1, 2, 3, 4, 5, 6, 13, 14):
            for version in range(1, 301):
                later = b"\x01" + uvarint(kind) + uvarint(version)
                if value is not None and value.startswith(later):
                    return plain(b"\x01" + uvarint(kind) + b"\0" + value[len(later) :])
        return found

    patch.setattr(rationalizer, "decode", decode_any)


def apply_above_the_level(patch):
    """The fold applies all known records, also those above the level in force."""
    for record, (fold, _) in list(rationalizer._HANDLERS.items()):
        patch.setitem(rationalizer._HANDLERS, record, (fold, 1))


def follow_any_config(patch):
    """The fold continues after a Config whose level it does not know."""
    patch.setattr(fold_groups, "SUPPORTED_LEVEL", FAR_LEVEL)


def go_on_halted(patch):
    """The engine continues with a replica that has halted."""
    patch.setattr(engine, "check_halt", lambda _: None)


def begin_behind_a_halt(patch):
    """A process resumes from a checkpoint of a level that it does not know."""
    patch.setattr(kept_states, "SUPPORTED_LEVEL", FAR_LEVEL)


def halt_late(patch):
    """A reader halts at the record after the Config, not at the Config."""
    plain, due = replica.apply, {}

    def apply(state, entry):
        transitions = plain(state, entry)
        if id(state) in due:
            level = due.pop(id(state))
            state.halted = Halt(state.next_offset - 1, level)
        elif state.halted is not None and state.halted.offset == entry.offset:
            due[id(state)] = state.halted.feature_level
            state.halted, state.next_offset = None, entry.offset + 1
        return transitions

    patch.setattr(replica, "apply", apply)


def halt_early(patch):
    """A reader halts at the record before the Config, not at the Config."""
    plain = engine.Engine._fold

    def fold(self, runs):
        runs = [(partition, list(run)) for partition, run in runs]
        flat = [(partition, entry) for partition, run in runs for entry in run]
        for at, (partition, entry) in enumerate(flat):
            record = decode(entry.value)
            level = record.feature_level if isinstance(record, Config) else 0
            if at and level > SUPPORTED_LEVEL:
                plain(self, [(t, [each]) for t, each in flat[: at - 1]])
                known = self.context.replicas[partition]
                known.world.halted = Halt(known.world.next_offset, level)
                engine.check_halt(known)
        plain(self, runs)

    patch.setattr(engine.Engine, "_fold", fold)


def believe_any_file(patch):
    """A process uses a state file of its host without comparing it with the log."""
    patch.setattr(kept_states, "_unproven", lambda log, states, **_: [])


def forget_whose_file(patch):
    """A process uses the state file of another log."""
    patch.setattr(snapshots, "_check", lambda _: b"".ljust(snapshots.CHECK_BYTES))
    patch.setattr(snapshots.SnapshotFolder, "_read", _read_first)


def _read_first(self, partition):
    try:
        return snapshots.read_file(self.file_of(partition))[0].state
    except (OSError, IndexError, MalformedRecord):
        return None


def keep_claims_of_a_deleted_topic(patch):
    """A claim continues after its topic was deleted and created again."""
    patch.setattr(session.Session, "_give_topic_up", lambda *_: None)


def fetch_by_name(patch):
    """Records are fetched by topic name, without the topic_id of the claim."""

    def seek(self, reader, offset):
        reader.seek(self.partition, offset, token=self.holding.claim.token)

    patch.setattr(fetch_state.FetchState, "seek", seek)


def keep_the_position_in_an_earlier_topic(patch):
    """The fold keeps the position of a key when its topic_id changes."""
    plain = fold_keys._install_owner

    def install_owner(step, record, known):
        position = known.position
        plain(step, record, known)
        known.position = position

    patch.setattr(fold_keys, "_install_owner", install_owner)


# --- set positions (PROTOCOL 8.3 to 8.5)


def _wrap(patch, record, fold):
    """Fold a type of record with ``fold``, which gets the product's fold first."""
    plain, level = rationalizer._HANDLERS[record]

    def wrapped(step, record):
        return fold(plain, step, record)

    patch.setitem(rationalizer._HANDLERS, record, (wrapped, level))


def _forget_operation(state, group_id, op_id):
    group = state.groups[group_id]
    group.over = tuple(note for note in group.over if note[1] != op_id)
    state.over = {note: None for note in state.over if note[1:] != (group_id, op_id)}


def commit_per_partition(patch):
    """Each coordinating partition commits its own locks, without a Decide."""
    patch.setattr(fold_positions, "_is_home", lambda *_, **__: False)


def pause_again(patch):
    """An operation that has ended pauses its group again."""

    def fold(plain, step, record):
        if record.group_id in step.state.groups:
            _forget_operation(step.state, record.group_id, record.op_id)
        return plain(step, record)

    _wrap(patch, ReleaseGroup, fold)


def forget_operations_at_home(patch):
    """The home forgets an operation as soon as it has ended."""
    plain = fold_groups.end_operation

    def end_operation(state, group_id, *, op_id, offset):
        plain(state, group_id, op_id=op_id, offset=offset)
        if fold_positions._is_home(state, group_id, config=state.config):
            _forget_operation(state, group_id, op_id)

    patch.setattr(fold_groups, "end_operation", end_operation)
    patch.setattr(fold_positions, "end_operation", end_operation)


def stage_a_held_key(patch):
    """A Stage locks a key whose owner is not stale."""
    drop_refusal(patch, fold_positions, "_refusal", reason="held")


def stage_for_another_topic(patch):
    """A Stage does not compare topic ids."""
    plain = fold_positions._refusal

    def refusal(state, key, *, lock):
        reason = plain(state, key, lock=lock)
        if reason in {"cas", "old_topic"}:
            lock = lock._replace(topic_id=state.keys[key].topic_id)
            reason = plain(state, key, lock=lock)
        return reason

    patch.setattr(fold_positions, "_refusal", refusal)


def stage_over_a_lock(patch):
    """A Stage replaces the lock of another operation."""
    plain = fold_positions._refusal

    def refusal(state, key, *, lock):
        reason = plain(state, key, lock=lock)
        if reason == "locked":
            known = state.keys[key]
            del state.locked[key.group_id, known.lock.op_id][key]
            known.lock = None
            reason = plain(state, key, lock=lock)
        return reason

    patch.setattr(fold_positions, "_refusal", refusal)


def stage_what_is_free(patch):
    """A Stage locks those of its keys that are free, not all or none."""

    def fold(plain, step, record):
        whole = plain(step, record)
        if whole[0].effect is not None:
            return whole
        found = []
        for topic in record.topics:
            for position in topic.positions:
                one = msgspec.structs.replace(topic, positions=(position,))
                found += plain(step, msgspec.structs.replace(record, topics=(one,)))
        return tuple(sorted(found, key=lambda each: each.effect is None))

    _wrap(patch, StagePosition, fold)


def _allow_after_the_end(patch, record):
    plain = fold_positions._not_paused

    def not_paused(state, group_id, *, op_id):
        reason = plain(state, group_id, op_id=op_id)
        return None if reason == "op_over" else reason

    def fold(plain, step, record):
        with patch.context() as during:
            during.setattr(fold_positions, "_not_paused", not_paused)
            return plain(step, record)

    _wrap(patch, record, fold)


def stage_after_the_end(patch):
    """A Stage that lands after the end of its operation locks its keys."""
    _allow_after_the_end(patch, StagePosition)


def decide_after_the_pause(patch):
    """A Decide is accepted after the end of the pause."""
    _allow_after_the_end(patch, DecidePosition)


def decide_over_a_verdict(patch):
    """A Decide replaces an unresolved verdict."""

    def fold(plain, step, record):
        group = step.state.groups[record.group_id]
        verdict = group.unresolved
        if verdict is not None and verdict.op_id != record.op_id:
            group.verdict = None
        transitions = plain(step, record)
        if transitions[0].effect is None:
            group.verdict = verdict if group.verdict is None else group.verdict
        return transitions

    _wrap(patch, DecidePosition, fold)


def drop_the_verdict_with_the_pause(patch):
    """The verdict of an operation is dropped when its pause ends."""
    plain = fold_groups.end_operation

    def end_operation(state, group_id, *, op_id, offset):
        verdict = state.groups[group_id].verdict
        if verdict is not None and verdict.op_id == op_id:
            state.groups[group_id].verdict = None
        plain(state, group_id, op_id=op_id, offset=offset)

    patch.setattr(fold_groups, "end_operation", end_operation)


def keep_the_owner_of_a_staged_key(patch):
    """A Stage keeps the stale owner, which may be granted offsets later."""
    plain = fold_positions._lock

    def lock(step, named, lock):
        owner = step.state.keys[named].owner
        transition = plain(step, named, lock)
        step.state.keys[named].owner = owner
        return transition

    patch.setattr(fold_positions, "_lock", lock)


def keep_granted(patch):
    """A commit sets the position, but keeps the granted offset."""
    plain = fold_positions._unlock

    def unlock(known, *, commits):
        granted = known.granted
        plain(known, commits=commits)
        known.granted = granted

    patch.setattr(fold_positions, "_unlock", unlock)


def keep_an_earlier_previous(patch):
    """A commit keeps the previous position of an earlier operation, for its undo."""
    plain = fold_positions._unlock

    def unlock(known, *, commits):
        previous = known.previous
        plain(known, commits=commits)
        known.previous = previous or known.previous

    patch.setattr(fold_positions, "_unlock", unlock)


def claim_a_locked_key(patch):
    """A locked key can be claimed after the end of the pause."""
    plain = judging._judge_known

    def judge(state, known, record):
        lock, known.lock = known.lock, None
        try:
            return plain(state, known, record)
        finally:
            known.lock = lock

    patch.setattr(judging, "_judge_known", judge)


def forget_a_locked_key(patch):
    """A ForgettingPartition drops a locked key."""
    drop_refusal(patch, judging, "judge_forgetting", reason="locked")


def forget_a_silent_key_that_is_locked(patch):
    """A locked key is dropped after ``forget_ms``."""

    def is_forgettable(known):
        return known.owner is None and known.granted is None

    for module in (state_of_the_log, fold_keys):
        patch.setattr(module, "is_forgettable", is_forgettable)


def grant_while_paused(patch):
    """A pause does not refuse grants."""

    def fold(plain, step, record):
        with patch.context() as during:
            during.setattr(judging, "is_paused", lambda *_: False)
            return plain(step, record)

    _wrap(patch, ClaimingMessages, fold)


def obey_old_owners(patch):
    """Records of an owner count after it lost the key."""
    plain = judging.mismatch

    def mismatch(state, record, *, key):
        return None if key in state.keys else plain(state, record, key=key)

    patch.setattr(judging, "mismatch", mismatch)


def resolve_any_lock(patch):
    """A Resolve frees the locks of all operations of its group."""

    def fold(plain, step, record):
        state = step.state
        mine = state.locked.setdefault((record.group_id, record.op_id), {})
        for (group_id, op_id), keys in list(state.locked.items()):
            if group_id == record.group_id and op_id != record.op_id:
                mine |= keys
                del state.locked[group_id, op_id]
        return plain(step, record)

    _wrap(patch, ResolvePosition, fold)


def resolve_one_key(patch):
    """A commit sets the first locked key, and only unlocks the others."""
    plain_unlock = fold_positions._unlock

    def fold(plain, step, record):
        unlocked = []

        def unlock(known, *, commits):
            plain_unlock(known, commits=commits and not unlocked)
            unlocked.append(known)

        with patch.context() as during:
            during.setattr(fold_positions, "_unlock", unlock)
            return plain(step, record)

    _wrap(patch, ResolvePosition, fold)


def ignore_a_resolve_after_the_pause(patch):
    """A Resolve is ignored after the end of the pause, also if keys are locked."""

    def fold(plain, step, record):
        group = step.state.groups.get(record.group_id)
        if group is not None and group.is_over(record.op_id):
            return (step.ignored("op_over"),)
        return plain(step, record)

    _wrap(patch, ResolvePosition, fold)


def abort_what_is_decided(patch):
    """The home accepts an abort after its own verdict to commit."""

    def fold(plain, step, record):
        group = step.state.groups[record.group_id]
        verdict = group.unresolved
        is_mine = verdict is not None and verdict.op_id == record.op_id
        if is_mine and not record.commit:
            group.verdict = None
        return plain(step, record)

    _wrap(patch, ResolvePosition, fold)


# --- mistakes of members that resolve operations without their admin


def leave_it_to_the_admin(patch):
    """No member resolves anything."""
    patch.setattr(resolver, "unresolved", lambda _: frozenset())


def resolve_without_the_home(patch):
    """A member aborts locks without regard to the home."""

    def left(worlds, operation, *, home):
        del home
        return [t for t, world in worlds.items() if operation in world.locked]

    patch.setattr(resolver, "left_to_resolve", left)
    patch.setattr(resolver, "decided_at", lambda *_: None)


def resolve_the_home_first(patch):
    """A commit is resolved on the home before the other partitions."""

    def in_order(outcome, *, home, partitions):
        del outcome
        return (home,), tuple(t for t in partitions if t != home)

    patch.setattr(resolving, "in_order", in_order)


def resolve_before_all_is_folded(patch):
    """A member decides by replicas that may be older than the lock."""

    class Ignored(AwaitedEnds):
        def are_reached(self, folded):
            return bool(folded)

    patch.setattr(resolver, "AwaitedEnds", Ignored)


def abort_what_the_home_does_not_know(patch):
    """An operation that a replica of the home does not know counts as aborted."""
    plain = resolving.outcome_of

    def outcome_of(home, operation):
        group = home.groups.get(operation.group_id)
        is_paused = group is not None and group.pause is not None
        outcome = plain(home, operation)
        if outcome == resolving.UNDECIDED and not is_paused:
            return resolving.ABORTED
        return outcome

    resolve_before_all_is_folded(patch)
    patch.setattr(resolving, "outcome_of", outcome_of)
    patch.setattr(resolver, "outcome_of", outcome_of)


def disturb_an_admin_that_lives(patch):
    """A member aborts an undecided operation before the end of its pause."""
    patch.setattr(resolver, "may_be_decided", lambda *_, **__: False)


def renew_a_fenced_client(patch):
    """A fenced process renews by heartbeats, and is granted offsets."""
    patch.setattr(fold_keys, "_is_owner_fenced", lambda state, key: False)


def claim_as_a_fenced_client(patch):
    """A fenced process claims and resumes."""
    patch.setattr(judging, "_is_sender_fenced", lambda state, record: False)


def hand_out_though_fenced(patch):
    """A process that reads its own fence continues until its lease ends."""
    patch.setattr(session.Session, "_fail_as_fenced", lambda self, transition: None)


def begin_over_another_operation(patch):
    """A scheduled pause that is due replaces an open one."""
    move = fold_groups.move_pauses

    def move_pauses(state, offset):
        for each in state.groups.values():
            due = each.scheduled and each.scheduled[0].begin_ms
            if each.pause is not None and due and due <= state.append_time_ms:
                each.pause = None
        move(state, offset)

    def lapses_ms(self):
        begins = [each.begin_ms for each in self.scheduled]
        ends = [] if self.pause is None else [self.pause.until_ms]
        return min([*begins, *ends], default=None)

    patch.setattr(state_of_the_log.GroupState, "lapses_ms", property(lapses_ms))
    patch.setattr(fold_groups, "move_pauses", move_pauses)


def never_begin(patch):
    """A scheduled pause stays scheduled when it is due."""
    patch.setattr(fold_groups, "_begin", lambda state, group_id, due: None)


def claim_only_what_the_policy_names(patch):
    """Members do not claim keys that no policy names."""
    patch.setattr(coverage.CoverageRule, "claims", lambda *_, **__: {})


def go_on_after_a_handoff(patch):
    """An owner continues after its release to a successor that is ready."""
    plain = holdings.Holdings.release

    def release(self, holding, drain, **rest):
        known = self._context.replica_of(holding.key).world.keys.get(holding.key)
        if known is None or known.offer is None or known.offer.ready is None:
            plain(self, holding, drain, **rest)
        elif holding.claim.is_owned:
            self._source.send_release(holding, drain)
            holding.drain = None

    patch.setattr(holdings.Holdings, "release", release)
