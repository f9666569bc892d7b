"""Functions of matrices where torch has no gradient, or only one of part of the result; and what
they communicate.
"""

from __future__ import annotations

import pytest
import torch

from shardmesh import P
from shardmesh.sharding.ops import strategy
from shardmesh.sharding.ops.rules.check import prove
from tests.sharding.ops.rules.samples_linalg import SPD, TALL, A, B
from tests.sharding.ranks import collectives, on_mesh, place

VALUES = {
    "eig": (lambda x: torch.linalg.eig(x.detach()), (A,)),
    "cond 1": (lambda x: torch.linalg.cond(x.detach(), 1), (A,)),
    "cond fro": (lambda x: torch.linalg.cond(x.detach(), "fro"), (A,)),
    "qr without q": (lambda x: torch.linalg.qr(x.detach(), mode="r"), (TALL,)),
    "complete qr": (lambda x: torch.linalg.qr(x.detach(), "complete"), (TALL,)),
    "lu": (lambda x: torch.linalg.lu(x.detach())[1:], (SPD,)),
    "lu_unpack without data": (
        lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x.detach()), unpack_data=False),
        (A,),
    ),
    "lu_unpack without pivots": (
        lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x.detach()), True, False),
        (A,),
    ),
    "lstsq with values": (
        lambda x, y: torch.linalg.lstsq(x.detach().mT, y.detach()[:, :2], driver="gelsd"),
        (TALL, B),
    ),
}


@pytest.fixture(autouse=True)
def never_gathered(monkeypatch):
    def refuse(func, *_):
        raise AssertionError(f"{func} ran gathered")

    monkeypatch.setattr(strategy, "_gathering_strategy", refuse)


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    func, args = VALUES[name]
    prove(func, args, meshes=[(3,), (2, 2)], most=12)


def test_gradients_of_eigenvalues():
    prove(lambda x: torch.linalg.eig(x).eigenvalues.abs(), (A,), meshes=[(3,)], most=12)


ON_A_SPLIT_BATCH = {
    "cholesky": torch.linalg.cholesky,
    "qr": torch.linalg.qr,
    "svd": torch.linalg.svd,
    "eigh": torch.linalg.eigh,
    "inv": torch.linalg.inv,
    "slogdet": torch.linalg.slogdet,
    "solve": lambda x: torch.linalg.solve(x, x),
    "lstsq": lambda x: torch.linalg.lstsq(x, x),
    "matrix_exp": torch.matrix_exp,
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, 2),
}


@pytest.mark.parametrize("name", ON_A_SPLIT_BATCH)
def test_sharded_batch_needs_no_communication(name):
    """And results keep their names."""
    expected = ON_A_SPLIT_BATCH[name](SPD)

    def program(mesh):
        x = place(mesh, SPD).redistribute(P("a"))
        with collectives() as records:
            result = ON_A_SPLIT_BATCH[name](x)
        assert not records
        if isinstance(expected, torch.Tensor):
            result = (result,)
        else:
            assert type(result) is type(expected)
        assert all(y.numel() == 0 or y.spec.dims[0] == ("a",) for y in result)

    on_mesh((2,), program)


def test_right_hand_side_may_be_sharded_by_columns():
    def program(mesh):
        x, y = place(mesh, A), place(mesh, B).redistribute(P(None, None, "a"))
        with collectives() as records:
            solved = torch.linalg.solve(x, y)
        assert not records
        torch.testing.assert_close(solved.full_tensor(), torch.linalg.solve(A, B))

    on_mesh((2,), program)
