"""Sample calls of functions of matrices. Three matrices: even on 3 ranks, an empty part on
2 x 2.
"""

import torch

from tests.sharding.ops.rules.table import c, call, f, samples

# Well conditioned, none alike; positive definite ones with far eigenvalues, so that eigenvectors
# are well conditioned too.
A = f(3, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
SPD = A @ A.mT + torch.diag(torch.tensor([0.0, 9.0, 30.0], dtype=torch.float64))
L = torch.linalg.cholesky(SPD)
TALL, B, VECTORS = f(3, 4, 2), f(3, 3, 2, seed=4), f(3, 3, seed=5)
HERMITIAN = c(3, 3, 3) @ c(3, 3, 3).mH + 5 * torch.eye(3, dtype=torch.complex128)

samples(
    "inv inverse inv_ex det slogdet logdet matrix_exp lu_factor lu_factor_ex pinv pinverse",
    call(SPD),
    call(A[0] @ A[0].T),
)
samples("inv det", call(HERMITIAN))
samples("cholesky cholesky_ex", call(SPD), call(SPD[1]))
samples("cholesky_inverse", call(L), call(L.mT.contiguous(), upper=True))
samples("eigvals", call(A))
samples("eigh", call(SPD))
samples("svd linalg.svd", call(TALL), call(TALL.mT, False))
samples("qr torch.qr", call(TALL), call(f(3, 3, 3)))
samples("linalg.qr", call(TALL), call(f(3, 3, 3), "complete"))
samples("torch.lu Tensor.lu", call(A), call(A, True, True))
samples("eigvalsh svdvals", call(SPD), call(SPD[0]))
samples(
    "linalg.matrix_rank",
    call(SPD),
    call(TALL, atol=torch.tensor([0.1, 5.0, 9.0], dtype=torch.float64)),
    call(TALL, rtol=0.5),
)
samples("linalg.cond", call(A), call(SPD[0], "nuc"))
samples("matrix_power", call(A, 3), call(A, -1), call(A, 0), call(A[0], 2))
samples("geqrf", call(TALL.detach()))
samples("ldl_factor ldl_factor_ex", call(SPD), call(HERMITIAN, hermitian=True))
samples("linalg.lu", call(A), call(A, pivot=True), call(f(3, 2, 4)))
samples("householder_product orgqr", call(TALL, f(3, 2)))
samples("lu_unpack", call(*torch.linalg.lu_factor(A)))
samples("lu_unpack", call(*torch.linalg.lu_factor(A), True, False))
samples("tensorinv", call((f(4, 4) + 4 * torch.eye(4, dtype=torch.float64)).view(2, 2, 4), 2))
samples(
    "tensorsolve", call((f(4, 4) + 4 * torch.eye(4, dtype=torch.float64)).view(2, 2, 4), f(2, 2))
)
samples("solve solve_ex", call(A, B), call(A, VECTORS), call(A, B[0]))
samples("linalg.solve", call(A[0], B))
samples("solve solve_ex", call(A, f(3, 2, 3), left=False), call(A[0], f(3)))
samples(
    "solve_triangular",
    call(A, B, upper=True),
    call(A, B, upper=False, unitriangular=True),
    call(A, B.mT, upper=True, left=False),
)
samples("triangular_solve", call(B, A), call(B, A, upper=False, transpose=True))
samples(
    "linalg.lu_solve",
    call(*torch.linalg.lu_factor(A), B),
    call(*torch.linalg.lu_factor(A), B.mT, left=False, adjoint=True),
)
samples("torch.lu_solve Tensor.lu_solve", call(B, *torch.linalg.lu_factor(A)))
samples("cholesky_solve", call(B, L), call(B, L.mT.contiguous(), upper=True))
samples("ldl_solve", call(*torch.linalg.ldl_factor(SPD), B))
samples(
    "ormqr",
    call(f(3, 4, 2), f(3, 2), f(3, 4, 2)),
    call(f(3, 4, 2), f(3, 2), f(3, 2, 4), False, True),
)
samples(
    "lstsq",
    call(TALL, f(3, 4, 2, seed=1)),
    call(TALL, f(3, 4, seed=1)),
    call(TALL, f(3, 4, 2, seed=1), driver="gels"),
)
samples("lstsq", call(TALL.mT, B[:, :2], driver="gelsd"))
