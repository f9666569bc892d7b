"""Statistics: variances, covariances and quantiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..decomposition_utils import settled, splits
from ..elementwise.pointwise import is_operand
from ..notation import Rule, einrule
from ..registry import form, rule
from .reduction import accumulator_dtype, normal_dims, reduction, safe_root

# -- variances --------------------------------------------------------------------------------------------------------


def _moments(x: Any, dims: Sequence[int], keepdim: bool, correction: float) -> tuple[Any, Any]:
    """Variance in two passes (the mean, then squared distances from it), and the mean."""
    wide = settled(x).to(accumulator_dtype(x.dtype))
    mean = settled(wide.mean(dims, keepdim=True))
    distance = wide - mean
    squares = (distance * distance.conj()).real if x.is_complex() else distance * distance
    count = max(math.prod(x.shape[d] for d in dims) - correction, 0)
    return settled(squares.sum(dims, keepdim=keepdim)) / count, mean if keepdim else mean.squeeze(dims)


Arguments = tuple[tuple[int, ...], bool, float]


def _arguments(
    input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Arguments:
    """The dims, keepdim and the correction; `var(unbiased)` has a bool where others have a dim."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return normal_dims(dim, input.ndim), keepdim, float(unbiased) if correction is None else correction


def _variance(name: str) -> None:
    """Register var, std, var_mean or std_mean."""
    deviation, with_mean = name.startswith("std"), name.endswith("mean")
    own = getattr(torch, name)

    def make_form(input: Tensor, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        dims = _arguments(input, *args, **kwargs)[0]
        if not splits(input, dims):
            return None
        results = own(input, *args, **kwargs)
        dtype = (results[0] if with_mean else results).dtype

        def run(input: Any, *args: Any, **kwargs: Any) -> Any:
            var, mean = _moments(input, *_arguments(input, *args, **kwargs))
            spread = (safe_root(var) if deviation else var).to(dtype)
            return (spread, mean.to(input.dtype)) if with_mean else spread

        return run

    def make_rule(input: Tensor, *args: Any, **kwargs: Any) -> Rule:
        dims, keepdim, _ = _arguments(input, *args, **kwargs)

        def local(part: Tensor, *args: Any, **kwargs: Any) -> Any:
            """torch's own; of no rows at all, where it would warn of too few elements, as many sums."""
            if part.numel() or not all(part.shape[d] for d in dims):
                return own(part, *args, **kwargs)
            nothing = part.sum(dims, keepdim=keepdim)
            square = (nothing * nothing).real  # which has a second derivative, as on other ranks
            return (square, nothing) if with_mean else square

        return reduction(input, dims, keepdim, whole=True, results=1 + with_mean, local=local)

    form(name)(make_form)
    rule(name)(make_rule)


for _name in ("var", "std", "var_mean", "std_mean"):
    _variance(_name)


# -- covariances ------------------------------------------------------------------------------------------------------


def _covariance(dtype: torch.dtype, correction: float, x: Any, fweights: Any = None, aweights: Any = None) -> Any:
    """As torch has it: rows are variables, columns observations, weighted if need be."""
    x = settled(x).to(dtype)
    x = x[None] if x.ndim < 2 else x
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        mean, scale = x.mean(1, keepdim=True), max(x.shape[1] - correction, 0)
    else:
        weights = settled(weights)
        total = settled(weights.sum())
        mean = (x * weights).sum(1, keepdim=True) / total
        lost = correction if aweights is None else correction * settled((weights * aweights).sum()) / total
        scale = (total - lost).clamp_min(0)
    distance = x - settled(mean)
    weighted = distance if weights is None else distance * weights
    return (settled(distance @ weighted.T.conj()) / scale).squeeze()


def _check_covariance(input: Tensor, fweights: Tensor | None, aweights: Tensor | None) -> torch.dtype:
    """The dtype of covariances.

    Raises:
        RuntimeError: torch would refuse these arguments.
    """
    if input.ndim > 2:
        raise RuntimeError(f"cov(): expected input to have two or fewer dimensions but got {input.ndim}")
    count = input.shape[-1] if input.ndim else 1
    for name, weights, fits in (
        ("fweights", fweights, lambda x: not (x.dtype.is_floating_point or x.dtype.is_complex)),
        ("aweights", aweights, lambda x: x.dtype.is_floating_point),
    ):
        if weights is not None and (weights.ndim > 1 or weights.numel() != count or not fits(weights)):
            raise RuntimeError(
                f"cov(): {name} of {weights.dtype}{list(weights.shape)} for {count} observations; give one "
                f"{'whole number' if name == 'fweights' else 'floating number'} for each"
            )
    floating = input.dtype.is_floating_point or input.dtype.is_complex
    return input.dtype if floating else torch.get_default_dtype()


@form("cov")
def _cov_form(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Any:
    dtype = _check_covariance(input, fweights, aweights)
    given = [x for x in (input, fweights, aweights) if x is not None]
    if not any(splits(x, range(x.ndim)) for x in given):
        return None

    def run(input: Any, *, fweights: Any = None, aweights: Any = None, **_: Any) -> Any:
        return _covariance(dtype, correction, input, fweights, aweights)

    return run


@rule("cov")
def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Rule:
    dtype = _check_covariance(input, fweights, aweights)
    rows = "[v] [n]" if input.ndim == 2 else "[n]" if input.ndim else ""
    shape = (input.shape[0],) * 2 if input.ndim == 2 and input.shape[0] != 1 else ()
    result = torch.empty(shape, dtype=dtype, device="meta")
    return einrule(f"{rows}, [n], [n] -> {'1 1' if shape else ''}", input, fweights, aweights, result=result)


@form("corrcoef")
def _corrcoef_form(input: Tensor) -> Any:
    dtype = _check_covariance(input, None, None)
    return partial(_correlations, dtype) if splits(input, range(input.ndim)) else None


def _correlations(dtype: torch.dtype, input: Any) -> Any:
    """Covariances by both standard deviations; as in torch, clipped to [-1, 1]."""
    c = _covariance(dtype, 1, input)
    if c.ndim == 0:
        return c / c
    variance = c.diagonal().real if c.is_complex() else c.diagonal()
    deviation = variance.sqrt()
    c = c / deviation[:, None] / deviation[None]
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


@rule("corrcoef")
def _corrcoef(input: Tensor) -> Rule:
    return _cov(input)


# -- quantiles --------------------------------------------------------------------------------------------------------


def _register_quantile(name: str) -> None:
    own = getattr(torch, name)

    @rule(name)
    def make(
        input: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> Rule:
        """The reduced dim is sorted, so it is whole; every number of `q` is by itself."""
        dims = normal_dims(dim, input.ndim)
        operands = [input, q] if is_operand(q) else [input]
        several = "q" if isinstance(q, Tensor) and q.ndim else ""
        left = " ".join(f"[d{i}]" if i in dims else f"d{i}" for i in range(input.ndim))
        right = " ".join(("1" if keepdim else "") if i in dims else f"d{i}" for i in range(input.ndim))
        pattern = f"{left}, {several} -> {several} {right}" if len(operands) > 1 else f"{left} -> {right}"
        return einrule(pattern, *operands, local=partial(_quantile_part, own, dims, keepdim))


def _quantile_part(
    own: Callable[..., Tensor], dims: tuple[int, ...], keepdim: bool, part: Tensor, q: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """torch's own, which refuses an empty tensor; of no rows at all, as many sums."""
    if part.numel() or not all(part.shape[d] for d in dims):
        return own(part, q, *args, **kwargs)
    nothing = part.sum(dims, keepdim=keepdim)
    if not isinstance(q, Tensor):
        return nothing
    nothing = nothing * q.sum()  # so that both take part in backward, as on the other ranks
    return nothing.expand(q.shape[0], *nothing.shape) if q.ndim else nothing


for _name in ("quantile", "nanquantile"):
    _register_quantile(_name)
