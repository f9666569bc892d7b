"""Programs of ranks that train as elastic jobs, and fail where they are told to.

A fault is (rank, step, place, kind): the rank, by its number at the start, fails once when it comes
to that place of that step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P, ShardedTensor
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.elastic.membership import Membership
from shardmesh.mesh.monitor.store_keys import StoreKeys
from shardmesh.mesh.settings import settings
from shardmesh.sharding.checkpoint import save as checkpoint_save
from shardmesh.sharding.checkpoint.tree import leaves, name_of
from shardmesh.sharding.elastic import job as elastic_job
from shardmesh.sharding.elastic import snapshot as snapshots
from shardmesh.sharding.elastic.snapshot import snapshot

STEPS = 6
ROWS = 24  # of a batch
MICRO_BATCHES = 2  # of a step that accumulates
# in a step, in a checkpoint that is written after it, and in what follows a loss
PLACES = ["data", "forward", "backward", "vote", "write", "after"]
PLACES_OF_A_SAVE = ["save", "saved"]
PLACES_AFTER_A_LOSS = ["agree", "regroup", "build", "exchange", "confirm", "again"]

LOST = "state lost; ranks before and after: "  # printed

Fault = Sequence[Any]  # (rank, step, place, kind)


class Faults:
    """The faults of this rank that are still to come.

    Attributes:
        step: the step that the rank is in, also as a spare.
    """

    def __init__(self, rank: int, planned: Sequence[Fault]) -> None:
        self.step = 0
        self._begun: set[int] = set()
        self._coming = {(step, place): kind for who, step, place, kind in planned if who == rank}

    def begin(self, step: int) -> None:
        """Begin a step, "again" if it was begun before."""
        self.step = step
        if step in self._begun:
            self.reach("again")
        self._begun.add(step)
        self.reach("data")

    def vote(self, step: int) -> None:
        """Come to the vote of a step; of a spare it is the first that is heard of the step."""
        self.step = step
        self._begun.add(step)
        self.reach("vote")

    def reach(self, place: str) -> None:
        """Fail if there is a fault of this step here; not in the first build of a job."""
        if place == "build" and not self._begun:
            return
        kind = self._coming.pop((self.step, place), "")
        if kind:
            print(f"fault: {kind} in {place} of step {self.step}", flush=True)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "exit":
            os._exit(3)
        elif kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "await":
            await_a_process_that_joins()
        elif kind == "cut":  # this host from others
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        elif kind == "raise":
            raise ArithmeticError(f"a bad batch in step {self.step}")


faults = Faults(-1, [])
memberships: list[Membership] = []  # of this process


def await_a_process_that_joins() -> None:
    """Wait until a process has announced itself, and let the next vote look for it."""
    (membership,) = memberships
    while not membership._announced():
        time.sleep(0.01)
    membership._next_look = 0.0


class Momentum(torch.optim.Optimizer):
    """Writes one parameter after the other, so that a rank can fail between two of them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if number == min(2, len(group["params"]) - 1):
                    faults.reach("write")
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(p)
                state["velocity"].mul_(group["momentum"]).add_(p.grad)
                p.sub_(group["lr"] * state["velocity"])


