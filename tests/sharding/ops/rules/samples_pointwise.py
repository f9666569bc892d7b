"""Sample calls of elementwise operators. (4, 3) is even on 2 ranks, uneven or with an empty part on
3.
"""

import torch

from tests.sharding.ops.rules.table import b, c, call, f, i, pos, samples, unit

X = f(4, 3)
ROW, COLUMN, NUMBER = f(3, seed=1), f(4, 1, seed=2), f(seed=3)

# -- one operand -----------------------------------------------------------------------------------

samples(
    """abs absolute arctan atan asinh arcsinh ceil cos cosh erf erfc exp exp2 expm1 fix floor frac
    i0 round sgn sigmoid sign signbit sin sinc sinh square tan tanh trunc neg negative positive pos
    deg2rad rad2deg relu relu6 leaky_relu elu selu celu gelu silu mish softplus hardtanh hardsigmoid
    hardswish hardshrink softshrink tanhshrink softsign logsigmoid ndtr expit erfcx i0e i1 i1e
    nan_to_num isfinite isinf isnan isneginf isposinf isreal resolve_conj resolve_neg contiguous
    cfloat cdouble""",
    call(X),
)
samples("acos arccos asin arcsin atanh arctanh erfinv", call(unit(4, 3) - 0.5))
samples("acosh arccosh", call(1 + pos(4, 3)))
samples("digamma lgamma log log10 log1p log2 reciprocal rsqrt sqrt entr", call(pos(4, 3)))
samples("logit ndtri", call(unit(4, 3)))
samples("logit", call(f(4, 3), 0.2))
samples("angle conj conj_physical", call(X), call(c(4, 3)))
samples("real", call(X))
samples("imag view_as_real", call(c(4, 3)))
samples("view_as_complex", call(f(4, 3, 2)))
samples("bitwise_not invert", call(i(4, 3)), call(b(4, 3)))
samples("logical_not", call(X > 0), call(i(4, 3, high=2)))
samples("Tensor.logical_not_ ", call(f(4, 3)))
samples("clone zero", call(X), call(i(4, 3)))
samples("gelu", call(X, approximate="tanh"))
samples("round", call(X, decimals=1))
samples(
    "nan_to_num",
    call(
        torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [3.0, 4.0]], dtype=torch.float64),
        0.5,
    ),
)
samples("threshold", call(X, 0.1, 7.0))
samples("leaky_relu elu celu hardshrink softshrink", call(X, 0.3))
samples("hardtanh", call(X, -0.5, 0.7))
samples("softplus", call(X, 2.0, 1.0))
samples("mvlgamma", call(2 + pos(4, 3), 2))
samples("Tensor.polygamma polygamma_", call(pos(4, 3), 1))
samples("torch.polygamma special.polygamma", call(1, pos(4, 3)))
samples(
    "clamp clip", call(X, -0.5, 0.5), call(X, min=-0.2), call(X, f(3), pos(4, 1)), call(X, max=f(3))
)
samples("clamp_min clamp_max", call(X, 0.2), call(X, f(3)))
samples("fill", call(X, 2.5), call(X, NUMBER))
samples(
    "relu relu6 leaky_relu elu selu celu silu mish hardtanh hardsigmoid hardswish",
    call(X, inplace=True),
)
for name in ("torch", "Tensor", "special"):  # only torch.nn.functional's take inplace=
    for function in "relu leaky_relu elu selu celu silu hardtanh".split():
        samples(f"{name}.{function} {name}.{function}_", call(X))
samples("F.relu_ F.leaky_relu_ F.elu_ F.selu_ F.celu_ F.hardtanh_", call(X))
samples("torch.threshold_ F._threshold", call(X, 0.1, 7.0))

# -- casts -----------------------------------------------------------------------------------------

