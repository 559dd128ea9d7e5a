"""Admin operations: formatting the coordination topic, pausing groups, queries.

Admins read the coordination log by themselves and join no group.
"""

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from kafka_marshal.admin_reset import (
    ForgetPlan,
    ResetPlan,
    UpgradePlan,
    find_checkpoint,
    plan_forgetting,
    plan_reset,
    plan_upgrade,
    require_harmless,
    require_members,
    topics_of,
    write_forgetting,
    write_reset,
    write_upgrade,
)
from kafka_marshal.clock import SystemClock
from kafka_marshal.closing import Closing
from kafka_marshal.config import COORDINATION_TOPIC, SERVERS
from kafka_marshal.engine.checkpoint_reader import has_checkpoints, kept_in
from kafka_marshal.engine.config_check import agreed_config
from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    LogUnreadable,
    TopicMisconfigured,
)
from kafka_marshal.formatting import (
    HEARTBEAT_MS_DEFAULT,
    PARTITIONS_DEFAULT,
    Format,
    format_log,
)
from kafka_marshal.identity import home_of
from kafka_marshal.kafka_io import (
    Choice,
    ClusterInfo,
    ConnectionConfig,
    KafkaTopicAdmin,
    Problem,
    TopicDescription,
    choose,
    is_retention_finite,
    open_coordination_log,
    problems,
    set_command,
)
from kafka_marshal.kafka_io.data import KafkaOffsets
from kafka_marshal.pausing import (
    ENDED,
    PauseOperation,
    Sender,
    held_keys,
    in_order,
    refusal,
)
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import Config
from kafka_marshal.protocol.state import ACCEPTED, Pause
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.snapshots import open_store
from kafka_marshal.views import World

TIMEOUT_MS = 30_000
LOG_ENDS_MS_MAX = 5_000
CLOSE_MS_MAX = 1_000
UNCLEAN = "unclean.leader.election.enable"


@attrs.frozen
class PauseResult:
    """Result of a pause, or of its end.

    Attributes:
        op_id: Identifies the operation, in hex.
        until_ms: Log time at which the pause ends in the last partition.
        held: Keys of the group that are still owned and not stale.
    """

    op_id: str
    until_ms: int
    held: tuple[Key, ...]


@attrs.frozen
class TopicReport:
    """Description of the coordination topic, and its problems.

    Attributes:
        cluster: The cluster.
        topic: Its description of the topic.
        found: Violations of PROTOCOL 2.1.
        note: Why settings could not be read, None if they could.
    """

    cluster: ClusterInfo
    topic: TopicDescription
    found: tuple[Problem, ...]
    note: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """One line per violated setting."""
        return tuple(each.text for each in self.found)


