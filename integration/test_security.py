"""Listeners with logins and TLS, and users who may not write to the log."""

import os
import socket
import ssl
import threading
from types import SimpleNamespace

import pytest
from domain import Recorder, opened
from forwarding import Forwarder
from kafka import KafkaProducer
from kafka.admin import (
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from tls import (
    STORE_PASSWORD,
    client_certificate,
    keystore,
    private_key,
    truststore,
)
from waiting import WAIT_MS, eventually, poll_all, read_out

from kafka_marshal import (
    CoordinationError,
    LogUnreadable,
    LogUnwritable,
    Marshal,
    TopicPartition,
    World,
)
from kafka_marshal.kafka_io import patches
from kafka_marshal.kafka_io.responses import ResponseReader
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.slices import SliceReader
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal.testing.broker import EmbeddedBroker, free_ports

PASSWORDS = {"alice": "wonderland", "reader": "only-reads"}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
# Longer than a test may take: a client that is refused must not retry until then.
FOR_EVER_MS = 3_600_000


def changing_listeners(home):
    """Two listeners that trust one certificate each, and advertise one port.

    A forwarder listens on that port.
    """
    before, after, moving = free_ports(3)
    properties, certificates = {}, []
    for name in ("before", "after"):
        certificates.append(client_certificate())
        (home / f"{name}.pem").write_bytes(certificates[-1][0])
        trust = f"listener.name.{name}.ssl"
        properties[f"{trust}.client.auth"] = "required"
        properties[f"{trust}.truststore.type"] = "PEM"
        properties[f"{trust}.truststore.location"] = str(home / f"{name}.pem")
    return SimpleNamespace(
        before=before,
        after=after,
        moving=moving,
        certificates=certificates,
        properties=properties,
        listeners=f"BEFORE://127.0.0.1:{before},AFTER://127.0.0.1:{after}",
        advertised=f"BEFORE://127.0.0.1:{moving},AFTER://127.0.0.1:{moving}",
    )


@pytest.fixture(scope="module")
def listeners(tmp_path_factory):
    """A broker with SASL and TLS listeners and an authorizer."""
    home = tmp_path_factory.mktemp("tls")
    store, certificate = keystore(home / "right", "dns:localhost,ip:127.0.0.1")
    other_store, other_certificate = keystore(home / "wrong", "dns:elsewhere.test")
    own_store, own_certificate = keystore(home / "client", "dns:client")
    plain, sasl, tls, other, mutual, controller = free_ports(6)
    scram, scram_moving = free_ports(2)
    changing = changing_listeners(home)
    users = " ".join(f'user_{name}="{word}"' for name, word in PASSWORDS.items())
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    addresses = (
        f"PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl},"
        f"SSL://127.0.0.1:{tls},OTHER://127.0.0.1:{other},"
        f"MUTUAL://127.0.0.1:{mutual}"
    )
    advertised = addresses.replace(
        f"SSL://127.0.0.1:{tls}", f"SSL://localhost:{tls}"
    ).replace("OTHER://127.0.0.1", "OTHER://localhost")
    properties = {
        "listeners": f"{addresses},{changing.listeners},LOGIN://127.0.0.1:{scram},"
        f"CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"{advertised},{changing.advertised},"
        f"LOGIN://127.0.0.1:{scram_moving}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
        "SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL,OTHER:SSL,MUTUAL:SSL,BEFORE:SSL,"
        "AFTER:SSL,LOGIN:SASL_PLAINTEXT",
        "listener.name.login.sasl.enabled.mechanisms": "SCRAM-SHA-256",
        "listener.name.login.scram-sha-256.sasl.jaas.config": SCRAM,
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{module} {users};",
        **{
            f"listener.name.sasl_plaintext.{name.lower()}.sasl.jaas.config": SCRAM
            for name in MECHANISMS[1:]
        },
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": str(store),
        "ssl.keystore.password": STORE_PASSWORD,
        "ssl.key.password": STORE_PASSWORD,
        "listener.name.other.ssl.keystore.location": str(other_store),
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.truststore.type": "PKCS12",
        "listener.name.mutual.ssl.truststore.password": STORE_PASSWORD,
        "listener.name.mutual.ssl.truststore.location": str(
            truststore(home / "trust.p12", own_certificate)
        ),
        **changing.properties,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer."
        "StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:alice;User:CN=own",
    }
    with EmbeddedBroker(port=plain, properties=properties) as broker:
        yield SimpleNamespace(
            broker=broker,
            sasl=f"127.0.0.1:{sasl}",
            tls=f"localhost:{tls}",
            certificate=certificate,
            other=f"localhost:{other}",
            other_certificate=other_certificate,
            mutual=f"127.0.0.1:{mutual}",
            own_certificate=own_certificate,
            own_key=private_key(own_store, home / "own.key"),
            changing=changing,
            scram=scram,
            scram_moving=scram_moving,
        )


@pytest.fixture(scope="module")
def guarded(listeners, unique, transport):
    """A domain on that broker, whose topics nobody has rights on yet."""
    with opened(listeners.broker, unique, transport=transport) as domain:
        for name in MECHANISMS[1:]:
            mechanism = ScramMechanism[name.replace("-", "_")]
            wanted = UserScramCredentialUpsertion(
                "alice", mechanism, PASSWORDS["alice"]
            )
            domain.kafka.alter_user_scram_credentials([wanted])
        yield SimpleNamespace(**vars(listeners), domain=domain)


def login(
    user: str, password: str | None = None, mechanism: str = "PLAIN"
) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": PASSWORDS[user] if password is None else password,
    }


