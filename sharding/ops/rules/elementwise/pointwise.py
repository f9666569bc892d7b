"""Elementwise operators, with broadcasting and type promotion."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..notation import Rule, einrule
from ..registry import handler, rule, rules

# Any function of the elements: pending operands are reduced first.
_NONLINEAR = """
    abs absolute acos arccos acosh arccosh angle arcsin asin asinh arcsinh atan arctan atanh arctanh
    atan2 arctan2 bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift
    bitwise_right_shift ceil clamp clip clamp_min clamp_max copysign cos cosh digamma erf erfc
    erfinv exp exp2 expm1 fix floor floor_divide fmax fmin fmod frac gcd heaviside hypot i0 igamma
    igammac isclose isfinite isinf isnan isneginf isposinf isreal lcm ldexp lgamma log log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit maximum minimum
    mvlgamma nan_to_num nextafter polygamma pow float_power reciprocal remainder round rsqrt sgn
    sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc xlogy eq ne lt le gt ge not_equal
    less less_equal greater greater_equal relu relu6 leaky_relu elu selu celu gelu silu mish
    softplus hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink softsign logsigmoid
    threshold addcmul addcdiv entr ndtr ndtri expit xlog1py erfcx i0e i1 i1e zeta log_ndtr psi
    gammaln gammainc gammaincc multigammaln airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1
    modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 chebyshev_polynomial_t
    chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
    polar __and__ __or__ __xor__ __invert__ __lshift__ __rshift__ __rpow__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rtruediv__ __rdiv__ __eq__ __ne__ __lt__ __le__ __gt__
    __ge__ __abs__ __rand__ __ror__ __rxor__ __rlshift__ __rrshift__ __iand__ __ior__ __ixor__
    __ilshift__ __irshift__ __ipow__ __imod__ __ifloordiv__
"""
# f(x + y) = f(x) + f(y) in the one operand.
_LINEAR = """
    clone contiguous neg negative positive deg2rad rad2deg real imag conj conj_physical
    __neg__ __pos__ zero_
"""


def with_in_place(names: str) -> Iterator[str]:
    """Yield each name and that of its in-place variant."""
    for name in names.split():
        yield name
        if not name.endswith("_"):
            yield f"{name}_"


def broadcast(*operands: Tensor, **options: Any) -> Rule:
    """Return the rule of an operator whose operands broadcast against each other."""
    pattern = ", ".join(["..."] * len(operands)) + " -> ..."
    return einrule(pattern, *operands, pointwise=True, **options)


def tensors_of(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Return the operands among an operator's arguments, without numbers and plain 0-d tensors."""
    return [a for a in (*args, *kwargs.values()) if is_operand(a)]


def is_operand(x: Any) -> bool:
    """Return whether a meta tensor stands for a `ShardedTensor`, and not for a plain 0-d one."""
    return isinstance(x, Tensor) and hasattr(x, "_operand")


@rule(*with_in_place(_NONLINEAR))
def _nonlinear(*args: Any, **kwargs: Any) -> Rule:
    return broadcast(*tensors_of(*args, **kwargs))


# The gradients of such functions as aten computes them, for torch.func.grad.
_GRADIENTS = """
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward mish_backward sigmoid_backward
    silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward
"""


@rule(also=tuple(getattr(torch.ops.aten, name).default for name in _GRADIENTS.split()))
def _gradient(*args: Any, **kwargs: Any) -> Rule:
    return broadcast(*tensors_of(*args, **kwargs), linear=((0,),))


rules(
    {
        "add sub subtract __add__ __radd__ __sub__ rsub __rsub__(input, other, **_)": lambda a: (
            _sum(a.input, a.other)
        ),
        "mul mul_ multiply multiply_ __mul__ __rmul__ __imul__(input, other)": lambda a: _product(
            a.input, a.other
        ),
        "div div_ divide divide_ true_divide true_divide_ __truediv__ __div__ __itruediv__ __idiv__"
        "(input, other, *, rounding_mode=None)": lambda a: _linear_if(
            a.rounding_mode is None and is_operand(a.input), a.input, a.other
        ),
        "lerp lerp_(input, end, weight)": lambda a: _linear_if(
            is_operand(a.input) and is_operand(a.end), a.input, a.end, a.weight, group=(0, 1)
        ),
        "complex(real, imag)": lambda a: broadcast(a.real, a.imag, linear=((0, 1),)),
        "fill fill_(input, value)": lambda a: broadcast(*tensors_of(a.input, a.value)),
        "frexp(input)": "... -> ..., ...",
    }
)


