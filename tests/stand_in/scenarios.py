"""Training steps on the device "standin", each run twice, and what the host waits for in the second
run.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, fully_shard
from tests.stand_in import device
from tests.stand_in.host_syncs import host_syncs

Step = Callable[[], Any]
DEVICE = device.NAME
D, HIDDEN, BATCH, SEQUENCE, EXPERTS = 8, 16, 4, 8, 6


def mesh_of(*sizes: int, names: Sequence[str]) -> sm.DeviceMesh:
    return sm.init_device_mesh(DEVICE, sizes, axis_names=names)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def sharded(mesh: sm.DeviceMesh, spec: P, *shape: int, grad: bool = False) -> Any:
    return sm.distribute_tensor(randn(*shape), mesh, spec, src_data_rank=None).requires_grad_(grad)


def mlp() -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.LayerNorm(D), nn.Linear(D, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, D))
        for _ in range(3)
    ]
    return nn.Sequential(*blocks).to(DEVICE)


def training(model: nn.Module, x: Any, clip: bool = True, fused: bool | None = None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    average = sm.training.EMA(model, 0.9)

    def step() -> None:
        model(x).square().mean().backward()
        if clip:
            sm.training.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update()

    return step


# -- data parallelism ------------------------------------------------------------------------------


def fsdp(*sizes: int, **options: Any) -> Step:
    mesh = mesh_of(*sizes, names=("rep", "dp")[-len(sizes) :])
    return training(fully_shard(mlp(), mesh, units="*", **options), randn(BATCH, D))


def zero(**axes: Any) -> Step:
    mesh = mesh_of(4, names=("dp",))
    return training(data_parallel(mlp(), mesh, units="*", **axes), randn(BATCH, D))


def scaled() -> Step:
    mesh = mesh_of(4, names=("dp",))
    model, x = fully_shard(mlp(), mesh, units="*"), randn(BATCH, D)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = sm.training.GradScaler(DEVICE)

    def step() -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        sm.training.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def of_matrices() -> Step:
    mesh = mesh_of(4, names=("dp",))
    model, x = fully_shard(mlp(), mesh, units="*"), randn(BATCH, D)
    optimizer = sm.optim.Muon([p for p in model.parameters() if p.ndim == 2])

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulated() -> Step:
    mesh = mesh_of(4, names=("dp",))
    model, x = fully_shard(mlp(), mesh, units="*"), randn(BATCH, D)

    def step() -> None:
        with sm.accumulate_grads():
            for _ in range(2):
                model(x).square().mean().backward()

    return step


# -- tensor, sequence, context and expert parallelism ----------------------------------------------


def tensor_parallel(stream: P) -> Step:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    plan = {
        "*.0": sm.parallel.sequence_parallel(1, out=P()),
        "*.1": sm.parallel.colwise(),
        "*.3": sm.parallel.rowwise(out=stream),
    }
    model = sm.parallel.parallelize(mlp(), mesh, plan, src_data_rank=None)
    return training(model, sharded(mesh, P("dp"), BATCH, SEQUENCE, D))


def attention(spec: P, **options: Any) -> Step:
    mesh = mesh_of(4, names=("cp",))
    leaves = [sharded(mesh, spec, 2, 4, SEQUENCE, D, grad=True) for _ in range(3)]
    inputs = [
        sm.parallel.balance_sequence(x, 2, "cp") if options.get("balanced") else x for x in leaves
    ]
    return lambda: (
        sm.parallel.context_parallel_attention(*inputs, axis="cp", **options)
        .sum()
        .backward(inputs=inputs)
    )


def experts(capacity: float | None) -> Step:
    mesh = mesh_of(4, names=("ep",))
    x = sharded(mesh, P("ep"), BATCH, SEQUENCE, D)
    router = sharded(mesh, P(), D, EXPERTS, grad=True)
    up, down = (
        sharded(mesh, P("ep"), EXPERTS, *shape, grad=True) for shape in ((D, HIDDEN), (HIDDEN, D))
    )

    def expert(rows: Tensor, params: Any) -> Tensor:
        return F.silu(rows @ params[0]) @ params[1]

    def step() -> None:
        routing = sm.parallel.top_k_routing(x @ router, 2)
        out = sm.parallel.moe(x, routing, expert, [up, down], capacity=capacity)
        (out.square().sum() + sm.parallel.load_balance_loss(x @ router, routing.experts)).backward()

    return step


# -- operators, redistribution and graphs ----------------------------------------------------------


def operators() -> Step:
    mesh = mesh_of(2, 2, names=("a", "b"))
    w = sharded(mesh, P("b", "a"), 16, 8, grad=True)
    logits = sharded(mesh, P("a", "b"), 8, 16, grad=True)
    index = sm.distribute_tensor(
        torch.zeros(8, dtype=torch.int64, device=DEVICE), mesh, P("a"), src_data_rank=None
    )
    picked = sm.distribute_tensor(
        torch.zeros(2, dtype=torch.int64, device=DEVICE), mesh, P(), src_data_rank=None
    )

    def step() -> None:
        losses = [
            w[3:9],
            w.roll(1, 0),
            w.softmax(0),
            w.cumsum(0),
            w.sort(0).values,
            torch.cat([w, w]),
            w.view(4, 4, 8),
            w[picked],
        ]
        losses += [
            w.flip(0),
            w.topk(2, 0).values,
            w.var(0),
            w.max(),
            w.norm(),
            F.dropout(F.embedding(index, w), 0.1),
        ]
        (F.cross_entropy(logits, index) + sum(x.sum() for x in losses)).backward()

    return step


def redistributed(src: P, dst: P, rows: int = 8) -> Step:
    mesh = mesh_of(2, 2, names=("a", "b"))
    x = sharded(mesh, P(), rows, 8, grad=True)

    def step() -> None:
        y = (x * x).redistribute(src).redistribute(dst)
        y.sum().backward()

    return step


def started() -> Step:
    mesh = mesh_of(2, 2, names=("a", "b"))
    x = sharded(mesh, P("a"), 8, 8)

    def step() -> None:
        coming = x.redistribute(P(None, "b"), async_op=True)
        (x * 2).sum()
        coming.wait()

    return step


def mapped() -> Step:
    mesh = mesh_of(4, names=("a",))
    x, w = sharded(mesh, P("a"), 8, 8), sharded(mesh, P(), 8, 8, grad=True)

    @sm.shard_map(mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = sm.all_gather(x @ w, "a", axis=0, tiled=True)
        return sm.psum(y.square().sum() * (1 + sm.axis_index("a")), "a")

    return lambda: loss(x, w).backward()


def compiled() -> Step:
    mesh = mesh_of(4, names=("dp",))
    model, x = fully_shard(mlp(), mesh, units="*"), randn(BATCH, D)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True, capturable=False)

    @sm.jit(backend="eager")
    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        sm.training.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(x)
    step(x)  # the first that is not recorded comes after two
    return lambda: step(x)


SCENARIOS: dict[str, Callable[[], Step]] = {
    "ZeRO-1": partial(zero, optimizer="dp"),
    "ZeRO-2": partial(zero, gradient="dp", optimizer="dp"),
    "ZeRO-3": partial(zero, parameter="dp", gradient="dp", optimizer="dp"),
    "data parallel": zero,
    "FSDP": partial(fsdp, 4),
    "FSDP, bfloat16": partial(
        fsdp, 4, mp_policy=sm.parallel.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "FSDP, 8 bits": partial(fsdp, 4, transport="int8"),
    "hybrid": partial(fsdp, 2, 2),
    "FSDP, parameters on the host": partial(fsdp, 4, offload_policy=sm.parallel.CPUOffloadPolicy()),
    "accumulated gradients": accumulated,
    "GradScaler": scaled,
    "Muon": of_matrices,
    "operators": operators,
    "tensor parallel": partial(tensor_parallel, P()),
    "tensor and sequence parallel": partial(tensor_parallel, P(None, "tp")),
    "ring attention": partial(attention, P(None, None, "cp"), method="ring", is_causal=True),
    "balanced ring attention": partial(
        attention, P(None, None, "cp"), method="ring", is_causal=True, balanced=True
    ),
    "attention by all_to_all": partial(attention, P(None, None, "cp"), method="all_to_all"),
    "experts": partial(experts, None),
    "experts with a capacity": partial(experts, 1.0),
    "gather and slice": partial(redistributed, P("a"), P(None, "b")),
    "exchange": partial(redistributed, P("a", "b"), P("b", "a")),
    "sum": partial(redistributed, P(unreduced={"a"}), P("a")),
    "uneven": partial(redistributed, P("a", sizes={"a": (7, 1)}), P(None, ("a", "b"))),
    "asynchronous": started,
    "shard_map": mapped,
    "sm.jit": compiled,
}


def waits(make: Callable[[], Step]) -> dict[str, int] | str:
    """Return what the host waited for in the second call of a step, or an error."""

    def rank() -> dict[str, int]:
        torch.manual_seed(0)
        step = make()
        step()
        with host_syncs() as lines:
            step()
        return dict(Counter(lines))

    try:
        if getattr(make, "func", None) is experts:  # sizes of messages depend on values
            return sm.simulate(4)(rank)()[0]
        with sm.debug.null_world(4):
            return rank()
    except Exception:
        return traceback.format_exc()


def all_waits() -> dict[str, dict[str, int] | str]:
    return {name: waits(make) for name, make in SCENARIOS.items()}
