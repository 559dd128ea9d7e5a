"""Calls policies and checks their plans; runs foreign ones on their own thread."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from kafka_marshal.engine.context import Context
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.planner import (
    Plan,
    Policy,
    Release,
    View,
    fair,
    greedy,
)
from kafka_marshal.protocol.planner import topic as whole_topics
from kafka_marshal.protocol.types import Key

if TYPE_CHECKING:
    from kafka_marshal.ports import Pending

REASON_CHARS_MAX = 64
ERROR_CHARS_MAX = 300
POLICY_WAIT_MS = 100
# Policies that depend only on the view: an equal view gets an equal plan.
PURE_POLICIES: tuple[Policy, ...] = (fair, greedy, whole_topics)


class PolicyRunner:
    """Runs one consumer's policy; its last valid plan stays in force until the next.

    Built-in policies are not called again while the view is unchanged. Policies from
    other packages run on a thread of their own, one call at a time. A policy that
    raises, returns an invalid plan, or does not return for a heartbeat interval, is
    reported; it stops neither the engine nor the consumer.

    Attributes:
        is_pure: Whether the policy is a built-in one.
    """

    __slots__ = (
        "_asked",
        "_asked_ms",
        "_call",
        "_claim",
        "_last",
        "_policy",
        "_reported",
        "_why",
        "is_pure",
    )

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # Compared by identity: custom policies may have no hash, or any equality.
        self.is_pure = any(policy is each for each in PURE_POLICIES)
        self._claim: tuple[Key, ...] = ()
        self._why: Mapping[Key, str] = {}
        self._reported: str | None = None
        self._last: tuple[View, Plan] | None = None
        self._call: Pending[Plan] | None = None
        self._asked: View | None = None
        self._asked_ms = 0

    def is_awaited(self, now_ms: int) -> bool:
        """Return whether a call is pending that will probably end soon."""
        return self._call is not None and now_ms - self._asked_ms < POLICY_WAIT_MS

    def plan(self, view: View, context: Context) -> Plan:
        """Return the plan in force."""
        if not self.is_pure:
            return self._plan_elsewhere(view, context)
        if self._last is not None and self._last[0] == view:
            return self._last[1]
        try:
            plan = self._policy(view)
        except Exception as error:  # noqa: BLE001 - a bug there costs balance only
            self._report(repr(error)[:ERROR_CHARS_MAX], context)
            return self._kept(view)
        self._claim, self._why = plan.claim, plan.why
        self._last = view, plan
        return plan

    def _plan_elsewhere(self, view: View, context: Context) -> Plan:
        """Return the plan of a foreign policy, perhaps for an earlier view."""
        if self._call is None:
            self._asked, self._asked_ms = view, context.now_ms
            call = partial(self._policy, view)
            self._call = context.ports.policies.submit(call)
        if not self._call.done():
            limit_ms = context.heartbeat_interval_ms
            if context.now_ms - self._asked_ms > limit_ms:
                self._report(f"it did not return for {limit_ms} ms", context)
            return self._kept(view)
        call_of, asked, self._call = self._call, self._asked, None
        assert asked is not None
        error = call_of.exception(0)
        problem = repr(error) if error else _problem_of(call_of.result(0), asked)
        if problem is not None:
            self._report(problem[:ERROR_CHARS_MAX], context)
            # Past releases are done; only the claims of the last plan stay in force.
            return self._kept(view)
        plan = call_of.result(0)
        self._reported = None
        self._claim, self._why = plan.claim, plan.why
        if asked is view:
            return plan
        mine = {key.key for key in view.keys if key.is_mine}
        release = tuple(each for each in plan.release if each.key in mine)
        return attrs.evolve(self._kept(view), release=release)

    def _kept(self, view: View) -> Plan:
        wanted = {key.key for key in view.keys}
        kept = tuple(key for key in self._claim if key in wanted)
        return Plan(kept, why=self._why)

    def _report(self, problem: str, context: Context) -> None:
        if problem != self._reported:
            self._reported = problem
            name = getattr(self._policy, "__name__", type(self._policy).__name__)
            context.observe("policy_failed", {"policy": name, "error": problem})


def _problem_of(plan: object, view: View) -> str | None:
    """Return why a plan is invalid, None for a valid one."""
    try:
        return _problem(plan, view)
    except Exception as error:  # noqa: BLE001 - of objects that the policy returned
        return repr(error)


def _problem(plan: object, view: View) -> str | None:
    if not isinstance(plan, Plan):
        return f"it returned {type(plan).__name__}, not a Plan"
    # Custom policies may not follow the type hints.
    claim: Any = plan.claim
    release: Any = plan.release
    why: Any = plan.why
    if not (isinstance(claim, tuple) and isinstance(release, tuple)):
        return "claim and release must be tuples"
    if not isinstance(why, Mapping):
        return "why must be a mapping"
    mine = {key.key: key.is_mine for key in view.keys} if claim or release else {}
    for key in claim:
        if not isinstance(key, Key) or key not in mine:
            return f"it claims {key!r}, which is not in the view"
    for each in release:
        problem = _release_problem(each, mine)
        if problem is not None:
            return problem
    return None


def _release_problem(release: object, mine: Mapping[Key, bool]) -> str | None:
    key: Any = release.key if isinstance(release, Release) else None
    if not isinstance(release, Release) or not (isinstance(key, Key) and mine.get(key)):
        return f"it releases {release!r}, which is not held by this client"
    successor: Any = release.successor
    reason: Any = release.reason
    detail: Any = release.detail
    if successor is not None and not _is_name(successor):
        return f"successor must be a client_id or None, not {successor!r}"
    if not _is_name(reason) or len(reason) > REASON_CHARS_MAX:
        return (
            f"reason must be one word of at most {REASON_CHARS_MAX} characters, not "
            f"{reason!r}"
        )
    if not isinstance(detail, str):
        return f"detail must be a string, not {detail!r}"
    return None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and is_identifier(value)
