"""A program written for `torch.distributed.tensor`, which runs with torch and with shardmesh.

Every part takes the API as an argument and returns plain values for comparison. A user's file would
have the import lines of `torch_api`, or `from shardmesh import ...` instead.
"""

from __future__ import annotations

import io
import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH, VOCAB, WIDTH, HIDDEN = 4, 3, 16, 8, 12


def torch_api() -> Any:
    """Return the names imported by a DTensor program."""
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.tensor as tensor
    from torch.distributed.tensor import debug, experimental

    names = {name: getattr(tensor, name) for name in tensor.__all__}
    names |= {
        name: getattr(experimental, name)
        for name in ("local_map", "register_sharding", "implicit_replication")
    }
    return SimpleNamespace(
        **names,
        DeviceMesh=device_mesh.DeviceMesh,
        init_device_mesh=device_mesh.init_device_mesh,
        CommDebugMode=debug.CommDebugMode,
    )


def grid(api: Any) -> Any:
    return api.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- meshes ----------------------------------------------------------------------------------------


def meshes(api: Any) -> Any:
    mesh = grid(api)
    tp, line = mesh["tp"], api.DeviceMesh("cpu", [3, 1, 2, 0])
    flat = mesh["dp", "tp"]._flatten("all")
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.get_group("tp"))
    return {
        "sizes": (
            mesh.size(),
            mesh.size(0),
            mesh.size(mesh_dim=1),
            tp.size(),
            flat.size(),
            mesh.ndim,
            tuple(mesh.shape),
        ),
        "names": (tuple(mesh.mesh_dim_names), tuple(tp.mesh_dim_names), tuple(flat.mesh_dim_names)),
        "ranks": (mesh.mesh, tp.mesh, flat.mesh, line.mesh),
        "place": (mesh.get_rank(), tuple(mesh.get_coordinate()), tuple(line.get_coordinate())),
        "local ranks": (
            mesh.get_local_rank("tp"),
            mesh.get_local_rank(mesh_dim=0),
            tp.get_local_rank(),
        ),
        "groups": (
            total,
            dist.get_process_group_ranks(mesh.get_group(mesh_dim="dp")),
            [g.size() for g in mesh.get_all_groups()],
            dist.get_process_group_ranks(tp.get_group()),
        ),
        "same": (mesh == grid(api), mesh["tp"] == tp, mesh == line, mesh.device_type),
    }


# -- tensors in and out ----------------------------------------------------------------------------


def placements(api: Any) -> Any:
    S, R, U = api.Shard, api.Replicate, api.Partial
    x = api.distribute_tensor(numbers(8, 4), grid(api), [S(0), S(-1)])
    return {
        "equal": (
            S(0) == S(0),
            S(0) == S(1),
            R() == R(),
            U() == U("sum"),
            U("max") == U(),
            len({S(0), S(0), R(), U()}),
        ),
        "questions": (
            S(1).is_shard(),
            S(1).is_shard(0),
            R().is_replicate(),
            U("avg").is_partial(),
            S(1).dim,
            U("avg").reduce_op,
        ),
        "kinds": (
            isinstance(S(0), api.Placement),
            isinstance(R(), api.Placement),
            isinstance(U(), api.Placement),
        ),
        "of a tensor": (
            x.placements == (S(0), S(1)),
            x.device_mesh == grid(api),
            x.shape,
            x.dtype,
            tuple(x.to_local().shape),
        ),
        "tensor": (
            isinstance(x, api.DTensor),
            isinstance(x, torch.Tensor),
            isinstance(nn.Parameter(x), api.DTensor),
        ),
    }


