"""`eval_shape` equals a real run of the program: layouts, bytes moved, memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P, Replicate, Shard
from shardmesh.mesh.errors import MeshError
from shardmesh.parallel import Routing, moe
from shardmesh.sharding.abstract.eval_shape import eval_shape
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh

BIG = sm.AbstractMesh((128, 8), ("fsdp", "tp"))
SMALL = sm.AbstractMesh((4,), ("dp",))
F32 = 4  # bytes


def layout(mesh, spec, *shape, dtype=torch.float32):
    return sm.Layout.of(mesh, spec, shape, dtype)


# -- results ---------------------------------------------------------------------------------------


def test_layouts_of_results_are_on_the_given_mesh():
    x, w = layout(BIG, P("fsdp"), 4096, 64), layout(BIG, P("tp"), 128, 64)
    found = eval_shape(F.linear, x, w)
    assert found.result is layout(BIG, P("fsdp", "tp"), 4096, 128)
    assert found.mesh is BIG
    assert found.argument_bytes == (32 * 64 + 16 * 64) * F32
    assert found.result_bytes == 32 * 16 * F32
    assert found.peak_bytes == found.argument_bytes + found.result_bytes
    assert found.report.launches == 0


def test_any_tree_of_arguments_and_results():
    def f(batch, scale, *, table):
        (x,), plain = batch["x"], batch["plain"]
        return {"y": [x * scale, None], "plain": plain + 1, "table": table, "sizes": x._local.shape}

    x = layout(SMALL, P("dp"), 10, 3, dtype=torch.bfloat16)
    found = eval_shape(f, {"x": (x,), "plain": torch.ones(3, 2)}, 2, table="name", rank=3).result
    assert found["y"] == [x, None]
    assert (found["plain"].device.type, found["plain"].shape) == ("meta", (3, 2))
    assert (found["table"], found["sizes"]) == ("name", (1, 3))  # rows 0:3, 3:6, 6:9, 9:10


@pytest.mark.parametrize(("rank", "rows"), [(0, 2), (1, 2), (2, 1), (3, 0)])
def test_rank_argument_with_uneven_parts(rank, rows):
    found = eval_shape(
        lambda x: (x.softmax(0), x[4:], x.sum()), layout(SMALL, P("dp"), 5, 8), rank=rank
    )
    assert found.argument_bytes == rows * 8 * F32
    assert found.result == (
        layout(SMALL, P("dp"), 5, 8),
        layout(SMALL, P(), 1, 8),
        layout(SMALL, P(unreduced={"dp"})),
    )
    assert found.rank == rank


def test_scalars_empty_tensors_and_axes_of_size_one():
    mesh = sm.AbstractMesh((1, 4), ("one", "dp"))
    scalar, empty = layout(mesh, P()), layout(mesh, P(("one", "dp")), 0, 3)
    found = eval_shape(lambda a, b: (a * 2, b.sum(), (b + a).softmax(1)), scalar, empty)
    assert found.result == (scalar, layout(mesh, P(unreduced={"one", "dp"})), empty)
    assert found.argument_bytes == F32


def test_indices_without_values():
    def f(table, ids, x):
        rows = F.embedding(ids, table)
        loss = F.cross_entropy(x, ids[:, 0])
        return (
            rows,
            loss,
            x.gather(1, ids),
            x.argmax(1),
            x.topk(2).values,
            F.one_hot(ids, 10),
            x.index_select(0, ids[:, 0]),
        )

    table, ids = layout(SMALL, P("dp"), 10, 6), layout(SMALL, P("dp"), 8, 3, dtype=torch.int64)
    rows, loss, *_ = eval_shape(f, table, ids, layout(SMALL, P("dp"), 8, 10)).result
    assert rows.shape == (8, 3, 6)
    assert loss.shape == ()


def test_clipping_and_local_tensors_with_gradients():
    def f(x, w):
        w.requires_grad_()
        (x @ w).square().sum().backward()
        norm = nn.utils.clip_grad_norm_([w], 1.0)
        (w.to_local(grad_placements=[Replicate()]) * 2).sum().backward()
        return norm, w.grad

    norm, grad = eval_shape(f, layout(SMALL, P("dp"), 8, 4), layout(SMALL, P(), 4, 4)).result
    assert norm.shape == ()
    assert grad is layout(SMALL, P(), 4, 4)


def test_random_numbers_and_factories_on_the_current_mesh():
    def f():
        sm.random.manual_seed(3)
        return sm.randn(8, 4, placements=P("dp")), F.dropout(sm.ones(8, placements=[Shard(0)]), 0.5)

    before = sm.random.get_rng_state()
    assert eval_shape(f, mesh=SMALL).result == (
        layout(SMALL, P("dp"), 8, 4),
        layout(SMALL, P("dp"), 8),
    )
    assert torch.equal(sm.random.get_rng_state(), before)


def test_mesh_argument_and_its_slices():
    def f(mesh, part, x):
        assert mesh["tp"] is part
        return (
            x.redistribute([Replicate(), Replicate()]),
            sm.ones(16, device_mesh=mesh["tp"], placements=P("tp")),
            part,
        )

    x = layout(BIG, P("fsdp"), 256)
    whole, piece, part = eval_shape(f, BIG, BIG["tp"], x).result
    assert whole is layout(BIG, P(), 256)
    assert piece is layout(BIG["tp"], P("tp"), 16)
    assert part is BIG["tp"]


def test_sharded_tensors_of_a_real_mesh_are_not_modified():
    def fn():
        mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("dp",))
        x = sm.ones(6, 4, device_mesh=mesh, placements=P("dp")).requires_grad_()
        x.grad = sm.full((6, 4), 3.0, mesh, P("dp"))

        def f(x):
            with torch.no_grad():
                x.add_(x.grad)
            return x, x.grad, x.requires_grad, x.is_leaf, x.is_meta

        found = eval_shape(f, x)
        return found.result, found.argument_bytes, repr(found.mesh), x.sum().item(), x.is_meta

    for result, count, mesh, total, moved in sm.simulate(4)(fn)():
        assert [str(at) for at in result[:2]] == ["f32[6, 4] @ P('dp', None) on (dp=4)"] * 2
        assert result[2:] == (True, True, True)
        assert count == 2 * (2 * 4 * F32)  # rank 0's, as nobody said another: value and gradient
        assert mesh == "AbstractMesh(dp=4)"
        assert (total, moved) == (24, False)


def test_gradients_of_gradients():
    def f(x):
        y = (x.requires_grad_().sin() ** 2).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first, second

    x = layout(BIG, P("fsdp", "tp"), 256, 12, dtype=torch.bfloat16)
    assert eval_shape(f, x).result == (x, x)


def test_an_evaluation_inside_another():
    x = layout(SMALL, P("dp"), 8)
    found = eval_shape(
        lambda x: (eval_shape(lambda y: y.redistribute(P()), x).result.spec, x + 1), x
    )
    assert found.result == (P(None), x)


@pytest.mark.skipif(not hasattr(sm, "shard_map"), reason="there is no sm.shard_map")
def test_mapped_functions():
    def f(x, w):
        @sm.shard_map(in_specs=(P("fsdp", "tp"), P("tp")), out_specs=P("fsdp"))
        def product(a, b):
            return sm.psum(a @ b, "tp")

        y = product(x, w.requires_grad_())
        y.square().sum().backward()
        return y, w.grad

    x, w = layout(BIG, P("fsdp", "tp"), 4096, 64), layout(BIG, P("tp"), 64, 64)
    found = eval_shape(f, x, w)
    assert found.result == (layout(BIG, P("fsdp"), 4096, 64), w)
    # Forward, and its dual: an all_reduce each.
    assert found.report.by_axis["tp"] == (2, 2 * 14 * (32 * 64 * F32) // 8)


# -- modules and optimizers ------------------------------------------------------------------------


class TiedLinears(nn.Module):
    """Two names for one weight, a buffer, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(8))
        self.tensor = torch.ones(8)

    def forward(self, x):
        return self.second(self.first(x) * self.scale)


