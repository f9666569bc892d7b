"""Check how a job is started and how its ranks would connect. Pure functions of the facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import LaunchEnvironmentError
from ..launch.environment import REQUIRED, complete_environment, launch_environment, launchers_of
from ..network import Interface, is_loopback
from ..settings import from_environment
from ..text import shortened, whole_number
from .facts import DEFAULT_PORT, Facts, number
from .findings import Finding, fault, ok, warning

_AGAIN = "unset LOCAL_RANK LOCAL_WORLD_SIZE   # or start the program with torchrun"
_SLOW = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
}


def launcher(facts: Facts) -> Finding:
    env, place = facts.env, facts.place
    try:
        rank_and_size = launch_environment(env)
    except LaunchEnvironmentError as error:
        count = max(1, len(facts.devices.usable))
        return _wrong_local_number(facts) or fault(
            str(error), f"torchrun --standalone --nproc-per-node {count} program.py"
        )
    numbers = launchers_of(env)[0].numbers() if place.launcher in ("slurm", "mpi") else {}
    if rank_and_size is None:
        return _alone(facts, numbers)
    return (
        _local_contradiction(facts)
        or _contradiction(facts, numbers)
        or ok(
            f"{place.launcher}: {place.size} rank{'s'[: place.size > 1]}, {place.local_size} on "
            "this host"
        )
    )


def _alone(facts: Facts, numbers: Mapping[str, str]) -> Finding:
    if not numbers:
        return ok("none: this process is alone")
    return fault(
        f"started by {facts.place.launcher} in {facts.env[numbers['WORLD_SIZE']]} processes, but "
        f"{' and '.join(REQUIRED[2:])} are not set: each would be a job of its own",
        f"export MASTER_ADDR=<host of rank 0> MASTER_PORT={DEFAULT_PORT}   # in each process, or "
        "torchrun once per host",
    )


def _wrong_local_number(facts: Facts) -> Finding | None:
    env = complete_environment(facts.env)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if whole_number(env.get(name, "0")) is None:
            return fault(f"{name}={shortened(env[name])!r} is not a number", _AGAIN)
    return None


def _local_contradiction(facts: Facts) -> Finding | None:
    env, place = complete_environment(facts.env), facts.place
    local = number(env, "LOCAL_WORLD_SIZE", place.size)
    if place.local_rank < local <= place.size:
        return None
    return fault(
        f"LOCAL_RANK={place.local_rank}, LOCAL_WORLD_SIZE={local} and WORLD_SIZE={place.size} "
        "contradict each other",
        _AGAIN,
    )


def _contradiction(facts: Facts, numbers: Mapping[str, str]) -> Finding | None:
    for name, launcher_name in numbers.items():
        if (
            launcher_name in facts.env
            and facts.env.get(name, facts.env[launcher_name]) != facts.env[launcher_name]
        ):
            return fault(
                f"{name}={facts.env[name]} but {launcher_name}={facts.env[launcher_name]}",
                f"export {name}=${launcher_name}",
            )
    return None


def settings(facts: Facts) -> Finding:
    env = facts.env
    try:
        guard = from_environment(env).mode
    except LaunchEnvironmentError as error:
        return fault(str(error), f"unset {str(error).partition('=')[0]}")
    if guard == "off":
        return warning(
            "SHARDMESH_MONITOR=off: ranks that do different things hang, or are wrong in silence",
            "unset SHARDMESH_MONITOR",
        )
    if env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return warning(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes each collective wait for a second one, some "
            "milliseconds each",
            "unset TORCH_DISTRIBUTED_DEBUG   # what it finds is found by default, see "
            "sm.monitor.collective_check",
        )
    if slow := [name for name, value in _SLOW.items() if env.get(name) == value]:
        return warning(
            f"{', '.join(f'{name}=1' for name in slow)}: communication is slower",
            f"unset {' '.join(slow)}",
        )
    shown = sorted(
        name for name in env if name.startswith(("NCCL_", "GLOO_", "SHARDMESH_", "TORCH_"))
    )
    return ok(", ".join(f"{name}={shortened(env[name])}" for name in shown) or "none")


# -- interfaces ------------------------------------------------------------------------------------


def gloo_interface(facts: Facts) -> Finding:
    have = facts.network.interfaces
    setting = facts.env.get("GLOO_SOCKET_IFNAME")
    if setting is None:
        return ok(f"{_interface_of(facts)}: by the host's name; there are {_names_text(have)}")
    by_name = {one.name: one for one in have}
    for name in setting.split(","):
        fix = f"export GLOO_SOCKET_IFNAME={_suggestion(have)}"
        if name not in by_name:
            return fault(
                f"GLOO_SOCKET_IFNAME={setting}: there is no interface {name!r}, only "
                f"{_names_text(have)}",
                fix,
            )
        if not by_name[name].up or not by_name[name].addresses:
            return fault(
                f"GLOO_SOCKET_IFNAME={setting}: {by_name[name]}",
                f"ip link set {name} up   # or: {fix}",
            )
        if by_name[name].is_loopback and facts.place.has_other_hosts:
            return fault(
                f"GLOO_SOCKET_IFNAME={setting}, which does not lead to the job's other hosts", fix
            )
    return ok(
        f"{', '.join(str(by_name[name]) for name in setting.split(','))}, as GLOO_SOCKET_IFNAME "
        f"says"
    )


def nccl_interface(facts: Facts) -> Finding:
    have = facts.network.interfaces
    setting = facts.env.get("NCCL_SOCKET_IFNAME")
    usable = [one for one in have if one.up and one.addresses]
    if setting is None:
        first = next(iter(_nccls_order(usable)), "none")
        return ok(f"{first}: the first that suits NCCL")
    taken = [one for one in usable if matches(setting, one.name)]
    if not taken:
        return fault(
            f"NCCL_SOCKET_IFNAME={setting} names no interface that is up and has an address; there "
            f"are {_names_text(have)}",
            f"export NCCL_SOCKET_IFNAME={_suggestion(have)}",
        )
    if facts.place.has_other_hosts and all(one.is_loopback for one in taken):
        return fault(
            f"NCCL_SOCKET_IFNAME={setting}, which does not lead to the job's other hosts",
            f"export NCCL_SOCKET_IFNAME={_suggestion(have)}",
        )
    return ok(f"{taken[0]}, as NCCL_SOCKET_IFNAME says")


def matches(pattern: str, name: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME means an interface.

    Prefixes, after "=" whole names, after "^" names to exclude.

    Source: NCCL user guide, environment variables, NCCL_SOCKET_IFNAME.
    """
    names = pattern.lstrip("^=").split(",")
    is_listed = name in names if "=" in pattern[:2] else name.startswith(tuple(names))
    return is_listed is not pattern.startswith("^")