def boundary(api: Any) -> Any:
    S, R, U = api.Shard, api.Replicate, api.Partial
    mesh, rank = grid(api), dist.get_rank()
    source = numbers(8, 4, seed=rank)  # differs: only that of rank 0 counts
    distributed = api.distribute_tensor(source, mesh, [S(0), R()])
    own = api.distribute_tensor(numbers(8, 4), mesh, [R(), S(1)], src_data_rank=None)
    local = numbers(2, 3, seed=rank).requires_grad_()
    joined = api.DTensor.from_local(local, mesh, [S(0), S(1)], run_check=False)
    (joined * api.distribute_tensor(numbers(4, 6), mesh, [S(0), S(1)])).sum().backward()
    stated = api.DTensor.from_local(
        local.detach().clone(),
        mesh,
        (S(0), R()),
        shape=torch.Size((4, 3)),
        stride=(3, 1),
        run_check=True,
    )
    pending = {
        kind: api.DTensor.from_local(local.detach(), mesh, [U(kind)] * 2).full_tensor()
        for kind in ("sum", "avg", "max", "min")
    }
    with mesh:
        current = (
            api.distribute_tensor(numbers(4), placements=[S(0), R()]),
            api.zeros(4),
            api.DTensor.from_local(torch.ones(2)),
        )
    return {
        "distribute": (distributed.full_tensor(), own.full_tensor(), own.to_local()),
        "from_local": (
            joined.full_tensor(),
            joined.shape,
            local.grad,
            stated.full_tensor(),
            stated.to_local(),
        ),
        "pending": pending,
        "current mesh": [(x.full_tensor(), tuple(x.shape)) for x in current],
    }


def gradients_of_parts(api: Any) -> Any:
    """Run to_local and full_tensor, with and without grad_placements."""
    S, R, U = api.Shard, api.Replicate, api.Partial
    mesh, rank = grid(api), dist.get_rank()
    results = {}
    for name, where, grads in [
        ("split", [S(0), R()], None),
        ("differs", [R(), R()], [U(), U()]),
        ("mixed", [S(1), R()], [S(1), U()]),
    ]:
        x = api.distribute_tensor(numbers(4, 4), mesh, where).requires_grad_()
        local = x.to_local() if grads is None else x.to_local(grad_placements=grads)
        (local * (2 if grads is None else rank + 1)).sum().backward()
        results[name] = x.grad.full_tensor()
    x = api.distribute_tensor(numbers(4, 4), mesh, [S(0), S(1)]).requires_grad_()
    (x.full_tensor(grad_placements=[U(), R()]) * (mesh.get_local_rank("dp") + 1)).sum().backward()
    return results | {"whole": x.grad.full_tensor()}


def moves(api: Any) -> Any:
    S, R, U = api.Shard, api.Replicate, api.Partial
    mesh, results = grid(api), {}
    places = [(S(0), S(1)), (R(), S(0)), (S(1), R()), (S(0), S(0)), (R(), R())]
    for i, src in enumerate(places):
        for j, dst in enumerate(places):
            x = api.distribute_tensor(numbers(8, 8), mesh, src).requires_grad_()
            y = x.redistribute(mesh, dst) if j % 2 else x.redistribute(placements=dst)
            (y * y).sum().backward()
            results[i, j] = (
                y.placements == dst,
                y.to_local().detach(),
                x.grad.full_tensor(),
                x.grad.placements == src,
            )
    x = api.DTensor.from_local(numbers(4, 4, seed=dist.get_rank()).float(), mesh, [U(), U()])
    y = x.redistribute(
        placements=[S(0), R()], forward_dtype=torch.float64, backward_dtype=torch.float32
    )
    return results | {"dtypes": (y.dtype, y.full_tensor().dtype)}


def factories(api: Any) -> Any:
    mesh, where = grid(api), [api.Shard(0), api.Replicate()]
    tensors = {
        "zeros": api.zeros(4, 6, device_mesh=mesh, placements=where),
        "ones": api.ones(
            (4, 6),
            dtype=torch.int32,
            layout=torch.strided,
            requires_grad=False,
            device_mesh=mesh,
            placements=where,
        ),
        "full": api.full([4, 6], 3, device_mesh=mesh, placements=where),
        "full of floats": api.full((4,), 2.5, dtype=None, device_mesh=mesh, placements=where),
        "replicated": api.ones(4, 6, device_mesh=mesh),
    }
    empty = api.empty(
        4, 6, dtype=torch.float64, requires_grad=True, device_mesh=mesh, placements=where
    )
    return {
        "values": {
            name: (x.full_tensor(), x.dtype, tuple(x.to_local().shape))
            for name, x in tensors.items()
        },
        "empty": (
            empty.shape,
            empty.dtype,
            empty.requires_grad,
            empty.is_leaf,
            empty.placements == tuple(where),
        ),
    }


