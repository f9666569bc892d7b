"""Sample calls of indexing and slicing."""

from tests.sharding.rules.table import b, call, f, i, samples

X, Z = f(4, 3), f(4, 3, 2)
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
samples("index_select", call(X, 0, i(5, high=4)), call(X, -1, i(2, high=3)), call(Z, dim=1, index=i(4, high=3)))
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
)
samples("masked_select", call(X, b(4, 3)), call(X, b(3)))
samples("nonzero argwhere", call(b(4, 3)), call(i(4, 3, high=2)))
samples("nonzero", call(b(4, 3), as_tuple=True))
W = f(2, 3, 4, 2)
samples(
    "Tensor.__getitem__", call(W, (slice(None), i(5, high=3), slice(None), 1)), call(W, (0, slice(None), i(5, high=4)))
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
