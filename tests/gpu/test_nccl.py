"""NCCL with one rank, the maximum on one GPU: all `Group` calls for every dtype, and a training
loop.

A `Group` of one rank skips communication, so the tests call its private methods; with one rank
every collective is a copy. `pytest --device cuda` tests several ranks on one GPU, with gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import shardmesh as sm
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.comm.dtype_encoding import NATIVE
from shardmesh.mesh.launch.session import abandon_groups
from tests.mesh.comm.collectives import DTYPES, as_bytes, rank_values
from tests.sharding.test_real_ranks import _train

pytestmark = pytest.mark.gpu

N = 7

# call(group, x, async_op) -> (work, result)
CALLS: dict[str, Callable[[Any, Tensor, bool], tuple[Any, Tensor]]] = {
    "all_gather": lambda group, x, later: (
        group._all_gather(out := torch.zeros_like(x), x, later),
        out,
    ),
    "all_to_all": lambda group, x, later: (
        group._all_to_all(out := torch.zeros_like(x), x, None, None, later),
        out,
    ),
    "all_to_all with splits": lambda group, x, later: (
        group._all_to_all(out := torch.zeros_like(x), x, [N], [N], later),
        out,
    ),
    "broadcast": lambda group, x, later: (group._broadcast(x, 0, later), x),
}
REDUCTIONS: dict[str, Callable[[Any, Tensor, str, bool], tuple[Any, Tensor]]] = {
    "all_reduce": lambda group, x, op, later: (
        (group._all_reduce if x.dtype in NATIVE else group._all_reduce_encoded)(x, op, later),
        x,
    ),
    "reduce_scatter": lambda group, x, op, later: (
        (group._reduce_scatter if x.dtype in NATIVE else group._reduce_scatter_encoded)(
            out := torch.zeros_like(x), x, op, later
        ),
        out,
    ),
}


def _copies(call: Callable[..., tuple[Any, Tensor]], dtype: torch.dtype, *args: Any) -> bool:
    """Return whether the result of the call equals its input bitwise."""
    x = rank_values(1, (N,), dtype)
    work, out = call(current_world().group([0]), x.clone(), *args)
    if work is not None:
        work.wait()
    return torch.equal(as_bytes(out), as_bytes(x))


def _wrong_calls(device_type: str) -> list[str]:
    """Return the collectives whose results differ from their input, in the default group of this
    device type.
    """
    sm.init_device_mesh(device_type, (1,))
    wrong = []
    with torch.device(device_type):
        for dtype in DTYPES:
            kinds = ("sum", "product") if dtype.is_complex else ("sum", "product", "max", "min")
            for later in (False, True):
                wrong += [
                    f"{name} {dtype}"
                    for name, call in CALLS.items()
                    if not _copies(call, dtype, later)
                ]
                wrong += [
                    f"{name} {kind} {dtype}"
                    for name, call in REDUCTIONS.items()
                    for kind in kinds
                    if not _copies(call, dtype, kind, later)
                ]
    return wrong


def test_every_collective_on_every_dtype():
    assert sm.launch(_wrong_calls, 1, ("cuda",)) == [[]]


def _without_tensors(device_type: str) -> tuple[str, list[Any]]:
    """Call what moves no tensor of the user: a barrier, the rendezvous and objects. Return the
    backends and the objects.
    """
    sm.init_device_mesh(device_type, (1,))
    group: Any = current_world().group([0])
    group._barrier()
    group._connect(group.handle, torch.zeros(1, device=device_type))
    return dist.get_backend_config(), group._all_gather_bytes(b"bytes")


def test_rendezvous():
    assert sm.launch(_without_tensors, 1, ("cuda",)) == [("cpu:gloo,cuda:nccl", [b"bytes"])]


def _losses(device_type: str) -> list[float]:
    with torch.device(device_type):
        return _train(sm.init_device_mesh(device_type, (1,), axis_names=("a",)), sm.P("a"))


def test_training_with_all_features():
    (expected,) = sm.simulate(1)(_losses)("cuda")
    (losses,) = sm.launch(_losses, 1, ("cuda",))
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)


def _start_again(device_type: str) -> list[float]:
    """Abort the groups, as an elastic job does after a loss, with a collective behind a kernel that
    runs; start others under another prefix of the store. Return a sum over each of them.
    """
    sm.init_device_mesh(device_type, (1,))
    store, backends = distributed_c10d._get_default_store(), dist.get_backend_config()
    sums: list[float] = []
    for epoch in range(3):
        x = torch.ones(N, device=device_type)
        work, out = REDUCTIONS["all_reduce"](current_world().group([0]), x, "sum", True)
        work.wait()
        sums.append(out.sum().item())
        if device_type == "cuda":
            torch.cuda._sleep(1_000_000_000)
        REDUCTIONS["all_reduce"](current_world().group([0]), x, "sum", True)
        abandon_groups()
        own_store = dist.PrefixStore(f"epoch{epoch}", store)
        dist.init_process_group(backends, store=own_store, rank=0, world_size=1)
    return sums


def test_groups_are_aborted_and_started_again():
    assert sm.launch(_start_again, 1, ("cuda",)) == [[float(N)] * 3]
