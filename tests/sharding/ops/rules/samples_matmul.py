"""Sample calls of products of matrices."""

from functools import partial

import torch

from tests.sharding.ops.rules.table import c, call, f, samples

samples(
    "linear",
    call(f(4, 3), f(5, 3), f(5)),
    call(f(2, 3, 4), f(5, 4)),
    call(f(3), f(2, 3), bias=f(2)),
)
samples("linear", call(f(4, 3), f(3)), call(input=f(4, 3), weight=f(5, 3)))
samples("bilinear", call(f(4, 3), f(4, 2), f(5, 3, 2), f(5)), call(f(4, 3), f(4, 2), f(5, 3, 2)))
samples("torch.bilinear", call(f(4, 3), f(4, 2), f(5, 3, 2), f(5)))
samples(
    "matmul", call(f(4, 3), f(3, 5)), call(f(3), f(3)), call(f(3), f(3, 4)), call(f(4, 3), f(3))
)
samples(
    "matmul",
    call(f(2, 4, 3), f(3, 2)),
    call(f(2, 4, 3), f(2, 3, 2)),
    call(f(3), f(2, 3, 4)),
    call(f(2, 4, 3), f(3)),
)
samples("matmul", call(f(3, 1, 2, 4), f(2, 4, 3)), call(f(4, 3), other=f(3, 5)))
samples("rmatmul", call(f(3, 5), f(4, 3)), call(f(3), f(4, 3)))
samples("mm", call(f(4, 3), f(3, 5)), call(f(1, 3), mat2=f(3, 5)))
samples("bmm", call(f(3, 4, 2), f(3, 2, 5)))
samples("mv", call(f(4, 3), f(3)))
samples("dot vdot inner", call(f(5), f(5)))
samples("inner", call(f(4, 3), f(5, 3)), call(f(2, 4, 3), f(3)), call(f(4, 3), 2 * f()))
samples("outer ger", call(f(4), f(3)))
samples(
    "addmm",
    call(f(4, 5), f(4, 3), f(3, 5)),
    call(f(5), f(4, 3), f(3, 5)),
    call(f(4, 1), f(4, 3), f(3, 5), beta=0.5, alpha=2),
)
samples("addmm_", call(f(4, 5), f(4, 3), f(3, 5)), call(f(4, 5), f(4, 3), f(3, 5), beta=0, alpha=2))
samples("addmv", call(f(4), f(4, 3), f(3)), call(f(4), f(4, 3), f(3), beta=0.5, alpha=2))
samples(
    "baddbmm",
    call(f(2, 4, 3), f(2, 4, 2), f(2, 2, 3)),
    call(f(2, 4, 3), f(2, 4, 2), f(2, 2, 3), beta=0.5, alpha=2),
)
samples("torch.baddbmm", call(f(3), f(2, 4, 2), f(2, 2, 3)))
samples(
    "einsum",
    call("bij,bjk->bik", f(2, 4, 3), f(2, 3, 2)),
    call("ij,kj", f(4, 3), f(5, 3)),
    call("ij->", f(4, 3)),
)
samples(
    "einsum",
    call("i,i", f(4), f(4)),
    call("...ij,jk->...ik", f(2, 4, 3), f(3, 2)),
    call("ii->i", f(4, 4)),
)
samples(
    "einsum",
    call("a,b,ab->ab", f(4), f(3), f(4, 3)),
    call("bd,bd->b", [f(4, 3), f(4, 1)]),
    call("ij->ji", f(4, 3)),
)
samples(
    "einsum",
    call("bqhd , bkhd -> bhqk", f(2, 3, 4, 2), f(2, 4, 4, 2)),
    call("ii", f(4, 4)),
    call("iIj,Ij->ij", f(2, 3, 4), f(3, 4)),
)
samples("tensordot", call(f(4, 3, 2), f(3, 2, 5)), call(f(4, 3), f(5, 3), ([1], [1])))
samples(
    "einsum",
    call("ab...->b", f(4, 3, 2)),
    call("a...,a...->a", f(4, 3), f(4, 1)),
    call("...i,...i", f(3, 4), f(2, 3, 4)),
)
samples(
    "einsum",
    call(f(4, 3), [0, 1], f(3, 5), [1, 2], [2, 0]),
    call(f(2, 3, 4), [..., 0], f(4, 2), [0, 1], [..., 1]),
)
samples(
    "addbmm",
    call(f(4, 3), f(2, 4, 2), f(2, 2, 3)),
    call(f(4, 3), f(2, 4, 2), f(2, 2, 3), beta=0.5, alpha=2),
)
samples("addr", call(f(4, 3), f(4), f(3)), call(f(4, 3), f(4), f(3), beta=0.5, alpha=2))
samples(
    "multi_dot",
    call([f(4, 3), f(3, 2), f(2, 5)]),
    call([f(3), f(3, 2), f(2)]),
    call([f(4, 3), f(3, 2), f(2)]),
)
samples("multi_dot", call([f(4, 3), f(3, 2)]))
samples("chain_matmul", call(f(4, 3), f(3, 2), f(2, 5)))
samples(
    "vecdot",
    call(f(4, 3), f(4, 3, seed=1)),
    call(f(4, 3), f(3)),
    call(c(4, 3), c(4, 1, seed=2), dim=0),
)
samples("cross", call(f(4, 3), f(4, 3, seed=1)), call(f(2, 3, 2), f(1, 3, 1), dim=1))
samples("linalg.cross", call(f(4, 3), f(1, 3)), call(f(3, 4), f(3, 1), dim=0))
samples("vdot", call(c(5), c(5, seed=3)))

ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)
F32 = partial(f, dtype=torch.float32)
samples(
    "grouped_mm _grouped_mm",
    call(F32(7, 8), F32(3, 8, 4), offs=ENDS),
    call(F32(7, 8), F32(3, 8, 12), offs=ENDS),
)
samples("grouped_mm _grouped_mm", call(F32(3, 4, 8), F32(8, 8), offs=ENDS + 1))
samples(
    "grouped_mm _grouped_mm",
    call(F32(4, 8), F32(8, 12), offs=ENDS + 1),
    call(F32(3, 4, 8), F32(3, 8, 4)),
)