samples("float double half bfloat16", call(f(4, 3, dtype=torch.float32)), call(i(4, 3)))
samples("long int short char bool", call(X * 3), call(i(4, 3)))
samples("byte", call(pos(4, 3)))
samples("type_as", call(X, i(2)), call(f(4, 3, dtype=torch.float32), f(2)))
samples(
    "to",
    call(X, torch.float32),
    call(X, torch.int64),
    call(f(4, 3, dtype=torch.float32), dtype=torch.float64, copy=True),
)
samples(
    "to",
    call(X, "cpu", torch.float32),
    call(X, device="cpu"),
    call(i(4, 3), torch.float64),
    call(X, f(2, dtype=torch.float32)),
)
samples(
    "type",
    call(X, torch.float32),
    call(X, torch.int32),
    call(X),
    call(X, "torch.FloatTensor"),
    call(X, torch.DoubleTensor),
)
samples("to_dense", call(X), call(X, torch.float32))
samples("cpu", call(X))

# -- two operands ----------------------------------------------------------------------------------

BOTH = [call(X, ROW), call(X, f(4, 3, seed=5)), call(X, 0.5)]
samples(
    "add sub subtract mul multiply",
    *BOTH,
    call(X, NUMBER),
    call(X, COLUMN),
    call(X, i(3)),
    call(X, c(3)),
    call(X, 2),
)
samples(
    "add sub subtract",
    call(X, ROW, alpha=-2),
    call(X, other=ROW, alpha=0.5),
    call(f(), f()),
    call(X, 1.5, alpha=2),
)
samples(
    "mul multiply",
    call(X, other=ROW),
    call(f(1, 3), f(4, 1)),
    call(f(4, 3, dtype=torch.float32), f()),
    call(i(4, 3), f(3)),
)
# What writes into X cannot become complex, nor larger.
for name in "add sub subtract mul multiply".split():
    samples(
        f"Tensor.{name}_",
        *BOTH,
        call(X, NUMBER),
        call(X, COLUMN),
        call(X, i(3)),
        call(X, 2),
        call(f(1, 3), f(3)),
    )
for name in "__iadd__ __isub__ __imul__ __itruediv__ __idiv__".split():
    samples(f"Tensor.{name}", *BOTH, call(X, COLUMN))
samples("rsub", *BOTH, call(X, ROW, alpha=2))
samples("Tensor.__rsub__", *BOTH)
samples("div divide true_divide", *BOTH, call(X, COLUMN), call(i(4, 3), 2), call(X, NUMBER))
samples("Tensor.div_ Tensor.divide_ Tensor.true_divide_", *BOTH, call(X, COLUMN))
samples("div divide", call(X, ROW, rounding_mode="floor"), call(X, 0.7, rounding_mode="trunc"))
samples("reciprocal_of power_of", call(pos(4, 3), 2), call(pos(4, 3), 0.5))
samples("pow", call(X, 2), call(X, 2.0), call(pos(4, 3), ROW), call(X, 0))
samples("torch.pow", call(2, X), call(pos(4, 3), ROW), call(X, 3))
samples("float_power", call(pos(4, 3), ROW), call(X, 2))
samples(
    "atan2 arctan2 copysign fmax fmin hypot logaddexp logaddexp2 maximum minimum nextafter",
    call(X, ROW),
    call(X, COLUMN),
)
samples("heaviside xlogy xlog1py", call(X, pos(3)))
samples("igamma igammac gammainc gammaincc", call(pos(4, 3).detach(), pos(3).detach()))
samples("ldexp", call(X, i(3)))
samples("zeta", call(1.5 + pos(4, 3), pos(3)))
samples(
    "remainder fmod floor_divide",
    call(X, ROW),
    call(X, 0.7),
    call(i(4, 3), i(3, low=1)),
    call(i(4, 3), 2),
)
samples("Tensor.__rmod__ Tensor.__rfloordiv__", call(X, ROW), call(X, 0.7))
samples(
    "bitwise_and bitwise_or bitwise_xor and or xor iand ior ixor",
    call(i(4, 3), i(3)),
    call(b(4, 3), b(3)),
    call(i(4, 3), 5),
)
samples("rand ror rxor", call(i(4, 3), 5))
samples(
    "bitwise_left_shift bitwise_right_shift lshift rshift ilshift irshift",
    call(i(4, 3), i(3, high=3)),
    call(i(4, 3), 1),
)
samples("rlshift rrshift", call(i(4, 3, high=3), 7))
samples("gcd lcm", call(i(4, 3), i(3)))
samples("logical_and logical_or logical_xor", call(b(4, 3), b(3)), call(X, i(3, high=2)))
samples("Tensor.logical_and_ Tensor.logical_or_ Tensor.logical_xor_", call(b(4, 3), b(3)))
COMPARED = [
    call(X, ROW),
    call(X, X.clone()),
    call(X, 0.5),
    call(X, NUMBER),
    call(i(4, 3), i(3)),
    call(i(4, 3), 3),
]
samples("eq ne lt le gt ge not_equal less less_equal greater greater_equal", *COMPARED)
samples("isclose", call(X, X + 1e-9), call(X, ROW, rtol=0.5), call(X, X.clone(), equal_nan=True))
samples("allclose", call(X, X + 1e-9), call(X, X + 1), call(X, X + 1, atol=2.0))
samples("equal", call(X, X.clone()), call(X, X + 1))