# -- training --------------------------------------------------------------------------------------


class TextModel(nn.Module):
    """Embedding, a two-layer MLP with a residual, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


def make_model() -> TextModel:
    torch.manual_seed(0)
    return TextModel().double()


def sharded_model(api: Any, mesh: Any) -> nn.Module:
    """Return a model with vocabulary, hidden units and classes sharded over tp, and the rest
    replicated.
    """
    splits = {
        "embed": {"weight": 0},
        "up": {"weight": 0, "bias": 0},
        "down": {"weight": 1},
        "head": {"weight": 0},
    }

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        for parameter, dim in splits.get(name, {}).items():
            value = api.distribute_tensor(
                getattr(module, parameter), mesh, [api.Replicate(), api.Shard(dim)]
            )
            module.register_parameter(parameter, nn.Parameter(value))

    def place_inputs(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        return tuple(
            api.distribute_tensor(x, mesh, [api.Shard(0), api.Replicate()]) for x in inputs
        )

    def place_outputs(module: nn.Module, outputs: Any, mesh: Any) -> Any:
        return outputs.redistribute(placements=[api.Shard(0), api.Replicate()])

    def place_activations(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.redistribute(placements=[api.Shard(0), api.Replicate()])

    model = api.distribute_module(make_model(), mesh, partition, place_inputs, place_outputs)
    # Which torch's cannot add to anything before.
    model.embed.register_forward_hook(place_activations)
    return model


def batches() -> Any:
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield (
            torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw),
            torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw),
        )


def train(api: Any) -> Any:
    """Return losses, full parameters, gradients and optimizer states after three steps, and those
    of a loaded checkpoint.
    """
    mesh = grid(api)
    model = sharded_model(api, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for tokens, targets in batches():
        targets = api.distribute_tensor(targets, mesh, [api.Shard(0), api.Replicate()])
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().item())
    state = {
        name: (x.full_tensor(), x.dtype, x.requires_grad)
        for name, x in model.state_dict(keep_vars=True).items()
    }
    moments = {
        name: optimizer.state[x]["exp_avg"].full_tensor() for name, x in model.named_parameters()
    }
    grads = {name: x.grad.full_tensor() for name, x in model.named_parameters()}
    return {
        "losses": losses,
        "state": state,
        "moments": moments,
        "grads": grads,
        "checkpoint": checkpoint(api, mesh, model),
    }


def checkpoint(api: Any, mesh: Any, model: nn.Module) -> Any:
    """Save full tensors and load them into a model with another layout; save and load this rank's
    parts.
    """
    file = io.BytesIO()
    torch.save({name: x.full_tensor() for name, x in model.state_dict().items()}, file)
    file.seek(0)
    other = api.distribute_module(make_model(), mesh)
    saved = torch.load(file)
    placed = {
        name: api.distribute_tensor(saved[name], x.device_mesh, x.placements)
        for name, x in other.state_dict().items()
    }
    other.load_state_dict(placed)
    tokens, _ = next(batches())
    inputs = api.distribute_tensor(tokens, mesh, [api.Replicate()] * 2)
    again = sharded_model(api, mesh)
    again.load_state_dict(model.state_dict())
    parts = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this rank's parts are what is meant
        torch.save(model.state_dict(), parts)
    parts.seek(0)
    read = torch.load(parts)
    return (
        other(inputs).full_tensor(),
        again(tokens).full_tensor(),
        {name: x.full_tensor() for name, x in read.items()},
    )


# -- extensions ------------------------------------------------------------------------------------


def local_functions(api: Any) -> Any:
    S, R, U = api.Shard, api.Replicate, api.Partial
    mesh = grid(api)

    def product(scale: float, pair: Any) -> Any:
        a, b = pair
        return scale * (a @ b), {"rows": a.shape[0]}

    mapped = api.local_map(
        product,
        out_placements=([S(0), U()], None),
        in_placements=(None, [S(0), S(1)], [R(), S(0)]),
        in_grad_placements=(None, [S(0), S(1)], [U(), S(0)]),
        device_mesh=mesh,
        redistribute_inputs=True,
    )
    a = api.distribute_tensor(numbers(4, 6), mesh, [S(0), R()]).requires_grad_()
    b = api.distribute_tensor(numbers(6, 2, seed=1), mesh, [R(), S(0)]).requires_grad_()
    out, shape = mapped(0.5, (a, b))
    (
        out.redistribute(placements=[S(0), R()])
        * api.distribute_tensor(numbers(4, 2, seed=2), mesh, [S(0), R()])
    ).sum().backward()

    @api.local_map(out_placements=[S(0), R()])
    def twice(x: Any) -> Any:
        return 2 * x

    plain = twice(numbers(3))
    return (
        out.full_tensor(),
        shape,
        a.grad.full_tensor(),
        b.grad.full_tensor(),
        twice(a).full_tensor(),
        plain,
    )


def extension(api: Any) -> Any:
    """Register and run an operator of the program, with its accepted shardings."""
    name = f"dtensor_program::cumsum_{type(api).__name__}_{os.getpid()}"

    @torch.library.custom_op(name, mutates_args=())
    def scaled(x: torch.Tensor, w: torch.Tensor, factor: float) -> torch.Tensor:
        return x.cumsum(1) * w * factor

    scaled.register_fake(lambda x, w, factor: torch.empty_like(x))
    space, op = name.split("::")
    overload = getattr(getattr(torch.ops, space), op).default

    @api.register_sharding(overload)
    def accepted(x: Any, w: Any, factor: float) -> Any:
        S, R = api.Shard, api.Replicate
        return [([R()], [R(), R(), None]), ([S(0)], [S(0), R(), None])]

    mesh = grid(api)
    x = api.distribute_tensor(numbers(4, 6), mesh, [api.Shard(0), api.Shard(1)])
    w = api.distribute_tensor(numbers(6, seed=1), mesh, [api.Replicate(), api.Replicate()])
    out = overload(x, w, 0.5)
    return out.full_tensor(), out.placements[0] == api.Shard(0)


def counting(api: Any) -> Any:
    mesh = grid(api)
    x = api.distribute_tensor(numbers(8, 8), mesh, [api.Shard(0), api.Replicate()])
    pending = api.DTensor.from_local(numbers(8, 8), mesh, [api.Replicate(), api.Partial()])
    mode, results = api.CommDebugMode(), {}
    ops = torch.ops.c10d_functional
    for name, run in {
        "gather": lambda: x.redistribute(placements=[api.Replicate()] * 2).to_local() + 0,
        "reduce": lambda: pending.redistribute(placements=[api.Replicate()] * 2).to_local() + 0,
        "scatter": lambda: (
            pending.redistribute(placements=[api.Replicate(), api.Shard(0)]).to_local() + 0
        ),
        "nothing": lambda: torch.relu(x),
    }.items():
        with mode:
            run()
        counts = mode.get_comm_counts()
        asked = (ops.all_gather_into_tensor, ops.all_reduce, ops.reduce_scatter_tensor)
        results[name] = mode.get_total_counts(), [counts[op] for op in asked]
    return results


def mixing(api: Any) -> Any:
    """Mix plain tensors with sharded ones; plain tensors are replicated."""
    x = api.distribute_tensor(numbers(4, 6), grid(api), [api.Shard(0), api.Replicate()])
    with api.implicit_replication():
        return (x * numbers(6, seed=1) + torch.ones(4, 6)).full_tensor()


PARTS = [
    meshes,
    placements,
    boundary,
    gradients_of_parts,
    moves,
    factories,
    train,
    local_functions,
    extension,
    counting,
    mixing,
]
