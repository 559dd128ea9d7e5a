"""Asks a policy, and stays in charge whatever it does."""

from collections.abc import Mapping
from typing import Any

from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.planner import Plan, Policy, Release, View, fair, greedy
from kafka_marshal.protocol.topic_policy import topic
from kafka_marshal.protocol.types import Key

from .context import Context

REASON_CHARS_MAX = 64
ERROR_CHARS_MAX = 300
# Those that see nothing but the view: what they said of one, they say of its like.
FORGETFUL: tuple[Policy, ...] = (fair, greedy, topic)


class Advice:
    """One consumer's policy: its last plan that made sense stands until the next.

    Our own are not even asked again as long as the view stays as it is. Policies
    come from other packages too: one that raises, or returns what is no plan, is
    told and asked again; it ends neither engine nor consumer.
    """

    __slots__ = ("_claim", "_is_forgetful", "_last", "_policy", "_told", "_why")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # By identity: what others bring may have no hash, or any idea of equality.
        self._is_forgetful = any(policy is each for each in FORGETFUL)
        self._claim: tuple[Key, ...] = ()
        self._why: Mapping[Key, str] = {}
        self._told: str | None = None
        self._last: tuple[View, Plan] | None = None

    def plan(self, view: View, context: Context) -> Plan:
        """Return what to do now."""
        if self._last is not None and self._last[0] == view:
            return self._last[1]
        problem: str | None
        try:
            plan = self._policy(view)
            problem = _problem(plan, view)
        except Exception as error:  # noqa: BLE001 - whatever a foreign policy raises
            problem = repr(error)
        if problem is not None:
            self._tell(problem[:ERROR_CHARS_MAX], context)
            # What it gave up is given up; only what it wanted stands.
            wanted = {key.key for key in view.keys}
            kept = tuple(key for key in self._claim if key in wanted)
            return Plan(kept, why=self._why)
        self._told = None
        self._claim, self._why = plan.claim, plan.why
        if self._is_forgetful:
            self._last = view, plan
        return plan

    def _tell(self, problem: str, context: Context) -> None:
        if problem != self._told:
            self._told = problem
            name = getattr(self._policy, "__name__", type(self._policy).__name__)
            context.observe("policy_failed", {"policy": name, "error": problem})


def _problem(plan: object, view: View) -> str | None:
    """Return why a plan cannot be followed, None where it can."""
    if not isinstance(plan, Plan):
        return f"it returned {type(plan).__name__}, no Plan"
    # Types are promises, and others may not keep them.
    claim: Any = plan.claim
    release: Any = plan.release
    why: Any = plan.why
    if not (isinstance(claim, tuple) and isinstance(release, tuple)):
        return "claim and release must be tuples"
    if not isinstance(why, Mapping):
        return "why must be a mapping"
    mine = {key.key: key.is_mine for key in view.keys} if claim or release else {}
    for key in claim:
        if key not in mine:
            return f"it claims {key!r}, which is not in the view"
    for each in release:
        problem = _release_problem(each, mine)
        if problem is not None:
            return problem
    return None


def _release_problem(release: object, mine: Mapping[Key, bool]) -> str | None:
    if not isinstance(release, Release) or not mine.get(release.key):
        return f"it gives up {release!r}, which is not held"
    successor: Any = release.successor
    reason: Any = release.reason
    detail: Any = release.detail
    if successor is not None and not _is_name(successor):
        return f"{successor!r} cannot be a successor"
    if not _is_name(reason) or len(reason) > REASON_CHARS_MAX:
        return f"{reason!r} cannot be a reason"
    return None if isinstance(detail, str) else f"{detail!r} is no text"


def _is_name(value: object) -> bool:
    return isinstance(value, str) and is_identifier(value)
