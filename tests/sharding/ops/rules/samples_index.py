"""Sample calls of indexing and slicing."""

import math

import torch

from tests.sharding.ops.rules.table import b, c, call, f, i, pos, samples

X, Z, U = f(4, 3), f(4, 3, 2), torch.tensor([[2, 1, 0], [0, 2, 1], [1, 0, 2], [1, 2, 0]])
samples(
    "Tensor.__getitem__",
    call(X, 1),
    call(X, -1),
    call(X, slice(1, 3)),
    call(X, (slice(None), 1)),
    call(X, (Ellipsis, -1)),
)
samples(
    "Tensor.__getitem__",
    call(X, None),
    call(X, (slice(None), None)),
    call(X, (Ellipsis, None, slice(1, None))),
    call(X, ()),
)
samples(
    "Tensor.__getitem__",
    call(Z, (0, Ellipsis, slice(0, 2, 2))),
    call(Z, (slice(None), slice(None, None, 2), 1)),
    call(X, Ellipsis),
)
samples(
    "Tensor.__getitem__",
    call(X, i(5, high=4)),
    call(X, (slice(None), i(2, 2, high=3))),
    call(X, i(high=4)),
    call(Z, (1, i(5, high=3))),
)
samples(
    "Tensor.__getitem__",
    call(Z, (i(5, high=4), i(5, high=3))),
    call(Z, (i(5, high=4), slice(None), i(5, high=2))),
    call(X, [0, 2]),
)
samples(
    "Tensor.__getitem__",
    call(Z, (slice(None), i(5, 1, high=3), i(2, high=2))),
    call(Z, (i(5, high=4), slice(None), 1)),
    call(X, (None, i(2, high=4))),
)
samples(
    "Tensor.__getitem__",
    call(X, (slice(None), [2, 0])),
    call(X, (i(2, high=4), None, i(2, high=3))),
    call(X, b(4, 3)),
    call(X, b(4)),
    call(Z, (slice(None), b(3))),
)
samples(
    "Tensor.__setitem__",
    call(X, 1, 2.0),
    call(X, slice(0, 2), 0.0),
    call(X, (slice(None), 1), f(4)),
    call(X, Ellipsis, 1.0),
)
samples(
    "Tensor.__setitem__",
    call(X, slice(None), f(4, 3, seed=1)),
    call(X, (slice(None), slice(0, 2)), f(4, 2)),
    call(X, (Ellipsis, 0), f()),
)
samples(
    "Tensor.__setitem__",
    call(X, 1, f(3)),
    call(X, slice(None), f(3)),
    call(X, b(4, 3), 0.0),
    call(X, b(4), 5.0),
    call(X, b(4, 3), f()),
)
samples(
    "Tensor.__setitem__",
    call(X, (slice(None), None, 1), f(4, 1)),
    call(X, (slice(None), 1), f(1, 4)),
    call(X, i(2, high=4), 3.0),
)
samples(
    "index_select",
    call(X, 0, i(5, high=4)),
    call(X, -1, i(2, high=3)),
    call(Z, dim=1, index=i(4, high=3)),
)
samples(
    "gather",
    call(X, 0, i(2, 3, high=4)),
    call(X, 1, i(4, 2, high=3)),
    call(X, -1, i(3, 2, high=3)),
    call(Z, 1, i(4, 5, 2, high=3)),
)
samples(
    "take_along_dim",
    call(X, i(2, 3, high=4), 0),
    call(X, i(4, 2, high=3), dim=1),
    call(X, i(5, high=12)),
    call(X, i(4, 1, high=3), -1),
    call(X, i(4, 2, low=-3, high=3), 1),
)
samples("masked_select", call(X, b(4, 3)), call(X, b(3)))
samples("nonzero argwhere", call(b(4, 3)), call(i(4, 3, high=2)))
samples("nonzero", call(b(4, 3), as_tuple=True))
W = f(2, 3, 4, 2)
samples(
    "Tensor.__getitem__",
    call(W, (slice(None), i(5, high=3), slice(None), 1)),
    call(W, (0, slice(None), i(5, high=4))),
)
samples(
    "Tensor.__getitem__",
    call(W, (slice(None), i(5, high=3), 1, i(5, high=2))),
    call(W, (i(5, high=2), None, 1)),
    call(W, (1, None, i(3, high=3))),
)
samples(
    "Tensor.__getitem__",
    call(W, (slice(None), i(5, 1, high=3), [0, 3])),
    call(W, (slice(None), i(high=3), slice(None), i(5, high=2))),
)
samples(
    "Tensor.__setitem__",
    call(W, (slice(None), i(2, high=3), 0), f(2, 2, 2)),
    call(Z, (i(2, high=4), slice(None), i(2, high=2)), f(2, 3)),
)
samples("Tensor.__setitem__", call(X, [0, 2], 1.5))

