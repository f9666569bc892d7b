"""Muon of stacks of matrices and of convolutions' weights: as `torch.optim.Muon` steps each matrix,
owners balanced over ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.optim import muon
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh

STEPS = 3
STACKS = {
    "experts": ((8, 6, 4), P("a")),
    "rows": ((5, 8, 4), P(None, "a")),
    "columns": ((3, 4, 8), P(None, None, "a")),
    "uneven experts": ((7, 4, 6), P("a", sizes={"a": (1, 4, 0, 2)})),
    "uneven rows": ((4, 7, 3), P(None, "a", sizes={"a": (3, 0, 3, 1)})),
    "fewer experts than ranks": ((2, 5, 4), P("a")),
    "replicated": ((5, 3, 4), P()),
    "layers and experts": ((2, 3, 4, 5), P(None, "a")),
    "no experts": ((0, 3, 4), P("a")),
}


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def stepped_by_torch(shape, as_matrices, **options):
    """Return a parameter whose matrices `torch.optim.Muon` has stepped one by one."""
    whole = drawn(shape, 0)
    matrices = [nn.Parameter(matrix.clone()) for matrix in as_matrices(whole)]
    optimizer = torch.optim.Muon(matrices, lr=0.1, **options) if matrices else None
    for step in range(1, STEPS + 1):
        for p, grad in zip(matrices, as_matrices(drawn(shape, step)), strict=True):
            p.grad = grad.clone()
        if optimizer is not None:
            optimizer.step()
    return torch.stack([p.detach() for p in matrices]).view(shape) if matrices else whole


def each_of_stack(x):
    return list(x.reshape(-1, *x.shape[-2:])) if x.numel() else []


def step(params, shapes, specs, **options):
    """Step parameters with the gradients that `stepped_by_torch` has."""
    optimizer = sm.optim.Muon(params, lr=0.1, **options)
    for number in range(1, STEPS + 1):
        for p, shape, spec in zip(params, shapes, specs, strict=True):
            grad = drawn(shape, number)
            p.grad = (
                grad
                if spec is None
                else sm.distribute_tensor(grad, p.mesh, spec, src_data_rank=None)
            )
        optimizer.step()
    return [
        p.detach() if spec is None else p.full_tensor().detach()
        for p, spec in zip(params, specs, strict=True)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}], ids=["default", "rms"]
)
def test_each_matrix_is_stepped_as_by_torch(options):
    shapes, specs = zip(*STACKS.values(), strict=True)

    def program(mesh):
        params = [
            sm.distribute_tensor(drawn(shape, 0), mesh, spec, src_data_rank=None).requires_grad_()
            for shape, spec in STACKS.values()
        ]
        return step(params, shapes, specs, **options)

    expected = [stepped_by_torch(shape, each_of_stack, **options) for shape in shapes]
    for found in on_mesh((4,), program):
        for name, x, y in zip(STACKS, found, expected, strict=True):
            torch.testing.assert_close(
                x, y, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_plain_stacks_are_stepped_matrix_by_matrix():
    shape = (3, 4, 5)
    (found,) = step([nn.Parameter(drawn(shape, 0))], [shape], [None])
    torch.testing.assert_close(found, stepped_by_torch(shape, each_of_stack), rtol=0, atol=0)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(None, None, "b", "a"), None], ids=str)
def test_flattened_weights_of_convolutions_are_one_matrix(spec):
    shape = (6, 4, 3, 3)
    expected = stepped_by_torch(shape, lambda x: [x.flatten(1)])

    def program(mesh):
        p = (
            drawn(shape, 0)
            if spec is None
            else sm.distribute_tensor(drawn(shape, 0), mesh, spec, src_data_rank=None)
        )
        return step(
            [nn.Parameter(p) if spec is None else p.requires_grad_()], [shape], [spec], flatten=True
        )[0]

    for found in on_mesh((2, 2), program):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("mesh_shape", "spec", "most"),
    [
        ((4,), P("a"), 4),
        ((4,), P(None, "a"), 4),
        ((4,), P(), 4),
        ((2, 2), P("a"), 4),
        ((2, 2), P("a", "b"), 4),
    ],
    ids=["experts", "rows", "replicated", "experts and replicas", "experts and rows"],
)
def test_owners_share_the_matrices_of_a_stack(mesh_shape, spec, most, monkeypatch):
    """16 experts on 4 ranks are 4 for each, whichever dim is split."""
    counts, orthogonal = {}, muon._orthogonal

    def counted(x, group):
        rank = sm.process_index()
        counts[rank] = counts.get(rank, 0) + 1
        return orthogonal(x, group)

    monkeypatch.setattr(muon, "_orthogonal", counted)

    def program(mesh):
        p = sm.distribute_tensor(
            drawn((16, 8, 4), 0), mesh, spec, src_data_rank=None
        ).requires_grad_()
        p.grad = torch.ones_like(p.detach())
        sm.optim.Muon([p]).step()

    on_mesh(mesh_shape, program)
    assert counts == dict.fromkeys(range(4), most)


@every_rank(4)
def test_experts_that_stay_on_their_rank_are_not_moved(mesh):
    p = sm.distribute_tensor(drawn((8, 6, 4), 0), mesh, P("a"), src_data_rank=None).requires_grad_()
    p.grad = torch.ones_like(p.detach())
    optimizer = sm.optim.Muon([p])
    with sm.debug.comm_budget(launches=0):
        optimizer.step()


def test_shampoo_leaves_stacks_to_adamw():
    p, matrix = nn.Parameter(torch.ones(2, 3, 4)), nn.Parameter(torch.ones(3, 4))
    groups = sm.optim.Shampoo([p, matrix]).param_groups
    assert [(group["algorithm"], len(group["params"])) for group in groups] == [
        ("shampoo", 1),
        ("adamw", 1),
    ]
    with pytest.raises(ValueError, match="is not a real matrix;"):
        sm.optim.Shampoo([{"params": [p], "algorithm": "shampoo"}])
    with pytest.raises(ValueError, match="is not a real matrix or a stack of them"):
        sm.optim.Muon([{"params": [nn.Parameter(torch.ones(3))], "algorithm": "muon"}])
