"""Clients of librdkafka: logging, errors, fork, closing, and the search for leaders."""

import gc
import logging
import os
import sys
import weakref
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, ThrottleEvent

from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.kafka_io.fast import clients
from kafka_marshal.kafka_io.fast import clients as module
from kafka_marshal.kafka_io.fast.clients import (
    Client,
    LeaderSearch,
    close_admin,
    close_consumer,
    new_consumer,
    new_producer,
)
from kafka_marshal.kafka_io.fast.translate import Access, translate_error
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.throttling import Throttling

NOBODY = ConnectionConfig("127.0.0.1:1")


class World:
    """A clock, and a handle whose metadata requests always time out."""

    def __init__(self):
        self.now_s = 1_000.0
        self.asked = []

    def list_topics(self, topic, timeout):
        assert timeout <= 0.01
        self.asked.append(topic)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


@pytest.fixture
def world():
    return World()


@pytest.fixture
def search(world):
    return LeaderSearch(lambda: world.now_s)


def run(search, world, *, topics=("t",), span_s):
    """Poll every 10 ms for a number of seconds."""
    for _ in range(round(span_s / 0.01)):
        search.ask_if_due(world, topics)
        world.now_s += 0.01


def test_leaders_are_not_requested_without_a_lost_broker(search, world):
    run(search, world, span_s=60)
    assert world.asked == []
    assert search.max_wait_s(5) == 5
    # librdkafka treats a timeout below one millisecond as none.
    assert search.max_wait_s(0.0004) == 0.001


def test_leader_requests_start_at_once_and_repeat_each_quarter_second(search, world):
    search.start("b1")
    search.ask_if_due(world, ("t",))
    assert world.asked == ["t"]
    run(search, world, span_s=1)
    assert len(world.asked) == 4
    assert search.max_wait_s(5) == module.ASK_INTERVAL_S
    assert search.max_wait_s(0.01) == 0.01


def test_leader_requests_end_after_their_time(search, world):
    search.start("b1")
    run(search, world, span_s=module.ASKED_FOR_S + 600)
    assert len(world.asked) <= module.ASKED_FOR_S / module.ASK_INTERVAL_S
    assert search.max_wait_s(5) == 5


def test_the_loss_of_another_broker_extends_the_search_at_the_same_rate(search, world):
    for number in range(100):
        search.start(f"b{number}")
        run(search, world, span_s=1)
    assert 0.8 * 400 <= len(world.asked) <= 400


def test_requests_about_a_broker_that_stays_away_are_rare(search, world):
    search.start("b1")
    run(search, world, span_s=module.ASKED_FOR_S - 1)
    often = len(world.asked)
    for _ in range(100):
        search.start("b1")
        run(search, world, span_s=1)
    assert len(world.asked) - often <= 1.1 * (50 + 4)
    assert search.max_wait_s(5) == module.AWAY_INTERVAL_S
    world.asked.clear()
    search.start("b2")
    assert search.max_wait_s(5) == module.ASK_INTERVAL_S
    run(search, world, span_s=1)
    assert len(world.asked) >= 3


def test_a_broker_that_was_back_for_long_counts_as_new(search, world):
    search.start("b1")
    run(search, world, span_s=module.AWAY_S + 1)
    search.start("b1")
    assert search.max_wait_s(5) == module.ASK_INTERVAL_S


def test_leaders_of_many_topics_are_requested_in_turns(search, world):
    topics = [f"t{number}" for number in range(2 * module.TOPICS_AT_ONCE + 1)]
    search.start("b1")
    search.ask_if_due(world, topics)
    assert world.asked == topics[: module.TOPICS_AT_ONCE]
    run(search, world, topics=topics, span_s=1)
    assert world.asked[: len(topics)] == topics
    assert world.asked[len(topics)] == topics[0]


@pytest.fixture
def consumer():
    made = new_consumer(NOBODY, {})
    yield made
    close_consumer(made).join(timeout=30)
    assert made.handle is None


def test_log_lines_of_librdkafka_go_to_the_logger(consumer, caplog, capfd):
    with caplog.at_level(logging.DEBUG, logger=clients.LOGGER):
        for _ in range(100):
            consumer.handle.poll(0.1)
            if "127.0.0.1:1" in caplog.text:
                break
    assert "127.0.0.1:1" in caplog.text
    assert consumer.refusal is None
    assert capfd.readouterr().err == ""


