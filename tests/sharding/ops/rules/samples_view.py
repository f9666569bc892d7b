"""Sample calls of operators that rearrange elements."""

import torch

from tests.sharding.ops.rules.table import b, c, call, f, i, samples

X, Y = f(4, 3), f(4, 6)
COMPOSITE = [
    call(Y, 24),
    call(Y, 4, 2, 3),
    call(Y, (2, 2, 6)),
    call(Y, -1, 3),
    call(Y, 1, 4, 6),
    call(f(4, 2, 3), 4, 6),
    call(f(2, 3, 2), -1),
]
samples(
    "Tensor.view Tensor.reshape",
    *COMPOSITE,
    call(Y, 6, 4),
    call(Y, 8, 3),
    call(f(), 1),
    call(f(1), ()),
    call(f(0, 3), 3, 0),
)
samples(
    "Tensor.view Tensor.reshape",
    call(f(4, 1, 3), 4, 3),
    call(f(6, 4), 2, 3, 2, 2),
    call(f(3, 4), 12),
    call(f(0, 4), 0, 2, 2),
)
samples("Tensor.view", call(X, size=(12,)), call(X, torch.int64))
samples(
    "torch.reshape",
    call(Y, (4, 2, 3)),
    call(Y, shape=(24,)),
    call(Y, (-1,)),
    call(f(2, 3, 2).transpose(0, 1), (3, 4)),
)
samples("view_as reshape_as", call(Y, f(4, 2, 3)), call(Y, f(24)))
samples("expand_as", call(f(4, 1), X), call(f(3), X))
samples(
    "flatten",
    call(f(2, 3, 4)),
    call(f(2, 3, 4), 1),
    call(f(2, 3, 4), 0, 1),
    call(f(2, 3, 4), start_dim=-2),
    call(f()),
)
samples("ravel", call(Y), call(f(2, 3, 4)))
samples("unflatten", call(Y, 1, (2, 3)), call(Y, 0, (2, -1)), call(Y, -1, (3, 2)))
samples(
    "squeeze",
    call(f(1, 4, 1, 3)),
    call(f(1, 4, 1), 0),
    call(f(1, 4, 1), -1),
    call(X, 0),
    call(f(1, 4, 1), (0, 2)),
)
samples("unsqueeze", call(X, 0), call(X, 1), call(X, -1), call(f(), 0))
samples(
    "transpose swapaxes swapdims", call(X, 0, 1), call(f(2, 3, 4), -1, 0), call(f(2, 3, 4), 1, 1)
)
samples("transpose", call(X, dim0=0, dim1=1))
samples("t", call(X), call(f(4)))
samples("adjoint", call(X), call(f(2, 3, 4)))
samples("permute", call(f(2, 3, 4), (2, 0, 1)), call(f(2, 3, 4), dims=(0, 2, 1)))
samples("Tensor.permute", call(f(2, 3, 4), 2, 0, 1), call(f(2, 3, 4), [-1, 0, 1]))
samples("movedim moveaxis", call(f(2, 3, 4), 0, 2), call(f(2, 3, 4), (0, 1), (-1, 0)))
samples(
    "Tensor.expand",
    call(f(4, 1), 4, 3),
    call(f(3), 4, 3),
    call(f(4, 1), -1, 3),
    call(f(1, 3), (2, 4, 3)),
    call(f(), 3),
    call(X, 4, 3),
)
samples("Tensor.expand", call(f(1, 3), size=(4, -1)))
samples("broadcast_to", call(f(4, 1), (4, 3)), call(f(3), size=(4, 3)))
samples(
    "Tensor.repeat",
    call(X, 2, 1),
    call(X, 1, 2),
    call(X, (2, 1, 3)),
    call(f(3), 2, 2),
    call(f(4, 1), 1, 3),
    call(f(), 3),
)
samples("torch.tile", call(X, (2, 1)), call(X, (2,)), call(f(3), (2, 2)))
samples("Tensor.tile", call(X, (2, 1)), call(X, 2), call(f(3), 2, 2))
samples(
    "repeat_interleave", call(X, 2, 0), call(X, 2, dim=1), call(X, 2), call(X, repeats=3, dim=-1)
)
samples("split", call(X, 2), call(X, 2, 1), call(X, [1, 3], 0), call(X, [1, 2], dim=-1))
samples("chunk", call(X, 2), call(X, 3, 0), call(X, chunks=2, dim=1), call(f(6, 4), 3, -1))
samples("tensor_split", call(X, 3), call(X, [1, 2], 1), call(X, 2, dim=0))
samples("split_with_sizes", call(X, [1, 3]), call(X, [1, 2], 1))
samples("unbind", call(X), call(X, 1), call(f(2, 3, 4), dim=-1))
samples("narrow", call(X, 0, 1, 2), call(X, 1, 0, 3), call(X, -1, 1, 2))
samples("select", call(X, 0, 1), call(X, -1, -1), call(X, dim=1, index=0))
samples(
    "cat concat concatenate",
    call([X, f(2, 3), f(1, 3)]),
    call((X, f(4, 2)), 1),
    call([X, f(4, 2)], dim=-1),
    call([f(0), X], 0),
)
samples(
    "cat", call([X, i(2, 3)], 0), call([X, X.float()], axis=1), call([f(2, 3, 2), f(2, 1, 2)], 1)
)
samples(
    "stack",
    call([X, f(4, 3, seed=1)]),
    call([X, f(4, 3, seed=1)], 1),
    call([X, X.float()], dim=-1),
    call([f(), f()]),
)
samples("flip", call(X, (0,)), call(X, [0, 1]), call(X, dims=(-1,)))
samples("Tensor.flip", call(X, 0, 1), call(X, 1))
samples("roll", call(X, 1), call(X, 1, 0), call(X, (1, -1), (0, 1)), call(X, shifts=2, dims=-1))
samples("tril triu", call(X), call(X, 1), call(f(2, 3, 4), diagonal=-1), call(f(4, 4), -1))
samples(
    "torch.diagonal Tensor.diagonal",
    call(X),
    call(f(2, 3, 4), 1),
    call(f(2, 3, 4), 0, 1, 2),
    call(f(2, 3, 4), dim1=0, dim2=-1),
)
samples(
    "linalg.diagonal",
    call(X),
    call(f(2, 3, 4)),
    call(f(2, 3, 4), offset=1),
    call(f(2, 3, 4), dim1=0, dim2=1),
)
samples("diag_embed", call(X), call(f(4)))
samples(
    "pad",
    call(X, (1, 1)),
    call(X, (0, 0, 1, 2)),
    call(X, (1, 0), value=2.0),
    call(f(2, 3, 4), (1, 1), "reflect"),
    call(X, (0, 1), "constant", 0.0),
)
samples("pad", call(b(4, 3), (1, 1)), call(X, (-1, 0)), call(X, (0, 0)))
samples("broadcast_tensors", call(X, f(3)), call(f(4, 1), f(1, 3)))