def test_a_module_is_copied_without_its_values():
    def fn():
        mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("dp",))
        model = sm.parallel.distribute_module(TiedLinears(), mesh, lambda name, m, mesh: None)
        model.mesh = mesh  # type: ignore[assignment]
        weight = model.first.weight

        def f(model, x):
            model(x).sum().backward()
            tied = model.first.weight is model.second.weight and isinstance(
                model.first.weight, nn.Parameter
            )
            assert model.mesh is model.first.weight.mesh
            return model.first.weight.grad, tied, model.tensor.is_meta, model.first.weight.is_meta

        found = eval_shape(f, model, sm.Layout.of(mesh, P("dp"), (8, 8)))
        return found, model.first.weight is weight, weight.grad, weight.is_meta

    for found, same, grad, moved in sm.simulate(4)(fn)():
        assert str(found.result[0]) == "f32[8, 8] @ P(None, None) on (dp=4)"
        assert found.result[1:] == (True, True, True)
        assert found.argument_bytes == (8 * 8 + 8 + 8 + 2 * 8) * F32  # the tied weight once
        assert (same, grad, moved) == (True, None, False)


def test_a_module_can_be_the_function():
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.ReLU())
    assert eval_shape(model, torch.ones(2, 4), mesh=SMALL).result.shape == (2, 4)