def consume_all(guarded, servers, options, *, group, transport) -> list[int]:
    domain = guarded.domain
    topic = domain.data_topic(1, records_each=5)
    with Marshal(
        servers,
        group_id=group,
        client_id="w1",
        coordination_topic=domain.topic,
        options=options,
        transport=transport,
        state_dir="",
    ) as marshal:
        assert marshal.transport == transport
        consumer = marshal.consumer(topic, consumer_timeout_ms=1_000)
        found = [record.offset for record in read_out(consumer, 5)]
        consumer.commit()
    (known,) = domain.states(group).values()
    assert known.position == 5
    return found


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_client_consumes_over_sasl_with_each_mechanism(
    guarded, unique, transport, mechanism
):
    found = consume_all(
        guarded,
        guarded.sasl,
        login("alice", mechanism=mechanism),
        group=unique("sasl"),
        transport=transport,
    )
    assert found == [*range(5)]


def test_a_client_consumes_over_tls(guarded, unique, transport):
    options = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(guarded.certificate),
    }
    found = consume_all(
        guarded, guarded.tls, options, group=unique("tls"), transport=transport
    )
    assert found == [*range(5)]


def test_a_client_consumes_over_mutual_tls(guarded, unique, transport):
    options = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(guarded.certificate),
        "ssl.certificate.location": str(guarded.own_certificate),
        "ssl.key.location": str(guarded.own_key),
    }
    found = consume_all(
        guarded, guarded.mutual, options, group=unique("mutual"), transport=transport
    )
    assert found == [*range(5)]


