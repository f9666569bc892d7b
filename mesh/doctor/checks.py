"""All checks by name, and how their findings on several ranks are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..errors import LaunchEnvironmentError
from ..text import ranks_text
from . import host_checks, job_checks
from .bandwidth import Bandwidth
from .facts import Facts
from .findings import Finding, Status, fault, ok, warning

Check = Callable[[Facts], Finding]

CHECKS: Mapping[str, Check] = {
    "python": host_checks.python,
    "torch": host_checks.torch,
    "triton": host_checks.triton,
    "backends": host_checks.backends,
    "devices": host_checks.devices,
    "own device": host_checks.own_device,
    "peer access": host_checks.peer_access,
    "cores": host_checks.cores,
    "threads": host_checks.threads,
    "memory": host_checks.memory,
    "shared memory": host_checks.shared_memory,
    "open files": host_checks.open_files,
    "processes": host_checks.processes,
    "left over": host_checks.leftovers,
    "launcher": job_checks.launcher,
    "settings": job_checks.settings,
    "gloo interface": job_checks.gloo_interface,
    "nccl interface": job_checks.nccl_interface,
    "hostname": job_checks.hostname,
    "master address": job_checks.master_address,
    "master port": job_checks.master_port,
}
_WORST: Mapping[Status, int] = {"ok": 0, "warning": 1, "fault": 2}
# Bytes per second. A network of 1 Gbit/s gives 0.12e9; PCIe 3.0 without peer access, through host
# memory, about 5e9.
_SLOW_BETWEEN_HOSTS, _SLOW_BETWEEN_GPUS = 0.2e9, 4e9
_CLOCKS_APART_S = 1.0  # above it, logs and traces of several hosts in one order begin to mislead


def findings(facts: Facts) -> dict[str, Finding]:
    """Return what each check finds on one rank."""
    return {name: check(facts) for name, check in CHECKS.items()}


def worst_findings(everyone: Sequence[Mapping[str, Finding]]) -> dict[str, Finding]:
    """Return the worst finding of each check over all ranks, in order.

    Its text says on which ranks it holds where that is not all.
    """
    return {
        name: _worst([findings_of_rank[name] for findings_of_rank in everyone])
        for name in everyone[0]
    }


def _worst(findings_by_rank: Sequence[Finding]) -> Finding:
    status = max(findings_by_rank, key=lambda one: _WORST[one.status]).status
    ranks: dict[Finding, list[int]] = {}
    for rank, one in enumerate(findings_by_rank):
        if one.status == status:
            ranks.setdefault(one, []).append(rank)
    (worst, where), *others = ranks.items()
    if status == "ok" or len(where) == len(findings_by_rank):
        return worst
    texts = [f"{ranks_text(of)}: {one.facts}" for one, of in ((worst, where), *others)]
    return Finding(status, "; ".join(texts[:4]) + ("; ..." if len(texts) > 4 else ""), worst.fix)


def hosts(names: Sequence[str]) -> Finding:
    """Return which ranks are on which host."""
    by_host: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        by_host.setdefault(name, []).append(rank)
    return ok("; ".join(f"{name}: {ranks_text(ranks)}" for name, ranks in by_host.items()))


def device_of_each_rank(everyone: Sequence[Facts], device_type: str) -> Finding:
    """Return which device each rank uses, and which ranks of a host share one."""
    ranks: dict[tuple[str, str], list[int]] = {}
    texts = []
    for rank, one in enumerate(everyone):
        try:
            index = host_checks.used_device(one)
        except LaunchEnvironmentError:  # the check of this rank says so
            continue
        if not one.devices.usable:
            continue
        identity = one.devices.usable[index].identity
        texts.append(f"rank {rank}: cuda:{index}")
        if identity:
            ranks.setdefault((one.network.hostname, identity), []).append(rank)
    shared = [
        f"{ranks_text(of)} use {identity} of {host}"
        for (host, identity), of in ranks.items()
        if len(of) > 1
    ]
    if shared:
        fix = (
            "torchrun --nproc-per-node <devices of the host> ...   # CUDA_VISIBLE_DEVICES: the "
            "same for all ranks, or one device for each"
        )
        return (fault if device_type == "cuda" else warning)(
            f"{'; '.join(shared)}: NCCL needs one device for each rank", fix
        )
    return ok("; ".join(texts[:16]) + ("; ..." if len(texts) > 16 else "") or "none: no GPU")


def clocks(seconds: Sequence[float]) -> Finding:
    """Return how far each rank's clock is from that of rank 0."""
    rank = max(range(len(seconds)), key=lambda r: abs(seconds[r]))
    if abs(seconds[rank]) < _CLOCKS_APART_S:
        return ok(f"at most {abs(seconds[rank]) * 1e3:.3g} ms apart")
    side = "ahead of" if seconds[rank] > 0 else "behind"
    return warning(
        f"the clock of rank {rank} is {abs(seconds[rank]):.3g} s {side} that of rank 0",
        "chronyc makestep   # on its host",
    )


def collectives(rows: Sequence[Bandwidth]) -> Finding:
    """Return whether collectives gave the right result."""
    wrong = [f"{row.op} along {row.axis}" for row in rows if not row.correct]
    if wrong:
        return fault(
            f"wrong results: {', '.join(wrong)}",
            "NCCL_DEBUG=INFO python -m shardmesh doctor   # and test memory and links",
        )
    return ok(
        "all_reduce and all_to_all give correct results"
        if rows
        else "only one rank: nothing to try"
    )


def speed(rows: Sequence[Bandwidth], device_type: str, has_other_hosts: bool) -> Finding:
    """Return whether collectives are slower than the slowest hardware that is used for training."""
    if has_other_hosts:
        slow = _SLOW_BETWEEN_HOSTS
    else:
        slow = _SLOW_BETWEEN_GPUS if device_type == "cuda" else 0.0
    slow_rows = [
        f"{row.op} along {row.axis}: {row.bytes / row.seconds / 1e9:.3g} GB/s"
        for row in rows
        if row.bytes < slow * row.seconds
    ]
    if not slow_rows:
        return ok("nothing is remarkably slow" if rows else "nothing to measure")
    name = "GLOO_SOCKET_IFNAME" if device_type == "cpu" else "NCCL_SOCKET_IFNAME"
    fix = (
        f"export {name}=<the fast interface>"
        if has_other_hosts
        else "nvidia-smi topo -m   # how are the GPUs connected?"
    )
    return warning(f"slow: {'; '.join(slow_rows)}", fix)
