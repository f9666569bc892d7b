"""`_foreach_*`, fused kernels, torch's optimizers and gradient clipping: equal to a single
process.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from tests.sharding.ops.rules.table import f, i, pos
from tests.sharding.ranks import collectives, launched, on_mesh

SPECS = [P("a"), P(None, "a"), P()]
LISTED = [f(4, 3), f(3, 5), f(2, 2)]


def distributed(mesh, tensors, specs=SPECS):
    return [sm.distribute_tensor(x, mesh, s) for x, s in zip(tensors, specs, strict=True)]


def scalars(k):
    return [0.5 + n + k for n in range(len(LISTED))]


UNARY = [
    name
    for name in dir(torch)
    if name.startswith("_foreach_")
    and name.removesuffix("_").removeprefix("_foreach_")
    in (
        "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p "
        "log2 neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc clone zero"
    ).split()
]
MORE = {
    "add": [
        lambda g, xs, ys: g(xs, ys),
        lambda g, xs, ys: g(xs, scalars(1)),
        lambda g, xs, ys: g(xs, ys, alpha=3),
    ],
    "sub": [lambda g, xs, ys: g(xs, ys), lambda g, xs, ys: g(xs, ys, alpha=3)],
    "mul": [
        lambda g, xs, ys: g(xs, ys),
        lambda g, xs, ys: g(xs, torch.tensor(2.0)),
        lambda g, xs, ys: g(xs, scalars(0)),
    ],
    "div": [lambda g, xs, ys: g(xs, ys), lambda g, xs, ys: g(xs, 3.0)],
    "pow": [lambda g, xs, ys: g(xs, 2.0), lambda g, xs, ys: g(xs, ys)],
    "maximum": [lambda g, xs, ys: g(xs, ys), lambda g, xs, ys: g(xs, 1.0)],
    "minimum": [lambda g, xs, ys: g(xs, ys)],
    "clamp_min": [lambda g, xs, ys: g(xs, 1.0)],
    "clamp_max": [lambda g, xs, ys: g(xs, scalars(0))],
    "lerp": [lambda g, xs, ys: g(xs, ys, 0.3), lambda g, xs, ys: g(xs, ys, ys)],
    "addcmul": [lambda g, xs, ys: g(xs, ys, ys, 0.5), lambda g, xs, ys: g(xs, ys, ys, scalars(0))],
    "addcdiv": [
        lambda g, xs, ys: g(xs, ys, ys, value=0.5),
        lambda g, xs, ys: g(xs, ys, ys, torch.tensor(scalars(0))),
    ],
}
CASES = [(name, lambda g, xs, ys: g(xs)) for name in UNARY]
CASES += [
    (f"_foreach_{name}{end}", way)
    for name, ways in MORE.items()
    for end in ("", "_")
    for way in ways
]
CASES += [
    ("_foreach_copy_", lambda g, xs, ys: g(xs, ys)),
    ("_foreach_norm", lambda g, xs, ys: g(xs)),
]
CASES += [("_foreach_norm", lambda g, xs, ys: g(xs, 1)), ("_foreach_max", lambda g, xs, ys: g(xs))]
CASES += [
    ("_foreach_pow", lambda g, xs, ys: g(2.0, xs)),
    ("_foreach_powsum", lambda g, xs, ys: g(xs, 3)),
]


@pytest.mark.parametrize(
    "others", [SPECS, [P(None, "a"), P(None, "a"), P("a")]], ids=["aligned", "mixed"]
)
def test_foreach(others):
    """One call on the local lists if corresponding tensors have equal layouts, otherwise one by
    one.
    """

    def program(mesh):
        for name, call in CASES:
            func = getattr(torch, name)
            xs, ys = ([0.2 * pos(*x.shape, seed=seed) for x in LISTED] for seed in (0, 9))
            mine, theirs = distributed(mesh, xs), distributed(mesh, ys, others)
            wanted, got = call(func, xs, ys), call(func, mine, theirs)
            if name.endswith("_"):
                assert all(x is y for x, y in zip(got, mine, strict=True))
                wanted = xs
                assert [x.spec for x in mine] == [s.padded(2) for s in SPECS]
            for x, y in zip(got, wanted, strict=True):
                torch.testing.assert_close(
                    x.full_tensor(), y, msg=lambda m, name=name: f"{name}: {m}"
                )

    on_mesh((3,), program)


def test_broadcast_rows_are_not_aligned():
    """The parts of (4, 3) and (1, 3), both sharded in dim 0, do not match."""

    def program(mesh):
        x, y = distributed(mesh, [f(4, 3), f(1, 3)], [P("a"), P("a")])
        (out,) = torch._foreach_mul([x], [y])
        assert torch.equal(out.full_tensor(), f(4, 3) * f(1, 3))

    on_mesh((2,), program)


def test_pending_scalar_with_lists_is_reduced_first():
    def program(mesh):
        xs = distributed(mesh, LISTED)
        scale = sm.distribute_tensor(f(4), mesh, P("a")).sum()
        torch._foreach_mul_(xs, scale)
        for x, y in zip(xs, LISTED, strict=True):
            torch.testing.assert_close(x.full_tensor(), y * f(4).sum())

    on_mesh((2,), program)


def test_foreach_is_differentiable():
    def program(mesh):
        xs = [x.requires_grad_() for x in distributed(mesh, LISTED)]
        sum(y.sum() for y in torch._foreach_mul(xs, xs)).redistribute(P()).backward()
        for x, y in zip(xs, LISTED, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), 2 * y)

    on_mesh((2,), program)


def test_norms_of_many_tensors_take_one_reduction_for_each_set_of_axes():
    def program(mesh):
        xs = distributed(
            mesh, [f(4, 3), f(5, 2), f(4, 4), f(7), f(3)], [P("a"), P("a"), P("b"), P("a"), P()]
        )
        with collectives() as records:
            norms = torch._foreach_norm(xs)
        assert launched(records) == ["all_reduce", "all_reduce"]
        for norm, x in zip(norms, xs, strict=True):
            torch.testing.assert_close(norm.full_tensor(), x.full_tensor().norm())

    on_mesh((2, 2), program)


# -- optimizers ------------------------------------------------------------------------------------


class MixedParameters(nn.Module):
    """A little of everything: an embedding, a norm, two matrices."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)

    def forward(self, tokens):
        return self.down(torch.nn.functional.gelu(self.up(self.norm(self.table(tokens)))))


