"""Whether a sidecar is well: what probes ask, answered with reasons.

Three questions, as Kubernetes asks them. Is it alive: a restart would not help. Is it
ready: clients should use it. Has it started: from now on, ask the other two. Each is
a pure function of a view; ``look`` takes the view.

A coordination log that cannot be reached makes no probe fail by itself. What is held
is served until its lease says otherwise, and a restart would only lose it sooner.
"""

from collections.abc import Iterator

import attrs
import msgspec

from kafka_marshal.engine import Engine
from kafka_marshal.observability.text import escaped
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.types import Key
from kafka_marshal.sidecar.states import State, States

# A round may look three things up in the cluster, ten seconds each.
ROUND_MS_MAX = 45_000
LOCK_MS_MAX = 1_000
NAMED_MAX = 5

STOPPING = frozenset({State.SHUTTING_DOWN, State.NOT_RUNNING})
STARTED = frozenset(
    {State.RUNNING, State.PENDING_CONTROLLED_SHUTDOWN, State.SHUTTING_DOWN}
)


@attrs.frozen(kw_only=True)
class View:
    """What the three answers rest on, as of one moment.

    Attributes:
        now_ms: Local time.
        state: State of the sidecar.
        reason: Why it is in that state.
        since_ms: Since when.
        has_engine: Whether there is an engine yet.
        failure: Why the engine can go no further, None while it can.
        is_busy: Whether the engine's lock could not be had, so that what follows is
            not known.
        round_at_ms: End of the engine's last round, None before the first.
        is_replayed: Whether everything written before the start is folded.
        held_count: Claims that stand.
        overdue: Those of them that nobody renewed in time: they hand out nothing.
        failed: Groups that can hold nothing any more, each with the reason.
        beat_at_ms: When the newest beat that the log confirmed was sent, None where
            nothing is held.
        heartbeat_interval_ms: H, None until the log is read.
        log_start_missing: Coordinating partitions that have forgotten who owns what.
        rebuilding: Those that are being read anew.
        diverged: Those whose last checkpoint had another digest than ours.
    """

    now_ms: int
    state: State
    reason: str
    since_ms: int
    has_engine: bool = False
    failure: str | None = None
    is_busy: bool = False
    round_at_ms: int | None = None
    is_replayed: bool = False
    held_count: int = 0
    overdue: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    beat_at_ms: int | None = None
    heartbeat_interval_ms: int | None = None
    log_start_missing: tuple[int, ...] = ()
    rebuilding: tuple[int, ...] = ()
    diverged: tuple[int, ...] = ()


@attrs.frozen
class Verdict:
    """An answer to a probe.

    Attributes:
        ok: The answer.
        state: State of the sidecar, for people.
        reasons: Why not, a sentence each; where it is well, how it is.
    """

    ok: bool
    state: str
    reasons: tuple[str, ...]

    @property
    def status(self) -> int:
        """Return the status of HTTP that says the same."""
        return 200 if self.ok else 503

    def to_json(self) -> bytes:
        """Return it as the body of an answer."""
        return msgspec.json.encode(attrs.asdict(self))


def livez(view: View) -> Verdict:
    """Return whether the daemon should go on running.

    Not so once its engine has failed for good, or its loop has stopped to turn.
    """
    return _verdict(view, _dead_reasons(view))


def readyz(view: View) -> Verdict:
    """Return whether clients should use it.

    It serves, has read the log to its end, and may use all that it holds.
    """
    return _verdict(view, _unready_reasons(view))


def startupz(view: View) -> Verdict:
    """Return whether it has come up, be it on its way down by now."""
    reasons = () if view.state in STARTED else (_state_reason(view),)
    return _verdict(view, reasons)


def _verdict(view: View, reasons: tuple[str, ...] | Iterator[str]) -> Verdict:
    found = tuple(escaped(reason) for reason in reasons)
    return Verdict(not found, view.state.value, found or (escaped(view.reason),))


def _state_reason(view: View) -> str:
    return f"it is {view.state.value}: {view.reason}"


def _dead_reasons(view: View) -> Iterator[str]:
    # On its way out the engine rests before the process does; that has a deadline
    # of its own, which a probe must not cut short.
    if view.state in STOPPING or not view.has_engine:
        return
    if view.failure is not None:
        yield f"the engine can go no further: {view.failure}"
        return
    since_ms = view.since_ms if view.round_at_ms is None else view.round_at_ms
    silent_ms = view.now_ms - since_ms
    if silent_ms > ROUND_MS_MAX:
        yield (
            f"the engine did nothing for {silent_ms} ms, at most {ROUND_MS_MAX} "
            "are in order"
        )