class Admin(Closing):
    """Formats the coordination topic and pauses groups. A context manager.

    One thread uses it at a time.

    Args:
        bootstrap_servers: Addresses of the cluster.
        coordination_topic: Name of the coordination topic.
        options: Security and connection options.
        transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
        client_id: Name of the admin in the log.
        timeout_ms: Longest time of each step.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        client_id: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        self._settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
        )
        name = client_id or _default_client_id()
        if not is_identifier(name):
            raise ConfigurationError(
                f"client_id {name!r} is no valid name", setting="client_id"
            )
        self._sender = Sender(name)
        self._timeout_ms = timeout_ms
        self._clock = SystemClock()
        self._topics = KafkaTopicAdmin(self._settings)
        self._offsets = KafkaOffsets(self._settings)
        self._follower: Follower | None = None
        self._cluster_id: str | None = None

    @property
    def transport(self) -> Choice:
        """The transport for reading and writing the log, and why it was chosen.

        Raises:
            ConfigurationError: The requested transport cannot be used.
        """
        return choose(self._settings)

    # --- the coordination topic

    def describe_topic(self) -> tuple[TopicDescription, tuple[Problem, ...]]:
        """Return the cluster's description of the coordination topic, and its problems.

        The second part has one item per violated setting of PROTOCOL 2.1.
        """
        cluster = self.cluster()
        found = self._topics.describe(
            self._settings.coordination_topic, timeout_ms=self._timeout_ms
        )
        wrong = problems(
            found,
            broker_count=len(cluster.brokers),
            has_checkpoints=is_retention_finite(found) and self._has_checkpoints(),
        )
        return found, wrong

    def cluster(self) -> ClusterInfo:
        """Return the cluster's id, controller and brokers."""
        return self._topics.cluster(timeout_ms=self._timeout_ms)

    def report_topic(self) -> TopicReport:
        """Return ``describe_topic`` as far as the ACLs allow, with a note."""
        cluster = self.cluster()
        try:
            found, wrong = self.describe_topic()
        except LogUnreadable as refusal:
            # Settings need DESCRIBE_CONFIGS, which ordinary members may not have.
            found = self._topics.describe_bare(
                self._settings.coordination_topic, timeout_ms=self._timeout_ms
            )
            return TopicReport(cluster, found, (), note=str(refusal))
        return TopicReport(cluster, found, wrong)

    def risk_of(self, topic: str) -> str | None:
        """Return why a data topic may lose records by its settings, or None.

        Both guarantees hold for records that Kafka keeps. If this principal may not
        read the settings, no risk is reported.

        Raises:
            LogUnreadable: This principal may not describe the topic.
            CoordinationError: The cluster did not answer.
        """
        try:
            found = self._topics.describe(topic, timeout_ms=self._timeout_ms)
        except LogUnreadable:
            found = self._topics.describe_bare(topic, timeout_ms=self._timeout_ms)
        if not found.exists:
            return "it does not exist any more"
        if found.leaderless:
            return f"partition {found.leaderless[0]} has no leader"
        unclean = found.configs.get(UNCLEAN, "false")
        return None if unclean == "false" else UNCLEAN

    def partition_count(self, topic: str) -> int | None:
        """Return the number of partitions of a data topic; None if it does not exist.

        Raises:
            LogUnreadable: This principal may not describe the topic.
            CoordinationError: The cluster did not answer.
        """
        found = self._topics.describe_bare(topic, timeout_ms=self._timeout_ms)
        return found.partition_count if found.exists else None

    def log_ends(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the log ends of data partitions, as far as they are known.

        One look-up, of at most ``LOG_ENDS_MS_MAX``. Partitions that do not exist, have
        no leader or may not be described are absent; without an answer in time all are.
        """
        timeout_ms = min(self._timeout_ms, LOG_ENDS_MS_MAX)
        try:
            return self._offsets.known_ends(partitions, timeout_ms)
        except CoordinationError:
            return {}

    def format_topic(
        self, wanted: Format | None = None, *, ignore_formatted: bool = False
    ) -> Config:
        """Create and format the coordination topic; complete a torn format.

        The Config of coordinating partition 0 is written first and decides; the process
        that wins there writes the others (PROTOCOL 2.2).

        Raises:
            TopicMisconfigured: The topic is formatted already, or with other settings,
                or breaks PROTOCOL 2.1.
        """
        chosen = wanted or Format()
        topic = self._settings.coordination_topic
        found, wrong = self.describe_topic()
        if found.exists and wrong:
            # Do not format a topic that can lose claims, or give them wrong times.
            texts = tuple(each.text for each in wrong)
            raise TopicMisconfigured(
                f"topic {topic} exists with settings that the protocol forbids "
                f"({'; '.join(texts)}); correct them (marshal doctor shows how), or "
                "delete the topic, then run: marshal topic format",
                problems=texts,
            )
        if not found.exists:
            self._topics.create_coordination_topic(
                partitions=chosen.partition_count, timeout_ms=self._timeout_ms
            )
        follower = self._follow()
        cluster_id = self._topics.cluster_id(timeout_ms=self._timeout_ms)
        return format_log(
            follower,
            chosen,
            cluster_id=cluster_id,
            ignore_formatted=ignore_formatted,
            timeout_ms=self._timeout_ms,
        )

    # --- overriding

    def upgrade_topic(
        self, *, execute: bool = False, ignore_members: bool = False
    ) -> UpgradePlan:
        """Raise the feature level of the topic to that of this release.

        Args:
            execute: Whether to execute the plan.
            ignore_members: Whether to continue although live members would halt.

        Raises:
            ClaimRejected: Live members would halt.
        """
        follower = self._follow()
        follower.catch_up(self._timeout_ms)
        plan = plan_upgrade({world.partition: world for world in follower.worlds})
        if execute:
            if not ignore_members:
                require_members(plan)
            write_upgrade(follower, plan, timeout_ms=self._timeout_ms)
        return plan

    def reset_state(
        self,
        partition: int,
        *,
        checkpoint_id: str | None = None,
        execute: bool = False,
        allow_held: bool = False,
        allow_reprocess: bool = False,
    ) -> ResetPlan:
        """Replace the state of a coordinating partition by that of a checkpoint.

        Args:
            partition: The coordinating partition.
            checkpoint_id: Id of the checkpoint, in hex; None for the newest.
            execute: Whether to execute the plan.
            allow_held: Whether to take keys away from live clients.
            allow_reprocess: Whether records may be handed out again.

        Raises:
            ClaimRejected: It would take keys or repeat records, and that is not
                allowed.
        """
        log = open_coordination_log(
            self._settings, heartbeat_interval_ms=None, timeout_ms=self._timeout_ms
        )
        try:
            kept = find_checkpoint(
                log,
                partition,
                checkpoint_id=checkpoint_id,
                timeout_ms=self._timeout_ms,
            )
        finally:
            log.close(self._timeout_ms)
        follower = self._follow()
        follower.catch_up(self._timeout_ms)
        now_ms, limit_ms = self._clock.now_ms(), self._timeout_ms
        plan = plan_reset(follower.replicas[partition], kept, now_ms=now_ms)
        if execute:
            require_harmless(
                plan, allow_held=allow_held, allow_reprocess=allow_reprocess
            )
            write_reset(
                follower, kept, client_id=self._sender.client_id, timeout_ms=limit_ms
            )
        return plan

    def forget_keys(
        self,
        group_id: str,
        *,
        topic: str | None = None,
        execute: bool = False,
        allow_existing: bool = False,
    ) -> ForgetPlan:
        """Drop keys of a group without an owner, with their positions and grants.

        Args:
            group_id: The group.
            topic: Only keys of this data topic.
            execute: Whether to execute the plan.
            allow_existing: Whether to drop keys of topics that still exist in the
                cluster: the group starts these again as if it had never read them, so
                records are processed again, also at most once.

        Returns:
            The keys that were dropped, or would be.

        Raises:
            ConfigurationError: The topic has a feature level below 2.
            ClaimRejected: The log has no such keys.
        """
        _require_group(group_id)
        self._settled()
        topics = topics_of(self._follow().worlds, group_id, topic=topic)
        if not topics:
            raise ClaimRejected(
                f"group {group_id!r} has no such keys in the log; see: marshal claims "
                f"list --group {group_id}",
                reason="unknown_key",
            )
        existing = []
        if not allow_existing:
            existing = [t for t in topics if self.partition_count(t) is not None]
        follower, now_ms = self._follow(), self._clock.now_ms()
        plan = plan_forgetting(
            follower.replicas.values(),
            group_id,
            topics=topics,
            existing=existing,
            now_ms=now_ms,
        )
        if execute:
            done = write_forgetting(
                follower,
                plan,
                client_id=self._sender.client_id,
                timeout_ms=self._timeout_ms,
            )
            keys = tuple(each for each in plan.keys if each[0] in done)
            plan = attrs.evolve(plan, keys=keys)
        return plan

    # --- pausing a group

    def pause_group(
        self,
        group_id: str,
        *,
        for_ms: int,
        reason: str | None = None,
        wait_ms: int = 0,
    ) -> PauseResult:
        """Pause a group: its owners finish uncommitted records and release their keys.

        Args:
            group_id: The group.
            for_ms: Length of the pause, from the later of wall time and log time. It is
                renewed each third of that time until this method returns.
            reason: Stored in the log, for people.
            wait_ms: How long to wait until no key of the group has an owner.

        Raises:
            GroupPaused: Another operation holds the group.
            ClaimRejected: Another operation ended the pause meanwhile.
            ConfigurationError: The pause is longer than the log's limit.
        """
        _require_group(group_id)
        config = self._settled()
        longest_ms = config.limit("max_pause_ms")
        if not 0 < for_ms <= longest_ms:
            raise ConfigurationError(
                f"a pause must last 1 to {longest_ms} ms, not {for_ms}",
                setting="for_ms",
            )
        follower = self._follow()
        operation = PauseOperation(
            follower,
            self._clock,
            self._sender,
            group_id=group_id,
            partition_count=config.partition_count,
            for_ms=for_ms,
            reason=reason,
        )
        operation.begin(self._timeout_ms)
        if wait_ms:
            operation.hold_until(lambda: not self.held(group_id), wait_ms)
        pauses = self._pauses(group_id).values()
        until_ms = max((p.until_ms for p in pauses), default=self._clock.wall_ms())
        return PauseResult(operation.op_id.hex(), until_ms, self.held(group_id))

    def resume_group(self, group_id: str, *, reason: str | None = None) -> int:
        """End a group's pause; return the number of partitions it was ended in.

        Raises:
            ClaimRejected: The group is not paused.
        """
        _require_group(group_id)
        config = self._settled()
        pauses = self._pauses(group_id)
        if not pauses:
            raise ClaimRejected(
                f"group {group_id!r} is not paused; see: marshal groups list",
                reason="not_paused",
            )
        follower = self._follow()
        home = home_partition(group_id, partition_count=config.partition_count)
        for partition in in_order(pauses, home=home):
            op_id = pauses[partition].op_id
            record = self._sender.record(
                group_id, op_id, expire_ms=ENDED, reason=reason
            )
            sent = follower.append(partition, record)
            follower.await_all([sent], self._timeout_ms)
            verdict = sent.transition
            assert verdict is not None  # else the wait would have raised
            if verdict.outcome != ACCEPTED and verdict.reason != "op_over":
                raise refusal(follower, sent, group_id=group_id)
        return len(pauses)

    def held(self, group_id: str) -> tuple[Key, ...]:
        """Return the group's keys that are owned and not stale, by estimate."""
        return held_keys(self._follow(), group_id, now_ms=self._clock.now_ms())

    # --- internals

    def _has_checkpoints(self) -> bool:
        """Return whether each coordinating partition has a checkpoint to start from."""
        log = open_coordination_log(
            self._settings, heartbeat_interval_ms=None, timeout_ms=self._timeout_ms
        )
        try:
            return has_checkpoints(log, timeout_ms=self._timeout_ms)
        finally:
            log.close(self._timeout_ms)

    def _follow(self) -> Follower:
        if self._follower is None:
            log = open_coordination_log(self._settings, timeout_ms=self._timeout_ms)
            self._cluster_id = log.cluster_id
            store = open_store(home_of(None), log.cluster_id, topic_id=log.topic_id)
            self._follower = Follower(log, self._clock, sources=kept_in(store))
        return self._follower

    def _settled(self) -> Config:
        """Read to the log's end; return the agreed Config."""
        follower = self._follow()
        follower.catch_up(self._timeout_ms)
        worlds = {world.partition: world for world in follower.worlds}
        return agreed_config(worlds, cluster_id=self._cluster_id)

    def _pauses(self, group_id: str) -> dict[int, Pause]:
        return {
            world.partition: pause
            for world in self._follow().worlds
            if (pause := world.active_pause(group_id)) is not None
        }

    def close(self) -> None:
        """Close every connection. Idempotent."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        self._topics.close()
        self._offsets.close(CLOSE_MS_MAX)


def remedy(problem: Problem, topic: str, *, servers: str) -> str:
    """Return the command, or the action, that corrects a problem of a topic."""
    if problem.setting is None:
        return "kafka-topics --describe, then bring back or add brokers"
    change = {"setting": problem.setting, "value": problem.value}
    return set_command(topic, servers, **change)


def _require_group(group_id: str) -> None:
    if not is_identifier(group_id):
        raise ConfigurationError(
            f"{group_id!r} is no valid group: "
            "1 to 200 of A-Z a-z 0-9 . _ : -, not . or ..",
            setting="group_id",
        )


def _default_client_id() -> str:
    host = "".join(c for c in socket.gethostname() if c.isalnum() or c in "._-")
    return f"admin-{host or 'host'}-{os.getpid()}"[:200]


__all__ = [
    "HEARTBEAT_MS_DEFAULT",
    "PARTITIONS_DEFAULT",
    "Admin",
    "Format",
    "PauseResult",
    "TopicReport",
    "World",
    "set_command",
]