def test_a_login_that_is_refused_for_a_while_ends_no_consumer(
    listeners, unique, transport
):
    """A user is removed, all connections break, and the user is there again."""
    mechanism = ScramMechanism.SCRAM_SHA_256
    user, password = unique("user"), "for-a-while"
    group = unique("refused")
    recorder = Recorder()
    with (
        opened(listeners.broker, unique, transport=transport, h_ms=20_000) as domain,
        Forwarder(listeners.scram_moving) as forwarder,
    ):
        topic = domain.data_topic(2, records_each=3)
        for name in (domain.topic, topic):
            for operation in ("READ", "WRITE"):
                domain.grant(user, operation, kind="topic", name=name)
        domain.grant(user, "READ", kind="group", name=group)
        present = [UserScramCredentialUpsertion(user, mechanism, password)]
        domain.kafka.alter_user_scram_credentials(present)
        forwarder.target = listeners.scram
        servers = f"127.0.0.1:{listeners.scram_moving}"
        options = login(user, password, mechanism="SCRAM-SHA-256")
        eventually(lambda: logs_in(servers, options), "the user is known")
        with Marshal(
            servers,
            group_id=group,
            client_id="w1",
            coordination_topic=domain.topic,
            options=options,
            transport=transport,
            state_dir="",
            observer=recorder,
        ) as marshal:
            consumer = marshal.consumer(topic)
            found = poll_all(consumer, 6)
            gone = [UserScramCredentialDeletion(user, mechanism)]
            domain.kafka.alter_user_scram_credentials(gone)
            eventually(lambda: not logs_in(servers, options), "the user is gone")
            forwarder.redirect(listeners.scram)

            def is_refused() -> bool:
                assert consumer.poll(timeout_ms=100) == {}
                refusals = [
                    event
                    for event in recorder.events
                    if "refused the login" in str(event.fields.get("error"))
                ]
                # Over librdkafka the reader of data reports it as well.
                names = {event.name for event in refusals}
                return "fetch_failed" in names or (transport != "fast" and bool(names))

            eventually(is_refused, "its login is refused")
            domain.kafka.alter_user_scram_credentials(present)
            domain.produce(topic, 3)
            found += poll_all(consumer, 6)
            consumer.commit()
            consumer.flush(timeout_ms=WAIT_MS)
        places = {(record.partition, record.offset) for record in found}
        assert places == {(n, offset) for n in range(2) for offset in range(6)}


def logs_in(servers: str, options: dict[str, str]) -> bool:
    """Return whether the broker accepts a login."""
    admin = KafkaTopicAdmin(ConnectionConfig(servers, options=options))
    try:
        admin.cluster_id()
    except CoordinationError:
        return False
    finally:
        admin.close()
    return True


def test_a_renewed_certificate_is_used_without_a_restart(
    listeners, unique, transport, tmp_path
):
    """Brokers no longer accept the former certificate; the claims are kept."""

    def write(pair):
        for name, data in zip(("own.pem", "own.key"), pair, strict=True):
            (tmp_path / "new").write_bytes(data)
            (tmp_path / "new").rename(tmp_path / name)

    changing = listeners.changing
    first, second = changing.certificates
    write(first)
    group = unique("renewing")
    options = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(listeners.certificate),
        "ssl.certificate.location": str(tmp_path / "own.pem"),
        "ssl.key.location": str(tmp_path / "own.key"),
    }
    with (
        # Leases are long enough for a busy machine.
        opened(listeners.broker, unique, transport=transport, h_ms=20_000) as domain,
        Forwarder(changing.moving) as forwarder,
    ):
        topic = domain.data_topic(2, records_each=3)
        forwarder.target = changing.before
        with Marshal(
            f"127.0.0.1:{changing.moving}",
            group_id=group,
            client_id="w1",
            coordination_topic=domain.topic,
            options=options,
            transport=transport,
            state_dir="",
        ) as marshal:
            consumer = marshal.consumer(topic)
            found = poll_all(consumer, 6)
            tokens = consumer.tokens()
            write(second)
            forwarder.redirect(changing.after)
            domain.produce(topic, 3)
            found += poll_all(consumer, 6)
            consumer.commit()
            consumer.flush(timeout_ms=WAIT_MS)
            assert consumer.tokens() == tokens
        places = sorted((record.partition, record.offset) for record in found)
        assert places == [(n, offset) for n in range(2) for offset in range(6)]
        assert {known.position for known in domain.states(group).values()} == {6}


