"""Types of gradients (the dual of pending is replicated), over the whole operator table: what is
linear lets pending sums through, forward and backward, and everything can be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P, Partial
from shardmesh.sharding.ops import strategy
from shardmesh.sharding.ops.rules.check import _Sample, place
from shardmesh.sharding.ops.rules.registry import DECOMPOSITIONS, RULES, writes_first_operand
from tests.sharding.ops.rules.table import OWNERS, Call, registered, samples_of
from tests.sharding.ops.rules.test_table import ELSEWHERE, FILLED, _family
from tests.sharding.ranks import collectives, launched, on_mesh

# What torch says of some of its own functions.
ABOUT_TORCH = (
    "ignore:torch.* is deprecated",
    "ignore:at::",
    "ignore:Using torch.cross without",
    "ignore:index_reduce",
    "ignore:.*no sharding rule",
)
X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 - 1


def _operators() -> Iterator[tuple[str, Callable[..., Any], list[Call]]]:
    """Yield one function for each rule and decomposition of the table, with its samples."""
    assert FILLED
    seen = set()
    for label, func in registered():
        makers = (RULES.get(func), DECOMPOSITIONS.get(func))
        if makers in seen or makers == (None, None) or label.partition(".")[0] not in OWNERS:
            continue
        calls = samples_of(label)
        if calls and not writes_first_operand(func) and not _family(func).endswith(ELSEWHERE):
            seen.add(makers)
            yield label, func, calls


OPERATORS = list(_operators())


def _sample(func: Callable[..., Any], call: Call) -> _Sample:
    return _Sample.of(func, call.args, call.kwargs, ("sum",))


# -- linear operators ------------------------------------------------------------------------------


def _linear_groups(sample: _Sample, mesh: sm.DeviceMesh) -> list[set[int]]:
    """Return the operands, by index among the tensors, that may be pending together."""
    metas = []

    def meta(x: Tensor) -> Tensor:
        metas.append(strategy.operand_meta(sm.Layout.of(mesh, P(), x.shape, x.dtype)))
        return metas[-1]

    args, kwargs = _mapped(sample.args, meta), _mapped(sample.kwargs, meta)
    try:
        made = (
            None
            if strategy.decomposition_for(sample.func, args, kwargs)
            else strategy.rule_for(sample.func, args, kwargs, metas)
        )
    except TypeError:
        # A function of torch.nn.functional, which passes its arguments on in another way.
        return []
    if made is None:
        return []
    number = [next(i for i, x in enumerate(metas) if x is operand) for operand in made.operands]
    groups = [{number[i] for i in {*group, *made.additive}} for group in made.linear]
    return [
        group for group in groups if all(sample.values[i].dtype is not torch.bool for i in group)
    ]


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, (list, tuple)):
        return type(tree)([_mapped(item, change) for item in tree])
    if isinstance(tree, dict):
        return {name: _mapped(item, change) for name, item in tree.items()}
    return change(tree) if isinstance(tree, Tensor) else tree


def _check_passes(sample: _Sample, mesh: sm.DeviceMesh, group: set[int]) -> None:
    """Check that forward has no communication, and that gradients equal those of one process, in
    the operands' layouts.
    """
    specs = [P(unreduced={"a": "sum"}) if i in group else P() for i in range(len(sample.values))]
    leaves = [
        place(x, mesh, spec, seed)
        for seed, (x, spec) in enumerate(zip(sample.values, specs, strict=True))
    ]
    for leaf, wanted in zip(leaves, sample.differentiable, strict=True):
        leaf.requires_grad_(wanted)
    with collectives() as records:
        results = sample.call(leaves)
    assert not records, f"{launched(records)} with {sorted(group)} pending"
    for got, want in zip(results, sample.results, strict=True):
        assert sm.typeof(got).pending == {"a": "sum"}
        _close(got.detach().full_tensor(), want, sample.tolerance)
    sources = [r for r in results if r.requires_grad]
    sought = [leaf for leaf in leaves if leaf.requires_grad]
    if sources and sought:
        found = torch.autograd.grad(
            sources, sought, sample.weights, allow_unused=True, materialize_grads=True
        )
        for got, want in zip(found, sample.gradients, strict=True):
            assert not sm.typeof(got).pending
            _close(got.full_tensor(), want, sample.tolerance)


def _close(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=tolerance, atol=tolerance)


def _linear_calls() -> Iterator[Any]:
    """Yield samples of operators that are linear in an operand."""
    for label, func, calls in OPERATORS:
        if RULES.get(func) is not None:
            yield pytest.param(func, calls, id=label)


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings(*ABOUT_TORCH)
@pytest.mark.parametrize(("func", "calls"), list(_linear_calls()))
def test_pending_sums_pass_linear_operators(
    func: Callable[..., Any], calls: Sequence[Call]
) -> None:
    samples = [_sample(func, call) for call in calls[:3]]

    def program(mesh: sm.DeviceMesh) -> int:
        groups = [(sample, group) for sample in samples for group in _linear_groups(sample, mesh)]
        for sample, group in groups:
            _check_passes(sample, mesh, group)
        return len(groups)

    if on_mesh((2,), program) == [0, 0]:
        pytest.skip("linear in nothing")


# -- second derivatives ----------------------------------------------------------------------------


def _second(
    call: Callable[[Sequence[Any]], Sequence[Any]], leaves: Sequence[Any], weights: Sequence[Tensor]
) -> list[Any]:
    """Return gradients of the sum of squares of the gradients; None for constant ones."""
    sources = [r for r in call(leaves) if isinstance(r, Tensor) and r.requires_grad]
    sought = [x for x in leaves if x.requires_grad]
    if not sources or not sought:
        return []
    first = torch.autograd.grad(
        sources, sought, weights, create_graph=True, allow_unused=True, materialize_grads=True
    )
    squares = [g.abs().square().sum() for g in first if g.requires_grad]
    if not squares:
        return []
    return list(
        torch.autograd.grad(sum(squares), sought, allow_unused=True, materialize_grads=True)
    )


def _layouts(sample: _Sample) -> list[list[P]]:
    """Return every tensor sharded in its first dim, in its last, or pending."""
    first = [P("a") if x.ndim else P() for x in sample.values]
    last = [P(*[None] * (x.ndim - 1), "a") if x.ndim else P() for x in sample.values]
    pending = [
        P(unreduced={"a": "sum"}) if x.dtype is not torch.bool else P() for x in sample.values
    ]
    return [first, last, pending]


WRONG_IN_TORCH = {"_weight_norm"}  # its second derivative is not that of v * g / |v|


@pytest.mark.one_in(7)
@pytest.mark.filterwarnings(*ABOUT_TORCH)
@pytest.mark.parametrize(
    ("func", "calls"),
    [pytest.param(f, c, id=n) for n, f, c in OPERATORS if f.__name__ not in WRONG_IN_TORCH],
)
def test_double_backward(func: Callable[..., Any], calls: Sequence[Call]) -> None:
    """On three ranks: parts are uneven, and some empty."""
    samples = [
        (sample, expected)
        for call in calls[:2]
        for sample in [_sample(func, call)]
        if (expected := _expected(sample))
    ]
    if not samples:
        pytest.skip("the gradient is constant, or torch itself has no second derivative")

    def program(mesh: sm.DeviceMesh) -> None:
        for sample, expected in samples:
            for specs in _layouts(sample):
                leaves = [
                    place(x, mesh, spec, seed)
                    for seed, (x, spec) in enumerate(zip(sample.values, specs, strict=True))
                ]
                _check_second(sample, leaves, expected)

    on_mesh((3,), program)


def _expected(sample: _Sample) -> list[Tensor]:
    """Return second derivatives in one process, if torch has them."""
    try:
        return _second(sample.call, sample.leaves(sample.differentiable), sample.weights)
    except RuntimeError:
        return []


def _check_second(
    sample: _Sample, leaves: Sequence[sm.ShardedTensor], expected: Sequence[Tensor]
) -> None:
    for leaf, wanted in zip(leaves, sample.differentiable, strict=True):
        leaf.requires_grad_(wanted)
    found = _second(sample.call, leaves, sample.weights) or [torch.zeros_like(x) for x in expected]
    for got, want in zip(found, expected, strict=True):
        whole = got.detach().full_tensor() if isinstance(got, sm.ShardedTensor) else got
        _close(whole, want, max(sample.tolerance, 1e-9))


# -- pending values of other kinds -----------------------------------------------------------------

USES = {
    "matmul": lambda x: (x @ x.T).sum(),
    "mean": lambda x: x.mean(0).square().sum(),
    "variance": lambda x: x.var(1).sum(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "softmax": lambda x: x.softmax(0).square().sum(),
    "views": lambda x: (x.view(3, 5).t()[1:] * 2).sum(),
    "branches": lambda x: torch.where(x > 0, x, x * x).sum() + x.sum(),
    "extremes": lambda x: x.amax(0).sum() + x.min(),
    "several uses": lambda x: (x * x + x).sum() * x.mean(),
}
COMBINE = {"max": torch.amax, "min": torch.amin, "avg": torch.mean}


@pytest.mark.parametrize("kind", COMBINE)
@pytest.mark.parametrize("use", USES)
def test_gradients_of_operators_on_other_pending_kinds(use: str, kind: str) -> None:
    """Each rank's contribution gets the gradient that it has in the combination of all."""
    parts = torch.randn(
        3, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()
    value = USES[use](COMBINE[kind](parts, 0))
    (expected,) = torch.autograd.grad(value, parts)

    def program(mesh: sm.DeviceMesh) -> None:
        x = sm.from_local(
            parts[mesh.world.rank].detach().clone(), mesh, [Partial(kind)]
        ).requires_grad_()
        found = USES[use](x)
        found.backward()
        _close(found.detach().full_tensor(), value.detach())
        _close(x.grad.to_local(), expected[mesh.world.rank])

    on_mesh((3,), program)


# -- modes -----------------------------------------------------------------------------------------


def test_retained_graph_gives_equal_gradients() -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        for spec in (P(), P("a"), P(None, "a")):
            w = sm.device_put(X, mesh, spec).requires_grad_()
            loss = (w.softmax(0) * w.mean()).square().sum()
            loss.backward(retain_graph=True)
            first = w.grad.full_tensor().clone()
            loss.backward()
            _close(w.grad.full_tensor(), 2 * first)
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()

    on_mesh((2,), program)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_decompositions_without_gradients_give_equal_values(mode: Callable[[], Any]) -> None:
    """And what is made so has no graph; a tensor of inference mode cannot be used for training, as
    in torch.
    """

    def program(mesh: sm.DeviceMesh) -> None:
        x = sm.device_put(X, mesh, P("a")).requires_grad_()
        uses = [
            lambda: x.softmax(0),
            lambda: x.var(0),
            lambda: x.mean(),
            lambda: x.norm(),
            lambda: x @ x.T,
            lambda: x.amax(),
        ]
        wanted = [use() for use in uses]
        with mode():
            found = [use() for use in uses]
        for got, want in zip(found, wanted, strict=True):
            assert want.requires_grad
            assert not got.requires_grad
            _close(got.full_tensor(), want.detach().full_tensor())
        if mode is torch.inference_mode:
            with pytest.raises(RuntimeError, match=r"[Ii]nference"):
                (found[0] * x).sum()
        else:
            (found[0] * x).sum().backward()
            _close(x.grad.full_tensor(), X.softmax(0))

    on_mesh((2,), program)


def test_hooks_see_gradients_of_decompositions() -> None:
    """A hook on what a form returns sees its gradient as one on any other result does."""
    plain = X.clone().requires_grad_()
    seen = []
    y = plain.softmax(0)
    y.register_hook(seen.append)
    (y * y).sum().backward()

    def program(mesh: sm.DeviceMesh) -> None:
        x = sm.device_put(X, mesh, P("a")).requires_grad_()
        found = []
        y = x.softmax(0)
        y.register_hook(lambda grad: found.append(grad.full_tensor()))
        y.retain_grad()
        (y * y).sum().backward()
        _close(found[0], seen[0])
        _close(y.grad.full_tensor(), seen[0])
        _close(x.grad.full_tensor(), plain.grad)

    on_mesh((2,), program)
