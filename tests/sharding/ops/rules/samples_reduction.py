"""Sample calls of reductions, and of operators along a whole dim."""

import math

import torch

from tests.sharding.ops.rules.table import b, c, call, f, i, pos, samples

X = f(4, 3)
REDUCED = [call(X), call(X, 0), call(X, -1), call(X, dim=0, keepdim=True), call(X, (0, 1))]
samples(
    "sum",
    *REDUCED,
    call(X, [-2], True),
    call(f(2, 3, 2), (0, 2)),
    call(f()),
    call(f(2, 1, 3), 1),
    call(X, axis=1),
    call(X, ()),
)
samples(
    "sum",
    call(f(4, 3, dtype=torch.float32), 0, dtype=torch.float64),
    call(b(4, 3)),
    call(b(4, 3), 1),
    call(i(4, 3), 0),
)
samples(
    "sum",
    call(X, dtype=torch.int64),
    call(f(0, 3)),
    call(f(0, 3), 0),
    call(i(4, 3), dtype=torch.float64),
)
samples(
    "nansum",
    *REDUCED,
    call(torch.tensor([[1.0, math.nan, 2.0], [3.0, 4.0, math.nan]], dtype=torch.float64), 0),
)
samples("count_nonzero", call(X), call(i(4, 3, high=2), 0), call(b(4, 3), (0, 1)))
samples(
    "prod",
    call(X),
    call(X, 0),
    call(X, -1, True),
    call(i(4, 3), 0),
    call(torch.cat([X, torch.zeros(1, 3, dtype=X.dtype)]), 0),
)
samples("amax amin", *REDUCED, call(i(4, 3), 0), call(b(4, 3), 0), call(f(1, 3), 0), call(f(), ()))
samples("amax amin", call(f(4, 3, dtype=torch.float32), 1))
samples(
    "max min",
    call(X),
    call(X, 0),
    call(X, 1, True),
    call(X, dim=-1),
    call(X, f(3)),
    call(X, other=f(4, 1)),
    call(i(4, 3), 0),
)
samples("median nanmedian", call(X), call(X, 0), call(X, dim=-1, keepdim=True))
samples("mode", call(i(4, 3, high=3)), call(i(4, 3, high=3), 0))
samples("argmax argmin", call(X), call(X, 0), call(X, -1, True), call(X, dim=1), call(i(4, 3)))
samples(
    "all any",
    call(b(4, 3)),
    call(b(4, 3), 0),
    call(b(4, 3), -1, True),
    call(X),
    call(b(4, 3), (0, 1)),
    call(b(4, 3), ()),
)
samples("all any", call(f(0, 3)), call(f(0, 3), 0))
samples(
    "mean",
    *REDUCED,
    call(f(4, 3, dtype=torch.float32), dtype=torch.float64),
    call(c(4, 3), 0),
    call(X, axis=0),
    call(X, [], True),
)
samples("mean", call(i(4, 3), dtype=torch.float64), call(f(4, 3, dtype=torch.bfloat16), 1))
samples(
    "var std",
    *REDUCED,
    call(X, 0, unbiased=False),
    call(X, 0, correction=0, keepdim=True),
    call(X, True),
    call(c(4, 3), 0),
)
samples(
    "var std var_mean std_mean",
    call(X, dim=(0, 1), correction=2),
    call(X, 0, False, True),
    call(X, unbiased=False),
)
samples("var_mean std_mean", call(X), call(X, 0), call(X, dim=1, keepdim=True))
samples(
    "vector_norm",
    call(X),
    call(X, 2, 0),
    call(X, 1, -1, True),
    call(X, 3, (0, 1)),
    call(X, math.inf, 0),
    call(X, -math.inf),
)
samples(
    "vector_norm",
    call(X, 0, 1),
    call(X, 0.5, 0),
    call(c(4, 3), 2, 0),
    call(f(4, 3, dtype=torch.float32), dtype=torch.float64),
)
samples(
    "vector_norm", call(X, ord=2, dim=0, keepdim=True), call(X, -1.0, 0), call(i(4, 3).double(), 2)
)
samples(
    "torch.norm Tensor.norm",
    call(X),
    call(X, 1),
    call(X, 2, 0),
    call(X, dim=0, keepdim=True),
    call(X, p=3, dim=(0, 1)),
)
samples(
    "torch.norm Tensor.norm",
    call(X, "fro"),
    call(X, math.inf),
    call(X, "fro", (0, 1)),
    call(X, None, 0),
)
samples(
    "linalg.norm",
    call(X),
    call(X, 2, 0),
    call(f(5), 1),
    call(X, dim=1, keepdim=True),
    call(X, ord="fro"),
    call(f(2, 3, 2)),
)

