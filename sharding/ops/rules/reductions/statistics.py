"""Statistics: variances, covariances and quantiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..decomposition_utils import is_split, reduce_pending
from ..elementwise.pointwise import is_operand
from ..notation import Rule, dim_names, einrule
from ..registry import decomposition_maker, rule
from .reduction import accumulator_dtype, normal_dims, reduction, safe_root

# -- variances -------------------------------------------------------------------------------------


def _moments(x: Any, dims: Sequence[int], keepdim: bool, correction: float) -> tuple[Any, Any]:
    """Return the variance, in two passes (the mean, then squared distances), and the mean."""
    wide = reduce_pending(x).to(accumulator_dtype(x.dtype))
    mean = reduce_pending(wide.mean(dims, keepdim=True))
    distance = wide - mean
    squares = (distance * distance.conj()).real if x.is_complex() else distance * distance
    count = max(math.prod(x.shape[d] for d in dims) - correction, 0)
    var = reduce_pending(squares.sum(dims, keepdim=keepdim)) / count
    return var, mean if keepdim else mean.squeeze(dims)


Arguments = tuple[tuple[int, ...], bool, float]


def _arguments(
    input: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Arguments:
    """Return the dims, keepdim and correction; `var(unbiased)` has a bool in place of the dim."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    correction = float(unbiased) if correction is None else correction
    return normal_dims(dim, input.ndim), keepdim, correction