# -- choices ---------------------------------------------------------------------------------------

TIED = torch.tensor(
    [[1.0, 3.0, 3.0], [3.0, 3.0, 1.0], [2.0, 0.0, 3.0], [3.0, 0.0, 0.0]], dtype=torch.float64
)
HOLED = torch.tensor(
    [[1.0, math.nan, 2.0], [3.0, math.nan, 4.0], [math.nan, 9.0, 5.0]], dtype=torch.float64
)
samples("max min", call(TIED, 0), call(HOLED, 1, keepdim=True), call(f(3, 0), 0), call(f(), 0))
samples(
    "argmax argmin",
    call(TIED),
    call(TIED, 0),
    call(HOLED, None, True),
    call(HOLED, dim=0, keepdim=True),
    call(f()),
)
samples(
    "aminmax",
    call(X),
    call(X, dim=0),
    call(TIED, dim=1, keepdim=True),
    call(X, keepdim=True),
    call(f()),
)
samples(
    "topk",
    call(X, 2),
    call(X, 3, 0),
    call(X, k=2, dim=0, largest=False),
    call(X, 4, 0),
    call(f(), 1),
)
samples("msort", call(X))

# -- places of a split dim -------------------------------------------------------------------------

samples(
    "take",
    call(X, i(2, 3, high=12)),
    call(Z, i(5, low=-24, high=24)),
    call(f(), i(2, high=1)),
    call(i(4, 3), i(high=12)),
)
samples("take", call(b(4, 3), i(5, high=12)), call(c(4, 3), i(5, high=12)))
samples(
    "index_select",
    call(b(4, 3), 0, i(3, high=4)),
    call(c(4, 3), 1, i(high=3)),
    call(i(4, 3), 0, i(3, high=4)),
)
samples(
    "gather",
    call(b(4, 3), 0, i(2, 3, high=4)),
    call(i(4, 3), 0, i(2, 3, high=4)),
    call(f(), 0, i(high=1)),
)
samples(
    "Tensor.__getitem__",
    call(b(4, 3), i(2, low=-4, high=4)),
    call(c(4, 3), (slice(None), i(2, high=3))),
)
samples(
    "index_put",
    call(X, (i(3, high=4), i(3, high=3)), f(3)),
    call(X, (i(2, low=-4, high=4),), f(2, 3), True),
)
samples(
    "index_put",
    call(Z, [i(5, high=4)], f(3, 2), accumulate=True),
    call(X, (b(4, 3),), f()),
    call(X, (b(4),), f(3)),
)
samples(
    "scatter", call(X, 0, U, f(4, 3)), call(X, 1, U[:2], f(2, 3)), call(i(4, 3), 1, U[:2], i(3, 3))
)
samples("scatter", call(X, 1, i(4, 1, high=3), 2.5), call(X, 0, U[:1], value=0.0))
samples(
    "scatter",
    call(X, 0, i(2, 3, high=4), 1.5, reduce="add"),
    call(Z, 2, U[:, :, None] % 2, f(4, 3, 1)),
)
samples("scatter_add", call(X, 0, i(5, 3, high=4), f(5, 3)), call(X, 1, i(2, 5, high=3), f(2, 5)))
samples("scatter_add", call(i(4, 3), 1, i(2, 5, high=3), i(3, 6)), call(X, -1, U % 3, src=f(4, 3)))
samples(
    "scatter_reduce",
    call(X, 0, i(5, 3, high=4), f(5, 3), "prod"),
    call(X, 1, i(2, 5, high=3), f(2, 5), "sum", include_self=False),
)
samples(
    "scatter_reduce",
    call(X, 0, i(5, 3, high=4), f(5, 3), reduce="mean"),
    call(X, 0, i(5, 3, high=4), f(5, 3), "amax"),
)
samples(
    "index_reduce",
    call(X, 0, i(5, high=4), f(5, 3), "prod"),
    call(X, 1, i(4, high=3), f(4, 4), "mean", include_self=False),
)
samples("index_reduce", call(X, dim=0, index=i(5, high=4), source=f(5, 3), reduce="amin"))
samples("index_add", call(X, 0, i(5, high=4), f(5, 3)), call(X, -1, i(2, high=3), f(4, 2), alpha=2))
samples("index_add", call(i(4, 3), 0, i(2, high=4), i(2, 3)))
samples(
    "index_copy",
    call(X, 0, torch.tensor([3, 0]), f(2, 3)),
    call(X, -1, torch.tensor([2, 1]), source=f(4, 2)),
)
samples(
    "index_copy index_add",
    call(X, 0, torch.tensor(2), f(1, 3)),
    call(f(4), 0, torch.tensor(1), f(1)),
)
samples(
    "index_fill",
    call(X, 0, i(2, low=-4, high=4), 1.5),
    call(X, 1, i(2, high=3), f()),
    call(X, dim=-1, index=i(2, high=3), value=0),
)
samples("index_fill", call(X, 0, torch.tensor(2), 1.5), call(i(4), 0, torch.tensor(-1), 3))
samples("index_copy", call(f(4), 0, torch.tensor(2), f()))
samples(
    "put",
    call(X, torch.tensor([[3, -1], [7, 0]]), f(2, 2)),
    call(X, i(5, high=12), f(5), accumulate=True),
)
samples(
    "masked_scatter", call(X, b(4, 3), f(15)), call(X, b(3), f(4, 3)), call(Z, b(4, 3, 2), f(5, 5))
)
samples(
    "Tensor.__setitem__",
    call(X, (b(4, 3)), f(int(b(4, 3).sum()))),
    call(Z, (slice(None), b(3)), f(4, int(b(3).sum()), 2)),
    call(Z, (Ellipsis, b(2)), 1.0),
    call(Z, b(4), f(int(b(4).sum()), 1, 2)),
)
samples(
    "Tensor.__setitem__",
    call(Z, (slice(1, None, 2), -1), f(2, 2)),
    call(Z, (slice(0, 4, 3), slice(1, 2)), f(2, 1, 1)),
    call(Z, (i(3, low=-4, high=4), 1), f(3, 2)),
    call(Z, (slice(1, 3), i(2, 1, high=3), i(3, high=2)), f(2, 2, 3)),
)

