"""`fully_shard`, `replicate` and `FSDPModule` of shardmesh.compat: torch's surface, with one
process as the reference.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, ShardedTensor
from shardmesh.compat import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReplicateModule,
    Shard,
    ShardPlacementResult,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)
from tests.device import DEVICE
from tests.sharding.ranks import (
    collectives,
    every_rank,
    launched,
    on_mesh,
    run_programs,
    same_error,
)

ROWS, WIDTH = 8, 6


class Net(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH))
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, blocks=None, head=True):
        x = self.first(x)
        for block in self.blocks if blocks is None else [self.blocks[i] for i in blocks]:
            x = x + block(x)
        x = self.norm(x)
        return self.head(x) if head else x


def net(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Net(**options).double()
        for x in made.parameters():
            x.data += 0.1 * torch.randn(x.shape, dtype=x.dtype, device="cpu").to(x.device)
    return made.to(DEVICE)


def rows(seed=0):
    return torch.randn(
        ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(DEVICE)


def part(mesh, x):
    return x.chunk(mesh.size())[mesh.index_along(mesh.axis_names)]


def loss_of(made, x, **options):
    return made(x, **options).square().mean()


def shard(mesh, made=None, **options):
    made = net() if made is None else made
    for block in made.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard([made.norm, made.head], mesh=mesh, **options)
    return fully_shard(made, mesh=mesh, **options)


def whole(x):
    return (
        x.detach().full_tensor()
        if isinstance(x, ShardedTensor)
        else x
        if x is None
        else x.detach().clone()
    )


def gradients(made):
    return {name: whole(x.grad) for name, x in made.named_parameters()}


def expected_gradients(*seeds, scale=1.0, **options):
    made = net()
    for seed in seeds or (0,):
        (scale * loss_of(made, rows(seed), **options)).backward()
    return gradients(made)


def check_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert (x is None) == (actual[name] is None), name
        if x is not None:
            torch.testing.assert_close(
                actual[name],
                x,
                rtol=1e-12,
                atol=1e-13,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def step(made, mesh, seed=0, **options):
    loss_of(made, part(mesh, rows(seed)), **options).backward()


# -- a list of modules as one unit -----------------------------------------------------------------


@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_list_is_gathered_once_and_reduced_once(reshard):
    def main(mesh):
        made = net()
        for block in made.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        given = [made.norm, made.head]
        assert fully_shard(given, mesh=mesh, reshard_after_forward=reshard) is given
        assert isinstance(made.norm, FSDPModule)
        assert isinstance(made.head, FSDPModule)
        fully_shard(made, mesh=mesh)
        for _ in range(2):
            made.zero_grad()
            with collectives() as records:
                loss = loss_of(made, part(mesh, rows()))
                forward = launched(records)
                loss.backward()
            assert forward.count("all_gather") == 4, forward
            again = 0 if reshard is False else 3
            assert launched(records).count("all_gather") == 4 + again
            assert launched(records).count("reduce_scatter") == 4
            check_equal(gradients(made), expected_gradients())

    on_mesh((2,), main)


@every_rank(2)
def test_a_list_whose_last_module_is_called_later_in_chunks(mesh):
    made = shard(mesh)
    hidden = made(part(mesh, rows()), head=False)
    leaf = hidden.detach().requires_grad_()
    made.head.set_reshard_after_forward(False)
    made.head.set_reshard_after_backward(False)
    made.head.set_requires_gradient_sync(False, recurse=False)
    made.head.unshard()
    with collectives() as records:
        for i, chunk in enumerate(leaf.chunk(2)):
            if i == 1:
                made.head.set_requires_gradient_sync(True, recurse=False)
            (made.head(chunk).square().mean() / 2).backward()
    assert launched(records) == ["reduce_scatter"]
    made.head.set_reshard_after_forward(True)
    made.head.set_reshard_after_backward(True)
    made.head.reshard()
    hidden.backward(leaf.grad)
    check_equal(gradients(made), expected_gradients())
    with collectives() as records:
        step(made, mesh)  # the order of units is that of the model, not of the chunks
    assert launched(records).count("all_gather") == 7


@every_rank(2)
def test_modules_of_a_list_that_do_not_run_are_freed(mesh):
    made = shard(mesh)
    made(part(mesh, rows()), head=False).square().mean().backward()
    expected = net()
    expected(rows(), head=False).square().mean().backward()
    check_equal(gradients(made), gradients(expected))
    with torch.no_grad():
        made(part(mesh, rows()), head=False)
        with collectives() as records:
            made(part(mesh, rows()), head=False)
    assert (
        launched(records).count("all_gather") == 3
        # All but that of the root, whose parameters are current.
    )


@every_rank(2)
def test_a_list_leaves_out_modules_inside_others_and_casts_for_each(mesh):
    made = net()
    inner = made.blocks[0][0]
    fully_shard(
        [inner, made.blocks[0], made.head],
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(torch.float32, output_dtype=torch.float64),
    )
    assert not isinstance(inner, FSDPModule)
    for module, width in ((made.blocks[0], WIDTH), (made.head, 3)):
        out = module(rows())
        assert out.dtype is torch.float64
        assert out.shape == (ROWS, width)
        assert torch.equal(out, out.float().double())


@every_rank(2)
def test_errors_of_the_modules(mesh):
    made = net()
    fully_shard(made.head, mesh=mesh)
    for again in (made.head, [made.norm, made.head]):
        with pytest.raises(AssertionError, match="was applied to FSDPLinear before"):
            fully_shard(again, mesh=mesh)
    with pytest.raises(ValueError, match="has no module"):
        fully_shard([], mesh=mesh)
    with pytest.raises(TypeError, match="takes a module or a list of modules, got Tensor"):
        fully_shard([rows()], mesh=mesh)
    tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[0].weight = tied[1].weight
    fully_shard(tied[0], mesh=mesh)
    with pytest.raises(ValueError, match="shard both in one call"):
        fully_shard(tied[1], mesh=mesh)


# -- the class -------------------------------------------------------------------------------------


@every_rank(2)
def test_the_class_is_one_of_both(mesh):
    made = shard(mesh)
    assert type(made).__name__ == "FSDPNet"
    assert isinstance(made, Net)
    assert isinstance(made.blocks[0], FSDPModule)
    assert type(made.blocks[0]) is type(made.blocks[1])
    assert not isinstance(made.first, FSDPModule)
    assert not isinstance(made.blocks[0], ReplicateModule)
    part_of = made.blocks[0][:2]
    assert type(part_of) is nn.Sequential
    assert type(type(made)(blocks=1)) is Net


class WithReduce(nn.Linear):
    def __reduce__(self):
        return WithReduce, (self.in_features, self.out_features)


@every_rank(2)
def test_copies_and_pickles_keep_the_class(mesh):
    made = shard(mesh)
    copied = copy.deepcopy(made)
    assert type(copied) is type(made)
    copied.set_requires_gradient_sync(False)
    step(made, mesh)
    step(copied, mesh)
    assert all(x.grad is None for x in copied.parameters())
    check_equal(gradients(made), expected_gradients())
    shallow = copy.copy(made.blocks[0])
    assert type(shallow) is type(made.blocks[0])
    own = fully_shard(WithReduce(2, 3), mesh=mesh)
    assert type(copy.copy(own)) is WithReduce


def test_pickles(one_rank_job):
    mesh = sm.init_device_mesh("cpu", (1,), axis_names=("a",))
    made = shard(mesh)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(made)
    assert isinstance(loaded.head, FSDPModule)
    loss_of(loaded, rows()).backward()
    check_equal(gradients(loaded), expected_gradients())


# -- gathering by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unshard_puts_plain_parameters_in_the_module(asynchronous):
    def main(mesh):
        made, plain = shard(mesh), net()
        block = made.blocks[0]
        sharded = block[0].weight
        with collectives() as records:
            handle = block.unshard(async_op=asynchronous)
        assert launched(records) == ["all_gather"]
        assert isinstance(handle, UnshardHandle) == asynchronous
        if asynchronous:
            assert block[0].weight is sharded
            assert handle.wait() is None
            handle.wait()
        assert type(block[0].weight) is not ShardedTensor
        torch.testing.assert_close(block[0].weight, plain.blocks[0][0].weight, rtol=0, atol=0)
        x = part(mesh, rows())
        with collectives() as records:
            (
                nn.functional.linear(x, block[0].weight).square().mean()
            ).backward()  # outside of any forward
        assert launched(records) == ["reduce_scatter"]
        nn.functional.linear(rows(), plain.blocks[0][0].weight).square().mean().backward()
        block.reshard()
        assert block[0].weight is sharded
        torch.testing.assert_close(
            whole(sharded.grad), plain.blocks[0][0].weight.grad, rtol=1e-12, atol=1e-14
        )

    on_mesh((2,), main)


@every_rank(2)
def test_a_forward_uses_what_unshard_gathered_and_reshards(mesh):
    made = shard(mesh)
    step(made, mesh)
    made.zero_grad()
    sharded = made.blocks[0][0].weight
    for handle in (made.blocks[0].unshard(async_op=True), made.unshard(), made.head.unshard()):
        assert handle is None or isinstance(handle, UnshardHandle)
    with collectives() as records:
        loss = loss_of(made, part(mesh, rows()))
    assert launched(records) == ["all_gather"]  # of the second block
    assert made.blocks[0][0].weight is sharded
    loss.backward()
    check_equal(gradients(made), expected_gradients())


@every_rank(2)
def test_a_forward_after_unshard_uses_values_written_since(mesh):
    made, plain = shard(mesh), net()
    sharded = list(made.parameters())
    for module in (made, made.head, *made.blocks):
        module.unshard()
    with torch.no_grad():
        for x in (*sharded, *plain.parameters()):
            x.mul_(1.5)
    step(made, mesh)
    loss_of(plain, rows()).backward()
    check_equal(gradients(made), gradients(plain))


@every_rank(2)
def test_state_and_conversions_are_those_of_the_sharded_parameters(mesh):
    made, plain = shard(mesh), net()
    made.blocks[0].unshard()
    assert all(isinstance(x, ShardedTensor) for x in made.state_dict().values())
    made.blocks[0].unshard()
    made.load_state_dict({name: 2 * x for name, x in made.state_dict().items()})
    made.blocks[0].unshard()
    made.float()
    for name, x in made.named_parameters():
        assert isinstance(x, ShardedTensor)
        torch.testing.assert_close(whole(x), 2 * plain.get_parameter(name).float())


@every_rank(2)
def test_reshard_inside_of_a_forward_raises(mesh):
    made = shard(mesh)
    made.blocks[0][1].register_forward_hook(lambda *_: made.blocks[0].reshard())
    with pytest.raises(RuntimeError, match=r"reshard\(\) inside of a forward of FSDPSequential"):
        step(made, mesh)


@every_rank(2)
def test_reshard_after_forward_and_backward_at_run_time(mesh):
    made = shard(mesh)

    def gathers():
        x = part(
            mesh, rows()
        ).requires_grad_()  # so that the root, too, needs its parameters in backward
        with collectives() as records:
            loss_of(made, x).backward()
        return launched(records).count("all_gather")

    assert [gathers(), gathers()] == [7, 7]
    made.set_reshard_after_forward(False)
    assert gathers() == 4
    made.set_reshard_after_forward(True)
    assert gathers() == 8  # that of the root, too
    made.set_reshard_after_forward(False, recurse=False)
    made.set_reshard_after_backward(False)
    gathers()
    assert gathers() == 3  # what forward has freed is gathered in backward, and kept
    made.set_reshard_after_forward(False)
    gathers()
    assert gathers() == 0
    with torch.no_grad():
        for x in made.parameters():
            x += 0.5
    assert gathers() == 4
    made.zero_grad()
    step(made, mesh)
    expected = net()
    with torch.no_grad():
        for x in expected.parameters():
            x += 0.5
    loss_of(expected, rows()).backward()
    check_equal(gradients(made), gradients(expected))
    with pytest.raises(ValueError, match="is a bool, got 2"):
        made.set_reshard_after_forward(2)


@every_rank(2)
def test_explicit_prefetch(mesh):
    made = net(blocks=4)
    units = [fully_shard(block, mesh=mesh) for block in made.blocks]
    fully_shard([made.norm, made.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(made, mesh=mesh)
    units[0].set_modules_to_forward_prefetch([units[1], units[2], units[3]])
    for unit in units[1:]:
        unit.set_modules_to_forward_prefetch([made.head])
    made.head.set_modules_to_backward_prefetch([units[3], units[2]])
    units[3].set_modules_to_backward_prefetch([units[1], units[0]])
    expected = net(blocks=4)
    loss_of(expected, rows()).backward()
    for _ in range(2):
        made.zero_grad()
        order = []
        for i, unit in enumerate(units):
            unit[1].register_forward_pre_hook(
                lambda *_, i=i, order=order: order.append(
                    (i, launched(records).count("all_gather"))
                )
            )
        with collectives() as records:
            loss = loss_of(made, part(mesh, rows()))
            forward = launched(records).count("all_gather")
            loss.backward()
        assert order[0] == (0, 5)  # the root and four blocks
        assert order[1] == (1, 6)  # and the last unit
        assert forward == 6
        assert launched(records).count("all_gather") == 6 + 4
        check_equal(gradients(made), gradients(expected))
        for unit in units:
            unit[1]._forward_pre_hooks.clear()
    for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(ValueError, match="expected modules of fully_shard, got Linear"):
            getattr(made, method)([made.first])
        getattr(units[0], method)([])  # as before
    units[1].set_unshard_in_backward(False)
    made.zero_grad()
    step(made, mesh)
    check_equal(gradients(made), gradients(expected))


class Event:
    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1


@every_rank(2)
def test_the_forward_waits_for_the_event_of_the_optimizer(mesh):
    made, event = shard(mesh), Event()
    made.set_post_optim_event(event)
    with collectives() as records:
        made.register_forward_pre_hook(lambda *_: None)
        event.wait = lambda: setattr(event, "waits", len(records) + 1)
        step(made, mesh)
        assert event.waits == 1  # before any gather
        event.waits = 0
        step(made, mesh)
    assert event.waits == 0


# -- gradients -------------------------------------------------------------------------------------

FORMS = {
    "FSDP": ((2,), lambda mesh: shard(mesh)),
    "FSDP, kept": ((2,), lambda mesh: shard(mesh, reshard_after_forward=False)),
    "HSDP": ((2, 2), lambda mesh: shard(mesh)),
    "DDP": ((2,), lambda mesh: replicate(net(), mesh=mesh)),
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_accumulate_without_communication(form):
    shape, make = FORMS[form]

    def main(mesh):
        made = make(mesh)
        for first in (1, 4):
            made.zero_grad()
            made.set_requires_gradient_sync(False)
            for seed in (first, first + 1):
                with collectives() as records:
                    step(made, mesh, seed)
                assert not {"reduce_scatter", "all_reduce"} & set(launched(records))
                assert all(x.grad is None for x in made.parameters())
            made.set_requires_gradient_sync(True)
            with collectives() as records:
                step(made, mesh, first + 2)
            count = {
                name: launched(records).count(name) for name in ("reduce_scatter", "all_reduce")
            }
            assert count["reduce_scatter"] == (0 if form == "DDP" else 4)
            assert (count["all_reduce"] > 0) == (form in ("DDP", "HSDP"))
            check_equal(gradients(made), expected_gradients(first, first + 1, first + 2))

    on_mesh(shape, main)


@pytest.mark.parametrize("form", FORMS)
def test_held_gradients_of_what_the_last_backward_does_not_reach(form):
    shape, make = FORMS[form]

    def main(mesh):
        made, plain = make(mesh), net()
        if form == "DDP":
            made.set_reduce_scatter_unused_params(True)
        made.set_requires_gradient_sync(False)
        step(made, mesh, 1)
        made.set_requires_gradient_sync(True)
        step(made, mesh, 2, blocks=[1])
        loss_of(plain, rows(1)).backward()
        loss_of(plain, rows(2), blocks=[1]).backward()
        check_equal(gradients(made), gradients(plain))

    on_mesh(shape, main)


@every_rank(2)
def test_gradients_of_one_unit_accumulate(mesh):
    made = shard(mesh)
    made.set_requires_gradient_sync(False, recurse=False)
    step(made, mesh, 1)
    grads = {name for name, x in made.named_parameters() if x.grad is None}
    assert grads == {"first.weight", "first.bias"}
    made.set_requires_gradient_sync(True)
    step(made, mesh, 2)
    check_equal(gradients(made), expected_gradients(1, 2))


@every_rank(2, 2)
def test_gradients_accumulate_with_reduce_scatters_only(mesh):
    made = shard(mesh)
    made.set_requires_all_reduce(False)
    for seed in (1, 2):
        with collectives() as records:
            step(made, mesh, seed)
        assert launched(records).count("reduce_scatter") == 4
        assert "all_reduce" not in launched(records)
        assert all(x.grad is None for x in made.parameters())
    made.set_requires_all_reduce(True)
    step(made, mesh, 3)
    check_equal(gradients(made), expected_gradients(1, 2, 3))


@every_rank(2)
def test_held_gradients_have_the_dtype_of_reductions(mesh):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float64, cast_forward_inputs=True
    )
    made = shard(mesh, net(), mp_policy=policy)
    made.set_requires_gradient_sync(False)
    for seed in range(3):
        step(made, mesh, seed)
    made.set_requires_gradient_sync(True)
    step(made, mesh, 3)
    one_by_one = shard(mesh, net(), mp_policy=policy)
    for seed in range(4):
        step(one_by_one, mesh, seed)
    check_equal(gradients(made), gradients(one_by_one))


@pytest.mark.parametrize("form", FORMS)
def test_divide_factor(form):
    shape, make = FORMS[form]

    def main(mesh):
        made = make(mesh)
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        step(made, mesh)
        check_equal(gradients(made), expected_gradients(scale=mesh.size()))
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.set_reduce_scatter_divide_factor(mesh.size() / 3)
        made.zero_grad()
        step(made, mesh)
        check_equal(gradients(made), expected_gradients(scale=3))
        made.zero_grad()
        x = sm.distribute_tensor(rows(), mesh, P(mesh.axis_names), src_data_rank=None)
        # The loss of the global batch: summed, as with a factor of 1 and a sum over all rows.
        loss_of(made, x).backward()
        check_equal(gradients(made), expected_gradients())

    on_mesh(shape, main)


def test_divide_factor_with_inputs_that_are_sharded_in_part_raises():
    def main(mesh):
        made = shard(mesh)
        made.first.register_forward_hook(lambda *_: None)
        made.set_gradient_divide_factor(1.0)
        made(sm.distribute_tensor(rows(), mesh["b"], P("b"), src_data_rank=None))

    text = same_error((2, 2), main, ValueError, silent=False)
    assert "sharded over some of the data-parallel axes" in text


@every_rank(2)
def test_unused_parameters(mesh):
    made, plain = shard(mesh), net()
    made.set_reduce_scatter_unused_params(True)
    step(made, mesh, head=mesh.get_rank() == 1)
    for i, used in enumerate([False, True]):
        (loss_of(plain, rows().chunk(2)[i], head=used) / 2).backward()
    check_equal(gradients(made), gradients(plain))


@pytest.mark.parametrize("in_stream", [False, True])
def test_all_reduce_hook(in_stream):
    def main(mesh):
        made, pieces = shard(mesh), []

        def hook(piece):
            pieces.append(piece.clone())
            piece.mul_(2)

        stream = torch.get_device_module(DEVICE).Stream() if in_stream else None
        made.blocks[0].set_all_reduce_hook(hook, stream=stream)
        step(made, mesh)
        expected = expected_gradients()
        assert len(pieces) == 1
        assert pieces[0].ndim == 1
        for name in expected:
            if name.startswith("blocks.0"):
                expected[name] *= 2
        check_equal(gradients(made), expected)

    on_mesh((2,), main)


@every_rank(2, 2)
def test_what_is_refused(mesh):
    made = shard(mesh)
    with pytest.raises(NotImplementedError, match=r"replicated over \['a'\]"):
        made.set_all_reduce_hook(print)
    for method in (made.set_custom_all_gather, made.set_custom_reduce_scatter):
        with pytest.raises(
            NotImplementedError, match="collectives of other libraries are not called"
        ):
            method(None)
    with pytest.raises(TypeError, match="is an int, got True"):
        made.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="give a positive number"):
        made.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(ValueError, match="expected modules of fully_shard"):
        share_comm_ctx([nn.Linear(1, 1)])
    model = nn.Linear(4, 4)
    model.weight.fsdp_pre_all_gather = None  # as of torchao's tensors for gathers in float8
    with pytest.raises(NotImplementedError, match="weight has fsdp_pre_all_gather"):
        fully_shard(model, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.weight})


@every_rank(2)
def test_what_has_no_effect(mesh):
    made = shard(mesh)
    made.set_is_last_backward(False)
    made.set_force_sum_reduction_for_comms(True)
    made.set_reduce_scatter_max_input_buffers(2)
    made.set_separate_reduce_scatter_group()
    made.set_allocate_memory_from_process_group_for_comm(True)
    made.set_symm_mem_for_comm()
    assert share_comm_ctx([made, made.head]) is None
    step(made, mesh)
    check_equal(gradients(made), expected_gradients())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_reset_after_an_exception(where):
    def main(mesh):
        made = shard(mesh)
        made.set_requires_gradient_sync(False)
        step(made, mesh, 5)  # lost
        made.set_requires_gradient_sync(True)

        def fail(*_):
            raise RuntimeError("stop")

        if where == "forward":
            handle = made.blocks[1][1].register_forward_hook(fail)
        else:
            handle = made.blocks[0][1].register_full_backward_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            step(made, mesh, 1)
        handle.remove()
        with pytest.raises(RuntimeError, match="outermost module"):
            made.head.reset_iter_state()
        made.reset_iter_state()
        made.zero_grad()
        step(made, mesh, 2)
        check_equal(gradients(made), expected_gradients(2))

    on_mesh((2,), main)


@pytest.mark.parametrize("method", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_holding_gradients_back_over_calls_of_sm_jit_raises(method):
    def main(mesh):
        made = shard(mesh)
        getattr(made, method)(False)
        f = sm.jit(lambda x: loss_of(made, x).backward(), backend="eager")
        with pytest.raises(NotImplementedError, match=r"inside of sm.accumulate_grads\(\)"):
            for _ in range(2):
                f(part(mesh, rows()))

    on_mesh((2, 2), main)


# -- methods ---------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0, dtype=torch.float64).view(4, 3))
        self.inner = nn.Linear(3, 3).double()

    def encode(self, x, *, times=1):
        """Encode."""
        assert type(self.weight) is not ShardedTensor
        return times * self.inner(x @ self.weight)

    def forward(self, x):
        return self.encode(x)


@every_rank(2)
def test_a_registered_method_gathers(mesh):
    torch.manual_seed(0)
    plain = Encoder().to(DEVICE)
    made = fully_shard(copy.deepcopy(plain), mesh=mesh)
    register_fsdp_forward_method(made, "encode")
    register_fsdp_forward_method(made, "encode")
    register_fsdp_forward_method(plain, "encode")  # nothing
    assert "encode" not in plain.__dict__
    assert made.encode.__wrapped__.__doc__ == "Encode."
    with pytest.raises(ValueError, match="FSDPEncoder has no method 'decode'"):
        register_fsdp_forward_method(made, "decode")
    x = torch.arange(16.0, dtype=torch.float64, device=DEVICE).view(4, 4)
    for one in (made, copy.deepcopy(made)):
        with collectives() as records:
            out = one.encode(part(mesh, x), times=2)
        assert launched(records) == ["all_gather"]
        out.square().mean().backward()
        plain.zero_grad()
        plain.encode(x, times=2).square().mean().backward()
        check_equal(gradients(one), gradients(plain))
        assert isinstance(one.weight, ShardedTensor)
        torch.testing.assert_close(
            one(part(mesh, x)),
            plain(part(mesh, x)),
            # `forward` calls the method.
        )


# -- where parameters are split --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_parameters_split_along_any_dim(shape):
    def main(mesh):
        made, plain = net(), net()
        by_last = lambda x: Shard(-1) if x.ndim == 2 else None  # noqa: E731
        shard(mesh, made, shard_placement_fn=by_last)
        split = mesh.axis_names[-1]
        for name, x in made.named_parameters():
            assert x.spec.dims[-1] == (split,), name
            torch.testing.assert_close(whole(x), plain.get_parameter(name), rtol=0, atol=0)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (made, plain)]
        for seed in range(3):
            losses = []
            for m, x in ((made, part(mesh, rows(seed))), (plain, rows(seed))):
                losses.append(loss_of(m, x) if mesh.size() != 3 else loss_of(m, rows(seed)))
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        check_equal(
            {n: whole(x) for n, x in made.named_parameters()}, dict(plain.named_parameters())
        )

    on_mesh(shape, main)


@every_rank(2, 2)
def test_parameters_split_along_a_dim_beside_tensor_parallelism(mesh):
    plan = {"0": sm.compat.ColwiseParallel(), "2": sm.compat.RowwiseParallel()}
    made, plain = net(), net()
    for block in made.blocks:
        sm.compat.parallelize_module(block, mesh["b"], plan)
        fully_shard(block, mesh=mesh["a"], shard_placement_fn=lambda x: Shard(x.ndim - 1))
    fully_shard(made, mesh=mesh["a"])
    assert made.blocks[0][2].weight.spec.dims == ((), ("b", "a"))
    assert made.blocks[0][0].weight.spec.dims == (("b",), ("a",))
    for seed in range(2):
        loss_of(made, part(mesh["a"], rows(seed))).backward()
        loss_of(plain, rows(seed)).backward()
    check_equal(gradients(made), gradients(plain))


@every_rank(2)
def test_parameters_split_along_a_dim_on_meta(mesh):
    with torch.device("meta"):
        made = Net().double()
    shard(mesh, made, shard_placement_fn=lambda x: Shard(x.ndim - 1))
    sm.parallel.materialize(made)
    made.load_state_dict(
        {name: sm.distribute_tensor(x, mesh) for name, x in net().state_dict().items()}
    )
    step(made, mesh)
    check_equal(gradients(made), expected_gradients())


@every_rank(2)
def test_memory_by_to_empty(mesh):
    """`to_empty` replaces parameters; those of a unit are gathered together all the same."""

    def build(has_unshard):
        with torch.device("meta"):
            made = Net().double()
        shard(mesh, made)
        made.to_empty(device=mesh.device)
        with torch.no_grad():
            for own, x in zip(made.parameters(), net().parameters(), strict=True):
                own.copy_(sm.distribute_tensor(x.detach(), mesh))
        if has_unshard:
            made.unshard()
            assert not isinstance(made.first.weight, ShardedTensor)
            made.reshard()
        return made

    def calls(made):
        with collectives() as records:
            step(made, mesh)
        check_equal(gradients(made), expected_gradients())
        return launched(records)

    expected = calls(shard(mesh))
    assert calls(build(has_unshard=False)) == expected
    assert calls(build(has_unshard=True)) == expected


@every_rank(2)
def test_values_written_over_others_that_ranks_made_differently(mesh):
    """Trainers keep the model of rank 0 and call `to_empty` on the others, then load a state."""
    made = shard(mesh)
    if mesh.get_rank() == 0:
        made.to(mesh.device)
    else:
        made.to_empty(device=mesh.device)
    values = net().state_dict()
    made.load_state_dict({name: sm.distribute_tensor(x, mesh) for name, x in values.items()})
    step(made, mesh)
    check_equal(gradients(made), expected_gradients())


@every_rank(2)
def test_placements_of_parameters_are_equal_to_those_of_torch(mesh):
    made = shard(mesh)
    assert all(x.placements == (Shard(0),) for x in made.parameters())
    assert not any(x.placements == (Shard(1),) for x in made.parameters())


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("Shard(0)", "returned 'Shard\\(0\\)' for weight"),
        (Shard(2), r"returned Shard\(2\) for weight of shape \[3, 4\]"),
    ],
)
def test_results_of_shard_placement_fn_are_checked(result, text):
    def main(mesh):
        with pytest.raises(ValueError, match=text):
            fully_shard(nn.Linear(4, 3), mesh=mesh, shard_placement_fn=lambda _: result)

    on_mesh((2,), main)


@every_rank(2, 2)
def test_dims_of_a_mesh(mesh):
    for dims, split in (
        (DataParallelMeshDims(shard="b"), ("b",)),
        (DataParallelMeshDims(shard=("a", "b")), ("a", "b")),
        (DataParallelMeshDims(shard="b", replicate="a"), ("b",)),
        (DataParallelMeshDims(replicate=("a", "b")), ()),
    ):
        made = shard(mesh, dp_mesh_dims=dims)
        assert isinstance(made, FSDPModule)
        assert all(x.spec.dims[0] == split for x in made.parameters())
        along = (
            mesh[dims.replicate_names + dims.shard_names]
            if dims.replicate_names + dims.shard_names != ("b", "a")
            else mesh
        )
        loss_of(made, part(along, rows())).backward()
        check_equal(gradients(made), expected_gradients())
        made.zero_grad()
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        loss_of(
            made, part(along, rows())
        ).backward()  # equal along the axes that are not data-parallel
        check_equal(gradients(made), expected_gradients(scale=along.size()))


@every_rank(2, 2)
def test_errors_of_dims(mesh):
    with pytest.raises(ValueError, match="at least one of shard= and replicate="):
        DataParallelMeshDims()
    with pytest.raises(ValueError, match=r"names \['x'\], but the axes of .* are \['a', 'b'\]"):
        fully_shard(net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="x"))


@every_rank(2)
def test_policies(mesh):
    assert issubclass(CPUOffloadPolicy, OffloadPolicy)
    made = shard(mesh, net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    step(made, mesh)
    check_equal(gradients(made), expected_gradients())
    made = shard(mesh, net(), offload_policy=OffloadPolicy(), ignored_params=None)
    step(made, mesh)
    check_equal(gradients(made), expected_gradients())


@every_rank(2)
def test_the_default_mesh_is_all_ranks(mesh):
    made = fully_shard(nn.Linear(2, 2))
    assert made.weight.mesh.shape == (2,)
    with mesh:
        assert fully_shard(nn.Linear(2, 2)).weight.mesh is mesh


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_number_of_ranks_to_reshard_to(number):
    def main(mesh):
        made = shard(mesh, reshard_after_forward=number)
        with collectives() as records:
            step(made, mesh)
        assert launched(records).count("all_gather") == (4 if number == 1 else 7)
        check_equal(gradients(made), expected_gradients())
        with pytest.raises(ValueError, match="reshard_after_forward=3 does not divide the 4 ranks"):
            shard(mesh, reshard_after_forward=3)

    on_mesh((4,), main)


# -- two meshes of the same ranks ------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.empty(4, *s)) for s in ((WIDTH, 5), (5, WIDTH)))

    def forward(self, x):
        """Return the mean over the experts; `x` has rows that are this rank's own, the weights this
        rank's experts.
        """
        w1, w2 = (x.to_local() if isinstance(x, ShardedTensor) else x for x in (self.w1, self.w2))
        return torch.einsum("nd,edf,efg->ng", x, w1, w2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.experts = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), Expert()
        self.group = None  # of expert parallelism

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.exchange(x)

    def exchange(self, x):
        """Gather the rows of the ranks along ep, apply this rank's experts, and sum over the
        experts of these ranks.
        """
        if self.group is None:
            return self.experts(x)
        mesh = self.group
        whole = sm.from_local(x, mesh, P("ep")).redistribute(P())
        rows_of_all = whole.to_local(grad_placements=[sm.Partial()])
        return (
            sm.from_local(self.experts(rows_of_all), mesh, P(unreduced={"ep"}))
            .redistribute(P("ep"))
            .to_local()
        )


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixture():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Mixture().double()
        for x in made.parameters():
            nn.init.normal_(x, std=0.4)
    return made.to(DEVICE)


PLAN = {"up": sm.compat.ColwiseParallel(), "down": sm.compat.RowwiseParallel()}


def two_meshes(ep=2):
    dense = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("fsdp", "tp"))
    sparse = sm.init_device_mesh(DEVICE, (4 // ep, ep), axis_names=("efsdp", "ep"))
    return dense, sparse


def experts_by_unit(block, dense, sparse):
    fully_shard(block.experts, mesh=sparse["efsdp"])
    fully_shard(block, mesh=dense["fsdp"])
    block.experts.set_gradient_divide_factor(4)


def experts_by_placement(block, dense, sparse):
    experts = set(block.experts.parameters())
    infos = {True: FSDPMeshInfo(sparse["efsdp"], 0), False: FSDPMeshInfo(dense["fsdp"], 0)}
    place = lambda x: ShardPlacementResult(Shard(1 if x in experts else 0), infos[x in experts])  # noqa: E731
    fully_shard(block, mesh=dense["fsdp"], shard_placement_fn=place)
    assert not isinstance(block.experts, FSDPModule)
    assert block.experts.w1.spec.dims == (("ep",), ("efsdp",), ())
    block.unshard()
    assert not isinstance(block.up.bias, ShardedTensor) or block.up.bias.mesh.axis_names == ("tp",)
    assert block.experts.w1.mesh is sparse["ep"]
    block.reshard()
    assert block.experts.w1.mesh is sparse


def train_mixture(form, ep):
    """Train as torchtitan does: rows differ along fsdp and are equal along tp; the ranks along ep
    exchange them.
    """
    dense, sparse = two_meshes(ep)
    made, plain = mixture(), mixture()
    for block in made.blocks:
        sm.compat.parallelize_module(block, dense["tp"], PLAN)
        for name in ("w1", "w2"):
            value = sm.distribute_tensor(getattr(block.experts, name), sparse["ep"], P("ep"))
            setattr(block.experts, name, nn.Parameter(value))
        block.group = sparse["ep"]
        form(block, dense, sparse)
    fully_shard(made, mesh=dense["fsdp"])
    for module in made.modules():
        if form is experts_by_placement and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    scale = 1.0 if form is experts_by_unit else 0.5
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (made, plain)]
    for seed in range(3):
        (scale * loss_of(made, part(dense["fsdp"], rows(seed)))).backward()
        loss_of(plain, rows(seed)).backward()
        if form is experts_by_placement:
            for x in (x for block in made.blocks for x in block.experts.parameters()):
                x.grad /= 2  # rows are equal along tp: each expert has seen them twice
        check_equal(gradients(made), gradients(plain))
        norms = [sm.training.clip_grad_norm_(m.parameters(), 0.1) for m in (made, plain)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
        check_equal(gradients(made), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_equal({n: whole(x) for n, x in made.named_parameters()}, dict(plain.named_parameters()))


@pytest.mark.parametrize(
    ("form", "ep"), [(experts_by_unit, 2), (experts_by_unit, 4), (experts_by_placement, 2)]
)
def test_experts_on_a_mesh_of_their_own(form, ep):
    sm.simulate(4)(train_mixture)(form, ep)


@every_rank(4)
def test_errors_of_two_meshes(mesh):
    assert mesh.size() == 4
    dense, sparse = two_meshes()
    block = mixture().blocks[0]
    for name in ("w1", "w2"):
        value = sm.distribute_tensor(getattr(block.experts, name), sparse["ep"], P("ep"))
        setattr(block.experts, name, nn.Parameter(value))
    block.group = sparse["ep"]
    infos = [FSDPMeshInfo(sparse["efsdp"], 0), FSDPMeshInfo(dense["fsdp"], 0)]
    one_each = lambda x: ShardPlacementResult(None, infos[x is block.experts.w2])  # noqa: E731
    with pytest.raises(
        NotImplementedError, match="returned several meshes for parameters of experts"
    ):
        fully_shard(block, mesh=dense["fsdp"], shard_placement_fn=one_each)
    fully_shard(block.experts, mesh=sparse["efsdp"])
    fully_shard(block, mesh=dense)
    x = sm.distribute_tensor(rows(), dense, P("fsdp"), src_data_rank=None)
    hidden = block.up(x)
    assert hidden.mesh is dense
    with pytest.raises(
        ValueError,
        match=r"Expert was called with plain tensors inside of .*Block, which computes on",
    ):
        block.forward = lambda x: block.experts(x.to_local())
        block(x)
    with pytest.raises(ValueError, match="an input of FSDPExpert is on DeviceMesh"):
        block.experts(x)


@every_rank(4)
def test_sharded_inputs_on_two_meshes(mesh):
    """The loss of a global batch: an expert layer whose inputs are moved to its mesh needs no
    divide factor.
    """
    assert mesh.size() == 4
    dense, sparse = two_meshes()
    made = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)).double().to(DEVICE)
    torch.manual_seed(1)
    for x in made.parameters():
        x.data = torch.randn(x.shape, dtype=x.dtype).to(DEVICE)
    plain = copy.deepcopy(made)
    for i, sharding in enumerate(
        (sm.NamedSharding(sparse, P("efsdp")), sm.NamedSharding(dense, P("fsdp")))
    ):
        made[i].register_forward_hook(
            lambda *call, sharding=sharding: sm.device_put(call[-1], sharding)
        )
    fully_shard(made[1], mesh=sparse)
    fully_shard(made, mesh=dense)
    values = torch.randn(8, 4, dtype=torch.float64).to(DEVICE)
    made(
        sm.distribute_tensor(values, dense, P("fsdp"), src_data_rank=None)
    ).square().mean().backward()
    plain(values).square().mean().backward()
    check_equal(gradients(made), gradients(plain))


# -- replicate -------------------------------------------------------------------------------------


@every_rank(2)
def test_replicate(mesh):
    made = replicate(net(), device_mesh=mesh, bucket_cap_mb=25, find_unused_parameters=True)
    assert isinstance(made, ReplicateModule)
    assert isinstance(made, FSDPModule)
    assert type(made).__name__ == "ReplicateNet"
    assert type(made.blocks[0][:1]) is nn.Sequential
    assert type(copy.deepcopy(made)) is type(made)
    step(made, mesh, blocks=[0])
    expected = expected_gradients(0, blocks=[0])
    expected = {
        name: torch.zeros_like(x) if expected[name] is None else expected[name]
        for name, x in net().named_parameters()
    }
    check_equal(gradients(made), expected)
    with pytest.raises(AssertionError, match="its parameters are not split"):
        made.set_reshard_after_forward(True)


@every_rank(2, 2)
def test_replicate_of_dims_and_ignored_modules(mesh):
    made = net()
    replicate(
        made,
        [made.first],
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(replicate="b"),
        ignored_params={made.head.bias},
    )
    assert type(made.first.weight) is nn.Parameter
    assert type(made.head.bias) is nn.Parameter
    loss_of(made, part(mesh["b"], rows())).backward()
    expected = expected_gradients()
    for name, x in made.named_parameters():
        if isinstance(x, ShardedTensor):
            torch.testing.assert_close(whole(x.grad), expected[name], rtol=1e-12, atol=1e-13)


@every_rank(2, 2)
def test_errors_of_replicate(mesh):
    row = mesh["a"]
    with pytest.raises(ValueError, match=r"takes a mesh with one axis, and .* has 2"):
        replicate(net(), mesh=mesh)
    with pytest.raises(ValueError, match="takes replicate= only"):
        replicate(net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="a"))
    with pytest.raises(RuntimeError, match="fully_shard was applied"):
        replicate(fully_shard(net(), mesh=row), mesh=row)
    with pytest.raises(AssertionError, match="was applied to ReplicateNet before"):
        fully_shard(replicate(net(), mesh=row), mesh=row)
    with pytest.raises(NotImplementedError, match="reduced on the host"):
        replicate(net(), mesh=row, offload_policy=CPUOffloadPolicy())
    for name in ("process_group", "mixed_precision", "broadcast_buffers"):
        with pytest.raises(NotImplementedError, match=rf"replicate\({name}=1\) is not supported"):
            replicate(net(), mesh=row, **{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_mb'"):
        replicate(net(), mesh=row, bucket_mb=1)


# -- processes -------------------------------------------------------------------------------------


def test_on_processes(world4):
    names = ["test_gradients_accumulate_with_reduce_scatters_only"]
    assert world4(run_programs, __name__, names) == [1] * 4
    world4(train_mixture, experts_by_unit, 2)


def test_a_mesh_of_another_type():
    text = same_error((2,), lambda mesh: fully_shard(nn.Linear(2, 2), mesh=3), TypeError)
    assert text == "mesh must be a DeviceMesh, as init_device_mesh makes it, got 3"
