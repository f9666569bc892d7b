"""Memory: gathered parameters and gradients are views, only what is needed is held, and nothing
outlives its use.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import fully_shard
from tests.sharding.parallel.data.training import (
    GatedBlock,
    batch,
    loss_of,
    mesh_of,
    model,
    on_ranks,
)

D, LAYERS = 32, 4


def _layers():
    return nn.Sequential(*[nn.Linear(D, D, bias=False) for _ in range(LAYERS)])


class _Copies(TorchDispatchMode):
    """Counts the elements that copies of weights write."""

    NAMES = (
        "copy_",
        "clone",
        "cat",
        "_to_copy",
        "contiguous",
        "constant_pad_nd",
        "index_select",
        "stack",
    )

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(func._schema.name.endswith(f"::{name}") for name in self.NAMES):
            x = out if isinstance(out, torch.Tensor) else args[0]
            self.elements += x.numel()
        return out


def _unit(module):
    return module.__dict__["_shardmesh_unit"]


# -- views -----------------------------------------------------------------------------------------


def test_parameters_in_use_are_views_of_one_buffer():
    def program(mesh):
        made, seen = fully_shard(model(), mesh, units=GatedBlock), []
        made.blocks[0].a.register_forward_hook(
            lambda m, *_: seen.extend(x.untyped_storage().data_ptr() for x in m.parameters())
        )
        made.blocks[0].b.register_forward_hook(
            lambda m, *_: seen.extend(x.untyped_storage().data_ptr() for x in m.parameters())
        )
        loss_of(made, *batch(mesh, False))
        assert len(seen) == 3
        assert len(set(seen)) == 1

    on_ranks((4,), program)


def test_sharded_parameters_and_gradients_are_views_of_one_buffer():
    def program(mesh):
        made = fully_shard(model(), mesh, units=GatedBlock)
        loss_of(made, *batch(mesh, False)).backward()
        local = [x for x in made.blocks[0].parameters() if x.dim() and x._local.numel()]
        for tensors in ([x._local for x in local], [x.grad._local for x in local]):
            assert len({x.untyped_storage().data_ptr() for x in tensors}) == (1 if tensors else 0)

    on_ranks((4,), program)


def _copied_by_gathering():
    made, x = fully_shard(_layers(), mesh_of(4), units=nn.Linear), torch.ones(1, D)
    with torch.no_grad():
        made(x)
        for layer in made:
            layer.weight.mul_(2)  # so that they are gathered again
        with _Copies() as copies:
            made(x)
    return copies.elements


def test_gathering_copies_nothing(world4):
    """Pieces are sent from parameter storage and received into the gathered buffer."""
    assert world4(_copied_by_gathering) == [0] * 4


def _copied_by_summing():
    loss = fully_shard(_layers(), mesh_of(4), units=nn.Linear)(torch.ones(1, D)).sum()
    with _Copies() as copies:
        loss.backward()
    return copies.elements


def test_summing_copies_each_gradient_once(world4):
    """A gradient is copied once, from autograd's memory into the reduction buffer."""
    assert max(world4(_copied_by_summing)) <= LAYERS * D * D


# -- memory ----------------------------------------------------------------------------------------


def _whole_buffers(made):
    return sum(bucket.storage.is_gathered for layer in made for bucket in _unit(layer).plan.buckets)


@pytest.mark.parametrize("directly", [False, True])
def test_at_most_two_units_are_whole(directly):
    """The current unit and the next one, forward and backward, also if the layers are called one by
    one.
    """

    def program(mesh):
        made, seen = fully_shard(_layers(), mesh, units=nn.Linear), {"forward": [], "backward": []}

        def watch(layer, args):
            seen["forward"].append(_whole_buffers(made))
            args[0].register_hook(lambda _: seen["backward"].append(_whole_buffers(made)))

        for layer in made:
            layer.register_forward_pre_hook(watch)
        for _ in range(2):
            x = torch.ones(2, D, requires_grad=True)
            y = made(x) if not directly else made[3](made[2](made[1](made[0](x))))
            y.sum().backward()
            assert _whole_buffers(made) == 0
        return max(seen["forward"]), max(seen["backward"])

    most = on_ranks((2,), program)
    assert all(1 <= forward <= 2 and backward <= 2 for forward, backward in most), most


