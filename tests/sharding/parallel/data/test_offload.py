"""Parameters on the host: the values of training on a stand-in for a GPU whose copies to pinned
memory arrive late.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh.parallel import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.sharding.parallel.data.training import GatedBlock, model
from tests.stand_in import device
from tests.stand_in.child import call
from tests.stand_in.host_syncs import HostSyncs

pytestmark = pytest.mark.xdist_group("stand-in")  # one worker of `pytest -n` has the device

STEPS = 3
WAYS = ["default", "accumulated", "hooks", "autograd.grad", "pageable", "bfloat16", "sm.jit"]


def steps(way: str, offload: bool) -> list[list[float]]:
    """Train on two ranks; return the parameters, and on rank 0 how often the host waited in the
    last step.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if way == "bfloat16" else None
    seen: list[bool] = []

    def rank() -> Any:
        mesh = sm.init_device_mesh(device.NAME, (2,), axis_names=("dp",))
        made = model(even=True).to(device.NAME)
        offloaded = CPUOffloadPolicy(way != "pageable") if offload else None
        fully_shard(made, mesh, units=GatedBlock, mp_policy=policy, offload_policy=offloaded)
        params: list[Any] = list(made.parameters())
        if way == "hooks":
            for p in params:
                p.register_hook(lambda grad: seen.append(bool(grad._local.isfinite().all())))
        optimizer = torch.optim.AdamW(params, lr=0.1)
        jitted = sm.jit(lambda x: made(x).square().mean().backward(), backend="eager")
        tokens = torch.arange(8).view(2, 4).to(device.NAME) + mesh.get_local_rank("dp")
        waits: list[str] = []
        for _ in range(STEPS):
            with HostSyncs() as mode:
                for _ in range(2 if way == "accumulated" else 1):
                    if way == "sm.jit":
                        jitted(tokens)
                        continue
                    loss = made(tokens).square().mean()
                    if way == "autograd.grad":
                        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                            p.grad = grad
                    else:
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=way != "hooks")
                waits = mode.syncs
        return [float(p.detach().full_tensor().cpu().double().sum()) for p in params], len(waits)

    values, waits = sm.simulate(2)(rank)()[0]
    assert all(seen)
    return [values, [waits]]


def both(way: str) -> list[list[list[float]]]:
    return [steps(way, offload) for offload in (False, True)]


def all_ways() -> dict[str, list[list[list[float]]]]:
    return {way: both(way) for way in WAYS}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[list[list[float]]]]:
    """Return `both(way)` of every way, from one process: starting takes longer than a way."""
    return call(all_ways)


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_without_offloading(
    way: str, outcomes: dict[str, list[list[list[float]]]]
) -> None:
    """With pinned memory the host waits once in a step, for the gradients, however many units there
    are.
    """
    (expected, _), (found, [waits]) = outcomes[way]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert not torch.tensor(found).isnan().any()
    if way == "default":
        assert waits == 1
