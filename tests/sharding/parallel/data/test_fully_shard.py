"""Every form of data parallelism has the losses and gradients of one process."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, fully_shard
from shardmesh.sharding.parallel.data.precision import CPUOffloadPolicy
from shardmesh.sharding.parallel.data.unit import units_in
from tests.sharding.parallel.data.training import (
    BATCH,
    FORMS,
    GatedBlock,
    batch,
    check_gradients,
    gradients,
    loss_of,
    mesh_of,
    model,
    on_ranks,
    own_rows,
    reference_gradients,
    same,
    values,
    whole,
)

STEPS = 20


def _train(made, mesh, sharded):
    optimizer, losses = torch.optim.AdamW(made.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        loss = loss_of(made, *batch(mesh, sharded)) if mesh else loss_of(made)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(
            loss.detach() if not isinstance(loss, sm.ShardedTensor) else loss.full_tensor().detach()
        )
    return torch.stack(losses), values(made)


@cache
def _reference(even):
    return _train(model(even), None, False)


CASES = [
    ("ddp", (4,), False, True),
    ("zero1", (4,), False, False),
    ("zero1", (2, 2), True, True),
    ("zero2", (2, 1, 2), False, True),
    ("fsdp", (4,), True, False),
    ("fsdp", (4,), False, True),
    ("fsdp, blocks one by one", (2, 2), False, True),
    ("fsdp, let go", (4,), False, False),
    ("hybrid", (2, 1, 2), False, True),
]


@pytest.mark.one_in(8, each=["form"])
@pytest.mark.parametrize(("form", "shape", "even", "sharded"), CASES)
def test_twenty_steps_equal_one_process(form, shape, even, sharded):
    losses, parameters = _reference(even)

    def program(mesh):
        return _train(FORMS[form](model(even), mesh), mesh, sharded)

    found = on_ranks(shape, program)
    torch.testing.assert_close(
        torch.stack([x for x, _ in found]).mean(0), losses, rtol=1e-12, atol=0
    )
    for _, mine_ in found:
        same(mine_, parameters)


def _train_on_processes(rank_shape, form, sharded):
    mesh = mesh_of(*rank_shape)
    losses, _ = _train(FORMS[form](model(), mesh), mesh, sharded)
    return losses


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("form", "shape", "sharded"), [("fsdp", (4,), False), ("hybrid", (2, 2), True)]
)
def test_twenty_steps_on_processes(world4, form, shape, sharded):
    found = world4(_train_on_processes, shape, form, sharded)
    torch.testing.assert_close(torch.stack(found).mean(0), _reference(False)[0], rtol=1e-12, atol=0)


# -- parameters, gradients, state ------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_parameters_gradients_and_state_are_sharded_tensors(form):
    def program(mesh):
        made = FORMS[form](model(), mesh)
        optimizer = torch.optim.AdamW(made.parameters())
        check_gradients(made, mesh)
        optimizer.step()
        for x in made.parameters():
            assert sm.typeof(x.grad) is sm.typeof(x)
            assert sm.typeof(optimizer.state[x]["exp_avg"]) is sm.typeof(x)
        assert made.state_dict().keys() == model().state_dict().keys()
        held = sum(x._local.numel() for x in made.parameters())
        return held, sum(x.numel() for x in made.parameters())

    found = on_ranks((4,), program)
    total = found[0][1]
    split = form != "ddp"
    # Two scalars, on each rank.
    assert sum(held for held, _ in found) == (total + 3 * 2 if split else 4 * total)


def test_more_ranks_than_rows():
    """Ranks without a part of a unit still take part in its collectives."""

    def program(mesh):
        made = fully_shard(nn.Linear(3, 2, dtype=torch.float64), mesh)
        made(torch.ones(1, 3, dtype=torch.float64) * mesh.get_rank()).sum().backward()
        torch.testing.assert_close(
            whole(made.weight.grad), torch.full((2, 3), 2.5, dtype=torch.float64)
        )

    on_ranks((6,), program)


def test_the_default_axis_is_the_last_of_two():
    def program(mesh):
        return fully_shard(model(), mesh).blocks[0].a.weight.spec.axes

    assert on_ranks((2, 2), program)[0] == ("fsdp",)
    with pytest.raises(ValueError, match=r"give axes=\.\.\."):
        on_ranks((2, 1, 2), program)


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_reshard_after_forward_to_a_number(wanted):
    def program(mesh):
        check_gradients(
            fully_shard(
                model(), mesh, axes=("dp", "fsdp"), units=GatedBlock, reshard_after_forward=wanted
            ),
            mesh,
        )

    on_ranks((2, 2), program)


# -- use -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp", "fsdp, kept"])
@pytest.mark.parametrize("no_graph", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(form, no_graph):
    def program(mesh):
        made = FORMS[form](model(), mesh)
        for _ in range(2):
            with no_graph():
                loss_of(made, *batch(mesh, False))
            made.zero_grad()
            check_gradients(made, mesh)

    on_ranks((4,), program)


def _write_in_place(made):
    for x in made.parameters():
        x.mul_(1.5)


def _write_data(made):
    for x in made.parameters():
        x.data.mul_(1.5)


def _assign_data(made):
    for x in made.parameters():
        x.data = x * 1.5


def _load(made):
    made.load_state_dict(
        {name: x * 1.5 if name != "shift" else x for name, x in made.state_dict().items()}
    )


def _load_assign(made):
    made.load_state_dict(
        {name: x * 1.5 if name != "shift" else x for name, x in made.state_dict().items()},
        assign=True,
    )


def _step(fused, foreach):
    def step(made):
        for x in made.parameters():
            x.grad = torch.ones_like(x)
        torch.optim.SGD(
            made.parameters(), lr=0.5, momentum=0.9, fused=fused, foreach=foreach
        ).step()
        made.zero_grad()

    return step


WRITES = [
    _write_in_place,
    _write_data,
    _assign_data,
    _load,
    _load_assign,
    _step(True, False),
    _step(False, True),
    _step(False, False),
]


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp, kept", "hybrid"])
def test_values_written_between_forwards_are_used(form):
    """Gathered parameters are not reused after a write by an optimizer, through `.data`, or by
    loading.
    """

    def program(mesh):
        made, reference = FORMS[form](model(), mesh), model()
        loss_of(made, *batch(mesh, False)).backward()
        made.zero_grad()
        for write in WRITES:
            loss_of(made, *batch(mesh, False))  # what it gathers is not to be used again
            with torch.no_grad():
                write(made)
                write(reference)
            check_gradients(made, mesh, of=reference)
            made.zero_grad()

    on_ranks((2, 2), program)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_under_a_dispatch_mode_are_noticed(optimizer):
    """torch does not count the writes of the CPU's foreach operators in one."""

    def program(mesh):
        made, reference = FORMS["zero1"](model(), mesh), model()
        loss_of(made, *batch(mesh, False)).backward()
        loss_of(reference).backward()
        with FlopCounterMode(display=False):
            for module in (made, reference):
                optimizer(module.parameters(), lr=0.5, foreach=True).step()
                module.zero_grad()
        check_gradients(made, mesh, of=reference)

    on_ranks((2,), program)