samples(
    "linalg.norm",
    call(X, 1),
    call(X, -math.inf, (0, 1), True),
    call(X, "nuc"),
    call(f(2, 3, 2), 2, (-2, -1)),
)
samples(
    "matrix_norm",
    call(X),
    call(f(2, 3, 2)),
    call(f(2, 4, 3), 1),
    call(f(2, 4, 3), math.inf, keepdim=True),
)
samples(
    "matrix_norm",
    call(f(2, 4, 3), -1, (0, 2)),
    call(f(2, 4, 3), "nuc"),
    call(f(2, 4, 3), 2),
    call(c(4, 3), -math.inf),
)
samples(
    "torch.norm Tensor.norm",
    call(X, "nuc"),
    call(f(4, 3, dtype=torch.float32), 2, dtype=torch.float64),
)
samples("frobenius_norm", call(f(2, 4, 3), (1, 2)), call(X, 0, True), call(X, ()))
samples("nuclear_norm", call(X), call(f(2, 4, 3), (1, 2), True))
samples(
    "dist",
    call(X, f(4, 3, seed=1)),
    call(X, f(3), 1),
    call(X, f(4, 1), math.inf),
    call(X, X.clone()),
)
NANS = torch.where(torch.tensor([[0, 1, 0]] * 3 + [[1, 1, 0]]) > 0, math.nan, X)
samples(
    "nanmean",
    *REDUCED,
    call(NANS),
    call(NANS, 0),
    call(NANS, 1, True),
    call(NANS, dtype=torch.float32),
)

samples(
    "softmax log_softmax",
    call(X, 0),
    call(X, -1),
    call(X, dim=1, dtype=torch.float64),
    call(f(4, 3, dtype=torch.float32), 0),
)
samples("softmin", call(X, 0), call(X, dim=-1))
samples("logsumexp", call(X, 0), call(X, -1, True), call(X, (0, 1)), call(f(2, 3, 2), dim=(0, 2)))
samples("cumsum cumprod", call(X, 0), call(X, dim=-1))
samples(
    "cumsum",
    call(i(4, 3), 0),
    call(f(4, 3, dtype=torch.float32), 0, dtype=torch.float64),
    call(X, 0, dtype=torch.int64),
)
samples("Tensor.cumsum_ Tensor.cumprod_", call(X, 0), call(X, dim=-1))
samples("logcumsumexp", call(X, 0), call(X, 1))
samples("cummax cummin", call(X, 0), call(X, dim=1))
samples(
    "sort argsort",
    call(X),
    call(X, 0),
    call(X, dim=0, descending=True),
    call(X, stable=True, dim=1),
)
samples(
    "topk",
    call(X, 2),
    call(X, 2, 0),
    call(X, k=1, dim=-1, largest=False),
    call(X, 2, 1, sorted=True),
)
samples("kthvalue", call(X, 2), call(X, 2, 0, True))
samples("glu", call(f(4, 6)), call(f(4, 6), 0))
samples("normalize", call(X), call(X, dim=0), call(X, p=1.0, dim=-1), call(f(2, 3, 4)))
ZEROS = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 3.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
samples("var std var_mean std_mean vector_norm", call(ZEROS, dim=0))
samples("var std", call(f(4, 3, dtype=torch.bfloat16), 0))
samples(
    "vector_norm", call(f(4, 3, dtype=torch.bfloat16), 2, 0), call(f(4, 3), 2, ()), call(c(4, 3), 1)
)
samples("cov corrcoef", call(X), call(f(5)), call(f(3, 4)), call(c(3, 4)))
samples(
    "cov",
    call(X, correction=0),
    call(f(1, 5)),
    call(X, fweights=i(3, low=1)),
    call(f(3, 4), aweights=pos(4)),
)
samples("cov", call(f(2, 3), correction=2, fweights=i(3, low=1), aweights=pos(3)))
QS = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
samples(
    "quantile nanquantile",
    call(X, 0.3),
    call(X, 0.5, 0),
    call(X, QS, 1, True),
    call(X, QS),
    call(X, f().abs() / 9, dim=-1),
)
samples("quantile nanquantile", call(X, 0.4, 0, interpolation="nearest"), call(NANS, 0.4, 1))
samples(
    "sum_to_size",
    call(X, 1, 3),
    call(X, (4, 1)),
    call(X, 3),
    call(f(2, 4, 3), 4, 1),
    call(X, 4, 3),
    call(X, 1),
)
