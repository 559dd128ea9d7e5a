"""Invariants of an audit's tables, as SQL: each query finds violations.

Without violations there are no rows. Tables have the names of ``schema``; ``:name`` is
a parameter. The queries can be run by hand, in Spark or any other engine.
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
        meaning: Meaning of a violation.
        clauses: Clauses of the protocol.
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
        count: Number of rows.
        rows: The first rows.
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
  WINDOW k AS (PARTITION BY group_id, topic, partition ORDER BY start_offset)
)
WHERE next_start_offset < COALESCE(end_offset, 9223372036854775807)
""",
)
TOKENS_GROW = Invariant(
    "tokens_grow",
    "a claim whose token is not above the one before",
    "S1, S7",
    """
SELECT * FROM (
  SELECT coordinating_partition, group_id, topic, partition, client_id, start_offset,
         struct(token_era, token_leader_epoch, epoch) AS ordered, token,
         LAG(struct(token_era, token_leader_epoch, epoch)) OVER k AS ordered_before,
         LAG(token) OVER k AS token_before
  FROM intervals
  WINDOW k AS (PARTITION BY group_id, topic, partition ORDER BY start_offset)
)
WHERE ordered <= ordered_before
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
    "a key stayed without owner though the next one was seen waiting for it",
    "L1",
    """
SELECT * FROM handoffs
WHERE late_ms > COALESCE(CAST(:tolerance_ms AS BIGINT), heartbeat_interval_ms)
""",
)
GRANTS_DISJOINT = Invariant(
    "grants_disjoint",
    "offsets that were granted before",
    "S3",
    """
SELECT * FROM (
  SELECT coordinating_partition, group_id, topic, partition, offset, client_id,
         grantee, epoch, topic_id, first_offset, last_offset,
         MAX(last_offset) OVER k AS granted_before
  FROM grants
  WHERE outcome = 'granted'
  WINDOW k AS (PARTITION BY group_id, topic, partition, topic_id, resets_count
               ORDER BY offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
WHERE granted_before >= first_offset
""",
)
STALE_TOKEN = Invariant(
    "stale_token",
    "a record was accepted under a token whose claim did not stand then",
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
  ON used.group_id = claim.group_id AND used.topic = claim.topic
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
  WINDOW k AS (PARTITION BY group_id, topic, partition, epoch ORDER BY offset)
)
WHERE position < position_before AND rewinds_count = rewinds_before
UNION ALL
SELECT coordinating_partition, group_id, topic, partition, start_offset, client_id,
       start_position, position_before
FROM (
  SELECT *, LAG(position) OVER k AS position_before
  FROM intervals
  WINDOW k AS (PARTITION BY group_id, topic, partition, resets_count
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
    "the claims that are open are not those that the end state has",
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

INVARIANTS = (
    OVERLAP,
    TOKENS_GROW,
    STALE_ONLY,
    GAPS,
    GRANTS_DISJOINT,
    STALE_TOKEN,
    POSITIONS_GROW,
    END_STATE,
)


def check(
    tables: Mapping[str, "DataFrame"], *, tolerance_ms: int | None = None
) -> list[Finding]:
    """Return the violated invariants.

    Args:
        tables: The tables by name, from ``Audit.tables``. Their session gets views of
            these names.
        tolerance_ms: Longest delay of a process that waits for a key; by default the
            heartbeat interval, enough for processes stopped for less than that.
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
