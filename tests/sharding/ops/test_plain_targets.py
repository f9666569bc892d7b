"""Operators that write the values of sharded tensors into plain ones: values and gradients of one
process, or an error.

The table has all in-place operators of torch that take further tensors; a test compares it with
torch's own list.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import get_testing_overrides

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, distribute_module, fully_shard, parallelize
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh, place, same_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce\\(\\) is in beta"),
]
F64 = torch.float64
SOURCES = {
    "h": torch.linspace(0.3, 1.9, 16, dtype=F64).view(4, 4),
    "v": torch.linspace(-1, 1, 4, dtype=F64),
    "s": torch.tensor(0.7, dtype=F64),
    "b": torch.linspace(-1, 1, 32, dtype=F64).view(2, 4, 4),
    "n": torch.arange(1, 17).view(4, 4),
    "i": torch.tensor([3, 1, 0, 2]),
    "ij": torch.tensor([[3, 1, 0, 2]] * 4).T.contiguous(),
    "m": torch.arange(16).view(4, 4) % 3 == 0,
}
FLOATS = ("h", "v", "s", "b")
TARGETS = {
    "float": torch.linspace(0.2, 0.8, 16, dtype=F64).view(4, 4),
    "int": torch.arange(3, 19).view(4, 4),
    "row": torch.linspace(-1, 1, 4, dtype=F64),
    "batch": torch.linspace(-1, 1, 32, dtype=F64).view(2, 4, 4),
}


def _elementwise(name, *more):
    return lambda t, x: getattr(t, name)(x.h, *more)


WRITES = {
    **{
        name: ("float", _elementwise(name))
        for name in (
            "add_",
            "arctan2_",
            "atan2_",
            "clamp_",
            "clamp_max_",
            "clamp_min_",
            "clip_",
            "copy_",
            "copysign_",
            "div_",
            "divide_",
            "eq_",
            "float_power_",
            "floor_divide_",
            "fmod_",
            "ge_",
            "greater_",
            "greater_equal_",
            "gt_",
            "heaviside_",
            "hypot_",
            "igamma_",
            "igammac_",
            "le_",
            "less_",
            "less_equal_",
            "logical_and_",
            "logical_or_",
            "logical_xor_",
            "lt_",
            "mul_",
            "multiply_",
            "ne_",
            "nextafter_",
            "not_equal_",
            "pow_",
            "remainder_",
            "sub_",
            "subtract_",
            "true_divide_",
            "xlogy_",
            "__iadd__",
            "__ifloordiv__",
            "__imod__",
            "__imul__",
            "__ipow__",
            "__isub__",
            "__itruediv__",
            "__idiv__",
        )
    },
    **{
        name: ("int", lambda t, x, name=name: getattr(t, name)(x.n))
        for name in (
            "bitwise_and_",
            "bitwise_left_shift_",
            "bitwise_or_",
            "bitwise_right_shift_",
            "bitwise_xor_",
            "gcd_",
            "lcm_",
            "__iand__",
            "__ilshift__",
            "__ior__",
            "__irshift__",
            "__ixor__",
        )
    },
    "addbmm_": ("float", lambda t, x: t.addbmm_(x.b, x.b)),
    "addcdiv_": ("float", lambda t, x: t.addcdiv_(x.v, x.h, value=0.5)),
    "addcmul_": ("float", lambda t, x: t.addcmul_(x.v, x.h, value=0.5)),
    "addmm_": ("float", lambda t, x: t.addmm_(x.h, x.h, beta=2)),
    "addmv_": ("row", lambda t, x: t.addmv_(x.h, x.v)),
    "addr_": ("float", lambda t, x: t.addr_(x.v, x.v)),
    "baddbmm_": ("batch", lambda t, x: t.baddbmm_(x.b, x.b)),
    "fill_": ("float", lambda t, x: t[1:3].fill_(x.s)),
    "index_add_": ("float", lambda t, x: t.index_add_(0, x.i, x.h, alpha=2)),
    "index_copy_": ("float", lambda t, x: t.index_copy_(1, x.i, x.h)),
    "index_fill_": ("float", lambda t, x: t.index_fill_(0, x.i[:2], x.s)),
    "index_put_": ("float", lambda t, x: t.index_put_((x.i, x.i), x.v, accumulate=True)),
    "index_reduce_": ("float", lambda t, x: t.index_reduce_(0, x.i, x.h, "prod")),
    "ldexp_": ("float", lambda t, x: t.ldexp_(x.n)),
    "lerp_": ("float", lambda t, x: t.lerp_(x.v, x.h)),
    "masked_fill_": ("float", lambda t, x: t.masked_fill_(x.m, x.s)),
    "masked_scatter_": ("float", lambda t, x: t.masked_scatter_(x.m, x.h)),
    "put_": ("float", lambda t, x: t.put_(x.i, x.v)),
    "scatter_": ("float", lambda t, x: t.scatter_(0, x.ij, x.h)),
    "scatter_add_": ("float", lambda t, x: t.scatter_add_(0, x.ij, x.h)),
    "scatter_reduce_": ("float", lambda t, x: t.scatter_reduce_(0, x.ij, x.h, "sum")),
    "__setitem__": ("float", lambda t, x: t.__setitem__(x.i, x.h)),
}
# Forms of the above that Python or torch call with other arguments, or on views.
FORMS = {
    "setitem: slices": lambda t, x: t.__setitem__((slice(None), slice(1, 3)), x.h[:, :2]),
    "setitem: negative": lambda t, x: t.__setitem__(-1, x.v),
    "setitem: mask": lambda t, x: t.__setitem__(x.m, x.h[x.m]),
    "setitem: mask, a number": lambda t, x: t.__setitem__(x.m, 3.0),
    "setitem: mask, a sharded number": lambda t, x: t.__setitem__(x.m, x.s),
    "setitem: ellipsis": lambda t, x: t.__setitem__(..., x.h),
    "setitem: two indices": lambda t, x: t.__setitem__((x.i, x.i), x.v),
    "setitem: a plain index": lambda t, x: t.__setitem__(
        torch.tensor([3, 1, 0, 2], device=t.device), x.h
    ),
    "setitem: of a view": lambda t, x: t[0].__setitem__(slice(1, None), x.v[1:]),
    "augmented: a row": lambda t, x: _augmented(t, x),
    "narrow": lambda t, x: t.narrow(0, 0, 2).copy_(x.h[:2]),
    "transposed view": lambda t, x: t.T[1:].mul_(x.h[1:]),
    "diagonal": lambda t, x: t.diagonal().add_(x.v),
    "function": lambda t, x: torch.index_put_(t, (x.i,), x.h),
    "function by keywords": lambda t, x: torch.Tensor.add_(t, other=x.h, alpha=3),
    "broadcast": lambda t, x: t.sub_(x.v),
    "where": lambda t, x: t.copy_(torch.where(x.m, x.h, 0.0)),
    "twice": lambda t, x: t.add_(x.h).mul_(x.h),
    "plain and sharded": lambda t, x: t.addcmul_(torch.ones(4, dtype=F64, device=t.device), x.h),
    "other device of number": lambda t, x: t.add_(x.s, alpha=2),
    "foreach": lambda t, x: torch._foreach_add_([t], [x.h]),
    "foreach of rows": lambda t, x: torch._foreach_mul_([t[0], t[1]], [x.v, x.v]),
    "foreach with a number": lambda t, x: torch._foreach_mul_([t], x.s),
    "foreach copy": lambda t, x: torch._foreach_copy_([t], [x.h.detach()]),
    "foreach addcmul": lambda t, x: torch._foreach_addcmul_([t], [x.h], [x.h], value=2.0),
    "foreach lerp": lambda t, x: torch._foreach_lerp_([t], [x.h], 0.25),
    "foreach maximum": lambda t, x: torch._foreach_maximum_([t], [x.h]),
}
CASES = {**WRITES, **{name: ("float", write) for name, write in FORMS.items()}}
NO_GRADIENT = {
    "eq_",
    "ge_",
    "greater_",
    "greater_equal_",
    "gt_",
    "heaviside_",
    "le_",
    "less_",
    "less_equal_",
    "logical_and_",
    "logical_or_",
    "logical_xor_",
    "lt_",
    "ne_",
    "not_equal_",
    "floor_divide_",
    "__ifloordiv__",
    "nextafter_",
    "igamma_",
    "igammac_",
    "ldexp_",
    "setitem: mask, a number",
    "foreach copy",
}
REFUSED = {"map_", "map2_", "set_", "resize_as_", "bernoulli_"}
# See `test_functions_that_write_an_operand`; for sparse tensors only.
OTHERS = {"embedding_renorm_", "resize_as_sparse_"}


def _augmented(t, x):
    t[1] -= x.h[0]
    t[:2] *= x.h[:2]
    return t


def _is_in_place(name):
    if name.startswith("__i") and name.endswith("__"):
        return name not in (
            "__invert__",
            "__int__",
            "__index__",
            "__iter__",
            "__init__",
            "__init_subclass__",
        )
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))


def test_the_table_has_every_in_place_operator_of_torch():
    """That takes a tensor besides the one that it writes, by torch's schemas; those without a
    schema must be in the table, too.
    """
    wanted = set()
    for name in filter(_is_in_place, {*dir(torch.Tensor), *dir(torch)}):
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        if (
            any("Tensor" in str(a.type) for schema in schemas for a in schema.arguments[1:])
            or not schemas
        ):
            wanted.add(name)
    # Which take no tensor.
    assert wanted - set(WRITES) - REFUSED - OTHERS == {"apply_", "share_memory_"}
    assert {name for name in WRITES if not _is_in_place(name)} == set()


# -- contexts in which plain tensors count as replicated -------------------------------------------


class _Call(nn.Module):
    def forward(self, write, t, x):
        return write(t, x)


def _prepared(mesh, write, t, x):
    return distribute_module(_Call(), mesh)(write, t, x)


def _implicit(mesh, write, t, x):
    with sm.ops.implicit_replication():
        return write(t, x)


CONTEXTS = {"prepared module": _prepared, "implicit replication": _implicit}
SPECS = {
    "whole": lambda n: P(),
    "rows": lambda n: P("a"),
    "last dim": lambda n: P(*[None] * (n - 1), "a"),
    "pending": None,
}


def _sources(mesh=None, spec="whole", grad=True):
    """Return leaves and what is written: twice the leaves, so that no leaf itself is an operand."""
    leaves, used = {}, {}
    for name, value in SOURCES.items():
        leaf = value.to(DEVICE).clone()
        if mesh is not None:
            pending = spec == "pending" and name in FLOATS
            where = (
                P(unreduced={"a"})
                if pending
                else P()
                if spec == "pending" or not value.ndim
                else SPECS[spec](value.ndim)
            )
            leaf = sm.device_put(leaf, mesh, where)
        if name in FLOATS and grad:
            leaf.requires_grad_()
        leaves[name], used[name] = leaf, leaf * 2 if name in FLOATS else leaf
    return leaves, SimpleNamespace(**used)


def _outcome(run, kind, write, leaves, x, target_requires_grad):
    """Return the written tensor, seen through another reference, and the gradients."""
    start = TARGETS[kind].to(DEVICE).clone()
    if target_requires_grad and start.is_floating_point():
        start.requires_grad_()
        t = start * 1.5
    else:
        t = start
    alias, view = t, t.view(-1)
    run(write, t, x)
    assert type(t) is torch.Tensor
    weight = torch.linspace(1, 2, t.numel(), dtype=F64, device=t.device)
    found = [alias.detach(), view.detach()]
    if t.requires_grad:
        (alias.flatten() * weight).sum().backward()
        found += [
            x if x is None else getattr(x, "full_tensor", lambda x=x: x)()
            for x in (leaves[n].grad for n in FLOATS)
        ]
        found.append(start.grad if target_requires_grad else None)
    return found


def _in_one_process(name, target_requires_grad):
    kind, write = CASES[name]
    sources = _sources(grad=name not in NO_GRADIENT)
    return _outcome(lambda write, t, x: write(t, x), kind, write, *sources, target_requires_grad)


def _difference(mesh, context, spec, name, target_requires_grad):
    """Return what differs from one process, None if nothing does."""
    kind, write = CASES[name]
    expected = _in_one_process(name, target_requires_grad)
    assert kind == "int" or (len(expected) > 2) == (name not in NO_GRADIENT or target_requires_grad)
    try:
        sources = _sources(mesh, spec, name not in NO_GRADIENT)
        run = lambda *args: CONTEXTS[context](mesh, *args)  # noqa: E731
        found = _outcome(run, kind, write, *sources, target_requires_grad)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    except Exception as error:  # all cases are tried
        return (
            f"{name}, target requires grad {target_requires_grad}: {type(error).__name__} {error}"[
                :300
            ]
        )
    return None


@pytest.mark.parametrize(
    ("context", "spec"),
    [
        ("prepared module", "rows"),
        ("prepared module", "pending"),
        ("implicit replication", "whole"),
        ("implicit replication", "last dim"),
    ],
)
def test_values_and_gradients_are_those_of_one_process(context, spec):
    def program(mesh):
        cases = [
            (name, needs)
            for name in CASES
            for needs in (False, True)
            if not (needs and name in NO_GRADIENT)
        ]
        return [
            text for case in cases if (text := _difference(mesh, context, spec, *case)) is not None
        ]

    for found in on_mesh((2,), program):
        assert found == []


def test_every_operator_over_lists_that_torch_has_is_right():
    """Of those that write and take further lists;
    `test_values_and_gradients_are_those_of_one_process` has their gradients.
    """

    def written(name, x):
        t = [TARGETS["float"].to(DEVICE).clone(), TARGETS["row"].to(DEVICE).clone()]
        more = (
            [[x.h, x.v], [x.h, x.v]]
            if name in ("_foreach_addcmul_", "_foreach_addcdiv_")
            else [[x.h, x.v]]
        )
        getattr(torch, name)(t, *more, *([0.25] if name == "_foreach_lerp_" else []))
        return t

    def program(mesh):
        with sm.ops.implicit_replication(), torch.no_grad():
            return [written(name, _sources(mesh, "rows", False)[1]) for name in names]

    names = []
    for name in dir(torch):
        schemas = (
            torch._C._jit_get_schemas_for_operator(f"aten::{name}")
            if name.startswith("_foreach_") and name.endswith("_")
            else []
        )
        if any(str(a.type) == "List[Tensor]" for schema in schemas for a in schema.arguments[1:]):
            names.append(name)
    assert len(names) > 10
    expected = [written(name, _sources(grad=False)[1]) for name in names]
    for found in on_mesh((2,), program):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


# -- out= ------------------------------------------------------------------------------------------

_OPERANDS = {
    "input": "h",
    "other": "h",
    "self": "h",
    "vec2": "v",
    "mat2": "h",
    "exponent": "h",
    "A": "h",
    "end": "h",
    "weight": "h",
}


def _functions_with_out():
    """Yield those functions of torch with `out=` that can be called with tensors alone, and the
    names of these.
    """
    for func, stand_in in get_testing_overrides().items():
        parameters = inspect.signature(stand_in).parameters.values()
        required = [
            p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        is_method = "Tensor" in getattr(func, "__qualname__", "")
        if (
            any(p.name == "out" for p in parameters)
            and not is_method
            and required
            and all(n in _OPERANDS for n in required)
        ):
            yield func, [_OPERANDS[n] for n in required]


def _into_out(func, names, x):
    like = func(*[SOURCES[n].to(DEVICE) for n in names])
    out = (
        torch.zeros_like(like)
        if isinstance(like, torch.Tensor)
        else tuple(map(torch.zeros_like, like))
    )
    result = func(*[getattr(x, n) for n in names], out=out)
    assert result is out or isinstance(result, tuple), func
    return out


def _works(func, names):
    try:
        _into_out(func, names, _sources(grad=False)[1])
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # not for these tensors
        return False
    return True


@pytest.mark.filterwarnings("ignore::UserWarning")  # deprecated functions of torch
def test_out():
    def program(mesh):
        _, x = _sources(mesh, "rows", False)
        with sm.ops.implicit_replication():
            for func, names in functions:
                found = _into_out(func, names, x)
                torch.testing.assert_close(
                    found, _into_out(func, names, plain), rtol=1e-12, atol=1e-12, equal_nan=True
                )
            indices = sm.zeros((4,), dtype=torch.int64, device_mesh=mesh)
            with pytest.raises(NotImplementedError, match="not both"):
                torch.max(x.h, 0, out=(torch.zeros(4, dtype=F64, device=DEVICE), indices))
            with pytest.raises(RuntimeError, match="automatic differentiation"):
                torch.add(
                    x.h.requires_grad_(), x.h, out=torch.zeros(4, 4, dtype=F64, device=DEVICE)
                )

    plain = _sources(grad=False)[1]
    functions = [(func, names) for func, names in _functions_with_out() if _works(func, names)]
    assert len(functions) > 100
    on_mesh((2,), program)


# -- where plain tensors do not count as replicated ------------------------------------------------


def test_outside_of_prepared_modules_it_is_refused():
    """Before anything is written; `copy_` is a copy of the whole value everywhere."""

    def program(mesh):
        _, x = _sources(mesh, "rows")
        for name, (kind, write) in CASES.items():
            t = TARGETS[kind].to(DEVICE).clone()
            if name == "copy_":
                write(t, x)
                torch.testing.assert_close(t, 2 * SOURCES["h"].to(DEVICE))
            elif name not in ("foreach with a number", "narrow", "where", "foreach copy"):
                with pytest.raises(RuntimeError, match="mixes a plain tensor"):
                    write(t, x)
                torch.testing.assert_close(t, TARGETS[kind].to(DEVICE), rtol=0, atol=0)

    on_mesh((2,), program)


@every_rank(2)
def test_a_number_is_written_anywhere(mesh):
    """Such as a total of losses, which requires grad from the second time on."""
    x = place(mesh, SOURCES["h"].to(DEVICE), sm.Shard(0), grad=True)
    total = before = torch.zeros((), dtype=F64, device=DEVICE)
    for n in range(1, 4):
        total += (x * n).sum()
    total.add_(x.full_tensor().sum()).mul_(x[0, 0])
    assert total is before
    total.backward()
    y = SOURCES["h"].to(DEVICE).clone().requires_grad_()
    (7 * y.sum() * y[0, 0]).backward()
    torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="requires grad"):
        x.detach().add_(torch.tensor(1.0, dtype=F64, device=DEVICE, requires_grad=True))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused(name):
    def program(mesh):
        t = torch.zeros(4, 4, dtype=F64, device=DEVICE)
        function = (lambda a, b: a + b,) if name == "map_" else (lambda a, b, c: a + b,)
        x = place(mesh, SOURCES["h"].to(DEVICE), sm.Shard(0))
        with sm.ops.implicit_replication():
            getattr(t, name)(
                *[x] * (2 if name == "map2_" else 1), *(function if name.startswith("map") else ())
            )

    same_error((2,), program, Exception)


@every_rank(2)
def test_errors_are_those_of_torch(mesh):
    x = place(mesh, SOURCES["h"].to(DEVICE), sm.Shard(0), grad=True)
    leaf = TARGETS["float"].to(DEVICE).clone().requires_grad_()
    with sm.ops.implicit_replication():
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            leaf.add_(x)
        with torch.no_grad():
            leaf.add_(x)
        with pytest.raises(RuntimeError, match="number of sizes provided"):
            torch.zeros(3, dtype=F64, device=DEVICE).__setitem__(slice(None), x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            t = torch.ones(4, 4, dtype=F64, device=DEVICE) * x.full_tensor()
            y = t.square()
            t.add_(x)
            y.sum().backward()
    torch.testing.assert_close(leaf.detach(), TARGETS["float"].to(DEVICE) + SOURCES["h"].to(DEVICE))


@every_rank(2)
def test_functions_that_write_an_operand(mesh):
    with sm.ops.implicit_replication():
        index = place(mesh, torch.tensor([0, 2], device=DEVICE), sm.Shard(0))
        weight = torch.full((4, 3), 9.0, dtype=F64, device=DEVICE)
        expected = torch.embedding_renorm_(weight.clone(), index.full_tensor(), 0.5, 2.0)
        torch.testing.assert_close(torch.embedding_renorm_(weight, index, 0.5, 2.0), expected)
        torch.testing.assert_close(weight, expected)
        x = place(mesh, SOURCES["h"].to(DEVICE), sm.Shard(0))
        mean = torch.zeros(4, dtype=F64, device=DEVICE)
        variance = torch.ones(4, dtype=F64, device=DEVICE)
        expected = mean.clone(), variance.clone()
        nn.functional.batch_norm(x.full_tensor(), *expected, training=True)
        nn.functional.batch_norm(x, mean, variance, training=True)
        torch.testing.assert_close((mean, variance), expected, rtol=1e-12, atol=1e-12)


@every_rank(2)
def test_communication_is_implicit(mesh):
    x = place(mesh, SOURCES["h"].to(DEVICE), sm.Shard(0))
    with sm.ops.implicit_replication(), sm.ops.implicit_comm("forbid"):
        t = torch.zeros(4, 4, dtype=F64, device=DEVICE)
        with pytest.raises(sm.errors.ImplicitCommError, match="by add_"):
            t.add_(x)
        t.add_(x.redistribute(P()))


def test_ranks_outside_the_mesh():
    """They have no values, and the same graph: a tensor on a mesh of all ranks depends on the
    result.
    """

    def program(mesh):
        half = sm.DeviceMesh(DEVICE, [0, 1], axis_names=("a",))
        x = place(half, SOURCES["h"].to(DEVICE), sm.Shard(0), grad=True)
        t = torch.zeros(4, 4, dtype=F64, device=DEVICE)
        number = torch.zeros((), dtype=F64, device=DEVICE)
        with sm.ops.implicit_replication():
            t[1:] = (x * 2)[1:]
            number += x.sum()
        assert t.requires_grad
        assert number.requires_grad
        (t.sum() + number).backward()
        return x.grad.full_tensor() if half.coordinate is not None else None

    expected = torch.tensor([1.0] + [3.0] * 3, dtype=F64)[:, None].expand(4, 4)
    for found in on_mesh((3,), program)[:2]:
        torch.testing.assert_close(found.cpu(), expected)


# -- a mixture of experts, as torchtitan writes it -------------------------------------------------


class _Mixture(nn.Module):
    """Sorts tokens by expert, and writes the outputs of the experts to the rows of their tokens."""

    def __init__(self, experts=4, top=2):
        super().__init__()
        self.gate, self.shared = nn.Linear(4, experts, bias=False), nn.Linear(4, 4)
        self.up = nn.Parameter(torch.randn(experts, 4, 8))
        self.down = nn.Parameter(torch.randn(experts, 8, 4))
        self.register_buffer("tokens_per_expert", torch.zeros(experts))
        self.top = top

    def forward(self, x):
        shape, dim = x.shape, x.shape[-1]
        x = x.reshape(-1, dim)
        scores, chosen = torch.topk(torch.softmax(self.gate(x), -1), self.top, dim=-1)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        one_hot = torch.zeros(
            x.shape[0], self.gate.weight.shape[0], dtype=torch.bool, device=x.device
        ).scatter_(1, chosen, True)
        with torch.no_grad():
            self.tokens_per_expert.add_(one_hot.sum(0))
        rows = order // self.top
        routed = x[rows] * scores.reshape(-1)[order].unsqueeze(-1)
        weights = nn.functional.one_hot(chosen.reshape(-1)[order], self.gate.weight.shape[0]).to(
            x.dtype
        )
        hidden = torch.einsum("ne,nd,edf->nf", weights, routed, self.up).relu()
        routed = torch.einsum("ne,nf,efd->nd", weights, hidden, self.down)
        unsorted = torch.zeros((x.shape[0] * self.top, dim), dtype=x.dtype, device=x.device)
        unsorted[order] = routed
        out = self.shared(x) + unsorted.view(-1, self.top, dim).sum(1)
        return out.reshape(shape)


def _mixture():
    torch.manual_seed(0)
    return nn.Sequential(_Mixture(), nn.Linear(4, 4)).double().to(DEVICE)


MIXTURES = {
    "parallelize": lambda m, mesh: parallelize(m, mesh, {"1": colwise()}),
    "distribute_module": lambda m, mesh: distribute_module(m, mesh),
    "fully_shard": lambda m, mesh: fully_shard(m, mesh),
}


@pytest.mark.parametrize("how", MIXTURES)
def test_mixture_of_experts(how):
    tokens = torch.linspace(-1, 1, 48, dtype=F64).sin().view(2, 6, 4).to(DEVICE)

    def trained(model, x):
        model(x).square().sum().backward()
        return [
            getattr(t, "full_tensor", lambda t=t: t)()
            for t in (*[p.grad for p in model.parameters()], *model.buffers())
        ]

    expected = trained(_mixture(), tokens)
    assert all(t.abs().sum() > 0 for t in expected)

    def program(mesh):
        spec = P("a") if how == "fully_shard" else P()
        return trained(
            MIXTURES[how](_mixture(), mesh),
            place(mesh, tokens, *sm.Layout.of(mesh, spec, tokens.shape, F64).placements),
        )

    for found in on_mesh((2,), program):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- derivatives of higher order, and transforms ---------------------------------------------------


def _written_and_used(x):
    t = torch.zeros(4, dtype=F64, device=DEVICE)
    t[torch.tensor([3, 2, 1, 0], device=DEVICE)] = x * x
    total = torch.zeros((), dtype=F64, device=DEVICE)
    total += (x * t).sum()
    return total


def test_second_derivatives_and_transforms():
    v = torch.arange(1.0, 5.0, dtype=F64, device=DEVICE).requires_grad_()
    (first,) = torch.autograd.grad(_written_and_used(v), v, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), v)

    def program(mesh):
        x = sm.device_put(v.detach(), mesh, P("a")).requires_grad_()
        with sm.ops.implicit_replication():
            (found,) = torch.autograd.grad(_written_and_used(x), x, create_graph=True)
            torch.testing.assert_close(found.full_tensor(), first, rtol=1e-12, atol=1e-12)
            (again,) = torch.autograd.grad(found.square().sum(), x)
            torch.testing.assert_close(again.full_tensor(), second, rtol=1e-12, atol=1e-12)
            x = x.detach()
            torch.testing.assert_close(
                sm.grad(_written_and_used)(x).full_tensor(), first.detach(), rtol=1e-12, atol=1e-12
            )
            _, tangent = sm.jvp(_written_and_used, (x,), (x,))
            torch.testing.assert_close(tangent, (first * v).sum().detach(), rtol=1e-12, atol=1e-12)

    on_mesh((2,), program)