def test_without_configured_logging_no_line_reaches_stderr(monkeypatch):
    """By default Python writes such lines to stderr; errors and events suffice."""
    written = []
    last_resort = logging.Handler(logging.WARNING)
    last_resort.emit = written.append
    monkeypatch.setattr(logging, "lastResort", last_resort)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    clients._Log(Client()).log(logging.ERROR, "Connection refused")
    assert written == []


def test_the_producer_id_is_learned_from_debug_lines(caplog):
    made = new_producer(NOBODY, {"enable.idempotence": True})
    log = clients._Log(made)
    with caplog.at_level(logging.INFO, logger=clients.LOGGER):
        log.log(logging.DEBUG, "%s [%s]: %s", "TXN", "main", "Coordinator not up")
        assert made.requests_pid.is_set()
        assert not made.has_pid.is_set()
        log.log(logging.DEBUG, "%s [%s]: %s", "GETPID", "main", "Acquired PID{Id:1}")
    assert made.has_pid.is_set()
    assert caplog.text == ""
    made.release()


def test_a_failed_connection_is_an_error_line_once_a_minute_per_cause(caplog):
    now_s = [5.0]
    log = clients._Log(Client(), clock_s=lambda: now_s[0])

    def attempt(text, ms):
        line = f"Connect failed: {text} (after {ms}ms in state CONNECT)"
        log.log(logging.ERROR, "%s [%s]: %s", "FAIL", "thrd:a:1", line)

    with caplog.at_level(logging.DEBUG, logger=clients.LOGGER):
        for ms in range(100):
            attempt("refused", ms)
        attempt("no route", 0)
        attempt("refused", 0)
        now_s[0] += clients.REPEATED_AFTER_S
        attempt("refused", 0)
    assert len(caplog.records) == 103
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [each.getMessage().split(": ")[2][:8] for each in errors] == [
        "refused ",
        "no route",
        "refused ",
    ]
    for number in range(3 * clients.CAUSES_MAX):
        attempt(f"cause {number}", 0)
    assert len(log._due_s) <= clients.CAUSES_MAX


CLOSED = (
    "a:1/bootstrap: Disconnected: connection closed by peer: receive 0 after POLLIN "
    "(after {}ms in state {})"
)


@pytest.mark.parametrize(
    ("state", "has_tls", "is_guessed"),
    [
        ("APIVERSION_QUERY", False, True),
        ("APIVERSION_QUERY", True, False),
        ("UP", False, False),
    ],
)
def test_a_listener_that_closes_at_once_is_reported_as_tls(state, has_tls, is_guessed):
    client = Client()
    log = clients._Log(client, has_tls=has_tls)
    log.log(logging.INFO, "%s [%s]: %s", "FAIL", "thrd:a:1", CLOSED.format(0, state))
    assert (client.last is not None) is is_guessed
    if is_guessed:
        error = translate_error(
            client.last, doing="Reading", access=Access.READ, addresses="a:1"
        )
        assert "the listener at a:1 closes connections without TLS" in str(error)


def test_a_quiet_client_logs_at_debug_level(caplog):
    log = clients._Log(Client(), is_quiet=True)
    with caplog.at_level(logging.DEBUG, logger=clients.LOGGER):
        log.log(logging.ERROR, "%s", "Connect failed")
    assert [each.levelno for each in caplog.records] == [logging.DEBUG]


def test_connections_that_are_closed_at_once_are_logged_once_a_minute(caplog):
    log = clients._Log(Client())
    with caplog.at_level(logging.INFO, logger=clients.LOGGER):
        for ms in range(100):
            log.log(logging.INFO, "%s", CLOSED.format(ms, "APIVERSION_QUERY"))
    assert len(caplog.records) == 1