class Backward(torch.autograd.Function):
    """The identity, whose backward is a place to fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        faults.reach("backward")
        return grads[0]


class Count(nn.Module):
    """A linear layer that counts its calls, in a buffer."""

    calls: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        faults.reach("forward")
        self.calls += 1
        return Backward.apply(self.linear(x).tanh())


class Staged(nn.Module):
    """Two units, for two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Count(5, 14)
        self.last = Count(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Model(nn.Module):
    """Uneven sizes, and running statistics that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 14)
        self.norm = nn.BatchNorm1d(14, affine=False)
        self.last = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        faults.reach("forward")
        return self.last(self.norm(self.first(x)).tanh())


# -- forms of parallelism --------------------------------------------------------------------------


def ddp(mesh: sm.DeviceMesh) -> nn.Module:
    return sm.parallel.data_parallel(Model(), mesh, src_data_rank=None)


def hsdp(mesh: sm.DeviceMesh) -> nn.Module:
    return sm.parallel.fully_shard(Model(), mesh, src_data_rank=None)


def tp(mesh: sm.DeviceMesh) -> nn.Module:
    plan = {"first": sm.parallel.colwise(axis="t"), "last": sm.parallel.rowwise(axis="t")}
    return sm.parallel.parallelize(Model(), mesh, plan, src_data_rank=None)


def pipelined(mesh: sm.DeviceMesh) -> sm.parallel.Pipeline:
    split = ["last"] if mesh.size("p") == 2 else []
    pipe = sm.parallel.pipeline(Staged(), mesh, axis="p", split=split, microbatches=2)
    return pipe.data_parallel(mesh["d"], src_data_rank=None)


FORMS: dict[str, tuple[Callable[[sm.DeviceMesh], Any], tuple[str, ...]]] = {
    "ddp": (ddp, ("d",)),
    "hsdp": (hsdp, ("r", "s")),
    "fsdp": (hsdp, ("s",)),
    "tp": (tp, ("d", "t")),
    "two": (hsdp, ("r", "s")),  # with two optimizers
    "accumulated": (hsdp, ("r", "s")),  # with microbatches
    "pp": (pipelined, ("p", "d")),
}


def shape_for(form: str, n: int) -> tuple[int, ...]:
    if len(FORMS[form][1]) == 1:
        return (n,)
    if form == "pp":  # two stages with replicas, or one
        return (2, n // 2) if n % 2 == 0 else (1, n)
    return (n // 2, 2) if n % 2 == 0 and n > 2 else (n, 1)


def mesh_over(form: str, ranks: Sequence[int]) -> sm.DeviceMesh:
    grid = torch.tensor(list(ranks)).reshape(shape_for(form, len(ranks)))
    return sm.DeviceMesh("cpu", grid, axis_names=FORMS[form][1])


def build(form: str, mesh: sm.DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(7)
    faults.reach("build")
    model = FORMS[form][0](mesh)
    parameters = list(model.parameters())
    if form == "two":
        first, second = parameters[:3], parameters[3:]
        return {"model": model, "optimizers": [Momentum(first), Momentum(second)]}
    return {"model": model, "optimizers": [Momentum(parameters)]}


def batch_of(index: int, mesh: sm.DeviceMesh) -> tuple[Any, ...]:
    faults.begin(index)
    generator = torch.Generator().manual_seed(index)
    x, y = (torch.randn(ROWS, width, generator=generator) for width in (5, 3))
    axes = tuple(axis for axis in mesh.axis_names if axis != "t")
    return tuple(sm.distribute_tensor(z, mesh, P(axes), src_data_rank=None) for z in (x, y))


def micro_batches_of(index: int, mesh: sm.DeviceMesh) -> list[tuple[Any, ...]]:
    """Return a batch in parts of as many rows."""
    faults.begin(index)
    generator = torch.Generator().manual_seed(index)
    batches: list[tuple[Any, ...]] = []
    for _ in range(MICRO_BATCHES):
        rows = (torch.randn(ROWS // MICRO_BATCHES, width, generator=generator) for width in (5, 3))
        axes = mesh.axis_names
        batch = tuple(sm.distribute_tensor(z, mesh, P(axes), src_data_rank=None) for z in rows)
        batches.append(batch)
    return batches


def train_step(state: dict[str, Any], batch: tuple[Any, ...], mesh: sm.DeviceMesh) -> float:
    x, y = batch
    loss = ((Backward.apply(state["model"](x)) - y) ** 2).mean()
    for optimizer in state["optimizers"]:
        optimizer.zero_grad()
    loss.backward()
    return write_step(state, loss.item())


def accumulated_step(
    state: dict[str, Any], batches: list[tuple[Any, ...]], mesh: sm.DeviceMesh
) -> float:
    """Take a step whose gradients are reduced after all microbatches."""
    for optimizer in state["optimizers"]:
        optimizer.zero_grad()
    value = 0.0
    with sm.accumulate_grads():
        for x, y in batches:
            loss = ((Backward.apply(state["model"](x)) - y) ** 2).mean() / len(batches)
            loss.backward()
            value += loss.item()
    return write_step(state, value)


def rows_of(index: int, mesh: sm.DeviceMesh) -> list[Tensor]:
    """Return this rank's rows of a batch, which differ along axis "d"."""
    faults.begin(index)
    generator = torch.Generator().manual_seed(index)
    batch = [torch.randn(ROWS, width, generator=generator) for width in (5, 3)]
    return [z.tensor_split(mesh.size("d"))[mesh.get_local_rank("d")] for z in batch]


def pipelined_step(state: dict[str, Any], batch: list[Tensor], mesh: sm.DeviceMesh) -> float:
    x, y = batch
    for optimizer in state["optimizers"]:
        optimizer.zero_grad()
    loss = state["model"].step(x, y, loss_fn=F.mse_loss)
    return write_step(state, loss.item())


def write_step(state: dict[str, Any], value: float) -> float:
    for optimizer in state["optimizers"]:
        optimizer.step()
    faults.reach("after")
    return value


def hashes(state: Any) -> dict[str, str]:
    """Return a hash of the whole of each tensor of a state; of a pipeline on rank 0 alone."""
    result: dict[str, str] = {}
    pipe = state["model"]
    if isinstance(pipe, sm.parallel.Pipeline):
        (optimizer,) = state["optimizers"]
        whole = sm.checkpoint.full_state_dict(sm.checkpoint.state_dict(pipe, optimizer))
        state = {} if current_world().rank else whole
    for path, leaf in leaves(snapshot(state)):
        if isinstance(leaf, Tensor):
            whole = leaf.full_tensor() if isinstance(leaf, ShardedTensor) else leaf
            data = bytes(whole.contiguous().reshape(-1).view(torch.uint8).numpy())
            result[name_of(path)] = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    return result


# -- programs --------------------------------------------------------------------------------------


def train(
    form: str,
    planned: Sequence[Fault],
    checkpoint: str = "",
    spares: int = 0,
    redundancy: int = 0,
) -> dict[str, Any]:
    """Train as an elastic job; return losses, events and hashes of the state.

    Args:
        checkpoint: the folder to save into after every other step.
        spares: how many ranks wait.
        redundancy: as of `run`.
    """
    global faults
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faults = Faults(rank, planned)
    _fail_inside()

    def make_mesh(n: int) -> sm.DeviceMesh:
        if n == size:
            return sm.init_device_mesh("cpu", shape_for(form, n), axis_names=FORMS[form][1])
        return mesh_over(form, range(n))

    step, data = steps_of(form)
    try:
        run = sm.elastic.run(
            lambda mesh: build(form, mesh),
            step,
            data,
            make_mesh=make_mesh,
            steps=STEPS,
            spares=spares,
            redundancy=redundancy,
            checkpoint=checkpoint or None,
            save_every=2 if checkpoint else None,
        )
    except sm.elastic.StateLostError:
        decision = memberships[-1].member.decision
        assert decision is not None
        print(f"{LOST}{json.dumps([decision.source.members, decision.members])}", flush=True)
        raise
    is_spare = run.mesh.coordinate is None
    return {
        "losses": [] if is_spare else run.losses,
        "events": [[e.step, list(e.lost), list(e.ranks), e.seconds] for e in run.events],
        "hashes": {} if is_spare else hashes(run.state),
    }


def steps_of(form: str) -> tuple[Callable[..., float], Callable[[int, sm.DeviceMesh], Any]]:
    """Return the step of a form, and its data."""
    if form == "accumulated":
        return accumulated_step, micro_batches_of
    if form == "pp":
        return pipelined_step, rows_of
    return train_step, batch_of


def _fail_inside() -> None:
    """Make the places inside of the agreement places to fail."""

    def reaching(owner: Any, name: str, place: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            faults.reach(place)
            return original(*args, **kwargs)

        setattr(owner, name, call)

    original = Membership.__init__

    def begin(self: Membership, *args: Any, **kwargs: Any) -> None:
        memberships.append(self)
        original(self, *args, **kwargs)
        self._next_look = float("inf")  # until `await_a_process_that_joins`

    original_vote = Membership.vote

    def vote(self: Membership, asks: bool = False) -> bool:
        faults.vote(self.member.step)
        return original_vote(self, asks)

    Membership.__init__ = begin  # type: ignore[method-assign]
    Membership.vote = vote  # type: ignore[method-assign]
    reaching(Membership, "confirm", "confirm")
    reaching(Membership, "agree", "agree")
    reaching(Membership, "regroup", "regroup")
    reaching(elastic_job, "recover", "exchange")
    reaching(checkpoint_save, "_write_piece", "save")
    reaching(checkpoint_save, "remove_share", "saved")


def replay(form: str, schedule: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Train without faults on the meshes of a schedule, [(step, the ranks from there on)].

    Return losses and hashes as `train`, on the ranks that are left at the end.
    """
    changes: dict[int, Any] = dict(map(tuple, schedule))
    sm.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    ranks = changes.pop(0)
    if dist.get_rank() not in ranks:
        return {}
    mesh = mesh_over(form, ranks)
    state = build(form, mesh)
    losses: list[float] = []
    for step in range(STEPS):
        if step in changes:
            ranks = changes[step]
            if dist.get_rank() not in ranks:
                return {}
            mesh = mesh_over(form, ranks)
            state = sm.elastic.recover(state, build(form, mesh), alive=ranks)
        losses.append(train_step(state, batch_of(step, mesh), mesh))
    return {"losses": losses, "hashes": hashes(state)}


def train_from(form: str, first: int, source: str, folder: str) -> dict[str, Any]:
    """Take the steps from `first` on without faults, and save the state after each.

    Args:
        source: the folder of the checkpoint of step `first`; not read if that is 0.
        folder: to save into.

    Return losses and hashes as `train`.
    """
    size = int(os.environ["WORLD_SIZE"])
    mesh = sm.init_device_mesh("cpu", shape_for(form, size), axis_names=FORMS[form][1])
    state = build(form, mesh)
    model, (optimizer, *_) = state["model"], state["optimizers"]
    if first and form == "pp":
        named = sm.checkpoint.state_dict(model, optimizer)
        loaded = sm.checkpoint.load(source, named, step=first)
        sm.checkpoint.load_state_dict(model, loaded, optimizer)
    elif first:
        state = sm.checkpoint.load(source, state, step=first)
    step, data = steps_of(form)
    losses: list[float] = []
    for index in range(first, STEPS):
        losses.append(step(state, data(index, mesh), mesh))
        saved = sm.checkpoint.state_dict(model, optimizer) if form == "pp" else state
        sm.checkpoint.save(saved, folder, step=index + 1)
    return {"losses": losses, "hashes": hashes(state)}


def misuses() -> dict[str, list[Any]]:
    """Return what a step costs, and the errors of steps that a job refuses and of what it lacks."""
    job = sm.elastic.ElasticJob(
        lambda mesh: build("ddp", mesh), make_mesh=lambda n: mesh_over("ddp", range(n))
    )
    job._members._next_look = float("inf")  # it looks for processes that join once a second
    job_of = partial(batch_of, 0, job.mesh)
    (optimizer,) = job.state["optimizers"]
    costs = [cost_of_a_step(job) for _ in range(3)]
    errors: list[str] = []

    def outside() -> None:
        optimizer.step()

    def without_a_vote() -> None:
        with job.attempt(), torch.no_grad():
            next(job.state["model"].parameters()).mul_(0.5)

    def communicating_afterwards() -> None:
        with job.attempt() as attempt:
            x, y = job_of()
            loss = ((job.state["model"](x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            attempt.loss = loss.item()

    def without_an_end() -> None:
        settings().exit_s = 0
        try:
            sm.elastic.ElasticJob(lambda _: {}, make_mesh=lambda n: mesh_over("ddp", range(n)))
        finally:
            settings().exit_s = 10

    misused = job.save, outside, without_an_end, without_a_vote, communicating_afterwards
    for misuse in misused:
        try:
            misuse()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"costs": costs, "errors": errors}


def cost_of_a_step(job: sm.elastic.ElasticJob) -> list[Any]:
    """Return what an attempt adds to a step.

    Collectives of this rank by name, elements of the tensors that are copied, and requests to
    stores.
    """
    batch = batch_of(job.step, job.mesh)
    counted: list[str] = []
    copied: list[int] = []
    asked: list[str] = []
    observers = current_world().observers

    def count(record: Any) -> None:
        counted.append(record.op)

    def counting(method: Callable[..., Any], name: str, *args: Any) -> Any:
        asked.append(name)
        return method(*args)

    def copying(value: Any) -> Any:
        copied.append(value.numel() if isinstance(value, Tensor) else 0)
        return original_copy(value)

    observers.append(count)
    train_step({**job.state, "optimizers": []}, batch, job.mesh)
    plain = list(counted)
    counted.clear()
    originals = {name: getattr(StoreKeys, name) for name in ("has", "set", "read", "replace")}
    original_copy = snapshots._copied
    for name, method in originals.items():
        setattr(StoreKeys, name, partialmethod(partial(counting, method, name)))
    snapshots._copied = copying
    try:
        with job.attempt() as attempt:
            attempt.loss = train_step(job.state, batch, job.mesh)
    finally:
        snapshots._copied = original_copy
        for name, method in originals.items():
            setattr(StoreKeys, name, method)
        observers.remove(count)
    for op in plain:
        counted.remove(op)
    return [counted, sum(copied), asked]