def model():
    torch.manual_seed(0)
    return MixedParameters().double()


LAYOUTS = {
    "table.weight": P(None, "a"),
    "up.weight": P("a"),
    "up.bias": P("a"),
    "down.weight": P(None, "a"),
}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "AdamW amsgrad maximize": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "SGD momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05}),
}
MODES = [{}, {"foreach": True}, {"fused": True}]


def train(net, tokens, labels, make, mode, clip):
    optimizer = make[0](net.parameters(), **make[1], **mode)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(tokens), labels).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1) if clip else None
        optimizer.step()
    return norm


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", MODES, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_a_single_process(name, mode):
    if "fused" in mode and name in ("RMSprop", "Adamax", "NAdam"):
        pytest.skip("torch has no fused kernel of it")
    make, tokens, labels = OPTIMIZERS[name], i(5, high=7), i(5, high=3)
    alone = model()
    norm = train(alone, tokens, labels, make, {}, clip=True)

    def program(mesh, net):
        sharded = copy.deepcopy(net)
        for path, p in list(sharded.named_parameters()):
            owner, _, attribute = path.rpartition(".")
            placed = sm.distribute_tensor(p.detach(), mesh, LAYOUTS.get(path))
            setattr(sharded.get_submodule(owner), attribute, nn.Parameter(placed))
        batch = [sm.distribute_tensor(t, mesh, P("b")) for t in (tokens, labels)]
        mine = train(sharded, *batch, make, mode, clip=True)
        torch.testing.assert_close(mine.full_tensor(), norm)
        for (path, p), q in zip(sharded.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                p.detach().full_tensor(), q.detach(), msg=lambda m, path=path: f"{path}: {m}"
            )

    start = model()
    on_mesh((2, 2), lambda mesh: program(mesh, start))


def _overloads():
    """Yield each `torch._foreach_*` with the argument types of one of its overloads."""
    for name in sorted(dir(torch)):
        if name.startswith("_foreach_"):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                if "out" not in overload:
                    schema = getattr(packet, overload)._schema
                    required = [a for a in schema.arguments if not a.has_default_value()]
                    yield name, overload, [str(a.type) for a in required]


def _arguments(name, types, lists):
    lists = iter(lists)
    scalar = [0.5, 1.5, 2.5] if "addc" in name else 1.5
    number = torch.tensor(scalar, dtype=torch.float64)
    values = {"List[number]": [0.5, 1.5, 2.5], "number": 1.5, "Tensor": number}
    return [next(lists) if kind == "List[Tensor]" else values[kind] for kind in types]


@pytest.mark.parametrize("kind", ["aligned", "mixed", "pending"])
def test_every_overload_equals_one_process(kind):
    """None of what torch offers goes past the dispatch or gives another result."""

    def program(mesh):
        for name, overload, types in _overloads():
            shapes = [(3, 3) if name == "_foreach_mm" else x.shape for x in LISTED]
            lists = [[0.3 * pos(*shape, seed=9 * k).double() for shape in shapes] for k in range(3)]
            if name in ("_foreach_acos", "_foreach_acos_", "_foreach_asin", "_foreach_asin_"):
                lists = [[x.clamp(max=0.9) for x in xs] for xs in lists]
            others = SPECS[1:] + SPECS[:1] if kind == "mixed" else SPECS
            sharded = [distributed(mesh, xs, others if k else SPECS) for k, xs in enumerate(lists)]
            if kind == "pending":
                last = types.count("List[Tensor]") - 1
                if last == 0 and name.endswith("_"):
                    continue  # writes into pending tensors
                sharded[last] = [x.redistribute(P(unreduced={"a"})) for x in sharded[last]]
            func = getattr(torch, name)
            result = func(*_arguments(name, types, sharded))
            expected = func(*_arguments(name, types, lists))
            if result is None:
                result, expected = sharded[0], lists[0]
            for x, y in zip(result, expected, strict=True):
                same = torch.allclose(x.full_tensor(), y, rtol=1e-12, atol=1e-12)
                assert same, f"{name}.{overload}"

    on_mesh((3,), program)