@pytest.mark.parametrize("write", WRITES)
def test_ranks_without_a_part_notice_writes(write):
    def program(mesh):
        made, reference = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
        reference.load_state_dict(made.state_dict())
        made = data_parallel(made, mesh, optimizer=mesh.axis_names)  # the one row is on one rank
        for _ in range(2):
            torch.testing.assert_close(made(torch.ones(2, 3)), reference(torch.ones(2, 3)))
            with torch.no_grad():
                write(made)
                write(reference)

    on_ranks((4,), program)


def test_a_parameter_written_between_forward_and_backward():
    def program(mesh):
        made = FORMS["fsdp, let go"](model(), mesh)
        loss = loss_of(made, *batch(mesh, False))
        with torch.no_grad():
            made.blocks[0].b.weight.mul_(2)
        with pytest.raises(
            RuntimeError, match=r"blocks\.0\.b\.weight was written between forward and backward"
        ):
            loss.backward()
        made.zero_grad()

    on_ranks((2,), program)


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp", "hybrid"])
def test_several_forwards(form):
    def twice(m, tokens=None, targets=None):
        given = () if tokens is None else (tokens, targets)
        return loss_of(m, *given) + loss_of(m, *given, skip=(0,))

    def program(mesh):
        made = FORMS[form](model(), mesh)
        check_gradients(made, mesh, twice)
        made.zero_grad()
        first = loss_of(made, *batch(mesh, False))
        second = loss_of(made, *batch(mesh, False), skip=(0,))
        first.backward()
        second.backward()
        same(gradients(made), reference_gradients(twice))

    on_ranks((2, 2), program)


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_units_skipped_and_their_order_changed(form):
    def program(mesh):
        made = FORMS[form](model(blocks=3), mesh)
        for skip in ((), (1,), (0, 2), ()):
            check_gradients(
                made, mesh, lambda *args, skip=skip: loss_of(*args, skip=skip), of=model(blocks=3)
            )
            made.zero_grad()
        reference = model(blocks=3)
        for m in (made, reference):
            m.blocks = nn.ModuleList(reversed(m.blocks))
        check_gradients(made, mesh, of=reference)

    on_ranks((4,), program)


