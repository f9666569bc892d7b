"""Read this host's network: interfaces, names, ports."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LOOKUP_S = 3.0  # a resolver without a reachable server takes longer to give up
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_UP, _IFF_RUNNING = 0x1, 0x40  # linux/if.h
_LISTENING = "0A"  # include/net/tcp_states.h


@dataclass(frozen=True, slots=True)
class Interface:
    """Interface(name, up, addresses): one network interface, its IPv4 addresses first."""

    name: str
    up: bool
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        return self.name.startswith("lo")

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or ('no address' if self.up else 'down')})"


@dataclass(frozen=True, slots=True)
class Port:
    """The port at which ranks rendezvous.

    Attributes:
        number: its number.
        in_use: whether something listens on it on this host.
        listener: which process, as text; "" if that cannot be known.
        reachable: whether a connection to it at MASTER_ADDR succeeds; None if that was not tried.
    """

    number: int
    in_use: bool = False
    listener: str = ""
    reachable: bool | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """Facts about the network.

    Attributes:
        interfaces: those of this host.
        hostname: its name.
        own: the addresses that the name resolves to.
        master: the addresses that MASTER_ADDR resolves to; none if it is not set.
        local: those of both that belong to this host.
        port: where ranks rendezvous.
    """

    interfaces: tuple[Interface, ...]
    hostname: str
    own: tuple[str, ...]
    master: tuple[str, ...]
    local: frozenset[str]
    port: Port


def network(master: str, port: int, is_client: bool) -> Network:
    """Return the network configuration of this host. Takes at most about a quarter of a minute.

    Args:
        master: MASTER_ADDR, or "".
        port: MASTER_PORT.
        is_client: whether something must listen there already.
    """
    name = socket.gethostname()
    reachable = can_connect(master, port) if is_client else None
    used = is_in_use(port)
    rendezvous = Port(port, used, listener(port) if used else "", reachable)
    own = addresses(name)
    masters = addresses(master) if master else ()
    local = frozenset(address for address in (*own, *masters) if is_own(address))
    return Network(tuple(interfaces()), name, own, masters, local, rendezvous)


def within(seconds: float, probe: Callable[[], T], otherwise: T) -> T:
    """Return probe(), or `otherwise` where it fails.

    It fails if it raises OSError or is not done in time (its thread is then abandoned).
    """
    results = [otherwise]

    def run() -> None:
        with contextlib.suppress(OSError):
            results.append(probe())

    thread = threading.Thread(target=run, name="shardmesh-doctor-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[-1]


def addresses(name: str) -> tuple[str, ...]:
    """Return the addresses of a name, in the resolver's order; none if it is not done in time."""

    def look_up() -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                str(entry[4][0])
                for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            )
        )

    return within(LOOKUP_S, look_up, ())


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own(address: str) -> bool:
    """Return whether a socket can listen at the address, which then belongs to this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def can_connect(host: str, port: int) -> bool:
    def connect() -> bool:
        socket.create_connection((host, port), timeout=LOOKUP_S).close()
        return True

    return within(2 * LOOKUP_S, connect, False)


def is_in_use(port: int) -> bool:
    """Return whether something listens on the port.

    A lingering connection does not count: torch's store can listen next to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


# -- who listens -----------------------------------------------------------------------------------


def listener(port: int, proc: str = "/proc") -> str:
    """listener(29500) -> "python3.12 (process 4711)": the process that listens on a port.

    A port of this host; "" if that is unknown.

    Another user's processes can be named only by root.
    """
    sockets: set[str] = set()
    for table in ("tcp", "tcp6"):
        inodes = listening(_text(Path(proc, "net", table)), port)
        sockets |= {f"socket:[{inode}]" for inode in inodes}
    for pid in (name for name in _entries(Path(proc)) if name.isdecimal()):
        folder = Path(proc, pid)
        if any(_link(folder / "fd" / fd) in sockets for fd in _entries(folder / "fd")):
            return f"{_text(folder / 'comm').strip() or 'a process'} (process {pid})"
    return ""


def listening(table: str, port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port, from the text of /proc/net/tcp."""
    for line in table.splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
            yield rest[5]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _entries(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


# -- interfaces ------------------------------------------------------------------------------------


def interfaces() -> Iterator[Interface]:
    """Yield the interfaces of this host in the kernel's order.

    On other systems than Linux only their names are known.
    """
    six = _addresses_6(_text(Path("/proc/net/if_inet6")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            flags = struct.unpack("H", _ask(probe, name, _SIOCGIFFLAGS)[:2])[0]
            four = _ask(probe, name, _SIOCGIFADDR)[4:8]
            known = (
                (socket.inet_ntoa(four), *six.get(name, ()))
                if any(four)
                else tuple(six.get(name, ()))
            )
            yield Interface(name, bool(flags & _IFF_UP and flags & _IFF_RUNNING), known)


def _ask(probe: socket.socket, name: str, question: int) -> bytes:
    """Return the kernel's `struct ifreq` of an interface; zeros if the interface is unknown."""
    try:
        import fcntl  # which Windows lacks

        return fcntl.ioctl(probe.fileno(), question, struct.pack("16s24x", name.encode()))[16:]
    except (ImportError, OSError):
        return bytes(24)


def _addresses_6(table: str) -> dict[str, list[str]]:
    """Return addresses by interface from the text of /proc/net/if_inet6."""
    by_interface: dict[str, list[str]] = {}
    for line in table.splitlines():
        digits, _, _, _, _, name = line.split()
        by_interface.setdefault(name, []).append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return by_interface
