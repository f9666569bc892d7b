"""What the host waits for in a training step, on a stand-in for a GPU: nothing, but for what is
listed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.stand_in import device
from tests.stand_in.child import call
from tests.stand_in.host_syncs import host_syncs
from tests.stand_in.scenarios import SCENARIOS, all_waits

pytestmark = pytest.mark.xdist_group("stand-in")  # one worker of `pytest -n` has the device

# What, how often and why: see docs/communication.md.
EVENT = "Event.synchronize at kernels/transfer/host_copies.py"
KNOWN = {
    "FSDP, parameters on the host": {
        EVENT: 1,
        "blocking copy to the host at sharding/training/clipping.py": 1,
    },
    "experts": {EVENT: 1},
    "experts with a capacity": {EVENT: 1},
    "GradScaler": {"_local_scalar_dense at sharding/training/scaler.py": 1},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return call(everything)


def everything() -> dict[str, Any]:
    return {"steps": all_waits(), "recognised": recognised(), "late": late(), "races": races()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_step(name: str, found: dict[str, Any]) -> None:
    waits = found["steps"][name]
    assert isinstance(waits, dict), waits
    by_file: Counter[str] = Counter()
    for wait, times in waits.items():
        by_file[wait.rpartition(":")[0]] += times
    assert by_file == KNOWN.get(name, {}), waits


def recognised() -> dict[str, list[str]]:
    """Return what the mode finds in torch's own functions."""
    x = torch.arange(4, device=device.NAME)
    pinned = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    event = torch.get_device_module(device.NAME).Event()
    calls: dict[str, Callable[[], Any]] = {
        "item": lambda: x[0].item(),
        "bool": lambda: bool(x[0] > 0),
        "tolist": lambda: x.tolist(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 1],
        "bincount": lambda: x.bincount(),
        "repeat_interleave": lambda: x.repeat_interleave(x),
        "cpu": lambda: x.cpu(),
        "pageable": lambda: torch.empty(4, dtype=torch.int64).copy_(x, non_blocking=True),
        "cast": lambda: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
        "to device": lambda: torch.zeros(4).to(x.device),
        "made there": lambda: torch.tensor([1, 2], device=x.device),
        "event": lambda: event.synchronize(),
        "in backward": lambda: _backward(x.double().requires_grad_()),
        "no wait: pinned": lambda: pinned.copy_(x, non_blocking=True),
        "no wait: from pinned": lambda: pinned.to(x.device, non_blocking=True),
        "no wait: index": lambda: (
            x[x] + x.repeat_interleave(x, output_size=6).sum() + torch.where(x > 1, x, 0)
        ),
    }
    found = {}
    for name, run in calls.items():
        with host_syncs() as waits:
            run()
        found[name] = waits
    return found


def _backward(x: torch.Tensor) -> None:
    x.register_hook(lambda grad: grad.sum().item() and None)
    x.sum().backward()


def test_the_mode_finds_what_waits(found: dict[str, Any]) -> None:
    for name, waits in found["recognised"].items():
        assert bool(waits) != name.startswith("no wait"), (name, waits)


def late() -> list[list[float]]:
    """Return pinned memory before and after the host has waited for an event that follows
    the copy.
    """
    module = torch.get_device_module(device.NAME)
    x = torch.ones(2, device=device.NAME)
    out = torch.zeros(2, pin_memory=True)
    early, after = module.Event(), module.Event()
    with host_syncs():
        early.record()
        out.copy_(x, non_blocking=True)
        x.zero_()
        after.record()
        early.synchronize()
        first = out.isnan().tolist()
        after.synchronize()
        return [first, out.tolist()]


def test_copies_to_pinned_memory_arrive_late(found: dict[str, Any]) -> None:
    assert found["late"] == [[True, True], [1.0, 1.0]]


def races() -> list[int]:
    """Return how often a stream reads what another wrote, without and with waiting for it."""
    module, found = torch.get_device_module(device.NAME), []
    for waits in (False, True):
        side = module.Stream()
        with host_syncs() as seen:
            x = torch.ones(2, device=device.NAME) * 2
            if waits:
                side.wait_stream(module.current_stream())
            with module.stream(side):
                x.add(1)
        found.append(len(seen))
    return found


def test_streams_that_do_not_wait_are_found(found: dict[str, Any]) -> None:
    without, with_ = found["races"]
    assert without > 0
    assert with_ == 0
