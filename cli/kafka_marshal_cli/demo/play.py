"""The whole demo: one broker, one round for each guarantee, and the verdict."""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from kafka_marshal import Admin, ConfigurationError
from kafka_marshal.admin import Format
from kafka_marshal.testing.broker import EmbeddedBroker
from kafka_marshal.testing.jars import KAFKA_VERSION, cache_dir
from kafka_marshal_cli.demo.show import DELIVERIES, Show
from kafka_marshal_cli.demo.stage import Plan, Stage
from kafka_marshal_cli.demo.verdict import Verdict, judge

SCHEMA = 1
# With H = 2 s everything is over within two minutes, or has failed by then: both
# rounds together wait for about ten times 2H at worst.
BUDGET_S = 65.0
BUDGET_INTERVALS = 20
HEARTBEAT_MS_LEAST = 500
HEARTBEAT_MS_MOST = 60_000
ROUNDS = (("alo", "payments", "billing"), ("amo", "notices", "notifier"))


@attrs.frozen
class Wish:
    """What the demo was asked to do.

    Attributes:
        heartbeat_interval_ms: H.
        partitions: Partitions of each data topic.
        records: Records of each first fill.
        consumers: Number of consumer processes.
        seed: Chooses who is killed.
        keep: Whether journals and logs stay.
    """

    heartbeat_interval_ms: int
    partitions: int
    records: int
    consumers: int
    seed: int
    keep: bool

    def __attrs_post_init__(self) -> None:
        least, most = HEARTBEAT_MS_LEAST, HEARTBEAT_MS_MOST
        if not least <= self.heartbeat_interval_ms <= most:
            raise ConfigurationError(
                f"--heartbeat-interval must be {least} ms to {most // 1000} s, not "
                f"{self.heartbeat_interval_ms} ms",
                setting="--heartbeat-interval",
            )


@attrs.frozen
class Outcome:
    """What the demo found.

    Attributes:
        wish: What it was asked to do.
        verdicts: One for each round.
        took_s: How long it took in all.
        folder: Where journals and logs are, or None where they are gone.
    """

    wish: Wish
    verdicts: tuple[Verdict, ...]
    took_s: float
    folder: Path | None

    @property
    def held(self) -> bool:
        """Whether every guarantee of every round held."""
        full = len(self.verdicts) == len(ROUNDS)
        return full and all(verdict.held for verdict in self.verdicts)

    def to_object(self) -> dict[str, Any]:
        """Return the verdict document."""
        return {
            "schema": SCHEMA,
            "held": self.held,
            "kafka": KAFKA_VERSION,
            "heartbeat_interval_ms": self.wish.heartbeat_interval_ms,
            "partitions": self.wish.partitions,
            "consumers": self.wish.consumers,
            "seed": self.wish.seed,
            "took_ms": round(self.took_s * 1000),
            "folder": None if self.folder is None else str(self.folder),
            "rounds": [verdict.to_object() for verdict in self.verdicts],
        }


def play(wish: Wish, show: Show) -> Outcome:
    """Run the whole demo; whatever happens, nothing that it started is left.

    Raises:
        MarshalError: No broker could be started or prepared; says what to do.
        KeyboardInterrupt: Somebody asked us to end.
    """
    with ExitStack() as opened:
        opened.enter_context(_ended_by_signals())
        folder = Path(tempfile.mkdtemp(prefix="kafka-marshal-demo-"))
        if not wish.keep:
            opened.callback(shutil.rmtree, folder, ignore_errors=True)
        opened.enter_context(show)
        broker = _start_broker(show)
        opened.callback(broker.stop)
        if wish.keep:
            opened.callback(_keep_log, broker, folder)
        _format(broker.bootstrap_servers, wish, show)
        interval_s = wish.heartbeat_interval_ms / 1000
        budget_s = BUDGET_S + BUDGET_INTERVALS * interval_s
        ends_at = time.monotonic() + budget_s
        verdicts = []
        for delivery, topic, group_id in ROUNDS:
            show.say(f"-- {DELIVERIES[delivery].capitalize()}.")
            plan = Plan(
                delivery,
                topic,
                group_id,
                wish.heartbeat_interval_ms,
                wish.partitions,
                wish.records,
                wish.consumers,
                wish.seed,
                folder / delivery,
                ends_at,
            )
            with Stage(plan, broker.bootstrap_servers, show=show) as stage:
                verdict = judge(stage.run())
            show.verdict(verdict)
            verdicts.append(verdict)
        kept = folder if wish.keep else None
        return Outcome(wish, tuple(verdicts), show.elapsed_s, kept)


def _start_broker(show: Show) -> EmbeddedBroker:
    listing = cache_dir() / f"kafka-{KAFKA_VERSION}.list"
    if not listing.is_file():
        show.say(
            f"Fetching Apache Kafka {KAFKA_VERSION} into {cache_dir()}; this happens "
            "once and takes a while."
        )
    show.say(f"Starting Apache Kafka {KAFKA_VERSION}: one broker, on this machine.")
    broker = EmbeddedBroker().start()
    show.say(f"The broker serves at {broker.bootstrap_servers}.")
    return broker


def _format(bootstrap_servers: str, wish: Wish, show: Show) -> None:
    with Admin(bootstrap_servers, client_id="demo-admin") as admin:
        wanted = Format(heartbeat_interval_ms=wish.heartbeat_interval_ms)
        config = admin.format_topic(wanted)
    interval_s = wish.heartbeat_interval_ms / 1000
    show.say(
        f"Formatted __marshal: {config.partition_count} coordinating partitions, "
        f"heartbeat interval H = {interval_s:g} s. All coordination happens there."
    )


def _keep_log(broker: EmbeddedBroker, folder: Path) -> None:
    with suppress(OSError):
        shutil.copy(broker.log_path, folder / "broker.log")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run as an interrupt does, in order."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