@pytest.mark.parametrize("form", ["ddp", "zero2", "fsdp", "hybrid"])
def test_autograd_grad_and_retained_graphs(form):
    def program(mesh):
        made = FORMS[form](model(), mesh)
        names, parameters = zip(*made.named_parameters(), strict=True)
        found = torch.autograd.grad(
            loss_of(made, *batch(mesh, False)), parameters, retain_graph=True
        )
        same({name: whole(x) for name, x in zip(names, found, strict=True)}, reference_gradients())
        assert all(x.grad is None for x in parameters)
        loss = loss_of(made, *batch(mesh, False))
        loss.backward(retain_graph=True)
        loss.backward()
        same(gradients(made), {name: 2 * x for name, x in reference_gradients().items()})

    on_ranks((2, 2), program)


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_gradients_of_gradients(form):
    def penalty(m, x):
        (slope,) = torch.autograd.grad(m(x).pow(3).sum(), x, create_graph=True)
        return slope.square().sum()

    def program(mesh):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        block = copy.deepcopy(model().blocks[0])
        made = (
            fully_shard(copy.deepcopy(block), mesh)
            if form == "fsdp"
            else FORMS[form](copy.deepcopy(block), mesh, units=None)
        )
        (
            4 * penalty(made, own_rows(mesh, x).requires_grad_())
        ).backward()  # the mean over ranks is a quarter of the sum
        penalty(block, x.requires_grad_()).backward()
        same(gradients(made), gradients(block), 1e-11)

    on_ranks((4,), program)


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_deepcopy_is_independent(form):
    def program(mesh):
        made = FORMS[form](model(), mesh)
        copied = copy.deepcopy(made)
        with torch.no_grad():
            for x in made.parameters():
                x.zero_()
        check_gradients(copied, mesh)
        assert all(x.grad is None for x in made.parameters())

    on_ranks((4,), program)


def test_conversion_to_another_dtype():
    def program(mesh):
        made = FORMS["fsdp"](model(), mesh).float()
        loss_of(made, *batch(mesh, False)).backward()
        assert all(x.grad.dtype is torch.float32 for x in made.parameters())
        same(gradients(made), reference_gradients(net=model().float()), 1e-5)
        made.blocks[0].a.double()
        with pytest.raises(
            ValueError,
            match=(
                r"blocks\.0 are gathered together but have several dtypes: .*blocks\.0\.a\.weight"
            ),
        ):
            loss_of(made, *batch(mesh, False))

    on_ranks((4,), program)


def test_a_parameter_replaced():
    def program(mesh):
        made = FORMS["fsdp"](model(), mesh)
        kept = made.blocks[0].a.weight
        made.blocks[0].a.weight = nn.Parameter(kept.detach().redistribute(P()))
        check_gradients(made, mesh)
        made.zero_grad()
        made.blocks[0].a.weight = nn.Parameter(kept.detach().full_tensor())
        with pytest.raises(TypeError, match=r"blocks\.0\.a\.weight was replaced by a plain tensor"):
            loss_of(made, *batch(mesh, False))
        made.blocks[0].a.weight = kept
        check_gradients(made, mesh)

    on_ranks((2,), program)