def _sum(input: Any, other: Any) -> Rule:
    operands = tensors_of(input, other)
    if len(operands) == 2:
        return broadcast(*operands, linear=((0, 1),))
    zero = _is_zero(input) or _is_zero(other)  # as in Python's sum(), which starts with 0
    return broadcast(*operands, linear=((0,),) if zero else ())


def _product(input: Any, other: Any) -> Rule:
    operands = tensors_of(input, other)
    return broadcast(*operands, linear=tuple((i,) for i in range(len(operands))))


_GETTERS = (torch.Tensor.real.__get__, torch.Tensor.imag.__get__)  # type: ignore[attr-defined]


@rule(*with_in_place(_LINEAR), also=_GETTERS)
def _linear(input: Tensor, *, memory_format: Any = None) -> Rule:
    return broadcast(input, linear=((0,),))


@rule("prelu")
def _prelu(input: Tensor, weight: Tensor) -> Rule:
    """Return the rule: one slope for each channel, which is dim 1."""
    channels = "c" if weight.ndim == 1 and input.ndim > 1 else "1" if weight.ndim == 1 else ""
    names = " ".join("c" if d == 1 else f"d{d}" for d in range(input.ndim))
    return einrule(f"{names}, {channels} -> {names}", input, weight)


@rule("renorm", "renorm_")
def _renorm(input: Tensor, p: float, dim: int, maxnorm: float) -> Rule:
    """Return the rule: slices along `dim` are scaled by norms over all others, which are whole."""
    names = " ".join(f"d{i}" if i == dim % input.ndim else f"[d{i}]" for i in range(input.ndim))
    return einrule(f"{names} -> {names}", input)


# -- casts -----------------------------------------------------------------------------------------


def casts_linearly(source: torch.dtype, target: torch.dtype | None) -> bool:
    """Return whether the sum of casts is the cast of the sum: not where a cast rounds."""
    if target is None or source == target:
        return True
    return target != torch.bool and (_is_fractional(target) or not _is_fractional(source))


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def cast(input: Tensor, dtype: torch.dtype, **options: Any) -> Rule:
    """Return the rule of a change of dtype."""
    return broadcast(input, linear=((0,),) if casts_linearly(input.dtype, dtype) else (), **options)


_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}
rules(
    {
        f"{name}(input, memory_format=None)": lambda a: cast(a.input, _CASTS[a.func.__name__])
        for name in _CASTS
    },
    with_func=True,
)
rules(
    {
        "to_dense(input, dtype=None, *, masked_grad=None)": lambda a: cast(
            a.input, a.dtype or a.input.dtype
        ),
        "cpu(input, **_)": lambda a: _to(a.input, "cpu"),
        "cuda(input, *_, **__)": lambda a: _to(a.input, "cuda"),
    }
)


@handler("type_as")
def _type_as(input: Any, other: Any) -> Any:
    return input.to(other.dtype)


