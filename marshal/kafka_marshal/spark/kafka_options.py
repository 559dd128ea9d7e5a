"""Every option of Spark's own Kafka source, and its meaning in ``format("marshal")``.

``docs/SPARK.md`` lists the refused and the mapped options; a test compares the lists.
"""

import attrs

ONLY_READS = "format marshal only reads; write with format kafka, or with its sinks"
SAME, MAPPED, IGNORED, REFUSED = "same", "mapped", "ignored", "refused"


@attrs.frozen
class Meaning:
    """Meaning of an option of Spark's own source.

    Attributes:
        name: Its name, as documented; Spark passes names in lower case.
        kind: ``same``; ``mapped`` to an equivalent; ``ignored``, with a warning;
            ``refused``, with an error.
        note: The equivalent or alternative, and the reason.
    """

    name: str
    kind: str
    note: str


def _all(kind: str, note: str, *names: str) -> dict[str, Meaning]:
    return {name: Meaning(name, kind, note) for name in names}


KAFKA_OPTIONS = {
    **_all(SAME, "of a batch; a stream needs subscribe or subscribePattern", "assign"),
    **_all(SAME, "topics, separated by commas", "subscribe"),
    **_all(SAME, "in the syntax of RE2, for whole names", "subscribePattern"),
    **_all(SAME, "addresses of the cluster", "kafka.bootstrap.servers"),
    **_all(
        SAME,
        "a stream uses it only where the group has no position",
        "startingOffsets",
        "startingOffsetsByTimestamp",
        "startingTimestamp",
    ),
    **_all(
        SAME,
        "of a batch; refused for a stream",
        "endingOffsets",
        "endingOffsetsByTimestamp",
        "endingTimestamp",
    ),
    **_all(SAME, "see Missing offsets", "failOnDataLoss"),
    **_all(SAME, "default 120000", "kafkaConsumer.pollTimeoutMs"),
    **_all(
        SAME,
        "ignored with delivery = amo: a range is granted as a whole",
        "minPartitions",
        "maxRecordsPerPartition",
    ),
    **_all(
        IGNORED,
        "requests for offsets are repeated for 15 s; omit it",
        "fetchOffset.numRetries",
        "fetchOffset.retryIntervalMs",
    ),
    **_all(
        REFUSED,
        "claims need no consumer group; use the option group",
        "groupIdPrefix",
        "kafka.group.id",
    ),
    **_all(REFUSED, ONLY_READS, "topic"),
    **_all(REFUSED, "use startingOffsets", "kafka.auto.offset.reset"),
    **_all(
        REFUSED,
        "a query commits positions with its batches; omit it",
        "kafka.enable.auto.commit",
    ),
    **_all(
        REFUSED,
        "interceptors need Java; transform the columns",
        "kafka.interceptor.classes",
    ),
    **_all(REFUSED, "keys are bytes; cast the column", "kafka.key.deserializer"),
    **_all(REFUSED, "values are bytes; cast the column", "kafka.value.deserializer"),
    **_all(
        SAME,
        "the same meaning",
        "startingOffsetsByTimestampStrategy",
        "maxOffsetsPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "includeHeaders",
        "kafka.client.dns.lookup",
        "kafka.client.id",
        "kafka.client.rack",
        "kafka.connections.max.idle.ms",
        "kafka.isolation.level",
        "kafka.metadata.max.age.ms",
        "kafka.reconnect.backoff.max.ms",
        "kafka.reconnect.backoff.ms",
        "kafka.sasl.kerberos.service.name",
        "kafka.sasl.mechanism",
        "kafka.sasl.oauthbearer.client.credentials.client.id",
        "kafka.sasl.oauthbearer.client.credentials.client.secret",
        "kafka.sasl.oauthbearer.scope",
        "kafka.sasl.oauthbearer.token.endpoint.url",
        "kafka.security.protocol",
        "kafka.ssl.endpoint.identification.algorithm",
        "kafka.ssl.key.password",
    ),
    **_all(
        MAPPED,
        "socket.receive.buffer.bytes and socket.send.buffer.bytes",
        "kafka.receive.buffer.bytes",
        "kafka.send.buffer.bytes",
    ),
    **_all(
        MAPPED,
        "PlainLoginModule, ScramLoginModule, OAuthBearerLoginModule, IAMLoginModule, "
        "and Krb5LoginModule with a ticket of kinit",
        "kafka.sasl.jaas.config",
    ),
    **_all(
        MAPPED,
        "PEM or PKCS12, detected by content; JKS is refused with the command that "
        "converts it",
        "kafka.ssl.truststore.location",
        "kafka.ssl.truststore.password",
        "kafka.ssl.truststore.type",
        "kafka.ssl.keystore.location",
        "kafka.ssl.keystore.password",
        "kafka.ssl.keystore.type",
    ),
    **_all(
        MAPPED,
        "PEM",
        "kafka.ssl.truststore.certificates",
        "kafka.ssl.keystore.certificate.chain",
        "kafka.ssl.keystore.key",
    ),
    **_all(
        IGNORED,
        "a task reads its whole range; use maxOffsetsPerTrigger or "
        "maxRecordsPerPartition",
        "kafka.max.poll.records",
    ),
    **_all(
        IGNORED,
        "a fetch is as large as the rest of the range; use maxOffsetsPerTrigger",
        "kafka.fetch.max.bytes",
        "kafka.fetch.max.wait.ms",
        "kafka.fetch.min.bytes",
        "kafka.max.partition.fetch.bytes",
    ),
    **_all(
        IGNORED,
        "use kafkaConsumer.pollTimeoutMs",
        "kafka.default.api.timeout.ms",
        "kafka.request.timeout.ms",
        "kafka.retry.backoff.max.ms",
        "kafka.retry.backoff.ms",
        "kafka.socket.connection.setup.timeout.max.ms",
        "kafka.socket.connection.setup.timeout.ms",
    ),
    **_all(
        IGNORED,
        "claims decide who reads what; see policy, claimsMax and clientId",
        "kafka.group.instance.id",
        "kafka.group.protocol",
        "kafka.group.remote.assignor",
        "kafka.heartbeat.interval.ms",
        "kafka.max.poll.interval.ms",
        "kafka.partition.assignment.strategy",
        "kafka.session.timeout.ms",
    ),
    **_all(
        IGNORED,
        "a query commits positions with its batches; omit it",
        "kafka.auto.commit.interval.ms",
    ),
    **_all(IGNORED, "checksums are always compared", "kafka.check.crcs"),
    **_all(
        IGNORED,
        "topics are never created, and a pattern never matches internal topics",
        "kafka.allow.auto.create.topics",
        "kafka.exclude.internal.topics",
    ),
    **_all(
        IGNORED,
        "see the query's metrics in Spark",
        "kafka.auto.include.jmx.reporter",
        "kafka.enable.metrics.push",
        "kafka.metric.reporters",
        "kafka.metrics.num.samples",
        "kafka.metrics.recording.level",
        "kafka.metrics.sample.window.ms",
    ),
    **_all(
        IGNORED,
        "a query that reaches no broker ends; start it again",
        "kafka.metadata.recovery.rebootstrap.trigger.ms",
        "kafka.metadata.recovery.strategy",
    ),
    **_all(
        IGNORED,
        "configure OpenSSL of the host",
        "kafka.security.providers",
        "kafka.ssl.cipher.suites",
        "kafka.ssl.enabled.protocols",
        "kafka.ssl.keymanager.algorithm",
        "kafka.ssl.protocol",
        "kafka.ssl.provider",
        "kafka.ssl.secure.random.implementation",
        "kafka.ssl.trustmanager.algorithm",
    ),
    **_all(
        IGNORED,
        "not needed; for Kerberos, run kinit",
        "kafka.sasl.client.callback.handler.class",
        "kafka.sasl.kerberos.kinit.cmd",
        "kafka.sasl.kerberos.min.time.before.relogin",
        "kafka.sasl.kerberos.ticket.renew.jitter",
        "kafka.sasl.kerberos.ticket.renew.window.factor",
        "kafka.sasl.login.callback.handler.class",
        "kafka.sasl.login.class",
        "kafka.sasl.login.connect.timeout.ms",
        "kafka.sasl.login.read.timeout.ms",
        "kafka.sasl.login.refresh.buffer.seconds",
        "kafka.sasl.login.refresh.min.period.seconds",
        "kafka.sasl.login.refresh.window.factor",
        "kafka.sasl.login.refresh.window.jitter",
        "kafka.sasl.login.retry.backoff.max.ms",
        "kafka.sasl.login.retry.backoff.ms",
    ),
}
_BY_LOWER = {name.lower(): meaning for name, meaning in KAFKA_OPTIONS.items()}


def meaning_of(name: str) -> Meaning | None:
    """Return the meaning of an option, None if unknown; case does not matter."""
    return _BY_LOWER.get(name.lower())