def test_whole_plain_parameters_assigned_by_load_state_dict():
    def program(mesh):
        made = FORMS["fsdp"](model(), mesh)
        made.load_state_dict(model().state_dict(), assign=True)
        with pytest.raises(TypeError, match="was replaced by a plain tensor; copy the values"):
            loss_of(made, *batch(mesh, False))

    on_ranks((2,), program)


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_modules_inside_a_unit_called_directly(form):
    def part_of(m, tokens=None, targets=None):
        x = torch.linspace(-1, 1, BATCH * 5, dtype=torch.float64).view(BATCH, 5)
        rows = slice(None) if tokens is None else slice(2 * current[0], 2 * current[0] + 2)
        return m.blocks[1].a(x[rows]).square().mean()

    current = [0]

    def program(mesh):
        made = FORMS[form](model(), mesh)
        current[0] = mesh.get_rank()
        loss = part_of(made, True)
        loss.backward()
        same(gradients(made), reference_gradients(part_of))

    on_ranks((4,), program)


class _Many(nn.Module):
    """Several inputs, one by keyword, and several outputs in a dictionary, one of which is
    unused.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 1)

    def forward(self, x, *, y):
        return {"sum": self.a(x) + self.b(y["in"]), "more": [self.unused(x)], "name": "n"}


def test_many_inputs_and_outputs():
    torch.manual_seed(0)
    plain, x = _Many().double(), torch.randn(8, 3, dtype=torch.float64)

    def loss(m, x):
        return m(x, y={"in": x * 2})["sum"].square().mean()

    def program(mesh):
        made = fully_shard(copy.deepcopy(plain), mesh)
        loss(made, own_rows(mesh, x)).backward()
        same(gradients(made), reference_gradients(lambda m: loss(m, x), plain))

    on_ranks((4,), program)


def test_an_rnn():
    torch.manual_seed(0)
    plain = nn.LSTM(3, 5, num_layers=2, batch_first=True).double()
    x = torch.randn(8, 4, 3, dtype=torch.float64)

    def loss(m, x):
        return m(x)[0].square().mean()

    def program(mesh):
        made = fully_shard(copy.deepcopy(plain), mesh)
        for _ in range(2):
            made.zero_grad()
            loss(made, own_rows(mesh, x)).backward()
            same(gradients(made), reference_gradients(lambda m: loss(m, x), plain))

    on_ranks((4,), program)


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp", "hybrid"])
def test_hooks_that_step_in_backward(form):
    """`register_post_accumulate_grad_hook` sees each gradient once, complete."""

    def program(mesh):
        made = FORMS[form](model(), mesh)
        seen = {}
        for name, x in made.named_parameters():
            x.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.setdefault(name, []).append(whole(p.grad))
            )
        loss_of(made, *batch(mesh, False)).backward()
        same({name: found[0] for name, found in seen.items()}, reference_gradients())
        assert all(len(found) == 1 for found in seen.values())

    on_ranks((4,), program)


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_parametrizations(form):
    """Parameters from which modules compute others, such as those of weight_norm."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)), nn.Linear(7, 3)
    ).double()
    x = torch.randn(8, 5, dtype=torch.float64)

    def program(mesh):
        made = FORMS[form](copy.deepcopy(plain), mesh, units=None)
        made(own_rows(mesh, x)).square().mean().backward()
        same(gradients(made), reference_gradients(lambda m: m(x).square().mean(), plain))

    on_ranks((4,), program)


@pytest.mark.parametrize(
    "units",
    [
        "GatedBlock",
        ["GatedBlock"],
        {"GatedBlock", "NotInThisModel"},
        [GatedBlock],
        "blocks.?",
        ["blocks.0", lambda name, _: name == "blocks.1"],
        [lambda _, module: isinstance(module, GatedBlock), "GatedBlock"],
    ],
)
def test_ways_to_name_units(units):
    def program(mesh):
        made = fully_shard(model(), mesh, units=units)
        assert [unit.plan.name for unit in units_in(made)] == ["", "blocks.0", "blocks.1"]
        check_gradients(made, mesh)

    on_ranks((2,), program)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda m, mesh: fully_shard(m, mesh, axes="tp"),
            r"^fully_shard: axes=\('tp',\) on .*: give axes of the mesh, each once, from \('dp', ",
        ),
        (
            lambda m, mesh: data_parallel(m, mesh, gradient="tp", optimizer="tp"),
            r"^gradient=\('tp',\) on .*: give axes of the mesh, each once, from \('dp', ",
        ),
        (
            lambda m, mesh: fully_shard(m, mesh, units="layers.*"),
            r"units='layers.\*' matches no module of TiedModel; its modules are \['",
        ),
        (
            lambda m, mesh: fully_shard(m, mesh, reshard_after_forward=3),
            r"reshard_after_forward=3 is not the size of .*'fsdp': 2}",
        ),
        (lambda m, mesh: data_parallel(m, mesh, parameter="dp"), r"write optimizer=\('dp',\)"),
        (
            lambda m, mesh: data_parallel(m, mesh, gradient="dp", optimizer="fsdp"),
            r"write gradient=\('fsdp',\) or gradient=\(\)",
        ),
        (lambda m, mesh: fully_shard(fully_shard(m, mesh), mesh), r"TiedModel is a unit already"),
    ],
)
def test_invalid_arguments_raise(call, text):
    def program(mesh):
        made = model()
        with sm.debug.comm_budget() as used, pytest.raises(ValueError, match=text) as caught:
            call(made, mesh)
        del used
        return str(caught.value)

    assert len(set(on_ranks((2, 2), program))) == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m, mesh: fully_shard([m], mesh), "^fully_shard takes one module, got a list; sm.c"),
        (lambda m, mesh: data_parallel((m,), mesh), "^data_parallel takes one module, got a tuple"),
        (lambda m, mesh: fully_shard(m.forward, mesh), "got a method$"),
    ],
)
def test_what_is_no_module_raises(call, text):
    def program(mesh):
        with pytest.raises(TypeError, match=text):
            call(model(), mesh)

    on_ranks((2,), program)