def _unready_reasons(view: View) -> Iterator[str]:
    yield from _dead_reasons(view)
    if view.state is not State.RUNNING:
        yield _state_reason(view)
    elif view.is_busy:
        yield f"the engine did not answer within {LOCK_MS_MAX} ms"
    elif not view.is_replayed:
        yield "the coordination log is not read to its end"
    yield from _state_reasons(view)
    for group_id, why in view.failed[:NAMED_MAX]:
        yield f"group {group_id} can hold nothing any more: {why}"
    if view.overdue:
        named = ", ".join(view.overdue[:NAMED_MAX])
        more = len(view.overdue) - NAMED_MAX
        rest = f" and {more} more" if more > 0 else ""
        yield (
            f"{len(view.overdue)} of {view.held_count} claims were not renewed in "
            f"time, so nothing is handed out of: {named}{rest}"
        )


def _state_reasons(view: View) -> Iterator[str]:
    """Say what is wrong with what it knows of the log (PROTOCOL 7)."""
    if view.log_start_missing:
        yield (
            f"the log of partitions {list(view.log_start_missing)} begins above "
            "offset 0, and no checkpoint leads up to it: nothing of them is claimed"
        )
    if view.rebuilding:
        yield f"the log of partitions {list(view.rebuilding)} went back: read anew"
    if view.diverged:
        yield (
            f"checkpoints of partitions {list(view.diverged)} say another digest than "
            "its own: one of the two readers is wrong; compare with marshal log verify"
        )


def look(engine: Engine | None, states: States, *, clock: Clock) -> View:
    """Take a view; waits for the engine's lock, for a second at most.

    Args:
        engine: The engine, None as long as there is none.
        states: State of the sidecar.
        clock: Local time.
    """
    view = View(
        now_ms=clock.now_ms(),
        state=states.state,
        reason=states.reason,
        since_ms=states.since_ms,
    )
    if engine is None:
        return view
    view = attrs.evolve(
        view,
        has_engine=True,
        # An engine gets its first round when it gets its thread: from then on.
        round_at_ms=engine.context.meters.round_at_ms,
        failure=None if engine.failure is None else str(engine.failure),
    )
    if not engine.changed.acquire(timeout=LOCK_MS_MAX / 1000):
        return attrs.evolve(view, is_busy=True)
    try:
        return _look_inside(view, engine)
    finally:
        engine.changed.release()


def _look_inside(view: View, engine: Engine) -> View:
    config = engine.context.config
    sessions = engine.sessions
    held = [
        (holding, _name(holding.key))
        for session in sessions
        for holding in session.holdings.values()
        if holding.claim.is_owned
    ]
    soft = ((name, each.claim.lease.soft_until_ms) for each, name in held)
    return attrs.evolve(
        view,
        is_replayed=engine.is_ready,
        held_count=len(held),
        overdue=tuple(name for name, until_ms in soft if until_ms <= view.now_ms),
        failed=tuple(
            (session.claimant.group_id, str(session.failure))
            for session in sessions
            if session.failure is not None
        ),
        beat_at_ms=max((each.claim.base_ms for each, _ in held), default=None),
        heartbeat_interval_ms=None if config is None else config.heartbeat_interval_ms,
        log_start_missing=engine.log_start_missing,
        rebuilding=() if config is None else _rebuilding(engine),
        diverged=engine.diverged,
    )


def _rebuilding(engine: Engine) -> tuple[int, ...]:
    return tuple(sorted(engine.context.rebuilding - set(engine.log_start_missing)))


def _name(key: Key) -> str:
    return f"{key.topic}-{key.partition} of group {key.group_id}"


class Health:
    """The three answers of one sidecar, now. Thread-safe.

    Attributes:
        engine: Its engine, as soon as there is one.
    """

    def __init__(self, states: States, clock: Clock) -> None:
        self.engine: Engine | None = None
        self._states = states
        self._clock = clock

    def look(self) -> View:
        """Return the view that the answers rest on."""
        return look(self.engine, self._states, clock=self._clock)

    def live(self) -> Verdict:
        """Return whether the daemon should go on running."""
        return livez(self.look())

    def ready(self) -> Verdict:
        """Return whether clients should use it."""
        return readyz(self.look())

    def started(self) -> Verdict:
        """Return whether it has come up."""
        return startupz(self.look())
