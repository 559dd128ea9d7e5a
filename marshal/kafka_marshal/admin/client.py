"""The class ``Admin``, which has all operations of admins.

An ``Admin`` reads the coordination log by itself, and joins no group.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kafka_marshal.admin.altering import Altering
from kafka_marshal.admin.draining import Draining
from kafka_marshal.admin.fencing import Fencing
from kafka_marshal.admin.formatting import Format, TopicReport, format_log
from kafka_marshal.admin.group_settings import Tuning
from kafka_marshal.admin.growing import Growing
from kafka_marshal.admin.pausing import (
    ENDED,
    PauseOperation,
    PauseResult,
    Sender,
    current_person,
    ending,
    held_keys,
    in_order,
    op_id_of,
    parse_topics,
    period_of,
    refusal,
    scope_of_topics,
)
from kafka_marshal.admin.rebalancing import Rebalancing
from kafka_marshal.admin.resetting import Resetting
from kafka_marshal.admin.resizing import Resizing
from kafka_marshal.admin.state_reset import Overriding
from kafka_marshal.arguments import (
    require_name,
    to_ms,
    to_name,
    to_person,
    with_plain_arguments,
)
from kafka_marshal.clock import SystemClock
from kafka_marshal.closing import Closing
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS, format_command
from kafka_marshal.engine.checkpoint_reader import has_checkpoints
from kafka_marshal.errors import (
    ConfigurationError,
    LogUnreadable,
    TopicMisconfigured,
)
from kafka_marshal.identity import home_of, host_label
from kafka_marshal.kafka_io.data import KafkaDataLog, KafkaOffsets
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import (
    REPLICATION,
    ClusterInfo,
    Problem,
    TopicDescription,
    is_retention_finite,
    problems,
    set_command,
)
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.kafka_io.transport import Choice, choose, open_coordination_log
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import Config, Scope
from kafka_marshal.protocol.text import scope_texts
from kafka_marshal.protocol.types import Key
from kafka_marshal.views.log_ends import LogEnds

TIMEOUT_MS = 30_000
CLOSE_MS_MAX = 1_000
UNCLEAN = "unclean.leader.election.enable"


class Admin(
    Altering,
    Draining,
    Fencing,
    Growing,
    Overriding,
    Rebalancing,
    Resetting,
    Resizing,
    Tuning,
    Closing,
):
    """Formats and changes the coordination topic, and manages groups and clients.

    A context manager. One thread at a time may use it.

    Args:
        bootstrap_servers: Addresses of the cluster.
        coordination_topic: Name of the coordination topic.
        options: Security and connection options.
        transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
        client_id: Name of the admin in the log.
        person: Name of the person for whom the admin writes, which its records carry;
            by default the environment variable ``MARSHAL_AS``, else the name of the
            user; ``""`` for none.
        state_dir: Directory of snapshots, which shorten reading the log; None for the
            user's state directory, ``""`` for none.
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
        person: str | None = None,
        state_dir: str | Path | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        self._settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
        )
        name = to_name("client_id", client_id or f"admin-{host_label()}-{os.getpid()}")
        person = current_person() if person is None else to_person(person)
        self._sender = Sender(name, person)
        self._state_home = home_of(state_dir)
        self._timeout_ms = timeout_ms = to_ms("timeout_ms", timeout_ms)
        self._clock = SystemClock()
        self._topics = KafkaTopicAdmin(self._settings)
        self._offsets = KafkaOffsets(self._settings)
        self._log_ends = LogEnds(**self._settings.arguments, timeout_ms=timeout_ms)
        self._data = KafkaDataLog(self._settings)

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

        There is one problem for each violated setting of PROTOCOL 2.1.
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
        """Return ``describe_topic`` as a report, without settings if ACLs forbid."""
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

    @with_plain_arguments
    def risk_of(self, topic: str) -> str | None:
        """Return why a data topic may lose records, or None.

        Both delivery guarantees hold only for records that Kafka keeps. Risky settings
        are not reported if this principal may not read the settings.

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

    def format_topic(
        self, wanted: Format | None = None, *, ignore_formatted: bool = False
    ) -> Config:
        """Create and format the coordination topic; complete a torn format.

        The Config of coordinating partition 0 is written first and decides; the process
        that wins there writes the others (PROTOCOL 2.2).

        Raises:
            TopicMisconfigured: The topic is already formatted, also with other
                settings, or breaks PROTOCOL 2.1.
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
                f"delete the topic, then run: {format_command(topic)}",
                problems=texts,
            )
        if found.exists:
            follower = self._follow()
        else:
            self._topics.create_coordination_topic(
                partitions=chosen.partition_count, timeout_ms=self._timeout_ms
            )
            follower = self._follow_created()
        cluster_id = self._topics.cluster_id(timeout_ms=self._timeout_ms)
        return format_log(
            follower,
            chosen,
            cluster_id=cluster_id,
            ignore_formatted=ignore_formatted,
            tags=self._sender.tags,
            timeout_ms=self._timeout_ms,
        )

    # --- pausing a group

    @with_plain_arguments
    def pause_group(
        self,
        group_id: str,
        *,
        for_ms: int | None = None,
        until_ms: int | None = None,
        begin_ms: int | None = None,
        topics: Sequence[str] | None = None,
        reason: str | None = None,
        wait_ms: int = 0,
        dry_run: bool = False,
    ) -> PauseResult:
        """Pause a group: its owners finish uncommitted records and release their keys.

        Args:
            group_id: The group.
            for_ms: Length of the pause, from ``begin_ms`` on, else from the later of
                wall time and log time. Without ``begin_ms``, the pause is renewed each
                third of that length until this method returns.
            until_ms: End of the pause in epoch ms, instead of ``for_ms``.
            begin_ms: Begin of the pause in epoch ms, up to 30 days ahead; by default it
                begins at once. It begins by itself, even if this process has ended.
            topics: Pause only these topics, or some partitions of them, like
                ``orders:0,1``; the group continues with all others.
            reason: Stored in the log, for people.
            wait_ms: How long to wait until no paused key has an owner.
            dry_run: Only check, and return what would be paused.

        Raises:
            GroupPaused: Another operation has paused the whole group.
            ClaimRejected: Another operation ended the pause meanwhile, or no more
                pauses can be scheduled.
            ConfigurationError: The period is invalid, or needs feature level 2.
        """
        require_name("group_id", group_id)
        config = self._settled()
        if begin_ms is not None and wait_ms:
            raise ConfigurationError(
                "a pause that begins later cannot be waited for", setting="wait_ms"
            )
        period = period_of(
            config,
            for_ms,
            until_ms=until_ms,
            begin_ms=begin_ms,
            wall_ms=self._clock.wall_ms(),
        )
        wanted = None if topics is None else parse_topics(topics)
        scope = None if wanted is None else scope_of_topics(config, wanted)
        operation = PauseOperation(
            self._follow(),
            self._clock,
            self._sender,
            group_id=group_id,
            partition_count=config.partition_count,
            period=period,
            reason=reason,
            scope=scope,
        )
        if not dry_run:
            operation.begin(self._timeout_ms)
            if wait_ms:
                operation.hold_until(lambda: not self._held(group_id, scope), wait_ms)
        return PauseResult(
            op_id="" if dry_run else operation.op_id.hex(),
            until_ms=operation.planned_end_ms() if dry_run else operation.end_ms(),
            held=self._held(group_id, scope),
            begin_ms=period.begin_ms,
            topics=scope_texts(scope),
        )

    @with_plain_arguments
    def resume_group(
        self,
        group_id: str,
        *,
        operation: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """End a group's pause; return in how many coordinating partitions it ended.

        Scheduled pauses that are due end as well. If the group is not paused, its only
        scheduled pause is cancelled.

        Args:
            group_id: The group.
            operation: Id of the pause to end or to cancel, in hex.
            reason: Stored in the log, for people.
            dry_run: Only check, and return in how many partitions the pause would end.

        Raises:
            ClaimRejected: There is no such pause; or several are scheduled, and
                ``operation`` must choose one.
        """
        require_name("group_id", group_id)
        config = self._settled()
        follower, wall_ms = self._follow(), self._clock.wall_ms()
        op_id = None if operation is None else op_id_of(operation)
        chosen = ending(follower, group_id, op_id=op_id, wall_ms=wall_ms)
        home = home_partition(group_id, partition_count=config.partition_count)
        for partition in () if dry_run else in_order(chosen, home=home):
            for each in chosen[partition]:
                self._end_pause(group_id, each, partition=partition, reason=reason)
        return len(chosen)

    def _end_pause(
        self, group_id: str, op_id: bytes, *, partition: int, reason: str | None
    ) -> None:
        record = self._sender.record(group_id, op_id, expire_ms=ENDED, reason=reason)
        (sent,) = self._write((partition, record))
        verdict = sent.transition
        assert verdict is not None  # else the wait would have raised
        if not sent.is_accepted and verdict.reason != "op_over":
            raise refusal(self._follow(), sent, group_id=group_id)

    @with_plain_arguments
    def held(self, group_id: str) -> tuple[Key, ...]:
        """Return the group's keys with an owner that is not stale, by estimate."""
        return self._held(group_id, None)

    def _held(self, group_id: str, scope: Scope | None) -> tuple[Key, ...]:
        now_ms = self._clock.now_ms()
        return held_keys(self._follow(), group_id, now_ms=now_ms, scope=scope)

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

    def close(self) -> None:
        """Close every connection. Idempotent. Nothing while the interpreter ends."""
        self._is_closed = True
        self._close_follower()
        self._topics.close()
        self._offsets.close(CLOSE_MS_MAX)
        self._log_ends.close(timeout_ms=CLOSE_MS_MAX)
        self._data.close(CLOSE_MS_MAX)


def remedy(problem: Problem, topic: str, *, servers: str) -> str:
    """Return the command, or the action, that corrects a problem of a topic."""
    if problem.setting is None:
        return (
            f"kafka-topics --bootstrap-server {servers} --describe --topic {topic}, "
            "then bring its brokers back"
        )
    if problem.setting == REPLICATION:
        return (
            f"kafka-reassign-partitions --bootstrap-server {servers}, with "
            f"{problem.value} brokers for each partition of {topic}"
        )
    change = {"setting": problem.setting, "value": problem.value}
    return set_command(topic, servers, **change)


__all__ = ["Admin", "set_command"]  # commands do not import kafka_io