def test_input_on_another_mesh_raises():
    def program(mesh):
        made = FORMS["fsdp"](model(), mesh)
        other = sm.DeviceMesh(mesh.device_type, [1, 0], axis_names=("x",))
        with pytest.raises(
            ValueError,
            match=(
                r"an input of TiedModel is on .*redistribute the input to that mesh, or a part of "
                r"it"
            ),
        ):
            made(
                sm.distribute_tensor(
                    torch.zeros(2, 3, dtype=torch.long), other, P("x"), src_data_rank=None
                )
            )
        check_gradients(made, mesh)

    on_ranks((2,), program)


# -- torch's names ---------------------------------------------------------------------------------


def _on_torch_mesh():
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = fully_shard(model(), mesh, units=GatedBlock)
    assert made.blocks[0].a.weight.spec.axes == ("shard",)
    check_gradients(made, made.norm.weight.mesh)


def test_a_mesh_of_torch(world4):
    world4(_on_torch_mesh)


def test_policies_of_torch():
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    def program(mesh):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        made = fully_shard(
            model(), mesh, units=GatedBlock, mp_policy=policy, offload_policy=fsdp.OffloadPolicy()
        )
        with sm.debug.comm_budget() as used:
            loss_of(made, *batch(mesh, False)).backward()
        plain = fully_shard(model(), mesh, units=GatedBlock)
        with sm.debug.comm_budget() as without:
            loss_of(plain, *batch(mesh, False)).backward()
        assert used.by_op["all_gather"][1] * 4 == without.by_op["all_gather"][1]
        assert used.by_op["reduce_scatter"][1] * 2 == without.by_op["reduce_scatter"][1]

    on_ranks((2,), program)


def test_offloading_on_a_cpu_mesh_is_a_no_op():
    def program(mesh):
        found = []
        for policy in (CPUOffloadPolicy(), None):
            made = fully_shard(model(), mesh, units=GatedBlock, offload_policy=policy)
            check_gradients(made, mesh)
            found.append(gradients(made))
        assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())
        assert all(x._local.device.type == "cpu" for x in made.parameters())

    on_ranks((4,), program)


def test_offloading_replicated_parameters_raises():
    def program(mesh):
        with pytest.raises(
            ValueError,
            match=r"replicated over \['dp'\] of .*; split over all axes, axes=\('dp', 'fsdp'\)",
        ):
            fully_shard(model(), mesh, offload_policy=CPUOffloadPolicy())

    on_ranks((2, 2), program)


@pytest.mark.parametrize(
    ("layer", "argument"), [(fully_shard, "axes"), (data_parallel, "parameter")]
)
@pytest.mark.parametrize("axes", ["dp", ("dp", "fsdp")])
def test_axes_passed_as_mesh_raise(layer, argument, axes):
    with pytest.raises(TypeError, match="the second argument is the mesh") as error:
        layer(nn.Linear(2, 2), axes)
    assert f"write {layer.__name__}(module, mesh, {argument}={axes!r})" in str(error.value)
