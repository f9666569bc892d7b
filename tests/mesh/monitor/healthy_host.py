"""Facts of a healthy host and job, as the doctor collects them, for tests to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardmesh.mesh.doctor.devices import Device, Devices
from shardmesh.mesh.doctor.facts import Facts, Software
from shardmesh.mesh.doctor.system import Limits, Space, System
from shardmesh.mesh.network import Interface, Network, Port

GIB = 1 << 30

LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"))
ETHERNET = Interface("eth0", True, ("10.0.0.5",))
UNUSED = Interface("eth1", False, ())
GPU = Device("H100", 80 * GIB, 79 * GIB)
SOFTWARE = Software("3.11.7", "2.13.0+cu128", "3.7.1", "0.1.0", True, True, True)
SYSTEM = System(
    name="Linux",
    container=False,
    cores=16,
    memory=64 * GIB,
    available=60 * GIB,
    limits=Limits(),
    open_files=(1024, 1 << 20),
    processes=None,
    shared=Space("/dev/shm", 32 * GIB, 32 * GIB),
    leftovers=(),
)
NETWORK = Network(
    (LOOPBACK, UNUSED, ETHERNET),
    "node1",
    ("10.0.0.5",),
    (),
    frozenset({"10.0.0.5", "127.0.0.1"}),
    Port(29500),
)
ALONE = Facts({}, SOFTWARE, SYSTEM, NETWORK, Devices())

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}
RANKS = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "4"}
ADDRESS = {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500"}
JOB = {**AGENT, **RANKS, **ADDRESS, "WORLD_SIZE": "4"}
TWO_HOSTS = {**JOB, "WORLD_SIZE": "8"}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "4", **ADDRESS}
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"}


def facts(env: Mapping[str, str] | None = None, **changes) -> Facts:
    """Return the facts of the healthy host with this environment, and with these fields of any part
    changed.
    """
    healthy = replace(ALONE, env=env or {})
    if healthy.place.agent_store:
        port = Port(29500, True, "torchrun (process 7)", True)
        healthy = replace(healthy, network=replace(NETWORK, master=("10.0.0.5",), port=port))
    elif "MASTER_ADDR" in healthy.env:
        healthy = replace(healthy, network=replace(NETWORK, master=("10.0.0.5",)))
    for part in ("software", "system", "network", "devices"):
        own_fields = {
            name: value for name, value in changes.items() if hasattr(getattr(healthy, part), name)
        }
        healthy = replace(healthy, **{part: replace(getattr(healthy, part), **own_fields)})
    return healthy