def build():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sm.parallel.distribute_module(model, None, lambda name, m, mesh: None, src_data_rank=None)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer


def train(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_modules_and_optimizers_pass_between_evaluations():
    parameters = (8 * 16 + 16 + 16 * 8 + 8) * F32
    model, optimizer = (built := eval_shape(build, mesh=SMALL)).result
    assert built.result_bytes == parameters
    x = layout(SMALL, P("dp"), 4, 8)
    first = eval_shape(train, model, optimizer, x)
    assert first.argument_bytes == parameters + 8 * F32
    # The optimizer holds the parameters and two moments of each.
    assert first.result_bytes == 3 * parameters
    second = eval_shape(
        train, *eval_shape(lambda m, o: (train(m, o, x_of(m)), m), model, optimizer).result[::-1], x
    )
    assert second.argument_bytes == 3 * parameters + 8 * F32
    assert second.report.by_op == first.report.by_op
    assert not optimizer.state  # what went in is as it was


def x_of(model):
    return sm.zeros(4, 8, device_mesh=model[0].weight.mesh, placements=P("dp"))


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: x.to_local().unique(),
        lambda x: float(x.to_local().sum()),
        lambda x: x.to_local().numpy(),
    ],
)
def test_reading_values_raises_and_names_the_line(f):
    line = (
        f"{__file__}:{f.__code__.co_firstlineno}: eval_shape runs without values, but this line "
        "reads some"
    )
    with pytest.raises(RuntimeError) as error:
        eval_shape(f, layout(SMALL, P("dp"), 8))
    assert str(error.value).startswith(line)
    assert "pass the number as an argument" in str(error.value)


def test_errors_of_the_function_propagate_and_restore_state():
    class OwnError(RuntimeError):
        pass

    def f(x):
        raise OwnError("mine")

    with pytest.raises(OwnError, match=r"^mine$"):
        eval_shape(f, layout(SMALL, P("dp"), 8))
    with pytest.raises(TypeError, match="device_mesh=mesh"):
        sm.zeros(4)  # no mesh is meant any more
    assert eval_shape(lambda x: x, layout(SMALL, P("dp"), 8)).peak_bytes == 8


def test_invalid_arguments_raise():
    with pytest.raises(TypeError, match="no argument is on a mesh; give mesh="):
        eval_shape(lambda x: x, torch.ones(3))
    with pytest.raises(TypeError, match=r"mesh=\(2, 2\)"):
        eval_shape(lambda x: x, layout(SMALL, P("dp"), 8), mesh=(2, 2))
    with pytest.raises(ValueError, match="whose axes are not among these; give mesh="):
        eval_shape(lambda x, y: x, layout(SMALL, P("dp"), 8), layout(BIG, P("tp"), 8))
    with pytest.raises(MeshError, match="rank=4"):
        eval_shape(lambda x: x, layout(SMALL, P("dp"), 8), rank=4)


def test_current_mesh_is_the_default():
    def fn():
        with sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",)):
            return str(eval_shape(lambda: sm.ones(4, placements=P("dp"))).result)

    assert sm.simulate(2)(fn)() == ["f32[4] @ P('dp') on (dp=2)"] * 2


