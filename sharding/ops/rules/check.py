"""Tests of a rule: every combination of placements, compared with a single process.

They run in a simulated world.

    sample args --> func ------------------------> value, gradients          a single process
         |                                            ||
         +-- each combination of placements --> func --> full_tensor, gradients  2, 3, 2 x 2 ranks

Pending inputs are contributions that differ from rank to rank and add up to the sample exactly, so
that an operator that uses one of them as the value fails.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....kernels.box import slices
from ....mesh.device_mesh import DeviceMesh, init_device_mesh
from ....mesh.simulated.simulate import simulate
from ...layout.layout import Layout
from ...layout.spec import P
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import flatten, map_tensors, tensors_in
from .propagation import CannotKeep
from .registry import writes_first_operand

MESHES = ((2,), (3,), (2, 2))
MAX_COMBINATIONS = 200  # on a mesh of several axes; of more, a sample that is the same every time
_AXES = ("a", "b", "c")
# Absolute and relative, for results computed from tensors of these dtypes; 0 for others.
_TOLERANCE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
# How torch says that there is no gradient.
_NO_GRADIENT = (
    "derivative for",
    "is not differentiable with respect to",
    "Autograd not support dtype",
    "no autograd formula was registered",
)
_QUANTUM = {
    torch.float64: 2**20,
    torch.complex128: 2**20,
    torch.float32: 2**8,
    torch.complex64: 2**8,
}


class RuleError(Exception):
    """A rule gives another result than a single process."""


def check_rule(func: Callable[..., Any], *sample_args: Any, **sample_kwargs: Any) -> int:
    """check_rule(func, *sample) -> number of combinations on which a rule was tested.

    The operator runs in a simulated world of 2, 3 and 2 x 2 ranks, with every tensor among the
    arguments replicated, split in each dim, and pending as a sum, in every combination (on 2 x 2
    ranks a fixed sample of `MAX_COMBINATIONS`); on 2 and 3 ranks also with each tensor once in
    parts of uneven sizes. Its results and the gradients of all floating inputs must equal those of
    the single process. An in-place operator may refuse a combination in which it would have to
    change the layout of the tensor that it writes.

    Args:
        func: a torch function, method, or any function of tensors made of them.
        sample_args: its arguments. Tensors should be small, float64 where they can be, and have
            uneven dims. Values are rounded to multiples of 2**-20 (float64) or 2**-8 (float32):
            sums of contributions are then exact.
        sample_kwargs: the same by name.

    Raises:
        RuleError: naming the combination, and what differs.

    Communication: in the simulated world only.

    Example:
        >>> x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
        >>> sm.ops.check_rule(torch.matmul, x, w)
        236
    """
    return prove(func, sample_args, sample_kwargs)


def prove(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    kinds: Sequence[str] = ("sum",),
    most: int | None = None,
) -> int:
    """Run `check_rule` on these meshes and pending kinds.

    With at most so many combinations on each mesh.

    Gradients are compared where every kind is a sum.
    """
    sample = _Sample.of(func, args, kwargs or {}, kinds)
    return sum(max(simulate(math.prod(shape))(_try_all)(sample, shape, most)) for shape in meshes)


# -- the single process ----------------------------------------------------------------------------


@dataclass
class _Sample:
    """A call, and its results on a single process.

    Attributes:
        values: the tensors among the arguments, in order.
        in_place: the call writes the first of them.
        differentiable: for which of the values torch has a gradient.
        results: everything the call returns, in order; for an in-place operator the tensor that it
            wrote.
        tolerance: by which results may differ.
        weights: for each result with a gradient, what backward starts from.
        gradients: of each floating value.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    kinds: Sequence[str]
    values: list[Tensor]
    in_place: bool
    differentiable: list[bool] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    tolerance: float = 0
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(
        func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], kinds: Sequence[str]
    ) -> _Sample:
        values = [_exact(t) for t in tensors_in((args, kwargs))]
        in_place = writes_first_operand(func) or kwargs.get("inplace") is True
        sample = _Sample(func, args, kwargs, kinds, values, in_place)
        sample.differentiable = [sample.is_differentiable_in(i) for i in range(len(values))]
        leaves = sample.leaves(sample.differentiable)
        results = sample.call(leaves)
        sources = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        generator = torch.Generator().manual_seed(1)
        sample.weights = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in sources]
        sample.gradients = _gradients(sources, leaves, sample.weights)
        sample.results = [r.detach() if isinstance(r, Tensor) else r for r in results]
        dtypes = [x.dtype for x in [*values, *sample.results] if isinstance(x, Tensor)]
        sample.tolerance = max(_TOLERANCE.get(dtype, 0) for dtype in dtypes)
        return sample

    def is_differentiable_in(self, number: int) -> bool:
        """Return whether torch has a gradient for one of the values."""
        if not (self.values[number].is_floating_point() or self.values[number].is_complex()):
            return False
        try:
            leaves = self.leaves([i == number for i in range(len(self.values))])
            sources = [r for r in self.call(leaves) if isinstance(r, Tensor) and r.requires_grad]
            _gradients(sources, leaves, sources)
        except RuntimeError as error:
            if any(words in str(error) for words in _NO_GRADIENT):
                return False
            raise
        return True

    def leaves(self, requires_grad: Sequence[bool]) -> list[Tensor]:
        """Return copies of the values."""
        return [
            x.clone().requires_grad_(grad)
            for x, grad in zip(self.values, requires_grad, strict=True)
        ]

    def call(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Call the operator on other tensors, on a copy of what it writes: leaves refuse it."""
        inputs = [t.clone() if self.in_place and i == 0 else t for i, t in enumerate(tensors)]
        rest = iter(inputs)
        args, kwargs = map_tensors(lambda _: next(rest), (tuple(self.args), self.kwargs))
        result = self.func(*args, **kwargs)
        return [inputs[0]] if self.in_place else flatten(result)[0]


def _exact(x: Tensor) -> Tensor:
    """Return the values, rounded so that sums of a few contributions are exact."""
    quantum = _QUANTUM.get(x.dtype)
    if quantum is None:
        return x.detach()
    if x.is_complex():
        return torch.view_as_complex((torch.view_as_real(x.detach()) * quantum).round() / quantum)
    return (x.detach() * quantum).round() / quantum


def _gradients(
    results: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the leaves that require one."""
    sources = [x for x in leaves if x.requires_grad]
    if not results or not sources:
        return []
    return list(
        torch.autograd.grad(
            list(results), sources, list(weights), allow_unused=True, materialize_grads=True
        )
    )


# -- the simulated ranks ---------------------------------------------------------------------------


def _try_all(sample: _Sample, shape: tuple[int, ...], most: int | None) -> int:
    """Try every combination on this rank and return the number of those that ran."""
    device = sample.values[0].device.type if sample.values else "cpu"
    mesh = init_device_mesh(device, shape, axis_names=_AXES[: len(shape)])
    return sum(_try(sample, mesh, specs) for specs in combinations(sample, mesh, most))


def combinations(sample: _Sample, mesh: DeviceMesh, most: int | None) -> Iterator[tuple[P, ...]]:
    """Yield one spec for each tensor, in every combination, and those with a ragged one.

    Of more than `most`, a sample that is always the same.
    """
    choices = [specs_of(x, mesh, sample.kinds) for x in sample.values]
    total, ragged = math.prod(map(len, choices)), _ragged_combinations(sample, mesh, choices)
    if most is None:
        most = total + len(ragged) if mesh.ndim == 1 else MAX_COMBINATIONS
    yield from ragged[: most // 2]
    most -= min(len(ragged), most // 2)
    if total <= most:
        yield from itertools.product(*choices)
        return
    generator = random.Random(0)
    numbers = (
        generator.sample(range(total), most)
        if total < sys.maxsize
        else (generator.randrange(total) for _ in range(most))
    )
    for number in numbers:
        picked = []
        for specs in choices:
            number, index = divmod(number, len(specs))
            picked.append(specs[index])
        yield tuple(picked)


def _ragged_combinations(
    sample: _Sample, mesh: DeviceMesh, choices: Sequence[Sequence[P]]
) -> list[tuple[P, ...]]:
    """Yield, on a mesh of one axis, each tensor once in parts of given sizes."""
    if mesh.ndim > 1:
        return []
    combinations = []
    for number, x in enumerate(sample.values):
        if x.ndim:
            generator = random.Random(number)
            picked = [generator.choice(specs) for specs in choices]
            picked[number] = _ragged_spec(x, generator.randrange(x.ndim), mesh)
            combinations.append(tuple(picked))
    return combinations


def _ragged_spec(x: Tensor, dim: int, mesh: DeviceMesh) -> P:
    """Return the spec with one element (or none) on the first rank and the others on the last."""
    (axis,), count, size = mesh.axis_names, mesh.size(), x.shape[dim]
    sizes = [0] * count
    sizes[0] = int(size > 2 and count > 1)
    sizes[-1] = size - sum(sizes[:-1])
    return P(*[None] * dim, axis, sizes={axis: sizes}).padded(x.ndim)


def specs_of(x: Tensor, mesh: DeviceMesh, kinds: Sequence[str] = ("sum",)) -> list[P]:
    """Return every spec of a tensor of this shape and dtype, with each order of axes."""
    kinds = [
        k
        for k in kinds
        if x.dtype not in (torch.bool, torch.uint8) and (k != "avg" or x.is_floating_point())
    ]
    specs: dict[P, None] = {}
    for order in itertools.permutations(mesh.axis_names):
        for states in itertools.product([None, *range(x.ndim), *kinds], repeat=mesh.ndim):
            placed = list(zip(order, states, strict=True))
            pending = {axis: state for axis, state in placed if isinstance(state, str)}
            if len(set(pending.values())) <= 1:
                dims = [tuple(axis for axis, state in placed if state == d) for d in range(x.ndim)]
                specs[P(*dims, unreduced=pending)] = None
    return list(specs)


def _try(sample: _Sample, mesh: DeviceMesh, specs: Sequence[P]) -> bool:
    """Return whether this combination ran, with the right result, and was not refused in place."""
    leaves = [
        place(x, mesh, spec, seed)
        for seed, (x, spec) in enumerate(zip(sample.values, specs, strict=True))
    ]
    for x, differentiable in zip(leaves, sample.differentiable, strict=True):
        x.requires_grad_(differentiable)
    before = [x._local.detach().clone() for x in leaves]
    try:
        results = sample.call(leaves)
        _check_results(results, sample)
        _check_gradients(results, leaves, sample)
        if all(
            torch.equal(x._local, b) or bool(b.isnan().any())
            for x, b in zip(leaves, before, strict=True)
        ):
            return True
        raise RuleError("the operator changed an input")
    except CannotKeep as error:
        if sample.in_place:
            return False
        raise _failure(sample, leaves, error) from error
    except Exception as error:
        raise _failure(sample, leaves, error) from error


def _failure(sample: _Sample, leaves: Sequence[ShardedTensor], error: Exception) -> RuleError:
    name = getattr(sample.func, "__name__", repr(sample.func))
    where = "\n".join(f"  {x._layout}" for x in leaves)
    return RuleError(
        f"{name} is wrong for tensors laid out as\n{where}\n{type(error).__name__}: {error}"
    )


def place(x: Tensor, mesh: DeviceMesh, spec: P, seed: int = 0) -> ShardedTensor:
    """Return this value as a leaf in this layout; pending contributions differ between ranks."""
    layout = Layout.of(mesh, spec, x.shape, x.dtype)
    index = count = 0
    for axis, _ in layout.spec.unreduced:
        index = index * mesh.size(axis) + mesh.get_local_rank(axis)
        count = max(count, 1) * mesh.size(axis)
    parts = _contributions(x, count, layout.spec.unreduced[0][1], seed) if count else [x]
    local = parts[index][slices(layout.box)].clone(memory_format=torch.contiguous_format)
    leaf = ShardedTensor._make(local, layout)
    return leaf


def _contributions(x: Tensor, count: int, kind: str, seed: int) -> list[Tensor]:
    """Return `count` tensors that combine to x: small integers or powers of two, and the rest."""
    generator = torch.Generator("cpu").manual_seed(seed)  # the same numbers on every device
    offsets = [
        torch.randint(1, 4, x.shape, generator=generator, device="cpu").to(x)
        for _ in range(count - 1)
    ]
    if kind == "sum":
        return [x - sum(offsets), *offsets]
    if kind == "avg":
        return [x - sum(offsets), *[x + o for o in offsets]]
    if kind == "product":
        return [x / 2 ** (count - 1), *[torch.full_like(x, 2)] * (count - 1)]
    sign = -1 if kind == "max" else 1
    return [*[x + sign * o for o in offsets], x.clone()]


def _check_results(results: Sequence[Any], sample: _Sample) -> None:
    """Compare with the single process.

    Raises:
        RuleError: shape, dtype, local shape, value or gradient differs.
    """
    if len(results) != len(sample.results):
        raise RuleError(f"{len(results)} results instead of {len(sample.results)}")
    for got, want in zip(results, sample.results, strict=True):
        _check_value("result", got, want, sample.tolerance)


def _check_value(what: str, got: Any, want: Any, tolerance: float) -> None:
    if not isinstance(want, Tensor):
        if got != want:
            raise RuleError(f"{what} {got!r} instead of {want!r}")
        return
    if not isinstance(got, ShardedTensor):
        raise RuleError(f"{what} is a {type(got).__name__}, not a ShardedTensor")
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise RuleError(f"{what} is {got._layout}, and should be {want.dtype}{list(want.shape)}")
    if got._local.shape != got._layout.local_shape or got._local.dtype != got.dtype:
        raise RuleError(
            f"{what} is {got._layout}, with a local tensor "
            f"{got._local.dtype}{list(got._local.shape)}"
        )
    actual, expected = got.detach()._local, want[slices(got._layout.box)]
    if got._layout.pending:
        actual, expected = got.detach().full_tensor(), want
    if not torch.equal(actual, expected):
        _check_close(f"{what} in layout {got._layout}", actual, expected, tolerance)


def _check_close(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    try:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise RuleError(f"{what}: {error}") from None


def _check_gradients(
    results: Sequence[Any], leaves: Sequence[ShardedTensor], sample: _Sample
) -> None:
    if set(sample.kinds) != {"sum"}:
        return  # along an axis pending with another kind, each rank's part has a separate gradient
    sources = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if len(sources) != len(sample.weights):
        raise RuleError(f"{len(sources)} results require grad instead of {len(sample.weights)}")
    for got, want in zip(
        _gradients(sources, leaves, sample.weights), sample.gradients, strict=True
    ):
        _check_value("gradient", got, want, sample.tolerance)