# -- three operands --------------------------------------------------------------------------------

samples("addcmul", call(X, ROW, COLUMN), call(X, ROW, f(4, 3, seed=6), value=0.5))
samples("addcdiv", call(X, ROW, pos(4, 1)), call(X, ROW, pos(4, 3), value=-2))
samples(
    "lerp",
    call(X, f(4, 3, seed=4), 0.3),
    call(X, f(4, 3, seed=4), unit(3)),
    call(f(1, 3), f(4, 3), 0.5),
)
samples("Tensor.lerp_", call(X, f(4, 3, seed=4), 0.3), call(X, f(4, 3, seed=4), unit(3)))
samples(
    "torch.where",
    call(b(4, 3), X, f(3)),
    call(b(3), X, COLUMN),
    call(b(4, 3), X, 0.0),
    call(b(4, 3), 0, X),
)
samples(
    "torch.where",
    call(b(4, 3), X, 1.5),
    call(b(4, 1), 2.0, 3.0),
    call(b(4, 3), input=X, other=f(3)),
)
samples(
    "torch.where", call(b(4, 3), f(4, 3, dtype=torch.float32), NUMBER), call(b(4, 3), i(4, 3), X)
)
samples("Tensor.where", call(X, b(4, 3), f(3)), call(X, b(4, 3), 0.0), call(X, b(3), 2.0))
samples(
    "masked_fill",
    call(X, b(4, 3), 0.0),
    call(X, b(3), -1.5),
    call(X, b(4, 1), NUMBER),
    call(X, mask=b(4, 3), value=0),
)
samples("prelu", call(X, pos(3)), call(X, pos(1)), call(f(2, 3, 4), pos(3)), call(f(5), pos(1)))

# -- special functions -----------------------------------------------------------------------------

samples(
    """log_ndtr psi gammaln airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
    scaled_modified_bessel_k1 spherical_bessel_j0""",
    call(pos(4, 3)),
)
samples("multigammaln", call(2 + pos(4, 3), 2))
for kind in "t u v w".split():
    samples(
        f"chebyshev_polynomial_{kind} shifted_chebyshev_polynomial_{kind}",
        call(unit(4, 3), i(3)),
        call(unit(4, 3), 3),
    )
samples(
    "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p",
    call(unit(4, 3), i(3)),
    call(unit(4, 3), 3),
)
samples("frexp", call(X))
samples("polar", call(pos(4, 3), X), call(pos(4, 3), ROW))
samples("complex", call(X, f(4, 3, seed=7)), call(X, ROW), call(f(), f()))
samples("renorm", call(X, 2, 0, 0.5), call(X, 1, -1, 2.0), call(f(2, 3, 2), 3, 1, 1.0))
