"""Invariants of an audit's tables, as SQL queries that return violations.

A query without rows means that the invariant holds. Tables have the names of
``schema``; ``:name`` is a parameter. The queries can be run by hand, in Spark or any
other engine.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS_SHOWN_MAX = 20


@attrs.frozen
class Invariant:
    """One invariant.

    Attributes:
        name: Its name.
        meaning: What a violation means.
        clauses: Clauses and guarantees of PROTOCOL that it checks.
        sql: Query for violations.
    """

    name: str
    meaning: str
    clauses: str
    sql: str


@attrs.frozen
class Finding:
    """Violations of one invariant.

    Attributes:
        invariant: The invariant.
        count: Number of violations.
        rows: The first violations, at most ``ROWS_SHOWN_MAX``.
    """

    invariant: Invariant
    count: int
    rows: tuple[Mapping[str, Any], ...]


OVERLAP = Invariant(
    "overlap",
    "two claims of one key at the same time",
    "S1",
    """
SELECT * FROM (
  SELECT coordinating_partition, group_id, topic, partition, client_id, token,
         start_offset, end_offset,
         LEAD(client_id) OVER k AS next_client_id,
         LEAD(token) OVER k AS next_token,
         LEAD(start_offset) OVER k AS next_start_offset
  FROM intervals
  WINDOW k AS (PARTITION BY coordinating_partition, group_id, topic, partition
               ORDER BY start_offset)
)
WHERE next_start_offset < COALESCE(end_offset, 9223372036854775807)
UNION ALL
SELECT claim.coordinating_partition, claim.group_id, claim.topic, claim.partition,
       claim.client_id, claim.token, claim.start_offset, claim.end_offset,
       next.client_id, next.token, next.start_offset
FROM imports moved
JOIN intervals claim
  ON claim.coordinating_partition = moved.source
  AND claim.group_id = moved.group_id AND claim.topic = moved.topic
  AND claim.partition = moved.partition AND claim.start_append_ms < moved.append_ms
JOIN intervals next
  ON next.coordinating_partition = moved.coordinating_partition
  AND next.group_id = moved.group_id AND next.topic = moved.topic
  AND next.partition = moved.partition AND next.start_offset > moved.offset
WHERE claim.reason IS DISTINCT FROM 'moved'
  AND claim.end_append_ms > next.start_append_ms + claim.heartbeat_interval_ms
""",
)
TOKENS_GROW = Invariant(
    "tokens_grow",
    "a claim whose token is not above that of the claim before",
    "S1, S7",
    """
SELECT * FROM (
  SELECT coordinating_partition, group_id, topic, partition, client_id, start_offset,
         struct(token_era, token_leader_epoch, epoch) AS ordered, token,
         LAG(struct(token_era, token_leader_epoch, epoch)) OVER k AS ordered_before,
         LAG(token) OVER k AS token_before
  FROM intervals
  WINDOW k AS (PARTITION BY coordinating_partition, group_id, topic, partition
               ORDER BY start_offset)
)
WHERE ordered <= ordered_before
UNION ALL
SELECT next.coordinating_partition, next.group_id, next.topic, next.partition,
       next.client_id, next.start_offset,
       struct(next.token_era, next.token_leader_epoch, next.epoch), next.token,
       struct(claim.token_era, claim.token_leader_epoch, claim.epoch), claim.token
FROM imports moved
JOIN intervals claim
  ON claim.coordinating_partition = moved.source
  AND claim.group_id = moved.group_id AND claim.topic = moved.topic
  AND claim.partition = moved.partition
  AND claim.start_append_ms + claim.heartbeat_interval_ms < moved.append_ms
JOIN intervals next
  ON next.coordinating_partition = moved.coordinating_partition
  AND next.group_id = moved.group_id AND next.topic = moved.topic
  AND next.partition = moved.partition AND next.start_offset > moved.offset
WHERE struct(next.token_era, next.token_leader_epoch, next.epoch)
   <= struct(claim.token_era, claim.token_leader_epoch, claim.epoch)
""",
)
STALE_ONLY = Invariant(
    "taken_over_when_stale",
    "a claim was taken over from an owner that was not silent for more than two "
    "heartbeat intervals",
    "4.2, 4.3",
    """
SELECT * FROM handoffs
WHERE ending = 'taken_over' AND gap_ms <= 2 * heartbeat_interval_ms
""",
)
GAPS = Invariant(
    "gap_bound",
    "a key stayed without owner although its next owner was waiting for it",
    "L1",
    """
SELECT * FROM handoffs
WHERE late_ms > COALESCE(CAST(:tolerance_ms AS BIGINT), heartbeat_interval_ms)
""",
)
GRANTS_DISJOINT = Invariant(
    "grants_disjoint",
    "offsets were granted twice",
    "S3",
    """