@handler("type")
def _type(input: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Return torch's old name of a tensor's type, such as "torch.DoubleTensor", or cast to it."""
    module = "torch" if input.mesh.device_type == "cpu" else f"torch.{input.mesh.device_type}"
    if dtype is None:
        return f"{module}.{torch.empty(0, dtype=input.dtype).type().removeprefix('torch.')}"
    if isinstance(dtype, torch.dtype):
        return NotImplemented
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    where, _, kind = name.rpartition(".")
    if where != module:
        raise ValueError(
            f"type({name!r}): {input._layout} is on {input.mesh.device_type}; give a dtype, such "
            "as torch.float64"
        )
    return input.to(torch.empty(0).type(f"torch.{kind}").dtype)


@handler("to")
def _to_like(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Cast to the dtype of another tensor, `x.to(other)`; return x itself if nothing changes."""
    other = kwargs.pop("other", args[0] if args else None)
    if isinstance(other, Tensor):
        return input.to(other.dtype, *args[1:], **kwargs)
    is_same = len(args) == 1 and not kwargs and _has_already(input, other)
    return input if is_same else NotImplemented


def _has_already(input: Any, value: Any) -> bool:
    """Return whether a tensor has a dtype, or is on the devices of a type."""
    if isinstance(value, torch.dtype):
        return value == input.dtype
    if isinstance(value, (str, torch.device)):
        return torch.device(value).type == input.device.type
    return False


@rule("to", "type")
def _to(input: Tensor, *args: Any, **kwargs: Any) -> Rule | None:
    """Change the dtype, or move to "meta" and back to the mesh's devices; refuse other devices."""
    values = [*args, *kwargs.values()]
    dtype = next((v for v in values if isinstance(v, torch.dtype)), input.dtype)
    device = next((torch.device(v) for v in values if isinstance(v, (str, torch.device))), None)
    if device is not None:
        check_device(input, device)
    if device is not None and device.type == "meta" and input.ndim == 0:
        device = None
    local = partial(_cast_local, dtype=dtype, moved_to=device, copy=bool(kwargs.get("copy", False)))
    return cast(
        input, dtype, local=local, result=torch.empty(input.shape, dtype=dtype, device="meta")
    )


def _cast_local(
    local: Tensor,
    *args: Any,
    dtype: torch.dtype,
    moved_to: torch.device | None,
    copy: bool,
    **kwargs: Any,
) -> Tensor:
    """Cast this rank's part, which stays on its device if that is of the wanted type."""
    device = None if moved_to is None or moved_to.type == local.device.type else moved_to
    return local.to(device=device, dtype=dtype, copy=copy)


def check_device(input: Tensor, device: torch.device) -> None:
    """Check that a device is of the type of the mesh, or "meta".

    A 0-d tensor that is moved to "meta", the device of the wrappers, stays where it is:
    `torch.nn.utils.clip_grad_norm_` groups gradients by the device that C++ reports, and moves the
    norm there.

    Raises:
        ValueError: the device is of another type.
    """
    mesh = input._operand.mesh  # type: ignore[attr-defined]
    if device.type not in (mesh.device_type, "meta"):
        raise ValueError(
            f"cannot move a ShardedTensor on {mesh} to {device}: its parts are on the mesh's "
            f"devices; make a mesh of device type {device.type!r} and build the tensor there, or "
            "take x.to_local() or x.full_tensor() and move that"
        )


# -- choices ---------------------------------------------------------------------------------------


rules(
    {
        "torch.where(condition, input, other)": lambda a: _where(a.condition, a.input, a.other),
        "Tensor.where(input, condition, other)": lambda a: (
            _where(a.condition, a.input, a.other)
            if is_operand(a.condition)
            else broadcast(*tensors_of(a.input, a.other))
        ),
        "masked_fill masked_fill_(input, mask, value)": lambda a: _linear_if(
            _is_zero(a.value), a.input, a.mask, a.value
        ),
    }
)


def _where(condition: Tensor, input: Any, other: Any) -> Rule:
    """Return the rule: linear in both branches together if both are tensors or one is zero."""
    operands = tensors_of(condition, input, other)
    both = is_operand(condition) and all(is_operand(v) or _is_zero(v) for v in (input, other))
    branches = (range(1, len(operands)),) if both and len(operands) > 1 else ()
    return broadcast(*operands, linear=branches)


def _linear_if(condition: bool, *arguments: Any, group: tuple[int, ...] = (0,)) -> Rule:
    """Return the rule of an operator that is linear in a group of its operands in some cases."""
    return broadcast(*tensors_of(*arguments), linear=(group,) if condition else ())


def _is_zero(value: Any) -> bool:
    # not a number of a recording, which is none to be compared
    return type(value) in (bool, int, float) and value == 0
