"""A small model, the forms of data parallelism, and training in one process and on a mesh, for
comparison.

Sizes are uneven for every mesh unless `even`; there is a norm, a bias, a scalar and a buffer among
the parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, fully_shard
from tests.device import DEVICE, on_device

AXES = ("dp", "fsdp", "more")
BATCH = 8


class GatedBlock(nn.Module):
    """x + g * b(tanh(a(norm(x))))"""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.a, self.b = nn.Linear(d, f), nn.Linear(f, d, bias=False)
        self.g = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.g * self.b(torch.tanh(self.a(self.norm(x))))


class TiedModel(nn.Module):
    """Blocks between an embedding and the same matrix as a head."""

    def __init__(self, d: int = 5, f: int = 7, vocabulary: int = 11, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(GatedBlock(d, f) for _ in range(blocks))
        self.norm = nn.LayerNorm(d)
        self.register_buffer("shift", torch.linspace(-1, 1, d))

    def forward(self, tokens: Tensor, skip: Sequence[int] = ()) -> Tensor:
        x = self.embedding(tokens) + self.shift
        for i, block in enumerate(self.blocks):
            x = x if i in skip else block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def model(even: bool = False, **sizes: int) -> TiedModel:
    """Return the model in float64, with the same values each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = TiedModel(**({"d": 8, "f": 16, "vocabulary": 16} if even else {}) | sizes).double()
        for x in net.parameters():  # norms and biases that are not 1 and 0
            x.data += 0.1 * torch.randn(x.shape, dtype=x.dtype, device="cpu").to(x.device)
    return net


def _numbers(seed: int) -> Tensor:
    return torch.randint(0, 11, (BATCH, 3), generator=torch.Generator().manual_seed(seed)).to(
        DEVICE
    )


TOKENS, TARGETS = _numbers(1), _numbers(2)


def loss_of(net: nn.Module, tokens: Any = TOKENS, targets: Any = TARGETS, **options: Any) -> Any:
    """Return the mean cross entropy."""
    return F.cross_entropy(net(tokens, **options).flatten(0, 1), targets.flatten())


# -- on a mesh -------------------------------------------------------------------------------------

Shard = Callable[..., nn.Module]


def _fully(**options: Any) -> Shard:
    return lambda m, mesh, **more: fully_shard(m, mesh, **{"units": GatedBlock} | options | more)


def _one_by_one(m: Any, mesh: sm.DeviceMesh, **options: Any) -> nn.Module:
    for block in m.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(m, mesh, **options)


def _placed(**wanted: Any) -> Shard:
    """Apply the general form; "all" stands for all axes of the mesh."""

    def shard(m: nn.Module, mesh: sm.DeviceMesh, **options: Any) -> nn.Module:
        axes = {what: mesh.axis_names if over == "all" else over for what, over in wanted.items()}
        return data_parallel(m, mesh, **{"units": GatedBlock} | axes | options)

    return shard


FORMS: dict[str, Shard] = {
    "ddp": _placed(),
    "zero1": _placed(optimizer="all"),
    "zero2": _placed(optimizer="all", gradient="all"),
    "fsdp": _fully(),
    "fsdp, blocks one by one": _one_by_one,
    "fsdp, kept": _fully(reshard_after_forward=False),
    "fsdp, let go": _fully(reshard_after_forward=True),
    "hybrid": _placed(parameter="dp", optimizer="all", gradient="all"),
}


def mesh_of(*shape: int) -> sm.DeviceMesh:
    return sm.init_device_mesh(DEVICE, shape, axis_names=AXES[: len(shape)])


def on_ranks(shape: Sequence[int], program: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `program(mesh, *args)` on every rank of a simulated mesh."""

    def rank() -> Any:
        with on_device():
            return program(mesh_of(*shape), *args)

    return sm.simulate(math.prod(shape))(rank)()


def own_rows(mesh: sm.DeviceMesh, x: Tensor) -> Tensor:
    """Return this rank's part of a batch."""
    return x.chunk(mesh.size())[mesh.get_rank()]


def batch(mesh: sm.DeviceMesh, sharded: bool) -> tuple[Any, Any]:
    """Return tokens and targets: this rank's part of them, or sharded tensors."""
    if not sharded:
        return own_rows(mesh, TOKENS), own_rows(mesh, TARGETS)
    return tuple(
        sm.distribute_tensor(x, mesh, P(mesh.axis_names), src_data_rank=None)
        for x in (TOKENS, TARGETS)
    )  # type: ignore[return-value]


def whole(x: Any) -> Any:
    return (
        x.detach().full_tensor()
        if isinstance(x, sm.ShardedTensor)
        else x
        if x is None
        else x.detach().clone()
    )


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: whole(x) for name, x in net.named_parameters()}


def gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(x.grad) for name, x in net.named_parameters()}


def reference_gradients(
    loss: Callable[[Any], Tensor] = loss_of, net: nn.Module | None = None
) -> dict[str, Tensor | None]:
    """Return the gradients in one process."""
    net = copy.deepcopy(net) if net is not None else model()
    loss(net).backward()
    return gradients(net)


def same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12) -> None:
    """Check that the tensors of two dictionaries are equal up to rounding, with None in the same
    places.
    """
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert (x is None) == (actual[name] is None), name
        if x is not None:
            torch.testing.assert_close(
                actual[name],
                x,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def check_gradients(
    net: nn.Module,
    mesh: sm.DeviceMesh,
    loss: Callable[..., Any] = loss_of,
    of: nn.Module | None = None,
) -> None:
    """Check that backward of this rank's part of the batch gives the gradients of one process."""
    loss(net, *batch(mesh, False)).backward()
    same(gradients(net), reference_gradients(loss, of))