def test_topic_ids_are_learned_from_debug_lines():
    client = Client()
    log = clients._Log(client)

    def log_line(line):
        log.log(logging.DEBUG, "%s [%s]: %s", "METADATA", "main", line)

    log_line("Topic t changed id from AAAAAAAAAAAAAAAAAAAAAA to AAAAAAAAAAAAAAAAAAAAAQ")
    assert client.topic_ids == {"t": bytes(15) + b"\x01"}
    log_line("Topic t changed id from AAAAAAAAAAAAAAAAAAAAAQ to AAAAAAAAAAAAAAAAAAAAAQ")
    log_line(
        "Topic u.v-1 changed id from AAAAAAAAAAAAAAAAAAAAAA to +/AAAAAAAAAAAAAAAAAAAA"
    )
    assert not client.has_other_topic
    log_line("Topic t changed id from AAAAAAAAAAAAAAAAAAAAAQ to AAAAAAAAAAAAAAAAAAAAAg")
    assert client.has_other_topic
    assert client.topic_ids["t"] == bytes(15) + b"\x02"
    assert client.topic_ids["u.v-1"] == b"\xfb\xf0" + bytes(14)


def test_a_client_is_outdated_a_second_after_an_answer_without_brokers(monkeypatch):
    """A broker that shuts down lists none; librdkafka then connects to none again."""
    now_s = [5.0]
    monkeypatch.setattr(clients.time, "monotonic", lambda: now_s[0])
    client = Client()
    log = clients._Log(client)

    def answered(text):
        log.log(logging.DEBUG, "%s [%s]: a:1/1: %s", "METADATA", "main", text)

    answered("1 brokers, 1 topics")
    now_s[0] += 60
    assert not client.is_outdated
    answered("0 brokers, 1 topics")
    assert not client.is_outdated
    now_s[0] += clients.NO_BROKERS_S
    assert client.is_outdated
    answered("3 brokers, 0 topics")
    assert not client.is_outdated


def test_throttling_of_responses_is_recorded(monkeypatch):
    monkeypatch.setattr(clients, "throttling", noted := Throttling())
    clients._note_delay(ThrottleEvent("a:1/1", 1, 2.5))
    assert noted.longest_ms == 2_500


def test_an_authentication_error_is_recorded_as_a_refusal():
    client = Client()
    client.on_error(KafkaError(KafkaError._TRANSPORT))
    assert client.refusal is None
    client.on_error(KafkaError(KafkaError._AUTHENTICATION))
    assert client.refusal is not None
    assert client.refusal.args[0].name() == "_AUTHENTICATION"


def test_renewed_certificates_outdate_a_client_that_cannot_connect(monkeypatch):
    """Existing connections work with the old certificates, so only errors count."""
    now_s = [1_000.0]
    monkeypatch.setattr(clients.time, "monotonic", lambda: now_s[0])
    are_renewed = [True]
    files = SimpleNamespace(are_renewed=lambda: are_renewed[0])
    client = Client(files=files)
    assert not client.is_outdated
    client.on_error(KafkaError(KafkaError._SSL, "certificate expired"))
    assert client.is_outdated
    now_s[0] += clients.FAILING_S
    assert not client.is_outdated
    client.on_error(KafkaError(KafkaError._SSL, "certificate expired"))
    are_renewed[0] = False
    assert not client.is_outdated


def test_only_clients_with_tls_watch_certificate_files():
    for options, has_files in (({}, False), ({"security_protocol": "SSL"}, True)):
        made = new_consumer(ConnectionConfig("127.0.0.1:1", options=options), {})
        assert (made.files is not None) is has_files
        made.on_error(KafkaError(KafkaError._TRANSPORT))
        assert not made.is_outdated
        close_consumer(made).join(timeout=30)


def test_a_client_without_a_token_fails_with_the_reason(monkeypatch):
    """confluent-kafka waits ten seconds for a token, then raises a SystemError."""
    options = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": SimpleNamespace(token=lambda: 1 / 0),
    }

    def new(config, **_):
        with suppress(ZeroDivisionError):
            config["oauth_cb"]("")
        raise SystemError("returned NULL without setting an exception")

    with pytest.raises(CoordinationError, match="ZeroDivisionError") as raised:
        clients._new_client(new, ConnectionConfig("a", options=options), {})
    assert "no token could be obtained" in str(raised.value)
    assert raised.value.retriable