def test_plans_use_the_topology_of_the_given_mesh():
    def moved(mesh):
        whole = eval_shape(
            lambda x: x.redistribute(P(("node", "gpu"))), layout(mesh, P(("gpu", "node")), 1 << 16)
        )
        return whole.report.launches

    flat, nodes = sm.AbstractMesh((4, 8), ("node", "gpu")), sm.AbstractMesh((4, 8), ("node", "gpu"))
    nodes.topology = sm.topology.Topology.default("cuda", crossing=("node",))
    for mesh in (flat, nodes):
        x = layout(mesh, P(("gpu", "node")), 1 << 16)
        assert moved(mesh) == sm.debug.explain(x, P(("node", "gpu"))).launches


def test_surrounding_budgets_and_policies_apply_inside():
    x = layout(SMALL, P("dp"), 8, 8)
    with sm.debug.comm_budget(bytes=0), pytest.raises(sm.errors.CommBudgetError):
        eval_shape(lambda x: x.redistribute(P()), x)
    with sm.ops.implicit_comm("forbid"), pytest.raises(sm.errors.ImplicitCommError):
        eval_shape(lambda x: x.softmax(0), x)


def test_printed():
    found = eval_shape(
        lambda x: x.redistribute(P()).exp(), layout(BIG, P("fsdp"), 4096, 64), rank=9
    )
    assert str(found).splitlines() == [
        "rank 9 of (fsdp=128, tp=8)",
        "arguments               8,192 bytes",
        "result              1,048,576 bytes",
        "peak                2,105,344 bytes",
        "received over fsdp  1,040,384 bytes  in 1 launches",
        "received in total   1,040,384 bytes  in 1 launches",
    ]
    assert copy.copy(found).rank == 9


def test_a_sharded_model_on_its_rank():
    """What the units of a model hold (layouts, buffers, meshes) is on "meta", too, and the model
    stays as it is.
    """

    def main(mesh):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
        sm.parallel.fully_shard(model, mesh, units=torch.nn.Linear, src_data_rank=None)
        x = torch.ones(2, 4)
        found = sm.debug.eval_shape(model, x, mesh=mesh, rank=mesh.world.rank)
        with sm.debug.comm_report() as report:
            y = model(x)
        assert found.result.shape == y.shape
        assert (found.report.launches, found.report.bytes_received) == (
            report.launches,
            report.bytes_received,
        )
        assert report.launches == 2
        assert not any(p.is_meta or p._local.is_meta for p in model.parameters())  # type: ignore[union-attr]

    on_mesh((3,), main)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_experts_are_spread_evenly(ranks):
    """Bytes are those of ranks whose tokens take experts in turn."""
    tokens, experts, width, choices = 6 * ranks, 2 * ranks, 6, 2

    def layer(x, chosen, weights, up, capacity=None):
        def expert(rows, one):
            return rows @ one["up"]

        return moe(x, Routing(chosen, weights), expert, {"up": up}, axis="ep", capacity=capacity)

    arguments = [
        torch.randn(tokens, width),
        torch.arange(tokens * choices).reshape(tokens, choices) % experts,
        torch.rand(tokens, choices),
        torch.randn(experts, width, width),
    ]

    def program():
        mesh = sm.init_device_mesh(DEVICE, (ranks,), axis_names=("ep",))
        placed = [sm.device_put(x, mesh, P("ep")) for x in arguments]
        with sm.debug.comm_report() as report:
            out = layer(*placed)
        return report.by_op, out.spec

    mesh = sm.AbstractMesh((ranks,), ("ep",))
    layouts = [layout(mesh, P("ep"), *x.shape, dtype=x.dtype) for x in arguments]
    for rank, (by_op, spec) in enumerate(sm.simulate(ranks)(program)()):
        evaluated = eval_shape(layer, *layouts, rank=rank)
        assert evaluated.report.by_op == by_op
        assert evaluated.result.spec == spec
    with pytest.raises(RuntimeError, match="eval_shape runs without values"):
        eval_shape(layer, *layouts, capacity=1.0)