@decomposition_maker("var", "std", "var_mean", "std_mean", with_func=True)
def _variance(own: Any, input: Tensor, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    deviation, with_mean = own.__name__.startswith("std"), own.__name__.endswith("mean")
    if not is_split(input, _arguments(input, *args, **kwargs)[0]):
        return None
    results = own(input, *args, **kwargs)
    dtype = (results[0] if with_mean else results).dtype

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        var, mean = _moments(input, *_arguments(input, *args, **kwargs))
        spread = (safe_root(var) if deviation else var).to(dtype)
        return (spread, mean.to(input.dtype)) if with_mean else spread

    return run


@rule("var", "std", "var_mean", "std_mean", with_func=True)
def _variance_rule(own: Any, input: Tensor, *args: Any, **kwargs: Any) -> Rule:
    dims, keepdim, _ = _arguments(input, *args, **kwargs)
    with_mean = own.__name__.endswith("mean")

    def local(part: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call torch's function; of an empty part, for which it would warn, return sums."""
        if part.numel() or not all(part.shape[d] for d in dims):
            return own(part, *args, **kwargs)
        nothing = part.sum(dims, keepdim=keepdim)
        square = (nothing * nothing).real  # it has a second derivative, as on other ranks
        return (square, nothing) if with_mean else square

    return reduction(input, dims, keepdim, whole=True, results=1 + with_mean, local=local)


# -- covariances -----------------------------------------------------------------------------------


def _covariance(
    dtype: torch.dtype, correction: float, x: Any, fweights: Any = None, aweights: Any = None
) -> Any:
    """Return covariances as torch does: rows are variables, columns (weighted) observations."""
    x = reduce_pending(x).to(dtype)
    x = x[None] if x.ndim < 2 else x
    weights = (
        fweights if aweights is None else aweights if fweights is None else fweights * aweights
    )
    if weights is None:
        mean, scale = x.mean(1, keepdim=True), max(x.shape[1] - correction, 0)
    else:
        weights = reduce_pending(weights)
        total = reduce_pending(weights.sum())
        mean = (x * weights).sum(1, keepdim=True) / total
        lost = (
            correction
            if aweights is None
            else correction * reduce_pending((weights * aweights).sum()) / total
        )
        scale = (total - lost).clamp_min(0)
    distance = x - reduce_pending(mean)
    weighted = distance if weights is None else distance * weights
    return (reduce_pending(distance @ weighted.T.conj()) / scale).squeeze()


def _check_covariance(
    input: Tensor, fweights: Tensor | None, aweights: Tensor | None
) -> torch.dtype:
    """Return the dtype of covariances.

    Raises:
        RuntimeError: torch would refuse these arguments.
    """
    if input.ndim > 2:
        raise RuntimeError(
            f"cov(): expected input to have two or fewer dimensions but got {input.ndim}"
        )
    count = input.shape[-1] if input.ndim else 1
    for name, weights, fits in (
        ("fweights", fweights, lambda x: not (x.dtype.is_floating_point or x.dtype.is_complex)),
        ("aweights", aweights, lambda x: x.dtype.is_floating_point),
    ):
        if weights is not None and (
            weights.ndim > 1 or weights.numel() != count or not fits(weights)
        ):
            raise RuntimeError(
                f"cov(): {name} of {weights.dtype}{list(weights.shape)} for {count} observations; "
                f"give one {'whole number' if name == 'fweights' else 'floating number'} for each"
            )
    floating = input.dtype.is_floating_point or input.dtype.is_complex
    return input.dtype if floating else torch.get_default_dtype()


def _cov_rule(a: Any) -> Rule:
    input, dtype = a.input, _check_covariance(a.input, a.fweights, a.aweights)
    rows = "[v] [n]" if input.ndim == 2 else "[n]" if input.ndim else ""
    shape = (input.shape[0],) * 2 if input.ndim == 2 and input.shape[0] != 1 else ()
    result = torch.empty(shape, dtype=dtype, device="meta")
    return einrule(
        f"{rows}, [n], [n] -> {'1 1' if shape else ''}",
        input,
        a.fweights,
        a.aweights,
        result=result,
    )


@decomposition_maker("cov", rule=_cov_rule)
def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Any:
    dtype = _check_covariance(input, fweights, aweights)
    if not any(is_split(x) for x in (input, fweights, aweights) if x is not None):
        return None

    return lambda input, *, fweights=None, aweights=None, **_: _covariance(
        dtype, correction, input, fweights, aweights
    )


@decomposition_maker(
    "corrcoef",
    rule=lambda a: _cov_rule(SimpleNamespace(input=a.input, fweights=None, aweights=None)),
)
def _corrcoef(input: Tensor) -> Any:
    dtype = _check_covariance(input, None, None)
    return partial(_correlations, dtype) if is_split(input) else None


def _correlations(dtype: torch.dtype, input: Any) -> Any:
    """Return covariances divided by both standard deviations, clipped to [-1, 1] as torch does."""
    c = _covariance(dtype, 1, input)
    if c.ndim == 0:
        return c / c
    variance = c.diagonal().real if c.is_complex() else c.diagonal()
    deviation = variance.sqrt()
    c = c / deviation[:, None] / deviation[None]
    return (
        torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)
    )


# -- quantiles -------------------------------------------------------------------------------------


@rule("quantile", "nanquantile", with_func=True)
def _quantile(
    own: Any,
    input: Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Rule:
    """Return the rule: the reduced dim is sorted, so it is whole; numbers of `q` may be split."""
    dims = normal_dims(dim, input.ndim)
    local = partial(_quantile_of_part, own, dims, keepdim)
    if not is_operand(q):
        return reduction(input, dims, keepdim, whole=True, local=local)
    several, reduced = "q" if q.ndim else "", "1" if keepdim else ""
    right = " ".join(reduced if i in dims else f"d{i}" for i in range(input.ndim))
    pattern = f"{dim_names(input.ndim, dims)}, {several} -> {several} {right}"
    return einrule(pattern, input, q, local=local)


def _quantile_of_part(
    own: Callable[..., Tensor],
    dims: tuple[int, ...],
    keepdim: bool,
    /,
    part: Tensor,
    q: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Call torch's function, which refuses an empty tensor; of an empty part, return sums."""
    if part.numel() or not all(part.shape[d] for d in dims):
        return own(part, q, *args, **kwargs)
    nothing = part.sum(dims, keepdim=keepdim)
    if not isinstance(q, Tensor):
        return nothing
    nothing = nothing * q.sum()  # so that both are in the autograd graph, as on the other ranks
    return nothing.expand(q.shape[0], *nothing.shape) if q.ndim else nothing