def _nccls_order(usable: Iterable[Interface]) -> list[Interface]:
    """Sort interfaces: InfiniBand, others, docker's, loopback (NCCL's ncclFindInterfaces)."""
    return sorted(
        usable,
        key=lambda one: (
            one.is_loopback,
            one.name.startswith("docker"),
            not one.name.startswith("ib"),
        ),
    )


def _interface_of(facts: Facts) -> str:
    """Return the interface that gloo uses by default.

    The one that the host's name resolves to, if it is on this host, else loopback.
    """
    net = facts.network
    usable = next((address for address in net.own if address in net.local), "127.0.0.1")
    # Debian's 127.0.1.1 belongs to the loopback interface, but is not listed there.
    matching = (
        one
        for one in net.interfaces
        if usable in one.addresses or (one.is_loopback and is_loopback(usable))
    )
    return str(next(matching, usable))


def _suggestion(have: Sequence[Interface]) -> str:
    """Return the name of an interface that leads to other hosts, if there is one."""
    return next(
        (one.name for one in _nccls_order(one for one in have if one.up and one.addresses)), "lo"
    )


def _names_text(have: Iterable[Interface]) -> str:
    return ", ".join(str(one) for one in have) or "none"


# -- names and ports -------------------------------------------------------------------------------


def hostname(facts: Facts) -> Finding:
    net = facts.network
    many = facts.place.has_other_hosts
    bad = fault if many else warning
    if "GLOO_SOCKET_IFNAME" in facts.env:
        return ok(f"{net.hostname}; GLOO_SOCKET_IFNAME decides")
    by_name = f"export GLOO_SOCKET_IFNAME={_suggestion(net.interfaces)}"
    local = f"echo '127.0.0.1 {net.hostname}' >> /etc/hosts   # or: {by_name}"
    if not net.own:
        return bad(
            f"{net.hostname} does not resolve: gloo falls back to loopback",
            by_name if many else local,
        )
    if net.local.isdisjoint(net.own):
        return bad(
            f"{net.hostname} resolves to {', '.join(net.own)}, which is not an address of this "
            "host: gloo falls back to loopback",
            by_name if many else local,
        )
    if many and all(map(is_loopback, net.own)):
        return fault(
            f"{net.hostname} resolves to {', '.join(net.own)}, which other hosts cannot reach",
            by_name,
        )
    return ok(f"{net.hostname} resolves to {', '.join(net.own)}")


def master_address(facts: Facts) -> Finding:
    host = facts.env.get("MASTER_ADDR")
    addresses = facts.network.master
    place = facts.place
    if not host:
        return ok("not set")
    fix = "export MASTER_ADDR=<host or address of rank 0>   # the same in every process"
    if not addresses:
        return fault(f"MASTER_ADDR={host} does not resolve", fix)
    if place.has_other_hosts and all(map(is_loopback, addresses)):
        return fault(
            f"MASTER_ADDR={host} is {', '.join(addresses)}: other hosts look for rank 0 on "
            f"themselves",
            fix,
        )
    if place.rank == 0 and not place.agent_store and facts.network.local.isdisjoint(addresses):
        return fault(
            f"MASTER_ADDR={host} is {', '.join(addresses)}, which is not an address of this host, "
            "where rank 0 is",
            fix,
        )
    return ok(f"{host} is {', '.join(addresses)}")


def master_port(facts: Facts) -> Finding:
    port, place = facts.network.port, facts.place
    by = f" by {port.listener}" if port.listener else ""
    if port.reachable is False:
        return fault(
            f"nothing answers at {facts.env.get('MASTER_ADDR')}:{port.number}, where "
            f"{place.launcher} should listen",
            f"nc -vz {facts.env.get('MASTER_ADDR')} {port.number}   # a firewall? did the launcher "
            "end?",
        )
    if port.reachable:
        return ok(f"{port.number}: {place.launcher} answers")
    if place.launcher == "none":
        if not port.in_use:
            return ok(f"{port.number}, torchrun's default, is free")
        return warning(
            f"{port.number}, torchrun's default, is in use{by}",
            "torchrun --standalone ...   # or: --master-port <another>",
        )
    if port.in_use and place.rank == 0:
        free = DEFAULT_PORT + 1 if port.number == DEFAULT_PORT else DEFAULT_PORT
        another = f"export MASTER_PORT={free}   # in every process"
        return fault(f"{port.number}, where rank 0 must listen, is in use{by}", another)
    return ok(f"{port.number}: {'free for' if place.rank == 0 else 'listens there later:'} rank 0")
