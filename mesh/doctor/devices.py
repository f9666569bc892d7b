"""Find torch's accelerators, in a separate process, since a broken driver may never answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PROBE_S = 60.0  # importing torch and waking eight devices takes up to half of it on a cold machine
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")

# Prints JSON. Each pair of devices: whether the first can read the second's memory.
_PROBE = """
import json, torch
report = {"devices": [], "no_peers": [], "nccl": ""}
if torch.cuda.is_available():
    count = torch.cuda.device_count()
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        identity = str(getattr(torch.cuda.get_device_properties(i), "uuid", ""))
        report["devices"].append([torch.cuda.get_device_name(i), total, free, identity])
    can = torch.cuda.can_device_access_peer
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    report["no_peers"] = [pair for pair in pairs if not can(*pair)]
    report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
else:
    torch.cuda.init()
print(json.dumps(report))
"""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: its name, total and free bytes, and its UUID ("" if unknown)."""

    name: str
    memory: int
    free: int
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Devices:
    """Facts about accelerators.

    Attributes:
        build: what torch was built for: "CUDA 12.8", "ROCm 6.4", or "" for the CPU alone.
        driver: whether a driver is loaded.
        usable: the devices that torch may use.
        no_peers: pairs of indices of which the first cannot read the second's memory.
        nccl: version of NCCL, or "".
        error: why torch could not be asked, or "".
    """

    build: str = ""
    driver: bool = False
    usable: tuple[Device, ...] = ()
    no_peers: tuple[tuple[int, int], ...] = ()
    nccl: str = ""
    error: str = ""


def devices() -> Devices:
    """Return the accelerators that torch finds: in some seconds, at most `PROBE_S`."""
    build = ""
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    driver = any(os.path.exists(path) for path in _DRIVERS)
    return parse_probe(build, driver, _run) if build and driver else Devices(build, driver)


def parse_probe(
    build: str, driver: bool, run: Callable[[], subprocess.CompletedProcess[str]]
) -> Devices:
    """Return the facts that `run` prints, as `_PROBE` does."""
    try:
        done = run()
        output: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Devices(build, driver, error=f"the driver did not answer within {PROBE_S:.0f} s")
    except (IndexError, ValueError):
        return Devices(
            build,
            driver,
            error=(done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1],
        )
    pairs = tuple((a, b) for a, b in output["no_peers"])
    return Devices(
        build, driver, tuple(Device(*one) for one in output["devices"]), pairs, output["nccl"]
    )


def _run() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S
    )
