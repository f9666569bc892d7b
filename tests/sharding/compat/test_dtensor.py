"""The names of `torch.distributed.tensor`: one program, run with torch's and with ours."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import Partial, Replicate, Shard
from shardmesh.parallel import distribute_module
from shardmesh.sharding.ops.rules.registry import DECOMPOSITIONS, HANDLERS
from tests.device import DEVICE
from tests.docs.pages import DOCS, check_python_examples
from tests.sharding.compat import dtensor_program
from tests.sharding.compat.dtensor_program import numbers
from tests.sharding.ranks import every_rank, on_mesh, place, same_error

PAGE = (DOCS / "from_dtensor.md").read_text()


def _on_both(part: str) -> tuple[Any, Any]:
    program = getattr(dtensor_program, part)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about its own experimental parts
        theirs = program(dtensor_program.torch_api())
    return theirs, program(sm.compat)


def _check_same(ours: Any, theirs: Any, at: str = "") -> None:
    """Assert equal structures with equal values; tensors and floats up to float64 rounding."""
    if isinstance(theirs, torch.Tensor | float):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-12, atol=1e-12, msg=lambda text: f"{at}: {text}"
        )
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), at
        for key, value in theirs.items():
            _check_same(ours[key], value, f"{at}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), at
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            _check_same(a, b, f"{at}[{i}]")
    else:
        assert ours == theirs, f"{at}: {ours} {theirs}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", [part.__name__ for part in dtensor_program.PARTS])
def test_the_same_program_gives_the_same_results(world4, part):
    for theirs, ours in world4(_on_both, part):
        _check_same(ours, theirs)


# -- where ours differs ----------------------------------------------------------------------------

DIFFERENCES: dict[str, Callable[[sm.DeviceMesh], None]] = {}


def difference(
    title: str,
) -> Callable[[Callable[[sm.DeviceMesh], None]], Callable[[sm.DeviceMesh], None]]:
    """Register the test of a row of docs/from_dtensor.md: `test(mesh)` runs on a mesh of four
    ranks.
    """

    def register(test: Callable[[sm.DeviceMesh], None]) -> Callable[[sm.DeviceMesh], None]:
        DIFFERENCES[title] = test
        return test

    return register


def _same(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(
        ours.full_tensor() if isinstance(ours, sm.ShardedTensor) else ours, expected
    )


@difference("`item()`, `float()`, f-strings of a pending value")
def _(mesh):
    x = sm.compat.DTensor.from_local(torch.ones(()), mesh, [Partial()])
    assert (x.item(), float(x), f"{x:.1f}") == (4, 4, "4.0")


@difference("means over uneven parts, as in `mse_loss`")
def _(mesh):
    _same(
        F.mse_loss(
            place(mesh, numbers(5), Shard(0)), place(mesh, torch.zeros(5).double(), Shard(0))
        ),
        numbers(5).square().mean(),
    )


@difference("`cross_entropy` where a rank has only ignored targets")
def _(mesh):
    targets = torch.tensor([-100, 1, 2, -100, -100, -100, 3, 1])
    loss = F.cross_entropy(place(mesh, numbers(8, 5), Shard(0)), place(mesh, targets, Shard(0)))
    _same(loss, F.cross_entropy(numbers(8, 5), targets))


@difference("`conv1d` with split output channels or positions")
def _(mesh):
    x, w = numbers(2, 4, 8), numbers(4, 4, 3, seed=1)
    _same(F.conv1d(place(mesh, x), place(mesh, w, Shard(0))), F.conv1d(x, w))
    _same(F.conv1d(place(mesh, x, Shard(2)), place(mesh, w)), F.conv1d(x, w))


@difference("`amax`, `argmax` with an empty part")
def _(mesh):
    x = place(mesh, numbers(3), Shard(0))
    _same(x.amax(0), numbers(3).amax(0))
    _same(x.argmax(), numbers(3).argmax())


@difference("views over uneven parts")
def _(mesh):
    _same(place(mesh, numbers(6, 4), Shard(0)).view(24), numbers(24))


@difference("`nonzero`, boolean masks")
def _(mesh):
    x = place(mesh, numbers(8), Shard(0))
    _same(x[x > 0], numbers(8)[numbers(8) > 0])
    _same((x > 0).nonzero(), (numbers(8) > 0).nonzero())


@difference("`to_local()` of a replicated value that every rank uses differently")
def _(mesh):
    x, rank = place(mesh, numbers(4), grad=True), mesh.get_rank()
    with pytest.raises(
        RuntimeError, match=r"differ between the replicas.*grad_placements=\[Partial\(\)"
    ):
        (x.to_local() * (rank + 1)).sum().backward()
    (x.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    _same(x.grad, torch.full((4,), 10.0).double())


@difference(
    "`local_map` without `in_grad_placements`, where a replicated argument meets other data on "
    "every rank"
)
def _(mesh):
    for grads in (None, ([Shard(0)], [Partial()])):
        x, w = place(mesh, numbers(8), Shard(0)), place(mesh, numbers(2), grad=True)
        sm.compat.local_map(torch.mul, [Shard(0)], in_grad_placements=grads)(x, w).sum().backward()
        _same(w.grad, numbers(8).view(4, 2).sum(0))


@difference("`local_map` without `out_placements`")
def _(mesh):
    with pytest.raises(ValueError, match="result 0 is a tensor, and its out_placements are None"):
        sm.compat.local_map(torch.neg)(place(mesh, numbers(4)))


@difference("`from_local` of parts of different sizes, without `shape`")
def _(mesh):
    sizes = (2, 2, 1, 0)
    part = numbers(5).split(sizes)[mesh.get_rank()]
    _same(sm.compat.DTensor.from_local(part, mesh, [Shard(0)]), numbers(5))
    other = numbers(5).split((1, 0, 3, 1))[mesh.get_rank()]
    with pytest.raises(ValueError, match=r"write \[Shard\(0, sizes=\(1, 0, 3, 1\)\)\]"):
        sm.compat.DTensor.from_local(other, mesh, [Shard(0)])
    _same(sm.compat.DTensor.from_local(other, mesh, [Shard(0, sizes=(1, 0, 3, 1))]), numbers(5))


@difference("`from_local(run_check=True)`")
def _(mesh):
    rank = mesh.get_rank()
    mine = torch.full((2,), float(rank)).requires_grad_()
    x = sm.compat.DTensor.from_local(mine, mesh, run_check=True)
    assert x.to_local().tolist() == [0, 0]
    assert mine.tolist() == [rank, rank]
    (x * x).sum().backward()
    assert mine.grad is not None
    with pytest.raises(
        ValueError,
        match=(
            r"run_check: by rank .*0: \['f32', 1\].*3: \['f32', 4\].* requires .*3: \['f32', \d\]"
        ),
    ):
        sm.compat.DTensor.from_local(torch.ones(rank + 1), mesh, run_check=True)


@difference("`stride()`, `is_contiguous()`, `from_local(stride=)`")
def _(mesh):
    x = sm.compat.DTensor.from_local(numbers(2, 4), mesh, [Shard(0)], shape=(8, 4), stride=(1, 8))
    assert (x.stride(), x.t().stride(), x.t().is_contiguous()) == ((4, 1), (8, 1), True)
    with pytest.raises(ValueError, match="one stride per dim"):
        sm.compat.DTensor.from_local(numbers(2, 4), mesh, [Shard(0)], stride=(4, 1))


@difference("`rand`, `randn`, `dropout` on a CPU mesh")
def _(mesh):
    sm.random.manual_seed(0)
    split = sm.randn(6, device_mesh=mesh, placements=[Shard(0)])
    whole = sm.randn(6, device_mesh=mesh)
    sm.random.manual_seed(0)
    _same(sm.randn(6, device_mesh=mesh), split.full_tensor())
    assert not torch.equal(split.full_tensor(), whole.full_tensor())


@difference("`ones(placements=[Partial()])` and other pending factories")
def _(mesh):
    with pytest.raises(ValueError, match="a new tensor cannot be pending"):
        sm.ones(2, device_mesh=mesh, placements=[Partial()])


@difference("`.grad` of a replicated parameter")
def _(mesh):
    w = torch.nn.Parameter(place(mesh, numbers(4)))
    (place(mesh, numbers(8, 4), Shard(0)) * w).sum().backward()
    assert w.grad.placements == w.placements == (Replicate(),)


@difference("`redistribute` to `Partial`, to another mesh, without placements")
def _(mesh):
    x = place(mesh, numbers(4))
    other = sm.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("a", "b"))
    pending = x.redistribute(placements=[Partial()])
    assert pending.placements == (Partial(),)
    _same(pending, numbers(4))
    moved = x.redistribute(other, [Shard(0), Replicate()])
    assert moved.device_mesh is other
    _same(moved, numbers(4))
    assert x.redistribute() is x


@difference("`redistribute(async_op=True)`")
def _(mesh):
    coming = place(mesh, numbers(4), Shard(0)).redistribute(placements=[Replicate()], async_op=True)
    assert not isinstance(coming, sm.compat.DTensor)
    _same(coming.wait(), numbers(4))


@difference("`fill_` of a pending value")
def _(mesh):
    with pytest.raises(ValueError, match="would have to change its layout"):
        sm.compat.DTensor.from_local(torch.ones(3), mesh, [Partial()]).fill_(1.0)


@difference("a plain tensor of one element that requires grad, as an operand next to a sharded one")
def _(mesh):
    with pytest.raises(RuntimeError, match="mixes a plain tensor"):
        place(mesh, numbers(5), Shard(0)) * torch.ones(1, requires_grad=True)


@difference("`init_device_mesh` over fewer ranks than there are")
def _(mesh):
    with pytest.raises(RuntimeError, match=r"needs 2 ranks, but the world has 4.*DeviceMesh\("):
        sm.init_device_mesh(DEVICE, (2,))
    assert sm.DeviceMesh(DEVICE, [0, 1]).size() == 2


@difference("`distribute_tensor` of a tensor that is sharded")
def _(mesh):
    assert sm.distribute_tensor(
        place(mesh, numbers(4), Shard(0)), mesh, [Replicate()]
    ).placements == (Replicate(),)


@difference("`distribute_module` twice on one module")
def _(mesh):
    module = distribute_module(distribute_module(torch.nn.Linear(2, 2), mesh), mesh)
    assert module.weight.placements == (Replicate(),)


@difference("`tolist()`, `numpy()`")
def _(mesh):
    x = place(mesh, numbers(5), Shard(0))
    assert x.tolist() == x.numpy().tolist() == numbers(5).tolist()


@difference("`data_ptr()`")
def _(mesh):
    with pytest.raises(RuntimeError, match="not one block of memory"):
        place(mesh, numbers(5)).data_ptr()


@difference("the device that C++ sees")
def _(mesh):
    p = torch.nn.Parameter(place(mesh, numbers(5)))
    (p * p).sum().backward()
    for x, device in ((p, DEVICE), (p.grad, DEVICE), (p.detach() * 2, "meta")):
        ((seen, _),) = torch._C._group_tensors_by_device_and_dtype([[x]], False)
        assert seen.type == device
    with pytest.raises(RuntimeError, match="can't use the foreach API on meta tensors"):
        torch.nn.utils.get_total_norm([p.detach() * 2], foreach=True)


@difference("`repr`")
def _(mesh):
    assert repr(place(mesh, numbers(4), Shard(0))).startswith(
        "ShardedTensor(f64[4] @ P('a') on (a=4), local [1],\ntensor("
    )


@difference("`torch.func.grad`")
def _(mesh):
    x = place(mesh, numbers(4), Shard(0))
    _same(torch.func.grad(lambda x: (x * x).sum())(x), 2 * numbers(4))
    _same(sm.grad(lambda x: (x * x).sum())(x), 2 * numbers(4))


@difference("`mesh_dim_names`, `get_coordinate()`")
def _(mesh):
    plain = sm.init_device_mesh(DEVICE, (2, 2))
    assert plain.mesh_dim_names == ("axis_0", "axis_1")
    assert plain.get_coordinate() == list(plain.coordinate)


@difference("`get_local_rank()` where the ranks of a mesh are not ascending")
def _(mesh):
    turned = sm.DeviceMesh(DEVICE, [3, 1, 2, 0])
    assert (
        turned.get_local_rank() == turned.get_coordinate()[0] == [3, 1, 2, 0].index(mesh.get_rank())
    )


@difference("`CommDebugMode`")
def _(mesh):
    mode = sm.compat.CommDebugMode()
    for _ in range(2):
        with mode:
            place(mesh, numbers(8), Shard(0)).redistribute(placements=[Replicate()])
        assert (mode.get_comm_counts(), mode.get_total_counts()) == ({"all_gather": 1}, 1)
        assert mode.get_comm_counts()["all_gather_into_tensor"] == 1
        assert mode.get_comm_counts()[torch.ops.c10d._allgather_base_] == 1
        assert mode.get_comm_counts()["all_reduce"] == 0
    place(mesh, numbers(8), Shard(0)).full_tensor()
    assert mode.get_total_counts() == 1
    assert repr(mode) == "CommDebugMode({'all_gather': 1})"


@difference("`visualize_sharding`")
def _(mesh):
    x = place(mesh, numbers(8, 2, 2), Shard(0))
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        sm.compat.visualize_sharding(x, header="x", use_rich=True)
        sm.compat.visualize_sharding(x[:0])
    if mesh.get_rank() == 0:
        assert shown.getvalue() == f"x\n{sm.debug.visualize(x)}\n"


@difference("`register_sharding`")
def _(mesh):
    op = torch.ops.test_compat.roll_rows
    x = place(mesh, numbers(5, 8), Shard(1), grad=True)
    out = op(x, place(mesh, numbers(8, seed=1), Shard(0)), 2)
    assert out.placements == (Shard(1),)
    expected = numbers(5, 8).requires_grad_()
    whole = roll_rows(expected, numbers(8, seed=1), 2)
    _same(out, whole)
    (out * out).sum().backward()
    (whole * whole).sum().backward()
    _same(x.grad, expected.grad)


@torch.library.custom_op("test_compat::roll_rows", mutates_args=())
def roll_rows(x: torch.Tensor, w: torch.Tensor, by: int) -> torch.Tensor:
    return x.roll(by, 0) * w


roll_rows.register_fake(lambda x, w, by: torch.empty_like(x))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.by = inputs[2]


roll_rows.register_autograd(
    lambda ctx, g: ((g * ctx.saved_tensors[0]).roll(-ctx.by, 0), None, None), setup_context=_save
)


@sm.compat.register_sharding(torch.ops.test_compat.roll_rows)
def _roll_rows(x, w, by):
    assert (x.mesh, len(x.placements)) == (w.mesh, x.mesh.ndim)
    return [
        ([Replicate()], [Replicate(), Replicate(), None]),
        ([Shard(1)], [Shard(-1), Shard(0), None]),
        ([Partial()], [Partial(), Replicate(), None]),
    ]


@pytest.mark.parametrize("title", DIFFERENCES)
def test_difference(title):
    on_mesh((4,), DIFFERENCES[title])


def test_the_page_has_a_row_for_each_difference_and_no_other():
    rows = re.findall(
        r"^\| (.+?) \|", PAGE.split("## What differs")[1].split("\n## ")[0], re.MULTILINE
    )
    assert [row for row in rows if row != "what" and set(row) != {"-"}] == list(DIFFERENCES)


def _their_surprises() -> dict[str, Any]:
    """Return torch's results for the page's statements that neither hang nor need a GPU."""
    api, rank = dtensor_program.torch_api(), torch.distributed.get_rank()
    mesh = api.init_device_mesh(DEVICE, (4,))

    def put(x, *where):
        return api.distribute_tensor(x, mesh, list(where))

    x = put(numbers(4), api.Replicate()).requires_grad_()
    (x.to_local() * (rank + 1)).sum().backward()
    mine = torch.full((2,), float(rank))
    api.DTensor.from_local(mine, mesh, run_check=True)
    w = torch.nn.Parameter(put(numbers(4), api.Replicate()))
    (put(numbers(8, 4), api.Shard(0)) * w).sum().backward()
    conv = F.conv1d(
        put(numbers(2, 4, 8), api.Replicate()), put(numbers(4, 4, 3, seed=1), api.Shard(0))
    )
    targets = torch.tensor([-100, 1, 2, -100, -100, -100, 3, 1])
    return {
        "item": api.DTensor.from_local(torch.ones(()), mesh, [api.Partial()]).item() == 1,
        "mse": bool(
            F.mse_loss(put(numbers(6), api.Shard(0)), put(numbers(6) * 0, api.Shard(0)))
            .full_tensor()
            .isnan()
        ),
        "ignored": bool(
            F.cross_entropy(put(numbers(8, 5), api.Shard(0)), put(targets, api.Shard(0)))
            .full_tensor()
            .isnan()
        ),
        "conv": not torch.allclose(
            conv.full_tensor(), F.conv1d(numbers(2, 4, 8), numbers(4, 4, 3, seed=1))
        ),
        "to_local": x.grad.to_local()[0].item() == rank + 1,
        "sizes": api.DTensor.from_local(torch.ones(rank + 1), mesh, [api.Shard(0)]).shape
        == (4 * (rank + 1),),
        "run_check": mine.tolist() == [0, 0],
        "ones": api.ones(2, device_mesh=mesh, placements=[api.Partial()]).full_tensor().tolist()
        == [4, 4],
        "grad": w.grad.placements == (api.Partial(),),
        "data_ptr": x.data_ptr() == 0,
        "get_local_rank": api.DeviceMesh(DEVICE, [3, 1, 2, 0]).get_local_rank() == rank,
    }


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the page speaks of torch 2.13"
)
def test_documented_behavior_of_torch(world4):
    for found in world4(_their_surprises):
        assert [name for name, true in found.items() if not true] == []


# -- local_map -------------------------------------------------------------------------------------


@every_rank(2, 2)
def test_local_map_over_uneven_and_empty_parts(mesh):
    x = place(mesh, numbers(3, 5), Shard(0), Shard(0), grad=True)
    out = sm.compat.local_map(
        lambda t: (t * t, t.sum(0)), ([Shard(0), Shard(0)], [Partial(), Partial()])
    )(x)
    _same(out[0], numbers(3, 5) ** 2)
    _same(out[1], numbers(3, 5).sum(0))
    (out[0].sum() + (out[1] * out[1]).sum()).backward()
    _same(x.grad, 2 * numbers(3, 5) + 2 * numbers(3, 5).sum(0))


@every_rank(4)
def test_local_map_takes_trees_keywords_and_specs(mesh):
    x = place(mesh, numbers(8), Shard(0))

    @sm.compat.local_map(out_placements=sm.P("a"), in_placements=(None, sm.P("a"), None))
    def f(scale, tree, *, shift):
        assert type(tree["x"]) is torch.Tensor
        return tree["x"] * scale + shift + len(tree["note"])

    assert f.__name__ == "f"
    _same(f(2, {"x": x, "note": "ab"}, shift=1), numbers(8) * 2 + 3)


@every_rank(4)
def test_invalid_placements_of_local_map_raise(mesh):
    x = place(mesh, numbers(8), Shard(0))
    here = [Shard(0)]
    for words, call in {
        "2 in_placements for 1 flattened": lambda: sm.compat.local_map(
            torch.neg, here, (here, here)
        )(x),
        "argument 0 is laid out as .* require .*redistribute_inputs=True": (
            lambda: sm.compat.local_map(torch.neg, here, ([Replicate()],))(x)
        ),
        "argument 0 is sharded": lambda: sm.compat.local_map(torch.neg, here, (None,))(x),
        "argument 1 is 3, not a tensor": lambda: sm.compat.local_map(torch.mul, here, (here, here))(
            x, 3
        ),
        "1 out_placements for 2 flattened": lambda: sm.compat.local_map(lambda t: (t, t), here)(x),
        "result 1 is 5, and": lambda: sm.compat.local_map(lambda t: (t, 5), (here, here))(x),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="result 0 is a ShardedTensor"):
        sm.compat.local_map(lambda t: x, here)(x)


@every_rank(3)
def test_local_map_outside_the_mesh(mesh):
    pair = sm.DeviceMesh(DEVICE, [0, 1])
    x = place(pair, numbers(8), Shard(0))
    if pair.coordinate is None:
        with pytest.raises(RuntimeError, match="rank 2 is not in"):
            sm.compat.local_map(torch.neg, [Shard(0)])(x)
    else:
        _same(sm.compat.local_map(torch.neg, [Shard(0)])(x), -numbers(8))


# -- register_sharding -----------------------------------------------------------------------------


@pytest.fixture
def tables():
    """The operator tables, as they are again after the test."""
    before = dict(DECOMPOSITIONS), dict(HANDLERS)
    yield
    for table, old in zip((DECOMPOSITIONS, HANDLERS), before, strict=True):
        table.clear()
        table.update(old)


def _placed() -> list[list[sm.Placement]]:
    """Return layouts of a matrix on two axes."""
    return [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Replicate(), Partial()],
        [Replicate(), Replicate()],
        [Shard(1), Partial("max")],
    ]


def test_an_overload_of_aten_stands_for_the_public_functions(tables):
    @sm.compat.register_sharding(torch.ops.aten._softmax.default)
    def softmax(x, dim, half_to_float):
        assert half_to_float is False
        split = [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim % x.ndim]
        return [([Replicate()], [Replicate(), None, None]), *split]

    def rank(mesh):
        for where in _placed():
            x = place(mesh, numbers(5, 6), *where, grad=True)
            whole = x.full_tensor().detach()
            calls = [
                x.softmax(-1),
                torch.softmax(x, dim=1),
                F.softmax(x, 1),
                F.softmax(input=x, dim=1),
                torch.nn.Softmax(-1)(x),
            ]
            for out in calls:
                assert Shard(1) not in out.placements
                _same(out, whole.softmax(1))
            (calls[0] ** 2).sum().backward()

    on_mesh((2, 2), rank)


def test_the_cheapest_accepted_sharding(tables):
    @sm.compat.register_sharding([torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor])
    def add(a, b, alpha):
        split = [([Shard(d)], [Shard(d), Shard(d)]) for d in range(a.ndim)]
        return [
            ([Replicate()], [Replicate(), Replicate()]),
            *split,
            ([Partial()], [Partial(), Partial()]),
        ]

    def rank(mesh):
        x = place(mesh, numbers(4, 6), Shard(0), Partial())
        y = place(mesh, numbers(4, 6), Shard(0), Partial())
        with sm.debug.comm_budget(bytes=0):
            assert (x + y).placements == torch.add(x, other=y).placements == (Shard(0), Partial())
            x += y
        _same(x, 2 * numbers(4, 6))
        z = place(mesh, numbers(4, 6), Replicate(), Shard(1))
        _same(z + y, 2 * numbers(4, 6))
        assert z.add_(y) is z
        _same(z, 2 * numbers(4, 6))
        with pytest.raises(ValueError, match="no accepted sharding leaves that as it is"):
            place(mesh, numbers(4, 6), Shard(0), Partial("max")).add_(y)

    on_mesh((2, 2), rank)


@every_rank(3)
def test_registered_operators_outside_the_mesh(mesh):
    """A rank outside has no part, and walks the same graph."""
    pair = sm.DeviceMesh(DEVICE, [0, 1])
    x = place(pair, numbers(5, 4), Shard(0), grad=True)
    out = torch.ops.test_compat.roll_rows.default(
        x, place(pair, numbers(4, seed=1)), 2
    ).redistribute(mesh, [Shard(0)])
    (out * out).sum().backward()
    _same(out, roll_rows(numbers(5, 4), numbers(4, seed=1), 2))
    if pair.coordinate is not None:
        assert x.grad.placements == (Shard(0),)
        _same(x.grad, 2 * numbers(5, 4) * numbers(4, seed=1) ** 2)


def test_invalid_pairs_raise(tables):
    @sm.compat.register_sharding(torch.erf)
    def erf(x):
        return {
            1: [([Replicate()], [])],
            2: [([Shard(5)], [Shard(0)])],
            3: [([Partial()], [Partial()])],
        }[x.ndim]

    for ndim, words in {
        1: "1 results and 1 tensors",
        2: "expected Shard of one of 2 dims",
        3: "no accepted sharding of erf",
    }.items():
        text = same_error(
            (2,),
            lambda mesh, n=ndim: torch.erf(place(mesh, torch.ones([2] * n), Partial("max"))),
            ValueError,
        )
        assert words in text
    with pytest.raises(ValueError, match="no public function of torch has this name"):
        sm.compat.register_sharding(torch.ops.aten.gelu_backward.default)(erf)


# -- signatures ------------------------------------------------------------------------------------


@every_rank(2, 2)
def test_the_mesh_of_a_with_block(mesh):
    with mesh as current:
        assert current is mesh
        with mesh["a"]:
            assert sm.ones(4).mesh is mesh["a"]
        for x in (
            sm.zeros(4),
            sm.arange(4),
            sm.full((4,), 1),
            sm.device_put(numbers(4)),
            sm.from_local(numbers(4)),
        ):
            assert x.mesh is mesh
        assert distribute_module(torch.nn.Linear(2, 2)).weight.mesh is mesh
    with pytest.raises(TypeError, match="give the mesh"):
        sm.distribute_tensor(numbers(4))


def test_invalid_options_of_factories_raise():
    mesh = on_mesh((1,), lambda mesh: mesh)[0]
    with pytest.raises(ValueError, match="parts of a sharded tensor are strided"):
        sm.ones(4, device_mesh=mesh, layout=torch.sparse_coo)
    assert sm.full((2,), 3, dtype=None, device_mesh=mesh).dtype == torch.int64


@every_rank(2)
def test_a_gradient_history_is_not_lost(mesh):
    x = numbers(4).requires_grad_()
    with pytest.raises(RuntimeError, match="gradient history, which would be lost"):
        sm.distribute_tensor(2 * x, mesh, [Shard(0)])
    assert not sm.distribute_tensor((2 * x).detach(), mesh, [Shard(0)]).requires_grad
    sm.from_local(2 * x, mesh).redistribute([Shard(0)]).sum().backward()
    _same(x.grad, torch.full((4,), 2.0).double())


@every_rank(2)
def test_tensors_are_moved_to_the_device_type_of_the_mesh(mesh):
    elsewhere = sm.init_device_mesh("meta", (2,))
    assert (
        sm.distribute_tensor(
            torch.ones(4, requires_grad=True), elsewhere, [Shard(0)], src_data_rank=None
        )
        .to_local()
        .is_meta
    )
    local = torch.ones(4, requires_grad=True)
    assert sm.from_local(local, elsewhere, shape=(4,)).requires_grad


@every_rank(2)
def test_torchs_own_placements(mesh):
    theirs = importlib.import_module("torch.distributed.tensor")
    x = sm.distribute_tensor(numbers(4, 4), mesh, [theirs.Shard(0)])
    assert x.placements == (Shard(0),)
    assert x.redistribute(placements=[theirs.Partial("max")]).placements == (Partial("max"),)


# -- the page --------------------------------------------------------------------------------------


def test_examples_on_the_page():
    check_python_examples(PAGE)


def test_import_lines_have_the_documented_names():
    """Names that the first table imports are there, in torch and here; and it has all names of
    torch's public list.
    """
    imported = re.findall(r"^\| `from (\S+) import ([\w, ]+)` \|", PAGE, re.MULTILINE)
    assert len(imported) == 8
    for module, names in imported:
        theirs = importlib.import_module(module)
        for name in names.split(", "):
            assert hasattr(theirs, name), name
            assert hasattr(sm.compat, name), name
    for module in re.findall(r"`(torch[\w.]+)`", PAGE.split("whatever module")[1].split("\n\n")[0]):
        theirs = importlib.import_module(module)
        assert any(hasattr(theirs, name) for name in ("Shard", "fully_shard", "ColwiseParallel"))
    listed = {name for _, names in imported for name in names.split(", ")}
    assert set(importlib.import_module("torch.distributed.tensor").__all__) <= listed


def test_missing_names_are_missing():
    rows = PAGE.split("## What is missing")[1].split("## ")[0]
    names = re.findall(r"^\| `(\w+)`", rows, re.MULTILINE)
    assert names
    assert [
        name for name in names if hasattr(sm.compat, name) or hasattr(sm.compat.DTensor, name)
    ] == []