SELECT * FROM (
  SELECT coordinating_partition, group_id, topic, partition, offset, client_id,
         grantee, epoch, topic_id, first_offset, last_offset,
         MAX(last_offset) OVER k AS granted_before
  FROM grants
  WHERE outcome = 'granted'
  WINDOW k AS (PARTITION BY coordinating_partition, group_id, topic, partition,
                            topic_id, resets_count
               ORDER BY offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
WHERE granted_before >= first_offset
UNION ALL
SELECT moved.coordinating_partition, moved.group_id, moved.topic, moved.partition,
       moved.offset, given.client_id, given.grantee, given.epoch, given.topic_id,
       COALESCE(moved.granted, moved.position), CAST(NULL AS BIGINT),
       given.last_offset
FROM imports moved
JOIN intervals claim
  ON claim.coordinating_partition = moved.source
  AND claim.group_id = moved.group_id AND claim.topic = moved.topic
  AND claim.partition = moved.partition AND claim.token_era < moved.era
JOIN grants given
  ON given.coordinating_partition = claim.coordinating_partition
  AND given.group_id = claim.group_id AND given.topic = claim.topic
  AND given.partition = claim.partition AND given.epoch = claim.epoch
JOIN partitions state
  ON state.coordinating_partition = moved.source
  AND state.resets_count = given.resets_count
WHERE given.outcome = 'granted'
  AND given.topic_id IS NOT DISTINCT FROM moved.topic_id
  AND given.last_offset >= COALESCE(moved.granted, moved.position, 0)
""",
)
STALE_TOKEN = Invariant(
    "stale_token",
    "a record was accepted under a token whose claim was not in force",
    "4.5 to 4.7",
    """
SELECT used.* FROM (
  SELECT coordinating_partition, group_id, topic, partition, offset, client_id, epoch,
         'grants' AS seen_in
  FROM grants WHERE outcome = 'granted'
  UNION ALL
  SELECT coordinating_partition, group_id, topic, partition, offset, client_id, epoch,
         'positions' AS seen_in
  FROM positions
) used
LEFT ANTI JOIN intervals claim
  ON used.coordinating_partition = claim.coordinating_partition
  AND used.group_id = claim.group_id AND used.topic = claim.topic
  AND used.partition = claim.partition AND used.epoch = claim.epoch
  AND used.client_id = claim.client_id AND used.offset > claim.start_offset
  AND used.offset <= COALESCE(claim.end_offset, 9223372036854775807)
UNION ALL
SELECT coordinating_partition, group_id, topic, partition, start_offset, client_id,
       epoch, 'intervals' AS seen_in
FROM intervals WHERE stray_count > 0
""",
)
POSITIONS_GROW = Invariant(
    "positions_grow",
    "a position went back without a rewind",
    "S10",
    """
SELECT coordinating_partition, group_id, topic, partition, offset, client_id,
       position, position_before
FROM (
  SELECT *, LAG(position) OVER k AS position_before,
         LAG(rewinds_count) OVER k AS rewinds_before
  FROM positions
  WINDOW k AS (PARTITION BY coordinating_partition, group_id, topic, partition, epoch
               ORDER BY offset)
)
WHERE position < position_before AND rewinds_count = rewinds_before
UNION ALL
SELECT coordinating_partition, group_id, topic, partition, start_offset, client_id,
       start_position, position_before
FROM (
  SELECT *, LAG(position) OVER k AS position_before
  FROM intervals
  WINDOW k AS (PARTITION BY coordinating_partition, group_id, topic, partition,
                            resets_count
               ORDER BY start_offset)
)
WHERE start_position < position_before
UNION ALL
SELECT coordinating_partition, group_id, topic, partition, start_offset, client_id,
       position, CAST(NULL AS BIGINT)
FROM intervals WHERE steps_back_count > 0
""",
)
END_STATE = Invariant(
    "end_state",
    "the open claims differ from those of the end state",
    "S2",
    """
SELECT state.coordinating_partition, state.owned_count,
       COALESCE(found.open_count, 0) AS open_count
FROM partitions state
LEFT JOIN (
  SELECT coordinating_partition, COUNT(*) AS open_count
  FROM intervals WHERE ending = 'open' GROUP BY coordinating_partition
) found ON state.coordinating_partition = found.coordinating_partition
WHERE state.owned_count <> COALESCE(found.open_count, 0)
""",
)

IMPORTS_AGREE = Invariant(
    "imports_agree",
    "a key moved to a coordinating partition with another position than it had in the "
    "one before",
    "10.3, 10.4",
    """
SELECT * FROM (
  SELECT moved.coordinating_partition, moved.group_id, moved.topic, moved.partition,
         moved.offset, moved.source, moved.position,
         MAX_BY(claim.position, struct(claim.token_era, claim.token_leader_epoch,
                                       claim.epoch)) AS position_before,
         MAX(claim.resets_count) AS resets_count
  FROM imports moved JOIN intervals claim
    ON claim.coordinating_partition = moved.source
    AND claim.group_id = moved.group_id AND claim.topic = moved.topic
    AND claim.partition = moved.partition AND claim.token_era < moved.era
  GROUP BY moved.coordinating_partition, moved.group_id, moved.topic, moved.partition,
           moved.offset, moved.source, moved.position
) found
JOIN (SELECT coordinating_partition AS number, resets_count AS resets_last
      FROM partitions) state
  ON state.number = found.source AND state.resets_last = found.resets_count
WHERE position IS DISTINCT FROM position_before
""",
)

INVARIANTS = (
    OVERLAP,
    TOKENS_GROW,
    STALE_ONLY,
    GAPS,
    GRANTS_DISJOINT,
    STALE_TOKEN,
    POSITIONS_GROW,
    IMPORTS_AGREE,
    END_STATE,
)


def check(
    tables: Mapping[str, "DataFrame"], *, tolerance_ms: int | None = None
) -> list[Finding]:
    """Return the violated invariants.

    Args:
        tables: The tables by name, from ``Audit.tables``. Their session gets views of
            these names.
        tolerance_ms: How much later than possible a waiting process may claim a key. By
            default the heartbeat interval, enough if processes are suspended for less.
    """
    session = next(iter(tables.values())).sparkSession
    for name, table in tables.items():
        table.createOrReplaceTempView(name)
    findings = []
    for each in INVARIANTS:
        given = {"tolerance_ms": tolerance_ms} if each is GAPS else {}
        found = session.sql(each.sql, args=given)
        rows = tuple(row.asDict(recursive=True) for row in found.take(ROWS_SHOWN_MAX))
        if rows:
            findings.append(Finding(each, found.count(), rows))
    return findings
