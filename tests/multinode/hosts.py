"""Two hosts on one machine: namespaces with their own network, hostname, processes and /dev/shm,
connected by a veth pair.

    lab: user namespace ---+--- host-a 10.77.0.1 [eth0] ---.
                           |                               | veth
                           `--- host-b 10.77.0.2 [eth0] ---'

Nothing is left behind: the first process of a host exits when the pipe to it closes, however the
tests end; the other processes of the host are killed with it, and the kernel then removes its
namespaces and its end of the veth pair.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

ADDRESSES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}
INTERFACE = "eth0"
_LIMIT_S = 60.0  # for a command that takes milliseconds on an idle machine

_LAB = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
_HOST = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
_HOLD = "echo $$ && exec cat"  # runs until the pipe closes
# The first line reads its process id in the lab from /proc. The shell stays, because unlike cat it
# reaps orphans.
_HOLD_HOST = """
set -e
read pid rest < /proc/self/stat
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
printf '127.0.0.1 localhost\n{names}' > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
hostname {name}
ip link set lo up
echo $pid
cat
"""


class NotPermitted(RuntimeError):
    """This machine does not allow creating hosts."""


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: host name.
        init: id of its first process, in the namespace of the tests.
    """

    name: str
    init: int

    @property
    def address(self) -> str:
        return ADDRESSES[self.name]

    @property
    def prefix(self) -> list[str]:
        """The prefix of a command that runs on this host."""
        return [
            "nsenter",
            f"--target={self.init}",
            "--user",
            "--preserve-credentials",
            "--net",
            "--mount",
            "--uts",
            "--pid",
            "--",
        ]

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program on this host; `options` are those of Popen. Killing it does not kill its
        children.
        """
        return subprocess.Popen([*self.prefix, *command], text=True, **options)

    def run(self, *command: str) -> str:
        """Run a short command and return its output."""
        with self.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            text, _ = process.communicate(timeout=_LIMIT_S)
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(command)} on {self.name}: status {process.returncode}: {text}"
            )
        return text

    def disconnect(self) -> None:
        """Disable the network interface."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def connect(self) -> None:
        """Enable the network interface."""
        self.run("ip", "link", "set", INTERFACE, "up")


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Create two hosts that can reach only each other.

    Raises:
        NotPermitted: with the reason.
    """
    with ExitStack() as stack:
        lab = stack.enter_context(_held([*_LAB, "sh", "-c", _HOLD]))
        into_lab = [
            "nsenter",
            f"--target={lab}",
            "--user",
            "--preserve-credentials",
            "--net",
            "--mount",
            "--",
        ]
        hosts, names = [], "".join(f"{address} {name}\\n" for name, address in ADDRESSES.items())
        for name in ADDRESSES:
            command = [*into_lab, *_HOST, "sh", "-c", _HOLD_HOST.format(name=name, names=names)]
            hosts.append(Host(name, stack.enter_context(_held(command))))
        try:
            _connect(into_lab, hosts)
        except RuntimeError as error:
            raise NotPermitted(str(error)) from error
        yield hosts


@contextmanager
def _held(command: list[str]) -> Iterator[int]:
    """Start a process that prints its id and runs until the end of the block; yield the id."""
    try:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **pipes)
    except OSError as error:
        raise NotPermitted(f"{command[0]} is missing on this machine: {error}") from error
    with process:
        stdin, stdout, stderr = cast(
            "tuple[IO[str], IO[str], IO[str]]", (process.stdin, process.stdout, process.stderr)
        )
        pid = stdout.readline().strip()
        try:
            if not pid.isdecimal():
                stdin.close()
                raise NotPermitted(f"{' '.join(command[:6])} ...: {stderr.read().strip()}")
            yield int(pid)
        finally:
            stdin.close()
            process.wait(_LIMIT_S)


def _connect(into_lab: list[str], hosts: list[Host]) -> None:
    first, second = hosts
    ends = [
        "name",
        INTERFACE,
        "netns",
        str(first.init),
        "type",
        "veth",
        "peer",
        "name",
        INTERFACE,
        "netns",
        str(second.init),
    ]
    done = subprocess.run(
        [*into_lab, "ip", "link", "add", *ends], capture_output=True, text=True, timeout=_LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(f"ip link add type veth: {done.stderr.strip()}")
    for host in hosts:
        host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
        host.connect()


def processes_left(hosts: Sequence[Host]) -> list[int]:
    """Return the first processes of hosts that still exist."""
    return [host.init for host in hosts if os.path.exists(f"/proc/{host.init}")]
