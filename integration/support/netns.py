"""Hosts of their own for brokers and clients: network namespaces on one bridge.

Any direction between two of them can be cut without notifying either side: the sender's
neighbor entry gets a wrong hardware address, so its packets are lost. This needs Linux
and the rights of root; see ``why_not``.
"""

import os
import subprocess
import threading
from collections.abc import Iterable
from contextlib import contextmanager
from itertools import product
from typing import Self

COMMAND_S = 60
NOBODY = "02:00:00:00:00:fe"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=COMMAND_S)


def why_not() -> str:
    """Return why namespaces cannot be used here, or nothing."""
    name = f"km{os.getpid()}probe"
    try:
        ip("netns", "add", name)
    except FileNotFoundError:
        return "there is no command `ip` (iproute2)"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"
    ip("netns", "del", name)
    return ""


class Network:
    """Some hosts, each in a namespace; a context manager.

    Attributes:
        addresses: Each host's address, by name. Our own process has one as well,
            and is never cut off.
    """

    def __init__(self, *hosts: str) -> None:
        # A process has one network of each kind at a time: the id makes it unique.
        self._id = f"{os.getpid() % 50_000:04x}"
        low = os.getpid() % 250 + 1
        self._bridge = f"kmb{self._id}"
        self._prefix = f"10.{os.getpid() // 250 % 200 + 20}.{low}"
        self.addresses = {
            name: f"{self._prefix}.{number}" for number, name in enumerate(hosts, 1)
        }
        self._numbers = {name: number for number, name in enumerate(hosts, 1)}

    def launcher(self, host: str) -> list[str]:
        """Return the prefix of a command that runs it on a host, by exec."""
        return ["ip", "netns", "exec", self._space(host)]

    def _space(self, host: str) -> str:
        return f"km{self._id}{host}"

    def _mac(self, host: str) -> str:
        return f"02:00:00:00:01:{self._numbers[host]:02x}"

    def __enter__(self) -> Self:
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("addr", "add", f"{self._prefix}.254/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for host in self.addresses:
                self._add(host)
            for pair in self._pairs(self.addresses, self.addresses):
                self._aim(*pair, is_open=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: str) -> None:
        space, number = self._space(host), self._numbers[host]
        outside = f"kmv{self._id}{number}"
        ip("netns", "add", space)
        inside = ("peer", "name", "eth0", "netns", space)
        ip("link", "add", outside, "type", "veth", *inside)
        ip("link", "set", outside, "master", self._bridge, "up")
        ip("-n", space, "link", "set", "eth0", "address", self._mac(host))
        ip("-n", space, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", space, "link", "set", "eth0", "up")

    def __exit__(self, *error: object) -> None:
        for words in (
            *(("netns", "del", self._space(host)) for host in self.addresses),
            ("link", "del", self._bridge),
        ):
            subprocess.run(
                ["ip", *words], check=False, capture_output=True, timeout=COMMAND_S
            )

    # --- cutting

    def cut(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Drop packets from senders to receivers; the other direction stays open."""
        for pair in self._pairs(senders, receivers):
            self._aim(*pair, is_open=False)

    def mend(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Open this direction again."""
        for pair in self._pairs(senders, receivers):
            self._aim(*pair, is_open=True)

    def split(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Cut both ways."""
        one, other = list(one), list(other)
        self.cut(one, other)
        self.cut(other, one)

    def heal(self) -> None:
        """Open all directions."""
        self.mend(self.addresses, self.addresses)

    def _pairs(
        self, senders: Iterable[str], receivers: Iterable[str]
    ) -> list[tuple[str, str]]:
        return [(a, b) for a, b in product(senders, receivers) if a != b]

    def _aim(self, sender: str, receiver: str, *, is_open: bool) -> None:
        mac = self._mac(receiver) if is_open else NOBODY
        place = (self.addresses[receiver], "lladdr", mac, "dev", "eth0")
        space = self._space(sender)
        ip("-n", space, "neigh", "replace", *place, "nud", "permanent")

    @contextmanager
    def losing(self, hosts: Iterable[str], *, open_s: float, shut_s: float):
        """Lose packets to and from some hosts: shut for a while, again and again."""
        hosts = list(hosts)
        others = [name for name in self.addresses if name not in hosts]
        is_over = threading.Event()

        def flap() -> None:
            while not is_over.wait(open_s):
                self.cut(hosts, others)
                is_over.wait(shut_s)
                self.mend(hosts, others)

        thread = threading.Thread(target=flap, name="lossy-link", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(COMMAND_S * len(hosts) * len(others))