def test_a_missing_token_is_not_recorded_as_a_refusal():
    """The fault is transient: it ends once the token endpoint is back."""
    client = Client()
    text = "Failed to acquire SASL OAUTHBEARER token: OAuth callback raised exception"
    client.on_error(KafkaError(KafkaError._AUTHENTICATION, text))
    assert client.refusal is None
    assert client.last is not None


def test_a_system_error_from_an_error_code_is_ignored():
    class Error:
        """An error of confluent-kafka after a token callback has raised.

        The first call of ``code`` raises a SystemError.
        """

        def __init__(self):
            self.codes = iter([SystemError(), KafkaError._TRANSPORT])

        def code(self):
            code = next(self.codes)
            if isinstance(code, Exception):
                self.codes = iter([KafkaError._TRANSPORT] * 9)
                raise code
            return code

        def str(self):
            return "Connection refused"

    client = Client()
    client.on_error(Error())
    assert client.refusal is None


def test_unsupported_settings_are_refused():
    with pytest.raises(ConfigurationError):
        new_producer(ConnectionConfig("a", options={"proxy_url": "http://b"}), {})
    with pytest.raises(ConfigurationError, match="librdkafka does not accept"):
        new_producer(NOBODY, {"no.such.setting": 1})


def test_a_forked_child_never_destroys_the_handle(consumer):
    """Destroying a handle waits for threads, which do not exist in the child."""
    before = sys.getrefcount(consumer.handle)
    child = os.fork()
    if child == 0:
        is_kept = sys.getrefcount(consumer.handle) == before + 1
        consumer.handle = None
        os._exit(0 if is_kept and not clients._live else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert consumer.handle is not None


@pytest.mark.parametrize("new", [new_consumer, new_producer])
def test_an_unreferenced_client_is_destroyed(new):
    made = weakref.ref(new(NOBODY, {}))
    gc.collect()
    assert made() is None


def test_an_all_brokers_down_error_does_not_replace_its_cause():
    client = Client()
    down = KafkaError(KafkaError._TRANSPORT, "Connection refused")
    client.on_error(down)
    client.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert client.last.args == (down,)


def test_a_tls_hint_survives_the_same_error_without_a_hint():
    """librdkafka adds the hint to some errors only, perhaps not to the last one."""
    client = Client()
    ended = "SSL connection closed by peer"
    plain = KafkaError(KafkaError._TRANSPORT, f"Disconnected: {ended}")
    guess = KafkaError(
        KafkaError._SSL, f"{ended}: connecting to a PLAINTEXT broker listener?"
    )
    client.on_error(plain)
    assert client.last.args == (plain,)
    client.on_error(guess)
    client.on_error(plain)
    assert client.last.args == (guess,)
    refused = KafkaError(KafkaError._TRANSPORT, "Connection refused")
    client.on_error(refused)
    assert client.last.args == (refused,)


@pytest.mark.parametrize(
    ("guess", "plain"),
    [
        (
            "SSL connection closed by peer: connecting to a PLAINTEXT broker listener?",
            "SSL connection closed by peer",
        ),
        (
            (
                "Disconnected while requesting ApiVersion: might be caused by "
                "incorrect security.protocol configuration (connecting to a SSL "
                "listener?) or broker version is < 0.10 (see api.version.request) "
                "(after 3ms in state X)"
            ),
            "Disconnected while requesting ApiVersion (after 3ms in state X)",
        ),
    ],
)
def test_tls_is_no_guess_once_a_broker_has_answered(guess, plain):
    """A broker that stops closes connections, too."""
    client = Client()
    client.on_answer()
    client.on_error(KafkaError(KafkaError._TRANSPORT, guess))
    assert client.last.args[0].str() == plain
    log = clients._Log(client)
    client.on_answer()
    line = CLOSED.format(0, "APIVERSION_QUERY")
    log.log(logging.INFO, "%s [%s]: %s", "FAIL", "thrd:a:1", line)
    assert client.last is None


def test_an_admin_client_is_destroyed_after_its_requests_have_ended():
    client = Client(handle=object())
    pending = Future()
    closer = close_admin(client, (pending,))
    assert client.handle is not None
    pending.set_result(None)
    closer.join(timeout=60)
    assert client.handle is None