# -- embedding -------------------------------------------------------------------------------------

TABLE, BAGS = f(5, 2), i(4, 3, high=5)
samples(
    "F.embedding",
    call(BAGS, TABLE, padding_idx=-2),
    call(i(4, high=5), TABLE, None, scale_grad_by_freq=True),
)
samples(
    "F.embedding_bag",
    call(BAGS, TABLE),
    call(BAGS, TABLE, mode="max"),
    call(BAGS, TABLE, mode="sum", padding_idx=2),
)
samples(
    "F.embedding_bag",
    call(BAGS, TABLE, per_sample_weights=f(4, 3), mode="sum"),
    call(BAGS, TABLE, padding_idx=int(BAGS[0, 0])),
)
samples("F.embedding_bag", call(i(7, high=5), TABLE, torch.tensor([0, 2, 2, 5]), mode="mean"))
samples(
    "F.embedding_bag",
    call(i(7, high=5), TABLE, torch.tensor([0, 3, 7]), mode="sum", include_last_offset=True),
)
samples(
    "F.embedding_bag",
    call(i(7, high=5), TABLE, torch.tensor([0, 3]), mode="sum", per_sample_weights=f(7)),
)

# -- how much there is, how many there are ---------------------------------------------------------

STEPS, MANY = torch.tensor([-1.0, 0.0, 0.0, 0.5, 2.0], dtype=torch.float64), i(4, 3, high=3)
samples("nonzero argwhere", call(f()), call(b(3)), call(b(2, 3, 4)))
samples("torch.where", call(b(4, 3)))
samples("masked_select", call(Z, b(4, 1, 2)), call(f(), b(3)), call(f(0, 3), b(3)))
samples("unique", call(MANY), call(MANY, return_inverse=True), call(MANY, True, True, True))
samples("unique", call(MANY, dim=0), call(TIED, return_counts=True))
samples(
    "unique_consecutive", call(MANY), call(MANY, return_inverse=True, return_counts=True, dim=1)
)
samples(
    "bincount",
    call(i(7, high=4)),
    call(i(7, high=4), f(7)),
    call(i(7, high=4), minlength=6),
    call(i(0)),
)
samples(
    "histc", call(X), call(X, 5, -1, 1), call(X, bins=4, min=0, max=2), call(torch.ones(4, 3), 3)
)
samples(
    "searchsorted", call(STEPS, X), call(STEPS, X, right=True, out_int32=True), call(STEPS, 0.0)
)
samples("searchsorted", call(f(4, 5).sort().values, X))
samples("searchsorted", call(STEPS.flip(0), X, side="right", sorter=torch.tensor([4, 3, 2, 1, 0])))
samples("bucketize", call(X, STEPS), call(X, STEPS, right=True), call(0.5, STEPS))
samples(
    "isin",
    call(MANY, i(2, high=3)),
    call(MANY, i(2, high=3), invert=True),
    call(MANY, 2),
    call(1, MANY),
)
samples("unravel_index", call(i(4, 3, high=24), (4, 3, 2)), call(i(high=24), 24))
samples(
    "histogram",
    call(X, 4),
    call(X, 3, range=(-1.0, 1.0), weight=pos(4, 3)),
    call(X, 4, density=True),
    call(torch.ones(4, 3), 2),
)
samples(
    "Tensor.__getitem__",
    call(Z, (Ellipsis, b(3, 2))),
    call(Z, (slice(None), b(3), slice(None))),
    call(Z, (b(4, 3), Ellipsis)),
)
