"""On four gloo processes, every program here equals one process or raises the same error on every
rank.

A program is written once. `put(tensor, spec)` lays a tensor out on the mesh; in the single process
it is the tensor itself.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard, ShardedTensor
from tests.device import DEVICE
from tests.sharding.ranks import collectives, launched
from tests.sharding.test_traps import (
    CLASSES,
    INTEGERS,
    LOSSES,
    ONE_NUMBER,
    REDUCTIONS,
    X,
    as_scalars,
)

NESTED, UNEVEN = P(("b", "a")), P("a", "b")
FEW = torch.tensor([[3.0, -2.0], [-7.0, 5.0]], dtype=torch.float64)  # two rows on four ranks
WHOLE = torch.arange(-10, 11).view(7, 3)
WEIGHTS = torch.tensor([0.2, 3.0, 1.1], dtype=torch.float64)
COMPLEX = torch.complex(X, X.flip(1))
ALL_IGNORED_ON_ONE_RANK = torch.tensor([0, 2, -100, -100, 1, 1])


def gradients(func, *leaves):
    """Return a scalar function's value and its gradients."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    value = func(*leaves)
    value.backward()
    return [value, *[x.grad for x in leaves]]


def updated(put, spec, update):
    """Return a parameter after a step on a view of it."""
    w = put(X.clone(), spec).requires_grad_()
    with torch.no_grad():
        update(w)
    return [w.detach(), *gradients(lambda w: (w * w).sum(), w)]


def parts(put):
    """Return two parameters with gradients."""
    params = [put(X, UNEVEN).requires_grad_(), put(X[0], P("a")).requires_grad_()]
    for p in params:
        p.grad = p.detach() * 2
    return params


def copied_from(params, vector):
    vector_to_parameters(vector, params)
    return params


def clipped(params, clip):
    total = clip(params)
    return [p.grad for p in params] if total is None else [total, *[p.grad for p in params]]