@pytest.mark.parametrize("listener", ["tls", "sasl"])
def test_slices_are_read_over_tls_and_sasl(guarded, unique, listener, monkeypatch):
    """Responses are received into buffers directly, over TLS too."""
    domain = guarded.domain
    topic = domain.data_topic(1)
    place = TopicPartition(topic, 0)
    values = [b"%04d" % n + os.urandom(1_000) for n in range(3_000)]
    producer = KafkaProducer(bootstrap_servers=domain.servers)
    for value in values:
        producer.send(topic, value, partition=0)
    producer.flush(timeout=60)
    producer.close(timeout=60)
    kinds = set()

    def receiving(transport, ordinary, **others):
        kinds.add(type(transport._sock))
        found = receive(transport, ordinary, **others)
        parsers.add(type(transport.get_protocol().parser))
        assert found == (b"", None)
        return found

    parsers = set()
    receive = patches.receive
    monkeypatch.setattr(patches, "receive", receiving)
    options = {
        "tls": {
            "security.protocol": "SSL",
            "ssl.ca.location": str(guarded.certificate),
        },
        "sasl": login("alice"),
    }[listener]
    settings = ConnectionConfig(
        getattr(guarded, listener), coordination_topic=domain.topic, options=options
    )
    reader = SliceReader(settings, isolation_level="read_uncommitted", client_rack="")
    try:
        found = [
            value
            for rows in reader.read(
                place,
                OffsetRange(0, len(values)),
                timeout_ms=WAIT_MS,
                with_headers=False,
            )
            for value in rows.values.to_pylist()
        ]
    finally:
        reader.close(WAIT_MS)
    assert found == values
    kind = ssl.SSLSocket if listener == "tls" else socket.socket
    assert (kinds, parsers) == ({kind}, {ResponseReader})


def open_with(guarded, servers, options, *, transport="auto", timeout_ms=30_000):
    return Marshal(
        servers,
        group_id="g",
        client_id="w1",
        coordination_topic=guarded.domain.topic,
        options=options,
        transport=transport,
        state_dir="",
        timeout_ms=timeout_ms,
    )


def view_with(guarded, servers, options, *, transport, timeout_ms):
    return World.open(
        servers,
        coordination_topic=guarded.domain.topic,
        options=options,
        transport=transport,
        state_dir="",
        timeout_ms=timeout_ms,
    )


def assert_fails(text, open_by, *given, **rest):
    """Connect, with more time if a busy machine made no attempt to its end."""
    for timeout_ms in (3_000, 12_000, 60_000):
        with pytest.raises(CoordinationError) as raised:
            open_by(*given, timeout_ms=timeout_ms, **rest)
        if text in str(raised.value):
            return
    raise AssertionError(str(raised.value))


# Members share a client for look-ups, views describe the topic by their transport.
each_way = pytest.mark.parametrize("open_by", [open_with, view_with])


@each_way
def test_a_wrong_password_is_an_error(guarded, transport, open_by):
    options = login("alice", "drowssap")
    with pytest.raises(LogUnreadable, match="refused the login") as raised:
        open_by(
            guarded, guarded.sasl, options, transport=transport, timeout_ms=FOR_EVER_MS
        )
    assert "drowssap" not in str(raised.value)
    eventually(
        lambda: all(each.name != "marshal-close" for each in threading.enumerate()),
        "nobody goes on trying",
    )


@each_way
def test_a_login_at_a_listener_without_sasl_is_an_error(guarded, transport, open_by):
    with pytest.raises(LogUnreadable, match="does not use SASL"):
        open_by(
            guarded,
            guarded.domain.servers,
            login("alice"),
            transport=transport,
            timeout_ms=FOR_EVER_MS,
        )


@each_way
def test_a_client_without_tls_gets_an_error_that_names_tls(guarded, transport, open_by):
    """Only at the deadline: a broker that starts may close connections, too."""
    text = "closes connections without TLS"
    assert_fails(text, open_by, guarded, guarded.tls, {}, transport=transport)


@each_way
def test_a_client_with_tls_gets_an_error_at_a_listener_without_it(
    guarded, transport, open_by
):
    options = {"security.protocol": "SSL", "ssl.ca.location": str(guarded.certificate)}
    servers = guarded.domain.servers
    text = "does not use TLS"
    assert_fails(text, open_by, guarded, servers, options, transport=transport)