samples("T H", call(X))
samples("mT mH", call(f(2, 3, 4)))

samples("hsplit", call(X, [1, 2]), call(f(6), 2))
samples("vsplit", call(X, 2), call(X, (3, 1)))
samples("dsplit", call(f(2, 3, 4), 2))
samples("narrow_copy", call(X, 0, 1, 2), call(X, -1, 0, 2))
samples(
    "fill_diagonal_",
    call(X, 2),
    call(f(7, 3), 1.5, wrap=True),
    call(f(3, 5), 0),
    call(f(3, 3, 3), -1),
    call(i(4, 4), 3),
)
samples("trace", call(X), call(i(3, 4)))
samples("fliplr flipud", call(X))
samples("rot90", call(X), call(f(2, 3, 4), -1, (0, 2)), call(X, 2), call(X, k=4))
samples("Tensor.flip", call(X, dims=(0,)))
samples("roll", call(f(7), -3), call(X, (1, 2), (0, 0)))
samples("Tensor.repeat", call(f(2), 7))
samples("repeat_interleave", call(f(3), 0), call(f(3), 3))
samples("Tensor.unfold", call(f(7), 0, 3, 2), call(X, -1, 2, 1), call(X, 0, 4, 1))
samples("diff", call(X), call(f(5), 2), call(X, dim=0, prepend=f(2, 3)), call(b(5)), call(X, 4, 1))
samples("diff", call(X, 0), call(X, 0, 0, f(1, 3), f(2, 3)))
samples(
    "pad",
    call(f(1, 2, 5), (-1, 2), "circular"),
    call(f(1, 5, 4), (1, -2, -2, 1), "circular"),
    call(f(1, 2, 5), (-1, 2), "reflect"),
)
samples(
    "pad",
    call(f(2, 4), (-1, 2)),
    call(f(1, 2, 5), (2, 3), "circular"),
    call(f(1, 2, 5), (1, 3), "replicate"),
)
samples("hstack", call([X, f(4, 2)]), call((f(3), f(2))))
samples("vstack row_stack", call([f(3), X]))
samples("dstack", call([f(4), f(1, 4, 2)]))
samples("column_stack", call([f(4), X]))
samples("atleast_1d", call(f()), call(f(3), f()), call([X, f()]))
samples("atleast_2d atleast_3d", call(f(3)), call(f(), X))
samples("block_diag", call(f(3, 2), f(4), f(2, 3)))
samples("slice_scatter", call(X, f(2, 3), 0, 0, 4, 2), call(X, f(4, 2), dim=1, start=1))
samples("select_scatter", call(X, f(3), 0, -2))
samples("diagonal_scatter", call(X, f(3), -1), call(f(2, 3, 4), f(3, 2), 0, 2, 0))
samples("meshgrid", call(f(3), f(4), indexing="xy"))
samples("cartesian_prod", call(f(3), f(4)), call(f(3)))
samples("kron", call(f(3), f(2, 3)))
samples("torch.vander", call(i(4)), call(i(4), 2, True))
samples("linalg.vander", call(i(2, 3)), call(i(4), N=2))
samples("torch.diagonal Tensor.diagonal", call(X, -2), call(f(2, 5, 3), 1, 2, 1))
samples("diag_embed", call(X, 1), call(f(4), -2), call(X, -1, 0, 2))
samples("diag", call(f(4), 1), call(X, -1), call(X))
samples("diagflat", call(f(4)), call(X, -1))
samples(
    "gradient",
    call(X),
    call(f(7), spacing=2.0, edge_order=2),
    call(X, spacing=[1.0, 0.5]),
    call(f(5, 4), dim=0),
)
samples(
    "trapezoid trapz cumulative_trapezoid",
    call(X),
    call(X, dx=0.5, dim=0),
    call(X, f(3)),
    call(X, X, dim=0),
)
samples(
    "trapezoid cumulative_trapezoid", call(f(5, 3), f(5), dim=0), call(f(2, 4, 3), f(4, 3), dim=1)
)
samples("view_as_real resolve_conj resolve_neg", call(c(4, 3)))
samples("view_as_complex", call(f(4, 3, 2)))
samples("unsafe_split unsafe_chunk", call(X, 2), call(X, 2, 1))
samples("unsafe_split_with_sizes", call(X, [1, 3]), call(X, [1, 2], dim=1))