EQUAL = {
    # -- reductions where some rank has nothing
    "extremes": lambda put: [
        f(put(FEW, spec))
        for spec in (NESTED, P("a"), P(None, ("a", "b")))
        for f in (
            torch.amax,
            torch.max,
            torch.min,
            lambda x: x.amin(0),
            lambda x: x.max(0),
            lambda x: x.min(1),
        )
    ],
    "arguments of extremes": lambda put: [
        put(FEW, NESTED).argmax(),
        put(FEW, NESTED).argmin(0),
        *put(FEW, NESTED).aminmax(),
    ],
    "infinity norms": lambda put: [
        torch.linalg.vector_norm(put(FEW, spec), order, dim)
        for spec in (NESTED, P(None, "b"))
        for order in (math.inf, -math.inf)
        for dim in (None, 0, 1)
    ],
    "gradients of extremes": lambda put: [
        g
        for f in (torch.amax, torch.max, lambda x: x.norm(p=math.inf))
        for g in gradients(lambda x, f=f: f(x), put(FEW, NESTED))
    ],
    "statistics of half precision": lambda put: [
        f(put(X.bfloat16() * 300, UNEVEN)).float().round(decimals=-1)
        for f in (torch.mean, torch.var, torch.std, torch.linalg.norm)
    ],
    # -- mean losses
    "cross entropy, a rank all ignored": lambda put: gradients(
        lambda x: F.cross_entropy(x, put(ALL_IGNORED_ON_ONE_RANK, P("a"))),
        put(torch.cat([X, X[:1]]), P("a")),
    ),
    "cross entropy, another number ignored": lambda put: gradients(
        lambda x: F.cross_entropy(x, put(CLASSES.clamp_min(0), P("a")), ignore_index=1),
        put(X, P("a")),
    ),
    "cross entropy, weights": lambda put: [
        g
        for kind in ("mean", "sum")
        for g in gradients(
            lambda x, kind=kind: F.cross_entropy(
                x, put(CLASSES, NESTED), put(WEIGHTS, P()), reduction=kind
            ),
            put(X, NESTED),
        )
    ],
    "cross entropy, classes split": lambda put: gradients(
        lambda x: F.cross_entropy(x, put(CLASSES, P())), put(X, P(None, "a"))
    ),
    # -- whole numbers
    "shifts": lambda put: [
        y
        for spec in (NESTED, UNEVEN, P())
        for y in (
            1 << put(WHOLE.abs(), spec),
            put(WHOLE, spec) >> 1,
            put(WHOLE, spec) << 2,
            1024 >> put(WHOLE.abs(), spec),
            put(WHOLE, spec) & 6,
            put(WHOLE, spec) | 1,
            put(WHOLE, spec) ^ 3,
            ~put(WHOLE, spec),
            5 & put(WHOLE, spec),
        )
    ],
    "integer division": lambda put: [
        y
        for spec in (NESTED, UNEVEN)
        for x in [put(WHOLE, spec)]
        for y in (x // 4, x % 4, -x % 4, x.fmod(4), 7 - x)
    ],
    "sums of whole numbers": lambda put: [
        y
        for spec in (NESTED, UNEVEN)
        for y in (
            put(WHOLE, spec).sum(),
            put(WHOLE.int(), spec).sum(0),
            put(WHOLE > 0, spec).sum(1),
            put(WHOLE, spec).double().mean(),
            put(WHOLE, spec).mean(dtype=torch.float64),
            put(WHOLE, spec).prod(0),
            put(WHOLE, spec).count_nonzero(),
        )
    ],
    # -- layouts
    "nested uneven": lambda put: [
        put(torch.arange(91.0).view(13, 7), spec) for spec in (NESTED, P(None, ("a", "b")), UNEVEN)
    ],
    "of no dims": lambda put: [
        f(put(torch.tensor(2.5), P()))
        for f in (torch.exp, torch.sum, lambda x: x * x, torch.mean, torch.linalg.norm)
    ],
    "of no elements": lambda put: [
        f(put(torch.zeros(0, 3), spec))
        for spec in (NESTED, UNEVEN)
        for f in (
            torch.sum,
            lambda x: x.sum(0),
            lambda x: x.sum(1),
            lambda x: x @ x.T,
            lambda x: torch.cat([x, x]),
            torch.mean,
        )
    ],
    "complex": lambda put: [
        y
        for spec in (NESTED, UNEVEN)
        for x in [put(COMPLEX, spec)]
        for y in (
            x.sum(0),
            x.abs().max(),
            x @ x.mH,
            x.conj().imag,
            x.mean(),
            x.angle(),
            torch.linalg.vector_norm(x),
            x.var(),
        )
    ],
    "orders of norms, one after the other": lambda put: [
        f(put(X, spec), order)
        for spec in (UNEVEN, NESTED)
        for order in (1.0, 2.0, math.inf, -math.inf, 3.5)
        for f in (torch.linalg.vector_norm, torch.norm, lambda x, p: torch.dist(x, x * 2, p))
    ],
    "orders of matrix norms, one after the other": lambda put: [
        f(put(X, spec), order)
        for spec in (UNEVEN, NESTED)
        for order in (1.0, 2.0, math.inf, -math.inf, -1.0, -2.0)
        for f in (torch.linalg.matrix_norm, torch.linalg.norm)
    ],
    "corrections, one after the other": lambda put: [
        torch.var(put(X, UNEVEN), correction=correction) for correction in (0.5, 1.5, 2.0)
    ],
    "gradients of complex": lambda put: gradients(
        lambda x: (x * x.conj()).real.sum() + (x @ x.mH).abs().sum(), put(COMPLEX, UNEVEN)
    ),
    # -- operators that need neighbours or other ranks' numbers
    "convolution": lambda put: [
        g
        for spec in (P("a"), P(None, "a"), P(None, None, "a"), P("b", None, None, "a"))
        for g in gradients(
            lambda x, w: F.conv2d(x, w, padding=1, stride=2).square().sum(),
            put(torch.arange(240.0, dtype=torch.float64).view(3, 4, 5, 4).sin(), spec),
            put(
                torch.arange(216.0, dtype=torch.float64).view(6, 4, 3, 3).cos(),
                P("b") if spec == P("a") else P(),
            ),
        )
    ],
    "shapes that depend on values": lambda put: [
        y
        for spec in (NESTED, UNEVEN)
        for x in [put(WHOLE % 4, spec)]
        for y in (
            x.nonzero(),
            x[x > 1],
            torch.unique(x),
            torch.masked_select(x, x == 3),
            torch.where(x > 2)[0],
            x.flatten().bincount(),
            torch.unique(x, return_counts=True)[1],
        )
    ],
    # -- memory
    "a row of a parameter": lambda put: updated(put, P(None, "a"), lambda w: w[1].mul_(3)),
    "rows of a parameter": lambda put: updated(put, P("b", "a"), lambda w: w.t().add_(1)),
    "a flat parameter": lambda put: updated(put, P(), lambda w: w.view(-1).sub_(2)),
    "a detached parameter": lambda put: updated(put, UNEVEN, lambda w: w.detach().copy_(w * 2)),
    "the data of a parameter": lambda put: updated(put, UNEVEN, lambda w: w.data.mul_(0.5)),
    "not contiguous": lambda put: [
        y
        for spec in (P("a"), P(None, "a"), NESTED)
        for x in [put(X.t().contiguous(), spec).t()]
        for y in (
            x.sum(0),
            x.contiguous() * 2,
            x @ x.t(),
            x.reshape(-1),
            x.full_tensor() if isinstance(x, ShardedTensor) else x,
        )
    ],
    "out": lambda put: [
        torch.add(put(X, P("a")), 1, out=put(torch.zeros_like(X), P(None, "a"))),
        torch.mm(put(X, P("a")), put(X.T, P(None, "b")), out=put(X.new_zeros(5, 5), P())),
        torch.sum(put(X, UNEVEN), 0, out=put(X.new_zeros(3), P("a"))),
    ],
    # -- torch's own helpers
    "a vector of parameters": lambda put: [
        parameters_to_vector(parts(put)),
        *copied_from(parts(put), put(torch.arange(18.0, dtype=torch.float64), P("a"))),
    ],
    "clipping": lambda put: [
        y
        for clip in (
            lambda ps: clip_grad_norm_(ps, 0.5),
            lambda ps: clip_grad_norm_(ps, 0.5, norm_type=math.inf, foreach=False),
            lambda ps: clip_grad_value_(ps, 0.3),
            lambda ps: clip_grads_with_norm_(ps, 0.1, get_total_norm([p.grad for p in ps])),
        )
        for y in clipped(parts(put), clip)
    ],
    "8 bits": lambda put: [
        y.float() if isinstance(y, torch.Tensor) else y
        for spec in (NESTED, UNEVEN, P())
        for x in [put(X.to(torch.float8_e4m3fn), spec)]
        for y in (
            x.clone(),
            x.view(15),
            x.t(),
            torch.cat([x, x]),
            x.to(torch.bfloat16),
            x[1],
            x[:, 1:],
            x.detach(),
            x.reshape(3, 5),
            x.contiguous(),
            x.float().sum(),
            torch.stack([x, x]),
        )
    ],
}


def plain(x):
    """Return a result as in one process."""
    if isinstance(x, ShardedTensor):
        return x.detach().full_tensor()
    if isinstance(x, (tuple, list)):
        return [plain(y) for y in x]
    return x.detach() if isinstance(x, torch.Tensor) else x


def _on_four(name):
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    return plain(EQUAL[name](lambda t, spec: sm.device_put(t, mesh, spec, src_data_rank=None)))


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:.*no sharding rule")
@pytest.mark.parametrize("name", EQUAL)
def test_equal_to_one_process(world4, name):
    expected = plain(EQUAL[name](lambda t, spec: t.clone()))
    for results in world4(_on_four, name):
        assert len(results) == len(expected)
        for got, want in zip(results, expected, strict=True):
            exact = isinstance(want, torch.Tensor) and want.dtype in (
                torch.float64,
                torch.complex128,
            )
            torch.testing.assert_close(
                got, want, equal_nan=True, **({"rtol": 1e-9, "atol": 1e-9} if exact else {})
            )


# -- numbers, losses and reductions of the table of traps ------------------------------------------


LAYOUTS = (
    "pending sum",
    "pending avg",
    "pending max",
    "pending min",
    "pending product",
    "replicated",
    "one element, sharded",
)


def _traps() -> dict[str, object]:
    """Return the results of every entry of `test_traps`' tables on this rank."""
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
    found = {}
    for layout, x in as_scalars(mesh).items():
        found |= {
            f"{ask} {layout}": ONE_NUMBER[ask](x.reshape(()))
            for ask in ONE_NUMBER
            if ask != "torch.tensor"
        }
    for name, loss in LOSSES.items():
        found[name] = loss(
            *[sm.device_put(t, mesh, P("a")) for t in (X, X.flip(0), CLASSES)]
        ).item()
    for name, reduce in REDUCTIONS.items():
        found[f"{name} of whole numbers"] = reduce(sm.device_put(INTEGERS, mesh, P("a"))).tolist()
    return found


@pytest.mark.filterwarnings("ignore:.*no sharding rule")
def test_traps_on_real_processes(world4):
    ranks = world4(_traps)
    for name, number in ranks[0].items():
        assert all(found[name] == number for found in ranks), name
    number = torch.tensor(45.0, dtype=torch.float64)
    expected = {name: loss(X, X.flip(0), CLASSES).item() for name, loss in LOSSES.items()}
    expected |= {
        f"{name} of whole numbers": reduce(INTEGERS).tolist() for name, reduce in REDUCTIONS.items()
    }
    for name, want in expected.items():
        assert ranks[0][name] == pytest.approx(want, rel=1e-12), name
    for ask in ("item", "float", "int", "tolist", "numpy"):
        found = [ranks[0][f"{ask} {layout}"] for layout in LAYOUTS]
        assert found == pytest.approx([ONE_NUMBER[ask](number)] * 7, rel=1e-12)


# -- numbers that are drawn ------------------------------------------------------------------------

DRAWN = {
    "dropout": lambda x: F.dropout(x + 1, 0.4, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
}


def _drawn(name: str, mesh_shape: tuple[int, ...], spec: P) -> torch.Tensor:
    mesh = sm.init_device_mesh(DEVICE, mesh_shape, axis_names=("a", "b")[: len(mesh_shape)])
    sm.random.manual_seed(7)
    torch.manual_seed(mesh.world.rank)
    return DRAWN[name](sm.device_put(torch.zeros(7, 6), mesh, spec)).full_tensor()


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_numbers_are_the_same_on_any_mesh(world4, name):
    layouts = ((4,), P("a")), ((2, 2), NESTED), ((2, 2), UNEVEN), ((4,), P())
    first, *others = [
        drawn for shape, spec in layouts for drawn in world4(_drawn, name, shape, spec)
    ]
    assert len(first.unique()) > 1
    assert all(torch.equal(first, other) for other in others)


# -- loud ------------------------------------------------------------------------------------------


def _x(mesh, spec=None):
    return sm.device_put(X, mesh, P("a") if spec is None else spec, src_data_rank=None)


def _into_a_view(x, part=slice(None)):
    """Write to a view without gradients, as optimizers do."""
    with torch.no_grad():
        x.view(-1)[part].add_(1)


LOUD = {
    "an integer mean": (lambda mesh: _x(mesh).long().mean(), RuntimeError, "floating"),
    "an integer mean over a dim": (lambda mesh: _x(mesh).long().mean(0), RuntimeError, "floating"),
    "an integer norm": (
        lambda mesh: torch.linalg.vector_norm(_x(mesh).long()),
        RuntimeError,
        "floating",
    ),
    "an integer deviation": (lambda mesh: _x(mesh).long().std(), RuntimeError, "floating"),
    "the truth of many": (lambda mesh: bool(_x(mesh) > 0), RuntimeError, "ambiguous"),
    "an item of many": (lambda mesh: _x(mesh).item(), RuntimeError, "15 elements"),
    "two meshes": (
        lambda mesh: _x(mesh) + _x(sm.init_device_mesh(DEVICE, (4,), axis_names=("c",)), P("c")),
        ValueError,
        "two meshes",
    ),
    "a plain tensor": (lambda mesh: _x(mesh) + X, RuntimeError, "distribute_tensor"),
    "growing in place": (lambda mesh: _x(mesh, P())[0].add_(_x(mesh)), RuntimeError, "shape"),
    "exp_ of a pending sum": (
        lambda mesh: sm.from_local(X, mesh, [Partial(), Partial()]).exp_(),
        ValueError,
        "redistribute it first",
    ),
    "abs_ beside another layout": (
        lambda mesh: sm.from_local(X, mesh, [Partial(), Replicate()]).abs_(),
        ValueError,
        "redistribute it first",
    ),
    "sorting in place": (
        lambda mesh: _x(mesh).resize_(3),
        NotImplementedError,
        "works on the memory of a tensor",
    ),
    "a pointer": (lambda mesh: _x(mesh).data_ptr(), RuntimeError, "to_local"),
    "a constant pointer": (lambda mesh: _x(mesh).const_data_ptr(), NotImplementedError, "to_local"),
    "out beside gradients": (
        lambda mesh: torch.add(_x(mesh).requires_grad_(), 1, out=_x(mesh)),
        RuntimeError,
        "out= has no gradient",
    ),
    "float8 arithmetic": (lambda mesh: _x(mesh).to(torch.float8_e4m3fn) + 1, Exception, "Float8"),
    "numpy beside gradients": (
        lambda mesh: np.asarray(_x(mesh).requires_grad_()),
        RuntimeError,
        "detach",
    ),
}


def _text(name: str) -> str:
    """Return the text of the error and the number of collectives before it."""
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    program, kind, _ = LOUD[name]
    with collectives() as records, pytest.raises(kind) as caught:
        program(mesh)
    return f"{caught.value} {launched(records)}"


@pytest.mark.parametrize("name", LOUD)
def test_the_same_error_everywhere_before_anything_is_sent(world4, name):
    first, *others = world4(_text, name)
    assert LOUD[name][2] in first
    assert first.endswith(" []")
    assert all(text == first for text in others)


LOUD_ONCE_MOVED = {
    "a view that had to be moved": (
        lambda mesh: _into_a_view(_x(mesh, UNEVEN)),
        RuntimeError,
        "base would not change",
    ),
    "a view of such a view": (
        lambda mesh: _into_a_view(_x(mesh, UNEVEN), slice(2, 9)),
        RuntimeError,
        "base would not change",
    ),
    "an out of another shape": (
        lambda mesh: torch.add(_x(mesh), 1, out=_x(mesh)[0]),
        NotImplementedError,
        "out=",
    ),
}


def _text_once_moved(name: str) -> str:
    program, kind, _ = LOUD_ONCE_MOVED[name]
    with pytest.raises(kind) as caught:
        program(sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b")))
    return str(caught.value)


@pytest.mark.parametrize("name", LOUD_ONCE_MOVED)
def test_the_same_error_everywhere(world4, name):
    (text,) = set(world4(_text_once_moved, name))
    assert LOUD_ONCE_MOVED[name][2] in text


def _parts_of_different_sizes() -> str:
    """Return 1, 2, 3 and 4 rows on four ranks, declared as evenly sharded."""
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
    with pytest.raises(ValueError, match="sizes") as caught:
        ShardedTensor.from_local(torch.zeros(mesh.world.rank + 1, 2), mesh, [Shard(0)])
    return str(caught.value)


def test_parts_of_different_sizes_raise_on_every_rank(world4):
    assert len(set(world4(_parts_of_different_sizes))) == 1


def _used_differently() -> str:
    """Return the local part of a replicated tensor times the rank."""
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
    x = sm.device_put(X, mesh).requires_grad_()
    with pytest.raises(RuntimeError) as caught:
        (x.to_local() * mesh.world.rank).sum().backward()
    y = sm.device_put(X, mesh).requires_grad_()
    (y.to_local(grad_placements=[Partial()]) * mesh.world.rank).sum().backward()
    assert torch.equal(y.grad.full_tensor(), torch.full_like(X, 6))
    return str(caught.value)


def test_replicated_part_used_differently_raises(world4):
    """Or its gradient is summed, if the program declares that it differs."""
    texts = world4(_used_differently)
    assert len(set(texts)) == 1
    assert "Partial" in texts[0]


def _grown(mesh):
    parameter = torch.nn.Parameter(sm.ones(4, 3, device_mesh=mesh, placements=[Shard(0)]))
    (parameter * 3).sum().backward()
    return parameter


def _scales_by_a_number_on_the_device_of_results(mesh):
    grads = [_grown(mesh).grad * 2]
    ((device, _),) = torch._C._group_tensors_by_device_and_dtype([grads], False)
    torch._foreach_mul_(grads, torch.tensor(0.5).to(device))


def test_numbers_that_torch_puts_on_meta_raise():
    def program():
        with pytest.raises(
            RuntimeError,
            match=(
                r"plain tensor on 'meta'.* use sm.training.clip_grad_norm_ or "
                r"sm.training.GradScaler"
            ),
        ):
            _scales_by_a_number_on_the_device_of_results(
                sm.init_device_mesh(DEVICE, (2,), axis_names=("x",))
            )

    sm.simulate(2)(program)()