@each_way
def test_an_untrusted_certificate_is_an_error(guarded, transport, open_by):
    options = {"security.protocol": "SSL"}
    with pytest.raises(
        CoordinationError, match="certificate of the broker is not trusted"
    ):
        open_by(
            guarded, guarded.tls, options, transport=transport, timeout_ms=FOR_EVER_MS
        )


@each_way
def test_a_certificate_of_another_host_is_refused(guarded, transport, open_by):
    """Its issuer is trusted, so only the host name is refused."""
    options = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(guarded.other_certificate),
    }
    with pytest.raises(CoordinationError, match="is a name in the certificate"):
        open_by(
            guarded, guarded.other, options, transport=transport, timeout_ms=FOR_EVER_MS
        )
    unchecked = options | {"ssl.endpoint.identification.algorithm": "none"}
    with open_with(guarded, guarded.other, unchecked, transport=transport) as marshal:
        assert marshal.transport == transport


@each_way
def test_a_client_without_a_certificate_gets_an_error_with_the_option(
    guarded, transport, open_by
):
    options = {"security.protocol": "SSL", "ssl.ca.location": str(guarded.certificate)}
    with pytest.raises(CoordinationError, match="Set ssl_certfile"):
        open_by(
            guarded,
            guarded.mutual,
            options,
            transport=transport,
            timeout_ms=FOR_EVER_MS,
        )


def test_clients_with_one_password_share_an_engine(guarded, unique):
    with (
        open_with(guarded, guarded.sasl, login("alice")) as first,
        Marshal(
            guarded.sasl,
            group_id=unique("g"),
            client_id="w2",
            coordination_topic=guarded.domain.topic,
            options=login("alice"),
            state_dir="",
        ) as second,
    ):
        assert first.engine is second.engine


def test_a_user_with_only_read_rights_can_open_the_world(guarded, unique, transport):
    """The user needs no right to write, none on groups, none on the cluster."""
    domain = guarded.domain
    with domain.marshal(unique("seen"), "w1") as marshal:
        consumer = marshal.consumer(domain.data_topic(1))
        eventually(consumer.assignment, "the claim")
    with pytest.raises(CoordinationError):
        World.open(
            guarded.sasl,
            coordination_topic=domain.topic,
            options=login("reader"),
            transport=transport,
            timeout_ms=30_000,
        )
    for operation in ("READ", "DESCRIBE"):
        domain.grant("reader", operation, kind="topic", name=domain.topic)

    def look():
        try:
            return World.open(
                guarded.sasl,
                coordination_topic=domain.topic,
                options=login("reader"),
                transport=transport,
            )
        except CoordinationError:
            return None  # the rights are not everywhere yet

    world = eventually(look, "the reader is let in")
    assert world.to_object() == domain.world().to_object()


def described_to(admin, topic):
    try:
        return admin.describe_bare(topic)
    except LogUnreadable:
        return None  # the rights are not everywhere yet


def test_a_missing_right_to_write_is_an_error(guarded, unique, transport):
    """It raises LogUnwritable; the consumer does not wait for ever."""
    domain = guarded.domain
    topic = domain.data_topic(1)
    for name in (domain.topic, topic):
        for operation in ("READ", "DESCRIBE"):
            domain.grant("reader", operation, kind="topic", name=name)
    for user, can_write in (("reader", False), ("alice", True)):
        place = ConnectionConfig(guarded.sasl, options=login(user))
        with KafkaTopicAdmin(place) as admin:
            found = eventually(lambda: described_to(admin, domain.topic), "it is seen")
            assert found.can_write is can_write

    def try_it():
        with Marshal(
            guarded.sasl,
            group_id=unique("mute"),
            client_id="w1",
            coordination_topic=domain.topic,
            options=login("reader"),
            transport=transport,
            state_dir="",
        ) as marshal:
            consumer = marshal.consumer(topic)
            eventually(lambda: consumer.poll(timeout_ms=200), "it is told")

    with pytest.raises(LogUnwritable, match="not authorized"):
        try_it()