class _Live(TorchDispatchMode):
    """Tracks the peak bytes of large storages allocated inside."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self._watch(x.untyped_storage())
        return out

    def _watch(self, storage):
        number, size = storage._cdata, storage.nbytes()
        if size >= D * D and number not in self._seen:
            self._seen.add(number)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, number, size)

    def _gone(self, number, size):
        self._seen.discard(number)
        self.now -= size


def _peak(layers, reshard_after_forward=True):
    made = nn.Sequential(*[nn.Linear(D, D, bias=False) for _ in range(layers)])
    made = fully_shard(
        made, mesh_of(4), units=nn.Linear, reshard_after_forward=reshard_after_forward
    )
    x = torch.ones(2, D)
    made(x).sum().backward()
    made.zero_grad()
    with _Live() as live:
        made(x).sum().backward()
    return live.peak


def test_peak_memory(world4):
    """At most: each rank's part of all gradients, two units gathered and a third that has just been
    freed, the gradients of one, and two sums: the buffer that is summed, what has arrived of it and
    the part that stays. With whole parameters kept it is all units gathered."""
    layers, unit = 12, D * D * 4
    assert max(world4(_peak, layers)) <= layers * unit // 4 + 3 * unit + unit + 2 * (
        unit + unit + unit // 4
    )
    assert min(world4(_peak, layers, False)) >= layers * unit


def test_nothing_is_left_after_a_step():
    """No whole parameter, no gradient buffer and no graph is alive, without the garbage collector's
    help.
    """

    def program(mesh):
        made = fully_shard(_layers(), mesh, units=nn.Linear, reshard_after_forward=True)
        gc.collect()
        gc.disable()
        try:
            alive = []
            made[1].register_forward_pre_hook(lambda m, _: alive.append(weakref.ref(m.weight)))
            made(torch.ones(1, D)).sum().backward()
            return [x() is None for x in alive], _unit(made[1]).step
        finally:
            gc.enable()

    for gone, step in on_ranks((2,), program):
        assert all(gone)
        assert step is None


def test_a_forward_without_backward_leaves_nothing():
    def program(mesh):
        made = fully_shard(_layers(), mesh, units=nn.Linear, reshard_after_forward=True)
        for _ in range(2):
            made(torch.ones(1, D))
        return _whole_buffers(made)

    assert on_ranks((2,), program) == [0, 0]


def test_model_is_freed():
    def program(mesh):
        made = fully_shard(_layers(), mesh, units=nn.Linear)
        made(torch.ones(1, D)).sum().backward()
        gone = weakref.ref(made[0].weight)
        del made
        gc.collect()
        return gone() is None

    assert all(on_ranks((2,), program))


# -- order -----------------------------------------------------------------------------------------


def _gathers(program):
    """Return the paths of the units, in the order in which their gathers are launched."""

    def rank(mesh):
        made = fully_shard(model(blocks=3), mesh, units=GatedBlock)
        order = []
        for name in ("", "blocks.0", "blocks.1", "blocks.2"):
            for bucket in _unit(made.get_submodule(name)).plan.buckets:
                start = bucket.flat.start_gather
                bucket.flat.start_gather = lambda *a, start=start, name=name, **k: (
                    order.append(name),
                    start(*a, **k),
                )[1]
        return program(made, mesh, order)

    return on_ranks((2,), rank)[0]


def _steps(made, mesh, order, *skips):
    found = []
    for skip in skips:
        order.clear()
        loss = loss_of(made, *batch(mesh, False), skip=skip)
        forward = [*order]
        order.clear()
        loss.backward()
        with torch.no_grad():
            for x in made.parameters():
                x.mul_(0.9)
        found.append((forward, [*order]))
    return found


def test_each_unit_is_gathered_while_the_one_before_runs():
    """Forward: in module order, also in the first step. Backward: in reverse."""

    def program(made, mesh, order):
        seen = []
        for i, block in enumerate(made.blocks):
            block.register_forward_pre_hook(lambda *_, i=i: seen.append((i, order[-1])))
        found = _steps(made, mesh, order, (), ())
        return found, seen

    found, seen = _gathers(program)
    assert found == 2 * [
        (["", "blocks.0", "blocks.1", "blocks.2"], ["blocks.2", "blocks.1", "blocks.0"])
    ]
    assert seen == 2 * [(0, "blocks.1"), (1, "blocks.2"), (2, "blocks.2")]


def test_units_that_are_skipped():
    """The previous forward predicts the order of the next; a wrong prediction costs a gather, never
    a wrong value.
    """
    found = _gathers(lambda made, mesh, order: _steps(made, mesh, order, (), (1,), (1,)))
    assert found[1][0].count("blocks.1") == 1
    assert found[1][1] == ["blocks.2", "blocks.0"]
    assert found[2] == (["", "blocks.0", "blocks.2"], ["blocks.2", "blocks.0"])


def test_a_unit_called_twice_in_a_forward():
    def program(made, mesh, order):
        made.blocks.append(made.blocks[0])
        return _steps(made, mesh, order, (), ())[1]

    forward, backward = _gathers(program)
    assert forward.count("blocks.0") == 2
    assert set(backward) == {"blocks.0", "blocks.1", "blocks.2"}


# -- parameters that are split already -------------------------------------------------------------


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")])
@pytest.mark.parametrize("on", ["mesh", "part"])
@pytest.mark.parametrize("sharded", [True, False])
def test_parameters_sharded_over_another_axis(spec, on, sharded):
    """They stay sharded over it during use: only the ranks of `dp` gather, and gradients equal
    those of one process.
    """
    torch.manual_seed(0)
    whole, x = nn.Linear(5, 7, bias=False).double(), torch.randn(8, 5, dtype=torch.float64)
    whole(x).square().mean().backward()

    def program(mesh):
        mesh = sm.init_device_mesh(mesh.device_type, (2, 2), axis_names=("dp", "tp"))
        made = nn.Linear(5, 7, bias=False).double()
        there = mesh if on == "mesh" else mesh["tp"]
        made.weight = nn.Parameter(
            sm.distribute_tensor(whole.weight.detach(), there, spec, src_data_rank=None)
        )
        fully_shard(made, mesh)
        assert set(made.weight.spec.axes) == {"dp", "tp"}
        if sharded:
            given = sm.distribute_tensor(x, mesh, P("dp"), src_data_rank=None)
        else:
            given = sm.distribute_tensor(
                x.chunk(2)[mesh.get_local_rank("dp")], mesh["tp"], P(), src_data_rank=None
            )
        made(given).square().mean().backward()
        torch.testing.assert_close(
            made.weight.grad.full_tensor(), whole.weight.grad, rtol=1e-12, atol=1e-12
        )
        assert sm.typeof(made.weight.grad) is sm.typeof(made.weight)
        assert sm.typeof(made.state_dict()["weight"]) is sm.typeof(made.weight)

    on_ranks((4,), program)


def test_weights_start_at_multiples_of_128_bytes():
    """Also after a scale of one element, whole and in the piece of each rank: else products on GPUs
    take slow kernels.
    """
    d, seen = 128, []

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.a = nn.Linear(d, d)
            self.b = nn.Linear(d, d)

        def forward(self, x):
            seen.extend([self.a.weight, self.a.bias, self.b.weight])
            return self.b(self.a(x * self.scale))

    def program(mesh):
        made = fully_shard(Scaled().bfloat16(), mesh)
        made(torch.ones(2, d, dtype=torch.bfloat16)).sum().backward()
        return [part for x in made.parameters() if (part := vars(x)["_local"]).numel()]

    parts = [part for found in on_ranks((2,), program) for part in found]
    assert len(seen) == 6
    assert all(x.storage_offset() * x.element_size() % 128 == 0 for x in (*parts, *seen))
